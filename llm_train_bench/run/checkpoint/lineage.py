"""The attempts of one training: who may save, where the next goes on, and what is kept.

All attempts of a run are one lineage, as their results say. They save beside the first, and an attempt
starts from the newest good checkpoint there.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any, TextIO

from llm_train_bench.base.errors import OwnError, UsageError
from llm_train_bench.parallel.ranks import Ranks, broadcast, on_main, tell_next, word_before
from llm_train_bench.results.result_files import command_began, read_result
from llm_train_bench.results.schema import Lineage
from llm_train_bench.run.checkpoint import manifest as manifests
from llm_train_bench.run.provenance import default_name
from llm_train_bench.settings.plan import Plan

LOCK = "lineage.lock"


def take_lock(place: Path) -> TextIO:
    """The file whose lock is the right to save in a directory; it names this process, which holds it.

    The lock ends with the file or the process, and no child inherits it. Where there are no locks, as on
    some network file systems, nobody is refused. UsageError while another process holds it; OSError where
    it cannot be written.
    """
    place.mkdir(parents=True, exist_ok=True)
    # A file that nothing else opens: who closes it anywhere in this process loses the lock.
    lock = (place / LOCK).open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        who = lock.read() or "another process"
        raise UsageError(
            f"{place}: another run saves there: {who} is alive; end it first, or choose another "
            "--run-name"
        ) from None
    except OSError:
        pass  # this file system has no locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    return lock


def directory_of(lineage: Lineage) -> str:
    """The name of an attempt's directory."""
    return f"{lineage.name}-restart{lineage.attempt}" if lineage.attempt else lineage.name


def attempts(output_dir: Path, name: str) -> list[Path]:
    """The directories of a run and of all its restarts, in order."""
    pattern = re.compile(re.escape(name) + r"(-restart\d+)?")
    with contextlib.suppress(FileNotFoundError):
        runs = (run for run in output_dir.iterdir() if pattern.fullmatch(run.name))
        return sorted(runs, key=lambda run: (len(run.name), run.name))
    return []


