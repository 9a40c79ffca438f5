"""A comparison as tables on the screen, in words, as CSV and as JSON. Needs no torch."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench import __version__
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.redaction import shown_path, shown_text
from llm_train_bench.base.tables import grouped, markdown_table, number, short, write_rows
from llm_train_bench.compare.ratios import Compared
from llm_train_bench.compare.records import Record
from llm_train_bench.compare.scaling import scaling
from llm_train_bench.compare.setting import RUNS_FOR_A_VERDICT, TABLE_ERROR, settle
from llm_train_bench.formulas.time_statistics import mean_of
from llm_train_bench.results.metrics import METRICS, RUN_COLUMNS, metric_text
from llm_train_bench.results.result_files import now

# Grams of CO2 per kWh: the world's mean of 2024 (IEA, Electricity 2025).
GCO2_PER_KWH = 445.0
# Values of an origin.
MOST_VALUES = 8
# Ratios from this on, and below its inverse, are factors and not per cent.
FACTOR = 1.5


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a comparison: its head, the fact of `row_facts` that it sorts by, and its text."""

    head: str
    fact: str
    text: Callable[[Compared], str]
    words: bool = False
    """Aligned left."""


def _metric(name: str) -> Column:
    """The column of a metric, by the registry."""

    def text(row: Compared) -> str:
        return metric_text(name, getattr(row.record, name)) + _counted(row, name)

    return Column(METRICS[name].column, name, text)


def _counted(row: Compared, name: str) -> str:
    """What tells how a rate was counted, beside our own way against the bf16 peak."""
    if name not in ("mfu", "model_tflops_per_gpu") or getattr(row.record, name) is None:
        return ""
    fp8 = name == "mfu" and (row.record.arguments or {}).get("use_fp8")
    return "*" if counted_otherwise(row.record) else " of bf16 peak" if fp8 else ""


def ratio_text(row: Compared) -> str:
    """The speed beside the reference's: per cent of change, or a factor where that is 1.5 or more."""
    if row.is_reference or row.ratio is None:
        return "1" if row.is_reference else "unknown"
    wide = None if row.interval is None else row.interval[1] - row.ratio
    if 1 / FACTOR < row.ratio < FACTOR:
        around = "" if wide is None else f" ± {100 * wide:.1f}"
        return f"{100 * (row.ratio - 1):+.1f}{around} %"
    digits = 2 if row.ratio > 1 else 3
    return f"{row.ratio:.{digits}f}x" + ("" if wide is None else f" ± {wide:.{digits}f}")


def _memory(row: Compared) -> str:
    kind = row.record.memory_kind
    known = kind if row.record.memory_gib and kind not in (None, "allocated") else ""
    return f"{number(row.record.memory_gib, '.1f')} {known}".strip()


def _energy(row: Compared) -> str:
    estimated = " (TDP)" if row.energy == "TDP" else ""
    return metric_text("tokens_per_joule", row.tokens_per_joule) + estimated


def _verdict(row: Compared) -> str:
    return row.verdict + (f": {'; '.join(row.not_compared)}" if row.not_compared else "")


COLUMNS = (
    Column("setting", "setting", lambda row: row.record.setting, words=True),
    _metric("tokens_per_sec_per_gpu"),
    Column("to reference", "ratio", ratio_text),
    Column("verdict", "verdict", _verdict, words=True),
    Column("memory GiB", "memory_gib", _memory),
    _metric("model_tflops_per_gpu"),
    _metric("mfu"),
    Column("US$/T tokens", "usd_per_trillion_tokens", lambda r: number(r.usd_per_trillion, ",.0f")),
    Column(METRICS["tokens_per_joule"].column, "tokens_per_joule", _energy),
    _metric("goodput"),
    Column("days", "days", lambda row: number(row.days, ",.1f")),
    Column("runs", "runs", lambda row: str(len(row.record.rates) or len(row.record.runs))),
    Column("hardware", "hardware", lambda row: row.record.hardware or "unknown", words=True),
    Column("devices", "n_gpus", lambda row: number(row.record.n_gpus, "d")),
    Column("remarks", "remarks", lambda row: "; ".join(row.remarks), words=True),
)


