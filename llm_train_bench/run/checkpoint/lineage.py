"""The attempts of one training: who may save, where the next goes on, and what is kept.

All attempts of a run are one lineage, and save in one directory. Its record there says which training
it is, the number of the last attempt, and the process that holds it. An attempt starts from the newest
good checkpoint of its lineage.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import threading
import time
import uuid
from pathlib import Path

from llm_train_bench.base.errors import OwnError, UsageError
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.strict import Strict
from llm_train_bench.model.json_keys import plain_file
from llm_train_bench.parallel.ranks import Ranks, broadcast, on_main, tell_next, word_before
from llm_train_bench.results.console import say
from llm_train_bench.results.result_files import command_began, this_process
from llm_train_bench.results.schema import Lineage, Writer
from llm_train_bench.run.checkpoint import manifest as manifests
from llm_train_bench.run.checkpoint.durable import failure_of
from llm_train_bench.run.provenance import default_name
from llm_train_bench.settings.plan import Plan

RECORD, LOCK = "lineage.json", "lineage.lock"
# A holder touches its record so often [s]; from another host it counts as gone after STALE_S.
RENEWED_S, STALE_S = 10.0, 60.0


class PlaceRecord(Strict):
    """A directory's lineage, the process that saves there now, if one does, and its launcher."""

    lineage: Lineage
    holder: Writer | None
    launcher: Writer | None = None


class Lease:
    """The right of one process to save in a directory.

    On one machine the kernel's lock tells whether its holder lives: it ends with the process, and no
    child inherits it. From another machine, or without locks, only time tells.
    """

    def __init__(self, place: Path):
        """UsageError while another process holds it; OSError where it cannot be written.

        Waits up to STALE_S to see whether a holder on another machine still lives.
        """
        place.mkdir(parents=True, exist_ok=True)
        self.place, self.ended, self.mine = place, threading.Event(), None
        # A file that nothing else opens: who closes it anywhere in this process loses the lock.
        self.file = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._refuse_living()
        except BaseException:
            os.close(self.file)
            raise

    def _refuse_living(self) -> None:
        locked = True
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            locked = False
        except OSError:
            locked = None  # this file system has no locks
        record, here = place_record(self.place), this_process()
        holder = record.holder if record else None
        # One kernel has one table of locks, whatever its containers are called.
        same = holder and (holder.boot or holder.host) == (here.boot or here.host)
        if locked is not False and (holder is None or (same and locked) or not self._renewed()):
            return
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        raise UsageError(
            f"{self.place}: another run saves there: {who} is alive; end it first, or choose another "
            "--run-name"
        )

    def _renewed(self) -> bool:
        """Whether the record is touched before it counts as given up, by the file system's clock."""
        touched = (self.place / RECORD).stat().st_mtime
        say(f"{self.place}: waits up to {STALE_S:g} s for a sign of the run that saved there")
        while True:
            os.utime(self.file)
            if os.fstat(self.file).st_mtime - touched > STALE_S:
                return False
            time.sleep(0.2)
            if (self.place / RECORD).stat().st_mtime != touched:
                return True

    def take(self, lineage: Lineage) -> None:
        """Record that this process saves here from now on, as an attempt of a lineage."""
        holder, launcher = this_process(), launcher_of_this()
        self.mine = PlaceRecord(lineage=lineage, holder=holder, launcher=launcher)
        write_whole(self.place / RECORD, self.mine.model_dump_json())
        threading.Thread(target=self._renew, daemon=True).start()

    def _renew(self) -> None:
        while not self.ended.wait(RENEWED_S):
            with contextlib.suppress(OSError):
                os.utime(self.place / RECORD)

    def held(self) -> bool:
        """Whether no other process has taken it since, as after a long sleep of this machine."""
        return place_record(self.place) == self.mine

    def release(self) -> None:
        """Let another process save here at once."""
        if not self.ended.is_set():
            self.ended.set()
            with contextlib.suppress(OSError):  # gone, or full
                if self.mine and self.held():
                    record = self.mine.model_copy(update={"holder": None})
                    write_whole(self.place / RECORD, record.model_dump_json())
            os.close(self.file)


