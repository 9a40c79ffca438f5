"""Causal attention on a CPU in blocks of queries, each over the keys before it (--attention blocks).

PyTorch's kernel for CPUs computes the whole square of scores, and converts bf16 slowly. Here the matmuls
of a block see only its prefix, and the probabilities are kept for the backward. Scores and softmax are
in fp32. Probabilities are rounded to the format of the values before they multiply them, as in flash
attention on a GPU.
"""

# pyright: reportIncompatibleMethodOverride=false

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llm_train_bench.model.operators import OwnFunction, operator

aten = torch.ops.aten


class InBlocks(NamedTuple):
    """The mask of causal attention that is computed here."""


def _ends(T: int, width: int) -> list[tuple[int, int]]:
    """First and last queries of the blocks: 64 to 128 in fp32, twice as many in 16 bits."""
    size = max(256 // width, T // 8)
    return [(start, min(start + size, T)) for start in range(0, T, size)]


def _rows(x: Tensor, group: int = 1) -> Tensor:
    """(B, K, T, D) of any strides as dense (B K group, T, D), each head `group` times in turn; a copy.

    The compiler reuses the memory of an operator's inputs: no output may be a view of one.
    """
    return x.repeat_interleave(group, 1).contiguous().flatten(0, 1)


def _kept(p: Tensor, n: int, T: int):
    """By block: first and last query, and their probabilities (n, queries, keys) in the flat `p`."""
    at = 0
    for start, end in _ends(T, p.element_size()):
        size = n * (end - start) * end
        yield start, end, p[at : at + size].view(n, end - start, end)
        at += size


@operator("cpu", note=("attention", "blocks"))
def block_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(B, H, T, D), (B, K, T, D), (B, K, T, E) to (B, H, T, E); and the backward's p, q, k, v."""
    (B, H, T, _), group = q.shape, q.shape[1] // k.shape[1]
    y = q.new_empty(B, T, H, v.shape[3]).transpose(1, 2)
    n = sum((end - start) * end for start, end in _ends(T, q.element_size()))
    p = q.new_empty(B * H * n)
    q, k, v = _rows(q), _rows(k, group), _rows(v, group)
    wide_q, wide_k = q.float(), k.float()
    for start, end, kept in _kept(p, B * H, T):
        scores = kept if q is wide_q else torch.empty_like(kept, dtype=torch.float32)
        keys = wide_k[:, :end].transpose(1, 2)
        torch.baddbmm(scores, wide_q[:, start:end], keys, beta=0, alpha=scale, out=scores)
        later = scores.new_full((end - start, end - start), float("-inf")).triu_(1)
        scores[:, :, start:].add_(later)
        aten._softmax(scores, -1, False, out=scores)
        if scores is not kept:
            kept.copy_(scores)
        y[:, :, start:end] = torch.bmm(kept, v[:, :end]).view(B, H, end - start, -1)
    return y, p, q, k, v


@operator("cpu")
def block_attention_backward(
    grad: Tensor, p: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each (B, `heads` or H, T, size), dense with heads beside tokens."""
    B, H, T, _ = grad.shape
    made = [(H, q), (heads, k), (heads, v)]
    grads = [x.new_empty(B, T, n, x.shape[2]).transpose(1, 2) for n, x in made]
    g = _rows(grad)
    dk = dv = g.new_empty(0)
    for start, end, kept in reversed([*_kept(p, B * H, T)]):
        g_block, q_block = g[:, start:end], q[:, start:end]
        of_p = torch.bmm(g_block, v[:, :end].transpose(1, 2))
        of_scores = aten._softmax_backward_data(of_p, kept, -1, q.dtype)
        part = torch.baddbmm(q_block, of_scores, k[:, :end], beta=0, alpha=scale)
        grads[0][:, :, start:end] = part.view(B, H, end - start, -1)
        of_k = torch.bmm(of_scores.transpose(1, 2), q_block)
        of_v = torch.bmm(kept.transpose(1, 2), g_block)
        if end == T:  # the last block sees all keys
            dk, dv = of_k, of_v
        else:
            dk[:, :end].add_(of_k)
            dv[:, :end].add_(of_v)
    for made, rows, factor in ((grads[1], dk, scale), (grads[2], dv, 1.0)):
        groups = rows.view(B, heads, -1, T, rows.shape[2])
        torch.mul(groups.sum(2) if groups.shape[2] > 1 else groups[:, :, 0], factor, out=made)
    return grads[0], grads[1], grads[2]


class _Attention(OwnFunction):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        y, *kept = block_attention(q, k, v, scale)
        ctx.save_for_backward(*kept)
        ctx.heads, ctx.scale = k.shape[1], scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        kept = *ctx.saved_tensors, ctx.heads, ctx.scale
        return *block_attention_backward(grads[0], *kept), None


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention as F.scaled_dot_product_attention's with enable_gqa."""
    return _Attention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
