"""Data parallelism by replicas: DistributedDataParallel, and an optimizer shared out by ZeRO-1."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from llm_train_bench.apply.optimizer import build_optimizer, optimizer_of
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.layout import Layout
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.settings.flags import OptimizerFlags


class ReplicaLayout(Layout):
    """Every rank has the whole model, and tokens that no other rank has."""

    stage: dist.ProcessGroup | None = None  # the ranks with the same layers; None for all

    def sum_over_data(self, numbers: Tensor) -> Tensor:
        numbers = numbers.clone()
        dist.all_reduce(numbers, group=self.stage)
        return numbers


class Zero1(torch.optim.Optimizer):
    """An optimizer whose state is divided among replicas (ZeRO stage 1; Rajbhandari et al. 2020).

    Each rank updates its rows of every parameter by `inner`; then all gather them. `state` is keyed by
    the model's own parameters, as checkpoints need it.
    """

    def __init__(self, model: Transformer, flags: OptimizerFlags, device: torch.device):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard as Placement
        from torch.distributed.tensor import distribute_tensor

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.shares: dict[Tensor, Any] = {}  # by the parameters whose rows they have
        named = {}
        learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in learnt.items():
            rows = distribute_tensor(parameter.detach(), mesh, [Placement(0)], src_data_rank=None)
            named[name] = self.shares[parameter] = nn.Parameter(rows)
        self.inner = optimizer_of(named, flags)
        self.param_groups = self.inner.param_groups
        states = {parameter: self.inner.state[share] for parameter, share in self.shares.items()}
        self.state = defaultdict(dict, states)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update this rank's rows, and gather all others."""
        rank, world = dist.get_rank(), dist.get_world_size()
        for parameter, share in self.shares.items():
            size = -(-len(parameter) // world)
            rows = slice(rank * size, (rank + 1) * size)
            share.to_local().copy_(parameter[rows])  # a checkpoint may have changed the parameter
            layout = {"shape": share.shape, "stride": share.stride(), "run_check": False}
            grad: Any = parameter.grad
            share.grad = type(share.data).from_local(
                grad[rows], share.device_mesh, share.placements, **layout
            )
        self.inner.step()
        for parameter, share in self.shares.items():
            share.grad = None
            parameter.copy_(share.full_tensor())


def replica_optimizer(
    model: Transformer, flags: OptimizerFlags | None, work: Work, device: torch.device
) -> torch.optim.Optimizer | None:
    """A replica's optimizer: whole, or with --zero1 a share of it."""
    if work.ddp and work.ddp.zero1 and flags is not None:
        return Zero1(model, flags, device)
    return build_optimizer(model, flags)


def apply_ddp(model: Transformer, work: Work, device: torch.device) -> DistributedDataParallel:
    """Replicate a materialised model: gradients are averaged over all ranks during backward."""
    options = work.ddp
    assert options is not None
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        init_sync=False,  # every rank made the same values from the same seed
        gradient_as_bucket_view=True,
        bucket_cap_mb=options.bucket_cap_mb,
        # Without accumulation every step has the same graph; no_sync would break that promise.
        static_graph=work.batch.grad_acc_steps == 1,
    )
    if options.reduce_dtype == "bf16" and next(model.parameters()).dtype == torch.float32:
        # Under its own name DDP refuses this hook on a CPU.
        ddp.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return ddp
