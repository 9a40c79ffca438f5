"""FP8 in a run, for any library: its hooks, and the choice of the library."""

import contextlib
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llm_train_bench.formulas.work import Work
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.results.schema import Fp8Info


class Fp8:
    """A run without FP8; the libraries' classes override what they do otherwise."""

    def __init__(self, info: Fp8Info | None = None):
        self.info = info

    def forward(self, micro: int) -> contextlib.AbstractContextManager:
        """The context of the forward pass of a step's n-th micro batch."""
        return contextlib.nullcontext()

    def checkpoint(self, forward, *args, **options) -> Tensor:
        """Run a block's forward and recompute it in backward."""
        return checkpoint(forward, *args, **options)

    def after_step(self, model: nn.Module) -> None:
        """Work that is due after each optimizer step."""


def apply_fp8(model: HasWeights, work: Work, device: torch.device) -> Fp8:
    """Convert the blocks of a meta-device model, or of a pipeline's stages, in place.

    --use-fp8 or --linear te asks for it. UsageError where the hardware or an absent library stands
    against it. Embeddings, norms, attention, head and loss stay in high precision.
    """
    from llm_train_bench.apply.fp8.te import apply_te
    from llm_train_bench.apply.fp8.torchao import apply_torchao

    if work.linear == "te" or work.fp8_backend == "te":
        return apply_te(cast(Transformer, model), work, device)
    return apply_torchao(model, work, device) if work.fp8 else Fp8()
