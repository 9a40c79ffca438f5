"""Data parallelism by DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.formulas.work import Ddp
from model.layout import Layout
from model.transformer import Transformer


class ReplicaLayout(Layout):
    """Every rank has the whole model, and other tokens than the rest."""

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers.clone()
        dist.all_reduce(numbers)
        return numbers


def apply_ddp(
    model: Transformer, device: torch.device, grad_acc_steps: int, options: Ddp
) -> DistributedDataParallel:
    """Replicate a materialised model: gradients are averaged over all ranks during backward."""
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        init_sync=False,  # every rank made the same values from the same seed
        gradient_as_bucket_view=True,
        bucket_cap_mb=options.bucket_cap_mb,
        # Without accumulation every step has the same graph; no_sync would break that promise.
        static_graph=grad_acc_steps == 1,
    )
    if options.grad_compression == "bf16":
        ddp.register_comm_hook(None, reduce_in_bf16)
    return ddp


def reduce_in_bf16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: average a bucket of gradients in bf16, which halves the traffic."""
    low = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(low, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))
