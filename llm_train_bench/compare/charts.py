"""The report's charts: speed by setting as HTML, the others as SVG. Needs no torch."""

import math
from collections.abc import Sequence
from html import escape

from llm_train_bench.compare.ratios import Compared

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 250, 58, 34  # [pixels]
# An axis spans this part of its largest value at least: noise must not look like a difference.
LEAST_SPAN = 0.2
MOST_BARS, MOST = 20, 1e15


def speed_bars(rows: Sequence[tuple[Compared, str]]) -> str:
    """A bar for each setting and colour, from 0, with a mark for each of its runs."""
    rated = [(row.record, row.record.tokens_per_sec_per_gpu or 0.0, colour) for row, colour in rows]
    rated = [bar for bar in rated if bar[1]]
    most = max((max([speed, *r.rates]) for r, speed, _ in rated), default=0.0)
    parts = []
    for r, speed, colour in rated[:MOST_BARS]:
        marks = (f'<i style="left:{100 * rate / most:.2f}%"></i>' for rate in r.rates[:30])
        bar = f'<b style="width:{100 * speed / most:.2f}%;background:{colour}"></b>'
        parts.append(
            f'<span class="name">{escape(r.setting)}</span><span class="track">{bar}{"".join(marks)}'
            f"</span><span>{speed:,.0f}</span>"
        )
    more = f"<p>{n} slower settings: below</p>" if (n := len(rated) - MOST_BARS) > 0 else ""
    return f'<div class="bars">{"".join(parts)}</div>{more}' if len(parts) > 1 else ""


def dotted_name(row: Compared, colour: str) -> str:
    """A setting's name after a dot of its colour."""
    return f'<span class="dot" style="background:{colour}"></span>{escape(row.record.setting)}'


def panel(title: str, rows: Sequence[tuple[Compared, str]], drawing: str, folded: str = "") -> str:
    """A chart with its title and the names of its colours; `folded` says why it is not open."""
    names = "".join(f"<span>{dotted_name(row, colour)}</span>" for row, colour in rows)
    inside = f'<h3>{title}</h3><p class="legend">{names}</p>{drawing}'
    if folded:
        inside = f"<details><summary>{folded}</summary>{inside}</details>"
    return f'<div class="panel">{inside}</div>'


class Axes:
    """Axes of a plot of these points: places of values, and the SVG around what is drawn."""

    def __init__(self, points: Sequence[tuple[float, float]], x_name: str):
        self.x_range, self.y_range = map(_range, zip(*points, strict=True))
        self.x_name = x_name

    def x(self, value: float) -> float:
        """Where a value is from the left [pixels]."""
        low, high = self.x_range
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - 8), 1)

    def y(self, value: float) -> float:
        """Where a value is from the top [pixels]."""
        low, high = self.y_range
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - 8), 1)

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        """The path through points."""
        return "M" + "L".join(f"{self.x(x)},{self.y(y)}" for x, y in points)

    def svg(self, name: str, inside: str) -> str:
        """The plot with its ticks; `name` is what a screen reader says."""
        ticks = [
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 8}" y1="{self.y(t)}" y2="{self.y(t)}"/>'
            f'<text x="{LEFT - 6}" y="{self.y(t) + 4}" text-anchor="end">{t:,.6g}</text>'
            for t in _ticks(*self.y_range)
        ]
        bottom = HEIGHT - BOTTOM + 14
        ticks += [
            f'<text x="{self.x(t)}" y="{bottom}" text-anchor="middle">{t:,.6g}</text>'
            for t in _ticks(*self.x_range)
        ]
        place = f'x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 3}" text-anchor="middle"'
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}"'
        return f"<svg {box}>{''.join(ticks)}<text {place}>{self.x_name}</text>{inside}</svg>"


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    span = max(high - low, LEAST_SPAN * max(abs(low), abs(high)), 1e-12)
    middle = (low + high) / 2
    return middle - 0.56 * span, middle + 0.56 * span


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def speed_against_memory(rows: Sequence[tuple[Compared, str]]) -> str:
    """Speed against memory; a line joins the settings that no other beats in both."""
    points = [(row, colour, row.record.memory_gib, row.record.tokens_per_sec_per_gpu)
              for row, colour in rows
              if row.record.memory_gib and row.record.tokens_per_sec_per_gpu]  # fmt: skip
    kinds = {row.record.memory_kind for row, *_ in points}
    if len(points) < 2 or len(kinds) > 1:
        return ""
    kind = (kinds.pop() or "").replace("allocated", "")
    axes = Axes([(x, y) for *_, x, y in points], f"memory, GiB {kind}")
    frontier: list[tuple[float, float]] = []
    for _, _, x, y in sorted(points, key=lambda point: (point[2], -point[3])):
        if not frontier or y > frontier[-1][1]:
            frontier.append((x, y))
    dashed = 'class="curve" stroke="var(--soft)" stroke-dasharray="4 3"'
    inside = f'<path {dashed} d="{axes.line(frontier)}"/>'
    for row, colour, x, y in points:
        hint = f"{row.record.setting}: {y:,.0f} tokens/s, {x:.1f} GiB, {row.verdict}"
        circle = f'<circle cx="{axes.x(x)}" cy="{axes.y(y)}" r="6" fill="{colour}">'
        inside += f"{circle}<title>{escape(hint)}</title></circle>"
    named = [(row, colour) for row, colour, *_ in points]
    return panel("Speed against memory", named, axes.svg("speed against memory", inside))


def loss_curves(rows: Sequence[tuple[Compared, str]]) -> str:
    """Training loss by step; folded where the tokens were random, since nothing is learnt."""
    known = [pair for pair in rows if len(_curve(pair[0])) > 1]
    real = [(row, c) for row, c in known if (row.record.arguments or {}).get("data") != "synthetic"]
    drawn = real or known
    if not drawn:
        return ""
    axes = Axes([point for row, _ in drawn for point in _curve(row)], "step")
    inside = "".join(
        f'<path class="curve" stroke="{colour}" d="{axes.line(_curve(row))}"/>'
        for row, colour in drawn
    )
    folded = "" if real else "Losses of random tokens, in which nothing can be learnt"
    return panel("Training loss by step", drawn, axes.svg("training loss by step", inside), folded)


def _curve(row: Compared) -> list[tuple[int, float]]:
    """A setting's losses that can be drawn, of at most 200 steps."""
    losses = [(n, loss) for n, loss in row.record.losses if n < MOST and -MOST < loss < MOST]
    return losses[:: math.ceil(len(losses) / 200) or 1]
