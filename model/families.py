"""How the config.json of each model family is read: its keys to the fields of ModelConfig."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

from llm_train_bench.model.json_keys import Keys, kind_of
from llm_train_bench.model.shapes import Experts, Latent, RopeScaling, Yarn


def from_first_dialect(keys: Keys) -> dict[str, Any]:
    """The config of the first llm-train-bench (`arch_name`, `d_embd`, ...) as Hugging Face has it.

    Keys that are not its own stay as they are. Its GPT has no dropout. A Llama's `d_hid` follows from
    `ffn_mult` and `ffn_factor` if it is not given.
    """
    family = keys.choice("arch_name", ("gpt", "llama", "mistral"))
    hidden = keys.integer("d_embd")
    same = {
        "vocab_size": keys.integer("vocab_size"),
        "num_hidden_layers": keys.integer("n_layers"),
        "num_attention_heads": keys.integer("n_heads"),
        "max_position_embeddings": keys.integer("max_seq_len"),
        "hidden_size": hidden,
    }
    if family == "gpt":
        none = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
        found = {"model_type": "gpt2", **same, **none}
        if (size := keys.integer("d_hid", None)) is not None:
            found["n_inner"] = size
    else:
        factor = keys.integer("ffn_factor", 256)
        width = int(int(4 * hidden * 2 / 3) * keys.number("ffn_mult", 1.0))
        found = {
            "model_type": family,
            **same,
            "num_key_value_heads": keys.integer("n_kv_heads", None, null=True),
            "intermediate_size": keys.integer("d_hid", None) or -(-width // factor) * factor,
            "rope_theta": keys.number("rope_base", 10000.0),
            "rms_norm_eps": keys.number("norm_eps", 1e-5),
        }
        if family == "mistral":
            found["sliding_window"] = keys.integer("window_size", None)
    return found | {key: keys.raw[key] for key in keys.leftover()}


def _gpt2(keys: Keys) -> dict[str, Any]:
    # transformers accepts the general names too, and prefers them.
    def size(general: str, own: str, default: Any = ...) -> int:
        return keys.integer(general if general in keys.raw else own, default)

    hidden = size("hidden_size", "n_embd")
    layers = size("num_hidden_layers", "n_layer")
    heads = size("num_attention_heads", "n_head")
    positions = size("max_position_embeddings", "n_positions", 1024)
    head_dim = keys.divide(hidden, heads)
    for key, neutral in {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }.items():
        if keys.boolean(key, neutral) is not neutral:
            raise keys.error(key, f"only {json.dumps(neutral)} is implemented")
    return dict(
        vocab_size=keys.integer("vocab_size", 50257),
        max_position_embeddings=positions,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("n_inner", None) or 4 * hidden,
        activation=keys.activation("activation_function", "gelu_new"),
        gated_mlp=False,
        rms_norm=False,
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        learned_positions=True,
        rope_theta=0.0,
        rope_scaling=None,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", True),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        windows=(None,) * layers,
        embedding_dropout=keys.fraction("embd_pdrop", 0.1),
        residual_dropout=keys.fraction("resid_pdrop", 0.1),
        attention_dropout=keys.fraction("attn_pdrop", 0.1),
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=None,  # GPT-2's embedding knows no padding row
    )


def _llama_family(
    keys: Keys,
    positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    bias_keys: tuple[str, ...] = (),
    qk_norm: bool = False,
    windows: Callable[[Keys, int], tuple[int | None, ...]] | None = None,
    theta: float = 10000.0,
    norm_eps: float = 1e-6,
    biased: bool = False,
    pad_token: int | None = None,
    tied: bool = False,
    partial: bool = False,
    latent: bool = False,
) -> dict[str, Any]:
    """A decoder with RMS norms, rotary embeddings and a gated MLP.

    `positions`, `kv_heads`, `head_dim`, `theta`, `norm_eps`, `biased` (for attention_bias), `pad_token`
    and `tied` are the family's defaults of absent keys. `bias_keys` are the keys among attention_bias
    and mlp_bias that it has; `windows` reads its sliding windows. With `partial` the family reads which
    part of a head is rotated, with `latent` all sizes of heads.
    """
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    # Absent and null differ in transformers: absent takes the family's default, null the head count.
    head_dim = 1 if latent else keys.integer("head_dim", head_dim, null=True)
    bias = "attention_bias" in bias_keys and keys.boolean("attention_bias", biased)
    positions = keys.integer("max_position_embeddings", positions)
    theta, scaling = _rope(keys, positions, theta, partial)
    return dict(
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=positions,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys.integer("num_key_value_heads", kv_heads, null=True) or heads,
        head_dim=head_dim or keys.divide(hidden, heads),
        intermediate_size=keys.integer("intermediate_size"),
        activation=keys.activation("hidden_act", "silu"),
        gated_mlp=True,
        rms_norm=True,
        norm_eps=keys.number("rms_norm_eps", norm_eps),
        learned_positions=False,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", tied),
        qkv_bias=qkv_bias or bias,
        attention_out_bias=bias,
        mlp_bias="mlp_bias" in bias_keys and keys.boolean("mlp_bias", False),
        qk_norm=qk_norm,
        windows=windows(keys, layers) if windows else (None,) * layers,
        embedding_dropout=0.0,
        residual_dropout=0.0,
        attention_dropout=keys.fraction("attention_dropout", 0.0),
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=_pad_token(keys, pad_token),
    )


def _pad_token(keys: Keys, default: int | None) -> int | None:
    """The embedding row that gets no gradient; negative ones count from the end, as torch does."""
    token = keys.integer("pad_token_id", default, minimum=-keys.integer("vocab_size"), null=True)
    return token if token is None or token >= 0 else token + keys.integer("vocab_size")


def _windows(
    keys: Keys, layers: int, default: int | None = None, switched: bool = False
) -> tuple[int | None, ...]:
    """The same one in all layers; where it is `switched`, only with use_sliding_window."""
    window = keys.integer("sliding_window", default, null=True)
    return (window if not switched or keys.boolean("use_sliding_window", False) else None,) * layers


def _windows_by_layer(keys: Keys, layers: int) -> tuple[int | None, ...]:
    first = keys.integer("max_window_layers", 28, minimum=0)
    return _switched_windows(keys, 4096, [i >= first for i in range(layers)])


def _switched_windows(keys: Keys, default: int | None, slide: list[bool]) -> tuple[int | None, ...]:
    """Of the layers that layer_types names, or else of `slide`; only with use_sliding_window."""
    (window, *_) = _windows(keys, 1, default, switched=True)
    sliding = _layer_types(keys, len(slide), [window is not None and slides for slides in slide])
    if any(sliding) and window is None:
        raise keys.error(
            "layer_types",
            "names sliding_attention, but use_sliding_window or sliding_window is off",
        )
    return tuple(window if slides else None for slides in sliding)


def _rope(
    keys: Keys, max_positions: int, default_theta: float = 10000.0, partial: bool = False
) -> tuple[float, RopeScaling | Yarn | None]:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` with both inside."""
    theta = keys.number("rope_theta", default_theta)
    where = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
    keys.used |= {"rope_scaling", "rope_parameters"}
    values = keys.raw.get(where) or {}
    if not isinstance(values, dict):
        raise keys.error(where, f"must be an object or null, found {kind_of(values)}")
    if any(isinstance(value, dict) for value in values.values()):
        raise keys.error(where, "rotary parameters that differ by layer type are not implemented")
    inner = Keys(values, keys.where, prefix=where + ".")
    theta = inner.number("rope_theta", theta)
    kind, old = values.get("rope_type"), values.get("type")
    inner.used |= {"rope_type", "type"}
    if kind and old and kind != old:
        raise keys.error(where, f"rope_type {kind!r} and type {old!r} disagree")
    kind = kind or old or "default"
    for place in () if partial else (keys, inner):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor", "only 1 (the whole head) is implemented")
    scaling = None
    if kind == "linear":
        scaling = RopeScaling("linear", inner.number("factor"))
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            _trained_positions(keys, inner, max_positions),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise inner.error("high_freq_factor", "must be above low_freq_factor")
    elif kind == "yarn":
        scaling = _yarn(keys, inner, max_positions)
    elif kind != "default":
        raise keys.error(
            where,
            f"rope type {kind!r} is not implemented; there are default, linear, llama3 and yarn",
        )
    if partial:
        inner.used.add("partial_rotary_factor")
    if extra := inner.leftover():
        raise keys.error(where, f"{extra[0]!r} has no meaning for rope type {kind!r}")
    return theta, scaling


