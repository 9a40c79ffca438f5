"""A breakdown as tables on the screen. Needs no torch."""

from typing import Any

from rich.console import Console

from llm_train_bench.base.tables import markdown_table, milliseconds, short


def show_breakdown(console: Console, title: str, b: Any) -> None:
    """Where a step's time went: by class, what the classes do not say, the costliest kernels.

    `b` is a Breakdown, or the Profile that a result keeps of one.
    """
    table = markdown_table(title, "ms a step", "share")
    for name, seconds in [*b.classes_s.items(), ("step", b.step_time_s)]:
        table.add_row(name, milliseconds(seconds), f"{seconds / b.step_time_s:.1%}")
    console.print(table)
    exposed, overlapped = b.classes_s.get("communication", 0.0), b.communication_overlapped_s
    if exposed or overlapped:
        console.print(
            f"communication: {milliseconds(exposed)} ms exposed, {milliseconds(overlapped)} ms "
            "behind computation"
        )
    if (gaps := b.host_gaps) and gaps.count:
        where = ", ".join(f"{part} {milliseconds(s)}" for part, s in gaps.by_part.items())
        console.print(
            f"the GPU waited for the host in {gaps.count:.4g} gaps, {milliseconds(gaps.time_s)} ms in "
            f"all, {milliseconds(gaps.longest_s)} ms the longest ({where})"
        )
    if b.matmul_tflops:
        fraction = b.matmul_roof_fraction
        of_roof = f", {fraction:.1%} of the measured roof" if fraction else ""
        console.print(f"matmuls: {b.matmul_tflops:.4g} TFLOP/s while they run{of_roof}")
    table = markdown_table("costliest", "class", "calls a step", "ms a step", left=["class"])
    for c in b.costliest:
        table.add_row(short(c.name), c.kind, f"{c.calls:.4g}", milliseconds(c.time_s))
    console.print(table)
