"""Where the time of a step on a CPU went: every moment of the training thread in exactly one class.

A moment belongs to the operator that runs, to communication if the thread only waits for it, else to the
host: Python and dispatch. Needs no torch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from bench.breakdown_parts import (
    HOST,
    Breakdown,
    by_time,
    mark_of,
    marked,
    matmul_flops_of,
    per_step,
)
from bench.intervals import covered, union
from bench.kernels import COMMUNICATION, MATMUL, matmul_format, operator_class
from bench.trace import Span, Trace


def break_down_cpu(trace: Trace, matmul_flops: float | None) -> Breakdown:
    """The breakdown of a trace without a GPU."""
    busiest = max(trace.host, key=lambda t: len(trace.host[t]))
    thread = trace.steps[0].thread if trace.steps else busiest
    spans = trace.host.get(thread, [])
    begin = trace.steps[0].start if trace.steps else spans[0].start
    end = trace.steps[-1].end if trace.steps else max(s.end for s in spans)
    n = max(1, len(trace.steps))
    spans = [s for s in spans if s.end > begin and s.start < end]
    # gloo works on threads of its own; what the training thread only waits for is exposed.
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
        classes=per_step(classes, n),
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
    """The class of each span's own time; what has none of its own takes that of the span around it."""
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
    """Those of one thread's spans that lie in no other of them."""
    kept: list[Span] = []
    for span in spans:
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
    return kept
