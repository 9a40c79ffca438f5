"""Optimizer, learning-rate schedule and gradient clipping."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.args import Args


def build_optimizer(model: nn.Module, args: Args) -> torch.optim.Optimizer:
    """AdamW or SGD, fused, with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=0.9, fused=True)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), fused=True)


def learning_rate(step: int, args: Args) -> float:
    """Rate of step 0, 1, ...: linear rise, then a cosine down to the minimum at the last step."""
    total = args.warmup_steps + args.n_steps
    if step < args.lr_warmup_steps:
        return args.lr * (step + 1) / (args.lr_warmup_steps + 1)
    progress = (step - args.lr_warmup_steps) / max(1, total - 1 - args.lr_warmup_steps)
    lowest = args.lr * args.min_lr_ratio
    return lowest + 0.5 * (args.lr - lowest) * (1 + math.cos(math.pi * min(1.0, progress)))


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients to at most `max_norm` (0: leave them); returns their norm, without a sync."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
