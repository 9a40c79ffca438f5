"""FP8 by the library that --fp8-backend names, or Transformer Engine's modules without it."""

from typing import cast

import torch

from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.apply.fp8.te import apply_te
from llm_train_bench.apply.fp8.torchao import apply_torchao
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.transformer import Transformer


def apply_fp8(model: HasWeights, work: Work, device: torch.device) -> Fp8:
    """Convert the blocks of a meta-device model, or of a pipeline's stages, in place.

    --use-fp8 or --linear te asks for it. UsageError where the hardware or an absent library stands
    against it. Embeddings, norms, attention, head and loss stay in high precision.
    """
    if work.linear == "te" or work.fp8.backend == "te":
        return apply_te(cast(Transformer, model), work, device)
    return apply_torchao(model, work, device) if work.fp8 else Fp8()
