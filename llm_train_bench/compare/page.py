"""A comparison as one HTML page, which needs no other file."""

import string
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from llm_train_bench import __version__
from llm_train_bench.base.redaction import shown_path
from llm_train_bench.base.tables import grouped
from llm_train_bench.compare import charts, report
from llm_train_bench.compare.ratios import Compared
from llm_train_bench.compare.scaling import relative, scaling
from llm_train_bench.results.result_files import now

# Settings with a colour, and runs that a row names.
COLOURS, MOST_RUNS = 8, 100
GREY = "var(--grey)"
HOW_TO_READ = """
A row is a setting, named by its differences from the others; its speed is the mean over its runs.
The column "to reference" compares tokens/s per device with the reference's; --reference chooses another.
A verdict needs three runs of both settings. Grey settings are not compared, for the reason in their row.
TFLOP/s and MFU are per device and count 6 N + 12 L d T FLOPs per token, against the dense bf16 peak.
(TDP): no energy was measured; the figure assumes that the device ran at its power limit.
Prices without --usd-per-hour are the rough rental prices of configs/hardware.json.
""".strip().splitlines()


def html_page(rows: list[Compared], remarks: Sequence[str]) -> str:
    """The report; `remarks` open it."""
    groups = grouped(rows, lambda row: row.group)
    runs = sum(len(row.record.runs) for row in rows)
    text = "{setting} on {devices} devices: {speed} of the speed of each on {fewest}"
    more = (line for line in scaling(rows) if line["devices"] != line["fewest"])
    on_several = [text.format(speed=relative(line), **line) for line in more]
    template, style, script = (
        Path(__file__).with_suffix(suffix).read_text(encoding="utf-8")
        for suffix in (".html", ".css", ".js")
    )
    return string.Template(template).substitute(
        title=escape(f"Training speed: {', '.join(list(groups)[:3])}"),
        about=f"{len(rows)} settings, {runs} runs, made {now()[:10]} by llm-train-bench {__version__}",
        style=style,
        script=script,
        remarks=_list([*remarks, *on_several]),
        sections="\n".join(_section(name, members) for name, members in groups.items()),
        reading=_list([*report.footnotes(rows), *HOW_TO_READ]),
        provenance=_provenance(rows),
    )


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="verdicts">{items}</ul>' if items else ""


def _section(name: str, members: list[Compared]) -> str:
    """A group: its answer, its charts, and the table of its settings."""
    members = sorted(members, key=report.by_speed)
    compared = [row for row in members if row.is_reference or not row.not_compared]
    drawn = [(row, f"var(--c{i})") for i, row in enumerate(compared[:COLOURS])]
    colours = {id(row): colour for row, colour in drawn}
    fastest = sorted(compared, key=lambda row: -(row.record.tokens_per_sec_per_gpu or 0.0))
    bars = charts.speed_bars([(row, colours.get(id(row), GREY)) for row in fastest])
    panels = charts.speed_against_memory(drawn) + charts.loss_curves(drawn)
    shared = f'<p class="soft">All: {escape(members[0].shared)}</p>' if members[0].shared else ""
    best = f'<p class="headline">{escape(report.headline(members))}</p>'
    return "\n".join([
        f"<section><h2>{escape(name)}</h2>", shared, best, bars,
        _table(members, colours), f'<div class="panels">{panels}</div></section>',
    ])  # fmt: skip


def _table(members: Sequence[Compared], colours: dict[int, str]) -> str:
    """The settings of a group, each row with the facts that it sorts by."""
    columns = report.columns_of(members)
    heads = "".join(
        f'<th class="{"text" * c.words}"><button>{escape(c.head)}</button></th>' for c in columns
    )
    lines = []
    for row in members:
        facts = report.row_facts(row)
        name = charts.dotted_name(row, colours.get(id(row), GREY))
        texts = [f"<details><summary>{name}</summary>{_list(_runs(row))}</details>"]
        texts += [escape(c.text(row)) for c in columns[1:]]
        values = [facts[c.fact] for c in columns]
        cells = "".join(map(_cell, values, texts))
        kind = "reference" if row.is_reference else "excluded" if row.not_compared else ""
        words = " ".join(value for value in facts.values() if isinstance(value, str))
        lines.append(f'<tr class="{kind}" data-text="{escape(words.lower())}">{cells}</tr>')
    body = "\n".join(lines)
    table = f'<table class="settings"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _cell(value: Any, text: str) -> str:
    """A cell that sorts by a value."""
    words = isinstance(value, str)
    classes = f' class="text {value if value in ("faster", "slower") else ""}"' if words else ""
    known = "" if value is None else escape(str(value))
    return f'<td{classes} data-value="{known}">{text}</td>'


def _runs(row: Compared) -> list[str]:
    """A line for each run of a setting."""
    lines = []
    for run in row.record.runs[:MOST_RUNS]:
        rate = run.tokens_per_sec_per_gpu
        speed = "unknown" if rate is None else f"{rate:,.6g}"
        why = f" ({'; '.join(run.invalid)})" if run.invalid else ""
        lines.append(f"{run.label}: {speed} tokens/s{why}, {shown_path(run.path)}")
    more = len(row.record.runs) - MOST_RUNS
    return [*lines, f"{more} more in runs.csv"] if more > 0 else lines


def _provenance(rows: list[Compared]) -> str:
    """Where the runs are from: what differs between them, then what is the same."""
    lines = "".join(
        f'<tr><td class="text">{escape(name)}</td><td class="text">{escape(text)}</td></tr>'
        for name, text in report.provenance(rows)
    )
    return f'<h2>Provenance</h2><div class="scroll"><table>{lines}</table></div>' if lines else ""
