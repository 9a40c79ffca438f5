"""Causal attention without a mask of all scores, in pieces that a kernel computes as they are.

Windows, packed documents, sinks, and the queries of one rank among gathered keys become runs of queries
that see the keys from some position to their own. A run's earlier keys and its own are two pieces, joined
by their log-sum-exp. The backward of each piece follows from that exactly (as in ring attention, Liu et
al. 2023). A sink (gpt-oss) only adds to the log-sum-exp. No mask has more than 2048 x 6144 elements.
"""

# pyright: reportIncompatibleMethodOverride=false

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llm_train_bench.model.operators import OwnFunction, operator

aten = torch.ops.aten
# Queries times keys of one mask, about; and the most queries of a piece that has one.
MASK_ELEMENTS, MASK_ROWS = 2**23, 2048
# The most queries of a piece by matmuls; and of one without a bound.
PLAIN_ROWS, ALL_ROWS = 512, 2**31


class Seen(NamedTuple):
    """Which keys a query sees beside the causal rule."""

    window: int | None = None
    """The last positions that a query sees, with its own."""
    starts: Tensor | None = None
    """(B, S) int64 on the host: where each position's document begins."""
    positions: Tensor | None = None
    """(t,) int64 on the host: the queries' positions among the keys, if these are more."""
    key_order: Tensor | None = None
    """(S,) int64: where each position lies among the keys as cp ranks gather them."""


class _Piece(NamedTuple):
    """Queries `at` to `at + n` of some samples, at positions from `first` on, over keys from `low` on."""

    samples: slice
    at: int
    n: int
    low: int
    first: int

    def queries(self, x: Tensor) -> Tensor:
        return x[self.samples, :, self.at : self.at + self.n]

    def keys(self, x: Tensor) -> Tensor:
        return x[self.samples, :, self.low : self.first + self.n]


def _pieces(
    B: int, S: int, starts: Tensor | None, positions: Tensor | None, window: int, rows: int
) -> Iterator[_Piece]:
    """The pieces of a batch, of at most `rows` queries."""
    places = torch.arange(S) if positions is None else positions
    for b in range(B if starts is not None else 1):
        samples = slice(b, b + 1) if starts is not None else slice(None)
        lows = torch.zeros_like(places) if starts is None else starts[b][places]
        breaks = (places.diff() != 1) | (lows.diff() != 0)
        edges = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(places)]
        for at, end in itertools.pairwise(edges):
            first, low = int(places[at]), int(lows[at])
            for i in range(at, end, rows):
                n, begin = min(rows, end - i), first + i - at
                seen = max(low, begin - window + 1) if window else low
                yield _Piece(samples, i, n, seen, begin)


@functools.lru_cache(4)
def _hidden(n: int, m: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n, m) zeros, and minus infinity where the last n of m queries do not see a key."""
    query = torch.arange(m - n, m, device=device)[:, None]
    key = torch.arange(m, device=device)
    seen = (key <= query) & (query - key < window)
    return torch.zeros(n, m, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


class _Cpu:
    """PyTorch's flash attention of CPUs, which has no causal form for fewer queries than keys."""

    name = "flash"

    @staticmethod
    def calls(q, k, window):
        """The range of the keys of each call, and its mask."""
        n, m = q.shape[2], k.shape[2]
        if window and (n > 1 or m > window):
            mask = _hidden(n, m, window, q.dtype, q.device)
            return [(slice(m), dict(is_causal=False, attn_mask=mask))]
        earlier = [(slice(m - n), dict(is_causal=False))] if m > n else []
        return [*earlier, (slice(m - n, m), dict(is_causal=True))]

    @staticmethod
    def forward(q, k, v, window, scale):
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        (y, lse), *more = [
            attend(q, k[:, :, part], v[:, :, part], 0.0, scale=scale, **mask)
            for part, mask in _Cpu.calls(q, k, window)
        ]
        for of, its in more:
            both = torch.logaddexp(lse, its)
            y = y * (lse - both).exp().unsqueeze(-1) + of * (its - both).exp().unsqueeze(-1)
            lse = both
        return y, lse

    @staticmethod
    def backward(grad, q, k, v, y, lse, window, scale):
        attend_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = [
            attend_backward(grad, q, k[:, :, part], v[:, :, part], y, lse, 0.0, scale=scale, **mask)
            for part, mask in _Cpu.calls(q, k, window)
        ]
        of_q, of_k, of_v = zip(*parts, strict=True)
        return functools.reduce(torch.add, of_q), torch.cat(of_k, dim=2), torch.cat(of_v, dim=2)


class _Flash:
    """FlashAttention as PyTorch has it: the last queries of more keys, and a window, in one call."""

    name = "flash"

    @staticmethod
    def options(window, scale):
        left, right = (window - 1, 0) if window else (None, None)
        return dict(scale=scale, window_size_left=left, window_size_right=right)

    @staticmethod
    def forward(q, k, v, window, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        sizes, options = (q.shape[1], k.shape[1]), _Flash.options(window, scale)
        y, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, *sizes, 0.0, True, False, **options
        )
        return y.transpose(1, 2), lse

    @staticmethod
    def backward(grad, q, k, v, y, lse, window, scale):
        grad, q, k, v, y = (x.transpose(1, 2).contiguous() for x in (grad, q, k, v, y))
        sizes, options = (q.shape[1], k.shape[1]), _Flash.options(window, scale)
        none = torch.zeros(2, dtype=torch.int64, device=q.device)  # a state of random numbers
        grads = aten._flash_attention_backward(
            grad, q, k, v, y, lse.contiguous(), None, None, *sizes, 0.0, True, none, none, **options
        )
        return tuple(x.transpose(1, 2) for x in grads)


