"""Activations in the host's memory between forward and backward (--offload-activations).

Tensors that a block saves are copied to pinned memory by a separate stream, while the forward goes on.
In backward the copies of a block come back while the block after it computes. PyTorch's save_on_cpu waits
for each copy in both directions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from llm_train_bench.model.operators import taken
from llm_train_bench.model.transformer import Transformer


class Copies:
    """Copies between a device and the host; this one, of a CPU, copies at once."""

    def out(self, x: Tensor) -> Any:
        """A copy on the host."""
        return x.detach().clone()

    def back(self, host: Any) -> Any:
        """Begin the way back; `arrived` ends it."""
        return host

    def arrived(self, coming: Any) -> Tensor:
        """What `back` began, on the device."""
        return coming


class StreamCopies(Copies):
    """Of a GPU, on a stream of its own."""

    def __init__(self):
        self.stream = torch.cuda.Stream()

    def out(self, x: Tensor) -> Tensor:
        x = x.detach()
        host = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.stream)  # its memory is free when the copy has been made
        return host

    def back(self, host: Tensor) -> Any:
        with torch.cuda.stream(self.stream):
            x = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device="cuda")
            x.copy_(host, non_blocking=True)
            return x, host, self.stream.record_event()

    def arrived(self, coming: Any) -> Tensor:
        x, _, event = coming
        torch.cuda.current_stream().wait_event(event)
        x.record_stream(torch.cuda.current_stream())
        return x


class _Place(NamedTuple):
    """Where a saved tensor went: a pass through a block, its number there, and its shape."""

    kept: "_Kept"
    number: int
    shape: torch.Size


class _Kept:
    """What one pass through a block saved, and the pass before it."""

    def __init__(self, before: "_Kept | None"):
        self.before, self.hosts, self.coming = before, [], []
        self.uses: list[int] = []  # how often each has still to be unpacked
        # By a tensor's place in memory, which it must hold until the forward of the block has ended.
        self.known: dict[tuple, tuple[int, Tensor]] = {}

    def fetch(self, copies: Copies) -> None:
        """Begin to bring all back, unless that has begun."""
        if not self.coming:
            self.coming = [copies.back(host) for host in self.hosts]


class ActivationOffload:
    """Hooks on what blocks save for their backward. Backward takes the passes in reverse order."""

    def __init__(self, copies: Copies, shapes: Iterable[Sequence[int]]):
        """`shapes` are those of weights, which stay; also as copies in a low precision."""
        self.copies, self.shapes = copies, {tuple(sorted(shape)) for shape in shapes}
        self.last: _Kept | None = None

    def wrap(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A block's forward whose saved tensors go to the host."""

        def offloading(*args) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(*args)
            kept = self.last = _Kept(self.last)
            with saved_tensors_hooks(lambda x: self.pack(x, kept), self.unpack):
                y = forward(*args)
            kept.known.clear()
            return y

        return offloading

    def leaves(self, x: Tensor) -> bool:
        """Whether a saved tensor is an activation."""
        base = x if x._base is None else x._base
        weight = isinstance(base, nn.Parameter) or tuple(sorted(x.shape)) in self.shapes
        overlaps = any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
        return x.is_floating_point() and x.ndim > 1 and not weight and not overlaps

    def pack(self, x: Tensor, kept: _Kept) -> Tensor | _Place:
        """A tensor that a block saves: copied out, unless it stays anyway."""
        if not self.leaves(x):
            return x
        taken["activations"] = "offloaded"
        flat = x.view(-1) if x.is_contiguous() else x
        key = x.data_ptr(), flat.size(), flat.stride(), x._version
        if key not in kept.known:  # several operators save one, perhaps in other shapes
            kept.known[key] = len(kept.hosts), x
            kept.hosts.append(self.copies.out(flat))
            kept.uses.append(0)
        number = kept.known[key][0]
        kept.uses[number] += 1
        return _Place(kept, number, x.size())

    def unpack(self, place: Tensor | _Place) -> Tensor:
        """The tensor again; the pass before begins to come back."""
        if isinstance(place, Tensor):
            return place
        kept = place.kept
        kept.fetch(self.copies)
        if kept.before is not None:
            kept.before.fetch(self.copies)
        self.last = None  # the next forward begins a new chain
        n = place.number
        x = self.copies.arrived(
            kept.coming[n] if kept.coming[n] is not None else self.copies.back(kept.hosts[n])
        )
        kept.uses[n] -= 1
        if not kept.uses[n]:
            kept.coming[n] = None
        return x.view(place.shape) if x.is_contiguous() else x


def apply_offload(
    model: Transformer, offload: bool, device: torch.device, copies: Copies | None = None
) -> None:
    """Let all blocks keep what they save on the host, in place; after apply_compile."""
    if not offload:
        return
    copies = copies or (StreamCopies() if device.type == "cuda" else Copies())
    hooks = ActivationOffload(copies, [weight.shape for weight in model.blocks.parameters()])
    for block in model.blocks.values():
        block.forward = hooks.wrap(block.forward)
