"""One training run as compare.py sees it, whoever ran it. Needs no torch."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.errors import UsageError, printable_data


@dataclasses.dataclass(frozen=True)
class LogFacts:
    """Facts that logs do not say themselves, given by the user: of all, or by a log's name or path."""

    seq_len: Mapping[str, int] = dataclasses.field(default_factory=dict)
    n_gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    hardware: Mapping[str, str] = dataclasses.field(default_factory=dict)
    global_batch: Mapping[str, int] = dataclasses.field(default_factory=dict)
    model: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unnamed: list[str] = dataclasses.field(default_factory=list, compare=False)
    """Logs that took the hardware said of all."""
    used: set[tuple[str, str]] = dataclasses.field(default_factory=set, compare=False)
    """Facts, and the log by whose name each was asked for."""

    def of(self, path: Path, name: str, told: Any) -> Any:
        """A fact of one log; UsageError where the log told another, or two would take one hardware."""
        given, flag = getattr(self, name), FACT_FLAGS[name]
        key = next((key for key in (str(path), path.name, path.stem) if key in given), None)
        self.used.add((name, key or ""))
        own = None if key is None else given[key]
        value = given.get("") if own is None else own
        if value is None:
            return told
        if told is not None:
            text = isinstance(value, str)
            if not (str(told).lower().startswith(value.lower()) if text else told == value):
                raise UsageError(f"--{flag} {value}: {path} says {told}; name a log: LOG=VALUE")
            return told
        if own is None and name == "hardware":
            self.unnamed.append(str(path))
            if len(self.unnamed) > 1:
                raise UsageError(
                    f"--{flag} {value}: {' and '.join(self.unnamed)} do not tell theirs; name each: "
                    "LOG=VALUE LOG=VALUE"
                )
        return value

    def refuse_unused(self) -> None:
        """UsageError for a fact of a log that is not among those read."""
        for name, flag in FACT_FLAGS.items():
            for log in getattr(self, name):
                if log and (name, log) not in self.used:
                    raise UsageError(f"--{flag} {log}=...: no log that is read has this name")


FACT_FLAGS = {
    "seq_len": "log-seq-len", "n_gpus": "log-gpus", "hardware": "log-hardware",
    "global_batch": "log-global-batch", "model": "log-model", "parameters": "log-parameters",
}  # fmt: skip


def facts_by_log(flag: str, texts: Sequence[str], kind: type) -> dict[str, Any]:
    """Values given as VALUE, of all logs (""), or LOG=VALUE; UsageError for what is none."""
    found = {}
    for text in texts:
        log, _, value = text.rpartition("=")
        try:
            found[log] = kind(value)
        except ValueError:
            found[log] = 0
        if not found[log] or (kind is not str and not 0 < found[log] < math.inf):
            what = {int: "a whole number above 0", float: "a number above 0", str: "a name"}[kind]
            raise UsageError(f"--{flag} {text}: must be {what}, or LOG=VALUE")
    return found


@dataclasses.dataclass
class Record:
    """A run's figures; None where its file does not have them.

    `flop_convention` says what `mfu` means: `palm` as in docs/METRICS.md, else the suite's own.
    `marks` are the reasons why it cannot be compared like any other run.
    """

    path: str
    suite: str
    label: str
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
    power_limit_w: float | None = None
    losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    learning_rates: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    hyperparameters: dict[str, Any] | None = None
    marks: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    arguments: dict[str, Any] | None = None  # only of our runs: training and speed flags
    result: str | None = None  # the result.json that a row of a CSV was made from
    lineage: tuple[str, int] | None = None  # of its attempts, and the number of this one
    first_step: int = 0
    goodput: float | None = None
    remarks: list[str] = dataclasses.field(
        default_factory=list
    )  # what may have changed the figures
    provenance: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # versions, commit, command
    model_told: bool = True  # or the model is called as the file is
    software: dict[str, str] | None = None  # versions that speed can depend on, our own included
    repeat_of: str | None = None  # the setting of a sweep's row
    # Of a setting (compare/pool.py): its name, its runs, and the rates of those that count.
    setting: str = ""
    runs: "list[Record]" = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)


def microseconds_per_token(r: Record) -> list[float]:
    """Each step's time per token of one GPU [us], which steps of any batch share; empty if unknown."""
    if not (r.n_gpus and r.global_batch and r.seq_len):
        return []
    return [1e6 * t * r.n_gpus / (r.global_batch * r.seq_len) for t in r.step_times_s]


def make_printable(r: Record) -> None:
    """Take from a record's texts what a terminal obeys, in place."""
    for field in dataclasses.fields(r):
        setattr(r, field.name, printable_data(getattr(r, field.name)))


POSITIVE = (
    "tokens_per_sec", "tokens_per_sec_per_gpu", "n_gpus", "seq_len", "global_batch", "mfu",
    "tflops_per_gpu", "memory_gib", "tokens_per_joule", "usd_per_hour",
)  # fmt: skip


def check_figures(r: Record) -> None:
    """ValueError for a figure that is not a number above 0, or a name that is not text."""
    figures = [(name, getattr(r, name)) for name in POSITIVE]
    figures += [("step_times", t) for t in r.step_times_s]
    for name, value in figures:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise ValueError(f"{name} is {value!r}, not a number above 0")
    for name in ("label", "hardware", "model", "settings", "suite"):
        value = getattr(r, name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} is {value!r}, not text")
    for name in ("losses", "learning_rates"):
        for _, value in getattr(r, name):
            if not isinstance(value, int | float):
                raise ValueError(f"{name} holds {value!r}, not a number")


def unfinished_loss(losses: list[tuple[int, float]]) -> list[str]:
    """A mark if the last loss is not finite; otherwise none."""
    last = losses[-1][1] if losses else None
    return ["loss not finite"] if isinstance(last, float) and not math.isfinite(last) else []


def steady(times: list[float]) -> list[float]:
    """Step times from the first on that is near the median; at most the first half is left out.

    Suites time warm-up like any other step. Compilation and caches make it slow; where steps are only
    dispatched at first (JAX), it looks fast.
    """
    if len(times) < 3:
        return times
    median = statistics.median(times)
    start = next((i for i, t in enumerate(times) if median / 2 <= t <= 1.2 * median), 0)
    return times[min(start, len(times) // 2) :]
