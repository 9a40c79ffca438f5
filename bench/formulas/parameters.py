"""Shapes and numbers of a model's parameters, by formula. Needs no torch."""

import math
from collections.abc import Mapping, Sequence

from model.config import ModelConfig

Shapes = Mapping[str, Sequence[int]]


def layer_names(config: ModelConfig) -> dict[str, str]:
    """The model's names of a block's linear layers, by those in `block_shapes`."""
    up = "mlp.gate_up" if config.gated_mlp else "mlp.up"
    return {"qkv": "attn.qkv", "out": "attn.out", "up": up, "down": "mlp.down"}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by its name in the plain model, padding rows included.

    A tied head has none: it is the embedding.
    """
    d, rows = config.hidden_size, config.padded_vocab_size
    norm = {"weight": (d,)} if config.rms_norm else {"weight": (d,), "bias": (d,)}
    names = layer_names(config)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (rows, d)}
    if config.learned_positions:
        shapes["positions.weight"] = (config.max_position_embeddings, d)
    for i in range(config.num_hidden_layers):
        block = config.block_shapes(i)
        found: dict[str, tuple[int, ...]] = {f"attn_norm.{k}": s for k, s in norm.items()}
        found |= {f"{names[kind]}.weight": shape for kind, shape in block.items()}
        if config.qkv_bias:
            found["attn.qkv.bias"] = (config.query_size + 2 * config.kv_size,)
        if config.attention_out_bias:
            found["attn.out.bias"] = (d,)
        if config.qk_norm:
            found |= dict.fromkeys(("attn.q_norm.weight", "attn.k_norm.weight"), (config.head_dim,))
        found |= {f"mlp_norm.{k}": s for k, s in norm.items()}
        if config.mlp_bias:
            found |= {f"{names['up']}.bias": (block["up"][0],), "mlp.down.bias": (d,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in found.items()}
    shapes |= {f"norm.{kind}": shape for kind, shape in norm.items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (rows, d)
    return shapes


def matrices(shapes: Shapes) -> dict[str, Sequence[int]]:
    """The parameters that are matrices."""
    return {name: shape for name, shape in shapes.items() if len(shape) == 2}


def n_numbers(shapes: Shapes) -> int:
    """Numbers in all of these."""
    return sum(math.prod(shape) for shape in shapes.values())


def count_parameters(config: ModelConfig) -> int:
    """All trainable parameters of the unpadded model, a tied head counted once."""
    tables = 1 if config.tie_word_embeddings else 2
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    return n_numbers(parameter_shapes(config)) - tables * padding


def linear_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters that multiply, by kind of layer, over the whole model; padding rows apart."""
    found: dict[str, int] = {}
    for i in range(config.num_hidden_layers):
        for name, (n, k) in config.block_shapes(i).items():
            found[name] = found.get(name, 0) + n * k
    return found | {"head": config.vocab_size * config.hidden_size}
