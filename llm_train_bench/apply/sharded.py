"""Tensors and modules that FSDP may have sharded: recognising, reading and filling them.

PyTorch's DTensor takes 2 s of CPU to import. Only what meets a sharded tensor imports it.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

from llm_train_bench.model.hf import Pretrained
from llm_train_bench.model.init import fill
from llm_train_bench.model.layout import HasWeights, Layout
from llm_train_bench.model.weights import Shard, Weight

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


class LocalShard(NamedTuple):
    """What this rank has of a tensor, and its place in the whole."""

    local: Tensor
    shard: Shard


def local_shard(tensor: Tensor) -> LocalShard:
    """This rank's shard of a tensor, as FSDP divides it."""
    if not is_sharded(tensor):
        return LocalShard(tensor, Shard((0,) * tensor.ndim, tuple(tensor.shape)))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor.to_local()
    # --fp8-all-gather has torchao's wrapper around the plain tensor.
    local = getattr(local, "_tensor", local)
    return LocalShard(local, Shard(tuple(offsets), tuple(sizes)))


def shard_of_whole(weight: Weight, layout: Layout, tensor: Tensor) -> LocalShard:
    """This rank's shard of a parameter, as its layout and FSDP divide it."""
    own = local_shard(tensor)
    begins = zip(weight.shard(layout).offsets, own.shard.offsets, strict=True)
    return own._replace(shard=Shard(tuple(map(sum, begins)), own.shard.sizes))


@torch.no_grad()
def materialize(
    model: HasWeights,
    device: torch.device,
    seed: int,
    pretrained: Pretrained | None = None,
    offload: bool = False,
) -> None:
    """Give a meta-device model storage and initial values, in place: the same in every layout of ranks.

    With `pretrained` they are read. A parameter that ranks share is made whole by itself: the model never
    exists whole anywhere. With `offload` the shards are in host memory.
    """
    model.to_empty(device=torch.device("cpu") if offload else device)
    for weight, parameter in model.weights():
        own = shard_of_whole(weight, model.layout, parameter)
        if own.shard.sizes == weight.shape and not offload:
            fill(own.local, weight, seed, pretrained)
            continue
        whole = torch.empty(weight.shape, dtype=parameter.dtype, device=device)
        fill(whole, weight, seed, pretrained)
        own.local.copy_(whole[own.shard.slices])
