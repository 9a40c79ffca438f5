"""Where the memory goes: one step's memory by kind, and the allocator's record."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity
from torch.profiler._utils import traverse_dfs

from llm_train_bench.apply.sharded import is_sharded
from llm_train_bench.measure.device import GIB, reset_peak_memory
from llm_train_bench.measure.steps import StepLog
from llm_train_bench.results.schema import Memory, Result
from llm_train_bench.settings.plan import Schedule

# The allocator's history keeps this many of its latest events; each is about 1 KiB.
HISTORY = 200_000


class MemoryReport:
    """Fills `result.memory` with the memory of the last warm-up step by kind.

    On a GPU the allocator's counters are read at the ends of its parts. A CPU has no such counters:
    there the profiler lists what the step allocates, which takes seconds and is done on request
    (--memory-snapshot). Where `looks` is false, as under CUDA graphs, nothing is measured.
    """

    def __init__(
        self,
        result: Result,
        log: StepLog,
        schedule: Schedule,
        looks: bool,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ):
        self.result, self.log = result, log
        self.model, self.optimizer = model, optimizer
        self.cuda = log.device.type == "cuda"
        self.step = schedule.warmup - 1
        # The optimizer's state must exist before, and two profilers cannot run together. A CUDA
        # graph holds its memory from its recording on: no step shows it.
        if not looks or schedule.warmup < 2:
            self.step = -1
        elif self.step in schedule.profiled:
            self.step = -1
            result.remark("no memory by kind: a profiler looked at the last warm-up step")

    def before(self, step: int) -> None:
        if step != self.step:
            return
        self.gradients = 0
        self.meter = CudaMeter(self.log.device) if self.cuda else CpuMeter()
        self.log.watchers.append(self._part)

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        if name == "optimizer":
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.gradients = n_bytes(grads, self.log.device)
        with self.meter.part(name):
            yield

    def after(self, step: int) -> None:
        if step != self.step:
            return
        self.log.watchers.remove(self._part)
        activations, rise = self.meter.read()
        parameters, states = n_bytes(self.model.parameters(), self.log.device), 0
        if self.optimizer is not None:
            tensors = (t for state in self.optimizer.state.values() for t in state.values())
            tensors = (t for t in tensors if isinstance(t, Tensor))
            states = n_bytes(tensors, self.log.device)
        # DDP's buckets hold the gradients from the first step to the last.
        buckets = self.gradients if isinstance(self.model, DistributedDataParallel) else 0
        start = parameters + states + buckets if self.meter.start is None else self.meter.start
        peak = start + rise
        together = buckets or (self.result.batch.grad_acc_steps or 1) > 1
        either = sum if together else max
        workspace = peak - parameters - states - either((activations, self.gradients))
        sizes = (parameters, self.gradients, states, activations, workspace, peak)
        gib = zip(list(Memory.model_fields)[1:], (size / GIB for size in sizes), strict=True)
        self.result.memory = Memory(step=step, **dict(gib))


def n_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of tensors on this rank's device: a shard for a sharded one, 0 for an offloaded one."""
    total = 0
    local: Any
    for local in tensors:
        with torch.no_grad():
            local = local.to_local() if is_sharded(local) else local
        # Transformer Engine's FP8 tensors hold the numbers once or, for the backward, twice.
        for data in local.get_data_tensors() if hasattr(local, "get_data_tensors") else [local]:
            if data is not None and data.device.type == device.type:
                total += data.numel() * data.element_size()
    return total


class CudaMeter:
    """Bytes that one step adds to the allocator's count of bytes in tensors."""

    def __init__(self, device: torch.device):
        self.device = device
        reset_peak_memory(device)
        self.start = torch.cuda.memory_allocated(device)
        self.activations = None

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the step; the first forward pass is the one that counts."""
        before = torch.cuda.memory_allocated(self.device)
        yield
        if name == "forward" and self.activations is None:
            self.activations = torch.cuda.memory_allocated(self.device) - before

    def read(self) -> tuple[int, int]:
        """Bytes that the forward pass left behind, and the highest count above the start."""
        return self.activations or 0, torch.cuda.max_memory_allocated(self.device) - self.start


class CpuMeter:
    """The same on a CPU, from the profiler's list of allocations."""

    start = None  # bytes from before the step are not on the list

    def __init__(self):
        self.profiler = build_profiler(torch.device("cpu"), profile_memory=True)
        self.profiler.start()

    @staticmethod
    def part(name: str) -> contextlib.AbstractContextManager:
        """A part of the step, as a range on the list."""
        return torch.profiler.record_function(f"part:{name}")

    def read(self) -> tuple[int, int]:
        self.profiler.stop()
        profiler: Any = self.profiler.profiler
        tree = profiler.kineto_results.experimental_event_tree()
        events = sorted(traverse_dfs(tree), key=lambda event: event.start_time_ns)
        live = highest = 0
        forward_end, before, activations = None, 0, None
        for event in events:
            if forward_end and activations is None and event.start_time_ns >= forward_end:
                activations = live - before
            if event.name == "[memory]":
                live += event.extra_fields.alloc_size
                highest = max(highest, live)
            elif event.name == "part:forward" and forward_end is None:
                forward_end, before = event.end_time_ns, live
        return live - before if activations is None else activations, highest


def build_profiler(device: torch.device, **options: Any) -> torch.profiler.profile:
    """PyTorch's profiler of host and device; without `acc_events` PyTorch warns."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or Kineto writes messages to the screen
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, acc_events=True, **options)


class AllocatorRecord:
    """The CUDA allocator's record in a pickle for PyTorch's memory viewer (pytorch.org/memory_viz).

    With `history` it lists every allocation with its stack, from now until `stop`. When memory
    runs out, it always lists what is allocated then (and the history, while it is kept).
    """

    def __init__(self, path: Path, history: bool):
        self.path, self.history = path, history
        if history:
            # Symbols of C++ frames would be looked up for half a minute.
            torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")
        self.looking = True  # an observer cannot be taken off
        bindings: Any = torch._C
        bindings._cuda_attach_out_of_memory_observer(self._on_out_of_memory)

    def _on_out_of_memory(self, device, size, allocated, freed) -> None:
        with contextlib.suppress(Exception):  # what is being reported matters more
            if self.looking:
                self._dump()

    def _dump(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)  # not every node shares rank 0's disk
        torch.cuda.memory._dump_snapshot(str(self.path))

    def close(self) -> None:
        """The run has ended: what runs out of memory later is not its concern."""
        self.looking = False
        if self.history:
            torch.cuda.memory._record_memory_history(enabled=None)

    def stop(self) -> None:
        """Write the history and end it."""
        if self.history:
            self.history = False
            self._dump()
            torch.cuda.memory._record_memory_history(enabled=None)
