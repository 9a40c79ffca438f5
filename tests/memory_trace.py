"""Peak memory of a training step without running it: our own model under fake tensors.

The scripts' own model is built with their own `apply_*` functions, for a fake process group of any
size. Torch's memory trackers (MemTracker, FSDPMemTracker) follow one forward and backward. This
takes seconds on a CPU, whatever the model's size. It leaves out compilation, Transformer Engine,
the copy of the head's weight with aligned rows on a GPU, the allocator's rounding, and memory outside
PyTorch (CUDA context, communication buffers).
"""

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from llm_train_bench.apply.blocks import apply_linear_layers
from llm_train_bench.apply.offload import Copies, apply_offload
from llm_train_bench.apply.optimizer import build_optimizer
from llm_train_bench.apply.precision import autocast
from llm_train_bench.apply.recompute import apply_recompute
from llm_train_bench.formulas.collectives import tokens_sent
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.parallel.fsdp import apply_fsdp
from llm_train_bench.parallel.layout import RankLayout
from llm_train_bench.parallel.pipeline import boundary, reduce_in_last
from llm_train_bench.settings.flags import OptimizerFlags

CPU = torch.device("cpu")


class _EvenLayout(RankLayout):
    """Experts get equal numbers of rows, which fake tensors cannot tell."""

    def __init__(self, work: Work, rank: int):
        super().__init__(work.parallelism, rank)
        self.work = work

    def rows_to_send(self, numbers: Tensor) -> tuple[list[int], list[int], int]:
        n, tokens = self.ep, self.work.own_tokens
        rows = [round(tokens * tokens_sent(self.work) / n)] * n
        return rows, rows, self.work.expert_rows


def traced_memory(work: Work, optimizer: OptimizerFlags | None, pp_rank: int = 0) -> int:
    """Peak bytes of a rank, optimizer state included; in a pipeline of group `pp_rank`."""
    assert not work.compiled and not work.fp8 and work.parallelism.virtual == 1
    rank = pp_rank * work.parallelism.ranks
    with _fake_ranks(work.world, rank), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            even, layers = _EvenLayout(work, rank), work.stage_layers(pp_rank)
            attention = work.attention._replace(masked="pieces")
            options = work.model_options._replace(attention=attention, balanced=True)
            model = Transformer(work.config, work.batch.seq_len, options, even, layers)
        apply_linear_layers(model, work, CPU)
        apply_recompute(model, work.recompute)
        apply_offload(model, work.offload, CPU, _Elsewhere())
        if work.fsdp:
            apply_fsdp(model, even.connect(CPU, 60.0), work)
        norm = lambda x, shape, weight, eps: _FusedRmsNorm.apply(x, weight)  # noqa: E731
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            mock.patch.object(F, "rms_norm", norm),
            mock.patch.object(Transformer, "rows_of", lambda model, ids: model.embed(ids)),
            mock.patch.object(F, "scaled_dot_product_attention", _attention),
            mock.patch.multiple(torch.Tensor, **_HOOKS),
        ):
            return _track(model, work, optimizer)


def _track(model: Transformer, work: Work, flags: OptimizerFlags | None) -> int:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    model.to_empty(device=CPU)
    optimizer, fsdp, train = build_optimizer(model, flags), bool(work.fsdp), work.trains
    batch, layout = work.batch, model.layout
    shape = (batch.micro_batch, model.seq_len)
    inputs, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    if not model.first:
        inputs = boundary(work, CPU).requires_grad_()
    if fsdp:
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((inputs, labels))
    else:
        tracker = MemTracker()
        tracker.track_external(model, *([optimizer] if optimizer else []), inputs, labels)
    for step in range(2):  # the first makes the optimizer's state
        # The optimizer stays outside: sharded, it computes with fake tensors of the whole size.
        with tracker:
            if layout.pp > 1:
                _pipelined(model, work, inputs, labels, tracker.reset_mod_stats)
            n_micro = batch.grad_acc_steps if step else 1
            for micro in range(n_micro if layout.pp == 1 else 0):
                if work.fsdp and work.fsdp.reduce_last:
                    cast(FSDPModule, model).set_requires_gradient_sync(micro == n_micro - 1)
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


def _pipelined(
    model: Transformer, work: Work, inputs: Tensor, labels: Tensor, begin: Callable[[], None]
) -> None:
    """The passes of one stage in the order of 1F1B; `begin` is called before each forward."""
    n_micro, outputs = work.batch.grad_acc_steps, []

    def forward() -> None:
        begin()
        with torch.set_grad_enabled(work.trains):
            x = inputs if model.first else inputs.detach().clone().requires_grad_()
            outputs.append(model(x, labels))

    ahead = min(n_micro, model.layout.pp - model.layout.pp_rank)
    for _ in range(ahead):
        forward()
    for done in range(n_micro if work.trains else 0):
        reduce_in_last(model, done == n_micro - 1)
        output = outputs.pop(0)
        output.backward(torch.zeros_like(output))
        del output
        if done + ahead < n_micro:
            forward()


class _Elsewhere(Copies):
    """Copies on a host whose memory is not traced."""

    def out(self, x: Tensor) -> Any:
        return x.size(), x.stride(), x.dtype

    def back(self, host: Any) -> Tensor:
        return torch.empty_strided(*host[:2], dtype=host[2])


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what the GPU's kernel does; a CPU's RMS norm is many operators that keep fp32 copies."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, *grads):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


class _FusedAttention(torch.autograd.Function):
    """The same: a CPU would keep all scores where heads have other sizes in values than in keys."""

    @staticmethod
    def forward(ctx, q, k, v):
        B, H, T, _ = q.shape
        y = q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, q.new_empty(B, H, T, dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _attention(q, k, v, **options):
    return _FusedAttention.apply(q, k, v)


def _hook_of_learnt(tensor: Tensor, register: Callable[..., Any], hook: Any) -> RemovableHandle:
    """Register a hook of the gradient where there will be one; the tracker hooks frozen weights too."""
    if tensor.requires_grad:
        return register(tensor, hook)
    return RemovableHandle(collections.OrderedDict())


_HOOKS: dict[str, Any] = {
    name: functools.partialmethod(_hook_of_learnt, getattr(torch.Tensor, name))
    for name in ("register_hook", "register_post_accumulate_grad_hook")
}


@contextlib.contextmanager
def _fake_ranks(world: int, rank: int) -> Iterator[None]:
    """A process group of `world` ranks: only one exists, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
