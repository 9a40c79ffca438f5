"""The attempts of one training: who may save, where the next goes on, and what is kept.

All attempts of a run are one lineage, and save in one directory. Its record there says which training
it is, the number of the last attempt, and the process that holds it. An attempt starts from the newest
good checkpoint of its lineage, wherever that was saved.
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
from collections.abc import Callable, Sequence
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
from llm_train_bench.settings.flags import SaveFlags
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
        self.made = not place.exists()
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
            if self.made and self.mine is None:  # nothing came of it
                with contextlib.suppress(OSError):
                    (self.place / LOCK).unlink()
                    self.place.rmdir()
            os.close(self.file)


def launcher_of_this() -> Writer | None:
    """The agent that started this rank, if one did."""
    return this_process(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else None


def place_record(place: Path) -> PlaceRecord | None:
    """The record of a directory; None where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return PlaceRecord.model_validate_json(plain_file(place / RECORD).read_bytes())
    return None


def lineage_of(place: Path) -> Lineage | None:
    """The lineage that saved in a directory, by its record, or by the newest manifest."""
    if record := place_record(place):
        return record.lineage
    for path in reversed(manifests.committed(place)):
        with contextlib.suppress(OSError, ValueError):
            return manifests.read_manifest(path).lineage
    return None


def attempts(output_dir: Path, name: str) -> list[Path]:
    """The directories of a run and of all its restarts, in order."""
    pattern = re.compile(re.escape(name) + r"(-restart\d+)?")
    with contextlib.suppress(FileNotFoundError):
        runs = (run for run in output_dir.iterdir() if pattern.fullmatch(run.name))
        return sorted(runs, key=lambda run: (len(run.name), run.name))
    return []


def places(output_dir: Path, name: str, save_dir: str | None = None) -> list[Path]:
    """The directories in which attempts of a run saved; UsageError where one cannot be read."""
    links = [run / "checkpoints" for run in attempts(output_dir, name)]
    links += [Path(save_dir) / name] if save_dir else []
    for link in links:
        if link.is_symlink() and not link.exists():
            raise UsageError(
                f"{link}: leads to {link.resolve()}, which is not there; is its disk mounted?"
            )
    used = []
    for place in dict.fromkeys(link.resolve() for link in links):
        if lineage_of(place):
            used.append(place)
        elif (saved := manifests.committed(place)) and (
            why := failure_of(manifests.verify, saved[-1])
        ):
            raise _unreadable(place, why)
    return used


def _unreadable(place: Path, why: str | None) -> UsageError:
    return UsageError(
        f"{place}: none of its checkpoints can be read ({why}); move it away to start anew"
    )


@dataclasses.dataclass
class Attempt:
    """One attempt of a lineage: its run's directory, where it saves, and what it starts from."""

    lineage: Lineage
    directory: Path
    place: Path | None = None
    checkpoint: Path | None = None
    manifest: manifests.Manifest | None = None
    places: tuple[Path, ...] = ()
    """All directories in which its lineage saved."""
    notes: list[str] = dataclasses.field(default_factory=list)
    leases: list[Lease] = dataclasses.field(default_factory=list)


def resolve_attempt(plan: Plan, ranks: Ranks) -> tuple[Plan, Attempt]:
    """The attempt that this run is, the same on every rank, and the plan of the remaining steps.

    UsageError where it cannot resume.
    """
    name = plan.output.run_name or default_name(plan.work.config.name, vars(plan.args))
    top, leases = Path(plan.output.output_dir), []  # the leases stay with rank 0

    def check(manifest: manifests.Manifest, where: Path) -> None:
        flags = {} if plan.saving.resume_anyway else vars(plan.args)
        manifests.check_same_training(
            manifest, where, plan.work, plan.schedule.total, flags, plan.data
        )

    attempt = on_main(ranks, lambda: _begin_attempt(plan.saving, top, name, check, leases))
    attempt.leases = leases
    word = {
        "directory": str(attempt.directory.resolve()),
        "lineage": attempt.lineage.model_dump(),
        "places": list(map(str, {*attempt.places, attempt.place} - {None})),
    }
    tell_next(ranks, json.dumps(word))
    if (amp := broadcast(ranks, plan.work.amp)) != plan.work.amp:
        raise OwnError(f"--amp auto: rank 0 takes {amp}, this rank {plan.work.amp}; set --amp")
    if before := attempt.manifest:
        if (amp := before.args.get("amp", plan.work.amp)) != plan.work.amp:
            attempt.notes.append(f"before, --amp was {amp}; now it is {plan.work.amp}")
        left = dataclasses.replace(plan.schedule, start=before.step, start_sample=before.samples)
        plan = dataclasses.replace(plan, schedule=left)
    return plan, attempt


