"""A comparison as tables, CSV, Markdown and one HTML file. Needs no torch."""

import csv
import datetime
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.compare.ratios import RUNS_DIFFER, RUNS_FOR_A_VERDICT, Compared
from bench.compare.records import Record
from bench.formulas.hardware import device_called
from bench.formulas.time_statistics import NORMAL, STUDENT_T, WINDOW_PARTS
from bench.tables import csv_cell, markdown_cell, markdown_table, memory_text, number, show_whole

Item = TypeVar("Item")
DEFAULT_PRICES = ", by default the rough ones of configs/hardware.json"
# Rows on the screen, sentences on a group, settings with curves and runs with paths in a report.
MOST_SHOWN, MOST_VERDICTS, MOST_DRAWN, MOST_RUNS = 40, 6, 8, 4000
COLUMNS = (
    "setting", "runs", "hardware", "GPUs", "tokens/s per GPU", "ratio [95 %]", "verdict", "TFLOP/s",
    "MFU", "memory GiB", "US$/T tokens", "tokens/J",
)  # fmt: skip
RUN_COLUMNS = (
    "group", "setting", "run", "hardware", "GPUs", "settings", "tokens/s per GPU", "MFU", "TFLOP/s",
    "memory GiB", "not compared", "path",
)  # fmt: skip


def cells(row: Compared, tokens: float | None) -> list[str]:
    """A row of the table as text."""
    r = row.record
    ratio = "1" if row.is_reference else number(row.ratio, ".3f")
    if row.ratio_low is not None:
        ratio += f" [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    verdict = row.verdict + (f": {'; '.join(row.marks)}" if row.marks else "")
    star = "*" if r.flop_convention != "palm" else ""
    estimated = "" if row.energy_measured or row.tokens_per_joule is None else " (TDP)"
    texts = [
        r.setting, str(len(r.rates) or 1), r.hardware or "unknown", str(r.n_gpus or "?"),
        number(r.tokens_per_sec_per_gpu, ",.0f"), ratio, verdict,
        number(r.tflops_per_gpu, ",.4g") + (star if r.tflops_per_gpu else ""),
        number(r.mfu, ".1%") + (star if r.mfu else ""), memory(r), number(row.usd_per_trillion, ",.0f"),
        number(row.tokens_per_joule, ".2f") + estimated,
    ]  # fmt: skip
    return [*texts, number(row.days, ",.1f")] if tokens else texts


def counted_otherwise(r: Record) -> bool:
    """Whether its TFLOP/s or MFU are figures of another suite, which counted FLOPs in its own way."""
    return bool((r.mfu or r.tflops_per_gpu) and r.flop_convention != "palm")


def memory(r: Record) -> str:
    """Peak memory of a run as it stands in a table."""
    return memory_text(r.memory_gib, r.memory_kind, ".1f")


