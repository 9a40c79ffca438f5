"""Low-precision products as they would be: rounded to a format, and multiplied in a higher one.

They stand for kernels that a CPU lacks, and such kernels are judged by them.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from llm_train_bench.model.layout import Layout
from llm_train_bench.model.products import Products

E4M3 = torch.float8_e4m3fn
# Magnitudes of NVFP4 (E2M1), and the bounds between them; ties go to the even code.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BELOW = 1 - 2**-20
BOUNDS = (0.25, 0.75 * BELOW, 1.25, 1.75 * BELOW, 2.5, 3.5 * BELOW, 5.0)
# Numbers with a scale of their own, and the size of the Hadamard transform.
BLOCK = 16


def rounded(x: Tensor, amax: Tensor) -> Tensor:
    """Numbers after E4M3 with scales that are powers of two, by the largest magnitudes; in fp32."""
    scale = torch.exp2(torch.floor(torch.log2(448 / amax.float().clamp(min=1e-12))))
    return (x.float() * scale).clamp(-448, 448).to(E4M3).float() / scale


class GroupedProduct(torch.autograd.Function):
    """Rows (R, K) and weights (E, M, K) to (R, M), rounded to FP8 along what each product sums over.

    As torchao's `_to_fp8_rowwise_then_scaled_grouped_mm`: a row has a scale, and in the gradient of a
    weight so has each column of an expert's rows.
    """

    @staticmethod
    def forward(ctx, rows, weight, ends):
        ctx.save_for_backward(rows, weight, ends)
        low = rounded(weight, weight.abs().amax(2, keepdim=True))
        out = F.grouped_mm(_by_row(rows), low.transpose(1, 2), offs=ends)
        return out.to(rows.dtype)

    @staticmethod
    def backward(ctx, *grads):
        rows, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        low = rounded(weight, weight.abs().amax(1, keepdim=True))
        of_rows = F.grouped_mm(_by_row(grad), low, offs=ends)
        columns = _by_column(grad, ends), _by_column(rows, ends)
        of_weight = F.grouped_mm(columns[0].t(), columns[1], offs=ends)
        return of_rows.to(rows.dtype), of_weight.to(weight.dtype), None


def _by_row(x: Tensor) -> Tensor:
    return rounded(x, x.abs().amax(1, keepdim=True))


def _by_column(x: Tensor, ends: Tensor) -> Tensor:
    """Rounded with a scale for each column of each group of rows."""
    number = torch.arange(len(x), device=x.device)
    group = torch.bucketize(number, ends.to(number.dtype), right=True)
    index = group[:, None].expand_as(x)
    amax = x.new_zeros(len(ends), x.shape[1]).scatter_reduce(0, index, x.abs(), "amax")
    return rounded(x, amax[group])


def to_nvfp4(x: Tensor, amax: Tensor, square: bool = False, random: Tensor | None = None) -> Tensor:
    """Numbers (A, S) after NVFP4, in fp32: 16 along S, or with `square` 16 x 16, share a scale in E4M3.

    `amax` is the largest magnitude of the whole tensor, which scales the scales. `random` numbers from 0
    to 1 round up or down in proportion to the distance.
    """
    x = x.float()
    blocks = x.unflatten(1, (-1, BLOCK))
    most = blocks.abs().amax(2, keepdim=True)
    if square:
        most = most.unflatten(0, (-1, BLOCK)).amax(1, keepdim=True).expand(-1, BLOCK, -1, -1)
        most = most.flatten(0, 1)
    whole = amax.float().clamp(min=1e-12) / (448 * 6)
    scale = (most / 6 / whole).clamp(2**-9, 448).to(E4M3).float() * whole
    size = (blocks.abs() / scale).clamp(max=6)
    grid = torch.tensor(FP4, device=x.device)
    if random is None:
        code = torch.bucketize(size, torch.tensor(BOUNDS, device=x.device))
    else:
        code = (torch.bucketize(size, grid, right=True) - 1).clamp(max=len(FP4) - 2)
        part = (size - grid[code]) / (grid[code + 1] - grid[code])
        code = code + (random.view_as(part) < part)
    return (grid[code] * blocks.sign() * scale).flatten(1)


def hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """(A, S) with each 16 numbers along S turned by an orthogonal matrix of equal magnitudes."""
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    turned = x.float().unflatten(1, (-1, BLOCK)) * signs @ matrix / BLOCK**0.5
    return turned.flatten(1)


class Nvfp4Products(Products):
    """NVFP4 (NVIDIA 2025, arXiv 2509.25149, section 4): weights in squares, so that both passes have the
    same; gradients rounded at random; a Hadamard transform before the gradient of the weight.
    """

    def __init__(self, name: str, layout: Layout, shared: dict[str, tuple[str, ...]]):
        self.layout, self.shared = layout, shared
        self.seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")

    def cast(self, x: Tensor, dims: str, square: bool = False, random: bool = False) -> Tensor:
        kinds = [kind for dim in dims for kind in self.shared[dim]]
        amax = x.abs().max().float()
        amax = self.layout.highest(amax, *kinds) if kinds else amax
        draws = None
        if random:  # by what is rounded, so that a resumed run draws the same
            seed = self.seed ^ int(amax.view(torch.int32))
            generator = torch.Generator(x.device).manual_seed(seed)
            draws = torch.rand(x.shape, generator=generator, device=x.device)
        return to_nvfp4(x, amax, square, draws)

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        y = self.cast(x, "NK") @ self.cast(weight, "KM", square=True).t()
        return y.to(x.dtype)

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        low = self.cast(grad, "NM", random=True)
        return (low @ self.cast(weight, "KM", square=True)).to(grad.dtype)

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        signs = (2.0 * torch.randint(2, (BLOCK,), generator=generator) - 1).to(x.device)
        left, right = (hadamard(t.t(), signs) for t in (grad, x))
        product = self.cast(left, "NM", random=True) @ self.cast(right, "NK").t()
        return product.to(x.dtype)
