"""Finding the files of runs, and reading each by its kind. Needs no torch."""

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.base.files import walk
from llm_train_bench.compare.read_logs import read_lines, read_log, read_metrics_csv
from llm_train_bench.compare.read_results import read_json
from llm_train_bench.compare.records import LogFacts, Record, check_figures, remark_on_figures
from llm_train_bench.compare.shareable import run_id
from llm_train_bench.model.json_files import FACTS, plain_file, plain_text

SUFFIXES = (".json", ".jsonl", ".csv", ".log", ".txt", ".out", ".err")
READERS = {".json": read_json, ".jsonl": read_lines, ".csv": read_metrics_csv}  # others are logs
NO_RESULT = re.compile(r"steps\.jsonl|rank\d+\.txt")
# Errors that a file of a known kind can cause in a reader.
UNEXPECTED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, csv.Error)


def read_records(paths: Iterable[str], say: Callable[[str], None], facts: LogFacts) -> list[Record]:
    """The runs in files and directories.

    A named file of no known kind is a UsageError. Those in a directory that could have been results are
    reported by `say`, on one line.
    """
    records: list[Record] = []
    taken: set[str] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"{path}: no such file or directory")
        files = discover(path) if path.is_dir() else [path]
        n_taken, found, unread = len(taken), [], {}
        for file in files:
            place = os.path.realpath(file)  # in a loop of links, files come again
            if place in taken:
                continue
            taken.add(place)
            try:
                found += _parse(file, facts)
            except UsageError as error:
                if not path.is_dir():
                    raise
                unread[file] = str(error)
        others = [str(f.relative_to(path)) for f in unread if f.name != "result.json"]
        for file, why in unread.items():
            if file.name == "result.json" or len(others) == 1:
                say(why)
        if len(others) > 1:
            names = ", ".join(others)[:300]
            say(f"{path}: {len(others)} files are no results: {names}; name one to see why")
        if not found and (len(taken) > n_taken or not files):
            raise UsageError(f"{path}: holds no result, CSV, JSON or log that is known")
        records += found
    return without_copies(records)


def without_copies(records: Sequence[Record], besides: Sequence[Record] = ()) -> list[Record]:
    """Each run once, also of those `besides`; a result.json goes before its copy in a file of runs."""

    def mark(r: Record) -> tuple | None:
        return r.result and (run_id(r.result), len(r.result.attempts), tuple(r.step_times_s))

    first: dict[tuple | None, Record] = {}
    for r in sorted([*besides, *records], key=lambda r: Path(r.path).name != "result.json"):
        first.setdefault(mark(r), r)
    return [r for r in records if r.result is None or first[mark(r)] is r]


def discover(directory: Path) -> list[Path]:
    """Files below a directory that may hold a run; from our own runs only result.json."""
    candidates: list[Path] = []
    for here, directories, files in walk(directory):
        if FACTS in files:  # a checkpoint
            directories.clear()
        elif {"result.json", "steps.jsonl"} <= set(files):
            candidates.append(here / "result.json")
            directories.clear()
        elif {"rows.jsonl", "sweep.json"} & set(files):  # a sweep
            directories[:] = [d for d in directories if d not in ("logs", "probes", "tensorboard")]
        else:
            known = [name for name in files if Path(name).suffix in SUFFIXES]
            candidates += [here / name for name in known if not NO_RESULT.fullmatch(name)]
    return candidates


def _parse(path: Path, facts: LogFacts) -> list[Record]:
    try:
        reader = READERS.get(path.suffix, read_log)
        text = plain_text(path, 1024, errors="replace") if facts.pattern else ""
        if facts.pattern and facts.pattern.search(text):
            is_json = path.suffix == ".json" and text.lstrip()[:1] in ("{", "[")
            reader = reader if is_json else read_log
        records = reader(plain_file(path), facts)
        for record in records:
            check_figures(record)
            if record.result is None:
                remark_on_figures(record)
        return records
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: is not JSON ({error}); was it cut off?") from None
    except (*UNEXPECTED, RecursionError) as error:
        raise UsageError(
            f"{path}: is of a known kind, but cannot be parsed: {type(error).__name__}: {one_line(error)}"
        ) from None
