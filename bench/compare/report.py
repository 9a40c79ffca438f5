"""A comparison as tables, CSV, Markdown and one HTML file. Needs no torch."""

import base64
import csv
import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.compare.ratios import Compared
from bench.compare.records import Record
from bench.errors import UsageError
from bench.tables import csv_cell, markdown_cell, markdown_table, memory_text, number, show_whole

DEFAULT_PRICES = ", by default the rough ones of configs/hardware.json"
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
    rows: list[Compared], tokens: float | None, cell: Callable[[str], str] = str
) -> list[Table]:
    """One table a group; `cell` makes the text of a cell fit where the table goes."""
    made = []
    for group in dict.fromkeys(row.group for row in rows):
        names = (*COLUMNS, "days") if tokens else COLUMNS
        found = [cells(row, tokens) for row in rows if row.group == group]
        # A column that nobody knows tells nothing.
        known = [bool({line[i] for line in found} - {"unknown", "?"}) for i in range(len(names))]
        kept = [i for i, name in enumerate(names) if known[i] or name.startswith("tokens/s")]
        text = ("hardware", "verdict")
        table = markdown_table(*(names[i] for i in kept), left=text, title=cell(group))
        for line in found:
            table.add_row(*(cell(line[i]) for i in kept))
        made.append(table)
    return made


def show_comparison(rows: list[Compared], tokens: float | None) -> None:
    """The tables on the screen."""
    for table in tables(rows, tokens):
        show_whole(table)
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
        console = Console(highlight=False, markup=False, width=400, file=f)
        for table in tables(rows, tokens, markdown_cell):
            console.print(table)
    image = None
    if plot:
        from bench.compare.plots import draw

        draw(rows, directory / "compare.png", tokens)
        image = base64.b64encode((directory / "compare.png").read_bytes()).decode()
    (directory / "report.html").write_text(
        html(rows, tokens, image, remarks, priced), encoding="utf-8"
    )
    print(f"wrote {', '.join(sorted(p.name for p in directory.iterdir()))} in {directory}")


def html(
    rows: list[Compared], tokens: float | None, image: str | None, remarks: list[str], priced: bool
) -> str:
    """The report: one file that needs no other."""
    try:
        import jinja2
    except ImportError:
        raise UsageError("report.html needs jinja2: pip install -e '.[report]'") from None
    source = (Path(__file__).parent / "report.html.j2").read_text(encoding="utf-8")
    groups: dict[str, list[Compared]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)

    def bar(row: Compared, members: list[Compared]) -> int:
        highest = max((m.record.tokens_per_sec_per_gpu or 0.0 for m in members), default=0.0)
        return round(90 * (row.record.tokens_per_sec_per_gpu or 0.0) / highest) if highest else 0

    lines = [summary(members) for members in groups.values()] + remarks
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        title=f"Training speed: {', '.join(list(groups)[:3])}",
        rows=rows, groups=groups, tokens=tokens, image=image, bar=bar, number=number, memory=memory,
        lines=[line for line in lines if line],
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        price_note=" as given" if priced else DEFAULT_PRICES,
    )  # fmt: skip


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


def summary(members: list[Compared]) -> str | None:
    """One sentence on a group: the fastest, and how far ahead of the reference it certainly is."""
    ahead = [m for m in members if m.verdict == "faster"]
    if not ahead:
        return None
    best = max(ahead, key=lambda m: m.ratio)
    (reference,) = (m for m in members if m.is_reference)
    return (
        f"{members[0].group}: {best.record.setting} is {best.ratio:.2f} times as fast per GPU as "
        f"{reference.record.setting} (95 % over runs: {best.ratio_low:.2f} to {best.ratio_high:.2f})."
    )
