"""One training run as compare.py sees it, of any suite. Needs no torch."""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError, printable_data
from llm_train_bench.base.hardware import device_called
from llm_train_bench.results.remarks import Remark, Remarked, drift_remark, memory_remark
from llm_train_bench.results.schema import Result

# Facts that --log supplies: the key, and its type.
FACTS: dict[str, tuple[str, Any]] = {
    "seq_len": ("seq-len", int),
    "n_gpus": ("gpus", int),
    "hardware": ("hardware", str),
    "global_batch": ("global-batch", int),
    "model": ("model", str),
    "parameters": ("parameters", float),
}


class LogFacts:
    """Facts that logs lack, by a log's name or path, "" for all; `pattern` is --log-pattern's."""

    def __init__(self, pattern: re.Pattern | None = None, **facts: Mapping[str, Any]):
        self.pattern, self.facts = pattern, facts
        self.used: set[tuple[str, str]] = set()  # facts, and the log that each was asked for

    def of(self, path: Path, name: str, in_log: Any) -> Any:
        """A fact of one log; UsageError where the log has another."""
        facts, key = self.facts.get(name, {}), FACTS[name][0]
        log = next((log for log in (str(path), path.name, path.stem) if log in facts), "")
        self.used.add((name, log))
        value = facts.get(log)
        if value is None:
            return in_log
        if in_log in (None, value) or name == "model":  # a model may have several names
            return value
        if name == "hardware" and str(in_log).lower().startswith(value.lower()):
            return in_log
        raise UsageError(f"--log {key}={value}: {path} says {in_log}; use LOG:{key}=VALUE")

    def refuse_unused(self) -> None:
        """UsageError for a fact of a log that is not among those read."""
        for name, logs in self.facts.items():
            for log in logs:
                if log and (name, log) not in self.used:
                    key = FACTS[name][0]
                    raise UsageError(f"--log {log}:{key}=...: no log of this name was read")


@dataclass
class Record(Remarked):
    """A run's figures; None where its file does not have them.

    `flop_convention` says what `mfu` means: `palm` as in docs/METRICS.md, else the suite's own.
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
    step_times_s: list[float] = field(default_factory=list)
    mfu: float | None = None
    model_tflops_per_gpu: float | None = None
    flop_convention: str | None = None
    memory_gib: float | None = None
    memory_kind: str | None = None
    tokens_per_joule: float | None = None
    usd_per_hour: float | None = None
    power_limit_w: float | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    hyperparameters: dict[str, Any] | None = None
    remarks: list[Remark] = field(default_factory=list)
    arguments: dict[str, Any] | None = None  # only of our runs: script, training and speed flags
    result: Result | None = None  # only of our runs
    steps: list[dict[str, Any]] = field(default_factory=list)
    tolerance: float | None = None  # of its setting, in a file of runs
    goodput: float | None = None
    provenance: dict[str, str] = field(default_factory=dict)  # versions, commit, command
    model_told: bool = True  # or the model is called as the file is
    # Software, environment and state of the machine, as far as speed can depend on them.
    conditions: dict[str, str] = field(default_factory=dict)
    # Of a setting (compare/ratios.py): its name, its runs, and the rates of those that count.
    setting: str = ""
    runs: "list[Record]" = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


FIGURES = [f.name for f in fields(Record) if f.type in (int | None, float | None)]
TEXTS = ("label", "hardware", "model", "settings", "suite")


def check_figures(r: Record) -> None:
    """ValueError for a bad figure or name; takes from texts what a terminal obeys, in place.

    Of a run of ours the figure goes: the rest of its file is as it should be.
    """
    figures = {name: [getattr(r, name)] for name in FIGURES if name not in ("goodput", "tolerance")}
    for name, values in (figures | {"step_times_s": r.step_times_s}).items():
        wrong = [v for v in values if v is not None and not _is_figure(v)]
        if wrong:
            why = f"{name} is {str(wrong[0])[:40]}, which no run has"
            if r.result is None:
                raise ValueError(why)
            r.remark(why, "invalid")
            setattr(r, name, [] if name == "step_times_s" else None)
    for name in TEXTS:
        if not isinstance(getattr(r, name), str | None):
            raise ValueError(f"{name} is {getattr(r, name)!r}, not text")
    for _, value in r.losses:
        if not isinstance(value, int | float):
            raise ValueError(f"losses holds {value!r}, not a number")
    for name, value in vars(r).items():
        if name not in ("result", "remarks", "runs", "steps"):  # checked, or made here
            setattr(r, name, printable_data(value))


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and 1e-15 < value < 1e18


def remark_on_figures(r: Record) -> None:
    """Add the remarks that follow from the figures of a run of others; a Result has its own."""
    last = r.losses[-1][1] if r.losses else None
    if isinstance(last, float) and not math.isfinite(last):
        r.remark("loss not finite", "invalid")
    for text, advice in drift_remark(r.step_times_s):
        r.remark(text, "disturbed", advice)
    device = device_called(r.hardware)
    doubt = "the number of GPUs, the hardware, the batch or the parameters may be wrong (--log)"
    part, highest = r.mfu or 0.0, 1.0
    if device:
        part = max(part, (r.model_tflops_per_gpu or 0.0) / device.bf16_tflops)
        lower_formats = (device.fp8_tflops or 0.0, device.fp4_tflops or 0.0)
        highest = max(1.0, *(peak / device.bf16_tflops for peak in lower_formats))
        for text, why in memory_remark(r.memory_gib, device.memory_gib):
            r.remark(text, "invalid", f"{why}; {doubt}")
    if part > highest:
        r.remark(f"faster than its peak: an MFU of {part:,.0%}", "invalid", doubt)
    elif part > 1:
        text = f"an MFU of {part:,.0%}, which only FP8 or FP4 can reach"
        r.remark(text, "disturbed", doubt)


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
