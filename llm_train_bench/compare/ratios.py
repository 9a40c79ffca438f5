"""Ratios to a reference, what may be compared, cost and energy. Needs no torch."""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

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

    The interval is over runs, of each ratio by itself. `answer` holds beside all others of the table.
    """

    record: Record
    group: str
    shared: str
    """What all settings of the group have in common, in words."""
    not_compared: list[str]
    """Why not: its own invalid remarks, or how it is unlike the reference."""
    reference: Record | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    answer: setting.Answer = "uncertain"
    usd_per_trillion: float | None = None
    tokens_per_joule: float | None = None
    energy: Literal["measured", "TDP"] | None = None
    days: float | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the others of its group are compared with it."""
        return self.record is self.reference

    @property
    def fewest_runs(self) -> int:
        """Runs of the side that has fewer."""
        return min(len(r.rates) for r in (self.record, self.reference) if r)

    @property
    def tested(self) -> bool:
        """Whether both sides have the runs that a verdict takes."""
        return self.interval is not None and self.fewest_runs >= setting.RUNS_FOR_A_VERDICT

    @property
    def verdict(self) -> str:
        """The ratio in words: never more certain than its interval."""
        if self.is_reference:
            return "reference"
        if self.not_compared:
            return "not compared"
        if self.ratio is None:
            return "unknown"
        if not self.tested or not self.interval:
            return f"no verdict: {self.fewest_runs} run{'s' * (self.fewest_runs > 1)}"
        low, high = self.interval
        alike = abs(self.ratio - 1) < setting.RUNS_DIFFER or low < 1 < high
        return "within noise" if alike or self.answer == "uncertain" else self.answer

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
    rows: list[Compared] = []
    for group, settings in grouped(map(_pooled, setting.repeats(records)), group_of).items():
        shared = setting.name_settings(settings)
        rows += [Compared(r, group, shared, r.invalid) for r in settings]
    called = [r for r in rows if reference in (r.record.setting, *(x.label for x in r.record.runs))]
    if reference is not None and not called:
        have = ", ".join(row.record.setting for row in rows)
        raise UsageError(
            f"--reference {reference}: no setting or run of that name; there are {have}"
        )
    for members in grouped(rows, lambda row: row.group).values():
        usable = [row for row in members if not row.not_compared and row.record.rates]
        plain = setting.plainest([row.record for row in usable or members])
        first = next((row.record for row in called if row in members), plain)
        for row in members:
            row.reference = first
            if row.is_reference:
                continue
            row.not_compared += setting.unlike(first, row.record, identical)
            if first.invalid:
                row.not_compared.append(f"the reference is invalid: {first.invalid[0]}")
            rates, base = row.record.rates, first.rates
            if not row.not_compared and rates and base:
                row.ratio = statistics.fmean(rates) / statistics.fmean(base)
                row.interval = setting.ratio_interval(rates, base)
    tested = [row for row in rows if row.tested]
    pairs = [(row.record.rates, row.reference.rates) for row in tested if row.reference]
    answers = setting.settle([(mean_of(a), mean_of(b)) for a, b in pairs])
    for row, answer in zip(tested, answers, strict=True):
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
    watts = watts or r.power_limit_w or (device and device.tdp_w)
    rate = r.tokens_per_sec_per_gpu
    if r.tokens_per_joule is not None:
        row.tokens_per_joule, row.energy = r.tokens_per_joule, "measured"
    elif rate and watts:
        row.tokens_per_joule, row.energy = rate / watts, "TDP"
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
