"""What is applied to a built model before it is given storage: compilation."""

import torch
import torch._dynamo.utils

from model.transformer import Transformer

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def apply_compile(model: Transformer, mode: str) -> None:
    """Compile every block in place, and the loss of one chunk of rows.

    Block by block, since identical blocks share one compiled graph: compile time does not grow
    with depth, and parameter names stay as they are. `fullgraph` turns a graph break into an error.
    """
    for block in model.blocks:
        block.compile(mode=mode, fullgraph=True, dynamic=False)
    # The loss function hands its chunk's gradient on to eager matmuls; out of a CUDA graph it would
    # be overwritten by the next chunk.
    mode = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(
        mode, mode
    )
    model.loss.compile_chunk(mode=mode, fullgraph=True, dynamic=False)


def compile_seconds() -> float:
    """Wall time that torch.compile has taken in this process so far."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)
