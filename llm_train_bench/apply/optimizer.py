"""Optimizer, learning-rate schedule, gradient clipping and the step that joins them."""

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llm_train_bench.apply.muon import Muon
from llm_train_bench.apply.precision import LossScaler
from llm_train_bench.apply.sharded import is_sharded, parameter_groups
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.settings.flags import OptimizerFlags


def build_optimizer(model: nn.Module, flags: OptimizerFlags | None) -> torch.optim.Optimizer | None:
    """AdamW or SGD, fused, or Muon, with weight decay on matrices; None if the run takes no step."""
    if flags and flags.optimizer == "muon":
        return Muon(cast(HasWeights, model), flags)
    return flags and optimizer_of(dict(model.named_parameters()), flags)


def optimizer_of(named: dict[str, nn.Parameter], flags: OptimizerFlags) -> torch.optim.Optimizer:
    """The optimizer of those named parameters that require a gradient."""
    learnt = {name: p for name, p in named.items() if p.requires_grad}
    groups = parameter_groups(learnt, flags.weight_decay)
    if flags.optimizer == "sgd":
        # PyTorch's fused SGD does not take sharded parameters.
        sharded = is_sharded(next(iter(learnt.values())))
        optimizer = torch.optim.SGD(groups, lr=flags.lr, momentum=0.9, fused=not sharded)
        for p in [] if sharded else learnt.values():
            # If fp16 overflows in the first step, the fused kernel leaves this buffer unfilled.
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer
    return torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, flags: OptimizerFlags, n_steps: int) -> float:
    """Rate of step 0, 1, ...: linear rise, then a cosine down to the minimum at the last of `n_steps`."""
    if step < flags.lr_warmup_steps:
        return flags.lr * (step + 1) / (flags.lr_warmup_steps + 1)
    progress = (step - flags.lr_warmup_steps) / max(1, n_steps - 1 - flags.lr_warmup_steps)
    lowest = flags.lr * flags.min_lr_ratio
    return lowest + 0.5 * (flags.lr - lowest) * (1 + math.cos(math.pi * min(1.0, progress)))


def local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients that the parameters have."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if is_sharded(grad) else grad for grad in grads]


def gradient_norm(parameters: list[nn.Parameter], weights: Tensor | None = None) -> Tensor:
    """The norm of all gradients over all ranks, in fp32, also of gradients in bf16.

    `weights` are 1 over the number of ranks with the same shard of each. Without them, those that FSDP
    divided are of one mesh. PyTorch's function makes a chain of kernels for each sharded gradient.
    """
    grads = local_gradients(parameters)
    if not grads:
        return torch.zeros(())
    norms, group = torch.stack(torch.ops.aten._foreach_norm(grads, 2, torch.float32)), None
    if weights is not None:
        square = (norms.square() * weights).sum()
    else:
        norm, first = torch.linalg.vector_norm(norms), parameters[0]
        if not is_sharded(first):
            return norm
        # Of two dimensions the first holds replicas, whose gradients are the same. With --cpu-offload the
        # sum stays on the CPU: the fused optimizer would not wait for a factor from the GPU.
        square, group = norm.square(), first.device_mesh.get_group(first.device_mesh.ndim - 1)
    dist.all_reduce(square, group=group)
    return square.sqrt()


def optimizer_step(
    parameters: list[nn.Parameter],
    optimizer: Any,  # an Optimizer, whose type declares no `grad_scale`
    lr: float,
    max_norm: float,
    scaler: LossScaler | None,
    gradients: Any = None,
) -> Tensor:
    """Clip gradients to `max_norm` (0: leave them) and step; returns their norm, without a sync.

    `gradients` (parallel/layout.py, or None) sums over tp what FSDP did not, and has the norm.

    With a scaler the gradients come multiplied by its scale; the norm returned is without it, and
    not finite where fp16 overflowed.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    norm = gradient_norm(parameters) if gradients is None else gradients.complete_and_norm()
    scale = 1.0 if scaler is None else scaler.scale.clone()
    if scaler is not None:
        scaler.before_step(optimizer, norm)
    if max_norm and scaler is None and optimizer.__class__ is torch.optim.AdamW:
        # Its fused kernel divides the gradients as it reads them: no separate pass.
        optimizer.grad_scale = (norm / max_norm).clamp(min=1.0)
        optimizer.step()
        del optimizer.grad_scale
        return norm
    if max_norm:
        # PyTorch's function for this takes no gradients on several meshes.
        factor = (max_norm / (norm / scale + 1e-6)).clamp(max=1.0)
        torch.ops.aten._foreach_mul_(local_gradients(parameters), factor)
    optimizer.step()
    return norm if scaler is None else norm / scale
