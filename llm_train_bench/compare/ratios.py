"""Ratios to a reference, what may be compared, cost and energy. Needs no torch."""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import device_called, find_hardware
from llm_train_bench.base.tables import grouped
from llm_train_bench.compare import setting
from llm_train_bench.compare.records import Record
from llm_train_bench.formulas.time_statistics import mean_of
from llm_train_bench.results.metrics import MEANS


@dataclasses.dataclass
class Compared:
    """A setting beside the reference of its group; ratios are of tokens/s per GPU, above 1 is faster.

    Intervals are over runs, of each ratio by itself. `answer` holds beside all others of the table.
    """

    record: Record
    group: str
    shared: str = ""
    """What all settings of the group have in common, in words."""
    is_reference: bool = False
    not_compared: list[str] = dataclasses.field(default_factory=list)
    """Why not: its own invalid remarks, or how it is unlike the reference."""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    answer: setting.Answer = "uncertain"
    usd_per_trillion: float | None = None
    tokens_per_joule: float | None = None
    energy_measured: bool = False
    days: float | None = None
    runs_of_reference: int = 0

    @property
    def enough_runs(self) -> bool:
        """Whether both sides have the runs that a verdict takes."""
        return min(len(self.record.rates), self.runs_of_reference) >= setting.RUNS_FOR_A_VERDICT

    @property
    def verdict(self) -> str:
        """The ratio in words: never more certain than its interval."""
        if self.is_reference:
            return "reference"
        if self.not_compared:
            return "not compared"
        if self.ratio is None:
            return "unknown"
        if not self.enough_runs or self.ratio_low is None:
            few = min(len(self.record.rates), self.runs_of_reference)
            return f"no verdict: {few} run{'s' * (few > 1)}"
        alike = abs(self.ratio - 1) < setting.RUNS_DIFFER
        if (
            self.answer == "uncertain"
            or alike
            or self.ratio_low < 1 < (self.ratio_high or math.inf)
        ):
            return "within noise"
        return self.answer

    @property
    def remarks(self) -> list[str]:
        """What may have changed its figures, and what else its ratio contains."""
        settings, texts = self.record.arguments or {}, self.record.texts("disturbed")
        if self.ratio and settings.get("use_fp8") and settings.get("fp8_backend") == "te":
            without = "--reference a run with --linear te"
            texts.append(f"the ratio has Transformer Engine's fused norms too; {without}")
        return texts


@dataclasses.dataclass(frozen=True)
class Prices:
    """US$ per GPU-hour and W by name of the hardware, from flags or an experiment file."""

    usd_per_hour: Mapping[str, float]
    tdp_w: Mapping[str, float]


def compare(
    records: list[Record],
    prices: Prices,
    tokens: float | None,
    reference: str | None = None,
    identical: bool = False,
) -> list[Compared]:
    """Settings in groups of one model and length, each against the plainest that can be compared.

    `reference` names another: a setting, or one of its runs. With `identical`, hyperparameters that only
    concern speed must agree too.
    """
    names: dict[str, str | None] = {}  # one for each model: a file of runs does not tell all
    for r in records:
        r.model = names.setdefault(r.model_hash, r.model) if r.model_hash else r.model
    settings = map(_pooled, setting.repeats(records))
    rows = [Compared(r, group_of(r), not_compared=r.invalid) for r in settings]
    groups = grouped(rows, lambda row: row.group)
    for members in groups.values():
        shared = setting.name_settings([row.record for row in members])
        for row in members:
            row.shared = shared
    called = [r for r in rows if reference in (r.record.setting, *(x.label for x in r.record.runs))]
    if reference is not None and not called:
        have = ", ".join(row.record.setting for row in rows)
        raise UsageError(
            f"--reference {reference}: no setting or run of that name; there are {have}"
        )
    for members in groups.values():
        usable = [row for row in members if not row.not_compared and row.record.rates]
        plain = setting.plainest([row.record for row in usable or members])
        plainest = [row for row in members if row.record is plain]
        first = next(row for row in called + plainest if row in members)
        first.is_reference = True
        for row in members:
            if row is not first:
                row.runs_of_reference = len(first.record.rates)
                row.not_compared = row.not_compared + setting.unlike(
                    first.record, row.record, identical
                )
                if first.record.invalid:
                    row.not_compared.append(f"the reference is invalid: {first.record.invalid[0]}")
                rates, base = row.record.rates, first.record.rates
                if not row.not_compared and rates and base:
                    row.ratio = statistics.fmean(rates) / statistics.fmean(base)
                    row.ratio_low, row.ratio_high = setting.ratio_interval(rates, base) or (
                        None,
                        None,
                    )
    references = {row.group: row.record for row in rows if row.is_reference}
    tested = [row for row in rows if row.ratio_low is not None and row.enough_runs]
    pairs = [(mean_of(x.record.rates), mean_of(references[x.group].rates)) for x in tested]
    for row, answer in zip(tested, setting.settle(pairs), strict=True):
        row.answer = answer
    for row in rows:
        _fill_cost(row, prices, tokens)
    return rows


