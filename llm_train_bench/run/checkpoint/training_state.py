"""The tensors of a training state: this rank's share of each, and setting them from a checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from llm_train_bench.apply.sharded import LocalShard, is_sharded, local_shard, shard_of_whole
from llm_train_bench.base.errors import UsageError
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.stored import DTYPES, OTHER_ORDER, StoredShard, read_block
from llm_train_bench.model.weights import Shard, Weight, part_of
from llm_train_bench.parallel.ranks import ALONE, Ranks, gather
from llm_train_bench.run.checkpoint.manifest import Manifest

# A parameter's own name; the optimizer's tensors are named by their keys instead.
VALUE = "p"


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank{rank:05}.safetensors"


def state_tensors(model: HasWeights, optimizer: Optimizer) -> Iterator[tuple[str, Weight, Tensor]]:
    """Every tensor that training changes, by its name in a checkpoint: VALUE/NAME, or KEY/NAME."""
    for weight, parameter in model.weights():
        yield f"{VALUE}/{weight.name}", weight, parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{key}/{weight.name}", weight, value


def held_shard(model: HasWeights, weight: Weight, tensor: Tensor, ranks: Ranks) -> LocalShard:
    """This rank's shard of a parameter or of what the optimizer keeps for it, and who has the same."""
    layout: Any = model.layout
    own = shard_of_whole(weight, layout, tensor) if tensor.ndim else local_shard(tensor)
    _, shard, copies, copy = own
    if not tensor.ndim or not copies:  # the same on all that have the layer
        copies, copy = ranks.world // layout.pp, ranks.rank % (ranks.world // layout.pp)
    if layout.pp > 1 and weight.module == "embed" and model.config.tie_word_embeddings:
        # The first stage and the last have it: those before the last rank come first.
        copy += copies * (layout.pp_rank > 0)
        copies *= 2
    if tensor.ndim and is_sharded(tensor) and weight.split is None:
        copies, copy = copies * layout.tp, copy * layout.tp + layout.tp_rank
    return LocalShard(own.local, shard, copies, copy)


def own_share(
    model: HasWeights, weight: Weight, tensor: Tensor, ranks: Ranks
) -> tuple[Tensor, StoredShard] | None:
    """What this rank writes of a tensor: ranks that have the same shard share it out."""
    file = file_of(ranks.rank)
    local, (offsets, sizes), copies, copy = held_shard(model, weight, tensor, ranks)
    if not sizes:
        return (local, StoredShard(file, Shard((), ()))) if copy == 0 else None
    first, last = part_of(sizes[0], copies, copy)
    if first == last or not local.numel():
        return None
    shard = Shard((offsets[0] + first, *offsets[1:]), (last - first, *sizes[1:]))
    return local[first:last], StoredShard(file, shard)


def copy_to_host(
    tensors: dict[str, Tensor], copies: dict[str, Tensor], device: torch.device
) -> torch.cuda.Event | None:
    """Copy this rank's shares into `copies`, which a thread can write while training goes on.

    The first call makes them. On a GPU: the event after which they are complete, in stream order.
    """
    pinned = device.type == "cuda"
    for name, tensor in tensors.items():
        if name not in copies:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[name].copy_(tensor, non_blocking=True)
    if not pinned:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The generators that dropout draws from."""
    state = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(directory: Path, rank: int, device: torch.device) -> None:
    """Let dropout go on from the `random_state` that a rank of the same layout saved."""
    with safe_open(directory / file_of(rank), framework="pt") as f:
        torch.set_rng_state(f.get_tensor("rng/cpu"))
        if device.type == "cuda" and "rng/cuda" in f.keys():  # noqa: SIM118 (it is no dictionary)
            torch.cuda.set_rng_state(f.get_tensor("rng/cuda"), device)


@torch.no_grad()
def load(
    path: Path, manifest: Manifest, model: HasWeights, optimizer: Optimizer, ranks: Ranks = ALONE
) -> None:
    """Set parameters and the optimizer's tensors, in place, from any layout's checkpoint.

    UsageError for a tensor that is missing, left over, or of another shape or order of rows.
    """
    left = set(manifest.tensors)

    def fill(name: str, weight: Weight, tensor: Tensor) -> None:
        stored, shape = manifest.tensors.get(name), weight.shape if tensor.ndim else ()
        if stored is None or stored.shape != shape:
            has = f"shape {list(stored.shape)}" if stored else "nothing"
            raise UsageError(f"{path}: {name} should have shape {list(shape)}, has {has}")
        if stored.groups != weight.groups:
            raise UsageError(f"{path}: {name} {OTHER_ORDER}")
        left.discard(name)
        own = held_shard(model, weight, tensor, ranks)
        own.local.copy_(read_block(path, name, stored.parts, own.shard, DTYPES[stored.dtype]))

    keys = {name.split("/", 1)[0] for name in left} - {VALUE}
    shares: dict[Tensor, Tensor] = getattr(optimizer, "shares", {})  # --zero1: moments are of these
    try:
        for weight, parameter in model.weights():
            fill(f"{VALUE}/{weight.name}", weight, parameter.detach())
            for key in sorted(keys):
                stored = manifest.tensors.get(f"{key}/{weight.name}")
                if stored:
                    state = optimizer.state[parameter]
                    if key not in state:  # moments have the parameter's format, a number its own
                        dtype = DTYPES[stored.dtype]
                        single = torch.zeros((), dtype=dtype, device=parameter.device)
                        moment = torch.zeros_like(shares.get(parameter, parameter))
                        state[key] = moment if stored.shape else single
                    fill(f"{key}/{weight.name}", weight, state[key])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if model.layout.pp > 1:  # what no stage has a place for
        left = set.intersection(*gather(ranks, left))
    if left:
        raise UsageError(f"{path}: holds {min(left)}, which this run has no place for")
