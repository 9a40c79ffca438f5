"""How the config.json of each model family is read: its keys to the fields of ModelConfig."""

import functools
import math
from collections.abc import Callable
from typing import Any

from llm_train_bench.model.json_keys import Keys, kind_of
from llm_train_bench.model.shapes import Experts, Latent, Recurrent, RopeScaling, Yarn

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
    partial: float | None = None,
    latent: bool = False,
    size: int | None = None,
    activation: str = "hidden_act",
    norm_key: str = "rms_norm_eps",
    std: float = 0.02,
    **fixed: Any,
) -> Fields:
    """A decoder with RMS norms, rotary embeddings and a gated MLP.

    `positions`, `kv_heads`, `head_dim`, `theta`, `norm_eps`, `biased` (for attention_bias), `pad_token`
    and `tied` are the family's defaults of absent keys. `biases` 1 means that it has attention_bias, 2
    that it has mlp_bias too; `windows` reads its sliding windows. `partial` is the default of a head's
    rotated part, where the family has such a key. With `latent` it reads all sizes of heads.
    `size` and `std` are defaults of intermediate_size and initializer_range; `activation` and `norm_key`
    name keys. `fixed` fields have no key.
    """
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    # Absent and null differ in transformers: absent takes the family's default, null the head count.
    head_dim = 1 if latent else keys.integer("head_dim", head_dim, null=True)
    bias = biases > 0 and keys.boolean("attention_bias", biased)
    positions = keys.integer("max_position_embeddings", positions)
    theta, scaling = _rope(keys, positions, theta, partial is not None)
    words = keys.integer("vocab_size")
    fields = LLAMA | dict(
        vocab_size=words,
        max_position_embeddings=positions,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys.integer("num_key_value_heads", kv_heads, null=True) or heads,
        head_dim=head_dim or keys.divide(hidden, heads),
        intermediate_size=keys.integer("intermediate_size", size or ...),
        activation=keys.activation(activation, "silu"),
        norm_eps=keys.number(norm_key, norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", tied),
        qkv_bias=qkv_bias or bias,
        attention_out_bias=bias,
        mlp_bias=biases > 1 and keys.boolean("mlp_bias", False),
        windows=windows(keys, layers) if windows else (None,) * layers,
        attention_dropout=keys.fraction("attention_dropout", 0.0),
        initializer_range=keys.number("initializer_range", std),
    )
    if partial is not None:
        inner = Keys(_inner_rope(keys), keys.where, "rope_parameters.")
        part = inner.number("partial_rotary_factor", keys.number("partial_rotary_factor", partial))
        turned = int(fields["head_dim"] * part)
        if not (latent or 2 <= turned <= fields["head_dim"]):
            why = f"would rotate {turned} of a head's {fields['head_dim']} elements"
            raise keys.error("partial_rotary_factor", why)
        fields["rotary_size"] = None if turned == fields["head_dim"] else turned
    token = keys.integer("pad_token_id", pad_token, minimum=-words, null=True)
    if token is not None and token < 0:
        token += words  # negative ones count from the end, as torch does
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
    values, kind = keys.get(key, None), str if what == "names" else int
    if values is not None and (
        not isinstance(values, list)
        or len(values) != layers
        or not all(isinstance(value, kind) for value in values)
    ):
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
    inner.used |= {"rope_type", "type", *FAMILY_ROPE_KEYS.get(str(keys.raw.get("model_type")), ())}
    if kind and old and kind != old:
        raise keys.error(where, f"rope_type {kind!r} and type {old!r} disagree")
    kind = kind or old or "default"
    for place in (keys, inner):
        part, null = place.number("partial_rotary_factor", 1.0), partial or place is inner
        if null and place.raw.get("partial_rotary_factor", 1) is None:
            raise place.error("partial_rotary_factor", "must be a number, found null")
        if not partial and part != 1.0:
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
        if theta <= 1:
            place = inner if "rope_theta" in values else keys
            raise place.error("rope_theta", "must be above 1 for rope type 'yarn'")
    elif kind != "default":
        why = f"rope type {kind!r} is not implemented; there are default, linear, llama3 and yarn"
        raise keys.error(where, why)
    if partial:
        inner.used.add("partial_rotary_factor")
    if extra := inner.leftover():
        raise keys.error(where, f"{extra[0]!r} has no meaning for rope type {kind!r}")
    return theta, scaling


# Keys among the rotary parameters that only some families have, and read or need not read: for text all
# sections of positions are alike.
FAMILY_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "qwen3_5_text": ("mrope_section", "mrope_interleaved"),
    "qwen3_5_moe_text": ("mrope_section", "mrope_interleaved"),
    "ministral3": ("llama_4_scaling_beta", "max_position_embeddings"),
    "mistral4": ("llama_4_scaling_beta", "max_position_embeddings"),
}


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
    return fields | dict(
        experts=experts, dense_layers=_dense_layers(keys, fields["num_hidden_layers"])
    )


