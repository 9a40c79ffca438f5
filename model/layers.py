"""The parts both families share: attention, rotary embedding, norms and MLPs.

Shapes in the comments: B samples, T positions, H query heads, K key/value heads, D head size,
d hidden size, f MLP size.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from llm_train_bench.model.block_attention import InBlocks, attend_in_blocks
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.layout import ALONE, Layout
from llm_train_bench.model.piece_attention import Seen, attend_in_pieces
from llm_train_bench.model.shapes import RopeScaling, Yarn, present


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


class RMSNorm(nn.RMSNorm):
    """Root mean square norm without bias (Zhang & Sennrich 2019).

    Statistics are fp32 inside the kernel. Autocast is off here: it would return fp32 and so double
    the traffic of the bf16 residual stream. With an `offset` it multiplies by that plus the weight.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__(size, eps)
        self.offset = float(offset)

    def forward(self, x: Tensor) -> Tensor:
        with no_autocast(x.device):
            weight = self.weight + self.offset if self.offset else self.weight
            return F.rms_norm(x, self.weight.shape, weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """Layer norm with bias, in the dtype of its input; see RMSNorm on autocast."""

    def forward(self, input: Tensor) -> Tensor:
        with no_autocast(input.device):
            weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class Rope(NamedTuple):
    """Tables of a rotary embedding by position, in fp32."""

    cos: Tensor
    sin: Tensor
    scale: Tensor | None = None
    """(T, 1) factors of queries."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Rope":
        """The tables after a function of each."""
        scale = None if self.scale is None else function(self.scale)
        return Rope(function(self.cos), function(self.sin), scale)

    def scaled(self, q: Tensor) -> Tensor:
        """Queries (B, T, H, D), larger at late positions where the model has that."""
        return q if self.scale is None else (q * self.scale.unsqueeze(-2)).to(q.dtype)


def rope_tables(config: ModelConfig, seq_len: int, kind: str) -> Rope:
    """Cosines and sines of the rotary embedding, each (seq_len, head_dim / 2) in fp32.

    Source: Su et al. 2021 (RoFormer), with frequencies scaled as the config's `rope_scaling` says.
    `local` ones are not, and have a base of their own.
    """
    scaling, theta, size = config.rope_scaling, config.rope_theta, config.rope_dim
    exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
    if kind == "local":
        scaling, theta = None, present(config.local_rope_theta)
    frequency, factor = 1.0 / theta**exponent, 1.0
    if isinstance(scaling, Yarn):
        frequency, factor = stretch(frequency, scaling, config.rope_theta), scaling.attention_factor
    elif scaling is not None:
        frequency = scale_rope(frequency, scaling)
    position, scale = torch.arange(seq_len, dtype=torch.float32), None
    angle = torch.outer(position, frequency)
    if config.query_scale is not None:
        grows, trained = config.query_scale
        scale = 1 + grows * torch.log(1 + torch.floor(position / trained)).unsqueeze(-1)
    return Rope(angle.cos() * factor, angle.sin() * factor, scale)


def stretch(frequency: Tensor, yarn: Yarn, theta: float) -> Tensor:
    """YaRN's rotary frequencies (Peng et al. 2023, section 3.2).

    Those that turn often in the trained context stay, slow ones are divided; in between, by dimension,
    both are blended.
    """
    n, trained = len(frequency), yarn.original_max_position_embeddings
    low, high = (
        n * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * n - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(n, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequency / yarn.factor * divided + frequency * (1 - divided)


def scale_rope(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch rotary frequencies (radians per position) for a longer context.

    `linear` divides them all. `llama3` divides those with wavelengths above the trained context,
    keeps the short ones, and blends in between (Llama 3.1 model card and reference code).
    """
    if scaling.kind == "linear":
        return frequency / scaling.factor
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequency)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return blend * frequency + (1 - blend) * frequency / scaling.factor


