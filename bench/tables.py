"""Tables as Markdown, to read on the screen and to paste into a report. Needs no torch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.trace.breakdown_schema import Gaps


def markdown_table(*columns: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """An empty table; figures stand to the right, text (the first column and those of `left`) left."""
    table = Table(box=box.MARKDOWN, title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name in left else "right")
    return table


def number(value: float | None, form: str) -> str:
    """A formatted number, or that it is unknown."""
    return "unknown" if value is None else format(value, form)


def memory_text(gib: float | None, kind: str | None, form: str) -> str:
    """Peak memory [GiB], and of what kind where it is not what tensors took."""
    return number(gib, form) + (f" {kind}" if gib and kind not in (None, "allocated") else "")


def short(name: str) -> str:
    """A name of at most 80 characters."""
    return name if len(name) <= 80 else f"{name[:77]}..."


def milliseconds(seconds: float) -> str:
    """Seconds as they stand in a table of milliseconds."""
    return f"{1e3 * seconds:,.3f}"


def show_breakdown(
    console: Console,
    title: str,
    classes: Mapping[str, float],
    step_s: float,
    overlapped_s: float,
    gaps: Gaps | None,
    tflops: float | None,
    roof_fraction: float | None,
    costliest: Sequence[Any],
) -> None:
    """Where a step's time [s] went: by class, what the classes do not say, the costliest kernels.

    `overlapped_s` is communication behind computation, `tflops` the rate of the matmuls while they run;
    each of `costliest` has a name, a kind, calls and time_s.
    """
    table = markdown_table(title, "ms a step", "share")
    for name, seconds in [*classes.items(), ("step", step_s)]:
        table.add_row(name, milliseconds(seconds), f"{seconds / step_s:.1%}")
    console.print(table)
    exposed = classes.get("communication", 0.0)
    if exposed or overlapped_s:
        console.print(
            f"communication: {milliseconds(exposed)} ms exposed, {milliseconds(overlapped_s)} ms "
            "behind computation"
        )
    if gaps and gaps.count:
        where = ", ".join(f"{part} {milliseconds(s)}" for part, s in gaps.by_part.items())
        console.print(
            f"the GPU waited for the host in {gaps.count:.4g} gaps, {milliseconds(gaps.time_s)} ms in "
            f"all, {milliseconds(gaps.longest_s)} ms the longest ({where})"
        )
    if tflops:
        of_roof = f", {roof_fraction:.1%} of the measured roof" if roof_fraction else ""
        console.print(f"matmuls: {tflops:.4g} TFLOP/s while they run{of_roof}")
    table = markdown_table("costliest", "class", "calls a step", "ms a step", left=["class"])
    for c in costliest:
        table.add_row(short(c.name), c.kind, f"{c.calls:.4g}", milliseconds(c.time_s))
    console.print(table)
