"""Which of several equal kernels the model's own parts use."""

from llm_train_bench.apply.compile import key_compiled_code
from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.onednn import use_onednn
from llm_train_bench.model.transformer import Transformer, fuse_backward


def apply_kernels(model: Transformer, work: Work, linear: str) -> None:
    """Let a model use the kernels asked for and the chosen library, in place; after apply_fp8."""
    key_compiled_code(work.fp8.emulated, linear)
    if work.fused_backward and not fuse_backward(model):
        raise UsageError("--fused-backward: no part of this model can use it here; leave it out")
    if linear == "onednn":
        use_onednn(model)
