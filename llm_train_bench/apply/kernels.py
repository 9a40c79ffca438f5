"""Which of several equal kernels the model's own parts use."""

from llm_train_bench.formulas.work import Work
from llm_train_bench.model.transformer import Transformer, fuse_backward


def apply_kernels(model: Transformer, work: Work) -> None:
    """Let a model use the kernels that the flags ask for, in place; after FP8 has its layers."""
    if work.fused_backward:
        fuse_backward(model)
