"""Classes of GPU kernels and CPU operators, read off their names. Needs no torch.

The patterns match the names of cuBLAS (nvjet, xmma), CUTLASS, cuDNN, FlashAttention, Tensile and
hipBLASLt (Cijk), Composable Kernel, AITER, Triton, Inductor, NCCL, RCCL and PyTorch.
"""

import functools
import re
from collections.abc import Iterable

MATMUL, ATTENTION, COMMUNICATION, COPIES = "matmul", "attention", "communication", "copies"
LOSS, OPTIMIZER, ELEMENTWISE = "loss", "optimizer", "elementwise"
CONVOLUTION, SCAN, EMBEDDING = "convolution", "scan", "embedding"

_COMMUNICATION = (
    r"nccl|rccl|mscclkernel|gloo|record_param_comms|c10d(_functional)?::|cross_device_reduce"
    r"|^all_?reduce|one_?shot_all_?reduce|two_?shot_all_?reduce|multimem_"
)
# Functions that say nothing by themselves: their template arguments name what they compute.
_WRAPPERS = re.compile(
    r"device_kernel|kernel\d*|kentry|run_global|multi_tensor_apply_kernel|cunn_softmax\w*"
    r"|\w*(elementwise|reduce|for_each)_kernel\w*|fused_moe_kernel\w*",
    re.IGNORECASE,
)
LONGEST = 4096  # letters of a name that are looked at
_COPY = re.compile(r"mem(cpy|set)", re.IGNORECASE)
_NO_PART = re.compile(
    r"\(anonymous namespace\)::|<unnamed>::| \[clone [^]]*\]|\.kd$|decltype\(auto\) "
)
# By namespace, where functions have general names.
_NAMESPACES = (
    (EMBEDDING, r"fbgemm.*(embedding|tbe|jagged)"),
    (COMMUNICATION, r"::(internode|intranode)(_ll)?::"),
    (CONVOLUTION, r"cutlass_cudnn|cudnn::winograd"),
    (MATMUL, r"gemvx::"),
    (ATTENTION, r"\bflash::"),
)
_LOSS = r"log_?softmax|nll_loss|cross_entropy|xentropy"
# In the order in which they are tried. Inductor's fused kernels (poi, red, ...) carry the names of all
# their operators, of matmuls they only prepare too; its templates (tem) are matmuls, except
# FlexAttention's, and also name what they fuse. Convolutions are named after the GEMM in them, and
# FBGEMM's namespace stands before all of its kernels. Muon's matmuls are the optimizer's work.
_KERNEL_CLASSES = (
    (COMMUNICATION, _COMMUNICATION),
    (COPIES, r"^mem(cpy|set)|split_with_sizes_copy|chunk_cat|__amd_rocclr_(copy|fill)"),
    (LOSS, r"^triton_(poi|red|per|for|unk|spl|coo)_.*(log_softmax|cross_entropy)"),
    (ELEMENTWISE, r"^triton_(poi|red|per|for|unk|spl|coo)_|reshape_and_cache|kv_indices|quantize"),
    (MATMUL, r"^triton_tem_(?!.*flex_(attention|decoding))|^triton_tem_.*_(add|b)?mm_"),
    (SCAN, r"selective_scan|chunk_(scan|state|cumsum)|state_passing|ssd_|bmm_chunk|chunk_gated_delta"
     r"|chunk_(fwd|bwd)_kernel|fused_recurrent|scaled_dot_kkt|local_cumsum|recompute_w_u|solve_tril"
     r"|merge_\d+x\d+.*_inverse|_wy_repr|flat::.*deltarule"),
    (ATTENTION, r"flash(?!infer)|fmha|attn_(fwd|bwd)|_attn_|sdpa|attention|cudnn_generated_fort"
     r"|kernel_mha|^_?bwd_(kernel_(dk_?dv|dq|fuse)|preprocess)|compute_dot_do_o|convert_dq_to|(^|_)mla_"
     r"|grouped_kernel_stage|paged_decode|batch_?(decode|prefill)"),
    (EMBEDDING, r"split_embedding|embedding_bag"),
    (CONVOLUTION, r"conv(olve|olution|[123]d|_?depthwise)|causal_conv|cudnn.*(fprop|dgrad|wgrad)"
     r"|implicit_convolve|xmma_(fprop|dgrad|wgrad)|miopen.*conv|igemm_(fwd|bwd|wrw)|scudnn|winograd"
     r"|wgrad_alg|grouped_conv|bwd_weight"),
    (OPTIMIZER, r"adam|lamb_|fusedsgd|fused_sgd|optimizer|muon|newton_?schulz|ns_line|polar_express"),
    (MATMUL, r"(?<!fb)gemm(?!_(args|data))|nvjet|cijk_|xmma|cutlass|splitk|gemv|wgrad|dgrad|igemm|^bmm_"
     r"|^triton_mm|scaled_mm|^(_p)?_?matmul_(kernel|ogs)|^_kernel_matmul_|grouped_mm|fused_moe|moe_mm|marlin"
     r"|fmoe_|mfma_moe|^dot_kernel|^reduce_1block"),
    (LOSS, _LOSS),
)  # fmt: skip
_VIEWS = (
    r"^aten::(view|_unsafe_view|reshape|_reshape_alias|t|transpose|permute|expand|expand_as|slice"
    r"|select|split|split_with_sizes|chunk|unsqueeze|squeeze|as_strided|narrow|detach|alias|empty"
    r"|empty_like|empty_strided|new_empty|new_empty_strided|resize_|result_type|item"
    r"|_local_scalar_dense|is_nonzero|lift_fresh|to|contiguous|linear|matmul|scaled_dot_product_attention)$"
)
# On a CPU, Inductor's fused kernels have no separate names.
_OPERATOR_CLASSES = (
    (COMMUNICATION, _COMMUNICATION),
    (MATMUL, r"^aten::(mm|addmm_?|bmm|baddbmm_?|_scaled_mm|_?grouped_mm|_scaled_grouped_mm|mv|dot)$"
     r"|mkldnn::_linear|onednn_(linear|grad_weight)|mkl::_mkl_linear|mkldnn_linear|onednn::.*linear"),
    (CONVOLUTION, r"(?-i:convolution)"),
    (ELEMENTWISE, r"CompiledFxGraph"),
    (ATTENTION, r"^aten::_(scaled_dot_product|flash_attention)|block_attention"),
    (COPIES, r"^aten::(copy_|_to_copy|clone)$"),
    (None, rf"{_VIEWS}|^(torch::)?autograd::"),
    (LOSS, _LOSS),
    (OPTIMIZER, r"_fused_(adamw?|sgd)_?$"),
    (None, r"^profiler::"),
    (ELEMENTWISE, r"::"),
)  # fmt: skip


