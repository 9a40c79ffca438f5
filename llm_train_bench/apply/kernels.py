"""Which kernels attention uses; set before anything is compiled."""

import contextlib
import warnings

import torch
import torch.nn.functional as F

from llm_train_bench.apply.precision import AMP_DTYPES
from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.piece_attention import piece_kernel

KERNELS = ("flash", "cudnn", "efficient", "math")


def select_attention(work: Work, device: torch.device) -> str | None:
    """Allow only the kernel of the plan in this process, and see that it can run the model.

    Returns the kernel that will run: flash, cudnn, efficient, math, flex or blocks; None where PyTorch
    does not tell. UsageError for a kernel that cannot serve this model on this device.
    """
    kernel, cuda = work.attention, torch.backends.cuda
    allowed = (kernel.causal,) if kernel.causal in KERNELS else KERNELS
    cuda.enable_flash_sdp("flash" in allowed)
    cuda.enable_cudnn_sdp("cudnn" in allowed)
    cuda.enable_mem_efficient_sdp("efficient" in allowed)
    cuda.enable_math_sdp("math" in allowed)
    if kernel.masked == "flex":
        return "flex"
    if work.masked:
        config, dtype = work.config, AMP_DTYPES[work.amp]
        size = max(config.head_dim, config.value_dim)
        return piece_kernel(device, dtype, size, work.windowed).name
    if kernel.causal in KERNELS:
        _probe(work, device)
    return "blocks" if kernel.causal == "blocks" else _chosen_kernel(work, device)


def _chosen_kernel(work: Work, device: torch.device) -> str | None:
    q, k, v = _inputs(work, min(work.batch.seq_len, 512), device)
    dropout, gqa = work.config.attention_dropout, q.shape != k.shape
    with contextlib.suppress(RuntimeError, AttributeError, KeyError, TypeError):
        number = torch.ops.aten._fused_sdp_choice(q, k, v, None, dropout, True, enable_gqa=gqa)
        return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}[number]
    return None


def _inputs(work: Work, T: int, device: torch.device):
    """Queries, keys, values as in model/layers.py's `attend`: zeros (1, heads, T, elements)."""
    config, dtype = work.config, AMP_DTYPES[work.amp]
    n, groups = config.num_attention_heads, config.num_key_value_heads
    if device.type == "cuda" and dtype == torch.float32:
        groups = n
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    sizes = ((n, config.head_dim), (groups, config.head_dim), (groups, config.value_dim))
    return [torch.zeros(1, heads, T, size, **options) for heads, size in sizes]


def _probe(work: Work, device: torch.device) -> None:
    """Run the one allowed kernel on a small case of the model's heads."""
    config, name = work.config, work.attention.causal
    q, k, v = _inputs(work, 16, device)
    try:
        if device.type == "cpu" and name not in ("flash", "math"):
            raise RuntimeError("No available kernel on a CPU")
        with warnings.catch_warnings():  # torch explains at length why it refused a kernel
            warnings.simplefilter("ignore")
            dropout, gqa = config.attention_dropout, q.shape != k.shape
            y = F.scaled_dot_product_attention(q, k, v, None, dropout, True, enable_gqa=gqa)
            y.sum().backward()
    except RuntimeError as error:
        # The second is a GPU's message (torch 2.11).
        if not any(text in str(error) for text in ("No available kernel", "Invalid backend")):
            raise
        extras = " with dropout" if config.attention_dropout else ""
        raise UsageError(
            f"--attention {name}: that kernel cannot run {q.shape[1]} heads over {k.shape[1]} "
            f"key/value heads of {config.head_dim} in {str(q.dtype).removeprefix('torch.')} on "
            f"{device.type}{extras}; use --attention auto"
        ) from None
