"""FP8 in a run, for any library: its hooks."""

import contextlib

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Fp8:
    """A run without FP8; the libraries' classes override what they do otherwise."""

    version: str | None = None
    """That of the library that runs layers in FP8."""

    def forward(self, micro: int) -> contextlib.AbstractContextManager:
        """The context of the forward pass of a step's n-th micro batch."""
        return contextlib.nullcontext()

    def checkpoint(self, forward, *args, **options) -> Tensor:
        """Run a block's forward and recompute it in backward."""
        return checkpoint(forward, *args, **options)

    def after_step(self, model: nn.Module) -> None:
        """Work that is due after each optimizer step."""
