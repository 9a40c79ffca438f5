"""Recognising and reading tensors and modules that FSDP has sharded.

PyTorch's DTensor takes 2 s of CPU to import. Only what meets a sharded tensor imports it.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

from torch import Tensor, nn

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.shares import cuts, divided

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor: a rank's part of a whole on a device mesh."""
    return hasattr(tensor, "full_tensor")


def parameter_groups(named: dict[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's groups: matrices with weight decay, vectors and biases without.

    Each has one device mesh: a fused optimizer's kernel cannot mix them.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for name, p in named.items():
        decays = p.ndim >= 2 and not name.endswith("bias")
        groups.setdefault((decays, getattr(p, "device_mesh", None)), []).append(p)
    return [
        {"params": same, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), same in groups.items()
    ]


def sharded_modules(model: nn.Module) -> "list[FSDPModule]":
    """The modules that FSDP gathers as units; none without FSDP."""
    return [cast("FSDPModule", module) for module in model.modules() if hasattr(module, "reshard")]


def reshard(modules: "list[FSDPModule]") -> None:
    """Free the gathered weights after a forward pass without a backward.

    Weights that stay are in low precision: no export can use them, and the next pass finds them.
    """
    for module in modules:
        module.reshard()


class Box(NamedTuple):
    """What a rank has of a parameter, where its layout cuts a fused one: several boxes of the whole."""

    at: tuple[slice, ...]
    """Place in this rank's numbers."""
    offsets: tuple[int, ...]
    """Place in the whole parameter."""


def boxes(config: ModelConfig, layout: Any, name: str, tensor: Tensor) -> list[Box]:
    """The boxes of a parameter of that name on this rank of a layout."""
    local, offsets, _, _, _ = place(tensor)
    every = [slice(None)] * local.ndim
    if (how := divided(config, name)) is None:
        return [Box(tuple(every), tuple(offsets))]
    kind, dim, _ = how
    found, begin = [], 0
    for cut in cuts(config, name, getattr(layout, kind), getattr(layout, f"{kind}_rank")):
        first = max(offsets[dim], begin)
        last = min(offsets[dim] + local.shape[dim], begin + len(cut))
        if first < last:
            at, where = [*every], [*offsets]
            at[dim] = slice(first - offsets[dim], last - offsets[dim])
            where[dim] = cut.start + first - begin
            found.append(Box(tuple(at), tuple(where)))
        begin += len(cut)
    return found


def place(tensor: Tensor) -> tuple[Tensor, list[int], list[int], int, int]:
    """This rank's part of a tensor: its numbers, offsets and lengths in the whole.

    The last two values say how many ranks hold the same part, and which of them this one is; 0 copies
    stand for all ranks.
    """
    if not is_sharded(tensor):
        return tensor, [0] * tensor.ndim, list(tensor.shape), 0, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, copies, index = tensor.device_mesh, 1, 0
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copies *= mesh.size(dimension)
            index = index * mesh.size(dimension) + mesh.get_local_rank(dimension)
    local = tensor.to_local()
    # --fp8-all-gather has torchao's wrapper around the plain tensor.
    local = getattr(local, "_tensor", local)
    return local, list(offsets), list(lengths), copies, index
