"""Shapes and numbers of a model's parameters, by formula. Needs no torch."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.shapes import present

Shapes = Mapping[str, Sequence[int]]


def layer_names(config: ModelConfig) -> dict[str, str]:
    """The model's names of a block's matrices, by those in `block_shapes` and `expert_shapes`."""
    attention = ("qkv", "q", "q_down", "q_up", "kv_down", "kv_up", "project", "out")
    wide = "gate_up" if config.experts is None or config.experts.gated else "up"
    return {kind: f"attn.{kind}" for kind in attention} | {
        "up": "mlp.gate_up" if config.gated_mlp else "mlp.up",
        "down": "mlp.down",
        "router": "mlp.router",
        "latent_down": "mlp.latent_down",
        "latent_up": "mlp.latent_up",
        "shared_gate": "mlp.shared_gate",
        "shared_up": f"mlp.shared.{wide}",
        "shared_down": "mlp.shared.down",
        "experts_up": f"mlp.experts.{wide}",
        "experts_down": "mlp.experts.down",
    }


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by its name in the plain model, with padding rows; no tied head."""
    d, rows = config.hidden_size, config.padded_vocab_size
    norm = {"weight": (d,)} if config.rms_norm else {"weight": (d,), "bias": (d,)}
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (rows, d)}
    if config.learned_positions:
        shapes["positions.weight"] = (config.max_position_embeddings, d)
    for i, layer in enumerate(config.layers):
        block: dict[str, tuple[int, ...]] = {}
        for part, kind in (("attn", layer.mixer), ("mlp", layer.mlp)):
            if kind is None:
                continue
            for name in ("norm", "after")[: layer.pre_norm + layer.post_norm]:
                block |= {f"{part}_{name}.{kind}": shape for kind, shape in norm.items()}
            block |= (_attention_parameters if part == "attn" else _mlp_parameters)(config, i)
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    shapes |= {f"norm.{kind}": shape for kind, shape in norm.items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (rows, d)
    return shapes


def _attention_parameters(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    shapes = config.attention_shapes(layer)
    parameters: dict[str, tuple[int, ...]] = {}
    if config.layers[layer].mixer == "recurrent":
        r = present(config.recurrent)
        parameters |= {f"attn.{kind}.weight": shape for kind, shape in shapes.items()}
        biased = {kind: shape[:1] for kind, shape in shapes.items()} if r.bias else {}
        biased |= {"conv": (sum(r.channels),)} if r.conv_bias else {}
        parameters |= {f"attn.{kind}.bias": shape for kind, shape in biased.items()}
        parameters["attn.conv.weight"] = (sum(r.channels), r.kernel)
        for kind in ("decay", "step_bias", *([] if r.delta else ["skip"])):
            parameters[f"attn.{kind}"] = (r.heads,)
        size = r.head_dim if r.delta else r.heads * r.head_dim
        return parameters | {"attn.gated_norm.weight": (size,)}
    if config.sinks:
        parameters["attn.sinks"] = (config.num_attention_heads,)
    parameters |= {f"attn.{kind}.weight": shape for kind, shape in shapes.items()}
    if config.qkv_bias:
        parameters["attn.qkv.bias"] = shapes["qkv"][:1]
    if config.attention_out_bias:
        parameters["attn.out.bias"] = (config.hidden_size,)
    if config.qk_norm:
        whole = (config.query_size, config.kv_size)
        sizes = whole if config.whole_qk_norm else (config.head_dim,) * 2
        parameters |= {f"attn.{x}_norm.weight": (n,) for x, n in zip("qk", sizes, strict=True)}
    if config.latent:
        if config.latent.q_rank:
            parameters["attn.q_down_norm.weight"] = (config.latent.q_rank,)
        parameters["attn.kv_down_norm.weight"] = (config.latent.kv_rank,)
    return parameters


def _mlp_parameters(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    names, experts = layer_names(config), config.experts_of(layer)
    biased = experts is not None and experts.biases
    parameters: dict[str, tuple[int, ...]] = {}
    for kind, shape in config.mlp_shapes(layer).items():
        parameters[f"{names[kind]}.weight"] = shape
        if biased if kind == "router" else config.mlp_bias:
            parameters[f"{names[kind]}.bias"] = shape[:1]
    for kind, shape in config.expert_shapes(layer).items():
        number = present(experts).number
        parameters[f"{names[kind]}.weight"] = (number, *shape)
        if biased:
            parameters[f"{names[kind]}.bias"] = (number, shape[0])
    return parameters


def matrices(shapes: Shapes) -> dict[str, Sequence[int]]:
    """The parameters that are matrices, or one for each expert."""
    return {name: shape for name, shape in shapes.items() if len(shape) >= 2}


def count_parameters(config: ModelConfig) -> int:
    """All trainable parameters of the unpadded model, a tied head counted once."""
    tables = 1 if config.tie_word_embeddings else 2
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    return sum(map(math.prod, parameter_shapes(config).values())) - tables * padding


def count_active_parameters(config: ModelConfig) -> int:
    """The parameters that a token uses: of each layer's experts only those that it is sent to."""
    if not config.experts:
        return count_parameters(config)
    unused = config.experts.number - config.experts.per_token
    names = layer_names(config)
    apart = sum(
        math.prod(shape) // config.experts.number * unused
        for name, shape in parameter_shapes(config).items()
        if names["experts_up"] in name or names["experts_down"] in name
    )
    return count_parameters(config) - apart


def linear_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters that multiply a token, by kind of layer: its own experts', and no padding rows."""
    parameters: Counter[str] = Counter()
    for i in range(config.num_hidden_layers):
        for name, (n, k) in config.block_shapes(i).items():
            parameters[name] += n * k
        for name, (n, k) in config.expert_shapes(i).items():
            parameters[name] += present(config.experts).per_token * n * k
    parameters["head"] = config.vocab_size * config.hidden_size
    return parameters
