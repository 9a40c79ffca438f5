"""The kernels that a traced step ran: attention, matmuls, and what fell back. Needs no torch."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from bench.strict import Strict, about
from bench.trace.breakdown import outermost
from bench.trace.kernel_names import MATMUL, kernel_class, matmul_format, operator_class
from bench.trace.read_trace import Span, Trace

# PyTorch's operators of attention. They tell more than kernels: AOTriton serves two of them.
_OPERATOR = re.compile(
    r"^aten::_scaled_dot_product_(?:(flash|efficient|cudnn)_attention(?:_for_cpu)?|attention_(math))"
    r"(_backward)?$"
)
# Kernels, for steps whose operators are not recorded, as those inside CUDA graphs.
_KERNELS = {
    "flex": re.compile(r"^triton_tem_.*flex_(attention|decoding)"),
    "cudnn": re.compile(r"cudnn_generated_fort|cudnn.*sdpa", re.IGNORECASE),
    "efficient": re.compile(r"fmha_cutlass|mem_eff", re.IGNORECASE),
    "flash": re.compile(r"flash|^attn_(fwd|bwd)|^bwd_kernel_(dk_dv|dq|fuse)", re.IGNORECASE),
}
_BACKWARD = re.compile(r"backward|bwd|fmha_cutlassB", re.IGNORECASE)
_LIBRARIES = {
    "triton": re.compile(r"triton|^_?matmul_(kernel|ogs)|fused_moe_kernel", re.IGNORECASE),
    "tensile": re.compile(r"cijk_", re.IGNORECASE),  # rocBLAS and hipBLASLt
    "ck": re.compile(r"\bck(_tile)?::|kernel_gemm_xdl", re.IGNORECASE),
    "aiter": re.compile(r"aiter", re.IGNORECASE),
    "cutlass": re.compile(r"cutlass::device_kernel|cutlass::gemm", re.IGNORECASE),
    "cublas": re.compile(
        r"nvjet|xmma|cublas|cutlass_\d|gemv|splitk|^(void )?\w*gemm", re.IGNORECASE
    ),
    "onednn": re.compile(r"mkldnn|onednn", re.IGNORECASE),
    "mkl": re.compile(r"^mkl::"),
    "aten": re.compile(r"^aten::"),
}
_FUSED_OPTIMIZER = re.compile(r"_fused_(adamw?|sgd)_|Fused(Adam|Sgd)|multi_tensor_adam")
_WAITING_COPY = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")


class Observed(Strict):
    """The kernels that ran in one step after the window, on rank 0."""

    attention: dict[str, list[str]] = about(
        "Kernels of attention in `forward` and `backward`, by the names of `--attention`; `math` is "
        "plain matmuls. Empty where a trace cannot tell."
    )
    matmuls: dict[str, float] = about(
        "Calls of a step by library and format, as `cublas bf16`. `aten` is a CPU's operator, whose "
        "library PyTorch does not name."
    )
    fallbacks: list[str] = about(
        "Slower paths that were taken: attention in plain matmuls, FP8 layers that ran in a higher "
        "format, an optimizer that is not fused, copies that wait for the host."
    )
    mismatches: list[str] = about(
        "Kernels that differ from what the flags ask for; they make the run unfit for comparison.",
        default=[],
    )
    graphs_from_cache: int | None = about(
        "Graphs whose code came from Inductor's cache; `null` if nothing was compiled.",
        default=None,
    )
    graphs_generated: int | None = about(
        "Graphs whose code was generated in this run.", default=None
    )

    @property
    def kernels(self) -> set[str]:
        """All kernels of attention."""
        return {name for names in self.attention.values() for name in names}


def observe(trace: Trace, trains: bool) -> Observed:
    """What ran in the steps of a trace; `trains` says whether they have a backward."""
    n = max(1, len(trace.steps))
    names = {s.name for spans in (*trace.host.values(), trace.gpu) for s in spans}
    sides = ("forward", "backward") if trains else ("forward",)
    found = _attention(names) or {side: {"math"} for side in sides}
    fallbacks = []
    if not any(map(_FUSED_OPTIMIZER.search, names)):
        fallbacks.append("optimizer that is not fused")
    copies = Counter(s.name for s in trace.gpu if _WAITING_COPY.search(s.name))
    for name, calls in copies.items():
        if "Pinned" not in name:
            fallbacks.append(f"host copy that waits: {name}, {calls / n:g} a step")
    return Observed(
        attention={side: sorted(found.get(side, ())) for side in sides},
        matmuls={name: calls / n for name, calls in sorted(_matmuls(trace).items())},
        fallbacks=fallbacks,
    )


def _attention(names: set[str]) -> dict[str, set[str]]:
    """Names of kernels by side; nothing where no kernel of attention was seen."""
    found: dict[str, set[str]] = defaultdict(set)
    for match in filter(None, map(_OPERATOR.match, names)):
        found["backward" if match[3] else "forward"].add(match[1] or match[2])
    kernels = ("flex",) if found else _KERNELS  # operators name all kernels except FlexAttention's
    for name in (name for name in names if "::_" not in name):
        kernel = next((k for k in kernels if _KERNELS[k].search(name)), None)
        if kernel:
            found["backward" if _BACKWARD.search(name) else "forward"].add(kernel)
    if "math" in found.get("forward", ()):  # its backward is autograd's, of plain matmuls
        found["backward"].add("math")
    return found


def _matmuls(trace: Trace) -> Counter:
    """Calls of matmuls by library and format, in all steps."""
    calls: Counter = Counter()
    if trace.gpu:
        types = {s.operator: s.args.get("Input type") for s in _operators(trace)}
        for span in trace.gpu:
            if kernel_class(span.name) == MATMUL:
                known = types.get(trace.operator_id(span))
                calls[_named(span.name, matmul_format(span.name, known))] += 1
        return calls
    for spans in trace.host.values():
        for span in outermost([s for s in spans if operator_class(s.name) == MATMUL]):
            calls[_named(span.name, matmul_format("", span.args.get("Input type")))] += 1
    return calls


def _operators(trace: Trace) -> Iterator[Span]:
    for spans in trace.host.values():
        yield from (s for s in spans if s.category == "cpu_op" and s.operator is not None)


def _named(kernel: str, number_format: str | None) -> str:
    library = next((n for n, pattern in _LIBRARIES.items() if pattern.search(kernel)), "other")
    return f"{library} {number_format or 'unknown'}"
