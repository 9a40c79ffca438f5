"""One training run as compare.py sees it, whoever ran it; and finding files of runs. Needs no torch."""

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.errors import UsageError


@dataclasses.dataclass(frozen=True)
class LogFacts:
    """What a log does not say itself, given by the user."""

    seq_len: int | None = None
    n_gpus: int | None = None
    hardware: str | None = None


@dataclasses.dataclass
class Record:
    """A run's figures; None where its file does not have them.

    `flop_convention` says what `mfu` means: `palm` as in docs/METRICS.md, else the suite's own.
    `marks` are the reasons why it cannot be compared like any other run.
    """

    path: str
    suite: str
    label: str
    status: str = "ok"
    hardware: str | None = None
    n_gpus: int | None = None
    model: str | None = None
    model_hash: str | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    settings: str = ""
    tokens_per_sec: float | None = None
    tokens_per_sec_per_gpu: float | None = None
    step_times_s: list[float] = dataclasses.field(default_factory=list)
    mfu: float | None = None
    tflops_per_gpu: float | None = None
    flop_convention: str | None = None
    memory_gib: float | None = None
    memory_kind: str | None = None
    tokens_per_joule: float | None = None
    usd_per_hour: float | None = None
    tdp_w: float | None = None
    losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    learning_rates: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    hyperparameters: dict[str, Any] | None = None
    marks: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def steady(times: list[float]) -> list[float]:
    """Step times without the slow ones at the start: those before the first near the median.

    For suites that time warm-up like any other step: compilation, autotuning and caches are no part of
    the speed. At most the first half is left out.
    """
    if len(times) < 3:
        return times
    limit = 1.2 * statistics.median(times)
    start = next((i for i, t in enumerate(times) if t <= limit), 0)
    return times[min(start, len(times) // 2) :]


Reader = Callable[[Path], list[Record]]


def read_records(paths: Iterable[str], say: Callable[[str], None], facts: LogFacts) -> list[Record]:
    """The runs in files and directories.

    A file that was named and is none of the known kinds is a UsageError. In a directory such a file is
    told through `say` if it could have been one (a log, a JSON with figures), else passed over.
    """
    records = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found = [r for file in discover(path) for r in _read(file, say, facts)]
            if not found:
                raise UsageError(f"{path}: holds no result, CSV, JSON or log that is known")
            records += found
        elif path.exists():
            found = _read(path, None, facts)
            records += found
        else:
            raise UsageError(f"{path}: no such file or directory")
    return records


def discover(directory: Path) -> list[Path]:
    """Files below a directory that may hold a run; of our own runs only their result.json."""
    found: list[Path] = []
    for root, directories, files in os.walk(directory):
        here = Path(root)
        if "result.json" in files:
            found.append(here / "result.json")
            directories.clear()
            continue
        directories.sort()
        own_sweep = "rows.jsonl" in files and "results.csv" in files
        for name in sorted(files):
            if own_sweep and (name != "results.csv" or (here / "runs").is_dir()):
                continue  # its runs are below, complete
            if Path(name).suffix in (".json", ".csv", ".log", ".txt", ".out", ".err"):
                found.append(here / name)
        if own_sweep and "logs" in directories:
            directories.remove("logs")
    return found


def _read(path: Path, say: Callable[[str], None] | None, facts: LogFacts) -> list[Record]:
    from bench.read_logs import read_log
    from bench.read_results import read_csv, read_json

    try:
        if path.suffix == ".json":
            return read_json(path)
        if path.suffix == ".csv":
            return read_csv(path)
        return read_log(path, facts)
    except UsageError as error:
        if say is None:
            raise
        say(str(error))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        text = f"{path}: cannot be read: {' '.join(str(error).split())[:200]}"
        if say is None:
            raise UsageError(text) from None
        say(text)
    return []
