"""Sharding by FSDP2 (fully_shard), replicated too under HSDP."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard as Placement
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from llm_train_bench.apply.precision import AMP_DTYPES
from llm_train_bench.apply.sharded import is_sharded, sharded_modules
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.model.weights import sharded_dimension


def apply_fsdp(model: Transformer, meshes: dict[str, DeviceMesh], work: Work) -> None:
    """Shard a meta-device model over the meshes' last dimension, block by block, in place.

    Of two dimensions the first holds replicas (HSDP). Embeddings, final norm and head belong to the
    root, which stays gathered from its forward to its backward. The mesh is `dense`; experts are apart
    where theirs is another one. A router that computes in fp32 is gathered apart in fp32.
    """
    options, parallel = work.fsdp, work.parallelism
    assert options is not None
    fixed = {parameter for weight, parameter in model.weights() if not weight.learns}
    policy = MixedPrecisionPolicy(
        param_dtype=None if work.amp == "off" else AMP_DTYPES[work.amp],
        reduce_dtype=torch.bfloat16 if options.reduce_dtype == "bf16" else torch.float32,
        # Activations have the gathered embedding's dtype already, and rotary tables stay in fp32.
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    common: dict[str, Any] = dict(ignored_params=fixed, mp_policy=policy, offload_policy=offload)
    common["reshard_after_forward"] = options.reshard

    def shard(module: nn.Module, mesh: DeviceMesh, **changed: Any) -> FSDPModule:
        def placement(parameter: nn.Parameter) -> Placement:
            return Placement(sharded_dimension(parameter.shape, mesh.shape[-1]))

        return fully_shard(module, mesh=mesh, shard_placement_fn=placement, **common | changed)

    exact = dataclasses.replace(policy, param_dtype=None)
    units = []
    for layer, block in cast(dict[str, Any], model.blocks).items():
        apart = []
        experts = work.config.experts_of(int(layer))
        if experts is not None and parallel.tp * parallel.ep > 1:
            apart.append(shard(block.mlp.experts, mesh=meshes["experts"]))
        if experts is not None and experts.exact_router:
            apart.append(shard(block.mlp.router, mesh=meshes["dense"], mp_policy=exact))
        for unit in apart:
            _hide_from_policy(cast(nn.Module, unit))
        units.append([shard(block, mesh=meshes["dense"]), *apart])
    shard(model, mesh=meshes["dense"], reshard_after_forward=False)
    for earlier, later in itertools.pairwise(units):
        earlier[0].set_modules_to_forward_prefetch(later)
        later[0].set_modules_to_backward_prefetch(earlier)
    if parallel.divided:  # gradients are summed: each rank's loss is divided by all ranks
        for module in sharded_modules(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _hide_from_policy(unit: nn.Module) -> None:
    """Run FSDP's hooks of a unit inside a block without the mode of selective checkpointing.

    Forward gathers there, but a recomputation need not, and from torch 2.13 on (2.11 does not) the mode
    insists on the same operators. PyTorch has no public way to leave a mode.
    """

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args, **kwargs):
            modes = _CachingTorchDispatchMode, _CachedTorchDispatchMode
            inside = isinstance(_get_current_dispatch_mode(), modes)
            with _pop_mode_temporarily() if inside else contextlib.nullcontext():
                return hook(*args, **kwargs)

        return called

    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = hidden(hook)


def no_sync(model: nn.Module, work: Work) -> Callable[[], contextlib.AbstractContextManager]:
    """The context of micro batches before a step's last: --reduce-last leaves gradients whole in it."""

    @contextlib.contextmanager
    def unreduced() -> Iterator[None]:
        cast(FSDPModule, model).set_requires_gradient_sync(False)
        yield
        cast(FSDPModule, model).set_requires_gradient_sync(True)

    return unreduced if work.fsdp and work.fsdp.reduce_last else contextlib.nullcontext


def unshard(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter with all its rows; for a sharded one a collective that all ranks must join."""
    value = parameter.full_tensor() if is_sharded(parameter) else parameter
    # --fp8-all-gather returns torchao's wrapper around the plain tensor.
    return getattr(value, "_tensor", value)
