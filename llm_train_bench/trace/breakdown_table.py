"""A breakdown as tables in Markdown. Needs no torch."""

from typing import Any

from llm_train_bench.base.tables import markdown_table, milliseconds, short


def breakdown_tables(title: str, b: Any) -> str:
    """Where a step's time went: by class, what the classes do not say, the costliest kernels.

    `b` is a Breakdown, or the Profile that a result keeps of one.
    """
    classes = [*b.classes_s.items(), ("step", b.step_time_s)]
    rows = [(name, milliseconds(s), f"{s / b.step_time_s:.1%}") for name, s in classes]
    text = markdown_table((title, "ms a step", "share"), rows)
    exposed, overlapped = b.classes_s.get("communication", 0.0), b.communication_overlapped_s
    if exposed or overlapped:
        text += (
            f"communication: {milliseconds(exposed)} ms exposed, {milliseconds(overlapped)} ms "
            "behind computation\n"
        )
    if (gaps := b.host_gaps) and gaps.count:
        where = ", ".join(f"{part} {milliseconds(s)}" for part, s in gaps.by_part.items())
        text += (
            f"the GPU waited for the host in {gaps.count:.4g} gaps, {milliseconds(gaps.time_s)} ms in "
            f"all, {milliseconds(gaps.longest_s)} ms the longest ({where})\n"
        )
    if b.matmul_tflops:
        fraction = b.matmul_roof_fraction
        of_roof = f", {fraction:.1%} of the measured roof" if fraction else ""
        text += f"matmuls: {b.matmul_tflops:.4g} TFLOP/s while they run{of_roof}\n"
    columns = ("costliest", "class", "calls a step", "ms a step")
    rows = [(short(c.name), c.kind, f"{c.calls:.4g}", milliseconds(c.time_s)) for c in b.costliest]
    return text + markdown_table(columns, rows, left=["class"])
