"""Where an attempt of a run starts: its directory, and the newest good checkpoint. Needs no torch.

A checkpoint is a directory `step-N`, whose facts.json has the checksum of every file. It gets this name
last, so what has the name is complete.
"""

import dataclasses
import json
import shutil
import time
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import ValidationError

from llm_train_bench.base.documents import index_path
from llm_train_bench.base.errors import Finished, OwnError, UsageError
from llm_train_bench.base.files import checksum, first_cause, hold_lock, sync_to_disk
from llm_train_bench.base.strict import Strict, first_problem
from llm_train_bench.model.json_files import parse_json, plain_file, plain_text
from llm_train_bench.parallel.ranks import Ranks, broadcast, on_main
from llm_train_bench.results.result_files import begin_attempt, read_result, read_steps, storable
from llm_train_bench.results.schema import Attempt, Result
from llm_train_bench.run.provenance import default_name
from llm_train_bench.settings.flags import LEARNT, flag_of, of_kind
from llm_train_bench.settings.plan import Plan

FACTS, LOCK = "facts.json", "run.lock"
# So many of the newest checkpoints are kept.
KEPT = 2


class Facts(Strict):
    """facts.json. Tensors are in the other files; dropout is a function of its seed and the step."""

    schema_version: Literal[5] = 5
    step: int
    training: dict[str, str]
    """What must stay the same (training_of)."""
    result: Result
    """Of the run until then: its config, settings and layout."""
    files: dict[str, int]
    """The CRC-32 of each."""


def commit(facts: Facts, directory: Path) -> None:
    """Write facts.json, with a checksum of its own, and give the checkpoint its final name."""
    content = storable(facts.model_dump(mode="json"))
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (directory / FACTS).write_text(json.dumps({"crc32": crc, "facts": content}), encoding="utf-8")
    for path in [*directory.iterdir(), directory]:
        sync_to_disk(path)
    directory.rename(directory.with_suffix(""))
    sync_to_disk(directory.parent)
    remove_older(directory.parent)


def read_facts(directory: Path) -> Facts:
    """The facts of a checkpoint whose files are as they were written; else ValueError or OSError."""
    content = parse_json(plain_text(directory / FACTS))
    if not isinstance(content, dict) or content.keys() != {"crc32", "facts"}:
        raise ValueError(f"{FACTS} is not of a checkpoint")
    if zlib.crc32(json.dumps(content["facts"], sort_keys=True).encode()) != content["crc32"]:
        raise ValueError(f"{FACTS} is not what was written")
    try:
        facts = Facts.model_validate(content["facts"])
    except ValidationError as error:
        raise ValueError(f"{FACTS} is of another version: {first_problem(error)}") from None
    if step_of(directory) not in (-1, facts.step):
        raise ValueError(f"it is of step {facts.step}")
    for name, crc in facts.files.items():
        if checksum(plain_file(directory / Path(name).name)) != crc:
            raise ValueError(f"{name} is not what was written")
    return facts


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint; -1 for another name."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint at a path, or those of the run there, oldest first."""
    if (path / FACTS).exists():
        return [path]
    found = [*path.glob("checkpoints/step-*"), *path.glob("step-*")]
    return sorted((p for p in found if step_of(p) >= 0), key=step_of)


def remove_older(checkpoints: Path) -> None:
    """Remove the checkpoints in a directory, except the newest ones."""
    for path in checkpoints_at(checkpoints)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def newest_good(checkpoints: Sequence[Path], refused: list[str]) -> tuple[Path, Facts] | None:
    """The last one that is as it was written; why others are not is added to `refused`."""
    for path in reversed(checkpoints):
        try:
            return path, read_facts(path)
        except (OSError, ValueError) as error:
            refused.append(f"{path} cannot be used: {first_cause(error)}")
    return None


def training_of(plan: Plan) -> dict[str, str]:
    """What must stay the same where a run goes on, by its name in messages."""
    values, work = vars(plan.args), plan.work
    names = *sorted(of_kind(LEARNT) - {"init_from"}), "n_steps", "warmup_steps", "pad_vocab"
    training = {"the model": work.config.hash} | {flag_of(n): str(values[n]) for n in names}
    training |= {"--seq-len": str(work.batch.seq_len), "--amp": work.amp}
    training["--global-bsz"] = str(work.batch.global_batch)
    files = {flag_of(name): values[name] for name in ("data", "val_data", "pack_lengths")}
    files = {name: Path(path) for name, path in files.items() if path}
    if values["pack"] and values["pack_separator"] is None:
        files |= {f"the index of {name}": index_path(path) for name, path in files.items()}
    for name, path in files.items():
        if path.is_file():
            training[name] = f"{path.stat().st_size} bytes with CRC-32 {checksum(path):08x}"
    return training