def lineage_in(run: Path) -> Lineage | None:
    """The lineage that a run's result names; None where no result can be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_result(run / "result.json").lineage
    return None


def last_attempt(output_dir: Path, name: str) -> Lineage | None:
    """The newest attempt of the run that `name` names: the run itself, or one of its attempts.

    UsageError where the attempts saved in a directory that is not there.
    """
    named = lineage_in(output_dir / name)
    if named and directory_of(named) == name:  # not a copy, which goes its own way
        name = named.name
    last, first = None, lineage_in(output_dir / name)
    for run in attempts(output_dir, name):
        link, lineage = run / "checkpoints", lineage_in(run)
        if link.is_symlink() and not link.exists():
            raise UsageError(
                f"{link}: leads to {link.resolve()}, which is not there; is its disk mounted?"
            )
        # An earlier run had this name, and its directory is gone: its restarts are not of this run.
        if lineage and lineage.name == name and lineage.id == (first or lineage).id:
            last = lineage
    return last


@dataclasses.dataclass
class Attempt:
    """One attempt of a lineage: its run's directory, and what it starts from."""

    lineage: Lineage
    directory: Path
    saves: bool
    checkpoint: Path | None = None
    manifest: manifests.Manifest | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    lock: TextIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What other ranks get: all except the lock, which rank 0 holds."""
        return vars(self) | {"lock": None}

    @property
    def place(self) -> Path:
        """Where its lineage saves."""
        return self.directory.parent / self.lineage.name / "checkpoints"


def resolve_attempt(plan: Plan, ranks: Ranks) -> tuple[Plan, Attempt]:
    """The attempt that this run is, the same on every rank, and the plan of the remaining steps.

    UsageError where it cannot resume.
    """
    attempt = on_main(ranks, lambda: _begin_attempt(plan))
    word = {"directory": str(attempt.directory.resolve()), "lineage": attempt.lineage.model_dump()}
    tell_next(ranks, json.dumps(word))
    if (amp := broadcast(ranks, plan.work.amp)) != plan.work.amp:
        raise OwnError(f"--amp auto: rank 0 takes {amp}, this rank {plan.work.amp}; set --amp")
    if before := attempt.manifest:
        if (amp := before.args.get("amp", plan.work.amp)) != plan.work.amp:
            attempt.notes.append(f"before, --amp was {amp}; now it is {plan.work.amp}")
        left = dataclasses.replace(plan.schedule, start=before.step)
        plan = dataclasses.replace(plan, schedule=left)
    return plan, attempt


def _begin_attempt(plan: Plan) -> Attempt:
    """The attempt that this run is, with the lock of the place where it saves, if that exists.

    Nothing else decides where a run starts. UsageError for a checkpoint that is missing, of another
    training, or of a run that lives.
    """
    flags, top = plan.args, Path(plan.args.output_dir)
    name = flags.run_name or default_name(plan.work.config.name, vars(flags))
    last, restarts = None, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if before := word_before():
        word = json.loads(before)
        last, top = Lineage.model_validate(word["lineage"]), Path(word["directory"]).parent
    elif restarts or flags.resume == "auto":
        last = last_attempt(top, name)
    resumes = last is not None or restarts > 0 or flags.resume == "auto"
    now = command_began(started_again=bool(before or restarts))
    if last:
        lineage = last.model_copy(update={"attempt": last.attempt + 1, "started": now})
    else:
        lineage = Lineage(id=uuid.uuid4().hex, name=name, attempt=0, began=now, started=now)
    while resumes and (top / directory_of(lineage)).exists():
        # The directory of another run, or of an attempt that ended before it wrote a result.
        lineage = lineage.model_copy(update={"attempt": lineage.attempt + 1})
    attempt = Attempt(lineage, top / directory_of(lineage), flags.save_every > 0)
    if resumes:
        _find_newest(attempt)
    if attempt.checkpoint is None and flags.resume not in (None, "auto"):
        attempt.checkpoint = manifests.find_checkpoint(Path(flags.resume), attempt.notes)
    elif attempt.checkpoint is None and resumes:
        attempt.notes.append(f"no checkpoint of {lineage.name}; starts from 0")
    if attempt.checkpoint:
        attempt.manifest = manifests.read_manifest(attempt.checkpoint)
        manifests.check_same_training(attempt.manifest, attempt.checkpoint, plan)
    return attempt


def _find_newest(attempt: Attempt) -> None:
    """Let an attempt start from the newest good checkpoint of its lineage, if it has one."""
    place = attempt.place
    other = lineage_in(place.resolve().parent) if place.is_symlink() else None
    if other and other.id != attempt.lineage.id:
        raise UsageError(
            f"{place}: leads to the checkpoints of another run; give --resume PATH and another --run-name"
        )
    if attempt.saves and place.is_dir():
        attempt.lock = take_lock(place)
    attempt.checkpoint = manifests.newest(place, attempt.notes)
    if attempt.checkpoint is None and attempt.notes:
        why = attempt.notes[0]
        raise UsageError(
            f"no checkpoint in {place} can be read ({why}); move it away to start anew"
        )


def open_place(attempt: Attempt) -> None:
    """Take the place where the attempt saves, now that its run's directory exists, and clear up in it.

    Unfinished saves go. What is newer than the checkpoint it starts from did not verify: it is set
    aside, so that its step can be saved again.
    """
    if not attempt.saves:
        return
    place, link = attempt.place, attempt.directory / "checkpoints"
    attempt.lock = attempt.lock or take_lock(place)
    if link != place:
        with contextlib.suppress(OSError):  # a file system without links
            link.symlink_to(Path("..") / attempt.lineage.name / "checkpoints")
    for path in place.glob(".step-*"):
        if path.is_dir():
            shutil.rmtree(path)
    start = attempt.manifest.step if attempt.manifest else -1
    for path in manifests.committed(place):
        if manifests.step_of(path) > start:
            path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
