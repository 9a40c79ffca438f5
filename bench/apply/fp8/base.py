"""What FP8 asks of a run, whichever library does it."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.apply.optimizer import FUSED_ADAMW
from bench.results.schema import Fp8Info


@dataclasses.dataclass
class Fp8:
    """What FP8 asks of a run; as it stands here, without FP8: nothing."""

    info: Fp8Info | None = None
    # The context of the forward pass of the n-th micro batch of a step.
    forward: Callable[[int], contextlib.AbstractContextManager] = lambda micro: (
        contextlib.nullcontext()
    )
    # Names of the weights that FSDP gathers in FP8.
    gathered: Collection[str] = ()
    # What checkpoints a block's forward.
    checkpoint: Callable[..., Any] = checkpoint
    # Called on the model after each optimizer step.
    after_step: Callable[[nn.Module], None] = lambda model: None
    # Gives a sharded model storage, before its values are set.
    allocate: Callable[[nn.Module, torch.device], Any] = lambda model, device: model.to_empty(
        device=device
    )
    # Builds AdamW from parameter groups and options.
    adamw: Callable[..., torch.optim.Optimizer] = FUSED_ADAMW
    # Where the optimizer holds the weights: sets one's rows there, exactly, given the whole's amax.
    set_exact: Callable[[torch.optim.Optimizer, Any, torch.Tensor, torch.Tensor], None] | None = (
        None
    )
