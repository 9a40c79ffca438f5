"""Where the time of a step on a GPU went: every moment of its timeline in exactly one class.

A moment belongs to the kernel that computes. If none computes, it belongs to communication
("exposed" means this), or without that to a copy. Otherwise the GPU is idle. Needs no torch.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from llm_train_bench.formulas.work import STEP_PARTS
from llm_train_bench.trace.breakdown_schema import Breakdown, CostlyKernel, HostGaps
from llm_train_bench.trace.kernel_names import (
    COMMUNICATION,
    ELEMENTWISE,
    LOSS,
    MATMUL,
    OPTIMIZER,
    kernel_class,
    matmul_format,
    operator_class,
)
from llm_train_bench.trace.read_trace import Ranges, Span, Trace
from llm_train_bench.trace.timeline import IDLE, covered, priority, sweep, union

HOST = "host"


def break_down_gpu(trace: Trace, matmul_flops: float | None) -> Breakdown:
    """The breakdown of a trace with GPU activities."""
    begin, end = _gpu_window(trace)
    n = max(1, len(trace.steps))
    labels = _label(trace)
    activities = [
        (max(s.start, begin), min(s.end, end), label, s)
        for s, label in zip(trace.gpu, labels, strict=True)
        if s.end > begin and s.start < end
    ]
    classes: dict[str, float] = defaultdict(float)
    gaps: list[tuple[float, float]] = []
    for start, stop, label in sweep(((a, b, label) for a, b, label, _ in activities), begin, end):
        classes[label] += stop - start
        if label == IDLE:
            gaps.append((start, stop))
    communication = union(
        (a, b) for a, b, label, _ in activities if priority(label) == priority(COMMUNICATION)
    )
    overlapped = communication - classes[COMMUNICATION]
    calls, time = Counter(), Counter()
    for a, b, label, span in activities:
        calls[span.name, label] += 1
        time[span.name, label] += b - a
    matmuls = [s for s, label in zip(trace.gpu, labels, strict=True) if label.startswith(MATMUL)]
    if matmul_flops is None:
        flops = _recorded_flops(trace, matmuls)
        matmul_flops = flops / n if flops else None
    return Breakdown(
        n_steps=n,
        step_time_s=(end - begin) / n / 1e6,
        classes_s=per_step(classes, n),
        communication_overlapped_s=max(0.0, overlapped) / n / 1e6,
        host_gaps=_host_gaps(trace, gaps, n),
        kernels=by_time(calls, time, n),
        matmul_s=sum(b - a for a, b, label, _ in activities if label.startswith(MATMUL)) / n / 1e6,
        matmul_flops=matmul_flops,
    )


def _gpu_window(trace: Trace) -> tuple[float, float]:
    """From the first step's start, or the end of older work still running then, to the last end."""
    begin = trace.steps[0].start if trace.steps else trace.gpu[0].start
    end = max(s.end for s in trace.gpu)
    if trace.steps:
        end = max(end, trace.steps[-1].end)
        # Work launched before the trace has no launch in it. The GPU has finished that work, at
        # the latest, when it begins the first work with a launch.
        first = next((s for s in trace.gpu if trace.launch_of(s) is not None), None)
        if first is not None:
            older = [s.end for s in trace.gpu if s.start < first.start]
            begin = max(begin, min(max(older, default=begin), first.start))
    return begin, end


def _label(trace: Trace) -> list[str]:
    """Each GPU activity's class: by its name, or in the loss and the optimizer by the range."""
    marks = [s for spans in trace.host.values() for s in spans if mark_of(s)]
    ranges, operators = Ranges(marks), _operators(trace)
    labels = []
    for span in trace.gpu:
        label, launch = kernel_class(span.name), trace.launch_of(span)
        around = launch and ranges.innermost(launch.thread, launch.start)
        label = marked(label, mark_of(around) if around else None)
        if label == MATMUL:
            types = operators.get(trace.operator_id(span), {}).get("Input type")
            known = matmul_format(span.name, types)
            label = f"{MATMUL} {known}" if known else MATMUL
        labels.append(label)
    return labels


def _operators(trace: Trace) -> dict[int, dict]:
    """Arguments of the CPU operators by the id that their kernels carry."""
    return {
        s.operator: s.args
        for spans in trace.host.values()
        for s in spans
        if s.category == "cpu_op" and s.operator is not None and s.args.get("Input Dims")
    }


def _recorded_flops(trace: Trace, matmuls: list[Span]) -> float | None:
    """FLOPs of all matmul kernels by the recorded shapes; None unless every one has its shapes."""
    operators = _operators(trace)
    seen: set[int] = set()
    total = 0.0
    for span in matmuls:
        known = trace.operator_id(span)
        if known in seen:  # one operator may need several kernels (split-k)
            continue
        seen.add(known)
        flops = matmul_flops_of(operators.get(known, {}).get("Input Dims"))
        if flops is None:
            return None
        total += flops
    return total


def _host_gaps(trace: Trace, gaps: list[tuple[float, float]], n: int) -> HostGaps | None:
    """Idle moments that began before the host began to launch the next kernel."""
    if not trace.launches:
        return None
    parts = Ranges(
        [
            s
            for spans in trace.host.values()
            for s in spans
            if s.category == "user_annotation" and s.name in STEP_PARTS
        ]
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
        by_part=per_step(by_part, n),
    )


