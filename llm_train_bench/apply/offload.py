"""Activations in the host's memory between forward and backward (--offload-activations).

Tensors that a block saves are copied to pinned memory by a separate stream, while the forward goes on.
In backward the copies of a block come back while the block after it computes. PyTorch's save_on_cpu waits
for each copy in both directions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from llm_train_bench.model.operators import note_path
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


class _Pass:
    """What one pass through a block saves: on the host, and on the device while backward uses it."""

    def __init__(self, offload: "ActivationOffload"):
        self.offload, self.before, self.copies = offload, offload.last, offload.copies
        self.hosts: list[Any] = []
        self.uses: list[int] = []  # how often each has still to be unpacked
        self.coming: dict[int, Any] | None = None
        # By a tensor's place in memory, which it must hold until the forward of the block has ended.
        self.known: dict[tuple, tuple[int, Tensor]] = {}

    def pack(self, x: Tensor) -> Tensor | tuple[int, torch.Size]:
        """The number and the shape of a saved tensor, which is copied out; itself if it stays anyway."""
        if not self.offload.leaves(x):
            return x
        note_path("activations", "offloaded")
        flat = x.view(-1) if x.is_contiguous() else x
        key = x.data_ptr(), flat.size(), flat.stride(), x._version
        if key not in self.known:  # several operators save one, perhaps in other shapes
            self.known[key] = len(self.hosts), x
            self.hosts.append(self.copies.out(flat))
            self.uses.append(0)
        number = self.known[key][0]
        self.uses[number] += 1
        return number, x.size()

    def fetch(self) -> dict[int, Any]:
        """Begin to bring all back, unless that has begun; what is on its way, by number."""
        if self.coming is None:
            self.coming = dict(enumerate(map(self.copies.back, self.hosts)))
        return self.coming

    def unpack(self, place: Tensor | tuple[int, torch.Size]) -> Tensor:
        """The tensor again; the pass before begins to come back."""
        if isinstance(place, Tensor):
            return place
        number, shape = place
        coming = self.fetch()
        if self.before is not None:
            self.before.fetch()
        self.offload.last = None  # the next forward begins a new chain
        if number not in coming:  # a backward may ask again for what it has had
            coming[number] = self.copies.back(self.hosts[number])
        x = self.copies.arrived(coming[number])
        self.uses[number] -= 1
        if self.uses[number] <= 0:
            del coming[number]
        return x.view(shape) if x.is_contiguous() else x


class ActivationOffload:
    """Hooks on what blocks save for their backward. Backward takes the passes in reverse order."""

    def __init__(self, copies: Copies, model: Transformer):
        self.copies = copies
        self.last: _Pass | None = None
        # Weights stay; also as copies in a low precision.
        self.shapes = {tuple(sorted(weight.shape)) for weight in model.blocks.parameters()}

    def wrap(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A block's forward whose saved tensors go to the host."""

        def offloading(*args) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(*args)
            now = self.last = _Pass(self)
            with saved_tensors_hooks(now.pack, now.unpack):
                y = forward(*args)
            now.known.clear()
            return y

        return offloading

    def leaves(self, x: Tensor) -> bool:
        """Whether a saved tensor is an activation."""
        base = x if x._base is None else x._base
        weight = isinstance(base, nn.Parameter) or tuple(sorted(x.shape)) in self.shapes
        overlaps = any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
        return x.is_floating_point() and x.ndim > 1 and not weight and not overlaps


def apply_offload(
    model: Transformer, offload: bool, device: torch.device, copies: Copies | None = None
) -> None:
    """Let all blocks keep what they save on the host, in place; after apply_compile."""
    if not offload:
        return
    copies = copies or (StreamCopies() if device.type == "cuda" else Copies())
    hooks = ActivationOffload(copies, model)
    for block in model.blocks.values():
        block.forward = hooks.wrap(block.forward)
