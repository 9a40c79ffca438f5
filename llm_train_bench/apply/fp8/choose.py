"""FP8 by the library that --fp8-backend names, or Transformer Engine's modules without it."""

import torch

from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.apply.fp8.te import apply_te
from llm_train_bench.apply.fp8.torchao import apply_torchao
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.transformer import Transformer


def apply_fp8(model: Transformer, work: Work, device: torch.device) -> Fp8:
    """Convert the blocks of a meta-device model as --use-fp8 or --linear te asks, in place.

    UsageError where the hardware or an absent library stands against it. Embeddings, norms, attention,
    head and loss stay in high precision.
    """
    if work.linear == "te":
        return apply_te(model, work, device)
    if not work.fp8:
        return Fp8()
    return {"te": apply_te, "torchao": apply_torchao}[work.fp8.backend](model, work, device)
