"""Linear layers in fp32 by oneDNN on a CPU (--linear onednn).

PyTorch takes MKL, which is half as fast on AMD's CPUs. oneDNN's operator belongs to Inductor's
inference, and has no gradient. Here are one with a gradient, and the layer that uses it.
"""

# pyright: reportIncompatibleMethodOverride=false

import torch
from torch import Tensor, nn

from llm_train_bench.model.loss import matmul_transposed
from llm_train_bench.model.operators import OwnFunction, operator


def available() -> bool:
    """Whether this build of PyTorch has oneDNN's operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@operator(
    "cpu", fake=lambda x, w, b: x.new_empty(*x.shape[:-1], len(w)), note=("linear layers", "onednn")
)
def onednn_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """(..., K) times (N, K), a view of any strides, transposed; plus a bias (N,)."""
    return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")


@operator("cpu")
def onednn_grad_weight(g: Tensor, x: Tensor) -> Tensor:
    """The weight's gradient (N, K): (M, N) transposed times (M, K)."""
    return product(g.t(), x.t()).contiguous()


class _Linear(OwnFunction):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        ctx.bias = b is not None
        return onednn_linear(x, w, b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        x, w = ctx.saved_tensors
        g, wanted = grads[0].flatten(0, -2), ctx.needs_input_grad
        of_x = onednn_linear(g, w.t(), None).view(x.shape) if wanted[0] else None
        of_w = onednn_grad_weight(g, x.flatten(0, -2)) if wanted[1] else None
        return of_x, of_w, g.sum(0) if ctx.bias and wanted[2] else None


class OnednnLinear(nn.Linear):
    """nn.Linear by oneDNN where it can be: in fp32, on a CPU, without autocast."""

    def forward(self, input: Tensor) -> Tensor:
        fits = all(
            t.dtype == torch.float32 and t.device.type == "cpu" for t in (input, self.weight)
        )
        if fits and input.dim() > 1 and input.numel() and not torch.is_autocast_enabled("cpu"):
            return _Linear.apply(input, self.weight, self.bias)
        return super().forward(input)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """(M, K) times (N, K) transposed, without a gradient: the matmuls inside the loss."""
    if a.dtype != torch.float32 or a.device.type != "cpu":
        return matmul_transposed(a, b, out)
    # The first operand is copied if it is transposed: the smaller one.
    swaps = not a.is_contiguous() and a.shape[0] > b.shape[0]
    result = onednn_linear(b, a, None).t() if swaps else onednn_linear(a, b, None)
    return result if out is None else out.copy_(result)
