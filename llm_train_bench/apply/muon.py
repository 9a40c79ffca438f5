"""Muon: momentum, orthogonalised, for the matrices of blocks; AdamW for all other parameters.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Steps have the size of AdamW's (Liu et al. 2025,
arXiv 2502.16982, section 2.2), so that both take one learning rate. Each expert is a matrix, and so is
each part of a fused layer. Where ranks divide a matrix, one has all of it for the iteration.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llm_train_bench.apply.sharded import local_shard, parameter_groups, shard_of_whole
from llm_train_bench.formulas.flops import ITERATIONS, muon_flops
from llm_train_bench.model.layout import HasWeights, Layout
from llm_train_bench.model.weights import Shard, Weight
from llm_train_bench.settings.flags import OptimizerFlags

MOMENTUM = 0.95
# Coefficients of PyTorch's Muon.
COEFFICIENTS = 3.4445, -4.7750, 2.0315


def orthogonal(matrices: Tensor) -> Tensor:
    """(n, A, B) matrices to about the nearest ones with singular values of 1, by Newton-Schulz.

    As `torch.optim.Muon` does it for one matrix: five steps of a quintic polynomial.
    """
    a, b, c = COEFFICIENTS
    # In bf16 but on a CPU, where that is slower.
    matrices = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


class Owned(NamedTuple):
    """What one rank has whole for the iteration: a parameter (expert 0), or the part of one expert."""

    weight: Weight
    expert: int


class Piece(NamedTuple):
    """A rank's shard of an `Owned`; `number` is that of the expert among the rank's own."""

    of: Owned
    shard: Shard
    number: int


class Muon(torch.optim.AdamW):
    """Both optimizers; a rank's state is of its own rows."""

    def __init__(self, model: HasWeights, flags: OptimizerFlags):
        learnt = {weight: p for weight, p in model.weights() if p.requires_grad}
        self.matrices = {weight: p for weight, p in learnt.items() if weight.is_matrix}
        others = {w.name: p for w, p in learnt.items() if w not in self.matrices}
        muon = {"params": [*self.matrices.values()], "weight_decay": flags.weight_decay}
        groups = [*parameter_groups(others, flags.weight_decay), muon]
        super().__init__(groups, lr=flags.lr, betas=(0.9, 0.95), fused=True)
        self.exchange = Exchange(model, self.matrices)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        *groups, muon = self.param_groups
        self.param_groups = groups
        super().step()
        self.param_groups = [*groups, muon]
        updates = {}
        for weight, p in self.matrices.items():
            if p.grad is None:
                continue
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            grad = local_shard(p.grad).local
            momentum = local_shard(self.state[p]["momentum_buffer"]).local
            momentum.lerp_(grad, 1 - MOMENTUM)
            updates[weight] = grad.lerp(momentum, MOMENTUM)
        self.exchange.orthogonalise(updates)
        for weight, update in updates.items():
            local = local_shard(self.matrices[weight].detach()).local
            local.mul_(1 - muon["lr"] * muon["weight_decay"]).sub_(update, alpha=muon["lr"])


class Exchange:
    """The pieces of all ranks of a replica, and which of these ranks has each parameter whole."""

    def __init__(self, model: HasWeights, matrices: dict[Weight, Any]):
        layout: Any = model.layout
        own = [piece for weight, p in matrices.items() for piece in pieces(layout, weight, p)]
        self.group = getattr(layout, "owners", None)
        self.ranks, self.rank, by_rank = 1, 0, [own]
        if self.group is not None:
            self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            by_rank = [[]] * self.ranks
            dist.all_gather_object(by_rank, own, group=self.group)
        every = {piece.of for rank in by_rank for piece in rank}
        owners, work = {}, [0] * self.ranks
        for owned in sorted(every, key=lambda o: (-muon_flops(o.weight), o.weight.name, o.expert)):
            owners[owned] = work.index(min(work))
            work[owners[owned]] += muon_flops(owned.weight)
        self.owned = [owned for owned, rank in owners.items() if rank == self.rank]
        self.own = sorted(own, key=lambda piece: owners[piece.of])
        by_rank = [[p for p in rank if owners[p.of] == self.rank] for rank in by_rank]
        self.coming = [piece for rank in by_rank for piece in rank]
        self.received = [sum(math.prod(p.shard.sizes) for p in rank) for rank in by_rank]
        self.sent = [0] * self.ranks
        for piece in self.own:
            self.sent[owners[piece.of]] += math.prod(piece.shard.sizes)

    def orthogonalise(self, updates: dict[Weight, Tensor]) -> None:
        """Replace a rank's parts of momenta by those of the orthogonal matrices, scaled, in place."""
        if not updates:
            return
        device = next(iter(updates.values())).device
        stacks = {w: update if update.ndim == 3 else update[None] for w, update in updates.items()}
        views = [stacks[piece.of.weight][piece.number] for piece in self.own]
        flat = torch.cat([view.reshape(-1) for view in views] or [torch.empty(0, device=device)])
        arrived = self.moved(flat, self.received, self.sent)
        whole = {owned: arrived.new_empty(owned.weight.shape[-2:]) for owned in self.owned}
        places = [whole[piece.of][piece.shard.slices] for piece in self.coming]
        numbers = arrived.split([place.numel() for place in places])
        for place, values in zip(places, numbers, strict=True):
            place.copy_(values.view(place.shape))
        alike: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for owned, rows in whole.items():
            for matrix in fused_matrices(owned.weight, rows):
                alike[matrix.shape[0] * matrix.shape[1], matrix.shape[2]].append(matrix)
        for size, same in alike.items():
            made = orthogonal(torch.stack([matrix.flatten(0, 1) for matrix in same]))
            for matrix, values in zip(same, made * (0.2 * math.sqrt(max(size))), strict=True):
                matrix.copy_(values.view_as(matrix))
        back = torch.cat([place.reshape(-1) for place in places] or [arrived[:0]])
        flat = self.moved(back, self.sent, self.received)
        for view, values in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(values.view(view.shape))

    def moved(self, flat: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Numbers in bf16 to and from the other ranks; a single rank rounds them too."""
        flat = flat.bfloat16()
        if self.ranks == 1:
            return flat
        arrived = flat.new_empty(sum(received))
        dist.all_to_all_single(arrived, flat, received, sent, group=self.group)
        return arrived


def fused_matrices(weight: Weight, rows: Tensor) -> tuple[Tensor, ...]:
    """Views (groups, rows of a group, in) of the layers that are fused in a parameter (out, in)."""
    return rows.unflatten(0, (weight.groups, -1)).split(weight.group_sizes, dim=1)


def pieces(layout: Layout, weight: Weight, parameter: Any) -> list[Piece]:
    """This rank's pieces of a parameter."""
    local, (offsets, sizes) = shard_of_whole(weight, layout, parameter)
    if not local.numel():
        return []
    first, number = (offsets[0], sizes[0]) if weight.of_experts else (0, 1)
    shard = Shard(offsets[-2:], sizes[-2:])
    return [Piece(Owned(weight, first + i), shard, i) for i in range(number)]
