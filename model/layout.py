"""How the ranks that share a batch divide tokens and parameters; without several, everything is whole.

Each rank holds its own slice of tokens of the residual stream. Norms, embedding, head, loss and router
work token by token. Three places move tokens: attention, the MLP, the experts. The model calls the
methods here and knows no process group; parallel/layout.py has the layout of several ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.operators import OwnFunction
from llm_train_bench.model.weights import Lora, Weight

# Queries (B, T, H, D), keys and values (B, S, K, D), a mask and the first head's number to (B, T, H, D).
Attend = Callable[..., Tensor]
# A parameter, or what belongs to it.
Row = tuple[Weight, Tensor]


class Documents:
    """The packed documents of a micro batch.

    No tensor itself, so that DDP and FSDP leave it on the host.
    """

    def __init__(self, starts: Tensor):
        """`starts` (B, T) int64 on the host: the position where each position's document begins."""
        self.starts = starts

    def positions(self, device: torch.device) -> Tensor:
        """(B, T) positions within the documents."""
        positions = torch.arange(self.starts.shape[1]) - self.starts
        return positions.to(device, non_blocking=True)


class Positions(NamedTuple):
    """Positions of a sample that a rank has: their int64 numbers, or a slice."""

    local: Tensor | slice
    """(t,) of the residual stream."""
    gathered: Tensor | slice
    """(T / cp,) after `Layout.gather`."""
    host_queries: Tensor | None = None
    """The same on the host, where they meet keys that all cp ranks gather."""
    key_order: Tensor | None = None
    """(T,) where each position lies among those keys."""


def count_rows(index: Tensor, number: int) -> Tensor:
    """(N, k) experts' numbers to how often each occurs (number,)."""
    flat = index.flatten()
    zeros = torch.zeros(number, dtype=flat.dtype, device=flat.device)
    return zeros.scatter_add_(0, flat, torch.ones_like(flat))


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Permute(OwnFunction):
    """Rows (N, d), `k` times each, to rows (N k, d) in an `order`; `undo` is its inverse.

    PyTorch's own gradient of this indexing adds rows up one by one. This one is a gather, and a sum if
    there are several of each.
    """

    @staticmethod
    def forward(ctx, rows, order, undo, k):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(undo)
        ctx.k = k
        return rows[order if k == 1 else order // k]

    @staticmethod
    def backward(ctx, *grads):
        rows = grads[0][ctx.saved_tensors[0]]
        if ctx.k > 1:
            rows = rows.unflatten(0, (-1, ctx.k)).sum(1, dtype=rows.dtype)
        return rows, None, None, None


class Layout:
    """The layout of one rank: nothing moves. `tp`, `cp` and `ep` divide heads, tokens and experts."""

    tp = cp = ep = pp = 1
    tp_rank = cp_rank = ep_rank = pp_rank = 0

    def positions(
        self, T: int, device: torch.device, documents: Documents | None = None
    ) -> Positions:
        """The positions that this rank has, of samples of T tokens."""
        return Positions(slice(T), slice(T))

    def gather(self, x: Tensor) -> Tensor:
        """(B, t, d) own tokens to the (B, T / cp, d) of the tp ranks."""
        return x

    def column_parallel(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """A linear layer of which each rank has some rows, of `gather(x)`."""
        return linear(x)

    def row_parallel(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The inverse, after a linear layer of which each rank has some columns: the sum's own tokens."""
        return linear(x)

    def attend(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
        """Attention over all T tokens, of queries, keys and values of `gather`'s."""
        return attend(q, k, v, mask, 0)

    def plan_rows(self, index: Tensor, counts: Tensor) -> Any:
        """What `dispatch` and `run_experts` need of a choice (N, k) and how often each expert occurs."""
        return counts

    def dispatch(self, tokens: Tensor, index: Tensor, weights: Tensor, plan: Any) -> Any:
        """(N, d) tokens on their way to the experts chosen for them; only `run_experts` may read them."""
        order = index.flatten().argsort(stable=True)  # by expert, then by token
        undo = inverse(order)
        return Permute.apply(tokens, order, undo, index.shape[1]), order, undo, weights

    def run_experts(self, experts: nn.Module, sent: Any, plan: Any) -> Tensor:
        """The weighted sums (N, d) of `experts(rows, counts)` of what was sent, wherever they are."""
        rows, order, undo, weights = sent
        out = Permute.apply(experts(rows, plan), undo, order, 1)
        out = out.unflatten(0, weights.shape) * weights[..., None]
        return out.sum(dim=1, dtype=out.dtype)  # or CUDA's autocast would sum to fp32

    def gather_parameter(self, weight: Weight, tensor: Tensor) -> Tensor:
        """A parameter, or its gradient, whole; all ranks call this."""
        return tensor

    def gather_parameters(self, parts: Iterable[Row]) -> Iterator[Row]:
        """All parameters of the model, or their gradients, whole; `parts` are this rank's."""
        for weight, tensor in parts:
            yield weight, self.gather_parameter(weight, tensor)

    def gradients(self, model: "HasWeights") -> Any:
        """What completes and measures the gradients of several ranks (parallel/layout.py), or None."""
        return None

    def scatter(self, x: Tensor) -> Tensor:
        """The inverse of `gather`: (B, T / cp, d) added up over the tp ranks."""
        return x

    def sum_over_tp(self, numbers: Tensor) -> Tensor:
        """Numbers added up over the tp ranks."""
        return numbers

    def max_over_ranks(self, numbers: Tensor, *kinds: str) -> Tensor:
        """The largest of their numbers, without a gradient; or of the ranks of `kinds`: tp, cp."""
        return numbers

    def sum_over_data(self, numbers: Tensor) -> Tensor:
        """Numbers added up over the ranks that hold other tokens of a step."""
        return numbers


ALONE = Layout()


class HasWeights(nn.Module):
    """A model, or one rank's stages of it."""

    config: ModelConfig
    layout: Layout
    lora: Lora | None = None

    def weights(self) -> Iterator[tuple[Weight, nn.Parameter]]:
        """Every parameter with its row, by which it is initialised, divided and saved."""
        raise NotImplementedError
