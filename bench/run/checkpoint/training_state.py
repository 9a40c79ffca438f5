"""The tensors of a training state: this rank's share of each, and setting them from a checkpoint."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bench.errors import UsageError
from bench.parallel.ranks import Ranks
from bench.run.checkpoint.manifest import Manifest
from bench.sharded import place
from model.stored import DTYPES, NAMES, Part, read_block
from model.transformer import Transformer

# A parameter's own name; the optimizer's tensors are named by their keys instead.
VALUE = "p"


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank{rank:05}.safetensors"


def state_tensors(
    model: Transformer, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that training changes, by its name in a checkpoint: VALUE/NAME, or KEY/NAME."""
    for name, parameter in model.weights():
        yield f"{VALUE}/{name}", parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{key}/{name}", value


def own_share(tensor: Tensor, ranks: Ranks) -> tuple[Tensor, Part] | None:
    """The rows of this rank's part that it writes: ranks with the same part share them out.

    None where others write all of them.
    """
    local, offsets, lengths, copies, index = place(tensor)
    copies, index = (copies, index) if copies else (ranks.world, ranks.rank)
    if not lengths:
        return (local, Part(file_of(ranks.rank), (), ())) if index == 0 else None
    first, last = lengths[0] * index // copies, lengths[0] * (index + 1) // copies
    if first == last or not math.prod(lengths):
        return None
    where = (offsets[0] + first, *offsets[1:])
    return local[first:last], Part(file_of(ranks.rank), where, (last - first, *lengths[1:]))


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
    found = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["rng/cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(directory: Path, rank: int, device: torch.device) -> None:
    """Let dropout go on where this rank of the same layout stopped."""
    with safe_open(directory / file_of(rank), framework="pt") as f:
        torch.set_rng_state(f.get_tensor("rng/cpu"))
        if device.type == "cuda" and "rng/cuda" in f.keys():  # noqa: SIM118 (no mapping)
            torch.cuda.set_rng_state(f.get_tensor("rng/cuda"), device)


@torch.no_grad()
def load(
    directory: Path, manifest: Manifest, model: Transformer, optimizer: torch.optim.Optimizer
) -> None:
    """Set parameters and the optimizer's tensors, in place, from any layout's checkpoint.

    UsageError for a tensor that is missing, left over or of another shape.
    """
    left = set(manifest.tensors)

    def fill(name: str, tensor: Tensor) -> None:
        local, offsets, lengths, _, _ = place(tensor)
        stored = manifest.tensors.get(name)
        if stored is None or list(stored.shape) != list(tensor.shape):
            has = f"shape {list(stored.shape)}" if stored else "nothing"
            raise UsageError(
                f"{directory}: {name} should have shape {list(tensor.shape)}, has {has}"
            )
        left.discard(name)
        dtype = DTYPES[stored.dtype]
        local.copy_(read_block(directory, name, stored.parts, offsets, lengths, dtype))

    keys = {name.split("/", 1)[0] for name in left} - {VALUE}
    try:
        for name, parameter in model.weights():
            fill(f"{VALUE}/{name}", parameter.detach())
            for key in sorted(keys):
                if stored := manifest.tensors.get(f"{key}/{name}"):
                    state = optimizer.state[parameter]
                    if key not in state:
                        dtype, shape = DTYPES[stored.dtype], stored.shape
                        single = torch.zeros(shape, dtype=dtype, device=parameter.device)
                        state[key] = torch.zeros_like(parameter, dtype=dtype) if shape else single
                    fill(f"{key}/{name}", state[key])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"{directory}: cannot be read: {error}") from None
    if left:
        raise UsageError(f"{directory}: holds {min(left)}, which this run has no place for")


def described(tensors: dict[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Format and whole shape of each tensor."""
    return {name: (NAMES[t.dtype], list(t.shape)) for name, t in tensors.items()}