def break_down_cpu(trace: Trace, matmul_flops: float | None) -> Breakdown:
    """The breakdown of a trace without a GPU."""
    busiest = max(trace.host, key=lambda t: len(trace.host[t]))
    thread = trace.steps[0].thread if trace.steps else busiest
    spans = trace.host.get(thread, [])
    begin = trace.steps[0].start if trace.steps else spans[0].start
    end = trace.steps[-1].end if trace.steps else max(s.end for s in spans)
    n = max(1, len(trace.steps))
    spans = [s for s in spans if s.end > begin and s.start < end]
    # gloo has its own threads; communication that the training thread only waits for is exposed.
    elsewhere = [
        (max(s.start, begin), min(s.end, end))
        for other, theirs in trace.host.items()
        for s in theirs
        if other != thread
        and operator_class(s.name) == COMMUNICATION
        and s.end > begin
        and s.start < end
    ]
    classes: dict[str, float] = defaultdict(float)
    time: Counter = Counter()
    calls: Counter = Counter()
    waiting = 0.0
    labels = dict(zip(map(id, spans), span_labels(spans), strict=True))
    for start, stop, span in pieces_of_thread(spans, begin, end):
        label = labels[id(span)] if span else HOST
        length = stop - start
        if label == HOST:
            waited = covered(start, stop, elsewhere)
            waiting += waited
            classes[COMMUNICATION] += waited
            length -= waited
        else:
            time[span.name, label] += length
        classes[label] += length
    for span in spans:
        calls[span.name, labels[id(span)]] += 1
    if matmul_flops is None:
        matmuls = outermost(s for s in spans if operator_class(s.name) == MATMUL)
        counts = [matmul_flops_of(s.args.get("Input Dims")) for s in matmuls]
        matmul_flops = sum(counts) / n if counts and None not in counts else None
    return Breakdown(
        n_steps=n,
        step_time_s=(end - begin) / n / 1e6,
        classes_s=per_step(classes, n),
        communication_overlapped_s=(union(elsewhere) - waiting) / n / 1e6,
        host_gaps=None,
        kernels=by_time(calls, time, n),
        matmul_s=sum(t for (_, label), t in time.items() if label.startswith(MATMUL)) / n / 1e6,
        matmul_flops=matmul_flops,
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
        mark = mark_of(span) or mark
        label = operator_class(span.name)
        if span.category == "user_annotation" and label != COMMUNICATION:
            label = HOST
        label = around if label is None else marked(label, mark)
        if label == MATMUL:
            known = matmul_format("", span.args.get("Input type"))
            label = f"{MATMUL} {known}" if known else MATMUL
        stack.append((span.end, label, mark))
        yield label


def outermost(spans: Iterable[Span]) -> list[Span]:
    """One thread's spans that lie in no other of its spans."""
    kept: list[Span] = []
    for span in spans:
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
    return kept


def break_down(trace: Trace, matmul_flops: float | None = None) -> Breakdown:
    """The breakdown of a trace; a trace without marked steps counts as one step.

    `matmul_flops`, the FLOPs of a step's matmuls, are taken from recorded shapes where not given.
    """
    return (break_down_gpu if trace.gpu else break_down_cpu)(trace, matmul_flops)


def mark_of(span: Span) -> str | None:
    """The class that a range of the host gives its elementwise work."""
    if span.category != "user_annotation":
        return None
    if span.name == LOSS:
        return LOSS
    return OPTIMIZER if span.name == OPTIMIZER or span.name.startswith("Optimizer.step#") else None


def marked(label: str, mark: str | None) -> str:
    """An optimizer range claims all computation, matmuls too; a loss range all except those."""
    if mark == OPTIMIZER and label in (MATMUL, ELEMENTWISE, LOSS):
        return OPTIMIZER
    return LOSS if mark == LOSS and label == ELEMENTWISE else label


def matmul_flops_of(dims: list | None) -> float | None:
    """2 x M x N x K (x batch) of the first two matrices among an operator's input shapes."""
    shapes = [d for d in dims or [] if isinstance(d, list) and 2 <= len(d) < 8 and
              all(isinstance(n, int) and 0 <= n < 2**48 for n in d)]  # fmt: skip
    for a, b in itertools.pairwise(shapes):
        if a[-1] == b[-2] and a[:-2] == b[:-2]:
            return 2.0 * math.prod(a) * b[-1]
    return None


def per_step(micros: dict[str, float], n: int) -> dict[str, float]:
    """Microseconds over all steps to seconds per step, longest first."""
    ordered = sorted(micros.items(), key=lambda item: -item[1])
    return {name: value / n / 1e6 for name, value in ordered if value > 0}


def by_time(calls: Counter, time: Counter, n: int) -> list[CostlyKernel]:
    """Kernels or operators, those that take longest first."""
    return [
        CostlyKernel(name=name, kind=kind, calls=calls[name, kind] / n, time_s=micros / n / 1e6)
        for (name, kind), micros in time.most_common()
    ]