def _trained_positions(keys: Keys, inner: Keys, default: int) -> int:
    """As in transformers, a value at the top level overrides the one inside."""
    inside = inner.integer("original_max_position_embeddings", default)
    return keys.integer("original_max_position_embeddings", None) or inside


def _yarn(keys: Keys, inner: Keys, max_positions: int) -> Yarn:
    """YaRN's numbers; the factor of the rotated numbers follows from `factor`, or from two mscales."""
    original = _trained_positions(keys, inner, max_positions)
    factor = inner.number("factor", max_positions / original)
    mscale, everywhere = (inner.get(key, None) for key in ("mscale", "mscale_all_dim"))
    natural = yarn_mscale(factor)
    if mscale and everywhere:
        natural = yarn_mscale(factor, inner.number("mscale"))
        natural /= yarn_mscale(factor, inner.number("mscale_all_dim"))
    scaling = Yarn(
        factor,
        original,
        inner.number("beta_fast", 32.0),
        inner.number("beta_slow", 1.0),
        inner.boolean("truncate", True),
        inner.number("attention_factor", natural),
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise inner.error("beta_fast", "is below beta_slow")
    return scaling


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN raises attention's temperature (Peng et al. 2023, eq. 22; DeepSeek's mscale)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _mixtral(keys: Keys) -> dict[str, Any]:
    fields = _llama_family(
        keys, positions=131072, kv_heads=8, theta=1e6, norm_eps=1e-5, windows=_windows
    )
    if keys.fraction("router_jitter_noise", 0.0):
        raise keys.error("router_jitter_noise", "only 0 is implemented")
    size = fields["intermediate_size"]
    experts = _experts(keys, "num_local_experts", 8, 2, size=size, normalised=True)
    return fields | dict(experts=experts)


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    fields = _llama_family(
        keys, positions=32768, kv_heads=4, bias_keys=("attention_bias",), qk_norm=True,
        windows=functools.partial(_windows, default=4096, switched=True),
    )  # fmt: skip
    experts = _experts(
        keys, "num_experts", 128, 8, size=keys.integer("moe_intermediate_size", 768),
        normalised=keys.boolean("norm_topk_prob", False),
    )  # fmt: skip
    layers, step = fields["num_hidden_layers"], keys.integer("decoder_sparse_step", 1)
    dense = _layer_numbers(keys, "mlp_only_layers", layers)
    dense |= {i for i in range(layers) if (i + 1) % step}
    return fields | dict(experts=experts, dense_layers=tuple(sorted(dense)))


