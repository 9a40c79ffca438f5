"""The three products of a linear layer, perhaps in a narrow format, and the gather of its input.

Shapes: N tokens, K numbers of an input, M of an output; weights are (M, K).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llm_train_bench.model.layers import autocast_dtype

# A tensor in flight, until what it returns is called.
Move = Callable[[Tensor], Callable[[], Tensor]]


class Products:
    """The products of matrices that `cast` gives another format, or leaves as they are."""

    def cast(self, product: str, first: bool, operand: Tensor) -> Tensor:
        """The first or the second operand of a product, in the format in which it is multiplied."""
        return operand

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """(N, K) and (M, K) to (N, M)."""
        return torch.mm(self.cast("output", True, x), self.cast("output", False, weight.t()))

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """(N, M) and (M, K) to the gradient of the input (N, K)."""
        low = self.cast("of_input", False, weight.t())
        return torch.mm(self.cast("of_input", True, grad), low.t())

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """(N, M) and (N, K) to the gradient of the weight (M, K)."""
        low = self.cast("of_weight", True, grad)
        return torch.mm(low.t(), self.cast("of_weight", False, x))


PLAIN = Products()


class LinearProduct(torch.autograd.Function):
    """A linear layer (..., K) to (..., M) without its bias, by its `products`.

    With `gather` and `scatter` the input has a rank's own tokens. All are gathered for the product, and
    again in backward: while the gradient of the input is computed. Its sums are scattered while the
    gradient of the weight is computed (as in Megatron-LM's tensor_parallel/layers.py).
    """

    @staticmethod
    def forward(ctx, x, weight, products, gather: Move | None, scatter: Move | None):
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.moves = products, (gather, scatter)
        whole = x if gather is None else gather(x)()
        return products.output(whole.flatten(0, -2), weight).unflatten(0, whole.shape[:-1])

    @staticmethod
    def backward(ctx, *grads):
        (x, weight), (gather, scatter) = ctx.saved_tensors, ctx.moves
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        grad, products, of_x, of_weight = grads[0], ctx.products, None, None
        rows = grad.flatten(0, -2).contiguous()
        coming = gather(x) if gather is not None and wants_weight else None
        if wants_input:
            of_x = products.of_input(rows, weight).unflatten(0, grad.shape[:-1])
        x = x if coming is None else coming()
        leaving = scatter(of_x) if scatter is not None and of_x is not None else None
        if wants_weight:
            of_weight = products.of_weight(rows, x.flatten(0, -2))
        return of_x if leaving is None else leaving(), of_weight, None, None, None


def product_of(linear: nn.Linear, x: Tensor, *moves: Move) -> Tensor:
    """A linear layer without its bias, by the products that apply/fp8 gave it, or the plain ones."""
    dtype = autocast_dtype(x.device) or x.dtype
    products = linear.products if isinstance(linear, ProductLinear) else PLAIN
    gather, scatter = moves or (None, None)
    return LinearProduct.apply(x.to(dtype), linear.weight.to(dtype), products, gather, scatter)


def add_bias(y: Tensor, linear: nn.Linear) -> Tensor:
    """A layer's product and its bias, if it has one."""
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


class ProductLinear(nn.Linear):
    """A linear layer that is computed by its `products`."""

    def __init__(self, *sizes: Any, products: Products):
        super().__init__(*sizes)
        self.products = products

    def forward(self, input: Tensor) -> Tensor:
        return add_bias(product_of(self, input), self)


def replace_linear(model: nn.Module, path: str, kind: type[nn.Linear], **options: Any) -> None:
    """Put a linear layer of another kind in the place of one; it takes over the parameters."""
    old = model.get_submodule(path)
    assert isinstance(old, nn.Linear)
    with torch.device("meta"):
        new = kind(old.in_features, old.out_features, old.bias is not None, **options)
    new.weight, new.bias = old.weight, old.bias
    model.set_submodule(path, new)
