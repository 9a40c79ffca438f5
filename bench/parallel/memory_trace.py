"""Peak memory of a training step without running it: our own model under fake tensors.

The scripts' own model is built with their own `apply_*` functions, for a fake process group of any
size. Torch's memory trackers (MemTracker, FSDPMemTracker) follow one forward and backward. This
takes seconds on a CPU, whatever the model's size. It leaves out compilation, Transformer Engine,
the allocator's rounding, and memory outside PyTorch (CUDA context, communication buffers).
"""

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.apply.optimizer import build_optimizer
from bench.apply.precision import autocast
from bench.apply.recompute import apply_recompute
from bench.errors import UsageError
from bench.formulas.work import Work
from bench.parallel.fsdp import apply_fsdp
from bench.parallel.layout import RankLayout
from bench.settings.flags import OptimizerFlags
from model.layout import ALONE
from model.transformer import Transformer

CPU = torch.device("cpu")


def traced_memory(work: Work, optimizer: OptimizerFlags | None) -> int:
    """Bytes on one rank at the peak of forward and backward, optimizer state included."""
    if work.compiled or work.fp8:
        raise UsageError(
            "--trace follows eager 16- and 32-bit steps; leave out --pt-compile, --use-fp8"
        )
    with _fake_ranks(work.world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            layout = RankLayout(work.fsdp, 0) if work.fsdp else ALONE
            model = Transformer(work.config, work.batch.seq_len, layout=layout)
        apply_recompute(model, work.recompute)
        if work.fsdp:
            apply_fsdp(model, layout.connect(CPU, 60.0), work)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            mock.patch.object(F, "rms_norm", _as_on_gpu),
        ):
            return _track(model, work, optimizer)


def _track(model: Transformer, work: Work, flags: OptimizerFlags | None) -> int:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    model.to_empty(device=CPU)
    optimizer, fsdp, train = build_optimizer(model, flags), work.fsdp is not None, work.trains
    shape = (work.batch.micro_batch, model.seq_len)
    inputs, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    if fsdp:
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((inputs, labels))
    else:
        tracker = MemTracker()
        tracker.track_external(model, *([optimizer] if optimizer else []), inputs, labels)
    for step in range(2):  # the first makes the optimizer's state
        # The optimizer stays outside: sharded, it computes with fake tensors of the whole size.
        with tracker:
            for _ in range(work.batch.grad_acc_steps if step else 1):
                with autocast("off" if fsdp else work.amp, CPU), torch.set_grad_enabled(train):
                    loss = model(inputs, labels)
                if train:
                    loss.backward()
                tracker.reset_mod_stats()
        if optimizer:
            optimizer.step()
        model.zero_grad()
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    total = next(n for kind, n in kinds.items() if getattr(kind, "value", kind).lower() == "total")
    if optimizer and not fsdp and work.optimizer == "adamw":
        # This tracker misses state that is made between its two passes (SGD's is older).
        states = (t for state in optimizer.state.values() for t in state.values())
        total += sum(t.numel() * t.element_size() for t in states)
    return total


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what the GPU's kernel does; a CPU's RMS norm is many operators that keep fp32 copies."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _as_on_gpu(x, shape, weight, eps):
    return _FusedRmsNorm.apply(x, weight)


@contextlib.contextmanager
def _fake_ranks(world: int) -> Iterator[None]:
    """A process group of `world` ranks: only rank 0 exists, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