def _olmoe(keys: Keys) -> dict[str, Any]:
    fields = _llama_family(
        keys, positions=4096, bias_keys=("attention_bias",), qk_norm=True, norm_eps=1e-5,
        pad_token=1,
    )  # fmt: skip
    if keys.get("clip_qkv", None) is not None:
        raise keys.error("clip_qkv", "only null is implemented")
    experts = _experts(
        keys, "num_experts", 64, 8, size=fields["intermediate_size"], aux_loss=0.01,
        normalised=keys.boolean("norm_topk_prob", False),
    )  # fmt: skip
    return fields | dict(experts=experts, whole_qk_norm=True)


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    def alternating(keys: Keys, layers: int) -> tuple[int | None, ...]:
        window = keys.integer("sliding_window", 128, null=True)
        sliding = _layer_types(keys, layers, [i % 2 == 0 for i in range(layers)])
        return tuple(window if slides else None for slides in sliding)

    if not any(keys.raw.get(key) for key in ("rope_scaling", "rope_parameters")):
        rope = dict(
            rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096
        )
        keys.raw = keys.raw | {"rope_scaling": rope}
    fields = _llama_family(
        keys, positions=131072, kv_heads=8, head_dim=64, theta=150000.0, norm_eps=1e-5,
        bias_keys=("attention_bias",), biased=True, windows=alternating,
    )  # fmt: skip
    keys.choice("hidden_act", ("silu",), "silu")
    experts = _experts(
        keys, "num_local_experts", 128, 4, size=fields["intermediate_size"], biases=True,
        scores="softmax_chosen", limit=keys.number("swiglu_limit", 7.0),
        gain=keys.number("swiglu_alpha", 1.702),
    )  # fmt: skip
    keys.used.add("quantization_config")  # of the weights on the Hub
    keys.used.add("initial_context_length")
    return fields | dict(experts=experts, sinks=True)


