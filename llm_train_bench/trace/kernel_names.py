"""Classes of GPU kernels and CPU operators, read off their names. Needs no torch.

The patterns match the names of cuBLAS (nvjet, xmma), CUTLASS, cuDNN, FlashAttention, Tensile and
hipBLASLt (Cijk), Composable Kernel, AITER, Triton, Inductor, NCCL, RCCL and PyTorch.
"""

import functools
import re

MATMUL, ATTENTION, COMMUNICATION, COPIES = "matmul", "attention", "communication", "copies"
LOSS, OPTIMIZER, ELEMENTWISE = "loss", "optimizer", "elementwise"
CONVOLUTION, SCAN, EMBEDDING = "convolution", "scan", "embedding"

_COMMUNICATION = re.compile(
    r"nccl|rccl|mscclkernel|gloo|record_param_comms|c10d(_functional)?::|cross_device_reduce"
    r"|one_?shot_all_?reduce|two_?shot_all_?reduce|multimem_|::(internode|intranode)::",
    re.IGNORECASE,
)
_COPIES = re.compile(
    r"^mem(cpy|set)|split_with_sizes_copy|chunk_cat|__amd_rocclr_(copy|fill)", re.IGNORECASE
)
_ATTENTION = re.compile(
    r"flash|fmha|attn_(fwd|bwd)|_attn_|sdpa|attention|cudnn_generated_fort"
    r"|^_?bwd_(kernel_(dk_dv|dq|fuse)|preprocess)"  # AOTriton's
    r"|compute_dot_do_o|convert_dq_to",
    re.IGNORECASE,
)
# Before matmuls: convolutions are named after the GEMM in them.
_EMBEDDING = re.compile(
    r"fbgemm.*(embedding|tbe|jagged)|split_embedding|embedding_bag", re.IGNORECASE
)
_CONVOLUTION = re.compile(
    r"conv(olve|olution|[123]d|_?depthwise)|causal_conv|cudnn.*(fprop|dgrad|wgrad)|implicit_convolve"
    r"|xmma_(fprop|dgrad|wgrad)|miopen.*conv|igemm_(fwd|bwd|wrw)",
    re.IGNORECASE,
)
# State-space models and linear attention: Mamba's and flash-linear-attention's kernels.
_SCAN = re.compile(
    r"selective_scan|chunk_(scan|state|cumsum)|state_passing|ssd_|bmm_chunk|chunk_gated_delta"
    r"|chunk_(fwd|bwd)_kernel_(h|o)|fused_recurrent",
    re.IGNORECASE,
)
# FBGEMM's namespace stands before all of its kernels: quantisation and permutations too.
_MATMUL = re.compile(
    r"(?<!fb)gemm(?!_args)|nvjet|cijk_|xmma|cutlass|splitk|gemv|wgrad|dgrad|igemm|^bmm_|^triton_mm|scaled_mm"
    r"|^_?matmul_(kernel|ogs)|^_kernel_matmul_|grouped_mm|fused_moe_kernel|moe_mm",
    re.IGNORECASE,
)
_LOSS = re.compile(r"log_?softmax|nll_loss|cross_entropy|xentropy", re.IGNORECASE)
_OPTIMIZER = re.compile(
    r"adam|lamb_|fusedsgd|fused_sgd|optimizer|muon|newton_?schulz|ns_line|polar_express",
    re.IGNORECASE,
)
# Inductor's fused kernels carry the names of all their operators. These include matmuls they only
# prepare, and losses that send a gradient through them.
_FUSED = re.compile(r"^triton_(poi|red|per|for|unk|spl|coo)_")
# Inductor's templates are matmuls, except FlexAttention's. They also name what they fuse.
_TEMPLATE = re.compile(r"^triton_tem_(?!.*flex_(attention|decoding))|^triton_tem_.*_(add|b)?mm_")
_FUSED_LOSS = re.compile(r"log_softmax|cross_entropy")