def launcher_of_this() -> Writer | None:
    """The agent that started this rank, if one did."""
    return this_process(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else None


def place_record(place: Path) -> PlaceRecord | None:
    """The record of a directory; None where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return PlaceRecord.model_validate_json(plain_file(place / RECORD).read_bytes())
    return None


def attempts(output_dir: Path, name: str) -> list[Path]:
    """The directories of a run and of all its restarts, in order."""
    pattern = re.compile(re.escape(name) + r"(-restart\d+)?")
    with contextlib.suppress(FileNotFoundError):
        runs = (run for run in output_dir.iterdir() if pattern.fullmatch(run.name))
        return sorted(runs, key=lambda run: (len(run.name), run.name))
    return []


def place_of(output_dir: Path, name: str) -> Path | None:
    """The directory in which the attempts of a run saved, if they did.

    UsageError where a link leads nowhere, or attempts of several runs saved.
    """
    links = [run / "checkpoints" for run in attempts(output_dir, name)]
    for link in links:
        if link.is_symlink() and not link.exists():
            raise UsageError(
                f"{link}: leads to {link.resolve()}, which is not there; is its disk mounted?"
            )
    places = list(dict.fromkeys(link.resolve() for link in links))
    used = [place for place in places if manifests.committed(place)]
    used = used or [place for place in places if place_record(place)][-1:]
    if len(used) > 1:
        raise UsageError(
            f"--resume auto: {name} is the name of several runs, in {', '.join(map(str, used))}; give "
            "--resume PATH and another --run-name"
        )
    return used[0] if used else None


@dataclasses.dataclass
class Attempt:
    """One attempt of a lineage: its run's directory, and what it starts from."""

    lineage: Lineage
    directory: Path
    place: Path
    """Where its lineage saves."""
    saves: bool
    checkpoint: Path | None = None
    manifest: manifests.Manifest | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    lease: Lease | None = None
    """The right to save there; only rank 0 has one."""


def resolve_attempt(plan: Plan, ranks: Ranks) -> tuple[Plan, Attempt]:
    """The attempt that this run is, the same on every rank, and the plan of the remaining steps.

    UsageError where it cannot resume.
    """
    leases: list[Lease] = []  # of rank 0, and not to be sent to others
    attempt = on_main(ranks, lambda: _begin_attempt(plan, leases))
    attempt.lease = leases[0] if leases else None
    word = {
        "directory": str(attempt.directory.resolve()),
        "lineage": attempt.lineage.model_dump(),
        "place": str(attempt.place),
    }
    tell_next(ranks, json.dumps(word))
    if (amp := broadcast(ranks, plan.work.amp)) != plan.work.amp:
        raise OwnError(f"--amp auto: rank 0 takes {amp}, this rank {plan.work.amp}; set --amp")
    if before := attempt.manifest:
        if (amp := before.args.get("amp", plan.work.amp)) != plan.work.amp:
            attempt.notes.append(f"before, --amp was {amp}; now it is {plan.work.amp}")
        left = dataclasses.replace(plan.schedule, start=before.step)
        plan = dataclasses.replace(plan, schedule=left)
    return plan, attempt


def _begin_attempt(plan: Plan, leases: list[Lease]) -> Attempt:
    """The attempt that this run is; the lease that it takes, if any, is added to `leases`.

    Nothing else decides where a run starts. UsageError for a checkpoint that is missing, of another
    training, or of a run that lives.
    """
    saving, count = plan.args, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = plan.args.run_name or default_name(plan.work.config.name, vars(plan.args))
    top, restarts = Path(plan.args.output_dir), int(count) if count.isdecimal() else 0
    last, place, notes = None, None, []
    if before := word_before():
        word = json.loads(before)
        last = Lineage.model_validate(word["lineage"])
        top, place = Path(word["directory"]).parent, Path(word["place"])
        place = place if place.is_dir() else None  # it did not get so far
    elif restarts:
        place, last = _place_of_launcher(top)
        if last is None:
            notes.append(f"restart {restarts}: no attempt before it got so far as to save")
    elif saving.resume == "auto":
        place = place_of(top, name)
    name = last.name if last else name
    resumes = last is not None or saving.resume == "auto"
    try:
        if place:
            # Checkpoints that can only be read are good enough for a run that saves none.
            with contextlib.nullcontext() if saving.save_every else contextlib.suppress(OSError):
                leases.append(Lease(place))
        checkpoint = manifests.newest(place, notes) if place else None
        if place and checkpoint is None and (damaged := manifests.committed(place)):
            why = failure_of(manifests.verify, damaged[-1])
            raise UsageError(
                f"{place}: none of its checkpoints can be read ({why}); move it away to start anew"
            )
        if checkpoint is None and saving.resume not in (None, "auto"):
            checkpoint = manifests.find_checkpoint(Path(saving.resume), notes)
        elif checkpoint is None and resumes:
            notes.append(f"no checkpoint of {name}; starts from 0")
        manifest = None
        if checkpoint:
            manifest = manifests.read_manifest(checkpoint)
            manifests.check_same_training(manifest, checkpoint, plan)
        if place and last is None:
            record = place_record(place)
            last = record.lineage if record else manifest and manifest.lineage
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    began = command_began(started_again=bool(before or restarts))
    lineage, directory = _next(last, name, top, resumes or restarts > 0, began)
    place = place or (directory / "checkpoints").absolute()
    return Attempt(lineage, directory, place, saving.save_every > 0, checkpoint, manifest, notes)


def _place_of_launcher(top: Path) -> tuple[Path, Lineage] | tuple[None, None]:
    """Where an earlier attempt of this rank's launcher saved, and its lineage."""
    for path in top.glob(f"*/checkpoints/{RECORD}"):
        record = place_record(path.parent)
        if record and record.launcher and record.launcher == launcher_of_this():
            return path.parent.resolve(), record.lineage
    return None, None


def _next(
    last: Lineage | None, name: str, top: Path, again: bool, now: float
) -> tuple[Lineage, Path]:
    """The attempt after the last that is known, and its directory, which is free if it comes `again`."""
    if last and (top / name / "checkpoints").is_symlink():  # the name is a later attempt's
        name = last.name
    number = last.attempt + 1 if last else 0

    def directory() -> Path:
        return top / (f"{name}-restart{number}" if number else name)

    while again and directory().exists():  # of an attempt that did not come so far as to save
        number += 1
    if last and last.name == name:
        lineage = last.model_copy(update={"attempt": number, "started": now})
    else:  # the first; or a copy under another name goes its own way
        lineage = Lineage(id=uuid.uuid4().hex, name=name, attempt=number, began=now, started=now)
    return lineage, directory()


def open_place(attempt: Attempt) -> None:
    """Take the place where the attempt saves, now that its run's directory exists, and clear up in it.

    Unfinished saves go. What is newer than the checkpoint it starts from did not verify: it is set
    aside, so that its step can be saved again.
    """
    link, place = attempt.directory / "checkpoints", attempt.place
    if attempt.saves and not attempt.lease:
        attempt.lease = Lease(place)
    if attempt.saves and place != link.resolve():
        with contextlib.suppress(OSError):  # a file system without links
            link.symlink_to(os.path.relpath(place, attempt.directory.resolve()))
    if not attempt.lease:
        return
    start = attempt.manifest.step if attempt.manifest else -1
    attempt.lease.take(attempt.lineage)
    for path in place.glob(".step-*"):
        if path.is_dir():
            shutil.rmtree(path)
    for path in manifests.committed(place):
        if manifests.step_of(path) > start:
            path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