def _deepseek_v3(keys: Keys) -> dict[str, Any]:
    fields = _llama_family(keys, positions=4096, bias_keys=("attention_bias",), latent=True)
    heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    if fields["num_key_value_heads"] != heads:
        raise keys.error("num_key_value_heads", f"must be num_attention_heads = {heads}")
    latent = Latent(
        keys.integer("q_lora_rank", 1536, null=True),
        keys.integer("kv_lora_rank", 512),
        keys.integer("qk_nope_head_dim", 128),
        keys.integer("qk_rope_head_dim", 64),
        keys.integer("v_head_dim", 128),
    )
    if fields["attention_out_bias"]:
        raise keys.error("attention_bias", "only false is implemented for this family")
    size = keys.integer("moe_intermediate_size", 2048)
    groups = keys.integer("n_group", 8)
    experts = _experts(
        keys, "n_routed_experts", 256, 8, size=size,
        shared_size=size * (keys.integer("n_shared_experts", 1, minimum=0, null=True) or 0),
        scores="sigmoid", correction=True, normalised=keys.boolean("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 2.5), groups=groups,
        groups_per_token=keys.integer("topk_group", 4),
    )  # fmt: skip
    if experts.number % groups or (groups > 1 and experts.number // groups < 2):
        possible = [str(g) for g in range(1, experts.number // 2 + 1) if experts.number % g == 0]
        raise keys.error(
            "n_group",
            f"{experts.number} experts do not divide into groups of two or more; "
            f"{', '.join(possible or ['1'])} would do",
        )
    if experts.groups_per_token > groups:
        raise keys.error("topk_group", f"is above n_group {groups}")
    if experts.per_token > experts.number // groups * experts.groups_per_token:
        raise keys.error("topk_group", "its groups have fewer experts than a token needs")
    keys.choice("scoring_func", ("sigmoid",), "sigmoid")
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    if keys.integer("moe_layer_freq", 1) != 1:
        raise keys.error("moe_layer_freq", "only 1 is implemented")
    # Of code and weights on the Hub, and of modules that predict further tokens, which are no part
    # of the model proper: transformers leaves them out too.
    keys.used |= {"quantization_config", "auto_map", "num_nextn_predict_layers", "num_mtp_layers",
                  "head_dim", "qk_head_dim"}  # fmt: skip
    head_dim = latent.nope_dim + latent.rope_dim
    scale, mscale = head_dim**-0.5, _inner_rope(keys).get("mscale_all_dim")
    if isinstance(fields["rope_scaling"], Yarn) and mscale:
        scale *= yarn_mscale(fields["rope_scaling"].factor, mscale) ** 2
    return fields | dict(
        head_dim=head_dim,
        experts=experts,
        latent=latent,
        attention_scale=scale,
        dense_layers=tuple(range(min(layers, keys.integer("first_k_dense_replace", 3, minimum=0)))),
        rope_pairs="neighbours" if keys.boolean("rope_interleave", True) else "halves",
    )


def _experts(
    keys: Keys, key: str, number: int, per_token: int, aux_loss: float = 0.001, **fields
) -> Experts:
    """The experts of a layer; `number`, `per_token` and `aux_loss` are defaults of absent keys."""
    for other in ("num_experts", "num_local_experts"):
        if key not in keys.raw and other in keys.raw:
            key = other  # transformers takes either
    number = keys.integer(key, number)
    per_token = keys.integer("num_experts_per_tok", per_token)
    if per_token > number:
        raise keys.error("num_experts_per_tok", f"is above {key} {number}")
    factor = keys.get("router_aux_loss_coef", aux_loss)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < 1e6:
        raise keys.error("router_aux_loss_coef", "must be a number from 0 on")
    rate = keys.fraction("router_bias_update_rate", 0.0)
    if rate and not fields.get("correction"):
        raise keys.error("router_bias_update_rate", "this family's router has no such bias")
    if not keys.boolean("output_router_logits", False):
        factor = 0.0  # as in transformers
    return Experts(number, per_token, aux_loss=float(factor), correction_rate=rate, **fields)


def _layer_numbers(keys: Keys, key: str, layers: int) -> set[int]:
    """A list of layers; absent or null means none."""
    found = keys.get(key, None) or []
    if not isinstance(found, list) or not all(type(i) is int and 0 <= i < layers for i in found):
        raise keys.error(key, f"must be a list of layers from 0 to {layers - 1}")
    return set(found)


def _phi3(keys: Keys) -> dict[str, Any]:
    fields = _llama_family(
        keys, positions=4096, windows=_windows, norm_eps=1e-5, partial=True, pad_token=32000
    )
    part = keys.number("partial_rotary_factor", _inner_rope(keys).get("partial_rotary_factor", 1.0))
    size = int(fields["head_dim"] * part)
    return fields | dict(
        rotary_size=None if size == fields["head_dim"] else size,
        embedding_dropout=keys.fraction("embd_pdrop", 0.0),
        residual_dropout=keys.fraction("resid_pdrop", 0.0),
    )


def _inner_rope(keys: Keys) -> dict[str, Any]:
    inner = keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters") or {}
    return inner if isinstance(inner, dict) else {}


def _olmo2(keys: Keys) -> dict[str, Any]:
    fields = _llama_family(
        keys, positions=2048, bias_keys=("attention_bias",), qk_norm=True, norm_eps=1e-5,
        pad_token=1,
    )  # fmt: skip
    return fields | dict(whole_qk_norm=True, norm_after=True)


def _smollm3(keys: Keys) -> dict[str, Any]:
    fields = _llama_family(
        keys, positions=32768, kv_heads=4, bias_keys=("attention_bias", "mlp_bias"), theta=2e6,
        pad_token=128004, tied=True,
    )  # fmt: skip
    layers, every = fields["num_hidden_layers"], keys.integer("no_rope_layer_interval", 4)
    turned = keys.get("no_rope_layers", None) or [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(turned, list) or len(turned) != layers:
        raise keys.error(
            "no_rope_layers", f"must be a list of num_hidden_layers = {layers} numbers"
        )
    return fields | dict(
        windows=_switched_windows(keys, None, [not has for has in turned]),
        no_rope_layers=tuple(i for i, has in enumerate(turned) if not has),
    )


def _granite(keys: Keys) -> dict[str, Any]:
    fields = _llama_family(keys, positions=2048, bias_keys=("attention_bias", "mlp_bias"))
    return fields | dict(
        attention_scale=keys.number("attention_multiplier", 1.0),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )


def _layer_types(keys: Keys, layers: int, default: list[bool]) -> list[bool]:
    """Which layers slide, by `layer_types`."""
    kinds = keys.get("layer_types", None)
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.error("layer_types", f"must be a list of num_hidden_layers = {layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "attention", "sliding_attention"):
            raise keys.error("layer_types", f"{kind!r} is not implemented")
    return [kind == "sliding_attention" for kind in kinds]


# Families that users ask for and that compute what is not implemented, with what that is.
NOT_IMPLEMENTED = {
    "gemma": "norms of 1 + weight and a scaled embedding",
    "gemma2": "soft-capped scores and logits",
    "gemma3": "rotary frequencies that differ by layer",
    "gemma3_text": "rotary frequencies that differ by layer",
    "deepseek_v2": "groups scored by their maximum",
    "qwen2_moe": "a gate of the shared expert",
    "llama4": "chunked attention",
    "phimoe": "sparsemixer routing",
}


def refuse_by_name(keys: Keys) -> None:
    """ConfigError for a family that is known and not implemented."""
    kind = keys.raw.get("model_type")
    if isinstance(kind, str) and kind in NOT_IMPLEMENTED:
        others = ", ".join(FAMILIES)
        raise keys.error(
            "model_type", f"{NOT_IMPLEMENTED[kind]} are not implemented; there are {others}"
        )


# The reader of each family's config, by its model_type.
FAMILIES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": functools.partial(
        _llama_family, positions=2048, bias_keys=("attention_bias", "mlp_bias")
    ),
    "mistral": functools.partial(
        _llama_family, positions=131072, kv_heads=8,
        windows=functools.partial(_windows, default=4096),
    ),
    "qwen2": functools.partial(
        _llama_family, positions=32768, kv_heads=32, qkv_bias=True, windows=_windows_by_layer
    ),
    "qwen3": functools.partial(
        _llama_family, positions=32768, kv_heads=32, head_dim=128, bias_keys=("attention_bias",),
        qk_norm=True, windows=_windows_by_layer,
    ),
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "granite": _granite,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
}  # fmt: skip
