"""A comparison as one HTML page, which needs no other file."""

import string
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from llm_train_bench import __version__
from llm_train_bench.base.tables import grouped
from llm_train_bench.compare import report
from llm_train_bench.compare.ratios import Compared
from llm_train_bench.compare.scaling import relative, scaling
from llm_train_bench.results.result_files import now

MOST_BARS = 20
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
    sections = [_section(name, members) for name, members in groups.items()]
    reading = [*report.footnotes(rows), *HOW_TO_READ]
    body = [_list([*remarks, *on_several]), *sections, "<h2>How to read this</h2>", _list(reading)]
    about = f"{len(rows)} settings, {runs} runs, made {now()[:10]} by llm-train-bench {__version__}"
    folder = Path(__file__).parent
    template, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    return string.Template(template).substitute(
        title=escape(f"Training speed: {', '.join(list(groups)[:3])}"),
        about=about,
        style=style,
        script=script,
        body="\n".join([*body, _provenance(rows)]),
    )


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="verdicts">{items}</ul>' if items else ""


def _section(name: str, members: list[Compared]) -> str:
    """A group: its answer, a bar of each setting's speed, and the table of its settings."""
    members = sorted(members, key=report.by_speed)
    shared = f'<p class="soft">All: {escape(members[0].shared)}</p>' if members[0].shared else ""
    best = f'<p class="headline">{escape(report.headline(members))}</p>'
    parts = shared, best, _speed_bars(members), _table(members)
    return "\n".join([f"<section><h2>{escape(name)}</h2>", *parts, "</section>"])


def _speed_bars(members: Sequence[Compared]) -> str:
    """A bar for each setting that is compared, from 0, with a mark for each of its runs."""
    compared = [row.record for row in members if row.is_reference or not row.not_compared]
    rated = [(r, rate) for r in compared if (rate := r.tokens_per_sec_per_gpu)]
    rated.sort(key=lambda pair: -pair[1])
    most = max((max([rate, *r.rates]) for r, rate in rated), default=0.0)
    parts = []
    for r, speed in rated[:MOST_BARS]:
        marks = (f'<i style="left:{100 * rate / most:.2f}%"></i>' for rate in r.rates[:30])
        bar = f'<b style="width:{100 * speed / most:.2f}%"></b>'
        parts.append(
            f'<span class="name">{escape(r.setting)}</span><span class="track">{bar}{"".join(marks)}'
            f"</span><span>{speed:,.0f}</span>"
        )
    more = f"<p>{n} slower settings: below</p>" if (n := len(rated) - MOST_BARS) > 0 else ""
    return f'<div class="bars">{"".join(parts)}</div>{more}' if len(parts) > 1 else ""


def _table(members: Sequence[Compared]) -> str:
    """The settings of a group, each row with the facts that it sorts by."""
    columns = report.columns_of(members)
    heads = "".join(
        f'<th class="{"text" * c.words}"><button>{escape(c.head)}</button></th>' for c in columns
    )
    lines = []
    for row in members:
        facts = report.row_facts(row)
        cells = [f"<td{_attributes(c.fact, facts)}>{escape(c.text(row))}</td>" for c in columns]
        kind = "reference" if row.is_reference else "excluded" if row.not_compared else ""
        lines.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    body = "\n".join(lines)
    table = f'<table class="settings"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _attributes(fact: str, facts: dict[str, Any]) -> str:
    value = facts[fact]
    words = isinstance(value, str)
    classes = f' class="text {value if value in ("faster", "slower") else ""}"' if words else ""
    known = "" if value is None else escape(str(value))
    return f'{classes} data-value="{known}"'


def _provenance(rows: list[Compared]) -> str:
    """Where the runs are from: what differs between them, then what is the same."""
    lines = "".join(
        f'<tr><td class="text">{escape(name)}</td><td class="text">{escape(text)}</td></tr>'
        for name, text in report.provenance(rows)
    )
    return f'<h2>Provenance</h2><div class="scroll"><table>{lines}</table></div>' if lines else ""
