"""What a model is built with besides its config (settings/plan.py chooses it). Needs no torch."""

from typing import NamedTuple

from llm_train_bench.model.chunks import CHUNK_ELEMENTS


class AttentionKernel(NamedTuple):
    """The kernels of causal attention over whole samples, and of attention that sees less."""

    causal: str = "auto"
    """`blocks` (block_attention.py), or PyTorch's: one by name, or any (`auto`, `flex`)."""
    masked: str = "pieces"
    """For windows, documents, sinks, and keys gathered by cp ranks: `pieces` (piece_attention.py).
    Windows and documents can also use `flex`: FlexAttention, which has no backward on a CPU."""


class ModelOptions(NamedTuple):
    """Choices that change how a model computes."""

    attention: AttentionKernel = AttentionKernel()
    balanced: bool = False
    """Deal experts out in turn in place of choosing them."""
    onednn: bool = False
    """The loss's matmuls by oneDNN."""
    chunk_elements: int = CHUNK_ELEMENTS
    """Elements of one chunk's logits in the loss."""


USUAL_OPTIONS = ModelOptions()
