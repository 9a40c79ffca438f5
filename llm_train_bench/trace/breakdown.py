"""Where the time of a step on a GPU went: every moment of its timeline in exactly one class.

A moment belongs to the kernel that computes. If none computes, it belongs to communication
("exposed" means this), or without that to a copy. Otherwise the GPU is idle. Needs no torch.
"""

import bisect
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.strict import Strict
from llm_train_bench.formulas.work import STEP_PARTS
from llm_train_bench.trace.kernel_names import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    LOSS,
    MATMUL,
    OPTIMIZER,
    collective_kind,
    kernel_class,
    matmul_format,
    operator_class,
)
from llm_train_bench.trace.read_trace import Ranges, Span, Trace

HOST, IDLE = "host", "idle"
N_COSTLIEST = 10
Piece = tuple[float, float]  # start and end [us]
Interval = tuple[float, float, float, Any]  # its order, start, end, and what it is


class CostlyKernel(Strict):
    """A kernel, or on a CPU an operator."""

    name: str
    kind: str
    calls: float
    time_s: float


class HostGaps(Strict):
    """Moments in which the GPU waited for the host to give it its next kernel, per step."""

    count: float
    time_s: float
    longest_s: float
    by_part: dict[str, float]


class StepTime(Strict):
    """Seconds per step; the classes add up to `step_time_s`."""

    n_steps: int
    step_time_s: float
    classes_s: dict[str, float]
    communication_overlapped_s: float
    host_gaps: HostGaps | None
    matmul_flops: float | None
    # Known for our own runs only: they know the device's measured rate.
    matmul_roof_fraction: float | None = None


class Breakdown(StepTime):
    """The same with all kernels."""

    kernels: list[CostlyKernel]
    matmul_s: float

    @property
    def costliest(self) -> list[CostlyKernel]:
        return self.kernels[:N_COSTLIEST]

    @property
    def matmul_tflops(self) -> float | None:
        """Rate of the matmuls while they run [TFLOP/s]."""
        if self.matmul_flops is None or not self.matmul_s:
            return None
        return self.matmul_flops / self.matmul_s / 1e12


class Activity(NamedTuple):
    """A GPU's kernel or copy, or a CPU's operator, with its class.

    `pieces` say when it runs itself [us]: an operator's leave out the operators inside it.
    """

    span: Span
    label: str
    pieces: list[Piece]


def break_down(trace: Trace, matmul_flops: float | None = None) -> Breakdown:
    """The breakdown of a trace; a trace without marked steps counts as one step.

    `matmul_flops`, the FLOPs of a step's matmuls, are taken from recorded shapes where not given.
    """
    begin, end, n = _window(trace)
    if end <= begin:
        raise UsageError(f"{trace.path}: its steps take no time; is it a PyTorch trace?")
    inside = [a for a in activities(trace) if a.span.end > begin and a.span.start < end]
    # On a CPU copies are its own work, and communication runs on other threads.
    orders = {COMMUNICATION: 1, COPIES: 2} if trace.gpu else {}
    intervals: list[Interval] = []
    times: dict[tuple[str, str], float] = defaultdict(float)
    for span, label, pieces in inside:
        for start, stop in ((max(a, begin), min(b, end)) for a, b in pieces):
            if label != HOST and stop >= start:
                intervals.append((orders.get(label, 0), start, stop, label))
                times[span.name, label] += stop - start
    if not trace.gpu:
        others = (s for s in trace.host_spans if s.thread != trace.training_thread)
        intervals += [
            (1, max(s.start, begin), min(s.end, end), COMMUNICATION)
            for s in others
            if operator_class(s.name) == COMMUNICATION
        ]
    classes: dict[str, float] = defaultdict(float)
    exposed, gaps = 0.0, []
    for start, stop, first in sweep(intervals, begin, end):
        if first is None:
            gaps.append((start, stop))
            classes[IDLE if trace.gpu else HOST] += stop - start
        else:
            classes[first[-1]] += stop - start
            exposed += stop - start if first[0] == 1 else 0.0
    communication = union((a, b) for order, a, b, _ in intervals if order == 1)
    if matmul_flops is None and not trace.lists_idle_gpu:
        matmul_flops = (_recorded_flops(trace, inside, begin) or 0.0) / n or None
    calls = Counter((a.span.name, a.label) for a in inside)
    return Breakdown(
        n_steps=n,
        step_time_s=(end - begin) / n / 1e6,
        classes_s=_per_step(classes, n),
        communication_overlapped_s=max(0.0, communication - exposed) / n / 1e6,
        host_gaps=_host_gaps(trace, gaps, n),
        kernels=[
            CostlyKernel(name=name, kind=kind, calls=calls[name, kind] / n, time_s=t / n / 1e6)
            for (name, kind), t in sorted(times.items(), key=lambda item: -item[1])
        ],
        matmul_s=sum(t for (_, kind), t in times.items() if kind.startswith(MATMUL)) / n / 1e6,
        matmul_flops=matmul_flops,
    )


