"""Which of several equal kernels the model's own parts use."""

from collections.abc import Iterable
from typing import Any, cast

from llm_train_bench.apply.compile import key_compiled_code
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.onednn import use_onednn
from llm_train_bench.model.transformer import Transformer


def apply_kernels(model: Transformer, work: Work, linear: str) -> None:
    """Let a model use the kernels and sizes asked for and the chosen library; after apply_fp8."""
    key_compiled_code(work.fp8.emulated, linear)
    model.loss.chunk_elements = work.chunk_elements
    for block in cast("Iterable[Any]", model.blocks.children()):
        if block.attn is not None:
            block.attn.blocks = work.attention == "blocks"
    if linear == "onednn":
        use_onednn(model)
