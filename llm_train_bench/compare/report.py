"""A comparison as tables, CSV, Markdown and one HTML file. Needs no torch."""

import csv
import datetime
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from llm_train_bench import __version__
from llm_train_bench.base.files import shown_path, write_whole
from llm_train_bench.base.hardware import device_called
from llm_train_bench.base.tables import (
    csv_cell,
    markdown_cell,
    markdown_table,
    memory_text,
    number,
    show_whole,
)
from llm_train_bench.compare.ratios import RUNS_DIFFER, RUNS_FOR_A_VERDICT, TABLE_ERROR, Compared
from llm_train_bench.compare.records import Record, microseconds_per_token
from llm_train_bench.model.json_keys import parse_json

Item = TypeVar("Item")
DEFAULT_PRICES = ", by default the rough ones of configs/hardware.json"
# Rows on the screen, sentences on a group, settings with curves and runs with paths in a report.
MOST_SHOWN, MOST_VERDICTS, MOST_DRAWN, MOST_RUNS = 40, 6, 8, 4000
COLUMNS = (
    "setting", "runs", "hardware", "GPUs", "tokens/s per GPU", "ratio [95 %]", "verdict", "TFLOP/s",
    "MFU", "memory GiB", "US$/T tokens", "tokens/J", "goodput",
    "remarks",
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
        number(row.tokens_per_joule, ".2f") + estimated, number(r.goodput, ".1%"), "; ".join(r.remarks),
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
        known = [
            bool({line[i] for line in found} - {"unknown", "?", ""}) for i in range(len(names))
        ]
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
    if tested := sum(row.ratio_low is not None and row.enough_runs for row in rows):
        print(how_certain(tested))


def how_certain(tested: int) -> str:
    """The error of the verdicts of a whole table, in words."""
    return (
        f"{tested} verdict{'s' * (tested > 1)}: the chance that any is false is at most "
        f"{TABLE_ERROR:.0%} (Welch's test, Holm's correction); each interval is 95 % by itself"
    )


def row_facts(row: Compared, tokens: float | None) -> dict[str, Any]:
    """A setting's figures, as compare.csv and compare.json have them; None for what is unknown."""
    r = row.record
    energy = None if row.tokens_per_joule is None else "measured" if row.energy_measured else "TDP"
    return {
        "group": row.group, "setting": r.setting, "runs": len(r.rates) or 1, "hardware": r.hardware,
        "n_gpus": r.n_gpus, "tokens_per_sec_per_gpu": r.tokens_per_sec_per_gpu,
        "ratio": 1.0 if row.is_reference else row.ratio, "ratio_low": row.ratio_low,
        "ratio_high": row.ratio_high, "verdict": row.verdict, "not_compared": "; ".join(row.marks),
        "remarks": "; ".join(r.remarks), "tflops_per_gpu": r.tflops_per_gpu, "mfu": r.mfu,
        "flop_convention": r.flop_convention, "memory_gib": r.memory_gib, "memory_kind": r.memory_kind,
        "usd_per_trillion_tokens": row.usd_per_trillion, "tokens_per_joule": row.tokens_per_joule,
        "energy": energy, "goodput": r.goodput, "days": row.days if tokens else None,
    }  # fmt: skip


def run_facts(row: Compared, r: Record) -> dict[str, Any]:
    """A run's figures and where they come from, as runs.csv has them."""
    p = r.provenance
    return {
        "group": row.group, "setting": row.record.setting, "run": r.label, "hardware": r.hardware,
        "n_gpus": r.n_gpus, "settings": r.settings, "tokens_per_sec_per_gpu": r.tokens_per_sec_per_gpu,
        "mfu": r.mfu, "tflops_per_gpu": r.tflops_per_gpu, "memory_gib": r.memory_gib,
        "goodput": r.goodput, "not_compared": "; ".join(r.marks), "remarks": "; ".join(r.remarks),
        "suite": r.suite,
        **{name: p.get(name) for name in ("date", "commit", "torch", "driver", "command")},
        "path": shown_path(r.path),
    }  # fmt: skip


def provenance(rows: list[Compared]) -> tuple[list[list[str]], list[list[str]]]:
    """Where the runs come from: what differs, a line for those that are alike, and what all share.

    The first line of what differs holds its names.
    """
    runs = [r for row in rows for r in row.record.runs][:MOST_RUNS]
    names = list(dict.fromkeys(name for r in runs for name in r.provenance))
    seen = {name: {r.provenance.get(name) for r in runs} for name in names}
    differ = [name for name in names if len(seen[name]) > 1]
    alike: dict[tuple[str, ...], list[str]] = {}
    for r in runs:
        key = tuple(r.provenance.get(name, "unknown") for name in differ)
        alike.setdefault(key, []).append(r.label)
    lines = [["runs", *differ]]
    lines += [
        [f"{labels[0]} and {len(labels) - 1} more" if labels[1:] else labels[0], *values]
        for values, labels in alike.items()
    ]
    return lines, [[name, *seen[name]] for name in names if name not in differ]


def write(
    rows: list[Compared],
    directory: Path,
    tokens: float | None,
    remarks: list[str],
    priced: bool,
) -> str:
    """All files of a comparison; returns a line that names them.

    `remarks` open the report, `priced` says that prices were given.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings = [row_facts(row, tokens) for row in rows]
    runs = [run_facts(row, r) for row in rows for r in row.record.runs]
    _write_csv(directory / "compare.csv", settings)
    _write_csv(directory / "runs.csv", runs)
    content = {
        "about": "Ratios are of tokens/s per GPU to each group's reference, with 95 % intervals.",
        "made": _today(), "version": __version__, "table_error": TABLE_ERROR, "remarks": remarks,
        "settings": settings, "runs": runs,
    }  # fmt: skip
    write_whole(directory / "compare.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    with (directory / "compare.md").open("w", encoding="utf-8") as f:
        for group, columns, found in tables(rows, tokens):
            f.write(f"## {markdown_cell(group)}\n\n")
            lines = [columns, ["---"] * len(columns), *found]
            f.writelines(f"| {' | '.join(map(markdown_cell, line))} |\n" for line in lines)
            f.write("\n")
        differ, shared = provenance(rows)
        if len(differ[0]) > 1:
            f.write("## Provenance: what differs\n\n")
            lines = [differ[0], ["---"] * len(differ[0]), *differ[1:]]
            f.writelines(f"| {' | '.join(map(markdown_cell, line))} |\n" for line in lines)
            f.write("\n")
        if shared:
            f.write("## Provenance: the same for all runs\n\n")
            f.writelines(f"- {markdown_cell(name)}: {markdown_cell(v)}\n" for name, v in shared)
        f.write(f"\nMade {_today()} by llm-train-bench {__version__}.\n")
    (directory / "report.html").write_text(html(rows, tokens, remarks, priced), encoding="utf-8")
    return f"wrote {', '.join(sorted(p.name for p in directory.iterdir()))} in {directory}\n"


def _today() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def _write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, lines[0] if lines else ())
        writer.writeheader()
        writer.writerows({name: csv_cell(x) for name, x in line.items()} for line in lines)


def html(rows: list[Compared], tokens: float | None, remarks: list[str], priced: bool) -> str:
    """The report: one file that needs no other."""
    groups = by_group(rows)
    whole = len(rows) + sum(len(row.record.runs) for row in rows) <= MOST_RUNS
    differ, shared = provenance(rows)
    runs = sum(len(row.record.runs) for row in rows)
    content = {
        "title": f"Training speed: {', '.join(list(groups)[:3])}",
        "about": f"{len(rows)} settings, {runs} runs, made {_today()} by llm-train-bench {__version__}.",
        "prices": f"Prices are rental prices per GPU-hour{' as given' if priced else DEFAULT_PRICES}.",
        "remarks": remarks,
        "groups": [_group(name, members, tokens, whole) for name, members in groups.items()],
        "runs_for_a_verdict": RUNS_FOR_A_VERDICT, "runs_differ": RUNS_DIFFER,
        "table_error": TABLE_ERROR, "provenance": {"differ": differ, "shared": shared},
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
            "per_joule": m.tokens_per_joule, "measured": m.energy_measured, "goodput": r.goodput,
            "days": m.days if tokens else None, "remarks": "; ".join(r.remarks),
            "losses": [[i, _figures(x)] for i, x in spread(r.losses, 200)] if shown else [],
            "runs": [
                {"name": run.label, "speed": _figures(run.tokens_per_sec_per_gpu),
                 "path": shown_path(run.path),
                 "marks": "; ".join(run.marks),
                 "times": [_figures(t) for t in spread(microseconds_per_token(run), 120)]
                 if shown and i < 3 else []}
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
            content = parse_json(path.read_text(encoding="utf-8"))
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
    told.sort(key=lambda m: -(m.ratio or 0.0))
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
