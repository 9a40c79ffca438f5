"""Which attention kernel PyTorch may use; set once, before anything is compiled."""

import contextlib
import warnings

import torch
import torch.nn.functional as F

from bench.apply.precision import AMP_DTYPES
from bench.errors import UsageError
from bench.settings.flags import Args
from model.config import ModelConfig

KERNELS = ("flash", "cudnn", "efficient", "math")


def select_attention(args: Args, config: ModelConfig, seq_len: int, device: torch.device) -> bool:
    """Allow only the named kernel in this process, and see that it can run the model.

    Returns whether sliding windows go through FlexAttention (else a dense mask does it). A kernel
    that cannot serve this model on this device is a UsageError.
    """
    name = args.attention
    windowed = _windowed(config, seq_len)
    torch.backends.cuda.enable_flash_sdp(name in ("auto", "flex", "flash"))
    torch.backends.cuda.enable_cudnn_sdp(name in ("auto", "flex", "cudnn"))
    torch.backends.cuda.enable_mem_efficient_sdp(name in ("auto", "flex", "efficient"))
    torch.backends.cuda.enable_math_sdp(name in ("auto", "flex", "math"))
    if name == "flex":
        if not windowed:
            raise UsageError(
                "--attention flex: no layer has a sliding window shorter than the sequence; "
                "use --attention auto"
            )
        if device.type == "cpu" and args.pass_type != "forward":
            raise UsageError(
                "--attention flex: FlexAttention has no backward on a CPU; use --attention auto, "
                "or --pass-type forward"
            )
    if name == "cudnn" and windowed:
        raise UsageError(
            "--attention cudnn: under a sliding window's mask its gradients can be NaN "
            "(pytorch/pytorch#196678); use --attention auto"
        )
    dropout = config.attention_dropout
    flex = uses_flex(args, config, seq_len, device)
    if flex and dropout:
        raise UsageError(
            f"{config.path}: attention_dropout {dropout} does not work with FlexAttention, which "
            "applies the sliding window; set it to 0, or use --attention math"
        )
    if name in KERNELS:
        _probe(args, config, windowed, device)
    return flex


def uses_flex(args: Args, config: ModelConfig, seq_len: int, device: torch.device) -> bool:
    """Whether sliding windows go through FlexAttention."""
    wanted = args.attention == "flex" or (args.attention == "auto" and device.type == "cuda")
    return wanted and _windowed(config, seq_len)


def _windowed(config: ModelConfig, seq_len: int) -> bool:
    return any(window is not None and window < seq_len for window in config.windows)


def attention_kernel(
    args: Args, config: ModelConfig, seq_len: int, device: torch.device
) -> str | None:
    """The kernel that PyTorch takes for this model's attention, or None where it does not tell."""
    if uses_flex(args, config, seq_len, device):
        return "flex"
    T = min(seq_len, 512)
    q, k, v = _inputs(args, config, T, device)
    masked = _windowed(config, seq_len)
    mask = torch.empty(T, T, dtype=torch.bool, device=device) if masked else None
    with contextlib.suppress(RuntimeError, AttributeError, KeyError, TypeError):
        number = torch._fused_sdp_choice(
            q, k, v, mask, config.attention_dropout, not masked, enable_gqa=q.shape != k.shape
        )
        return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}[number]
    return None


def _inputs(args: Args, config: ModelConfig, T: int, device: torch.device) -> list[torch.Tensor]:
    """Zeros (1, heads, T, head_dim) as queries, keys, values: as model/layers.py's `attend` has them."""
    n, groups = config.num_attention_heads, config.num_key_value_heads
    dtype = AMP_DTYPES[args.amp]
    if device.type == "cuda" and dtype == torch.float32:
        groups = n
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    return [torch.zeros(1, heads, T, config.head_dim, **options) for heads in (n, groups, groups)]


def _probe(args: Args, config: ModelConfig, mask: bool, device: torch.device) -> None:
    """Run the one allowed kernel on a small case of the model's heads."""
    T = 16
    q, k, v = _inputs(args, config, T, device)
    attn_mask = torch.ones(T, T, dtype=torch.bool, device=device).tril() if mask else None
    try:
        if device.type == "cpu" and args.attention not in ("flash", "math"):
            raise RuntimeError("No available kernel on a CPU")
        with warnings.catch_warnings():  # torch explains at length why it refused a kernel
            warnings.simplefilter("ignore")
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=attn_mask,
                dropout_p=config.attention_dropout,
                is_causal=not mask,
                enable_gqa=q.shape != k.shape,
            ).sum().backward()
    except RuntimeError as error:
        # The second is what a GPU says (torch 2.11).
        if not any(text in str(error) for text in ("No available kernel", "Invalid backend")):
            raise
        extras = " with a sliding window" if mask else ""
        extras += " and dropout" if config.attention_dropout else ""
        raise UsageError(
            f"--attention {args.attention}: that kernel cannot run {q.shape[1]} heads over {k.shape[1]} "
            f"key/value heads of {config.head_dim} in {str(q.dtype).removeprefix('torch.')} on "
            f"{device.type}{extras}; use --attention auto"
        ) from None
