"""Muon: momentum, orthogonalised, for the matrices of blocks; AdamW for all other parameters.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Steps have the size of AdamW's (Liu et al. 2025,
arXiv 2502.16982, section 2.2), so that both take one learning rate. Each expert is a matrix, and so is
each part of a fused layer. Where ranks divide a matrix, one has all of it for the iteration.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llm_train_bench.apply.sharded import boxes, parameter_groups, place
from llm_train_bench.formulas.flops import ITERATIONS, muon_flops
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.shares import is_matrix, matrix_rows
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


class Piece(NamedTuple):
    """What a rank has of a matrix: its rows and columns from `row` and `column` on."""

    matrix: tuple[str, int, int]
    """Name of the parameter, number of the expert, and of the segment of a fused layer."""
    size: tuple[int, int]
    """Of the whole matrix."""
    row: int
    column: int
    shape: tuple[int, int]


class Muon(torch.optim.AdamW):
    """Both optimizers; a rank's state is of its own rows."""

    def __init__(self, model: HasWeights, flags: OptimizerFlags):
        named = [(n, p) for n, p in model.weights() if p.requires_grad]
        self.matrices = {n: p for n, p in named if is_matrix(n, p.ndim)}
        others = {n: p for n, p in named if n not in self.matrices}
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
        for name, p in self.matrices.items():
            if p.grad is None:
                continue
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            grad, momentum = place(p.grad)[0], place(self.state[p]["momentum_buffer"])[0]
            momentum.lerp_(grad, 1 - MOMENTUM)
            updates[name] = grad.lerp(momentum, MOMENTUM)
        self.exchange.orthogonalise(updates)
        for name, update in updates.items():
            local = place(self.matrices[name].detach())[0]
            local.mul_(1 - muon["lr"] * muon["weight_decay"]).sub_(update, alpha=muon["lr"])


class Exchange:
    """The pieces of all ranks of a replica, and which of these ranks has each matrix whole."""

    def __init__(self, model: HasWeights, matrices: dict[str, Any]):
        layout: Any = model.layout
        self.own = [each for name, p in matrices.items() for each in pieces(model, name, p)]
        self.group = getattr(layout, "owners", None)
        mine = [piece for piece, _ in self.own]
        self.ranks, self.rank, here = 1, 0, [mine]
        if self.group is not None:
            self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            here = [[]] * self.ranks
            dist.all_gather_object(here, mine, group=self.group)
        sizes = {piece.matrix: piece.size for rank in here for piece in rank}
        owners, work = {}, [0] * self.ranks
        for matrix in sorted(sizes, key=lambda m: (-muon_flops(*sizes[m]), m)):
            owners[matrix] = work.index(min(work))
            work[owners[matrix]] += muon_flops(*sizes[matrix])
        self.sizes = {m: size for m, size in sizes.items() if owners[m] == self.rank}
        self.own.sort(key=lambda each: owners[each[0].matrix])
        self.coming = [[p for p in rank if owners[p.matrix] == self.rank] for rank in here]
        self.sent = [0] * self.ranks
        for piece, _ in self.own:
            self.sent[owners[piece.matrix]] += math.prod(piece.shape)
        self.received = [sum(math.prod(p.shape) for p in rank) for rank in self.coming]

    def orthogonalise(self, updates: dict[str, Tensor]) -> None:
        """Replace a rank's parts of momenta by those of the orthogonal matrices, scaled, in place."""
        if not updates:
            return
        device = next(iter(updates.values())).device
        views = [updates[piece.matrix[0]][box][at] for piece, (box, at) in self.own]
        flat = torch.cat([view.reshape(-1) for view in views] or [torch.empty(0, device=device)])
        arrived = self.moved(flat, self.received, self.sent)
        whole = {m: arrived.new_empty(size) for m, size in self.sizes.items()}
        parts = [p for rank in self.coming for p in rank]
        numbers = arrived.split([math.prod(p.shape) for p in parts])
        for p, values in zip(parts, numbers, strict=True):
            _within(whole[p.matrix], p).copy_(values.view(p.shape))
        alike: dict[tuple[int, int], list[Any]] = {}
        for matrix, size in self.sizes.items():
            alike.setdefault(size, []).append(matrix)
        for size, same in alike.items():
            scale = 0.2 * math.sqrt(max(size))
            for matrix, made in zip(
                same, orthogonal(torch.stack([whole[m] for m in same])), strict=True
            ):
                whole[matrix] = made * scale
        back = [_within(whole[p.matrix], p).reshape(-1) for p in parts]
        flat = self.moved(torch.cat(back or [arrived[:0]]), self.sent, self.received)
        for view, values in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(values.view(view.shape))

    def moved(self, flat: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Numbers in bf16 to and from the other ranks; a rank alone rounds them too."""
        flat = flat.bfloat16()
        if self.ranks == 1:
            return flat
        arrived = flat.new_empty(sum(received))
        dist.all_to_all_single(arrived, flat, received, sent, group=self.group)
        return arrived


def _within(matrix: Tensor, piece: Piece) -> Tensor:
    rows, columns = piece.shape
    return matrix[piece.row : piece.row + rows, piece.column : piece.column + columns]


def pieces(model: HasWeights, name: str, parameter: Any) -> list[tuple[Piece, Any]]:
    """This rank's pieces of a parameter's matrices, each with its place in two steps of indexing."""
    local, found = place(parameter)[0], []
    for box in boxes(model.config, model.layout, name, parameter):
        sizes, (*first, row, column) = local[box.at].shape, box.offsets
        for number_of_expert in range(sizes[0]) if first else (None,):
            begin = 0
            for number, size in enumerate(matrix_rows(model.config, name)):
                start, end = max(row, begin), min(row + sizes[-2], begin + size[0])
                if start < end:
                    expert = 0 if number_of_expert is None else first[0] + number_of_expert
                    shape = end - start, sizes[-1]
                    piece = Piece((name, expert, number), size, start - begin, column, shape)
                    at: Any = (slice(start - row, end - row),)
                    found.append((piece, (box.at, (number_of_expert, *at) if first else at)))
                begin += size[0]
    return found
