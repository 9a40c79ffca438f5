"""Data parallelism and sharding, applied to a built model in place."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.apply.fp8.base import Fp8
from bench.apply.precision import AMP_DTYPES
from bench.parallel.ranks import collective_timeout
from bench.settings.flags import Args
from model.hf import read_pretrained
from model.init import fill
from model.transformer import Transformer


def apply_ddp(
    model: Transformer, device: torch.device, grad_acc_steps: int, args: Args
) -> DistributedDataParallel:
    """Replicate a materialised model: gradients are averaged over all ranks during backward."""
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        init_sync=False,  # every rank made the same values from the same seed
        gradient_as_bucket_view=True,
        bucket_cap_mb=args.bucket_cap_mb,
        # Without accumulation every step has the same graph; no_sync would break that promise.
        static_graph=grad_acc_steps == 1,
    )
    if args.grad_compression == "bf16":
        ddp.register_comm_hook(None, reduce_in_bf16)
    return ddp


def reduce_in_bf16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: average a bucket of gradients in bf16, which halves the traffic."""
    low = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(low, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def apply_fsdp(model: Transformer, device: torch.device, world: int, args: Args) -> None:
    """Shard a meta-device model over all ranks, block by block, in place.

    With --dp-replicate R the mesh is R x (world / R): sharded within a row, replicated across rows.
    Embeddings, final norm and head belong to the root, which stays gathered from its forward to its
    backward.
    """
    replicas = args.dp_replicate
    if replicas > 1:
        names, sizes = ("dp_replicate", "dp_shard"), (replicas, world // replicas)
    else:
        names, sizes = ("dp_shard",), (world,)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    if replicas > 1:  # groups of their own, which do not inherit it
        for name in names:
            timeout = collective_timeout(device, args.dist_timeout)
            distributed_c10d._set_pg_timeout(timeout, mesh.get_group(name))
    low = AMP_DTYPES[args.amp]
    reduce = torch.bfloat16 if args.reduce_dtype == "bf16" else torch.float32
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if args.amp == "off" else low,
            reduce_dtype=reduce,
            # Activations have the gathered embedding's dtype already, and rotary tables stay in fp32.
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=args.reshard_after_forward == "always", **options)
    fully_shard(model, reshard_after_forward=False, **options)
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        if args.prefetch:
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + args.prefetch])
            behind = blocks[max(0, i - args.prefetch) : i]
            block.set_modules_to_backward_prefetch(behind[::-1])


@torch.no_grad()
def materialize_shards(
    model: Transformer,
    device: torch.device,
    args: Args,
    weights: dict | None = None,
    fp8: Fp8 | None = None,
) -> None:
    """Give a sharded meta-device model storage and the same values as an unsharded one, in place."""
    (fp8 or Fp8()).allocate(model, torch.device("cpu") if args.cpu_offload else device)
    for parameter, rows, _ in shard_values(model, device, args.seed, weights):
        parameter.to_local().copy_(rows)


def set_exact_values(
    optimizer: torch.optim.Optimizer,
    model: Transformer,
    device: torch.device,
    args: Args,
    weights: dict | None,
    fp8: Fp8,
) -> None:
    """Give an optimizer that holds the fp32 weights of FP8 ones their first values, not the rounded."""
    for parameter, rows, full in shard_values(model, device, args.seed, weights):
        fp8.set_exact(optimizer, parameter, rows, full.abs().max())


@torch.no_grad()
def shard_values(
    model: Transformer, device: torch.device, seed: int, weights: dict | None = None
) -> Iterator[tuple[DTensor, torch.Tensor, torch.Tensor]]:
    """Each parameter of a sharded model, the first values [fp32] of the rows this rank holds, and of
    the whole.

    They are those of an unsharded model. One parameter at a time is made whole (or read, with
    `weights` from check_pretrained): the model never exists whole anywhere.
    """
    for name, parameter in model.weights():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if weights:
            read_pretrained(full, name, model.config, weights)
        else:
            fill(full, name, model.config, seed)
        yield parameter, own_rows(full, parameter), full


def own_rows(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """The rows of a whole tensor that this rank's shard holds, in FSDP's even chunks."""
    mesh = parameter.device_mesh
    shards, index = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    chunks = full.chunk(shards)
    return chunks[index] if index < len(chunks) else full[:0]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter with all its rows; for a sharded one a collective that all ranks must join."""
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    # What --fp8-all-gather gathers comes in torchao's wrapper around the plain tensor.
    return getattr(value, "_tensor", value)


def average_over_ranks(value: torch.Tensor) -> None:
    """Mean of a tensor over all ranks, in place, in stream order."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
