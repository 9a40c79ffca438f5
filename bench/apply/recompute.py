"""Selective activation checkpointing: which blocks recompute in backward, and what of them."""

import functools
from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from model.transformer import Transformer, saved_ops


def apply_recompute(
    model: Transformer,
    blocks: list[int],
    policy: str,
    checkpoint_fn: Callable[..., Tensor] = checkpoint,
) -> None:
    """Let these blocks drop activations in forward and recompute them in backward, in place.

    `op` keeps the outputs of matmuls, attention and collectives and recomputes the rest. The block's
    forward is replaced, not the block, so that parameter names stay as they are. Apply before
    compilation and before sharding. Another `checkpoint_fn` (Transformer Engine's) has no options.
    """
    options = {}
    if checkpoint_fn is checkpoint:
        options = {"use_reentrant": False, "preserve_rng_state": has_dropout(model)}
    if policy == "op":
        ops = saved_ops(attention=not model.config.attention_dropout)

        def keep(context, op, *args, **kwargs) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep)
    for block in (model.blocks[index] for index in blocks):
        block.forward = checkpointed(block.forward, checkpoint_fn, options)


def checkpointed(forward, checkpoint_fn: Callable[..., Tensor], options: dict):
    """A block's forward that is checkpointed."""

    def recomputing_forward(*args) -> Tensor:
        return checkpoint_fn(forward, *args, **options)

    return recomputing_forward


def has_dropout(model: Transformer) -> bool:
    """Whether a block draws random numbers, which a recomputation must draw again."""
    return bool(model.config.residual_dropout or model.config.attention_dropout)