# What hides keys besides the causal rule: in blocks, by FlexAttention, or nothing; or in pieces.
WholeMask = InBlocks | BlockMask | None
Mask = Seen | WholeMask


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, T, ..., D) by tables of (T, D / 2) or (B, T, D / 2), halves paired as in Hugging Face.

    In fp32, rounded once. With tables of fewer elements the rest of a head stays as it is.
    """
    if (turned := 2 * cos.shape[-1]) < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)
    if torch.compiler.is_compiling():  # one fused kernel
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = _over_heads(cos, x), _over_heads(sin, x)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return _Rotation.apply(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """Four kernels in place of nine, and a third of their traffic; the gradient is rotated back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.tables = cos, sin
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (cos, sin) = grads, ctx.tables
        return _rotate(grad, cos, sin, -1), None, None


def _over_heads(table: Tensor, x: Tensor) -> Tensor:
    """A table with a dimension of 1 for each of x's dimensions between T and D."""
    return table.unflatten(-2, (-1, *[1] * (x.ndim - 3)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    cos, sin = _over_heads(cos, x), _over_heads(sin, x)
    rotated = torch.empty_like(x)
    (first, second), (low, high) = x.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    # The kernels read x's dtype, compute in that of the tables, and write x's dtype.
    torch.addcmul(first * cos, second, sin, value=-direction, out=low)
    torch.addcmul(second * cos, first, sin, value=direction, out=high)
    return rotated


def block_mask(
    T: int, window: int | None, starts: Tensor | None, device: torch.device
) -> BlockMask:
    """FlexAttention's mask of T positions with a window, and of documents that begin at `starts` (B, T).

    Blocks are told from their first and last positions. (create_block_mask evaluates T x T pairs.)
    """
    size = 128 * max(1, 2 ** math.ceil(math.log2(T / 128 / 1024)))  # at most 1024 blocks
    n = -(-T // size)
    begins = torch.zeros(1, T, dtype=torch.int64) if starts is None else starts
    begins, reach = begins.to(device, non_blocking=True), window or T

    def visible(batch, head, query, key):
        seen = (query >= key) & (query - key < reach)
        return seen if starts is None else seen & (key >= begins[batch, query])

    first = torch.arange(n, device=device) * size
    last = (first + size - 1).clamp(max=T - 1)
    # The first keys that some and that all queries of a block see; those before the block are seen whole.
    low = torch.maximum(begins[:, first], first - reach + 1)
    high = torch.maximum(begins[:, last], last - reach + 1)
    low, high = (x[:, None, :, None] // size for x in (low, high + size - 1))
    row, column = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    full = (column >= high) & (column < row)
    partial = (column >= low) & (column <= row) & ~full
    blocks = []  # of each kind how many a row has, and their columns, which are put first
    for kind in (partial, full):
        columns = kind.int().argsort(dim=-1, descending=True, stable=True)
        blocks += [kind.sum(-1, dtype=torch.int32), columns.int()]
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=size, mask_mod=visible, seq_lengths=(T, T))


@functools.cache
def _compiled_flex_attention():
    """FlexAttention compiled by itself, for eager blocks on a GPU.

    Uncompiled it materialises all T x T scores. On a CPU its compiled form has no backward: there it
    stays uncompiled, and serves as a reference.
    """
    return torch.compile(flex_attention, dynamic=False)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: WholeMask, dropout: float, scale: float | None
) -> Tensor:
    """(B, H, T, D): attention of queries of that size over (B, K, S, D) keys and values.

    K divides H: H / K query heads in turn share keys and values. Causal if mask is None. `scale` is
    the scores' factor, D ** -0.5 if None.
    """
    gqa = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        eager = q.is_cuda and not torch.compiler.is_compiling()
        flex = _compiled_flex_attention() if eager else flex_attention
        return flex(q, k, v, block_mask=mask, enable_gqa=gqa, scale=scale)
    if gqa and q.is_cuda and q.dtype == torch.float32:
        # No fused kernel has groups in fp32: all T x T scores would be kept (pytorch/pytorch#181528).
        group = q.shape[1] // k.shape[1]
        k, v, gqa = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), False
    if isinstance(mask, InBlocks):
        return attend_in_blocks(q, k, v, scale)
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=gqa, scale=scale
    )


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads; one fused q, k, v projection.

    The projection has the rows of a key/value head together: of its query heads, key and value (and
    gates). A layout of several ranks has a part of the heads on each.
    """

    def __init__(self, config: ModelConfig, layout: Layout = ALONE):
        super().__init__()
        self.config, self.layout = config, layout
        n_heads = config.num_attention_heads // layout.tp
        self.n_kv_heads = config.num_key_value_heads // layout.tp
        d, D = config.hidden_size, config.head_dim
        shared = n_heads // self.n_kv_heads
        # Heads of a group: of queries, keys, values and perhaps gates.
        self.heads = [shared, 1, 1, shared] if config.output_gate else [shared, 1, 1]
        self.qkv = nn.Linear(d, self.n_kv_heads * sum(self.heads) * D, bias=config.qkv_bias)
        self.out = nn.Linear(n_heads * D, d, bias=config.attention_out_bias)
        self.q_norm = self.k_norm = nn.Identity()
        if config.qk_norm:
            sizes = (n_heads * D, self.n_kv_heads * D) if config.whole_qk_norm else (D, D)
            eps, offset = config.norm_eps, config.norm_offset
            self.q_norm, self.k_norm = (RMSNorm(size, eps, offset) for size in sizes)
        self.sinks = nn.Parameter(torch.empty(n_heads)) if config.sinks else None

    def forward(self, x: Tensor, rope: Rope | None = None, mask: Mask = None) -> Tensor:
        """(B, T, d) to (B, T, d); `rope` is the tables for T positions."""
        groups = self.n_kv_heads, sum(self.heads), -1
        qkv = self.layout.column_parallel(self.qkv, x).unflatten(-1, groups)
        q, k, v, *gate = qkv.split(self.heads, dim=3)  # (B, T, K, heads of a group, D)
        whole = self.config.whole_qk_norm
        q, k = self.norm_over_all_heads(q, k) if whole else (self.q_norm(q), self.k_norm(k))
        if rope is not None:
            q, k = apply_rope(q, rope.cos, rope.sin), apply_rope(k, rope.cos, rope.sin)
        q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
        if rope is not None:
            q = rope.scaled(q)
        y = self.layout.attend(self.attend, q, k, v, mask)
        if gate:
            y = y * torch.sigmoid(gate[0]).flatten(2, 3)
        return self.layout.row_parallel(self.out, y.flatten(2))

    def norm_over_all_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, T, ..., D) after norms that span the heads of all ranks."""
        norms: Any = self.q_norm, self.k_norm
        rows = [x.flatten(2) for x in (q, k)]
        if self.layout.tp == 1:
            rows = [norm(x) for x, norm in zip(rows, norms, strict=True)]
        else:
            # Ranks have equal numbers of heads, so that the mean of all is that of their means.
            means = torch.stack([x.float().square().mean(-1) for x in rows], dim=-1)
            scales = torch.rsqrt(self.layout.sum_over_tp(means / self.layout.tp) + norms[0].eps)
            for i, scale in enumerate(scales.split(1, dim=-1)):
                rows[i] = (rows[i].float() * scale * norms[i].weight.float()).to(q.dtype)
        return rows[0].view_as(q), rows[1].view_as(k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, first: int) -> Tensor:
        """(B, T, H, D) queries over (B, S, K, D) keys and values; `first` is the first head's number."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scale = self.config.attention_scale
        dropout = self.config.attention_dropout if self.training else 0.0
        if isinstance(mask, Seen):
            sinks = None if self.sinks is None else self.sinks[first : first + q.shape[1]]
            y = attend_in_pieces(q, k, v, mask, scale, sinks)
        else:
            y = attend(q, k, v, mask, dropout, scale)
        return y.transpose(1, 2)


class LatentAttention(nn.Module):
    """Causal self-attention through narrow layers (MLA; DeepSeek-V2, section 2.1), as it is trained.

    Of several ranks each has a part of the heads, and the narrow layers whole, for its own tokens.
    """

    def __init__(self, config: ModelConfig, layout: Layout = ALONE):
        super().__init__()
        m, d = present(config.latent), config.hidden_size
        self.config, self.layout, self.sizes, self.sinks = config, layout, m, None
        n_heads = config.num_attention_heads // layout.tp
        query = n_heads * config.head_dim
        if m.q_rank is None:
            self.q = nn.Linear(d, query, bias=False)
        else:
            self.q_down = nn.Linear(d, m.q_rank, bias=False)
            self.q_down_norm = RMSNorm(m.q_rank, 1e-6)
            self.q_up = nn.Linear(m.q_rank, query, bias=False)
        self.kv_down = nn.Linear(d, m.kv_rank + m.rope_dim, bias=False)
        self.kv_down_norm = RMSNorm(m.kv_rank, 1e-6)
        self.kv_up = nn.Linear(m.kv_rank, n_heads * (m.nope_dim + m.value_dim), bias=False)
        self.out = nn.Linear(n_heads * m.value_dim, d, bias=False)

    def forward(self, x: Tensor, rope: Rope, mask: Mask = None) -> Tensor:
        """(B, T, d) to (B, T, d), as Attention."""
        m, columns = self.sizes, self.layout.column_parallel
        if m.q_rank is None:
            q = columns(self.q, x)
        else:
            q = columns(self.q_up, self.q_down_norm(self.q_down(x)))
        q = q.unflatten(-1, (-1, self.config.head_dim))
        q, q_rope = q.split((m.nope_dim, m.rope_dim), dim=-1)
        low, k_rope = self.kv_down(x).split((m.kv_rank, m.rope_dim), dim=-1)
        kv = columns(self.kv_up, self.kv_down_norm(low))
        kv = kv.unflatten(-1, (-1, m.nope_dim + m.value_dim))
        k_rope = self.layout.gather(k_rope)
        k, v = kv.split((m.nope_dim, m.value_dim), dim=-1)
        q_rope, k_rope = self.rotate(q_rope, rope), self.rotate(k_rope[:, :, None], rope)
        q = rope.scaled(torch.cat((q, q_rope), dim=-1))
        k = torch.cat((k, k_rope.expand(-1, -1, k.shape[2], -1)), dim=-1)
        y = self.layout.attend(self.attend, q, k, v, mask)
        return self.layout.row_parallel(self.out, y.flatten(2))

    attend = Attention.attend

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """(B, T, H, D) rotated; neighbours are brought into halves first, in queries and keys alike."""
        if self.config.rope_pairs == "neighbours":
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return apply_rope(x.contiguous(), rope.cos, rope.sin)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's tanh form; compiled, by the sigmoid of twice the argument, which is the same and faster."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    slope = math.sqrt(8 / math.pi)
    return (wide * torch.sigmoid(wide * (slope + slope * 0.044715 * wide * wide))).to(x.dtype)


def relu_squared(x: Tensor) -> Tensor:
    """As a product, since CUDA's autocast computes `square` in fp32."""
    y = F.relu(x)
    return y * y


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": relu_squared,
}


