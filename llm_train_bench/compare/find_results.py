"""Finding the files of runs, and reading each by its kind. Needs no torch."""

import collections
import contextlib
import csv
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from llm_train_bench.base.errors import UsageError
from llm_train_bench.compare.read_logs import read_lines, read_log
from llm_train_bench.compare.read_results import read_csv, read_json
from llm_train_bench.compare.records import LogFacts, Record, check_figures, make_printable
from llm_train_bench.model.json_keys import plain_file

# Errors that a file of a known kind can cause in a reader.
UNEXPECTED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
              csv.Error)  # fmt: skip


def read_records(paths: Iterable[str], say: Callable[[str], None], facts: LogFacts) -> list[Record]:
    """The runs in files and directories.

    A named file of no known kind is a UsageError. In a directory, such a file is reported by `say`
    if it could have been one (a log, a JSON with figures), and is otherwise skipped.
    """
    records: list[Record] = []
    taken: set[Path | bytes] = set()
    for name in paths:
        path = Path(name)
        if path.is_dir():
            files = discover(path)
            fresh = list(not_taken(files, taken))
            there = {str(f.resolve()) for f in files}
            # A sweep's row says nothing new if its run is there too.
            found = [
                r
                for file in fresh
                for r in _read(file, say, facts)
                if not there.intersection(_runs_of(r, file))
            ]
            if not found and (fresh or not files):
                raise UsageError(f"{path}: holds no result, CSV, JSON or log that is known")
            records += found
        elif path.exists():
            records += [r for file in not_taken([path], taken) for r in _read(file, None, facts)]
        else:
            raise UsageError(f"{path}: no such file or directory")
    return join_attempts(records)


def not_taken(files: Iterable[Path], taken: set[Path | bytes]) -> Iterator[Path]:
    """Those that were not taken before: a file that is named twice, or a copy of a result, is one run."""
    for file in files:
        marks: set[Path | bytes] = {file.resolve()}
        if file.name == "result.json" and file.is_file():  # no pipe, which would wait
            with contextlib.suppress(OSError):  # said when it is read
                marks.add(hashlib.sha256(file.read_bytes()).digest())
        if not marks & taken:
            yield file
        taken |= marks


def join_attempts(records: list[Record]) -> list[Record]:
    """Each run once: the last attempt of a lineage, with the losses of those before it.

    An attempt's steps replace what was done of them, and after them, before it. Speed is the last
    attempt's; the others end in the middle, or have other neighbours.
    """
    lineages: dict[tuple, dict[int, Record]] = {}
    known = [(r, r.lineage) for r in records if r.lineage]
    counts = collections.Counter(lineage for _, lineage in known)
    copied = {
        lineage[0] for lineage, n in counts.items() if n > 1
    }  # and resumed in two directories
    for r, (name, number) in known:
        where = Path(r.path).parent.parent if name in copied else None
        lineages.setdefault((name, where), {})[number] = r
    gone = set()
    for attempts in lineages.values():
        runs = [attempts[number] for number in sorted(attempts)]
        # One that resumed a finished run measured nothing.
        last = next((r for r in reversed(runs) if r.tokens_per_sec_per_gpu), runs[-1])
        for name in ("losses", "learning_rates"):
            joined: list[tuple[int, float]] = []
            for r in runs:
                joined = [x for x in joined if x[0] < r.first_step] + getattr(r, name)
            setattr(last, name, joined)
        if len(runs) > 1:
            last.notes.append(f"{len(attempts)} attempts of one run; figures are the last one's")
        gone |= {id(r) for r in runs if r is not last}
    return [r for r in records if id(r) not in gone]


def _runs_of(row: Record, file: Path) -> set[str]:
    """Where a sweep row's run may lie: where it was, or beside the file if that was moved since."""
    if file.suffix != ".csv":
        return set()
    places = [file.parent / "runs" / row.label / "result.json"]
    if row.result is not None:
        places.append(Path(row.result))
    return {str(place.resolve()) for place in places}


def discover(directory: Path) -> list[Path]:
    """Files below a directory that may hold a run; from our own runs only result.json."""
    found: list[Path] = []
    seen = set()
    for root, directories, files in os.walk(directory, followlinks=True):
        here = Path(root)
        if here.resolve() in seen:
            directories.clear()
            continue
        seen.add(here.resolve())
        if "lineage.json" in files:  # checkpoints
            directories.clear()
            continue
        if {"result.json", "steps.jsonl"} <= set(files):
            found.append(here / "result.json")
            directories.clear()
            continue
        directories.sort()
        own_sweep = {"rows.jsonl", "sweep.json"} & set(files)  # results.csv comes at its end
        for name in sorted(files):
            if own_sweep and name != "results.csv":
                continue
            if name in ("steps.jsonl", "sweep.json") or re.fullmatch(r"rank\d+\.txt", name):
                continue
            if Path(name).suffix in (".json", ".jsonl", ".csv", ".log", ".txt", ".out", ".err"):
                found.append(here / name)
        if own_sweep:
            directories[:] = [d for d in directories if d not in ("logs", "probes", "tensorboard")]
    return found


def _read(path: Path, say: Callable[[str], None] | None, facts: LogFacts) -> list[Record]:
    try:
        return _parse(path, facts)
    except UsageError as error:
        if say is None:
            raise
        say(str(error))
        return []


def _parse(path: Path, facts: LogFacts) -> list[Record]:
    try:
        plain_file(path)
        if path.suffix == ".json":
            records = read_json(path, facts)
        elif path.suffix == ".jsonl":
            records = read_lines(path, facts)
        elif path.suffix == ".csv":
            records = read_csv(path, facts)
        else:
            records = read_log(path, facts)
        for record in records:
            check_figures(record)
            make_printable(record)
        return records
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: is no JSON ({error}); was it cut off?") from None
    except UNEXPECTED as error:
        what = " ".join(str(error).split())[:150]
        raise UsageError(
            f"{path}: is of a known kind, but not understood: {type(error).__name__}: {what}"
        ) from None
