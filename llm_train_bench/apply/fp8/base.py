"""The hooks of FP8 in a run, for any library."""

import contextlib

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llm_train_bench.results.schema import Fp8Info


class Fp8:
    """A run without FP8; the libraries' classes override what they do otherwise."""

    info: Fp8Info | None = None
    # Whether the optimizer holds the weights' exact values, of which the model has FP8 copies.
    exact_in_optimizer = False

    def forward(self, micro: int) -> contextlib.AbstractContextManager:
        """The context of the forward pass of a step's n-th micro batch."""
        return contextlib.nullcontext()

    def checkpoint(self, forward, *args, **options) -> Tensor:
        """Run a block's forward and recompute it in backward."""
        return checkpoint(forward, *args, **options)

    def after_step(self, model: nn.Module) -> None:
        """Work that is due after each optimizer step."""

    def allocate(self, model: nn.Module, device: torch.device) -> None:
        """Give a sharded meta-device model storage, before its values are set."""
        model.to_empty(device=device)

    def adamw(self, groups: list[dict], **options) -> torch.optim.Optimizer:
        """AdamW from parameter groups and options."""
        return torch.optim.AdamW(groups, fused=True, **options)

    def set_exact(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, rows: Tensor, amax: Tensor
    ) -> None:
        """Set a parameter's exact rows in the optimizer, given the largest magnitude of the whole."""