_COLLECTIVES = (
    ("all_to_all", r"all_?to_?all"),
    ("all_gather", r"all_?gather"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce"),
    ("send/receive", r"send|recv"),
    ("broadcast", r"broadcast"),
    ("reduce", r"reduce"),
    ("barrier", r"barrier"),
)


def _first(patterns: Iterable[tuple[str | None, str]], name: str) -> str | None:
    return next((kind for kind, text in patterns if re.search(text, name, re.IGNORECASE)), None)


@functools.cache
def kernel_class(name: str) -> str:
    """The class of a GPU kernel, memory copy or memset: by its function's own name, if that tells it."""
    scope, own, arguments = name_parts(name[:LONGEST])
    kind = _first(_KERNEL_CLASSES, own) or _first(_NAMESPACES, scope + own)
    if kind is None and _WRAPPERS.fullmatch(own):
        kind = _first(_KERNEL_CLASSES, arguments)
    return kind or ELEMENTWISE


@functools.cache
def name_parts(name: str) -> tuple[str, str, str]:
    """A kernel's namespaces, its function's own name, and its template arguments.

    Of a demangled or a mangled C++ name; any other name is the function's own.
    """
    if name.startswith("_ZN"):  # <length><name> ..., then I and the template arguments
        names, at = [], 3
        while length := re.compile(r"\d+").match(name, at):
            at = length.end() + int(length[0])
            names.append(name[length.end() : at])
        return "::".join([*names[:-1], ""]), names[-1] if names else name, name[at:]
    if by_cute := re.fullmatch(r"kernel_cutlass_(.*?)_object_at_(.*)", name):
        return "", by_cute[1], by_cute[2]
    name = _NO_PART.sub("", name)
    if _COPY.match(name) or not re.search(r"[<(]|::", name):
        return "", name, ""
    # What no bracket holds, open brackets, and the begin and end of the last template arguments.
    outside, open_, begin, end = "", "", 0, 0
    for at, letter in enumerate(name):
        if letter == "(" and not open_:
            break  # the parameters
        if letter in "<(":
            begin = begin if open_ else at
            open_ += letter
        elif open_ and letter == (">" if open_[-1] == "<" else ")"):
            open_, end = open_[:-1], at
        elif not open_:
            outside += letter
    scope, _, own = outside.strip().rpartition(" ")[2].rpartition("::")
    return f"{scope}::", own, name[begin : None if open_ else end]


@functools.cache
def operator_class(name: str) -> str | None:
    """The class of a CPU operator's own time; None for what only looks at tensors or calls others."""
    return _first(_OPERATOR_CLASSES, name)


def collective_kind(said: object, name: str) -> str:
    """The kind of a collective, by what its `Collective name` says or by its kernel's or range's name."""
    kinds = (_first(_COLLECTIVES, text) for text in (str(said or ""), name))
    return next(filter(None, kinds), "other")


# Tried in this order: an 8-bit kernel's name often contains its 16-bit output format too.
_FORMATS = {
    "fp8": r"e4m3|e5m2|float8|fp8|_f8|:f8_|nvjet_(sm\d+_)?[qr]|cijk_\w{4}_\w{4}_(f8|b8)",
    "fp4": r"e2m1|fp4|nvf4|f4x2",
    "bf16": r"bf16|bfloat16|df16b|nvjet_(sm\d+_)?t|cijk_\w{4}_\w{4}_b(?!8)",
    "fp16": r"fp16|f16(?!bf)|half|hgemm|_h16|nvjet_(sm\d+_)?h|cijk_\w{4}_\w{4}_h",
    "fp32": r"fp32|f32|sgemm|s1688gemm|tf32|nvjet_(sm\d+_)?s(?!m\d)|cijk_\w{4}_\w{4}_s|float",
}


def matmul_format(name: str, input_types: list[str] | None = None) -> str | None:
    """The number format of a matmul's inputs, from the kernel's name, else from recorded types; or None.

    An operator's inputs may be wider than the matmul's: a sum to add to, or weights before a cast.
    """
    types = " ".join(t for t in input_types or [] if isinstance(t, str))
    if of_triton := re.search(
        r"matmul_ogs_[A-Z]+_[^_]+?x([^_]+?)x", name[:LONGEST]
    ):  # output, input, weight
        name = of_triton[1]
    else:
        _, own, arguments = name_parts(name[:LONGEST])
        name = f"{own} {arguments}"
    matches = (k for text in (name, types) for k, p in _FORMATS.items() if re.search(p, text, re.I))
    return next(matches, None)