def _dense_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    """Layers that have an MLP though the model has experts."""
    step, dense = keys.integer("decoder_sparse_step", 1), keys.get("mlp_only_layers", None) or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise keys.error("mlp_only_layers", f"must be a list of layers from 0 to {layers - 1}")
    return tuple(sorted({*dense, *(i for i in range(layers) if (i + 1) % step)}))


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
    return (
        fields
        | _latent_family(keys, fields, (512, 128, 64, 128), 1536)
        | dict(
            experts=_grouped_experts(keys, 256, 8, 2048, (8, 4), 2.5),
            dense_layers=_first_dense(keys, fields["num_hidden_layers"], 3),
        )
    )


def _first_dense(keys: Keys, layers: int, default: int) -> tuple[int, ...]:
    """Layers before the first one with experts."""
    return tuple(range(min(layers, keys.integer("first_k_dense_replace", default, minimum=0))))


def _latent_family(
    keys: Keys, fields: Fields, widths: tuple[int, int, int, int], q_rank: int
) -> Fields:
    """Attention through narrow layers, whose widths are defaults: of keys and values, and of heads."""
    heads = fields["num_attention_heads"]
    if fields["num_key_value_heads"] != heads:
        raise keys.error("num_key_value_heads", f"must be num_attention_heads = {heads}")
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    sizes = [keys.integer(key, default) for key, default in zip(names, widths, strict=True)]
    latent = Latent(keys.integer("q_lora_rank", q_rank, null=True), *sizes)
    if fields["attention_out_bias"]:
        raise keys.error("attention_bias", "only false is implemented for this family")
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    keys.only("moe_layer_freq", 1)
    # Of code and weights on the Hub.
    keys.used |= {"quantization_config", "auto_map", "head_dim", "qk_head_dim"}
    head_dim = latent.nope_dim + latent.rope_dim
    scale, mscale = head_dim**-0.5, _inner_rope(keys).get("mscale_all_dim")
    if isinstance(fields["rope_scaling"], Yarn) and mscale:
        scale *= yarn_mscale(fields["rope_scaling"].factor, mscale) ** 2
    pairs = "neighbours" if keys.boolean("rope_interleave", True) else "halves"
    return dict(head_dim=head_dim, latent=latent, attention_scale=scale, rope_pairs=pairs)


