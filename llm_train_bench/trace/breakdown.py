"""Where the time of a step on a GPU went: every moment of its timeline in exactly one class.

A moment belongs to the kernel that computes. If none computes, it belongs to communication
("exposed" means this), or without that to a copy. Otherwise the GPU is idle. Needs no torch.
"""

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
    kernel_class,
    matmul_format,
    operator_class,
)
from llm_train_bench.trace.read_trace import Ranges, Span, Trace

HOST, IDLE = "host", "idle"
N_COSTLIEST = 10
Interval = tuple[float, float]


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


class _Parts(NamedTuple):
    """What a trace's steps are made of, all steps together [us]."""

    window: Interval
    steps: int
    classes: dict[str, float]
    overlapped: float
    calls: Counter[tuple[str, str]]
    """Of kernels or operators, by name and class; `times` are their times."""
    times: dict[tuple[str, str], float]
    matmul_flops: float | None
    gaps: list[Interval]


def break_down(trace: Trace, matmul_flops: float | None = None) -> Breakdown:
    """The breakdown of a trace; a trace without marked steps counts as one step.

    `matmul_flops`, the FLOPs of a step's matmuls, are taken from recorded shapes where not given.
    """
    parts = _gpu_parts(trace) if trace.gpu else _cpu_parts(trace)
    n = parts.steps
    if matmul_flops is None and parts.matmul_flops and not trace.lists_idle_gpu:
        matmul_flops = parts.matmul_flops / n
    matmul_times = (t for (_, label), t in parts.times.items() if label.startswith(MATMUL))
    begin, end = parts.window
    if end <= begin:
        raise UsageError(f"{trace.path}: its steps take no time; is it a PyTorch trace?")
    return Breakdown(
        n_steps=n,
        step_time_s=(end - begin) / n / 1e6,
        classes_s=_per_step(parts.classes, n),
        communication_overlapped_s=parts.overlapped / n / 1e6,
        host_gaps=_host_gaps(trace, parts.gaps, n),
        kernels=[
            CostlyKernel(name=name, kind=k, calls=parts.calls[name, k] / n, time_s=t / n / 1e6)
            for (name, k), t in sorted(parts.times.items(), key=lambda item: -item[1])
        ],
        matmul_s=sum(matmul_times) / n / 1e6,
        matmul_flops=matmul_flops,
    )


def _gpu_parts(trace: Trace) -> _Parts:
    begin, end, steps = _gpu_window(trace)
    labels = _label(trace)
    activities = [
        (max(s.start, begin), min(s.end, end), label, s.name)
        for s, label in zip(trace.gpu, labels, strict=True)
        if s.end > begin and s.start < end
    ]
    classes: dict[str, float] = defaultdict(float)
    gaps: list[Interval] = []
    for start, stop, label in sweep(((a, b, label) for a, b, label, _ in activities), begin, end):
        classes[label] += stop - start
        if label == IDLE:
            gaps.append((start, stop))
    communication = union(
        (a, b) for a, b, label, _ in activities if priority(label) == priority(COMMUNICATION)
    )
    overlapped = max(0.0, communication - classes[COMMUNICATION])
    calls: Counter[tuple[str, str]] = Counter()
    times: dict[tuple[str, str], float] = defaultdict(float)
    for a, b, label, name in activities:
        calls[name, label] += 1
        times[name, label] += b - a
    # One operator may need several kernels (split-k).
    matmuls = {
        trace.operator_id(s)
        for s, label in zip(trace.gpu, labels, strict=True)
        if label.startswith(MATMUL) and begin <= s.start < end
    }
    flops = _flops_of(("", trace.operators.get(id)) for id in matmuls)
    return _Parts((begin, end), steps, classes, overlapped, calls, times, flops, gaps)


def _gpu_window(trace: Trace) -> tuple[float, float, int]:
    """The begin, the end and the number of the steps that the GPU worked for.

    From the first step's start, or the end of older work still running then, to the last end. First steps
    whose work or launches were not recorded are left out.
    """
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


