"""Which of several equal kernels the model's own parts use."""

from llm_train_bench.apply.compile import key_compiled_code
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.onednn import use_onednn
from llm_train_bench.model.transformer import Transformer, fuse_backward


def apply_kernels(model: Transformer, work: Work, linear: str) -> None:
    """Let a model use the kernels asked for and the chosen library, in place; after apply_fp8."""
    key_compiled_code(work.fp8.emulated, linear)
    if linear == "onednn":
        use_onednn(model)
    if work.fused_backward:
        fuse_backward(model)