class MLP(nn.Module):
    """Perceptron of two layers: d to f, activation, f to d, as GPT-2's; or gated, gate and up fused.

    The gated one is SwiGLU when the activation is SiLU (Shazeer 2020). Its rows are in groups, each of
    some gates and as many of up, so that a rank's share is one range.
    """

    up: nn.Linear
    gate_up: nn.Linear

    def __init__(self, config: ModelConfig, layout: Layout = ALONE, size: int | None = None):
        """`size` elements of the activation, the config's if None."""
        super().__init__()
        self.layout, self.gated = layout, config.gated_mlp
        d, f = config.hidden_size, (size or config.intermediate_size) // layout.tp
        self.groups = config.mlp_groups(f * layout.tp) // layout.tp
        name, rows = ("gate_up", 2 * f) if self.gated else ("up", f)
        self.register_module(name, nn.Linear(d, rows, bias=config.mlp_bias))
        self.down = nn.Linear(f, d, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            both = self.layout.column_parallel(self.gate_up, x).unflatten(-1, (self.groups, 2, -1))
            gate, up = both.unbind(-2)
            y = (self.activation(gate) * up).flatten(-2)
        else:
            y = self.activation(self.layout.column_parallel(self.up, x))
        return self.layout.row_parallel(self.down, y)
