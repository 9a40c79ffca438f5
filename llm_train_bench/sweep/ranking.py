"""A sweep's rows as a CSV and as a ranked table. Needs no torch."""

import dataclasses
import statistics
from pathlib import Path

from llm_train_bench.base.tables import (
    grouped,
    markdown_table,
    memory_text,
    number,
    show_whole,
    write_rows,
)
from llm_train_bench.formulas.time_statistics import bootstrap_mean
from llm_train_bench.results.metrics import CSV_COLUMNS
from llm_train_bench.sweep.cell_runs import CellRow

# Grams of CO2 per kWh: the world's mean of 2024 (IEA, Electricity 2025).
GCO2_PER_KWH = 445.0


def write_csv(rows: list[CellRow], path: Path) -> None:
    """All rows, without the lists; a column for each axis.

    `kwh` is the energy of the window, `gco2` that times the grid's grams of CO2 per kWh.
    """
    rows = [{"key": row["key"]} | row["axes"] | row for row in rows]
    for row in rows:
        if joules := row.get("energy_j"):
            row |= {"kwh": joules / 3.6e6, "gco2": joules / 3.6e6 * GCO2_PER_KWH}
    names = dict.fromkeys(name for row in rows for name in row)
    last = (*CSV_COLUMNS, "kwh", "gco2", "error", "result", "command")
    names = [n for n in names if n not in (*last, "step_times_s", "axes")]
    names += [n for n in last if any(n in row for row in rows)]
    write_rows(path, rows, names)


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A setting over its repeats; rates in tokens/s. Only settings of one group are contestants."""

    group: str
    label: str
    status: str
    tokens_per_sec: float | None
    low: float | None
    high: float | None
    cv: float | None
    mfu: float | None
    memory_gib: float | None
    memory_kind: str | None


def rank(rows: list[CellRow]) -> list[Ranked]:
    """Settings of each model and length by tokens/s, best first, with 95 % intervals.

    Those that are unfit for comparison come after the others, and those that never ran last.

    Intervals are over the repeats' rates if there are three or more, or over the runs' steps.
    """
    ranked = []
    for members in grouped(rows, lambda row: row["key"].rsplit("-", 1)[0]).values():
        ok = [row for row in members if row["status"] == "ok"]
        model, length = members[0]["model"], members[0].get("seq_len")
        label = " ".join([model, *(f"{k}={v}" for k, v in members[0]["axes"].items())])
        group = model + (f" T{length}" if length else "")
        if not ok:
            ranked.append(Ranked(group, label, members[0]["status"], *[None] * 7))
            continue
        rates = [row["tokens_per_sec"] for row in ok]
        if len(rates) >= 3:
            low, high = bootstrap_mean(rates) or (None, None)
            cv = statistics.stdev(rates) / statistics.fmean(rates)
        else:
            times = [t for row in ok for t in row["step_times_s"]]
            mean = statistics.fmean(times)
            tokens = statistics.fmean(rates) * mean
            fast, slow = bootstrap_mean(times) or (None, None)
            low, high = slow and tokens / slow, tokens / fast if fast else None
            cv = statistics.stdev(times) / mean if len(times) > 1 else 0.0
        mfus = [row["mfu"] for row in ok if row.get("mfu") is not None]
        peaks = [(row.get("memory_gib"), row.get("memory_kind")) for row in ok]
        memory, kind = max(peaks, key=lambda peak: peak[0] or 0.0)
        status = "ok" if len(ok) == len(members) else f"ok {len(ok)} of {len(members)}"
        if why := next((row["unfit"] for row in ok if row.get("unfit")), None):
            status = f"unfit: {why}"
        mfu = statistics.fmean(mfus) if len(mfus) == len(ok) else None
        ranked.append(
            Ranked(group, label, status, statistics.fmean(rates), low, high, cv, mfu, memory, kind)
        )
    order = list(dict.fromkeys(r.group for r in ranked))

    def place(r: Ranked) -> tuple[int, bool, float]:
        return order.index(r.group), r.status.startswith("unfit"), -(r.tokens_per_sec or 0.0)

    return sorted(ranked, key=place)


def show_ranking(ranked: list[Ranked], directory: Path) -> None:
    """The ranked table on the screen and as Markdown in the sweep's directory."""
    table = markdown_table(
        "setting", "status", "tokens/s", "95 %", "CV", "of the best", "MFU", "memory GiB",
        left=["status"])  # fmt: skip
    first = {r.group: r for r in reversed(ranked)}
    for r in ranked:
        best = first[r.group]
        if r.tokens_per_sec is None or best.tokens_per_sec is None:
            table.add_row(r.label, r.status, *[""] * 6)
            continue
        tied = r.high is not None and best.low is not None and r.high >= best.low
        share = f"{r.tokens_per_sec / best.tokens_per_sec:.1%}"
        share += " ~" if tied and r is not best else ""
        low, high = number(r.low, ",.0f"), number(r.high, ",.0f")
        table.add_row(
            r.label, r.status, f"{r.tokens_per_sec:,.0f}", f"{low} - {high}",
            f"{r.cv:.1%}", share, number(r.mfu, ".1%"), memory_text(r.memory_gib, r.memory_kind, ".2f"),
        )  # fmt: skip
    show_whole(table)
    with (directory / "ranked.md").open("w", encoding="utf-8") as f:
        show_whole(table, f)
    print("of the best: of this model and length; ~: the interval overlaps that of the best")
    print(f"rows, CSV, table: {directory}/rows.jsonl, results.csv, ranked.md")