def _begin_attempt(
    saving: SaveFlags, top: Path, name: str, check: Callable[..., None], leases: list[Lease]
) -> Attempt:
    """The attempt that this run is; what it holds is added to `leases`.

    Nothing else decides where a run starts. Runs of that `name` lie in `top`. `check` refuses a
    manifest, and its path, of another training. UsageError for one that is missing or a living run's.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    restarts = int(count) if count.isdecimal() else 0
    lineage, saved_in, notes = None, [], []
    if before := word_before():
        word = json.loads(before)
        lineage = Lineage.model_validate(word["lineage"])
        top, name = Path(word["directory"]).parent, lineage.name
        saved_in = [p for p in map(Path, word["places"]) if p.is_dir()]
    elif restarts:
        if last_place := _place_of_launcher(top, saving.save_dir):
            saved_in, lineage = [last_place[0]], last_place[1]
            name = lineage.name
        else:
            notes.append(f"restart {restarts}: no attempt before it got so far as to save")
    elif saving.resume == "auto":
        saved_in = places(top, name, saving.save_dir)
    resumes = lineage is not None or saving.resume == "auto"
    with contextlib.ExitStack() as held:
        unwritable: dict[Path, OSError] = {}

        def lease(place: Path) -> None:
            try:
                leases.append(Lease(place))
                held.callback(leases[-1].release)
            except OSError as error:  # it can only be read
                unwritable[place] = error

        for place in saved_in:
            lease(place)
        known = [lineage_of(place) for place in saved_in if manifests.committed(place)]
        known = known or [lineage_of(place) for place in saved_in[-1:]]
        lineages = [lineage] if lineage else [line for line in known if line]
        if len({line.id for line in lineages}) > 1:
            raise UsageError(
                f"--resume auto: {name} is the name of several runs, in "
                f"{', '.join(map(str, saved_in))}; give --resume PATH and another --run-name"
            )
        began = command_began(started_again=bool(before or restarts))
        attempt = _next(lineages, name, top, resumes or restarts > 0, began)
        attempt.notes = notes
        attempt.places = tuple(place for place in saved_in if place not in unwritable)
        attempt.checkpoint = manifests.newest(saved_in, notes)
        damaged = manifests.candidates(saved_in) if attempt.checkpoint is None else []
        if damaged:
            raise _unreadable(damaged[0].parent, failure_of(manifests.verify, damaged[0]))
        if attempt.checkpoint is None and saving.resume not in (None, "auto"):
            attempt.checkpoint = manifests.find_checkpoint(Path(saving.resume), notes)
        elif attempt.checkpoint is None and resumes:
            notes.append(f"no checkpoint of {name}; starts from 0")
        if checkpoint := attempt.checkpoint:
            attempt.manifest = manifests.read_manifest(checkpoint)
            check(attempt.manifest, checkpoint)
        if saving.save_every and saving.save_dir:
            attempt.place = (Path(saving.save_dir) / attempt.lineage.name).resolve()
            if attempt.place not in saved_in:
                lease(attempt.place)
                if manifests.committed(attempt.place):
                    raise UsageError(
                        f"{attempt.place}: holds checkpoints of another run; choose another --save-dir "
                        "or --run-name, or go on from them with --resume auto"
                    )
        elif saving.save_every:
            last = saved_in[-1] if saved_in else (attempt.directory / "checkpoints").absolute()
            parent = checkpoint and checkpoint.parent
            attempt.place = parent if parent in saved_in else last
        if attempt.place in unwritable:
            raise unwritable[attempt.place]
        held.pop_all()
    return attempt


def _place_of_launcher(top: Path, save_dir: str | None) -> tuple[Path, Lineage] | None:
    """Where an earlier attempt of this rank's launcher saved, and its lineage."""
    paths = [*top.glob(f"*/checkpoints/{RECORD}")]
    paths += Path(save_dir).glob(f"*/{RECORD}") if save_dir else []
    for place in dict.fromkeys(path.parent.resolve() for path in paths):
        record = place_record(place)
        if record and record.launcher and record.launcher == launcher_of_this():
            return place, record.lineage
    return None


def _next(known: Sequence[Lineage], name: str, top: Path, again: bool, now: float) -> Attempt:
    """The attempt after the last of those that are known; its directory is free if it comes `again`."""
    last = max(known, key=lambda one: one.attempt, default=None)
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
    return Attempt(lineage, directory())


def open_place(attempt: Attempt) -> None:
    """Take what the attempt holds, now that its run's directory exists, and clear up in it.

    Unfinished saves go. What is newer than the checkpoint it starts from did not verify: it is set
    aside, so that its step can be saved again.
    """
    link, leases = attempt.directory / "checkpoints", attempt.leases
    if attempt.place and attempt.place not in {lease.place for lease in leases}:
        leases.append(Lease(attempt.place))
    if attempt.place and attempt.place != link.resolve():
        with contextlib.suppress(OSError):  # a file system without links
            near = attempt.place.is_relative_to(attempt.directory.parent.resolve())
            to = os.path.relpath(attempt.place, attempt.directory.resolve())
            link.symlink_to(to if near else attempt.place)
    start = attempt.manifest.step if attempt.manifest else -1
    for lease in leases:
        lease.take(attempt.lineage)
        for path in lease.place.glob(".step-*"):
            if path.is_dir():
                shutil.rmtree(path)
        for path in manifests.committed(lease.place):
            if manifests.step_of(path) > start:
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
