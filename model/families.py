"""How the config.json of each model family is read: its keys to the fields of ModelConfig."""

import functools
import math
from collections.abc import Callable
from typing import Any

from llm_train_bench.model.json_keys import Keys, kind_of
from llm_train_bench.model.shapes import Experts, Latent, RopeScaling, Yarn

Fields = dict[str, Any]


def from_first_dialect(keys: Keys) -> Fields:
    """The config of the first llm-train-bench (`arch_name`, `d_embd`, ...) as Hugging Face has it.

    Other keys are unchanged. Its GPT has no dropout. A Llama's `d_hid` defaults to a width computed from
    `ffn_mult` and `ffn_factor`.
    """
    family = keys.choice("arch_name", ("gpt", "llama", "mistral"))
    hidden = keys.integer("d_embd")
    values = {
        "model_type": "gpt2" if family == "gpt" else family,
        "vocab_size": keys.integer("vocab_size"),
        "num_hidden_layers": keys.integer("n_layers"),
        "num_attention_heads": keys.integer("n_heads"),
        "max_position_embeddings": keys.integer("max_seq_len"),
        "hidden_size": hidden,
    }
    if family == "gpt":
        values |= dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
        if (size := keys.integer("d_hid", None)) is not None:
            values["n_inner"] = size
    else:
        factor = keys.integer("ffn_factor", 256)
        width = int(int(4 * hidden * 2 / 3) * keys.number("ffn_mult", 1.0))
        values |= {
            "num_key_value_heads": keys.integer("n_kv_heads", None, null=True),
            "intermediate_size": keys.integer("d_hid", None) or -(-width // factor) * factor,
            "rope_theta": keys.number("rope_base", 10000.0),
            "rms_norm_eps": keys.number("norm_eps", 1e-5),
        }
        if family == "mistral":
            values["sliding_window"] = keys.integer("window_size", None)
    return values | {key: keys.raw[key] for key in keys.leftover()}


GPT2: Fields = dict(gated_mlp=False, rms_norm=False, learned_positions=True, qk_norm=False)
GPT2 |= dict(rope_theta=0.0, rope_scaling=None)
GPT2 |= dict(pad_token_id=None)  # its embedding knows no padding row
GPT2 |= dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), True)
LLAMA: Fields = dict(gated_mlp=True, rms_norm=True, learned_positions=False, qk_norm=False)
LLAMA |= dict(embedding_dropout=0.0, residual_dropout=0.0)


def _gpt2(keys: Keys) -> Fields:
    # transformers accepts the general names too, and prefers them.
    def size(general: str, native: str, default: Any = ...) -> int:
        return keys.integer(general if general in keys.raw else native, default)

    hidden = size("hidden_size", "n_embd")
    layers = size("num_hidden_layers", "n_layer")
    heads = size("num_attention_heads", "n_head")
    positions = size("max_position_embeddings", "n_positions", 1024)
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    parts = dict(embedding="embd", residual="resid", attention="attn")
    dropouts = {f"{part}_dropout": keys.fraction(f"{k}_pdrop", 0.1) for part, k in parts.items()}
    return (
        GPT2
        | dropouts
        | dict(
            vocab_size=keys.integer("vocab_size", 50257),
            max_position_embeddings=positions,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=keys.divide(hidden, heads),
            intermediate_size=keys.integer("n_inner", None) or 4 * hidden,
            activation=keys.activation("activation_function", "gelu_new"),
            norm_eps=keys.number("layer_norm_epsilon", 1e-5),
            tie_word_embeddings=keys.boolean("tie_word_embeddings", True),
            windows=(None,) * layers,
            initializer_range=keys.number("initializer_range", 0.02),
        )
    )


