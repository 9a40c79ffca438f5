"""One training run as compare.py sees it, whoever ran it. Needs no torch."""

import dataclasses
import math
import statistics
from typing import Any

from bench.errors import printable


@dataclasses.dataclass(frozen=True)
class LogFacts:
    """Facts that a log does not say itself, given by the user."""

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
    resumed_from: tuple[str, int] | None = None  # name of the run before it, and first step of this


def make_printable(r: Record) -> None:
    """Take from a record's texts what a terminal obeys, in place."""
    for field in dataclasses.fields(r):
        value = getattr(r, field.name)
        if isinstance(value, str):
            setattr(r, field.name, printable(value))
    r.marks, r.notes = [printable(m) for m in r.marks], [printable(n) for n in r.notes]


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
    """Step times without the slow ones at the start: those before the first near the median.

    For suites that time warm-up like any other step: compilation, autotuning and caches are no part of
    the speed. At most the first half is left out.
    """
    if len(times) < 3:
        return times
    limit = 1.2 * statistics.median(times)
    start = next((i for i, t in enumerate(times) if t <= limit), 0)
    return times[min(start, len(times) // 2) :]
