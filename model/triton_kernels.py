"""Triton kernels for backward passes that also need sums over rows, and for initial values.

Such a sum is the gradient of a bias. Inductor makes it in a pass of its own, which reads the activation
again. Each of these kernels writes its result and one partial sum per program. Programs are few, so the
partial sums are small. The order of all additions is fixed: the same input gives the same bits.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# Sizes and numbers of warps are the fastest of 4 to 35 that an H200 timed, for GPT-2 125M and 1.5B and,
# for RMSNorm, Llama 8B (benchmarks/results/h200-20261126-2/kernel_sizes.txt).
PROGRAM_ROWS = 512  # of a program, where programs also divide the columns


def norm_programs(d: int) -> int:
    """Programs of a norm's backward, each of which takes every so-manieth row of `d` numbers."""
    return 132 * max(1, 8192 // triton.next_power_of_2(d))


@triton.jit
def _gelu_backward(
    grad,
    h,
    out,
    sums,
    N,
    F,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    p = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), tl.float32)
    for first in range(0, ROWS, BR):
        r = p * ROWS + first + tl.arange(0, BR)
        inside = (r[:, None] < N) & (c[None, :] < F)
        at = r[:, None].to(tl.int64) * F + c[None, :]
        x = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if TANH:  # (1 + tanh u) / 2 is the sigmoid of 2 u
            s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
            slope = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
        else:
            density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
            slope = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
        value = (g * slope).to(out.dtype.element_ty)
        tl.store(out + at, value, mask=inside)
        total += tl.sum(value.to(tl.float32), 0)
    tl.store(sums + p * F + c, total, mask=c < F)


def gelu_backward(grad: Tensor, h: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of GELU's input `h` (N, F), in its dtype, and that gradient's column sums (F,) in fp32."""
    (N, F), columns = h.shape, 64
    programs = triton.cdiv(N, PROGRAM_ROWS)
    out, sums = torch.empty_like(h), h.new_empty(programs, F, dtype=torch.float32)
    grid = programs, triton.cdiv(F, columns)
    _gelu_backward[grid](grad, h, out, sums, N, F, tanh, PROGRAM_ROWS, 32, columns, num_warps=4)
    return out, sums.sum(0)


@triton.jit
def _join_heads(
    q, k, v, out, sums, N, T, H, K, D, width,
    qb, qt, qh, kb, kt, kh, vb, vt, vh,
    ROWS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    p, head = tl.program_id(0), tl.program_id(1)
    if head < H:
        source, sb, st = q + head * qh, qb, qt
    elif head < H + K:
        source, sb, st = k + (head - H) * kh, kb, kt
    else:
        source, sb, st = v + (head - H - K) * vh, vb, vt
    c = tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for first in range(0, ROWS, BR):
        r = (p * ROWS + first + tl.arange(0, BR)).to(tl.int64)
        inside = (r[:, None] < N) & (c[None, :] < D)
        value = tl.load(
            source + ((r // T) * sb + (r % T) * st)[:, None] + c[None, :], mask=inside, other=0.0
        )
        tl.store(out + (r * width + head * D)[:, None] + c[None, :], value, mask=inside)
        total += tl.sum(value.to(tl.float32), 0)
    tl.store(sums + p * width + head * D + c, total, mask=c < D)


def join_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, H, D), (B, T, K, D), (B, T, K, D) of any strides, side by side as (B, T, H + 2 K, D).

    And the sums over B and T, ((H + 2 K) D,) in fp32. The last dimension must be dense.
    """
    (B, T, H, D), K = q.shape, k.shape[2]
    heads, N = H + 2 * K, B * T
    programs = triton.cdiv(N, PROGRAM_ROWS)
    out = q.new_empty(B, T, heads, D)
    sums = q.new_empty(programs, heads * D, dtype=torch.float32)
    strides = [s for t in (q, k, v) for s in t.stride()[:3]]
    block = triton.next_power_of_2(D)
    _join_heads[programs, heads](
        q, k, v, out, sums, N, T, H, K, D, heads * D, *strides, PROGRAM_ROWS, 128, block,
        num_warps=8,
    )  # fmt: skip
    return out, sums.sum(0)


@triton.jit
def _norm_backward(
    grad, x, mean, rstd, weight, stream, out, sums, N, d, programs,
    ROWS: tl.constexpr, CENTRED: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p, c = tl.program_id(0), tl.arange(0, BLOCK)
    w = tl.load(weight + c, mask=c < d, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    of_stream = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, ROWS):
        r = p + i * programs
        at = r.to(tl.int64) * d + c
        inside = (c < d) & (r < N)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + r, mask=r < N, other=0.0).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            normed -= tl.load(mean + r, mask=r < N, other=0.0).to(tl.float32)
        normed = tl.where(inside, normed * scale, 0.0)
        of_weight += g * normed
        if SUMS > 1:
            of_bias += g
        if SUMS > 2:
            of_stream += s
        g *= w
        part = g - normed * (tl.sum(g * normed, 0) / d)
        if CENTRED:
            part -= tl.sum(g, 0) / d
        tl.store(out + at, (s + scale * part).to(out.dtype.element_ty), mask=inside)
    at, inside = p * d + c, c < d
    tl.store(sums + at, of_weight, mask=inside)
    if SUMS > 1:
        tl.store(sums + programs * d + at, of_bias, mask=inside)
    if SUMS > 2:
        tl.store(sums + 2 * programs * d + at, of_stream, mask=inside)


def norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, stream: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward of a norm of `x` (..., d) beside which `x` goes on as the residual stream.

    `grad` (..., d) is the norm's gradient, `stream` the stream's, both dense; `mean` and `rstd` (..., 1)
    are the rows' statistics, without a mean those of RMSNorm. Returns the gradient of `x` and the sums
    (n, d) in fp32: the gradient of the weight and, with a mean, that of the norm's bias and the stream's
    sums.
    """
    x, d = x.contiguous(), x.shape[-1]
    N = x.numel() // d
    n, programs = 1 if mean is None else 3, min(N, norm_programs(d))
    out, sums = torch.empty_like(x), x.new_empty(n, programs, d, dtype=torch.float32)
    block = triton.next_power_of_2(d)
    warps = 16 if block > 2048 else max(1, block // 1024)
    centred, mean = mean is not None, rstd if mean is None else mean
    _norm_backward[(programs,)](
        grad, x, mean, rstd, weight, stream, out, sums, N, d, programs, triton.cdiv(N, programs),
        centred, n, block, num_warps=warps,
    )  # fmt: skip
    return out, sums.sum(1)


@triton.jit
def _hashed_choice(table, out, total, first, second, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = ((pair & 0xFFFFFFFF).to(tl.uint32) ^ first).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h ^= (second + (pair >> 32) * 0x9E3779B1).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x27D4EB2F
    h = (h ^ (h >> 15)) * 0x165667B1
    h ^= h >> 16
    for half in tl.static_range(2):
        place = 2 * pair + half
        index = ((h >> (16 * half)) & 0xFFFF) ^ 0x8000
        value = tl.load(table + index, mask=place < total)
        tl.store(out + place, value, mask=place < total)


def hashed_choice(table: Tensor, out: Tensor, first: int, second: int) -> None:
    """Set `out` (n,) to entries of `table` (65536,), by the hash of `model.init.fill_normal`."""
    total, block = out.numel(), 1024
    _hashed_choice[(triton.cdiv(total, 2 * block),)](
        table, out, total, first, second, block, num_warps=4
    )