class _Plain:
    """By matmuls in fp32: where a GPU has no kernel, and as a reference."""

    name = "math"

    @staticmethod
    def scores(q, k, window, scale):
        """Scores over groups of heads (B, K, H / K, n, m)."""
        n, m, heads = q.shape[2], k.shape[2], k.shape[1]
        q, k = q.unflatten(1, (heads, -1)).float(), k.float().unsqueeze(2)
        return q @ k.mT * scale + _hidden(n, m, window or m, torch.float32, q.device)

    @staticmethod
    def forward(q, k, v, window, scale):
        scores = _Plain.scores(q, k, window, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        y = (scores - lse).exp() @ v.float().unsqueeze(2)
        return y.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2)

    @staticmethod
    def backward(grad, q, k, v, y, lse, window, scale):
        heads = k.shape[1]
        grad, y, lse, wide_q = (x.unflatten(1, (heads, -1)).float() for x in (grad, y, lse, q))
        wide_k, wide_v = k.float().unsqueeze(2), v.float().unsqueeze(2)
        p = (_Plain.scores(q, k, window, scale) - lse.unsqueeze(-1)).exp()
        delta = (grad * y).sum(-1, keepdim=True)
        of_scores = p * (grad @ wide_v.mT - delta) * scale
        of_k, of_v = (of_scores.mT @ wide_q).sum(2), (p.mT @ grad).sum(2)
        return (of_scores @ wide_k).flatten(1, 2).to(q.dtype), of_k, of_v


def piece_kernel(device: torch.device, dtype: torch.dtype, size: int, windowed: bool) -> Any:
    """What computes a piece with heads of a size; its `name` is that of PyTorch's kernel."""
    if device.type == "cpu":
        return _Cpu
    low = dtype in (torch.float16, torch.bfloat16)
    return _Flash if low and size <= 256 and not (windowed and torch.version.hip) else _Plain


def _kernel(q: Tensor, window: int) -> tuple[Any, int]:
    """What computes a piece, and the most queries of one."""
    kernel, rows = piece_kernel(q.device, q.dtype, q.shape[-1], window > 0), ALL_ROWS
    if kernel is _Flash:
        return kernel, ALL_ROWS
    if window:
        rows = max(16, min(max(window, 64), MASK_ROWS, MASK_ELEMENTS // window))
    return kernel, min(rows, PLAIN_ROWS) if kernel is _Plain else rows


def _outputs(q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor]:
    B, H, t, _ = q.shape
    y = q.new_empty(B, t, H, v.shape[3]).transpose(1, 2)
    return y, q.new_empty(B, H, t, dtype=torch.float32)


@operator("cpu", "cuda", fake=_outputs, note=("attention", "pieces"))
def piece_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
    positions: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(B, H, t, D) over (B, K, S, D) and (B, K, S, D) to (B, H, t, D), and log-sum-exp (B, H, t)."""
    y, lse = _outputs(q, k, v)
    kernel, rows = _kernel(q, window)
    for piece in _pieces(q.shape[0], k.shape[2], starts, positions, window, rows):
        of, its = kernel.forward(piece.queries(q), piece.keys(k), piece.keys(v), window, scale)
        piece.queries(y).copy_(of)
        piece.queries(lse).copy_(its)
    if sinks is not None:
        whole = torch.logaddexp(lse, sinks.float()[:, None])
        y.mul_((lse - whole).exp().unsqueeze(-1))
        lse = whole
    return y, lse


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, ...]:
    grads = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)]
    return *grads, q.new_empty(q.shape[1], dtype=torch.float32)


@operator("cpu", "cuda", fake=_gradients)
def piece_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
    positions: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, in fp32, of the sinks (H,); k's and v's are summed in fp32."""
    dq, dk, dv, of_sinks = _gradients(grad, q, k, v)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (dk, dv)]
    kernel, rows = _kernel(q, window)
    for piece in _pieces(q.shape[0], k.shape[2], starts, positions, window, rows):
        g, of_y, of_lse = (piece.queries(x) for x in (grad, y, lse))
        of, *rest = kernel.backward(
            g, piece.queries(q), piece.keys(k), piece.keys(v), of_y, of_lse, window, scale
        )
        piece.queries(dq).copy_(of)
        for total, part in zip(sums, rest, strict=True):
            piece.keys(total).add_(part)
    if sinks is not None:
        part = (sinks.float()[:, None] - lse).exp() * (grad.float() * y.float()).sum(-1)
        of_sinks.copy_(-part.sum((0, 2)))
    return dq, dk.copy_(sums[0]), dv.copy_(sums[1]), of_sinks


class _Pieces(OwnFunction):
    @staticmethod
    def forward(ctx, q, k, v, sinks, starts, positions, window, scale):
        y, lse = piece_attention(q, k, v, sinks, starts, positions, window, scale)
        ctx.save_for_backward(q, k, v, y, lse, sinks, starts, positions)
        ctx.how = window, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # may be read once
        *of, of_sinks = piece_attention_backward(grads[0], *saved, *ctx.how)
        return *of, None if saved[5] is None else of_sinks.to(saved[5].dtype), *[None] * 4


def attend_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float | None, sinks: Tensor | None = None
) -> Tensor:
    """(B, H, t, D) over (B, K, S, D) and (B, K, S, E) to (B, H, t, E); K divides H.

    `sinks` (H,) are scores of each head that take part in the softmax and have no value.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = 0 if seen.window is None or seen.window >= k.shape[2] else seen.window
    size, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    # Kernels want one size of heads.
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    y = _Pieces.apply(q, k, v, sinks, seen.starts, seen.positions, window, scale)
    return y[..., :size]
