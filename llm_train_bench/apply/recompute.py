"""Selective activation checkpointing: which blocks recompute in backward, and which parts."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.formulas.work import Recompute
from llm_train_bench.model.experts import MixtureOfExperts
from llm_train_bench.model.transformer import Transformer, saved_ops


def apply_recompute(
    model: Transformer, recompute: Recompute, fp8: Fp8 | None = None, compiled: bool = False
) -> None:
    """Let the chosen blocks drop activations in forward and recompute them in backward, in place.

    `block` recomputes everything. `op` keeps the outputs of matmuls, attention and collectives, but what
    tp ranks gathered is gathered again. Unless blocks are `compiled`, the choice of experts is kept. The
    block's forward is replaced, not the block, so that parameter names stay as they are. FP8 libraries
    have checkpoints that ignore the options.
    """
    in_attention, beside = model.config.attention_dropout, model.config.residual_dropout
    # A recomputation must draw the same random numbers again.
    draws = in_attention > 0 or beside > 0
    recomputed = (fp8 or Fp8()).checkpoint
    recomputed = functools.partial(recomputed, use_reentrant=False, preserve_rng_state=draws)
    contexts: Callable[[], Any] | None = None
    if recompute.policy == "op":
        ops = saved_ops(attention=not in_attention)
        layout: Any = model.layout

        def keep(context, op, *args, **kwargs) -> CheckpointPolicy:
            gathers = op is torch.ops._c10d_functional.all_gather_into_tensor.default
            keeps = op in ops and not (gathers and args[2] == layout.names.get("tp"))
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, keep)
    for layer, block in model.blocks.items():
        if int(layer) in recompute.blocks:
            both, mlp = contexts, getattr(block, "mlp", None)
            if isinstance(mlp, MixtureOfExperts) and not compiled:
                both = functools.partial(mlp.replay.contexts, contexts)
            more = {} if both is None else {"context_fn": both}
            block.forward = functools.partial(recomputed, block.forward, **more)
