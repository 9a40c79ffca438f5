"""Where a run starts: who may write into its directory, its attempts, and the checkpoint it goes on from."""

import dataclasses
import fcntl
import os
import platform
import shutil
import time
import uuid
from pathlib import Path
from typing import Any, TextIO

from llm_train_bench.base.errors import OwnError, UsageError
from llm_train_bench.parallel.ranks import Ranks, broadcast, on_main
from llm_train_bench.results.result_files import begin_attempt, read_result, read_steps
from llm_train_bench.results.schema import Attempt
from llm_train_bench.run.checkpoint import facts as checkpoints
from llm_train_bench.run.provenance import default_name
from llm_train_bench.settings.plan import Plan

LOCK = "run.lock"


def take_lock(directory: Path) -> TextIO:
    """The file whose lock is the right to write in a run's directory; it names this process.

    The lock ends with the file or the process. Where there are no locks, as on some network file systems,
    nobody is refused. UsageError while another process holds it.
    """
    lock = (directory / LOCK).open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise UsageError(
            f"{directory}: {lock.read() or 'another process'} writes there and is alive; end it first, or "
            "choose another --run-name"
        ) from None
    except OSError:
        pass  # this file system has no locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    return lock


@dataclasses.dataclass
class Start:
    """Where a run starts: its directory, its attempts, of which it is the last, and its checkpoint."""

    directory: Path
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    checkpoint: tuple[Path, checkpoints.Facts] | None = None
    """None where it starts at step 0."""
    notes: list[str] = dataclasses.field(default_factory=list)
    lock: TextIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What other ranks get: all except the lock, which rank 0 holds."""
        return vars(self) | {"lock": None}

    @property
    def first_step(self) -> int:
        """The first step that this attempt does."""
        return self.checkpoint[1].step if self.checkpoint else 0

    def open(self) -> None:
        """Take the directory, and clear up what attempts before this one left unfinished in it.

        Checkpoints that are newer than this attempt's are damaged: they are set aside, so that their
        steps can be saved again.
        """
        self.lock = self.lock or take_lock(self.directory)
        shutil.rmtree(self.directory / "errors", ignore_errors=True)
        for path in self.directory.glob("checkpoints/step-*.tmp"):
            shutil.rmtree(path)
        for path in checkpoints.checkpoints_at(self.directory):
            if checkpoints.step_of(path) > self.first_step:
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))

    def close(self) -> None:
        """Let others write in the directory."""
        if self.lock:
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # a forked process may have the file too
            self.lock.close()


def resolve_start(plan: Plan, ranks: Ranks) -> tuple[Plan, Start]:
    """Where this run starts, the same on every rank, and the plan of the remaining steps.

    UsageError where it cannot resume.
    """
    start = on_main(ranks, lambda: _find_start(plan))
    if (amp := broadcast(ranks, plan.work.amp)) != plan.work.amp:
        raise OwnError(f"--amp auto: rank 0 takes {amp}, this rank {plan.work.amp}; set --amp")
    if start.checkpoint and (before := start.checkpoint[1].args["amp"]) not in ("auto", amp):
        start.notes.append(f"before, --amp was {before}; now it is {amp}")
    left = dataclasses.replace(plan.schedule, start=start.first_step)
    return dataclasses.replace(plan, schedule=left), start


def _find_start(plan: Plan) -> Start:
    """Where this run starts, with the lock of a directory that it goes on in. Nothing else decides it."""
    flags = plan.args
    name = flags.run_name or default_name(plan.work.config.name, vars(flags))
    start = Start(Path(flags.output_dir) / name)
    sources = [Path(flags.resume)] if flags.resume not in (None, "auto") else []
    if flags.resume == "auto" and start.directory.exists():
        files = {path.name for path in start.directory.iterdir()}
        if files and not files & {"result.json", LOCK}:
            raise UsageError(
                f"{start.directory}: is no directory of a run; choose another --run-name"
            )
        start.lock = take_lock(start.directory)
        sources.append(start.directory)
    for source in sources:
        found = checkpoints.checkpoints_at(source)
        start.checkpoint = checkpoints.newest_good(found, start.notes)
        if start.checkpoint is None and (found or source != start.directory):
            why = f" ({start.notes[0]})" if start.notes else ""
            raise UsageError(f"--resume {source}: holds no checkpoint that can be read{why}")
    if start.checkpoint:
        checkpoints.check_same_training(start.checkpoint[1], start.checkpoint[0], plan)
    elif flags.resume:
        start.notes.append(f"no checkpoint of {name}; starts from step 0")
    if start.lock:
        _read_attempts(start)
    start.attempts.append(begin_attempt(start.first_step))
    return start


def _read_attempts(start: Start) -> None:
    """Add the attempts before this one, and what ended the last of them. A copy is a run of its own."""
    try:
        before = read_result(start.directory / "result.json")
    except (OSError, ValueError):
        return
    steps = read_steps(start.directory / "steps.jsonl")
    start.attempts, last = before.attempts, before.attempts[-1]
    last.lost_s += sum(step["step_time_s"] for step in steps if step["step"] >= start.first_step)
    last.ended = last.ended or "killed"
    last.end = last.end or max((step["at"] for step in steps), default=last.opened)
    if before.run_name == start.directory.name:
        start.run_id = before.run_id