def group_of(r: Record) -> str:
    """Runs with the same model name and sequence length are a group."""
    name = (r.model or "unknown model").lower()
    return f"{name} T{r.seq_len}" if r.seq_len else name


def _fill_cost(row: Compared, prices: Prices, tokens: float | None) -> None:
    r, device = row.record, device_called(row.record.hardware)
    # As the run names its hardware, or as hardware.json does.
    names = r.hardware or "", device.name if device else ""
    tables = prices.usd_per_hour, prices.tdp_w
    usd, watts = (table.get(names[0]) or table.get(names[1]) for table in tables)
    price = usd or r.usd_per_hour or (device and device.usd_per_hour)
    rate = r.tokens_per_sec_per_gpu
    row.tokens_per_joule, row.energy_measured = r.tokens_per_joule, r.tokens_per_joule is not None
    watts = watts or r.power_limit_w or (device and device.tdp_w)
    if row.tokens_per_joule is None and rate and watts:
        row.tokens_per_joule = rate / watts
    if rate and price:
        row.usd_per_trillion = price / 3600 / rate * 1e12
    if tokens and r.tokens_per_sec:
        row.days = tokens / r.tokens_per_sec / 86400


def prices_of(
    machines: Mapping[str, Any], usd_per_hour: Sequence[str], records: Sequence[Record]
) -> Prices:
    """Prices and power limits of an experiment's machines; prices of the flag override them.

    A machine has `usd_per_hour` and `tdp_w`. UsageError for a flag's price of hardware that no run has.
    """
    usd = {name: m.usd_per_hour for name, m in machines.items() if m.usd_per_hour}
    watts = {name: m.tdp_w for name, m in machines.items() if m.tdp_w}
    names = {r.hardware for r in records if r.hardware}
    names |= {h.name for r in records if (h := device_called(r.hardware))}
    for text in usd_per_hour:
        name, equals, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not equals or not 0 < number < math.inf:
            raise UsageError(f"--usd-per-hour {text}: must be HARDWARE=NUMBER above 0")
        with contextlib.suppress(UsageError):  # or it is the user's own machine
            name = find_hardware(name).name
        if name not in names | machines.keys():
            have = ", ".join(sorted(names)) or "none that is known"
            raise UsageError(f"--usd-per-hour {text}: the runs' hardware is {have}")
        usd[name] = number
    return Prices(usd, watts)


def _pooled(runs: list[Record]) -> Record:
    """One record of a setting: means over its runs, the most memory of any, all step times.

    An invalid run is left out where others are not, and a remark says so.
    """
    usable = [r for r in runs if not r.invalid and r.tokens_per_sec_per_gpu]
    chosen = usable or runs[:1]
    most = max(chosen, key=lambda r: r.memory_gib or 0.0)
    means = {}
    for figure in (*MEANS, "usd_per_hour"):
        values = [value for r in chosen if (value := getattr(r, figure)) is not None]
        means[figure] = statistics.fmean(values) if values else None
    if len({r.result.device.peak_bf16_tflops for r in chosen if r.result and r.mfu}) > 1:
        means["mfu"] = None  # shares of different peaks
    # One of a kind: drift, busy CPU, stolen CPU.
    remarks = {(x.kind, x.text.rpartition(" ")[0] or x.text): x for r in chosen for x in r.remarks}
    pooled = dataclasses.replace(
        chosen[0],
        **means,
        memory_gib=most.memory_gib,
        memory_kind=most.memory_kind,
        step_times_s=[t for r in chosen for t in r.step_times_s],
        remarks=list(remarks.values()),
        runs=runs,
        rates=[r.tokens_per_sec_per_gpu for r in usable],
    )
    left_out = [f"{r.label} ({'; '.join(r.invalid)})" for r in runs if usable and r.invalid]
    if left_out:
        text = f"{len(left_out)} of {len(runs)} runs left out: {', '.join(left_out)}"
        pooled.remark(text, "disturbed")
    return pooled
