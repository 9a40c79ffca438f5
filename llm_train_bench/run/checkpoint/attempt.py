"""Where a run starts: its directory with the attempts in it, and the checkpoint that it goes on from."""

import dataclasses
import shutil
import time
import uuid
from pathlib import Path
from typing import Any, TextIO

from llm_train_bench.base.errors import Finished, OwnError, UsageError
from llm_train_bench.base.files import hold_lock
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.hf import Pretrained, check_pretrained
from llm_train_bench.parallel.ranks import Ranks, broadcast, on_main
from llm_train_bench.results.result_files import begin_attempt, read_result, read_steps
from llm_train_bench.results.schema import Attempt
from llm_train_bench.run.checkpoint import facts
from llm_train_bench.run.provenance import default_name
from llm_train_bench.settings.plan import Plan

LOCK = "run.lock"


@dataclasses.dataclass
class Start:
    """Where a run starts: its directory, its attempts, of which it is the last, and its checkpoint."""

    directory: Path
    training: dict[str, str]
    """What must stay the same from attempt to attempt (facts.training_of); known to rank 0."""
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    checkpoint: tuple[Path, facts.Facts] | None = None
    """None where it starts at step 0."""
    notes: list[str] = dataclasses.field(default_factory=list)
    lock: TextIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What other ranks get: all except the lock, which rank 0 holds."""
        return vars(self) | {"lock": None}

    @property
    def checkpoints(self) -> Path:
        """Where it saves."""
        return self.directory / "checkpoints"

    @property
    def first_step(self) -> int:
        """The first step that this attempt does."""
        return self.checkpoint[1].step if self.checkpoint else 0

    def take_lock(self) -> None:
        """Keep others from writing in the directory; UsageError while one does."""
        instead = "end it first, or choose another --run-name"
        self.lock = self.lock or hold_lock(self.directory / LOCK, instead)

    def open(self) -> None:
        """Take the directory, and clear up what attempts before this one left unfinished in it.

        Checkpoints that are newer than this attempt's are damaged: they are set aside, so that their
        steps can be saved again.
        """
        self.take_lock()
        for unfinished in (self.directory / "errors", *self.checkpoints.glob("step-*.tmp")):
            shutil.rmtree(unfinished, ignore_errors=True)
        for path in facts.checkpoints_at(self.checkpoints):
            if facts.step_of(path) > self.first_step:
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
        facts.remove_older(self.checkpoints)


def check_initial(config: ModelConfig, directory: str | None) -> Pretrained | None:
    """What reads each parameter from the directory of --init-from: a checkpoint, or Hugging Face files.

    None without a directory. ConfigError if something does not fit, or is missing.
    """
    if directory is None or not (Path(directory) / facts.FACTS).exists():
        return check_pretrained(config, directory)
    from llm_train_bench.run.checkpoint.parts import weights_of  # takes a second to import

    return weights_of(config, Path(directory))


def resolve_start(plan: Plan, ranks: Ranks) -> tuple[Plan, Start]:
    """Where this run starts, the same on every rank, and the plan of the remaining steps.

    UsageError where it cannot resume, Finished where nothing is left to do.
    """
    start = on_main(ranks, lambda: _find_start(plan))
    if (amp := broadcast(ranks, plan.work.amp)) != plan.work.amp:
        raise OwnError(f"--amp auto: rank 0 takes {amp}, this rank {plan.work.amp}; set --amp")
    if start.checkpoint and (before := start.checkpoint[1].args["amp"]) != amp:
        start.notes.append(f"before, --amp was {before}; now it is {amp}")
    left = dataclasses.replace(plan.schedule, start=start.first_step)
    return dataclasses.replace(plan, schedule=left), start


def _find_start(plan: Plan) -> Start:
    """Where this run starts, with the lock of a directory that it goes on in. Nothing else decides it."""
    flags = plan.args
    name = flags.run_name or default_name(plan.work.config.name, vars(flags))
    saves = flags.save_every or flags.resume
    start = Start(Path(flags.output_dir) / name, facts.training_of(plan) if saves else {})
    goes_on = flags.resume == "auto" and start.directory.exists()
    if goes_on:
        if any(start.directory.iterdir()) and not (start.directory / LOCK).exists():
            why = "is no directory of a run; choose another --run-name"
            raise UsageError(f"{start.directory}: {why}")
        start.take_lock()
    if flags.resume:
        source = start.checkpoints if flags.resume == "auto" else Path(flags.resume)
        found = facts.checkpoints_at(source)
        start.checkpoint = facts.newest_good(found, start.notes)
        if start.checkpoint:
            path, saved = start.checkpoint
            facts.check_same_training(saved.training, path, start.training)
        elif found or flags.resume != "auto":
            why = f" ({start.notes[0]})" if start.notes else ""
            raise UsageError(f"--resume {source}: holds no checkpoint that can be read{why}")
        else:
            start.notes.append(f"no checkpoint of {name}; starts from step 0")
    steps = read_steps(start.directory / "steps.jsonl") if goes_on else []
    if goes_on:
        _read_attempts(start, steps)
    lost = (step["step_time_s"] for step in steps if step["step"] >= start.first_step)
    start.attempts.append(begin_attempt(start.first_step, sum(lost)))
    return start


def _read_attempts(start: Start, steps: list[dict[str, Any]]) -> None:
    """Add the attempts before this one. A copy is a run of its own."""
    kept = [step["step"] for step in steps if step["step"] < start.first_step]
    if kept != [*range(kept[0] if kept else 0, start.first_step)]:
        start.notes.append(f"steps.jsonl lacks steps before step {start.first_step}")
    try:
        before = read_result(start.directory / "result.json")
    except (OSError, ValueError) as error:
        if steps:
            start.notes.append(f"earlier attempts are unknown: {facts.reason(error)}")
        return
    if before.status == "ok" and not start.checkpoint:  # of what training, nothing tells
        why = "holds a finished run without checkpoints; choose another --run-name"
        raise UsageError(f"{start.directory}: {why}")
    if before.status == "ok":
        raise Finished(f"{start.directory}: the run is finished; its result.json stays as it is")
    start.attempts, last = before.attempts, before.attempts[-1]
    last.ended = last.ended or "killed"
    last.end = last.end or max([last.opened, *(step["at"] for step in steps)])
    if before.run_name == start.directory.name:
        start.run_id = before.run_id
