"""A comparison as tables, CSV, JSON and one HTML file. Needs no torch."""

import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from llm_train_bench import __version__
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.hardware import device_called
from llm_train_bench.base.redaction import shown_path, shown_text
from llm_train_bench.base.tables import (
    grouped,
    markdown_table,
    number,
    show_whole,
    write_rows,
)
from llm_train_bench.compare.ratios import Compared
from llm_train_bench.compare.records import Record
from llm_train_bench.compare.scaling import relative, scaling
from llm_train_bench.compare.setting import RUNS_FOR_A_VERDICT, TABLE_ERROR
from llm_train_bench.results.metrics import COMPARED

Item = TypeVar("Item")
# Grams of CO2 per kWh: the world's mean of 2024 (IEA, Electricity 2025).
GCO2_PER_KWH = 445.0
# Rows on the screen, sentences on a group, settings with curves and runs with paths in a report.
MOST_SHOWN, MOST_VERDICTS, MOST_DRAWN, MOST_RUNS = 40, 6, 8, 4000


def cells(row: Compared) -> dict[str, str]:
    """A row of the table as text, by the names of the columns."""
    r = row.record
    ratio = "1" if row.is_reference else number(row.ratio, ".3f")
    if row.ratio_low is not None:
        ratio += f" [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    star = "*" if counted_otherwise(r) else ""
    kind = f" {r.memory_kind}" if r.memory_gib and r.memory_kind not in (None, "allocated") else ""
    estimated = "" if row.energy_measured or row.tokens_per_joule is None else " (TDP)"
    return {
        "setting": r.setting,
        "runs": str(len(r.rates) or len(r.runs)),
        "hardware": r.hardware or "unknown",
        "GPUs": str(r.n_gpus or "?"),
        "tokens/s per GPU": number(r.tokens_per_sec_per_gpu, ",.0f"),
        "ratio [95 %]": ratio,
        "verdict": row.verdict + (f": {'; '.join(row.not_compared)}" if row.not_compared else ""),
        "TFLOP/s": number(r.tflops_per_gpu, ",.4g") + (star if r.tflops_per_gpu else ""),
        "MFU": number(r.mfu, ".1%") + (star if r.mfu else ""),
        "memory GiB": number(r.memory_gib, ".1f") + kind,
        "US$/T tokens": number(row.usd_per_trillion, ",.0f"),
        "tokens/J": number(row.tokens_per_joule, ".2f") + estimated,
        "goodput": number(r.goodput, ".1%"),
        "remarks": "; ".join(row.remarks),
        "days": number(row.days, ",.1f"),
    }


def counted_otherwise(r: Record) -> bool:
    """Whether its TFLOP/s or MFU are figures of another suite, which counted FLOPs in its own way."""
    return bool((r.mfu or r.tflops_per_gpu) and r.flop_convention != "palm")


def by_speed(row: Compared) -> tuple[bool, float]:
    """Order of a group's rows: the reference first, then the fastest."""
    return not row.is_reference, -(row.record.tokens_per_sec_per_gpu or 0.0)


def show_comparison(rows: list[Compared]) -> None:
    """The tables on the screen, and below each what it shows."""
    for group, members in grouped(rows, lambda row: row.group).items():
        texts = [cells(row) for row in members]
        known = {name for line in texts for name in line if line[name] not in ("unknown", "?", "")}
        columns = [name for name in texts[0] if name in known | {"tokens/s per GPU"}]
        table = markdown_table(*columns, left=("hardware", "verdict"), title=group)
        more = len(members) - MOST_SHOWN
        for row in sorted(members, key=by_speed)[:MOST_SHOWN] if more > 0 else members:
            texts = cells(row)
            table.add_row(*(texts[name] for name in columns))
        show_whole(table)
        if more > 0:
            print(f"{more} more setting{'s' * (more > 1)}: --output-dir DIR writes all")
        for line in verdicts(members):
            print(line)
    if any(counted_otherwise(row.record) for row in rows):
        print("* counted by another suite in its own way")
    if tested := sum(row.ratio_low is not None and row.enough_runs for row in rows):
        plural = "s" if tested > 1 else ""
        print(
            f"{tested} verdict{plural}: the chance that any is false is at most {TABLE_ERROR:.0%} "
            "(Welch's test, Holm's correction); each interval is 95 % by itself"
        )


