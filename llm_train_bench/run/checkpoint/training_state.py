"""The tensors of a training state: this rank's share of each, and setting them from a checkpoint."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from llm_train_bench.apply.sharded import boxes, is_sharded, place
from llm_train_bench.base.errors import UsageError
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.shares import divided, whole_shape
from llm_train_bench.model.stored import DTYPES, Part, read_block
from llm_train_bench.parallel.ranks import ALONE, Ranks, gather
from llm_train_bench.run.checkpoint.manifest import Manifest

# A parameter's own name; the optimizer's tensors are named by their keys instead.
VALUE = "p"


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank{rank:05}.safetensors"


def state_tensors(model: HasWeights, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that training changes, by its name in a checkpoint: VALUE/NAME, or KEY/NAME."""
    for name, parameter in model.weights():
        yield f"{VALUE}/{name}", parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{key}/{name}", value


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a whole tensor on this rank: its numbers and its place; `copies` ranks hold the same.

    This rank is number `index` of those.
    """

    local: Tensor
    offsets: tuple[int, ...]
    copies: int
    index: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.local.shape)


def blocks(model: HasWeights, name: str, tensor: Tensor, ranks: Ranks) -> list[Block]:
    """The blocks that this rank holds of a whole tensor; several where its layout cut a fused weight."""
    config, plain = model.config, name.split("/", 1)[1]
    layout: Any = model.layout
    local, offsets, _, copies, index = place(tensor)
    world, rank = ranks.world // layout.pp, ranks.rank % (ranks.world // layout.pp)
    if not tensor.ndim or not copies:  # the same on all that have the layer
        copies, index = world, rank
    if layout.pp > 1 and plain == "embed.weight" and config.tie_word_embeddings:
        # The first stage and the last have it: those before the last rank come first.
        index += copies * (layout.pp_rank > 0)
        copies *= 2
    if not tensor.ndim or not is_sharded(tensor):
        return [Block(local, tuple(offsets), copies, index)]
    if divided(config, plain) is None:
        copies, index = copies * layout.tp, index * layout.tp + layout.tp_rank
    own = boxes(config, layout, plain, tensor)
    return [Block(local[box.at], box.offsets, copies, index) for box in own]


def own_shares(
    model: HasWeights, name: str, tensor: Tensor, ranks: Ranks
) -> dict[str, tuple[Tensor, Part]]:
    """What this rank writes of a tensor, by the keys in its file: ranks with the same share it out."""
    shares, file = {}, file_of(ranks.rank)
    for number, block in enumerate(blocks(model, name, tensor, ranks)):
        lengths, key = block.lengths, f"{name}#{number}" if number else name
        if not lengths:
            if block.index == 0:
                shares[key] = block.local, Part(file, (), ())
            continue
        first = lengths[0] * block.index // block.copies
        last = lengths[0] * (block.index + 1) // block.copies
        if first < last and math.prod(lengths):
            where = (block.offsets[0] + first, *block.offsets[1:])
            part = Part(file, where, (last - first, *lengths[1:]), key if number else "")
            shares[key] = block.local[first:last], part
    return shares


class Staging:
    """Copies of this rank's shares in host memory, which a thread can write while training goes on."""

    def __init__(self, device: torch.device):
        self.pinned = device.type == "cuda"
        self.buffers: dict[str, Tensor] = {}

    def copy(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """The copies, and on a GPU the event after which they are complete, in stream order."""
        for name, tensor in tensors.items():
            if name not in self.buffers:
                self.buffers[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned
                )
            self.buffers[name].copy_(tensor, non_blocking=True)
        event = None
        if self.pinned:
            event = torch.cuda.Event()
            event.record()
        return self.buffers, event


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The generators that dropout draws from."""
    state = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Let dropout go on from a `random_state`."""
    torch.set_rng_state(state["rng/cpu"])
    if device.type == "cuda" and "rng/cuda" in state:
        torch.cuda.set_rng_state(state["rng/cuda"], device)


def saved_random_state(directory: Path, rank: int) -> dict[str, Tensor]:
    """That of this rank of the same layout, where it saved a checkpoint."""
    with safe_open(directory / file_of(rank), framework="pt") as f:
        return {name: f.get_tensor(name) for name in f.keys() if name.startswith("rng/")}  # noqa: SIM118


@torch.no_grad()
def load(
    path: Path, manifest: Manifest, model: HasWeights, optimizer: Optimizer, ranks: Ranks = ALONE
) -> None:
    """Set parameters and the optimizer's tensors, in place, from any layout's checkpoint.

    UsageError for a tensor that is missing, left over or of another shape.
    """
    left = set(manifest.tensors)

    def fill(name: str, tensor: Tensor) -> None:
        stored, shape = manifest.tensors.get(name), whole_size(model, name, tensor)
        if stored is None or stored.shape != shape:
            has = f"shape {list(stored.shape)}" if stored else "nothing"
            raise UsageError(f"{path}: {name} should have shape {list(shape)}, has {has}")
        left.discard(name)
        for block in blocks(model, name, tensor, ranks):
            place_of = block.offsets, block.lengths
            dtype = DTYPES[stored.dtype]
            block.local.copy_(read_block(path, name, stored.parts, *place_of, dtype))

    keys = {name.split("/", 1)[0] for name in left} - {VALUE}
    try:
        for name, parameter in model.weights():
            fill(f"{VALUE}/{name}", parameter.detach())
            for key in sorted(keys):
                stored = manifest.tensors.get(f"{key}/{name}")
                if stored:
                    state = optimizer.state[parameter]
                    if key not in state:  # moments have the parameter's format, a number its own
                        dtype = DTYPES[stored.dtype]
                        single = torch.zeros((), dtype=dtype, device=parameter.device)
                        state[key] = torch.zeros_like(parameter) if stored.shape else single
                    fill(f"{key}/{name}", state[key])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if model.layout.pp > 1:  # what no stage has a place for
        left = set.intersection(*gather(ranks, left))
    if left:
        raise UsageError(f"{path}: holds {min(left)}, which this run has no place for")


def whole_size(model: HasWeights, name: str, tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor of that name in a checkpoint."""
    if not tensor.ndim:
        return ()
    return tuple(whole_shape(model.config, name.split("/", 1)[1], tensor.shape))
