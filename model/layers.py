"""The parts both families share: attention, rotary embedding, norms and MLPs.

Shapes in the comments: B samples, T positions, H query heads, K key/value heads, D head size,
d hidden size, f MLP size.
"""

import contextlib
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model.config import ModelConfig, RopeScaling


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast gives matmuls on this device, None where it is off (and on meta)."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """A context without autocast; the meta device knows none."""
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class RMSNorm(nn.Module):
    """Root mean square norm without bias (Zhang & Sennrich 2019).

    Statistics are fp32 inside the kernel. Autocast is off here: it would return fp32 and so double
    the traffic of the bf16 residual stream.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        with no_autocast(x.device):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """Layer norm with bias, in the dtype of its input; see RMSNorm on autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with no_autocast(x.device):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def rope_tables(config: ModelConfig, seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each (seq_len, head_dim / 2) in fp32.

    Source: Su et al. 2021 (RoFormer), with frequencies scaled as the config's `rope_scaling` says.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency = scale_rope(1.0 / config.rope_theta**exponent, config.rope_scaling)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def scale_rope(frequency: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Stretch rotary frequencies (radians per position) for a longer context.

    `linear` divides them all. `llama3` divides those with wavelengths above the trained context,
    keeps the short ones, and blends in between (Llama 3.1 model card and reference code).
    """
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    turns = scaling.original_max_position_embeddings / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return blend * frequency + (1 - blend) * frequency / scaling.factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, T, H, D) by tables of (T, D / 2); halves are paired as in Hugging Face weights.

    In fp32, rounded once.
    """
    if torch.compiler.is_compiling():  # one fused kernel
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = cos[:, None, :], sin[:, None, :]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)
    return _Rotation.apply(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """Four kernels in place of nine, and a third of their traffic; the gradient is rotated back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.tables = cos, sin
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.tables, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.empty_like(x)
    (first, second), (low, high) = x.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    # The kernels read x's dtype, compute in that of the tables, and write x's dtype.
    torch.addcmul(first * cos, second, sin, value=-direction, out=low)
    torch.addcmul(second * cos, first, sin, value=direction, out=high)
    return rotated


def window_mask(seq_len: int, window: int, device: torch.device, flex: bool) -> Tensor | BlockMask:
    """Causal mask in which position i sees i - window + 1 ... i: boolean (T, T), or a BlockMask."""

    def visible(batch, head, query, key):
        return (query >= key) & (query - key < window)

    if flex:
        return create_block_mask(visible, None, None, seq_len, seq_len, device=device)
    position = torch.arange(seq_len, device=device)
    return visible(None, None, position[:, None], position[None, :])


@functools.cache
def _compiled_flex_attention():
    """FlexAttention compiled by itself, for eager blocks on a GPU.

    Uncompiled it materialises all T x T scores. On a CPU its compiled form has no backward: there it
    stays uncompiled, and serves as a reference.
    """
    return torch.compile(flex_attention, dynamic=False)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, dropout: float
) -> Tensor:
    """(B, H, T, D): attention of queries of that size over (B, K, T, D) keys and values.

    K divides H: H / K query heads in turn share keys and values. Causal if mask is None.
    """
    gqa = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        eager = q.is_cuda and not torch.compiler.is_compiling()
        flex = _compiled_flex_attention() if eager else flex_attention
        return flex(q, k, v, block_mask=mask, enable_gqa=gqa)
    if gqa and q.is_cuda and q.dtype == torch.float32:
        # No fused kernel has groups in fp32: all T x T scores would be kept (pytorch/pytorch#181528).
        group = q.shape[1] // k.shape[1]
        k, v, gqa = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, enable_gqa=gqa
    )


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads; one fused q, k, v projection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        d, D = config.hidden_size, config.head_dim
        self.qkv = nn.Linear(d, (self.n_heads + 2 * self.n_kv_heads) * D, bias=config.qkv_bias)
        self.out = nn.Linear(self.n_heads * D, d, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        """(B, T, d) to (B, T, d); `rope` is the tables for T positions, `mask` only for a window."""
        B, T, _ = x.shape
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        qkv = self.qkv(x).view(B, T, sum(heads), self.head_dim)
        q, k, v = qkv.split(heads, dim=2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(B, T, self.n_heads * self.head_dim))


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class MLP(nn.Module):
    """Two-layer perceptron of GPT-2: d to f, activation, f to d."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    """Gated perceptron (SwiGLU when the activation is SiLU; Shazeer 2020); gate and up are fused."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Linear(
            config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias
        )
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)
