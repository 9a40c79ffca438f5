"""Where an attempt of a run starts: its directory, and the newest good checkpoint.

A checkpoint is a directory `step-N`, whose facts.json has the checksum of every file. It gets this name
last, so what has the name is complete.
"""

import dataclasses
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import ValidationError

from llm_train_bench.base.errors import Finished, OwnError, UsageError
from llm_train_bench.base.files import checksum, first_cause, hold_lock, sync_to_disk
from llm_train_bench.base.strict import Strict, first_problem
from llm_train_bench.model.json_files import FACTS, parse_json, plain_file, plain_text
from llm_train_bench.parallel.ranks import Ranks, broadcast, on_main
from llm_train_bench.results.result_files import begin_attempt, read_result, read_steps, storable
from llm_train_bench.results.schema import Attempt, Result
from llm_train_bench.run.provenance import default_name, describe_training
from llm_train_bench.settings.plan import Plan

LOCK = "run.lock"
# What must be the same where only the weights of a checkpoint are taken.
SAME_WEIGHTS = "the model", "--pad-vocab", "--lora-rank", "--lora-targets"
KEPT = 2  # of the newest checkpoints


class Facts(Strict):
    """facts.json. Tensors are in the other files; dropout is a function of its seed and the step."""

    schema_version: Literal[5] = 5
    step: int
    training: dict[str, str]
    """What must stay the same (provenance.describe_training)."""
    result: Result
    """Of the run until then: its config, settings and layout."""
    files: dict[str, int]
    """The CRC-32 of each."""


def commit(facts: Facts, directory: Path) -> None:
    """Write facts.json, with a checksum of its own, and give the checkpoint its final name."""
    content = storable(facts.model_dump(mode="json"))
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    text = json.dumps({"crc32": crc, "facts": content})
    (directory / FACTS).write_text(text, encoding="utf-8")
    for path in [*directory.iterdir(), directory]:
        sync_to_disk(path)
    directory.rename(directory.with_suffix(""))
    sync_to_disk(directory.parent)
    remove_older(directory.parent)


def read_facts(directory: Path) -> Facts:
    """The facts of a checkpoint whose files are as they were written; else ValueError or OSError."""
    content = parse_json(plain_text(directory / FACTS))
    content = content if isinstance(content, dict) else {}
    crc = zlib.crc32(json.dumps(content.get("facts"), sort_keys=True).encode())
    if crc != content.get("crc32"):
        raise ValueError(f"{FACTS} is not what was written")
    try:
        facts = Facts.model_validate(content.get("facts"))
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


@dataclasses.dataclass
class Start:
    """Where a run starts: its directory, its attempts (it is the last), and its checkpoint."""

    directory: Path
    training: dict[str, str]
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    checkpoint: tuple[Path, Facts] | None = None
    """Where it goes on; None where it starts at step 0."""
    initial: tuple[Path, Facts] | None = None
    """Where its weights are from (--init-from)."""
    notes: list[str] = dataclasses.field(default_factory=list)
    lock: TextIO | None = None

    @property
    def first_step(self) -> int:
        """The first step that this attempt runs."""
        return self.attempts[-1].first_step

    def __getstate__(self) -> dict[str, Any]:
        """What other ranks get: all except the lock, which rank 0 holds."""
        return vars(self) | {"lock": None}


def resolve_start(plan: Plan, ranks: Ranks) -> Start:
    """Where this run starts, the same on every rank.

    UsageError where it cannot resume, Finished where nothing is left to do.
    """
    start = on_main(ranks, lambda: _find_start(plan))
    if (amp := broadcast(ranks, plan.work.amp)) != plan.work.amp:
        raise OwnError(f"--amp auto: rank 0 takes {amp}, this rank {plan.work.amp}; set --amp")
    return start


def _find_start(plan: Plan) -> Start:
    """Where this run starts, with the lock of a directory that it goes on in. Nothing else decides it."""
    flags = plan.args
    name = flags.run_name or default_name(plan.work.config.name, vars(flags))
    initial = flags.init_from if Path(flags.init_from or "", FACTS).exists() else None
    describes = flags.save_every or flags.resume or initial
    start = Start(Path(flags.output_dir) / name, describe_training(plan) if describes else {})
    goes_on = flags.resume == "auto" and start.directory.exists()
    if goes_on:
        names = {path.name for path in start.directory.iterdir()}
        if names and not names & {LOCK, "result.json", "checkpoints", "errors"}:
            why = "is not the directory of a run; choose another --run-name"
            raise UsageError(f"{start.directory}: {why}")
        start.lock = hold_lock(start.directory / LOCK, "--run-name")
    first_step = _find_checkpoint(start, flags.resume) if flags.resume else 0
    if start.checkpoint and not plan.schedule.total:
        raise UsageError("--export with --init-from CHECKPOINT only converts; leave one out")
    if initial and not start.checkpoint:
        start.initial = _newest_same([Path(initial)], start, SAME_WEIGHTS)
        if not start.initial:
            raise UsageError(f"--init-from {start.notes[-1]}")
    steps = read_steps(start.directory / "steps.jsonl") if goes_on else []
    steps = [step for step in steps if {"at", "step_time_s"} <= step.keys()]
    if goes_on:
        _read_attempts(start, steps, first_step)
    if start.attempts and start.attempts[0].first_step > first_step:
        why = "and has no checkpoint of its own; choose another --run-name"
        raise UsageError(f"{start.directory}: began in the middle of another run, {why}")
    lost = (step["step_time_s"] for step in steps if step["step"] >= first_step)
    start.attempts.append(begin_attempt(first_step, sum(lost)))
    return start


def _find_checkpoint(start: Start, resume: str) -> int:
    """Find the checkpoint to resume from; its step, or 0 if there is none yet."""
    source = start.directory / "checkpoints" if resume == "auto" else Path(resume)
    if os.path.lexists(source):
        next(source.iterdir(), None)  # or what cannot be read would seem empty
    found = checkpoints_at(source)
    start.checkpoint = _newest_same(found, start)
    if start.checkpoint:
        return start.checkpoint[1].step
    if found or resume != "auto":
        why = f" ({start.notes[0]})" if start.notes else ""
        raise UsageError(f"--resume {source}: holds no checkpoint that can be read{why}")
    start.notes.append(f"no checkpoint of {start.directory.name}; starts from step 0")
    return 0


def _newest_same(
    paths: Sequence[Path], start: Start, names: Iterable[str] = ()
) -> tuple[Path, Facts] | None:
    """The newest good checkpoint; UsageError if it was trained with others of these names, or of all."""
    if (found := newest_good(paths, start.notes)) is None:
        return None
    before, now = found[1].training, start.training
    for what in names or before | now:
        if before.get(what) != now.get(what):
            why = f"the checkpoint {found[0]} was trained with {before.get(what)}; give the same"
            raise UsageError(f"{what} {now.get(what)}: {why}, or start from an export of it")
    return found


def _read_attempts(start: Start, steps: list[dict[str, Any]], first_step: int) -> None:
    """Add the attempts before this one. A copy is a run of its own."""
    kept = [step["step"] for step in steps if step["step"] < first_step]
    if kept != [*range(kept[0] if kept else 0, first_step)]:
        start.notes.append(f"steps.jsonl lacks steps before step {first_step}")
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