@functools.cache
def kernel_class(name: str) -> str:
    """The class of a GPU kernel, memory copy or memset."""
    if _COMMUNICATION.search(name):
        return COMMUNICATION
    if _COPIES.search(name):
        return COPIES
    if _FUSED.match(name):
        return LOSS if _FUSED_LOSS.search(name) else ELEMENTWISE
    if _TEMPLATE.match(name):
        return MATMUL
    if _SCAN.search(name):
        return SCAN
    if _ATTENTION.search(name):
        return ATTENTION
    for label, pattern in ((EMBEDDING, _EMBEDDING), (CONVOLUTION, _CONVOLUTION)):
        if pattern.search(name):
            return label
    if _OPTIMIZER.search(name):  # Muon's matmuls are the optimizer's work
        return OPTIMIZER
    if _MATMUL.search(name):
        return MATMUL
    return LOSS if _LOSS.search(name) else ELEMENTWISE


_CPU_MATMULS = re.compile(
    r"^aten::(mm|addmm|addmm_|bmm|baddbmm|baddbmm_|_scaled_mm|_?grouped_mm|_scaled_grouped_mm|mv|dot)$"
    r"|mkldnn::_linear|mkl::_mkl_linear|mkldnn_linear|onednn::.*linear"
)
_CPU_VIEWS = re.compile(
    r"^aten::(view|_unsafe_view|reshape|_reshape_alias|t|transpose|permute|expand|expand_as|slice"
    r"|select|split|split_with_sizes|chunk|unsqueeze|squeeze|as_strided|narrow|detach|alias|empty"
    r"|empty_like|empty_strided|new_empty|new_empty_strided|resize_|result_type|item"
    r"|_local_scalar_dense|is_nonzero|lift_fresh|to|contiguous|linear|matmul|scaled_dot_product_attention)$"
)


@functools.cache
def operator_class(name: str) -> str | None:
    """The class of a CPU operator's own time; None for what only looks at tensors or calls others."""
    if name.startswith(("gloo:", "c10d::", "nccl:")) or _COMMUNICATION.search(name):
        return COMMUNICATION
    if _CPU_MATMULS.search(name):
        return MATMUL
    if "convolution" in name:
        return CONVOLUTION
    if "CompiledFxGraph" in name:
        # On a CPU, Inductor's fused kernels have no separate names.
        return ELEMENTWISE
    if name.startswith(("aten::_scaled_dot_product", "aten::_flash_attention")):
        return ATTENTION
    if name in ("aten::copy_", "aten::_to_copy", "aten::clone"):
        return COPIES
    if _CPU_VIEWS.match(name) or name.startswith(("autograd::", "torch::autograd::")):
        return None
    if _LOSS.search(name):
        return LOSS
    if re.search(r"_fused_(adamw?|sgd)_?$", name):
        return OPTIMIZER
    return ELEMENTWISE if "::" in name and not name.startswith("profiler::") else None


# Tried in this order: an 8-bit kernel's name often contains its 16-bit output format too.
_FORMATS = (
    ("fp8", r"e4m3|e5m2|float8|fp8|_f8|nvjet_(sm\d+_)?[qr]|cijk_\w{4}_\w{4}_(f8|b8)"),
    ("fp4", r"e2m1|fp4|nvf4"),
    ("bf16", r"bf16|bfloat16|nvjet_(sm\d+_)?t|cijk_\w{4}_\w{4}_b(?!8)"),
    ("fp16", r"fp16|f16(?!bf)|half|hgemm|_h16|nvjet_(sm\d+_)?h|cijk_\w{4}_\w{4}_h"),
    ("fp32", r"fp32|f32|sgemm|tf32|nvjet_(sm\d+_)?s(?!m\d)|cijk_\w{4}_\w{4}_s|float"),
)
_FORMAT_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _FORMATS)


def matmul_format(name: str, input_types: list[str] | None = None) -> str | None:
    """The number format of a matmul's inputs, from recorded types or the kernel's name; or None."""
    for text in (*(t for t in input_types or [] if isinstance(t, str)), name):
        for known, pattern in _FORMAT_PATTERNS:
            if pattern.search(text):
                return known
    return None
