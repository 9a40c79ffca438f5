"""The kernels that a traced step ran: attention, matmuls, and what fell back. Needs no torch."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from pydantic import Field

from llm_train_bench.base.strict import Strict
from llm_train_bench.base.tables import grouped
from llm_train_bench.trace.breakdown import collectives, host_matmuls, union
from llm_train_bench.trace.kernel_names import MATMUL, kernel_class, matmul_format, named
from llm_train_bench.trace.read_trace import Span, Trace

# PyTorch's operators of attention. They tell more than kernels: AOTriton serves two of them.
_OPERATOR = re.compile(
    r"^(?:aten::_scaled_dot_product_(?:(flash|efficient|cudnn)_attention(?:_for_cpu)?|attention_(math))"
    r"|llm_train_bench::(block)_attention)(_backward)?$"
)
_BACKWARD = re.compile(r"backward|bwd|fmha_cutlassB", re.I)
_FUSED_OPTIMIZER = re.compile(r"_fused_(adamw?|sgd)_|Fused(Adam|Sgd)|multi_tensor_adam")
_WAITING_COPY = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")
# Bytes that each rank sends in a ring, in units of those it hands in (nccl-tests, PERFORMANCE.md).
_ON_THE_BUS: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}
_BYTES = {"float": 4, "bfloat16": 2, "half": 2, "long": 8, "int": 4, "double": 8}


class CollectiveUse(Strict):
    """One kind of collective in a step."""

    calls: float
    time_s: float
    input_bytes: float | None = None
    bus_gb_per_s: float | None = None


class Observed(Strict):
    """The kernels that ran in one step after the window, on rank 0."""

    attention: dict[str, list[str]]
    matmuls: dict[str, float]
    collectives: dict[str, CollectiveUse] = Field(default_factory=dict)
    paths: dict[str, str] = Field(default_factory=dict)
    """By part of the model, which of several equal ways it took in this run."""
    graphs_from_cache: int | None = None
    graphs_generated: int | None = None

    @property
    def kernels(self) -> set[str]:
        """All kernels of attention."""
        return {name for names in self.attention.values() for name in names}


def observe(trace: Trace, trains: bool, ranks: int = 1, assume_math: bool = True) -> Observed:
    """What ran in the steps of a trace; `trains` says whether they have a backward.

    `ranks` is the size of a collective's group where the trace does not tell it. Where no kernel of
    attention ran, attention is plain matmuls, or unknown without `assume_math`.
    """
    n = max(1, len(trace.steps))
    names = {s.name for s in (*trace.host_spans, *trace.gpu)}
    sides = ("forward", "backward") if trains else ("forward",)
    kernels = _attention(names)
    if not kernels and assume_math:
        kernels = {side: {"math"} for side in sides}
    return Observed(
        attention={side: sorted(kernels.get(side, ())) for side in sides},
        matmuls={name: calls / n for name, calls in sorted(_matmuls(trace).items())},
        collectives=_collectives(trace, ranks, n) if ranks > 1 else {},
    )


def fallbacks(trace: Trace, steps_optimizer: bool = True) -> Iterator[tuple[str, str]]:
    """What ran slower than it could, and what to do: unfused optimizers, copies that wait."""
    names = {s.name for s in (*trace.host_spans, *trace.gpu)}
    if steps_optimizer and not any(map(_FUSED_OPTIMIZER.search, names)):
        yield "fallback: optimizer not fused", "use fused=True, where it has that"
    copies = [s.name for s in trace.gpu if _WAITING_COPY.search(s.name) and "Pinned" not in s.name]
    for name, calls in Counter(copies).items():
        per_step = calls / max(1, len(trace.steps))
        text = f"fallback: copy that waits for the host: {name}, {per_step:g} per step"
        yield text, "copy from pinned memory with non_blocking=True"


def _attention(names: set[str]) -> dict[str, set[str]]:
    """Names of kernels by side; nothing where no kernel of attention was seen."""
    found: dict[str, set[str]] = defaultdict(set)
    for match in filter(None, map(_OPERATOR.match, names)):
        name = match[1] or match[2] or "blocks"
        found["backward" if match[4] else "forward"].add(name)
    by_operators = bool(found)  # which name all kernels except FlexAttention's
    for name in (name for name in names if "::_" not in name):
        kernel = named("attention", name)
        if kernel == "flex" or (kernel and not by_operators):
            found["backward" if _BACKWARD.search(name) else "forward"].add(kernel)
    if "math" in found.get("forward", ()):  # its backward is autograd's, of plain matmuls
        found["backward"].add("math")
    return found


def _matmuls(trace: Trace) -> Counter[str]:
    """Calls of matmuls by library and format, in all steps."""
    if trace.gpu:
        matmuls = (
            (span.name, trace.operators.get(trace.operator_id(span), {}))
            for span in trace.gpu
            if kernel_class(span.name) == MATMUL
        )
    else:
        matmuls = (
            (span.name, span.args) for spans in trace.host.values() for span in host_matmuls(spans)
        )
    calls: Counter[str] = Counter()
    for kernel, args in matmuls:
        library = named("libraries", kernel) or "other"
        number_format = matmul_format(kernel if trace.gpu else "", args.get("Input type"))
        calls[f"{library} {number_format or 'unknown'}"] += 1
    return calls


def _collectives(trace: Trace, ranks: int, n: int) -> dict[str, CollectiveUse]:
    """Collectives by kind: NCCL's and RCCL's kernels, or gloo's ranges on its own threads."""
    by_kind = grouped(collectives(trace), lambda call: call[0].replace("_", "-"))
    uses = {}
    for kind, calls in by_kind.items():
        if kind not in _ON_THE_BUS:
            continue
        spans = [span for _, span in calls]
        seconds = union((s.start, s.end) for s in spans) / n / 1e6
        use = uses[kind] = CollectiveUse(calls=len(spans) / n, time_s=seconds)
        sizes = [(s, size) for s in spans if (size := _input_bytes(s)) is not None]
        if len(sizes) == len(spans) and seconds:
            use.input_bytes = sum(size for _, size in sizes) / n
            sent = sum(size * _ON_THE_BUS[kind](_group_size(s, ranks)) for s, size in sizes)
            use.bus_gb_per_s = sent / n / seconds / 1e9
    return uses


def _group_size(span: Span, ranks: int) -> int:
    size = span.args.get("Group size")
    return size if isinstance(size, int) and size > 0 else ranks


def _input_bytes(span: Span) -> float | None:
    """Bytes that a rank handed to a collective, from what NCCL's kernels or gloo's ranges tell."""
    count, kind = span.args.get("In msg nelems"), span.args.get("dtype")
    if not isinstance(count, int):
        types, dims = span.args.get("Input type"), span.args.get("Input Dims")
        if not (types and dims and isinstance(dims[0], list)):
            return None
        count, kind = math.prod(dims[0]), types[0]
    width = _BYTES.get(str(kind).lower().removeprefix("c10::"))
    return None if width is None else float(count * width)
