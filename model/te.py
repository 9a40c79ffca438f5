"""Blocks with Transformer Engine's linear layers and norms; they compute what plain blocks do.

The modules inside a block are replaced and its forward stays: rotary embedding, attention, windows
and dropout are ours. Weight names are those of the plain block (`Transformer.weights`), so that
first values and Hugging Face files are the same. Written for Transformer Engine 2.2 and newer.
"""

import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.config_keys import TE_ACTIVATIONS
from llm_train_bench.model.transformer import Transformer


def layer_of(name: str) -> str:
    """Which of a block's convertible layers a module is in: `attn.qkv`, `attn.out` or `mlp`."""
    within = name.split(".", 2)[2] if name.startswith("blocks.") and name.count(".") > 1 else ""
    return "mlp" if within.startswith("mlp.") else within


def convert(
    model: Transformer,
    te: types.ModuleType,
    cache_weights: bool,
    excluded: Collection[str] = (),
) -> types.SimpleNamespace:
    """Replace the linear layers and norms of all blocks, on the meta device, in place.

    Those in `excluded` stay: `attn.qkv`, `attn.out` or `mlp`. Returns a namespace: its `first` says
    whether the micro batch about to run is its step's first. With `cache_weights` the others reuse
    the first one's FP8 weights. (Sharded modules ignore that.)
    """
    micro_batch = types.SimpleNamespace(first=True)
    for block in model.blocks.values():
        for module in _convert_block(block, model.config, te, excluded):
            if cache_weights:
                module.forward = _cached(module.forward, micro_batch)
    config = model.config  # not the model, which would then hold itself
    model.native_name = lambda name: native_name(name, config)
    return micro_batch


def _convert_block(
    block: Any, config: ModelConfig, te: types.ModuleType, excluded: Collection[str]
) -> Iterator[nn.Module]:
    # A string: TE compares it with "meta", which a torch.device does not equal.
    common = {"params_dtype": torch.float32, "device": "meta"}
    norm = {"normalization": "RMSNorm" if config.rms_norm else "LayerNorm", "eps": config.norm_eps}
    norm |= common
    d, f, qkv, out = config.hidden_size, config.intermediate_size, block.attn.qkv, block.attn.out
    if "attn.qkv" not in excluded:
        block.attn.qkv = te.LayerNormLinear(d, qkv.out_features, bias=qkv.bias is not None, **norm)
        block.attn_norm = nn.Identity()
        yield block.attn.qkv
    if "attn.out" not in excluded:
        block.attn.out = te.Linear(out.in_features, d, bias=out.bias is not None, **common)
        yield block.attn.out
    if "mlp" not in excluded:
        name = TE_ACTIVATIONS[config.activation][config.gated_mlp]
        block.mlp = te.LayerNormMLP(d, f, bias=config.mlp_bias, activation=name, **norm)
        block.mlp_norm = nn.Identity()
        yield block.mlp


def _cached(forward: Callable, micro_batch: types.SimpleNamespace) -> Callable:
    return lambda x: forward(x, is_first_microbatch=micro_batch.first)


def native_name(name: str, config: ModelConfig) -> str:
    """The plain block's name of a converted block's parameter."""
    name = name.replace("attn.qkv.layer_norm_", "attn_norm.").replace("mlp.fc2_", "mlp.down.")
    name = name.replace("mlp.fc1_", "mlp.gate_up." if config.gated_mlp else "mlp.up.")
    return name.replace("mlp.layer_norm_", "mlp_norm.")
