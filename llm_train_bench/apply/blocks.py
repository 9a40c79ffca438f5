"""What is applied to a model's linear layers and blocks, in which order; FSDP or DDP come after both."""

from typing import cast

import torch

from llm_train_bench.apply.compile import apply_compile, key_compiled_code
from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.apply.offload import apply_offload
from llm_train_bench.apply.recompute import apply_recompute
from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.lora import apply_lora
from llm_train_bench.model.onednn import OnednnLinear, available
from llm_train_bench.model.products import replace_linear
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.model.weights import Weight


def apply_linear_layers(model: HasWeights, work: Work, device: torch.device) -> Fp8:
    """Give linear layers of a meta-device model, or of stages, their library and format, in place.

    A layer has FP8 or Transformer Engine, an adapter, oneDNN, or none of them. Then the weights get their
    format. UsageError where the hardware or an absent library stands against it.
    """
    from llm_train_bench.apply.fp8.te import apply_te
    from llm_train_bench.apply.fp8.torchao import apply_torchao

    fp8 = Fp8()
    if work.linear == "te" or work.fp8_backend == "te":
        fp8 = apply_te(cast(Transformer, model), work, device)
    elif work.fp8:
        fp8 = apply_torchao(model, work, device)
    if work.linear == "onednn" and not available():
        raise UsageError("linear layers by oneDNN: this PyTorch has none; use --linear plain")
    for part in getattr(model, "stages", [model]):
        if work.lora:
            apply_lora(part, work.lora)
        for weight, parameter in list(part.weights()):
            if work.linear == "onednn" and is_plain_linear(weight, work):
                replace_linear(part, weight.path, OnednnLinear)
            if work.bf16_weights and weight.learns:  # a correction's steps are below bf16's
                parameter.data = parameter.data.to(torch.bfloat16)
    return fp8


def is_plain_linear(weight: Weight, work: Work) -> bool:
    """Whether it is the weight of a linear layer in a block that has nothing else."""
    linear = weight.is_matrix and not weight.of_experts and not weight.stays_exact
    adapted = {adapter.frozen.path for adapter in work.lora.adapters} if work.lora else set[str]()
    fp8 = work.fp8.layers if work.fp8 else ()
    return linear and weight.path not in adapted and weight.module not in fp8


def apply_blocks(model: Transformer, work: Work, fp8: Fp8, device: torch.device) -> None:
    """Let blocks recompute, compile them, then keep what they save on the host: each wraps the last."""
    key_compiled_code(work)
    apply_recompute(model, work.recompute, fp8, work.compiled)
    apply_compile(model, work.compile_mode, work.exact_casts)
    apply_offload(model, work.offload, device)