def _llama_family(
    keys: Keys,
    positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    biases: int = 0,
    windows: Callable[[Keys, int], tuple[int | None, ...]] | None = None,
    theta: float = 10000.0,
    norm_eps: float = 1e-6,
    biased: bool = False,
    pad_token: int | None = None,
    tied: bool = False,
    partial: bool = False,
    latent: bool = False,
    **fixed: Any,
) -> Fields:
    """A decoder with RMS norms, rotary embeddings and a gated MLP.

    `positions`, `kv_heads`, `head_dim`, `theta`, `norm_eps`, `biased` (for attention_bias), `pad_token`
    and `tied` are the family's defaults of absent keys. `biases` 1 means that it has attention_bias, 2
    that it has mlp_bias too; `windows` reads its sliding windows. With `partial` the family reads which
    part of a head is rotated, with `latent` all sizes of heads. `fixed` fields have no key.
    """
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    # Absent and null differ in transformers: absent takes the family's default, null the head count.
    head_dim = 1 if latent else keys.integer("head_dim", head_dim, null=True)
    bias = biases > 0 and keys.boolean("attention_bias", biased)
    positions = keys.integer("max_position_embeddings", positions)
    theta, scaling = _rope(keys, positions, theta, partial)
    size = keys.integer("vocab_size")
    fields = LLAMA | dict(
        vocab_size=size,
        max_position_embeddings=positions,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys.integer("num_key_value_heads", kv_heads, null=True) or heads,
        head_dim=head_dim or keys.divide(hidden, heads),
        intermediate_size=keys.integer("intermediate_size"),
        activation=keys.activation("hidden_act", "silu"),
        norm_eps=keys.number("rms_norm_eps", norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", tied),
        qkv_bias=qkv_bias or bias,
        attention_out_bias=bias,
        mlp_bias=biases > 1 and keys.boolean("mlp_bias", False),
        windows=windows(keys, layers) if windows else (None,) * layers,
        attention_dropout=keys.fraction("attention_dropout", 0.0),
        initializer_range=keys.number("initializer_range", 0.02),
    )
    token = keys.integer("pad_token_id", pad_token, minimum=-size, null=True)
    if token is not None and token < 0:
        token += size  # negative ones count from the end, as torch does
    return fields | dict(pad_token_id=token) | fixed


def _windows(
    keys: Keys,
    layers: int,
    default: int | None = None,
    switched: bool = False,
    sliding: list[bool] | None = None,
) -> tuple[int | None, ...]:
    """Each layer's window; where it is `switched`, only with use_sliding_window.

    A family whose layers differ has `layer_types`, whose default is `sliding`.
    """
    window = keys.integer("sliding_window", default, null=True)
    if switched and not keys.boolean("use_sliding_window", False):
        window = None
    if sliding is None:
        return (window,) * layers
    if kinds := _per_layer(keys, "layer_types", layers, "names"):
        for kind in kinds:
            if kind not in ("full_attention", "attention", "sliding_attention"):
                raise keys.error("layer_types", f"{kind!r} is not implemented")
        sliding = [kind == "sliding_attention" for kind in kinds]
        if switched and window is None and any(sliding):
            why = "names sliding_attention, but use_sliding_window or sliding_window is off"
            raise keys.error("layer_types", why)
    return tuple(window if slides else None for slides in sliding)


def _windows_by_layer(keys: Keys, layers: int) -> tuple[int | None, ...]:
    first = keys.integer("max_window_layers", 28, minimum=0)
    return _windows(keys, layers, 4096, True, [i >= first for i in range(layers)])


def _per_layer(keys: Keys, key: str, layers: int, what: str) -> list | None:
    """A list with one entry for each layer; None if it is absent or null."""
    values = keys.get(key, None)
    if values is not None and (not isinstance(values, list) or len(values) != layers):
        raise keys.error(key, f"must be a list of num_hidden_layers = {layers} {what}")
    return values


def _rope(
    keys: Keys, max_positions: int, default_theta: float, partial: bool
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
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (inner.number(name) for name in names)
        original = _trained_positions(keys, inner, max_positions)
        scaling = RopeScaling(kind, factor, low, high, original)
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise inner.error("high_freq_factor", "must be above low_freq_factor")
    elif kind == "yarn":
        scaling = _yarn(keys, inner, max_positions)
    elif kind != "default":
        why = f"rope type {kind!r} is not implemented; there are default, linear, llama3 and yarn"
        raise keys.error(where, why)
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
    fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    rounded, gain = inner.boolean("truncate", True), inner.number("attention_factor", natural)
    if fast < slow:
        raise inner.error("beta_fast", "is below beta_slow")
    return Yarn(factor, original, fast, slow, rounded, gain)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN raises attention's temperature (Peng et al. 2023, eq. 22; DeepSeek's mscale)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _mixtral(keys: Keys) -> Fields:
    fields = _llama_family(keys, 131072, kv_heads=8, theta=1e6, norm_eps=1e-5, windows=_windows)
    keys.only("router_jitter_noise", 0)
    size = fields["intermediate_size"]
    experts = _experts(keys, "num_local_experts", 8, 2, size=size, normalised=True)
    return fields | dict(experts=experts)


def _qwen3_moe(keys: Keys) -> Fields:
    windows = functools.partial(_windows, default=4096, switched=True)
    fields = _llama_family(keys, 32768, kv_heads=4, biases=1, qk_norm=True, windows=windows)
    size = keys.integer("moe_intermediate_size", 768)
    normalised = keys.boolean("norm_topk_prob", False)
    experts = _experts(keys, "num_experts", 128, 8, size=size, normalised=normalised)
    layers, step = fields["num_hidden_layers"], keys.integer("decoder_sparse_step", 1)
    dense = keys.get("mlp_only_layers", None) or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise keys.error("mlp_only_layers", f"must be a list of layers from 0 to {layers - 1}")
    dense = {*dense, *(i for i in range(layers) if (i + 1) % step)}
    return fields | dict(experts=experts, dense_layers=tuple(sorted(dense)))


def _olmoe(keys: Keys) -> Fields:
    fields = _llama_family(keys, 4096, **OLMO)
    keys.only("clip_qkv", None)
    size, normalised = fields["intermediate_size"], keys.boolean("norm_topk_prob", False)
    kind = dict(aux_loss=0.01, size=size, normalised=normalised)
    return fields | dict(experts=_experts(keys, "num_experts", 64, 8, **kind))


def _gpt_oss(keys: Keys) -> Fields:
    if not any(keys.raw.get(key) for key in ("rope_scaling", "rope_parameters")):
        rope = dict(rope_type="yarn", factor=32.0, truncate=False)
        rope["original_max_position_embeddings"] = 4096
        keys.raw = keys.raw | {"rope_scaling": rope}

    def windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
        return _windows(keys, layers, 128, sliding=[i % 2 == 0 for i in range(layers)])

    sizes: Fields = dict(kv_heads=8, head_dim=64, theta=150000.0, norm_eps=1e-5, sinks=True)
    fields = _llama_family(keys, 131072, windows=windows, biases=1, biased=True, **sizes)
    keys.choice("hidden_act", ("silu",), "silu")
    limit, gain = keys.number("swiglu_limit", 7.0), keys.number("swiglu_alpha", 1.702)
    kind: Fields = dict(biases=True, scores="softmax_chosen", limit=limit, gain=gain)
    size = fields["intermediate_size"]
    experts = _experts(keys, "num_local_experts", 128, 4, size=size, **kind)
    keys.used |= {"quantization_config", "initial_context_length"}  # of the weights on the Hub
    return fields | dict(experts=experts)


def _deepseek_v3(keys: Keys) -> Fields:
    fields = _llama_family(keys, 4096, biases=1, latent=True)
    heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    if fields["num_key_value_heads"] != heads:
        raise keys.error("num_key_value_heads", f"must be num_attention_heads = {heads}")
    widths = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    widths = [keys.integer(key, default) for key, default in widths.items()]
    latent = Latent(keys.integer("q_lora_rank", 1536, null=True), *widths)
    if fields["attention_out_bias"]:
        raise keys.error("attention_bias", "only false is implemented for this family")
    size = keys.integer("moe_intermediate_size", 2048)
    groups = keys.integer("n_group", 8)
    shared = keys.integer("n_shared_experts", 1, minimum=0, null=True) or 0
    sizes = dict(size=size, shared_size=size * shared, groups=groups)
    router: Fields = dict(
        scores="sigmoid", correction=True, normalised=keys.boolean("norm_topk_prob", True)
    )
    router["scale"] = keys.number("routed_scaling_factor", 2.5)
    router["groups_per_token"] = keys.integer("topk_group", 4)
    experts = _experts(keys, "n_routed_experts", 256, 8, **sizes, **router)
    if experts.number % groups or (groups > 1 and experts.number // groups < 2):
        divisors = [str(g) for g in range(1, experts.number // 2 + 1) if experts.number % g == 0]
        why = f"{experts.number} experts do not divide into groups of two or more"
        raise keys.error("n_group", f"{why}; {', '.join(divisors or ['1'])} would do")
    if experts.groups_per_token > groups:
        raise keys.error("topk_group", f"is above n_group {groups}")
    if experts.per_token > experts.number // groups * experts.groups_per_token:
        raise keys.error("topk_group", "its groups have fewer experts than a token needs")
    keys.choice("scoring_func", ("sigmoid",), "sigmoid")
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    keys.only("moe_layer_freq", 1)
    # Of code and weights on the Hub, and of modules that predict further tokens, which are no part
    # of the model proper: transformers leaves them out too.
    keys.used |= {"quantization_config", "auto_map", "num_nextn_predict_layers", "num_mtp_layers"}
    keys.used |= {"head_dim", "qk_head_dim"}
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


def _phi3(keys: Keys) -> Fields:
    options: Fields = dict(norm_eps=1e-5, partial=True, pad_token=32000)
    fields = _llama_family(keys, 4096, windows=_windows, **options)
    part = keys.number("partial_rotary_factor", _inner_rope(keys).get("partial_rotary_factor", 1.0))
    size = int(fields["head_dim"] * part)
    return fields | dict(
        rotary_size=None if size == fields["head_dim"] else size,
        embedding_dropout=keys.fraction("embd_pdrop", 0.0),
        residual_dropout=keys.fraction("resid_pdrop", 0.0),
    )


def _inner_rope(keys: Keys) -> Fields:
    inner = keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters") or {}
    return inner if isinstance(inner, dict) else {}


def _smollm3(keys: Keys) -> Fields:
    options: Fields = dict(theta=2e6, pad_token=128004, tied=True)
    fields = _llama_family(keys, 32768, kv_heads=4, biases=2, **options)
    layers, every = fields["num_hidden_layers"], keys.integer("no_rope_layer_interval", 4)
    rotated = _per_layer(keys, "no_rope_layers", layers, "numbers")
    rotated = rotated or [(i + 1) % every != 0 for i in range(layers)]
    return fields | dict(
        windows=_windows(keys, layers, switched=True, sliding=[not has for has in rotated]),
        no_rope_layers=tuple(i for i, has in enumerate(rotated) if not has),
    )


def _granite(keys: Keys) -> Fields:
    return _llama_family(keys, 2048, biases=2) | dict(
        attention_scale=keys.number("attention_multiplier", 1.0),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )


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


MISTRAL: Fields = dict(
    positions=131072, kv_heads=8, windows=functools.partial(_windows, default=4096)
)
QWEN: Fields = dict(positions=32768, kv_heads=32, windows=_windows_by_layer)
OLMO: Fields = dict(biases=1, qk_norm=True, whole_qk_norm=True, norm_eps=1e-5, pad_token=1)
# The reader of each family's config, by its model_type.
FAMILIES: dict[str, Callable[[Keys], Fields]] = {
    "gpt2": _gpt2,
    "llama": functools.partial(_llama_family, positions=2048, biases=2),
    "mistral": functools.partial(_llama_family, **MISTRAL),
    "qwen2": functools.partial(_llama_family, **QWEN, qkv_bias=True),
    "qwen3": functools.partial(_llama_family, **QWEN, head_dim=128, biases=1, qk_norm=True),
    "phi3": _phi3,
    "olmo2": functools.partial(_llama_family, **OLMO, positions=2048, norm_after=True),
    "smollm3": _smollm3,
    "granite": _granite,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
}
