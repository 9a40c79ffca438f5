"""Cut a timeline into labelled pieces, and measure what intervals cover. Needs no torch."""

import math
from collections.abc import Iterable

from llm_train_bench.trace.kernel_names import COMMUNICATION, COPIES

IDLE = "idle"
Interval = tuple[float, float]


def priority(label: str) -> int:
    """Order of labels that share a moment: computation, communication, copies, nothing."""
    return {COMMUNICATION: 1, COPIES: 2, IDLE: 3}.get(label, 0)


def sweep(
    intervals: Iterable[tuple[float, float, str]], begin: float, end: float
) -> list[tuple[float, float, str]]:
    """Cut begin ... end into pieces of one label each: compute over communication over copies.

    If two kernels compute at once, the moment counts for the one that started first.
    """
    waiting = sorted(intervals)
    pieces: list[tuple[float, float, str]] = []
    now, i = begin, 0
    running: list[tuple[int, float, float, str]] = []  # priority, start, end, label
    while now < end:
        while i < len(waiting) and waiting[i][0] <= now:
            a, b, label = waiting[i]
            running.append((priority(label), a, b, label))
            i += 1
        running = [r for r in running if r[2] > now]
        upcoming = waiting[i][0] if i < len(waiting) else end
        if running:
            _, _, stop, label = min(running)
            # Something of a higher priority may start before this ends.
            stop = min(stop, upcoming, end)
        else:
            stop, label = min(upcoming, end), IDLE
        if pieces and pieces[-1][2] == label and pieces[-1][1] == now and label != IDLE:
            pieces[-1] = (pieces[-1][0], stop, label)
        else:
            pieces.append((now, stop, label))
        now = stop
    return pieces


def joined(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The intervals in order, with those that overlap or lie at most `gap` apart as one."""
    result: list[Interval] = []
    for a, b in sorted(intervals):
        if result and a - result[-1][1] <= gap:
            result[-1] = result[-1][0], max(result[-1][1], b)
        elif b > a:
            result.append((a, b))
    return result


def union(intervals: Iterable[Interval]) -> float:
    """Length that the intervals cover together."""
    return math.fsum(b - a for a, b in joined(intervals))