def _window(trace: Trace) -> tuple[float, float, int]:
    """The begin, the end and the number of the steps.

    On a GPU from the first step's start, or the end of older work still running then, to the last end.
    First steps whose work or launches were not recorded are left out.
    """
    if not trace.gpu:
        spans = trace.steps or trace.host[trace.training_thread]
        return spans[0].start, max(s.end for s in spans), max(1, len(trace.steps))
    end = max(s.end for s in trace.gpu)
    if not trace.steps:
        return trace.gpu[0].start, end, 1
    end, starts = max(end, trace.steps[-1].end), [s.start for s in trace.steps]
    # Work from before the trace has no origin in it. The GPU has finished that work, at the latest, when
    # it begins the first of the trace's own.
    own = [(s, origin) for s in trace.gpu if (origin := trace.origin_of(s)) is not None]
    if not own:
        return starts[0], end, len(starts)
    lost = max(0, bisect.bisect_right(starts, min(origin for _, origin in own)) - 1)
    worked = [s.start for s in trace.gpu if trace.origin_of(s) is None]
    worked += [c.start for c in trace.launches.values() if "Launch" in c.name]
    if not any(starts[0] <= start < starts[lost] for start in worked):
        lost = 0  # the GPU had nothing to do
    first = own[0][0].start
    older = max((s.end for s in trace.gpu if s.start < first), default=starts[0])
    return max(starts[lost], min(older, first)), end, len(starts) - lost


def activities(trace: Trace) -> list[Activity]:
    """What a trace's GPU does, or without one its training thread, in order of start."""
    if not trace.gpu:
        return _operators(trace.host.get(trace.training_thread, []))
    ranges, found = Ranges(s for s in trace.host_spans if _mark_of(s)), []
    for span in trace.gpu:
        launch = trace.launch_of(span)
        around = launch and ranges.innermost(launch.thread, launch.start)
        label = COPIES if span.category != "kernel" else kernel_class(span.name)
        label = _marked(label, _mark_of(around) if around else None)
        types = trace.operators.get(trace.operator_id(span), {}).get("Input type")
        label = _with_format(label, span.name, types)
        found.append(Activity(span, label, [(span.start, span.end)]))
    return found


def _operators(spans: list[Span]) -> list[Activity]:
    """One thread's spans; one without a class takes that of the span around it."""
    found: list[Activity] = []
    stack: list[tuple[float, str, str | None]] = []
    for span in spans:
        while stack and stack[-1][0] <= span.start:
            stack.pop()
        _, around, mark = stack[-1] if stack else (0.0, HOST, None)
        mark = _mark_of(span) or mark
        label = operator_class(span.name)
        if span.category == "user_annotation" and label != COMMUNICATION:
            label = HOST
        label = around if label is None else _marked(label, mark)
        label = _with_format(label, "", span.args.get("Input type"))
        stack.append((span.end, label, mark))
        found.append(Activity(span, label, []))
    # Of the spans around a moment the one that began last is the innermost.
    depths = ((-i, a.span.start, a.span.end, a) for i, a in enumerate(found))
    for start, stop, first in sweep(depths, -math.inf, math.inf):
        if first is not None:
            first[-1].pieces.append((start, stop))
    return found


def collectives(trace: Trace) -> list[tuple[str, Span]]:
    """Transfers between ranks by kind, in order: NCCL's kernels, or ranges of gloo's own threads."""
    spans = [s for s in trace.gpu if kernel_class(s.name) == COMMUNICATION]
    if not trace.gpu:
        spans = [s for s in trace.host_spans if s.name.startswith("gloo:")]
        spans.sort(key=lambda s: s.start)
    return [(collective_kind(s.args.get("Collective name"), s.name), s) for s in spans]


def _with_format(label: str, name: str, types: list[str] | None) -> str:
    """The class of a matmul with its number format, where that is known."""
    known = matmul_format(name, types) if label == MATMUL else None
    return f"{label} {known}" if known else label


def _recorded_flops(trace: Trace, inside: list[Activity], begin: float) -> float | None:
    """FLOPs of matmuls by the shapes of their operators; None unless each one has shapes."""
    if trace.gpu:  # one operator may need several kernels (split-k)
        kernels = (a.span for a in inside if a.label.startswith(MATMUL) and a.span.start >= begin)
        operators = {trace.operator_id(kernel) for kernel in kernels}
        matmuls = [("", trace.operators.get(operator, {})) for operator in operators]
    else:
        matmuls = [(span.name, span.args) for span in host_matmuls(a.span for a in inside)]
    flops = [matmul_flops_of(args.get("Input Dims"), name) for name, args in matmuls]
    return None if None in flops else sum(filter(None, flops))