def _fields(source: Record | Compared, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


def row_facts(row: Compared) -> dict[str, Any]:
    """A setting's figures, as all files have them; None for what is unknown."""
    r = row.record
    energy = None if row.tokens_per_joule is None else "measured" if row.energy_measured else "TDP"
    facts = {"group": row.group, "setting": r.setting, "runs": len(r.rates) or len(r.runs)}
    facts |= _fields(r, "hardware n_gpus tokens_per_sec_per_gpu")
    facts |= {"ratio": 1.0 if row.is_reference else row.ratio}
    facts |= _fields(row, "ratio_low ratio_high verdict")
    facts |= {"not_compared": "; ".join(row.not_compared), "remarks": "; ".join(row.remarks)}
    facts |= _fields(r, "tflops_per_gpu mfu flop_convention memory_gib memory_kind")
    facts |= {"usd_per_trillion_tokens": row.usd_per_trillion}
    facts |= {"tokens_per_joule": row.tokens_per_joule, "energy": energy, "goodput": r.goodput}
    return facts | {"days": row.days}


def runs_table(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Every run as runs.csv has it: the settings in which runs differ, figures, and where it is from.

    `kwh` is the energy of the window, `gco2` that times the grid's grams of CO2 per kWh.
    """
    runs = [(row, r) for row in rows for r in row.record.runs]
    names = dict.fromkeys(name for _, r in runs for name in r.arguments or ())
    known = {name: {str((r.arguments or {}).get(name)) for _, r in runs} for name in names}
    differ = [name for name, values in known.items() if len(values) > 1]
    return [_run_facts(row, r, differ) for row, r in runs]


def _run_facts(row: Compared, r: Record, differ: Sequence[str]) -> dict[str, Any]:
    metrics, settings = (r.result.metrics if r.result else None), r.arguments or {}
    joules = metrics and metrics.energy_j
    facts = {"group": row.group, "setting": row.record.setting, "run": r.label}
    shown = {name: settings.get(name) for name in differ}
    facts |= {k: shown_text(v) if isinstance(v, str) else v for k, v in shown.items()}
    facts |= _fields(r, "hardware n_gpus settings memory_gib memory_kind tflops_per_gpu")
    facts |= {name: getattr(metrics, name, getattr(r, name, None)) for name in COMPARED}
    facts |= {"kwh": joules and joules / 3.6e6, "gco2": joules and joules / 3.6e6 * GCO2_PER_KWH}
    facts |= {"invalid": "; ".join(r.invalid), "remarks": "; ".join(r.texts("disturbed"))}
    origin = ("date", "commit", "torch", "driver", "command")
    facts |= {"suite": r.suite} | {name: r.provenance.get(name) for name in origin}
    return facts | {"path": shown_path(r.path)}


def provenance(rows: list[Compared]) -> tuple[list[list[str]], list[list[str]]]:
    """Origins of runs: what differs, names first and a line for those alike; and what all share."""
    runs = [r for row in rows for r in row.record.runs][:MOST_RUNS]
    names = dict.fromkeys(name for r in runs for name in r.provenance)
    values = {name: [r.provenance.get(name, "unknown") for r in runs] for name in names}
    differ = [name for name in names if len(set(values[name])) > 1]
    alike = grouped(runs, lambda r: tuple(r.provenance.get(name, "unknown") for name in differ))
    lines = [["runs", *differ]]
    for origin, group in alike.items():
        more = f" and {len(group) - 1} more" if group[1:] else ""
        lines.append([group[0].label + more, *origin])
    return lines, [[name, values[name][0]] for name in names if name not in differ]


def write(rows: list[Compared], directory: Path, remarks: list[str]) -> str:
    """Write all files, and name them; `remarks` open the report."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = [row_facts(row) for row in rows]
    runs = runs_table(rows)
    write_rows(directory / "compare.csv", settings)
    write_rows(directory / "runs.csv", runs)
    content = {
        "about": "Ratios are of tokens/s per GPU to each group's reference, with 95 % intervals.",
        "made": _today(),
        "version": __version__,
        "table_error": TABLE_ERROR,
        "remarks": remarks,
        "settings": settings,
        "scaling": scaling(rows),
        "runs": runs,
    }
    write_whole(directory / "compare.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    (directory / "report.html").write_text(html(rows, remarks), encoding="utf-8")
    return f"wrote {', '.join(sorted(p.name for p in directory.iterdir()))} in {directory}\n"


def _today() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def html(rows: list[Compared], remarks: list[str]) -> str:
    """The report: one file that needs no other."""
    groups = grouped(rows, lambda row: row.group)
    runs = sum(len(row.record.runs) for row in rows)
    whole = len(rows) + runs <= MOST_RUNS
    differ, shared = provenance(rows)
    about = f"{len(rows)} settings, {runs} runs, made {_today()} by llm-train-bench {__version__}."
    content = {
        "title": f"Training speed: {', '.join(list(groups)[:3])}",
        "about": about,
        "remarks": [*remarks, *map(scaling_sentence, scaling(rows))],
        "groups": [_group(name, members, whole) for name, members in groups.items()],
        "provenance": {"differ": differ, "shared": shared},
    }
    folder = Path(__file__).parent
    page, style, script = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("report_page.html", "page.css", "page.js")
    )
    page = page.replace("/*STYLE*/\n", style).replace("/*SCRIPT*/\n", script)
    # JSON has no NaN, and a page's script ends at the first "</".
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace('{"groups": []}', text)


def _group(name: str, members: list[Compared], whole: bool) -> dict[str, Any]:
    """A group as the report's script takes it; curves of those that it draws."""
    fast = sorted(members, key=by_speed)[:MOST_DRAWN]
    drawn, rows = {id(m) for m in fast if m.is_reference or not m.not_compared}, []
    for m in members:
        r, shown = m.record, id(m) in drawn
        card, runs = device_called(r.hardware), []
        for i, run in enumerate(r.runs[:100] if whole or shown else []):
            # A step's time per token of one GPU [us], which steps of any batch share.
            tokens, n = (run.global_batch or 0) * (run.seq_len or 0), run.n_gpus or 0
            times = [1e6 * t * n / tokens for t in run.step_times_s] if tokens and n else []
            times = spread(times, 120) if shown and i < 3 else []
            facts = {"name": run.label, "speed": _figures(run.tokens_per_sec_per_gpu)}
            facts |= {"path": shown_path(run.path), "invalid": "; ".join(run.invalid)}
            runs.append(facts | {"times": [_figures(t) for t in times]})
        losses = spread(r.losses, 200) if shown else []
        facts: dict[str, Any] = {"n": len(r.rates) or len(r.runs), "runs": runs}
        facts |= {"marks": m.not_compared, "card_gib": card and card.memory_gib}
        facts |= {"losses": [[i, _figures(x)] for i, x in losses]}
        rows.append(row_facts(m) | facts)
    return {"name": name, "verdicts": verdicts(members), "rows": rows}


def _figures(value: float | None) -> float | None:
    """A figure as JSON has it: six digits, and null for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def spread(values: Sequence[Item], most: int) -> list[Item]:
    """At most so many of a sequence, evenly, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def unknown_models(rows: list[Compared]) -> list[str]:
    """A line on the logs that are compared with nothing because they lack their model."""
    alone = [row.record for row in rows if not row.record.model_told]
    if not alone or len({row.group for row in rows}) == 1:
        return []
    names = ", ".join(shown_path(record.path) for record in alone)
    return [
        f"not compared with others, their logs lack the model: {names}; use --log LOG:model=NAME"
    ]


def verdicts(members: list[Compared]) -> list[str]:
    """What a group shows, in words, the largest effect first; and that nothing can be said, where so."""
    (reference,) = (m for m in members if m.is_reference)
    judged = [m for m in members if m.verdict in ("faster", "slower", "within noise")]
    judged.sort(key=lambda m: -(m.ratio or 0.0))
    if len(judged) > MOST_VERDICTS:  # the fastest, and what saves the most memory
        lean = min(judged, key=lambda m: m.record.memory_gib or math.inf)
        fastest = judged[:MOST_VERDICTS]
        judged = fastest if lean in fastest else [*fastest[:-1], lean]
    nothing = f"No verdict: this needs {RUNS_FOR_A_VERDICT} runs of a setting and of the reference."
    no_verdict = [nothing] if len(members) > 1 else []
    return [f"{sentence(m, reference.record)}." for m in judged] or no_verdict


def scaling_sentence(line: dict[str, Any]) -> str:
    """A line of `scaling` in words."""
    return (
        f"{line['setting']} on {line['devices']} devices: {relative(line)} of the speed per device "
        f"on {line['fewest']}"
    )


# Per cent of a difference within which two settings are as fast as each other.
ALIKE = 5.0


def sentence(m: Compared, reference: Record) -> str:
    """A setting against the reference in words: time per token, with its interval, and memory."""
    r, plain = m.record, reference.setting
    ratios = m.ratio or 1.0, m.ratio_low or 1.0, m.ratio_high or 1.0
    change, low, high = (100 * (x - 1) for x in ratios)
    if m.verdict == "within noise":
        alike = max(abs(low), abs(high)) <= ALIKE
        says = "is as fast as" if alike else "cannot be distinguished from"
        text = f"{r.setting} {says} {plain} ({change:+.1f} % [{low:+.1f}, {high:+.1f}])"
    elif m.verdict == "faster":
        text = f"{r.setting} is {change:.1f} % faster [{low:.1f}, {high:.1f}] than {plain}"
    else:
        text = (
            f"{r.setting} costs {-change:.1f} % [{-high:.1f}, {-low:.1f}] of the speed of {plain}"
        )
    if r.memory_gib and reference.memory_gib and r.memory_kind == reference.memory_kind:
        saved = reference.memory_gib - r.memory_gib
        if abs(saved) > 0.02 * reference.memory_gib:
            amount = f"{abs(saved):.1f} GiB" if abs(saved) >= 1 else f"{1024 * abs(saved):.0f} MiB"
            text += f" and saves {amount}" if saved > 0 else f" and takes {amount} more"
    return text