def tables(
    rows: list[Compared], tokens: float | None
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Name, columns and lines of each group, without the columns that nobody knows."""
    names = [*COLUMNS, "days"] if tokens else [*COLUMNS]
    for group, members in by_group(rows).items():
        found = [cells(row, tokens) for row in members]
        known = [bool({line[i] for line in found} - {"unknown", "?"}) for i in range(len(names))]
        kept = [i for i, name in enumerate(names) if known[i] or name.startswith("tokens/s")]
        yield group, [names[i] for i in kept], [[line[i] for i in kept] for line in found]


def show_comparison(rows: list[Compared], tokens: float | None) -> None:
    """The tables on the screen, and below each what it shows."""
    groups = by_group(rows)
    for group, columns, lines in tables(rows, tokens):
        table = markdown_table(*columns, left=("hardware", "verdict"), title=group)
        pairs = list(zip(groups[group], lines, strict=True))
        if len(pairs) > MOST_SHOWN:  # the reference and the fastest
            pairs.sort(
                key=lambda p: (not p[0].is_reference, -(p[0].record.tokens_per_sec_per_gpu or 0))
            )
        for _, line in pairs[:MOST_SHOWN]:
            table.add_row(*line)
        show_whole(table)
        if len(pairs) > MOST_SHOWN:
            print(f"{len(pairs) - MOST_SHOWN} more settings: --output-dir DIR writes them all")
        for line in verdicts(groups[group]):
            print(line)
    if any(counted_otherwise(row.record) for row in rows):
        print("* counted by another suite in its own way")


def write(
    rows: list[Compared],
    directory: Path,
    tokens: float | None,
    plot: bool,
    remarks: list[str],
    priced: bool,
) -> None:
    """All files of a comparison; `remarks` open the report, `priced` says that prices were given."""
    directory.mkdir(parents=True, exist_ok=True)
    names = (*COLUMNS, "days") if tokens else COLUMNS
    with (directory / "compare.csv").open("w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(["group", *names, "path"])
        for r in rows:
            writer.writerow(map(csv_cell, [r.group, *cells(r, tokens), r.record.path]))
    with (directory / "runs.csv").open("w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(RUN_COLUMNS)
        for row in rows:
            for r in row.record.runs:
                figures = (r.tokens_per_sec_per_gpu, r.mfu, r.tflops_per_gpu, r.memory_gib)
                known = [row.group, row.record.setting, r.label, r.hardware, r.n_gpus, r.settings]
                writer.writerow(map(csv_cell, [*known, *figures, "; ".join(r.marks), r.path]))
    with (directory / "compare.md").open("w", encoding="utf-8") as f:
        for group, columns, found in tables(rows, tokens):
            f.write(f"## {markdown_cell(group)}\n\n")
            lines = [columns, ["---"] * len(columns), *found]
            f.writelines(f"| {' | '.join(map(markdown_cell, line))} |\n" for line in lines)
            f.write("\n")
    if plot:
        from bench.compare.plots import draw

        draw(rows, directory / "compare.png", tokens)
    (directory / "report.html").write_text(html(rows, tokens, remarks, priced), encoding="utf-8")
    print(f"wrote {', '.join(sorted(p.name for p in directory.iterdir()))} in {directory}")


def html(rows: list[Compared], tokens: float | None, remarks: list[str], priced: bool) -> str:
    """The report: one file that needs no other."""
    groups = by_group(rows)
    whole = len(rows) + sum(len(row.record.runs) for row in rows) <= MOST_RUNS
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    runs = sum(len(row.record.runs) for row in rows)
    content = {
        "title": f"Training speed: {', '.join(list(groups)[:3])}",
        "about": f"{len(rows)} settings, {runs} runs, made {date} by llm-train-bench.",
        "prices": f"Prices are rental prices per GPU-hour{' as given' if priced else DEFAULT_PRICES}.",
        "remarks": remarks,
        "groups": [_group(name, members, tokens, whole) for name, members in groups.items()],
        "runs_for_a_verdict": RUNS_FOR_A_VERDICT, "runs_differ": RUNS_DIFFER,
        "student_t": STUDENT_T, "normal": NORMAL, "parts": WINDOW_PARTS,
    }  # fmt: skip
    # JSON has no NaN, and a page's script ends at the first "</".
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = (Path(__file__).parent / "report_page.html").read_text(encoding="utf-8")
    return page.replace('{"groups": []}', text)


def _group(name: str, members: list[Compared], tokens: float | None, whole: bool) -> dict[str, Any]:
    """A group as the report's script takes it; curves of those that it draws."""
    fast = sorted(
        members, key=lambda m: (not m.is_reference, -(m.record.tokens_per_sec_per_gpu or 0.0))
    )
    drawn, rows = {id(m) for m in fast[:MOST_DRAWN] if m.is_reference or not m.marks}, []
    for m in members:
        r, shown = m.record, id(m) in drawn
        card = device_called(r.hardware)
        runs = r.runs if whole or shown else []
        rows.append({
            "setting": r.setting, "n": len(r.rates) or 1, "hardware": r.hardware, "gpus": r.n_gpus,
            "speed": _figures(r.tokens_per_sec_per_gpu), "rates": [_figures(x) for x in r.rates],
            "ratio": m.ratio, "low": m.ratio_low, "high": m.ratio_high, "verdict": m.verdict.split(":")[0]
            if m.marks else m.verdict, "marks": m.marks, "tflops": r.tflops_per_gpu, "mfu": r.mfu,
            "counted": r.flop_convention, "memory": r.memory_gib, "kind": r.memory_kind,
            "card": card and card.memory_gib, "usd": m.usd_per_trillion,
            "per_joule": m.tokens_per_joule, "measured": m.energy_measured,
            "days": m.days if tokens else None,
            "losses": [[i, _figures(x)] for i, x in spread(r.losses, 200)] if shown else [],
            "runs": [
                {"name": run.label, "speed": _figures(run.tokens_per_sec_per_gpu), "path": run.path,
                 "marks": "; ".join(run.marks),
                 "times": [_figures(t) for t in spread(run.step_times_s, 120)] if shown and i < 3 else []}
                for i, run in enumerate(runs[:100])
            ],
        })  # fmt: skip
    return {"name": name, "verdicts": verdicts(members), "rows": rows}


def _figures(value: float | None) -> float | None:
    """A figure as JSON has it: six digits, and null for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def spread(values: Sequence[Item], most: int) -> list[Item]:
    """At most so many of a sequence, evenly, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def by_group(rows: Iterable[Compared]) -> dict[str, list[Compared]]:
    """Rows by the name of their group, in order."""
    groups: dict[str, list[Compared]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def sweep_remarks(paths: Sequence[str]) -> list[str]:
    """Differences between platforms that sweeps under identical_config found."""
    lines = []
    for path in (Path(p) / "sweep.json" for p in paths):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["experiment"]["methodology"] == "identical_config":
                lines += [
                    f"{path.parent.name} is not identical: {d}" for d in content["differences"]
                ]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return lines


def verdicts(members: list[Compared]) -> list[str]:
    """What a group shows, in words, the largest effect first; and that nothing can be said, where so."""
    (reference,) = (m for m in members if m.is_reference)
    told = [m for m in members if m.verdict in ("faster", "slower", "within noise")]
    told.sort(key=lambda m: -m.ratio)
    if len(told) > MOST_VERDICTS:  # the fastest, and what saves the most memory
        lean = min(told, key=lambda m: m.record.memory_gib or math.inf)
        told = told[: MOST_VERDICTS - 1]
        told += [] if lean in told else [lean]
    if told:
        return [f"{sentence(m, reference.record)}." for m in told]
    if len(members) > 1:
        return [
            f"No verdict: it takes {RUNS_FOR_A_VERDICT} runs of a setting and of the reference."
        ]
    return []


# Per cent of a difference within which two settings are as fast as each other.
ALIKE = 5.0


def sentence(m: Compared, reference: Record) -> str:
    """A setting against the reference in words: time per token, with its interval, and memory."""
    r, plain = m.record, reference.setting
    change, low, high = (100 * (x - 1) for x in (m.ratio, m.ratio_low, m.ratio_high))
    if m.verdict == "within noise":
        alike = max(abs(low), abs(high)) <= ALIKE
        says = "is as fast as" if alike else "cannot be told from"
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