def _host_gaps(trace: Trace, gaps: list[Piece], n: int) -> HostGaps | None:
    """Idle moments that began before the host began to launch the next kernel."""
    if not trace.gpu or not trace.launches:
        return None
    parts = Ranges(
        [s for s in trace.host_spans if s.category == "user_annotation" and s.name in STEP_PARTS]
    )
    by_start = {s.start: s for s in reversed(trace.gpu)}
    late, by_part = [], defaultdict(float)
    for start, stop in gaps:
        span = by_start.get(stop)
        launch = trace.launch_of(span) if span else None
        if launch is None or launch.start <= start:
            continue
        late.append(stop - start)
        # Backward runs on its own thread, while the training thread waits in the range.
        around = [parts.innermost(thread, launch.start) for thread in parts.by_thread]
        name = next((a.name for a in around if a), "other")
        by_part[name] += stop - start
    return HostGaps(
        count=len(late) / n,
        time_s=sum(late) / n / 1e6,
        longest_s=max(late, default=0.0) / 1e6,
        by_part=_per_step(by_part, n),
    )


def host_matmuls(spans: Iterable[Span]) -> list[Span]:
    """One thread's matmuls that lie in no other, without those that are a part of attention in blocks."""
    outer: list[Span] = []
    for span in spans:
        counts = _mark_of(span) == ATTENTION or operator_class(span.name) == MATMUL
        if counts and not (outer and span.start < outer[-1].end):
            outer.append(span)
    return [span for span in outer if operator_class(span.name) == MATMUL]


def _mark_of(span: Span) -> str | None:
    """The class that a range of the host gives its elementwise work; attention in blocks gives all."""
    if "block_attention" in span.name:
        return ATTENTION
    if span.category != "user_annotation":
        return None
    if span.name == LOSS:
        return LOSS
    return OPTIMIZER if span.name == OPTIMIZER or span.name.startswith("Optimizer.step#") else None


def _marked(label: str, mark: str | None) -> str:
    """An optimizer range claims all computation, matmuls too; a loss range all except those."""
    if mark == ATTENTION:
        return ATTENTION
    if mark == OPTIMIZER and label in (MATMUL, ELEMENTWISE, LOSS):
        return OPTIMIZER
    return LOSS if mark == LOSS and label == ELEMENTWISE else label


def matmul_flops_of(dims: list | None, name: str = "") -> float | None:
    """2 x M x N x K (x batch) of the first two matrices among an operator's input shapes.

    Rows that meet one of several matrices each are a grouped matmul: (M, K), (groups, K, N).
    """
    lists = [d for d in dims or [] if isinstance(d, list) and 2 <= len(d) < 8]
    shapes = [d for d in lists if all(isinstance(n, int) and 0 <= n < 2**48 for n in d)]
    for a, b in itertools.pairwise(shapes):
        if "onednn_" in name:  # (..., K) and (N, K), or (M, N) and (M, K): model/onednn.py
            return 2.0 * math.prod(a) * b["grad_weight" in name]
        if a[-1] == b[-2] and (a[:-2] == b[:-2] or ("grouped_mm" in name and len(b) == 3)):
            return 2.0 * math.prod(a) * b[-1]
    return None


def _per_step(micros: dict[str, float], n: int) -> dict[str, float]:
    """Microseconds over all steps to seconds per step, longest first."""
    ordered = sorted(micros.items(), key=lambda item: -item[1])
    return {name: value / n / 1e6 for name, value in ordered if value > 0}


def sweep(
    intervals: Iterable[Interval], begin: float, end: float
) -> Iterator[tuple[float, float, Interval | None]]:
    """Cut begin ... end into pieces, each with the least of the intervals around it, or None."""
    waiting = sorted(intervals, key=lambda interval: interval[1], reverse=True)
    running: list[Interval] = []  # a heap
    now = begin
    while now < end:
        while waiting and waiting[-1][1] <= now:
            heapq.heappush(running, waiting.pop())
        while running and running[0][2] <= now:
            heapq.heappop(running)
        first = running[0] if running else None
        # Something of a lower order may start before this ends.
        upcoming = waiting[-1][1] if waiting else end
        stop = min(first[2] if first else end, upcoming, end)
        yield now, stop, first
        now = stop


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces in order, with those that overlap or touch as one."""
    result: list[Piece] = []
    for a, b in sorted(pieces):
        if result and a <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], b)
        elif b > a:
            result.append((a, b))
    return result


def union(pieces: Iterable[Piece]) -> float:
    """Length that the pieces cover together."""
    return math.fsum(b - a for a, b in joined(pieces))