def _label(trace: Trace) -> list[str]:
    """Each GPU activity's class: by its name, or in the loss and the optimizer by the range."""
    ranges, labels = Ranges([s for s in trace.host_spans if _mark_of(s)]), []
    for span in trace.gpu:
        launch = trace.launch_of(span)
        around = launch and ranges.innermost(launch.thread, launch.start)
        label = COPIES if span.category != "kernel" else kernel_class(span.name)
        label = _marked(label, _mark_of(around) if around else None)
        types = trace.operators.get(trace.operator_id(span), {}).get("Input type")
        labels.append(_with_format(label, span.name, types))
    return labels


def _with_format(label: str, name: str, types: list[str] | None) -> str:
    """The class of a matmul with its number format, where that is known."""
    known = matmul_format(name, types) if label == MATMUL else None
    return f"{label} {known}" if known else label


def _flops_of(matmuls: Iterable[tuple[str, dict | None]]) -> float | None:
    """FLOPs of matmuls by name and the shapes in their arguments; None unless each one has shapes."""
    total = 0.0
    for name, arguments in matmuls:
        flops = matmul_flops_of((arguments or {}).get("Input Dims"), name)
        if flops is None:
            return None
        total += flops
    return total


def _host_gaps(trace: Trace, gaps: list[Interval], n: int) -> HostGaps | None:
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


def _cpu_parts(trace: Trace) -> _Parts:
    thread, steps = trace.training_thread, trace.steps
    spans = trace.host.get(thread, [])
    begin = steps[0].start if steps else spans[0].start
    end = steps[-1].end if steps else max(s.end for s in spans)
    spans = [s for s in spans if s.end > begin and s.start < end]
    # gloo has its own threads; communication that the training thread only waits for is exposed.
    elsewhere = [
        (max(s.start, begin), min(s.end, end))
        for s in trace.host_spans
        if s.thread != thread and operator_class(s.name) == COMMUNICATION
    ]
    classes: dict[str, float] = defaultdict(float)
    times: dict[tuple[str, str], float] = defaultdict(float)
    exposed = 0.0
    labels = dict(zip(map(id, spans), span_labels(spans), strict=True))
    for start, stop, span in pieces_of_thread(spans, begin, end):
        label, length = labels[id(span)] if span else HOST, stop - start
        if span and label != HOST:
            times[span.name, label] += length
        else:
            waiting = union((max(a, start), min(b, stop)) for a, b in elsewhere)
            exposed += waiting
            classes[COMMUNICATION] += waiting
            length -= waiting
        classes[label] += length
    return _Parts(
        (begin, end),
        max(1, len(steps)),
        classes,
        union(elsewhere) - exposed,
        Counter((s.name, labels[id(s)]) for s in spans),
        times,
        _flops_of((s.name, s.args) for s in host_matmuls(spans)),
        [],
    )


def pieces_of_thread(
    spans: list[Span], begin: float, end: float
) -> Iterator[tuple[float, float, Span | None]]:
    """Cut begin ... end into pieces, each with the innermost of one thread's spans around it."""
    now, stack = begin, []
    for span in [*spans, None]:
        start = span.start if span else end
        while stack and stack[-1].end <= start:
            inner = stack.pop()
            if inner.end > now:
                yield now, min(inner.end, end), inner
                now = min(inner.end, end)
        if start > now:
            yield now, start, stack[-1] if stack else None
            now = start
        if span:
            stack.append(span)


def span_labels(spans: list[Span]) -> Iterator[str]:
    """Class of each span's own time; a span without a class takes that of the span around it."""
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
        yield label


def outermost(spans: Iterable[Span]) -> list[Span]:
    """One thread's spans that lie in no other of its spans."""
    outer: list[Span] = []
    for span in spans:
        if not outer or span.start >= outer[-1].end:
            outer.append(span)
    return outer


def host_matmuls(spans: Iterable[Span]) -> list[Span]:
    """One thread's matmuls, without those that are a part of attention in blocks."""
    kinds = ((s, _mark_of(s) == ATTENTION) for s in spans)
    outer = outermost(s for s, blocks in kinds if blocks or operator_class(s.name) == MATMUL)
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


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals in order, with those that overlap or touch as one."""
    result: list[Interval] = []
    for a, b in sorted(intervals):
        if result and a <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], b)
        elif b > a:
            result.append((a, b))
    return result


def union(intervals: Iterable[Interval]) -> float:
    """Length that the intervals cover together."""
    return math.fsum(b - a for a, b in joined(intervals))
