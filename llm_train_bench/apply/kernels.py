"""Which kernels attention uses; set before anything is compiled."""

import contextlib
import warnings

import torch

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
    if kernel.causal == "blocks":
        return "blocks"
    try:
        return _chosen_kernel(work, device)
    except RuntimeError:
        if kernel.causal not in KERNELS:
            return None
        dtype = str(AMP_DTYPES[work.amp]).removeprefix("torch.")
        where = f"{work.config.path} in {dtype} on {device.type}"
        raise UsageError(
            f"--attention {kernel.causal}: that kernel cannot run {where}; use --attention auto"
        ) from None


def _chosen_kernel(work: Work, device: torch.device) -> str | None:
    """The kernel that PyTorch chooses among those allowed; None where it does not tell.

    RuntimeError where none can run.
    """
    config, dtype, T = work.config, AMP_DTYPES[work.amp], min(work.batch.seq_len, 512)
    n, groups = config.num_attention_heads, config.num_key_value_heads
    if device.type == "cuda" and dtype == torch.float32:  # as in model/layers.py's `attend`
        groups = n
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    sizes = ((n, config.head_dim), (groups, config.head_dim), (groups, config.value_dim))
    q, k, v = (torch.zeros(1, heads, T, size, **options) for heads, size in sizes)
    with contextlib.suppress(AttributeError, TypeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains at length why it refused a kernel
        choice, dropout = torch.ops.aten._fused_sdp_choice, config.attention_dropout
        number = choice(q, k, v, None, dropout, True, enable_gqa=groups != n)
        if number < 0:
            raise RuntimeError("no kernel")
        return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(number)
    return None