@dataclasses.dataclass
class Start:
    """Where a run starts: its directory, its attempts, of which it is the last, and its checkpoint."""

    directory: Path
    training: dict[str, str]
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    checkpoint: tuple[Path, Facts] | None = None
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
        """Take the directory; set aside what cannot be used of the attempts before this one."""
        self.take_lock()
        for path in (self.directory / "errors", *self.checkpoints.glob("step-*.tmp")):
            shutil.rmtree(path, ignore_errors=True)
        for path in checkpoints_at(self.checkpoints):
            if step_of(path) > self.first_step:
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))


def resolve_start(plan: Plan, ranks: Ranks) -> tuple[Plan, Start]:
    """Where this run starts, the same on every rank, and the plan of the remaining steps.

    UsageError where it cannot resume, Finished where nothing is left to do.
    """
    start = on_main(ranks, lambda: _find_start(plan))
    if (amp := broadcast(ranks, plan.work.amp)) != plan.work.amp:
        raise OwnError(f"--amp auto: rank 0 takes {amp}, this rank {plan.work.amp}; set --amp")
    left = dataclasses.replace(plan.schedule, start=start.first_step)
    return dataclasses.replace(plan, schedule=left), start


def _find_start(plan: Plan) -> Start:
    """Where this run starts, with the lock of a directory that it goes on in. Nothing else decides it."""
    flags = plan.args
    name = flags.run_name or default_name(plan.work.config.name, vars(flags))
    saves = flags.save_every or flags.resume
    start = Start(Path(flags.output_dir) / name, training_of(plan) if saves else {})
    if flags.init_from and (Path(flags.init_from) / FACTS).exists():
        if not newest_good([Path(flags.init_from)], start.notes):
            raise UsageError(f"--init-from {start.notes[0]}")
    goes_on = flags.resume == "auto" and start.directory.exists()
    if goes_on:
        if any(start.directory.iterdir()) and not (start.directory / LOCK).exists():
            why = "is no directory of a run; choose another --run-name"
            raise UsageError(f"{start.directory}: {why}")
        start.take_lock()
    if flags.resume:
        source = start.checkpoints if flags.resume == "auto" else Path(flags.resume)
        found = checkpoints_at(source)
        start.checkpoint = newest_good(found, start.notes)
        if not start.checkpoint and (found or flags.resume != "auto"):
            why = f" ({start.notes[0]})" if start.notes else ""
            raise UsageError(f"--resume {source}: holds no checkpoint that can be read{why}")
    if start.checkpoint:
        _check_same(start.checkpoint[1].training, start.training, start.checkpoint[0])
    elif flags.resume:
        start.notes.append(f"no checkpoint of {name}; starts from step 0")
    steps = read_steps(start.directory / "steps.jsonl") if goes_on else []
    if goes_on:
        _read_attempts(start, steps)
    lost = (step["step_time_s"] for step in steps if step["step"] >= start.first_step)
    start.attempts.append(begin_attempt(start.first_step, sum(lost)))
    return start


def _check_same(before: dict[str, str], now: dict[str, str], path: Path) -> None:
    """UsageError, by name, for whatever would make the resumed run another training (training_of)."""
    for name in before | now:
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{name} {now.get(name)}: the checkpoint {path} was trained with {before.get(name)}; "
                "give the same"
            )


def _read_attempts(start: Start, steps: list[dict[str, Any]]) -> None:
    """Add the attempts before this one. A copy is a run of its own."""
    kept = [step["step"] for step in steps if step["step"] < start.first_step]
    if kept != [*range(kept[0] if kept else 0, start.first_step)]:
        start.notes.append(f"steps.jsonl lacks steps before step {start.first_step}")
    try:
        before = read_result(start.directory / "result.json")
    except (OSError, ValueError) as error:
        if steps:
            start.notes.append(f"earlier attempts are unknown: {first_cause(error)}")
        return
    if before.status == "ok":
        what = "is finished; its result.json stays as it is"
        raise Finished(f"{start.directory}: the run {what}")
    start.attempts, last = before.attempts, before.attempts[-1]
    last.ended = last.ended or "killed"
    last.end = last.end or max([last.opened, *(step["at"] for step in steps)])
    if before.run_name == start.directory.name:
        start.run_id = before.run_id