def _grouped_experts(
    keys: Keys,
    number: int,
    per_token: int,
    size: int,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    scores: str = "sigmoid",
    **fields: Any,
) -> Experts:
    """The experts of DeepSeek-V3 and its relatives, which may be chosen from the best groups.

    All but `fields` are defaults of absent keys; `scores` are the family's.
    """
    size = keys.integer("moe_intermediate_size", size)
    shared = keys.integer("n_shared_experts", 1, minimum=0, null=True) or 0
    count, best = keys.integer("n_group", groups[0]), keys.integer("topk_group", groups[1])
    router: Fields = dict(
        scores=scores, correction=scores == "sigmoid", groups=count, groups_per_token=best
    )
    router["normalised"] = keys.boolean("norm_topk_prob", True)
    router["scale"] = keys.number("routed_scaling_factor", scale)
    keys.choice("scoring_func", (scores,), scores)
    fields = dict(size=size, shared_size=size * shared, aux_loss=0.0) | router | fields
    experts = _experts(keys, "n_routed_experts", number, per_token, **fields)
    if experts.number % count or (count > 1 and experts.number // count < 2):
        divisors = [str(g) for g in range(1, experts.number // 2 + 1) if experts.number % g == 0]
        why = f"{experts.number} experts do not divide into groups of two or more"
        raise keys.error("n_group", f"{why}; {', '.join(divisors or ['1'])} would do")
    if best > count:
        raise keys.error("topk_group", f"is above n_group {count}")
    if experts.per_token > experts.number // count * best:
        raise keys.error("topk_group", "its groups have fewer experts than a token needs")
    return experts


def _glm4_moe(keys: Keys) -> Fields:
    options: Fields = dict(norm_eps=1e-5, kv_heads=8, partial=0.5)
    fields = _llama_family(keys, 131072, biases=1, **options)
    return fields | dict(
        attention_out_bias=False,
        qk_norm=keys.boolean("use_qk_norm", False),
        experts=_grouped_experts(keys, 128, 8, 1408),
        dense_layers=_first_dense(keys, fields["num_hidden_layers"], 1),
    )


def _minimax_m2(keys: Keys) -> Fields:
    if (size := keys.integer("rotary_dim", None)) is not None:
        head = keys.integer("head_dim", 128, null=True)
        head = head or keys.divide(keys.integer("hidden_size"), keys.integer("num_attention_heads"))
        keys.raw = {"partial_rotary_factor": size / head} | keys.raw
    options: Fields = dict(kv_heads=8, head_dim=128, theta=5e6, qk_norm=True, whole_qk_norm=True)
    fields = _llama_family(keys, 196608, partial=1.0, size=1536, **options)
    keys.only("router_jitter_noise", 0)
    keys.only("use_qk_norm", True)
    keys.choice("scoring_func", ("sigmoid",), "sigmoid")
    keys.choice("qk_norm_type", ("per_layer",), "per_layer")
    keys.only("shared_intermediate_size", 0)
    keys.only("use_routing_bias", True)
    keys.used |= {"use_mtp", "mtp_transformer_layers"}
    kind: Fields = dict(size=fields["intermediate_size"], scores="sigmoid")
    kind |= dict(correction=True, normalised=True)
    return fields | dict(experts=_experts(keys, "num_local_experts", 256, 8, **kind))


def _hy_v3(keys: Keys) -> Fields:
    options: Fields = dict(
        kv_heads=8, head_dim=128, theta=11158840.0, norm_eps=1e-5, qk_norm=True, std=0.006
    )
    fields = _llama_family(keys, 131072, biases=2, size=13312, **options)
    layers, first = fields["num_hidden_layers"], keys.get("first_k_dense_replace", 1)
    kinds = _per_layer(keys, "mlp_layer_types", layers, "names")
    kinds = kinds or ["dense"] * 1 + ["sparse"] * (layers - 1)
    if {*kinds} - {"dense", "sparse"} or ("first_k_dense_replace" in keys.raw and first != 1):
        raise keys.error("mlp_layer_types", "must name dense or sparse for each layer")
    size, shared = (
        keys.integer("moe_intermediate_size", 1536),
        keys.integer("num_shared_experts", 1),
    )
    for key in ("route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        keys.only(key, True)
    keys.only("expert_hidden_dim", size)
    keys.only("qk_norm", True)
    keys.used.add("enable_moe_fp32_combine")  # a rounding
    kind: Fields = dict(size=size, shared_size=size * shared, scores="sigmoid", correction=True)
    kind |= dict(normalised=True, scale=keys.number("router_scaling_factor", 2.826), aux_loss=0.0)
    return fields | dict(
        experts=_experts(keys, "num_experts", 192, 8, **kind),
        dense_layers=tuple(i for i, kind in enumerate(kinds) if kind == "dense"),
    )


def _two_ropes(keys: Keys, theta: float, local: str | None, local_theta: float) -> float:
    """Leave the rotary parameters of layers without windows in `keys`; return theta of the others.

    They are those of rope_parameters by kind of layer, or are in the older keys, of which `local` has the
    others' theta.
    """
    values = keys.raw.get("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(values, dict) or not {*values} <= {*kinds}:
        raise keys.error("rope_parameters", f"must hold {' and '.join(kinds)} for this family")
    full, slides = ((values.get(kind) or {}) for kind in kinds)
    if not isinstance(full, dict) or not isinstance(slides, dict):
        raise keys.error("rope_parameters", "must hold an object for each kind of layer")
    inner = Keys(slides, keys.where, prefix="rope_parameters.sliding_attention.")
    inner.choice("rope_type", ("default",), "default")
    local_theta = inner.number(
        "rope_theta", keys.number(local, local_theta) if local else local_theta
    )
    if extra := inner.leftover():
        raise inner.error(extra[0], "is not implemented for layers with windows")
    old = keys.raw.get("rope_scaling") or {}
    if not isinstance(old, dict) or "type" in old:
        raise keys.error("rope_scaling", "must be an object with a rope_type for this family")
    full = {"rope_theta": keys.raw.get("rope_theta", theta)} | full | old
    keys.raw = {k: v for k, v in keys.raw.items() if k != "rope_scaling"} | {
        "rope_parameters": full
    }
    return local_theta


def _olmo3(keys: Keys) -> Fields:
    def windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
        return _windows(keys, layers, 4096, sliding=[(i + 1) % 4 != 0 for i in range(layers)])

    local = _two_ropes(keys, 5e5, None, 5e5)
    return _llama_family(
        keys, 2048, **OLMO, windows=windows, norm_after=True, local_rope_theta=local
    )


def _gemma3(keys: Keys) -> Fields:
    every = keys.integer("sliding_window_pattern", 6)

    def windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
        return _windows(keys, layers, 4096, sliding=[(i + 1) % every != 0 for i in range(layers)])

    local = _two_ropes(keys, 1e6, "rope_local_base_freq", 1e4)
    for key, value in GEMMA3_SIZES.items():
        keys.raw = {key: value} | keys.raw
    options: Fields = dict(head_dim=256, pad_token=0, tied=True, activation="hidden_activation")
    keys.raw = {"hidden_activation": "gelu_pytorch_tanh"} | keys.raw
    fields = _llama_family(keys, 131072, biases=1, windows=windows, **options, qk_norm=True)
    return fields | dict(
        norm_around=True,
        norm_offset=True,
        local_rope_theta=local,
        attention_scale=keys.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=fields["hidden_size"] ** 0.5,
    )


# Gemma 3's files on the Hub leave out what is at its defaults.
GEMMA3_SIZES = dict(vocab_size=262208, hidden_size=2304, intermediate_size=9216)
GEMMA3_SIZES |= dict(num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4)


def _query_scale(keys: Keys, yarn: Fields) -> Fields:
    """How far queries at late positions grow; without rotary parameters, the family's `yarn` is taken."""
    if not (keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling")):
        keys.raw = keys.raw | {
            "rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1} | yarn
        }
    rope = _inner_rope(keys)
    if rope.get("llama_4_scaling_beta") is None:
        return {}
    inner = Keys(rope, keys.where, prefix="rope_parameters.")
    trained = keys.integer("original_max_position_embeddings", None)
    if trained is None or (rope.get("rope_type") or rope.get("type")) not in ("yarn", "llama3"):
        trained = inner.integer("original_max_position_embeddings")
    return dict(query_scale=(inner.number("llama_4_scaling_beta"), trained))


def _ministral3(keys: Keys) -> Fields:
    scale = _query_scale(keys, MINISTRAL_ROPE)
    sizes: Fields = dict(kv_heads=8, head_dim=128, norm_eps=1e-5, pad_token=11)
    return _llama_family(keys, 262144, windows=_windows, **sizes) | scale


MINISTRAL_ROPE: Fields = dict(rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384)
MINISTRAL_ROPE |= dict(mscale=1.0, mscale_all_dim=1.0)
MISTRAL4_ROPE = MINISTRAL_ROPE | dict(
    rope_theta=1e4, factor=128.0, original_max_position_embeddings=8192
)


def _mistral4(keys: Keys) -> Fields:
    scale = _query_scale(keys, MISTRAL4_ROPE)
    keys.raw = {"num_key_value_heads": 32} | keys.raw
    sizes: Fields = dict(pad_token=11, size=12288, partial=1.0)
    fields = _llama_family(keys, 1048576, biases=1, latent=True, **sizes)
    latent = _latent_family(keys, fields, (256, 64, 64, 128), 1024)
    keys.only("head_dim", latent["head_dim"])
    part = _inner_rope(keys).get("partial_rotary_factor")
    if part is not None and int(latent["head_dim"] * part) != latent["latent"].rope_dim:
        raise keys.error(
            "rope_parameters", "partial_rotary_factor must be that of qk_rope_head_dim"
        )
    return (
        fields
        | latent
        | scale
        | dict(
            rotary_size=None,
            experts=_grouped_experts(keys, 128, 4, 2048, scores="softmax"),
            dense_layers=_first_dense(keys, fields["num_hidden_layers"], 0),
        )
    )


def _seed_oss(keys: Keys) -> Fields:
    sizes: Fields = dict(kv_heads=8, head_dim=128, pad_token=1, biased=True, size=27648)
    keys.raw = {"attention_dropout": 0.1} | keys.raw
    fields = _llama_family(keys, 524288, biases=2, **sizes)
    return fields | dict(
        attention_out_bias=keys.boolean("attention_out_bias", False),
        residual_dropout=keys.fraction("residual_dropout", 0.1),
    )


def _layer_kinds(keys: Keys, layers: int, full_every: int | None) -> tuple[int, ...]:
    """The layers that have no attention but a recurrent mixer."""
    names = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}
    kinds = _per_layer(keys, "layer_types", layers, "names")
    if kinds is None:
        if full_every is None:
            return tuple(range(layers))
        return tuple(i for i in range(layers) if (i + 1) % full_every)
    for kind in kinds:
        if kind not in names:
            raise keys.error("layer_types", f"{kind!r} is not implemented")
    return tuple(i for i, kind in enumerate(kinds) if names[kind])


def _qwen_hybrid(keys: Keys, experts: str) -> Fields:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet in most layers; `experts` in some layers, all or none."""
    options: Fields = dict(head_dim=256, biases=1, qk_norm=True, partial=0.25)
    options |= dict(
        kv_heads=4 if experts == "none" else 2, size=5632 if experts == "some" else None
    )
    if experts == "all":
        options["size"] = 1  # no layer has such an MLP
    fields = _llama_family(keys, 32768, **options)
    layers = fields["num_hidden_layers"]
    recurrent = Recurrent(
        _layer_kinds(keys, layers, keys.integer("full_attention_interval", 4)),
        delta=True,
        groups=keys.integer("linear_num_key_heads", 16),
        state=keys.integer("linear_key_head_dim", 128),
        heads=keys.integer("linear_num_value_heads", 32),
        head_dim=keys.integer("linear_value_head_dim", 128),
        kernel=keys.integer("linear_conv_kernel_dim", 4),
        chunk=64,
        activation=fields["activation"],
    )
    if recurrent.heads % recurrent.groups:
        raise keys.error("linear_num_value_heads", "is not a multiple of linear_num_key_heads")
    keys.only("attn_output_gate", True)
    keys.used |= {"mamba_ssm_dtype", "mtp_use_dedicated_embeddings"}
    if experts != "some":
        keys.used |= {"mlp_only_layers"}
    fields |= dict(recurrent=recurrent, output_gate=True, norm_offset=True)
    if experts == "none":
        return fields
    dense = _dense_layers(keys, layers) if experts == "some" else ()
    number, per_token = (512, 10) if experts == "some" else (256, 8)
    size = keys.integer("moe_intermediate_size", 512)
    shared = keys.integer("shared_expert_intermediate_size", 512)
    normalised = experts == "all" or keys.boolean("norm_topk_prob", True)
    kind: Fields = dict(size=size, shared_size=shared, normalised=normalised, shared_gate=True)
    kind["experts"] = _experts(keys, "num_experts", number, per_token, **kind)
    return fields | dict(experts=kind["experts"], dense_layers=dense)


def _nemotron_h(keys: Keys) -> Fields:
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    old = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds, pattern = keys.get("layers_block_type", None), keys.get("hybrid_override_pattern", None)
    if kinds is None and isinstance(pattern, str):
        kinds = [letters.get(letter, letter) for letter in pattern]
    kinds = ["linear_attention", "moe", "full_attention", "mlp"] if kinds is None else kinds
    if not isinstance(kinds, list) or not kinds or not all(isinstance(k, str) for k in kinds):
        raise keys.error("layers_block_type", "must be a list of names")
    kinds = [old.get(kind, kind) for kind in kinds]
    if unknown := {*kinds} - {*letters.values()}:
        raise keys.error("layers_block_type", f"{unknown.pop()!r} is not implemented")
    # Deprecated there: the list tells how many.
    keys.raw = keys.raw | {"num_hidden_layers": len(kinds)}
    keys.used |= {"rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters"}
    plain = {k: v for k, v in keys.raw.items() if k not in keys.used or k == "num_hidden_layers"}
    inner = Keys(plain, keys.where)
    options: Fields = dict(kv_heads=8, head_dim=128, norm_eps=1e-5, pad_token=0, size=21504)
    options |= dict(activation="mlp_hidden_act", norm_key="layer_norm_epsilon")
    inner.raw = {"mlp_hidden_act": "relu2"} | inner.raw
    fields = _llama_family(inner, 4096, **options)
    fields["pad_token_id"] = None  # its embedding knows no padding row
    keys.used |= inner.used | {"attention_bias", "sliding_window"}  # its code reads neither
    keys.only("tie_word_embeddings", False)  # never tied there

    def of(kind: str) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(kinds) if name == kind)

    def first(name: str, stronger: str) -> str:
        keys.used |= {name, stronger}
        return stronger if stronger in keys.raw else name

    least = keys.number(first("time_step_min", "mamba_dt_min"), 0.001)
    recurrent = Recurrent(
        of("linear_attention"),
        delta=False,
        groups=keys.integer(first("n_groups", "mamba_n_groups"), 8),
        state=keys.integer("ssm_state_size", 128),
        heads=keys.integer("mamba_num_heads", 128),
        head_dim=keys.integer("mamba_head_dim", 64),
        kernel=keys.integer(first("conv_kernel", "mamba_d_conv"), 4),
        chunk=keys.integer(first("chunk_size", "mamba_chunk_size"), 128),
        activation=keys.activation("mamba_hidden_act", "silu"),
        conv_bias=keys.boolean(first("use_conv_bias", "mamba_conv_bias"), True),
        bias=keys.boolean("use_bias", False),
        norm_groups=keys.integer(first("n_groups", "mamba_n_groups"), 8),
        least_step=least,
    )
    _check_mamba(keys, recurrent, "mamba_num_heads")
    keys.only("mamba_proj_bias", False)
    keys.used |= NEMOTRON_IGNORED
    fields["mlp_bias"] = keys.boolean("mlp_bias", False)
    if not fields["mlp_bias"]:
        keys.used.add("residual_in_fp32")
    fields |= dict(gated_mlp=False, recurrent=recurrent, no_rope_layers=tuple(range(len(kinds))))
    fields |= dict(mlp_alone=(*of("moe"), *of("mlp")), dense_layers=of("mlp"))
    fields["mlp_alone"] = tuple(sorted(fields["mlp_alone"]))
    fields["mixer_alone"] = tuple(sorted((*of("linear_attention"), *of("full_attention"))))
    if not of("moe"):
        keys.used |= {k for k in keys.raw if "expert" in k or "moe_" in k or "group" in k}
        keys.used |= {"norm_topk_prob", "routed_scaling_factor"}
        return fields | dict(dense_layers=())
    if fields["mlp_bias"]:
        raise keys.error("mlp_bias", "only false is implemented with experts")
    shared = keys.integer("moe_shared_expert_intermediate_size", 7688)
    keys.used.add("n_shared_experts")  # one, of that size
    more: Fields = dict(
        gated=False, shared_size=shared, latent=keys.integer("moe_latent_size", None)
    )
    return fields | dict(experts=_grouped_experts(keys, 8, 2, 7688, **more))


# Keys that concern its first values, kernels and generation, or that its code does not read.
NEMOTRON_IGNORED = set(
    """num_logits_to_keep expand mamba_expand time_step_max mamba_dt_max time_step_limit mamba_dt_limit
    time_step_floor mamba_dt_init_floor time_step_rank rescale_prenorm_residual use_mamba_kernels
    mamba_ssm_cache_dtype moe_shared_expert_overlap residual_in_fp32 hidden_dropout norm_eps rms_norm_eps
    mtp_layers_block_type mtp_hybrid_override_pattern attention_head_dim auto_map intermediate_size
    """.split()
)


def _check_mamba(keys: Keys, r: Recurrent, key: str) -> None:
    if r.heads % r.groups:
        raise keys.error(key, f"is not a multiple of the {r.groups} groups")


def _granite_hybrid(keys: Keys) -> Fields:
    if "layers_block_type" in keys.raw:  # another name, which wins
        keys.used.add("layers_block_type")
        keys.raw = keys.raw | {"layer_types": keys.raw["layers_block_type"]}
    fields = _granite(keys)
    layers, hidden = fields["num_hidden_layers"], fields["hidden_size"]
    heads, inner = keys.integer("mamba_n_heads", 128), keys.integer("mamba_expand", 2) * hidden
    size = keys.get("mamba_d_head", "auto")
    size = inner // heads if size == "auto" else keys.integer("mamba_d_head")
    if size * heads != inner:
        raise keys.error(
            "mamba_d_head", f"x mamba_n_heads must be mamba_expand x hidden_size = {inner}"
        )
    limits = keys.get("time_step_limit", None) or (0.0, math.inf)
    try:
        least, most = (math.inf if isinstance(x, dict) else float(x) for x in limits)
    except (TypeError, ValueError):
        raise keys.error("time_step_limit", "must be a list of two numbers") from None
    recurrent = Recurrent(
        _layer_kinds(keys, layers, None),
        delta=False,
        groups=keys.integer("mamba_n_groups", 1),
        state=keys.integer("mamba_d_state", 256),
        heads=heads,
        head_dim=size,
        kernel=keys.integer("mamba_d_conv", 4),
        chunk=keys.integer("mamba_chunk_size", 256),
        activation=fields["activation"],
        conv_bias=keys.boolean("mamba_conv_bias", True),
        bias=keys.boolean("mamba_proj_bias", False),
        norm_groups=keys.integer("mamba_n_groups", 1),
        least_step=least,
        most_step=most,
    )
    _check_mamba(keys, recurrent, "mamba_n_heads")
    keys.raw = {"position_embedding_type": "nope"} | keys.raw
    if keys.raw["position_embedding_type"] is None:
        keys.raw = keys.raw | {"position_embedding_type": "nope"}
    if keys.choice("position_embedding_type", ("rope", "nope")) != "rope":
        fields["no_rope_layers"] = tuple(range(layers))
    shared, number = (
        keys.integer("shared_intermediate_size", 1024),
        keys.get("num_local_experts", 8),
    )
    fields |= dict(recurrent=recurrent, mlp_bias=False)
    if not number:
        keys.used |= {"num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"}
        return fields | dict(intermediate_size=shared)
    kind: Fields = dict(
        size=fields["intermediate_size"], shared_size=shared, scores="softmax_chosen"
    )
    return fields | dict(experts=_experts(keys, "num_local_experts", 8, 2, **kind))


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
    options: Fields = dict(norm_eps=1e-5, partial=1.0, pad_token=32000)
    fields = _llama_family(keys, 4096, windows=_windows, **options)
    return fields | dict(
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
    for key in (
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ):
        if key in keys.raw:
            keys.number(key)  # null is no number there
    return _llama_family(keys, 2048, biases=2) | dict(
        attention_scale=keys.number("attention_multiplier", 1.0),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )


# The number of modules of multi-token prediction, and the families that have them, with its default:
# that of transformers, or of the published files of Qwen3-Next, whose config does not say.
MTP_KEYS = "num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers num_mtp_modules".split()
MTP_FAMILIES = dict(deepseek_v3=1, kimi_k2=1, glm4_moe=1, hy_v3=0, minimax_m2=0, nemotron_h=0)
MTP_FAMILIES |= dict(qwen3_next=1, qwen3_5_text=0, qwen3_5_moe_text=0)
# Those whose modules are not implemented.
MTP_NOT_IMPLEMENTED = "hy_v3", "minimax_m2", "nemotron_h"


# Families that users ask for and that compute what is not implemented, with what that is.
NOT_IMPLEMENTED = {
    "gemma": "norms of 1 + weight and a scaled embedding",
    "gemma2": "soft-capped scores and logits",
    "gemma3": "its vision layers (take its text_config)",
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
    "glm4_moe": _glm4_moe,
    "olmo3": _olmo3,
    "ministral3": _ministral3,
    "mistral4": _mistral4,
    "minimax_m2": _minimax_m2,
    "hy_v3": _hy_v3,
    "gemma3_text": _gemma3,
    "seed_oss": _seed_oss,
    "qwen3_next": functools.partial(_qwen_hybrid, experts="some"),
    "qwen3_5_text": functools.partial(_qwen_hybrid, experts="none"),
    "qwen3_5_moe_text": functools.partial(_qwen_hybrid, experts="all"),
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite_hybrid,
}
