"""Backward passes that make the gradients of biases and norms too (--fused-backward).

The forward stays in PyTorch's operators, so that the compiler fuses it; the backward of each function
here is one operator. On a GPU that is a Triton kernel of triton_kernels.py, elsewhere PyTorch's own
operators. A linear layer then leaves the gradient of its bias to the function that reads the same numbers
anyway.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llm_train_bench.model.operators import OwnFunction, operator, taken


def _operator(fake: Callable[..., Any]) -> Callable[..., Any]:
    """An operator by the Triton kernel of that name on a GPU, by PyTorch's operators on a CPU."""
    name = fake.__name__

    def kernel(*args):
        from llm_train_bench.model import triton_kernels

        taken[name] = "triton"
        return getattr(triton_kernels, name)(*args)

    def plain(*args):
        taken[name] = "plain"
        return globals()[f"_plain_{name}"](*args)

    return operator(fake, cuda=kernel, cpu=plain)


def _plain_gelu_backward(grad, h, tanh):
    out = torch.ops.aten.gelu_backward(grad, h, approximate="tanh" if tanh else "none")
    return out, out.sum(0, dtype=torch.float32)


def _plain_join_heads(q, k, v):
    out = torch.cat((q, k, v), dim=2)
    return out, out.sum((0, 1), dtype=torch.float32).flatten()


def _plain_norm_backward(grad, x, mean, rstd, weight, stream):
    normed = x.float() if mean is None else x.float() - mean
    normed, g, rows = normed * rstd, grad * weight.float(), [*range(x.ndim - 1)]
    part = g - normed * (g * normed).mean(-1, keepdim=True)
    part = part if mean is None else part - g.mean(-1, keepdim=True)
    sums = [(grad * normed).sum(rows)]
    sums += [] if mean is None else [t.sum(rows, dtype=torch.float32) for t in (grad, stream)]
    return (stream + rstd * part).to(x.dtype), torch.stack(sums)


@_operator
def gelu_backward(grad: Tensor, h: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of GELU's input `h` (N, F), and that gradient's column sums (F,) in fp32."""
    return torch.empty_like(h), h.new_empty(h.shape[1], dtype=torch.float32)


@_operator
def join_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, H or K, D) each, side by side (B, T, H + 2 K, D); and sums over B and T in fp32."""
    B, T, H, D = q.shape
    heads = H + 2 * k.shape[2]
    return q.new_empty(B, T, heads, D), q.new_empty(heads * D, dtype=torch.float32)


@_operator
def norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, stream: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of a norm's input and vectors; triton_kernels.norm_backward has the shapes."""
    n = 1 if mean is None else 3
    return x.new_empty(x.shape), x.new_empty(n, x.shape[-1], dtype=torch.float32)


class BiasApart(nn.Linear):
    """A linear layer that leaves the gradient of its bias to one of the functions below."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, None if self.bias is None else self.bias.detach())


class Gelu(OwnFunction):
    """GELU of a BiasApart's output (B, T, F), and the gradient of that layer's bias."""

    @staticmethod
    def forward(ctx, h, bias, tanh):
        ctx.save_for_backward(h)
        ctx.tanh, ctx.dtype = tanh, bias.dtype
        return F.gelu(h, approximate="tanh" if tanh else "none")

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (h,) = ctx.saved_tensors
        grad = grads[0].flatten(0, 1).contiguous()
        out, of_bias = gelu_backward(grad, h.flatten(0, 1), ctx.tanh)
        return out.view_as(h), of_bias.to(ctx.dtype), None


class SplitHeads(OwnFunction):
    """A BiasApart's output (B, T, H + 2 K, D) as q, k and v, and the gradient of that layer's bias."""

    @staticmethod
    def forward(ctx, qkv, bias, heads):
        ctx.dtype = bias.dtype
        return qkv.split(heads, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        out, of_bias = join_heads(*(g if g.stride(-1) == 1 else g.contiguous() for g in grads))
        return out, of_bias.to(ctx.dtype), None


class NormBeside(OwnFunction):
    """The residual stream (B, T, d) as it is, and its norm.

    `after` is the bias of the layer whose output is added to the stream next: the stream's gradient,
    summed over B and T, is that bias's. RMSNorm has neither this bias nor its own.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, after, eps):
        scale = weight.to(x.dtype)
        if bias is None:
            normed, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], scale, eps)
            mean = None
        else:
            offset = bias.to(x.dtype)
            normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], scale, offset, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.after = after is not None
        return x.view_as(x), normed

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # Saved as it is, not as rows: of a view the compiler would make another copy.
        x, mean, rstd, weight = ctx.saved_tensors
        stream, grad = (g.contiguous() for g in grads)
        out, sums = norm_backward(grad, x, mean, rstd, weight, stream)
        of_weight, of_bias, of_after = [*sums.to(weight.dtype), None, None][:3]
        return out, of_weight, of_bias, of_after if ctx.after else None, None
