"""compare.png: the runs side by side. Needs matplotlib (the extra `report`), and no torch."""

from pathlib import Path

from llm_train_bench.compare.ratios import Compared
from llm_train_bench.compare.records import microseconds_per_token
from llm_train_bench.errors import UsageError

COLOURS = ("#3b6fb6", "#d9822b", "#4c9f70", "#b64a6f", "#7b61a8", "#8c8c3a", "#4aa3a8", "#8a5a44")


def draw(rows: list[Compared], path: Path, tokens: float | None) -> None:
    """Nine panels: rate, step times, memory, MFU, cost, energy, days, loss and learning rate."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise UsageError(
            "compare.png needs matplotlib: pip install -e '.[report]', or --no-plot"
        ) from None

    shown = [r for r in rows if r.record.tokens_per_sec_per_gpu or r.record.losses]
    if len(shown) > len(COLOURS):  # the fastest, and what they are compared with
        fast = sorted(shown, key=lambda r: (not r.is_reference, -(r.record.tokens_per_sec or 0.0)))
        kept = {id(r) for r in fast[: len(COLOURS)]}
        shown = [r for r in shown if id(r) in kept]
    labels = [r.record.setting.replace("$", r"\$") for r in shown]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(shown))]
    height = max(2.6, 0.9 + 0.32 * len(shown))
    figure, axes = plt.subplots(3, 3, figsize=(16, 3 * height), layout="tight")

    def bars(axis, title: str, values: list[float | None], form: str, hatch=None) -> None:
        axis.set_title(title, fontsize=10, loc="left")
        numbers = [v or 0.0 for v in values]
        # By position: two runs may have the same name.
        drawn = axis.barh(range(len(shown)), numbers, color=colours)
        axis.set_yticks(range(len(shown)), labels)
        for i, (bar, value) in enumerate(zip(drawn, values, strict=True)):
            text = "unknown" if value is None else format(value, form)
            if shown[i].marks:
                bar.set_alpha(0.35)
            if hatch and hatch[i]:
                bar.set_hatch("///")
            axis.annotate(f" {text}", (bar.get_width(), i), va="center", fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.18)

    bars(axes[0, 0], "tokens/s per GPU", [r.record.tokens_per_sec_per_gpu for r in shown], ",.0f")
    for i, r in enumerate(shown):
        if r.ratio_low is not None:
            rate, scale = r.record.tokens_per_sec_per_gpu, r.record.tokens_per_sec_per_gpu / r.ratio
            axes[0, 0].errorbar(
                rate, i, # With equal step times the ends are the rate, up to rounding.
                xerr=[[max(0.0, rate - r.ratio_low * scale)], [max(0.0, r.ratio_high * scale - rate)]],
                color="black", lw=1, capsize=2,
            )  # fmt: skip
    times = [microseconds_per_token(r.record) for r in shown]
    timed = [x for x in zip(times, labels, colours, strict=True) if x[0]]
    title = "time per token and GPU [us]: quartiles, 5 to 95 %"
    axes[0, 1].set_title(title, fontsize=10, loc="left")
    if timed:
        boxes = axes[0, 1].boxplot(
            [each for each, *_ in timed], orientation="horizontal", whis=(5, 95),
            showfliers=False, patch_artist=True, tick_labels=[label for _, label, _ in timed],
        )  # fmt: skip
        for box, (*_, colour) in zip(boxes["boxes"], timed, strict=True):
            box.set_facecolor(colour)
        for line in boxes["medians"]:
            line.set_color("black")
        axes[0, 1].invert_yaxis()
    kinds = {r.record.memory_kind for r in shown} - {None}
    title = f"memory [GiB] {', '.join(sorted(kinds)) if len(kinds) > 1 else ''}"
    bars(axes[0, 2], title, [r.record.memory_gib for r in shown], ".1f")
    conventions = {r.record.flop_convention for r in shown if r.record.mfu is not None}
    title = f"MFU (FLOPs: {', '.join(conventions) or 'none known'})"
    title += ": not comparable" if len(conventions) > 1 else ""
    bars(axes[1, 0], title, [r.record.mfu for r in shown], ".1%")
    bars(axes[1, 1], "US$ per trillion tokens", [r.usd_per_trillion for r in shown], ",.0f")
    bars(
        axes[1, 2], "tokens/J (hatched: from TDP)",
        [r.tokens_per_joule for r in shown], ".2f", [not r.energy_measured for r in shown],
    )  # fmt: skip
    title = f"days for {tokens:.3g} tokens" if tokens else "days to train: give --tokens"
    bars(axes[2, 0], title, [r.days for r in shown], ",.1f")
    for axis, name, title in (
        (axes[2, 1], "losses", "loss"),
        (axes[2, 2], "learning_rates", "learning rate"),
    ):
        axis.set_title(title, fontsize=10, loc="left")
        for r, label, colour in zip(shown, labels, colours, strict=True):
            if curve := getattr(r.record, name):
                axis.plot(*zip(*curve, strict=True), color=colour, lw=1.2, label=label)
        axis.set_xlabel("step", fontsize=8)
        if axis.lines:
            axis.legend(fontsize=7)
    for axis in axes.flat:
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
