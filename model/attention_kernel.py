"""The kernels that attention runs in, chosen once for a run (settings/plan.py). Needs no torch."""

from typing import NamedTuple


class AttentionKernel(NamedTuple):
    """The kernels of causal attention over whole samples, and of attention that sees less."""

    causal: str = "auto"
    """`blocks` (block_attention.py), or PyTorch's: one by name, or any (`auto`, `flex`)."""
    masked: str = "pieces"
    """For windows, documents, sinks, and keys gathered by cp ranks: `pieces` (piece_attention.py).
    Windows and documents can also use `flex`: FlexAttention, which has no backward on a CPU."""


USUAL_KERNEL = AttentionKernel()
