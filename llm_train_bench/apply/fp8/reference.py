"""FP8 products of experts as they would be: rounded, and multiplied in a higher format.

They stand for kernels that a CPU lacks, and such kernels are judged by them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn


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