def columns_of(members: Sequence[Compared]) -> list[Column]:
    """The columns with a known value in a group; the title has the machine that all share."""
    machines = {(row.record.hardware, row.record.n_gpus) for row in members}
    in_title = ("hardware", "n_gpus") if members[0].shared and len(machines) == 1 else ()
    return [
        c
        for c in COLUMNS
        if c.fact == "tokens_per_sec_per_gpu"
        or (c.fact not in in_title and any(c.text(r) not in ("unknown", "") for r in members))
    ]


def counted_otherwise(r: Record) -> bool:
    """Whether its TFLOP/s or MFU are figures of another suite, which counted FLOPs in its own way."""
    return bool((r.mfu or r.model_tflops_per_gpu) and r.flop_convention != "palm")


def by_speed(row: Compared) -> tuple[bool, float]:
    """Order of a group's rows: the reference first, then the fastest."""
    return not row.is_reference, -(row.record.tokens_per_sec_per_gpu or 0.0)


def show_comparison(rows: list[Compared]) -> None:
    """The tables on the screen, and below each what it shows."""
    for group, members in grouped(rows, lambda row: row.group).items():
        columns = columns_of(members)
        lines = [[column.text(row) for column in columns] for row in members]
        heads, left = [c.head for c in columns], [c.head for c in columns if c.words]
        title = ": ".join(filter(None, (group, members[0].shared)))
        print(markdown_table(heads, lines, left, title), end="")
        if answer := headline(members):
            print(answer)
    for line in footnotes(rows):
        print(line)


def footnotes(rows: Sequence[Compared]) -> list[str]:
    """What the tables' figures need to be read."""
    notes = []
    if any(counted_otherwise(row.record) for row in rows):
        notes.append("* counted by another suite in its own way")
    if tested := sum(row.tested for row in rows):
        plural = "s" if tested > 1 else ""
        notes.append(
            f"{tested} verdict{plural}: the chance that any is false is at most {TABLE_ERROR:.0%} "
            "(Welch's test, Holm's correction); each ± is a 95 % interval by itself"
        )
    return notes


