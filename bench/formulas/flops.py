"""Floating-point operations of a model per token, by formula. Needs no torch.

A multiply and an add are two operations. Forward is counted once and backward twice, so that
training takes three forwards. Two conventions for attention, both always reported:

- `palm` (Chowdhery et al. 2022, appendix B): every query meets every key, 6 N + 12 L d T a token;
- `causal`: the masked half is not counted, 6 N + 6 L d T.

N counts the parameters that multiply: the linear layers and the head (also where it is tied to the
embedding), but not the embedding look-up, norms or biases. d is heads x head_dim. A layer with a
window W < T counts W keys a query (palm), or W - W^2 / 2T (causal). Padded vocabulary rows are no
useful work and are not counted.
"""

from model.config import ModelConfig

PASS_FORWARDS = {"forward": 1, "forward-backward": 3, "step": 3}


def linear_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters that multiply, by kind of layer, over the whole model."""
    layers = config.num_hidden_layers
    found = {name: layers * n * k for name, (n, k) in config.block_shapes().items()}
    return found | {"head": config.vocab_size * config.hidden_size}


def count_parameters(config: ModelConfig) -> int:
    """All trainable parameters of the unpadded model, a tied head counted once."""
    d, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    norm = d if config.rms_norm else 2 * d
    per_layer = 2 * norm + (2 * config.head_dim if config.qk_norm else 0)
    per_layer += (config.query_size + 2 * config.kv_size) * config.qkv_bias
    per_layer += d * config.attention_out_bias
    if config.mlp_bias:
        per_layer += (2 if config.gated_mlp else 1) * f + d
    linear = sum(linear_parameters(config).values())
    total = linear + layers * per_layer + norm
    if not config.tie_word_embeddings:
        total += config.vocab_size * d
    return total + (config.max_position_embeddings * d if config.learned_positions else 0)


def attended_keys(seq_len: int, window: int | None, causal: bool) -> float:
    """Keys that a query meets on average."""
    w = min(seq_len, window or seq_len)
    return w - w * w / (2 * seq_len) if causal else w


def attention_flops(config: ModelConfig, seq_len: int, causal: bool) -> float:
    """Forward FLOPs per token of the two attention matmuls over all layers."""
    width = config.query_size
    return sum(4 * width * attended_keys(seq_len, w, causal) for w in config.windows)


def flops_per_token(
    config: ModelConfig, seq_len: int, causal: bool, pass_type: str = "step"
) -> float:
    """FLOPs per token of a pass, in the `causal` or (False) the `palm` convention."""
    forward = 2 * sum(linear_parameters(config).values())
    forward += attention_flops(config, seq_len, causal)
    return PASS_FORWARDS[pass_type] * forward


def recomputed_flops_per_token(
    config: ModelConfig,
    seq_len: int,
    freq: tuple[int, int] | None,
    policy: str,
    stops_early: bool = True,
    attention: bool = True,
    causal: bool = False,
) -> float:
    """FLOPs per token that activation checkpointing computes a second time.

    Of a checkpointed block everything up to the input of its last matmul, `mlp.down`, whose own
    output nobody needs; it is computed where the checkpoint does not stop early (eager FP8) or a
    dropout comes after it. With the `op` policy no matmul at all, and attention only
    where it drops out (model.transformer.saved_ops).
    """
    if freq is None:
        return 0.0
    if policy == "op":
        width = config.query_size
        again = width if attention and config.attention_dropout else 0
        return sum(
            4 * again * attended_keys(seq_len, config.windows[i], causal)
            for i in chosen_blocks(config.num_hidden_layers, freq)
        )
    shapes = config.block_shapes()
    if stops_early:
        del shapes["down"]
    linear = 2 * sum(n * k for n, k in shapes.values())
    width = config.query_size if attention else 0
    return sum(
        linear + 4 * width * attended_keys(seq_len, config.windows[i], causal)
        for i in chosen_blocks(config.num_hidden_layers, freq)
    )


def chosen_blocks(n_blocks: int, freq: tuple[int, int] | None) -> list[int]:
    """Blocks that --sac-freq q/p chooses, spread evenly: 1/2 every second, from the second on."""
    if freq is None:
        return []
    q, p = freq
    return [i for i in range(n_blocks) if (i + 1) * q // p > i * q // p]