def _fields(source: Record | Compared, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


def row_facts(row: Compared) -> dict[str, Any]:
    """A setting's figures, as all files have them; None for what is unknown."""
    r = row.record
    low, high = row.interval or (None, None)
    facts = {"group": row.group, "setting": r.setting, "runs": len(r.rates) or len(r.runs)}
    facts |= _fields(r, "hardware n_gpus tokens_per_sec_per_gpu")
    facts |= {"ratio": 1.0 if row.is_reference else row.ratio}
    facts |= {"ratio_low": low, "ratio_high": high, "verdict": row.verdict}
    facts |= {"not_compared": "; ".join(row.not_compared), "remarks": "; ".join(row.remarks)}
    facts |= _fields(r, "model_tflops_per_gpu mfu flop_convention memory_gib memory_kind")
    facts |= {"usd_per_trillion_tokens": row.usd_per_trillion}
    facts |= _fields(row, "tokens_per_joule energy")
    return facts | {"goodput": r.goodput, "days": row.days}


def runs_table(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Every run as runs.csv has it: the settings in which runs differ, figures, and where it is from.

    `kwh` is the energy of the window, `gco2` that times the grid's grams of CO2 per kWh.
    """
    runs = [(row, r) for row in rows for r in row.record.runs]
    names = dict.fromkeys(name for _, r in runs for name in r.arguments or ())
    differ = [x for x in names if len({str((r.arguments or {}).get(x)) for _, r in runs}) > 1]
    return [_run_facts(row, r, differ) for row, r in runs]


def _run_facts(row: Compared, r: Record, differ: Sequence[str]) -> dict[str, Any]:
    metrics, settings = (r.result.metrics if r.result else None), r.arguments or {}
    joules = metrics and metrics.energy_j
    first = {"group": row.group, "setting": row.record.setting, "run": r.label}
    shown = {name: settings.get(name) for name in differ}
    shown = {k: shown_text(v) if isinstance(v, str) else v for k, v in shown.items()}
    facts = _fields(r, "hardware n_gpus settings memory_gib memory_kind")
    facts |= {name: getattr(metrics, name, getattr(r, name, None)) for name in RUN_COLUMNS}
    facts |= {"kwh": joules and joules / 3.6e6, "gco2": joules and joules / 3.6e6 * GCO2_PER_KWH}
    facts |= {"invalid": "; ".join(r.invalid), "remarks": "; ".join(r.texts("disturbed"))}
    origin = ("date", "commit", "torch", "driver", "command")
    facts |= {"suite": r.suite} | {name: r.provenance.get(name) for name in origin}
    facts |= {"path": shown_path(r.path)}
    return first | shown | first | facts  # a Meter's arguments may have these names


def provenance(rows: list[Compared]) -> list[tuple[str, str]]:
    """Name and values of each origin of the runs, what differs first; runs.csv has them by run."""
    runs = [r for row in rows for r in row.record.runs]
    lines = []
    for name in dict.fromkeys(name for r in runs for name in r.provenance):
        values = list(dict.fromkeys(r.provenance.get(name, "unknown") for r in runs))
        more = [f"{len(values) - MOST_VALUES} more"] if len(values) > MOST_VALUES else []
        lines.append((len(values) < 2, name, "; ".join(values[:MOST_VALUES] + more)))
    return [(name, text) for _, name, text in sorted(lines, key=lambda line: line[0])]


def write(rows: list[Compared], directory: Path, remarks: list[str], page: str) -> str:
    """Write all files, and name them; `page` is the report, which `remarks` open."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = [row_facts(row) for row in rows]
    runs = runs_table(rows)
    write_rows(directory / "compare.csv", settings)
    write_rows(directory / "runs.csv", runs)
    content = {
        "about": "Ratios are of tokens/s per GPU to each group's reference, with 95 % intervals.",
        "made": now()[:10],
        "version": __version__,
        "table_error": TABLE_ERROR,
        "remarks": remarks,
        "settings": settings,
        "scaling": scaling(rows),
        "runs": runs,
    }
    write_whole(directory / "compare.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    (directory / "report.html").write_text(page, encoding="utf-8")
    return f"wrote {', '.join(sorted(p.name for p in directory.iterdir()))} in {directory}\n"


def unknown_models(rows: list[Compared]) -> list[str]:
    """A line on the logs that are compared with nothing because they lack their model or length."""
    if len({row.group for row in rows}) == 1:
        return []
    told = {r.model for row in rows if (r := row.record).seq_len}
    lacks = {
        "the model: {}; use --log LOG:model=NAME": lambda r: not r.model_told,
        "the length: {}; use --log LOG:seq-len=N": lambda r: not r.seq_len and r.model in told,
    }
    lines = []
    for text, lacking in lacks.items():
        if names := ", ".join(shown_path(row.record.path) for row in rows if lacking(row.record)):
            lines.append(f"not compared with others, their logs lack {text.format(names)}")
    return lines


def headline(members: Sequence[Compared]) -> str:
    """The fastest setting of a group, by how much, whether it surely beats every other, and its cost.

    The reference is held against the next fastest, any other setting against the reference.
    """
    rated = [m for m in members if m.record.tokens_per_sec_per_gpu and not m.not_compared]
    if len(rated) < 2:
        return ""
    best, *others = sorted(rated, key=lambda m: -(m.record.tokens_per_sec_per_gpu or 0.0))
    other = others[0] if best.is_reference else next(m for m in members if m.is_reference)
    if min(len(m.record.rates) for m in rated) < RUNS_FOR_A_VERDICT:
        sure = f"not sure: this needs {RUNS_FOR_A_VERDICT} runs of each"
    else:
        pairs = [(mean_of(best.record.rates), mean_of(m.record.rates)) for m in others]
        rivals = [m for m, answer in zip(others, settle(pairs), strict=True) if answer != "faster"]
        if (other if best.is_reference else best).verdict not in ("faster", "slower"):
            rivals.append(other)
        sure = f"not sure: {short(rivals[0].record.setting)} may be as fast" if rivals else "sure"
    speed, than = (m.record.tokens_per_sec_per_gpu or math.nan for m in (best, other))
    usd = best.usd_per_trillion
    cost = f"; US$ {usd:,.0f} per trillion tokens" if usd else ""
    per = " per device" if len({m.record.n_gpus for m in rated}) > 1 else ""
    factor = f"{speed / than:.2f}x as fast as {short(other.record.setting)}"
    return f"Fastest{per}: {short(best.record.setting)}, {factor}, {sure}{cost}."
