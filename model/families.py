"""Model families, each one row of data: its keys, and what it computes though no key says so.

A row has the keys of a config.json. Its values are transformers' defaults of absent keys, and tell what a
key is: a whole number from 1 on (`...` has no default, None may be null), a number above 0, or true or
false. A list has the only value implemented. RULES has other ways to read, by a key's name or the last
word of it: names of activations, dropouts, layers. A function in place of a default reads its key, from
the reader and the key's name; one in place of a field's value computes the field, from the reader. Both
may use the keys that the row has before.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llm_train_bench.model.config_keys import WITHOUT_EFFECT
from llm_train_bench.model.json_keys import Keys
from llm_train_bench.model.shapes import Experts, Latent, LayerSpec, Recurrent, RopeScaling, Yarn

Row = dict[str, Any]
NONE: Row = {}
ALL_LAYERS = range(2**12)
PART, TRAINED = "partial_rotary_factor", "original_max_position_embeddings"
ROPE_TYPES = "default", "linear", "llama3", "yarn"
MROPE = "mrope_section", "mrope_interleaved"  # for text all sections of positions are alike
QK_NORM = "use_qk_norm", "qk_norm", "qk_layernorm"
QUERY_SCALE = "llama_4_scaling_beta"


class Family(NamedTuple):
    """What there is to know of a family's config.json. Fields are ours; a function computes one."""

    keys: Row
    fields: Row = NONE  # of ModelConfig
    experts: Row = NONE  # fields
    recurrent: Row | None = None  # fields; None without recurrent layers
    rope: Row = NONE  # rotary parameters of a file without any
    unread: str = ""  # keys that do not matter to a training step


class Reader(Keys):
    """A family's file, read as its row tells: `reader[key]` is a key's value or its default."""

    def __init__(self, raw: Row, where: str, beside: tuple[str, ...] = ()):
        super().__init__(raw, where)
        if reason := NOT_IMPLEMENTED.get(str(raw.get("model_type"))):
            why = f"{reason} are not implemented; there are {', '.join(FAMILIES)}"
            raise self.error("model_type", why)
        self.model_type = self.choice("model_type", FAMILIES)
        self.family = family = FAMILIES[self.model_type]
        self.values: Row = {}
        self.elsewhere = [*beside]  # keys without effect in other objects of the file
        self.used |= {*family.unread.split()}
        self.has_experts = any(EXPERTS.get(key) == "number" for key in family.keys)
        for key, default in family.keys.items():
            name = self.spelling(key)
            if key in EXPERTS and not self.has_experts:
                self.used.add(name)  # has no meaning
            elif isinstance(default, list):
                self.values[key] = self.only(name, *default)
            elif callable(default):
                self.values[key] = default(self, name)
            else:
                rule = RULES.get(key) or RULES.get(key.split("_")[-1]) or BY_TYPE.get(type(default))
                self.values[key] = (rule or Keys.integer)(self, name, default)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def spelling(self, key: str) -> str:
        """The name of a key in this file, where transformers takes several."""
        return next((name for name in SPELLINGS.get(key, "").split() if name in self.raw), key)

    def fields_of(self, names: dict[str, str]) -> Row:
        """The values of these keys, by our names."""
        return {names[key]: value for key, value in self.values.items() if key in names}

    # Layers.
    def per_layer(self, key: str, *allowed: str | int) -> list | None:
        """A list with one of the allowed entries for each layer; None if absent or null."""
        entries, layers = self.get(key, None), self["num_hidden_layers"]
        if entries is not None:
            why = f"must be a list of num_hidden_layers = {layers} entries"
            self.check(isinstance(entries, list) and len(entries) == layers, key, why)
            why = f"not implemented; there are {', '.join(map(str, allowed))}"
            self.check(all(entry in allowed for entry in entries), key, why)
        return entries

    def layers_of_types(self, key: str, rule: int | str | range) -> list[int]:
        """Layers that layer_types gives a window or a recurrent mixer.

        If it is absent, `rule` tells: a number n, or a key with one, means all but every n-th layer; a
        range, or a key with a list, means those layers.
        """
        recurrent, layers = self.family.recurrent is not None, range(self["num_hidden_layers"])
        types = ("linear_attention", "mamba") if recurrent else ("sliding_attention",)
        entries = self.per_layer(key, *types, "full_attention", "attention")
        if entries is None:
            every = self[rule] if isinstance(rule, str) else rule
            if isinstance(every, int):
                return [layer for layer in layers if (layer + 1) % every]
            return [layer for layer in layers if layer in every]
        chosen = [layer for layer in layers if entries[layer] in types]
        off = "use_sliding_window" in self.values and not self["sliding_window"]
        why = "names sliding_attention, but use_sliding_window or sliding_window is off"
        self.check(not (off and chosen), key, why)
        return chosen

    def window(self, key: str, default: int | None) -> int | None:
        """Positions of the sliding window, unless it is switched off; transformers writes 0 then."""
        on = self.values.get("use_sliding_window", True)
        size = self.integer(key, default, minimum=1 if on else 0, null=True)
        return size if on else None

    def no_rope_layers(self, key: str) -> list[int]:
        """Layers of SmolLM3 that do not rotate; its key has a 0 for them."""
        layers, every = range(self["num_hidden_layers"]), self["no_rope_layer_interval"]
        rotates = self.per_layer(key, 0, 1) or [(layer + 1) % every for layer in layers]
        return [layer for layer in layers if not rotates[layer]]

    def dense_between(self, key: str) -> list[int]:
        """The layers listed, and those that decoder_sparse_step passes over."""
        layers, dense = range(self["num_hidden_layers"]), self.get(key, None) or []
        fits = isinstance(dense, list) and all(type(i) is int and i in layers for i in dense)
        self.check(fits, key, f"must be a list of layers from 0 to {layers[-1]}")
        return [i for i in layers if i in dense or (i + 1) % self["decoder_sparse_step"]]

    def dense_by_name(self, key: str) -> list[int]:
        """The layers of Hy3 that are named dense: the first, unless the list says otherwise."""
        kinds = self.per_layer(key, "dense", "sparse") or ["dense"]
        return [layer for layer, kind in enumerate(kinds) if kind == "dense"]

    def nemotron_layers(self, key: str) -> list[tuple[str | None, str | None]]:
        """The mixer or MLP of each layer; older files have a text with a letter for each."""
        older = self.get("hybrid_override_pattern", None)
        names = self.get(key, "ME*-" if older is None else older)
        names = names if isinstance(names, list | str) else []
        parts = [NEMOTRON_LAYERS.get(str(name)) for name in names]
        known = len(parts) > 0 and None not in parts
        self.check(known, key, f"must be a list of {', '.join(NEMOTRON_LAYERS)}")
        self.has_experts = (None, "experts") in parts
        return parts

    def experts_if_any(self, key: str) -> int:
        """Their number in a layer; with 0 the shared MLP is the only one."""
        number = self.integer(key, 8, minimum=0, null=True) or 0
        self.has_experts = number > 0
        return number

    def unrotated_layers(self, key: str) -> range:
        """All layers, unless position_embedding_type is rope."""
        rotates = self.get(key, None) is not None and self.choice(key, ("rope", "nope")) == "rope"
        return range(0) if rotates else ALL_LAYERS

    def mamba_head_size(self, key: str) -> int:
        """Elements of a head; all heads together have mamba_expand times the model's width."""
        heads, inner = self["mamba_n_heads"], self["mamba_expand"] * self["hidden_size"]
        why = f"must divide mamba_expand x hidden_size = {inner}"
        self.check(inner % heads == 0, "mamba_n_heads", why)
        return inner // heads if self.get(key, "auto") == "auto" else self.only(key, inner // heads)

    def step_limits(self, key: str) -> tuple[float, float]:
        """The bounds of Mamba2's steps; infinity may be an object in JSON."""
        limits = self.get(key, None) or (0.0, math.inf)
        try:
            least, most = (math.inf if isinstance(x, dict) else float(x) for x in limits)
        except (TypeError, ValueError):
            raise self.error(key, "must be a list of two numbers") from None
        return least, most

    def gemma_activation(self, key: str) -> str:
        """Gemma's; its first files say gelu and mean the approximation, as in transformers."""
        name = self.activation(key, "gelu_pytorch_tanh")
        return "gelu_tanh" if name == "gelu" else name

    def padding_row(self, key: str, default: int | None) -> int | None:
        """The row of the embedding that stays 0; a negative one counts from the end."""
        vocab = self["vocab_size"]
        token = self.integer(key, default, minimum=-vocab, null=True)
        self.check(
            token is None or token < vocab, key, f"row {token} is outside vocab_size {vocab}"
        )
        return None if token is None else token % vocab

    def left_out_modules(self, key: str, default: int) -> int:
        """The number of modules of multi-token prediction, by whatever names the file has."""
        numbers = [self.integer(key, minimum=0, null=True) for key in MTP_KEYS if key in self.raw]
        return max((number or 0 for number in numbers), default=default)

    # What follows from several keys.
    def read(self) -> Row:
        """The fields of a ModelConfig."""
        family, bias = self.family, self.values.get("attention_bias", False)
        fields = PLAIN | dict(qkv_bias=bias, attention_out_bias=bias) | self.fields_of(MODEL)
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        fields["intermediate_size"] = fields["intermediate_size"] or 4 * hidden  # GPT-2's default
        fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
        if not fields.get("head_dim"):
            why = f"is no multiple of {heads} attention heads; change one of them or give head_dim"
            self.check(hidden % heads == 0, "hidden_size", why)
            fields["head_dim"] = hidden // heads
        if "rope_theta" in self.values:
            fields |= self.rope(fields["head_dim"])
        if family.recurrent is not None:
            fields["recurrent"] = self.recurrent(dict(activation=fields["activation"]))
        if self.has_experts:
            fields["experts"] = self.experts()
        fields |= {name: x(self) if callable(x) else x for name, x in family.fields.items()}
        if fields["qk_norm"]:  # a file may say so
            self.used |= {key for key in QK_NORM if self.raw.get(key) is True}
        fields["layers"] = self.layers(fields)
        return fields

    def layers(self, fields: Row) -> tuple[LayerSpec, ...]:
        """The table of layers; the lists of layers are taken out of the fields."""
        dense, unrotated = fields.pop("dense_layers", ()), fields.pop("no_rope_layers", ())
        before, after = fields.pop("pre_norm"), fields.pop("post_norm")
        usual = "latent" if "latent" in fields else "attention"
        special = usual if self.family.recurrent is None else "recurrent"
        local = "local" if "local_rope_theta" in fields else "global"
        special_layers, table = self.values.get("layer_types", ALL_LAYERS), []
        layers = range(fields["num_hidden_layers"])
        mixers = [special if layer in special_layers else usual for layer in layers]
        dense = dense if self.has_experts else layers
        mlps = ["dense" if layer in dense else "experts" for layer in layers]
        parts = self.values.get("layers_block_type") or zip(mixers, mlps, strict=True)
        for layer, (mixer, mlp) in enumerate(parts):
            window = self.values.get("sliding_window") if layer in special_layers else None
            rotates = "global" if window is None else local
            rope = None if layer in unrotated else rotates
            table.append(LayerSpec(mixer, mlp, window, rope, before, after))
        return tuple(table)

    def rope(self, head_dim: int) -> Row:
        """Rotary frequencies, and what of heads they turn and how they scale attention."""
        fields: Row = {}
        if "sliding_attention" in self.family.rope:
            inner, fields["local_rope_theta"] = self.two_ropes()
        else:
            where = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
            inner = self.object(where, self.family.rope)
        self.used |= {"rope_scaling", "rope_parameters"}
        inner.used |= {"rope_type", "type", PART, "max_position_embeddings", *MROPE}
        inner.used |= {QUERY_SCALE} & {*self.family.rope}
        theta = inner.number("rope_theta", self["rope_theta"])
        kind = inner.raw.get("rope_type") or inner.raw.get("type") or "default"
        why = f"{kind!r} is not implemented; there are {', '.join(ROPE_TYPES)}"
        inner.check(kind in ROPE_TYPES, "rope_type", why)
        scaling = self.rope_scaling(kind, inner)
        inner.check(kind != "yarn" or theta > 1, "rope_type", "needs a rope_theta above 1")
        for key in inner.leftover():
            known = kind == "yarn" and key in WITHOUT_EFFECT
            inner.check(known, key, f"has no meaning for rope type {kind!r}")
            self.elsewhere.append(inner.prefix + key)
        fields |= dict(rope_theta=theta, rope_scaling=scaling)
        fields["rotary_size"] = self.rotary_size(head_dim, inner)
        if inner.raw.get(QUERY_SCALE) is not None:  # queries at late positions grow
            trained = self.integer(TRAINED, None) if kind in ("yarn", "llama3") else None
            fields["query_scale"] = inner.number(QUERY_SCALE), trained or inner.integer(TRAINED)
        if "kv_lora_rank" in self.values:
            fields |= self.latent(scaling, inner)
        return fields

    def two_ropes(self) -> tuple[Keys, float]:
        """Rotary parameters of layers without a window, and the base of those with one.

        They are those of rope_parameters by kind of layer, or are in older keys.
        """
        by_kind, old = self.object("rope_parameters"), self.object("rope_scaling")
        full, slides = by_kind.object("full_attention"), by_kind.object("sliding_attention")
        why = "must hold full_attention and sliding_attention for this family"
        self.check(not by_kind.leftover(), "rope_parameters", why)
        slides.choice("rope_type", ("default",), "default")
        default = self.values.get("rope_local_base_freq", self.family.rope["sliding_attention"])
        theta = slides.number("rope_theta", default)
        for extra in slides.leftover():
            raise slides.error(extra, "is not implemented for layers with windows")
        self.check("type" not in old.raw, "rope_scaling", "must have a rope_type for this family")
        return Keys(full.raw | old.raw, self.where, by_kind.prefix), theta

    def rope_scaling(self, kind: str, inner: Keys) -> RopeScaling | Yarn | None:
        """How rotary frequencies are stretched, by the rope type."""
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling(kind, inner.number("factor"))
        # As in transformers, a value at the top level overrides the one inside.
        positions = self["max_position_embeddings"]
        inside = inner.integer(TRAINED, positions)
        original = self.integer(TRAINED, None) or inside
        if kind == "llama3":
            factor = inner.number("factor")
            low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
            inner.check(high > low, "high_freq_factor", "must be above low_freq_factor")
            return RopeScaling(kind, factor, low, high, original)
        factor = inner.number("factor", positions / original)
        gain = yarn_mscale(factor)
        mscales = [inner.get(key, None) for key in ("mscale", "mscale_all_dim")]
        if all(mscales):
            gain = yarn_mscale(factor, inner.number("mscale"))
            gain /= yarn_mscale(factor, inner.number("mscale_all_dim"))
        fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
        inner.check(fast >= slow, "beta_fast", "is below beta_slow")
        rounded, gain = inner.boolean("truncate", True), inner.number("attention_factor", gain)
        return Yarn(factor, original, fast, slow, rounded, gain)

    def rotary_size(self, head_dim: int, inner: Keys) -> int | None:
        """Rotated elements of a head; None if that is all. The part in `inner` wins."""
        if PART not in self.values:
            for keys in (self, inner):
                part = keys.number(PART, 1.0, null=keys is self)
                keys.check(part == 1.0, PART, "only 1 is implemented")
            return None
        part = self[PART]
        if PART not in self.raw and self.values.get("rotary_dim"):  # of MiniMax-M2
            part = self["rotary_dim"] / head_dim
        turned = int(head_dim * inner.number(PART, part, null=False))
        if "kv_lora_rank" in self.values:
            fits = PART not in inner.raw or turned == self["qk_rope_head_dim"]
            inner.check(fits, PART, "must be that of qk_rope_head_dim")
            return None
        why = f"would rotate {turned} of a head's {head_dim} elements"
        self.check(2 <= turned <= head_dim, PART, why)
        return None if turned == head_dim else turned

    def latent(self, scaling: RopeScaling | Yarn | None, inner: Keys) -> Row:
        """Attention through narrow layers, and its scale, which YaRN raises."""
        heads = self["num_attention_heads"]
        fits = self["num_key_value_heads"] in (None, heads)
        self.check(fits, "num_key_value_heads", f"must be num_attention_heads = {heads}")
        latent, scale = Latent(**self.fields_of(LATENT)), self["head_dim"] ** -0.5
        if isinstance(scaling, Yarn):
            scale *= yarn_mscale(scaling.factor, inner.raw.get("mscale_all_dim") or 0.0) ** 2
        pairs = "neighbours" if self["rope_interleave"] else "halves"
        return dict(latent=latent, attention_scale=scale, rope_pairs=pairs)

    def recurrent(self, fields: Row) -> Recurrent:
        """The recurrent layers; the groups of Mamba2 are also those of its norm."""
        fields = fields | self.fields_of(RECURRENT) | (self.family.recurrent or NONE)
        if not fields["delta"]:
            fields["norm_groups"] = fields["groups"]
        if "time_step_limit" in self.values:
            fields["least_step"], fields["most_step"] = self["time_step_limit"]
        key = next(key for key in self.values if RECURRENT.get(key) == "heads")
        groups = "linear_num_key_heads" if fields["delta"] else f"the {fields['groups']} groups"
        self.check(fields["heads"] % fields["groups"] == 0, key, f"is not a multiple of {groups}")
        return Recurrent(**fields)

    def experts(self) -> Experts:
        """The experts of a layer, which may be chosen from the best groups."""
        fields = self.fields_of(EXPERTS) | self.family.experts
        fields.setdefault("size", self["intermediate_size"])
        shared = self.values.get("n_shared_experts", self.values.get("num_shared_experts")) or 0
        shared_size = self.values.get("shared_intermediate_size", shared * fields["size"])
        fields.setdefault("shared_size", shared_size)
        fields["correction"] = fields.get("scores") == "sigmoid"
        if not self["output_router_logits"]:
            fields["aux_loss"] = 0.0  # as in transformers
        experts = Experts(**fields)
        number, groups, per_token = experts.number, experts.groups, experts.per_token
        key = next(self.spelling(key) for key in self.values if EXPERTS.get(key) == "number")
        self.check(per_token <= number, "num_experts_per_tok", f"is above {key} {number}")
        allowed = experts.correction or not experts.correction_rate
        self.check(allowed, "router_bias_update_rate", "this family's router has no such bias")
        divides = groups == 1 or (number % groups == 0 and groups < number)
        self.check(divides, "n_group", f"must divide {number} experts into groups of two or more")
        best = experts.groups_per_token
        fits = best <= groups and per_token <= number // groups * best
        why = f"must be at most n_group {groups}, and its groups need {per_token} experts"
        self.check(fits, "topk_group", why)
        return experts


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN raises attention's temperature (Peng et al. 2023, eq. 22; DeepSeek's mscale)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def by_key(**keys_of_field: str) -> dict[str, str]:
    """The field of each key."""
    return {key: field for field, keys in keys_of_field.items() for key in keys.split()}


def open_reader(raw: Row, where: str) -> Reader:
    """The reader of a config.json; of its text_config in a model of text and images, if it is known.

    As in transformers, the whole file says whether embeddings are tied, if it says so.
    """
    if "arch_name" in raw and "model_type" not in raw:
        return Reader(from_first_dialect(raw, where), where)
    text, tied = raw.get("text_config"), "tie_word_embeddings"
    if not isinstance(text, dict) or str(text.get("model_type")) not in FAMILIES:
        return Reader(raw, where)
    if str(raw.get("model_type")) in FAMILIES:
        return Reader(raw, where)  # which refuses text_config
    beside = Keys({key: value for key, value in raw.items() if key not in text}, where)
    beside.used |= {"model_type", "text_config", tied}
    return Reader(text | {key: raw[key] for key in (tied,) if key in raw}, where, beside.unknown())


def from_first_dialect(raw: Row, where: str) -> Row:
    """The config of the first llm-train-bench (`arch_name`, `d_embd`, ...) as Hugging Face has it.

    Its GPT has no dropout. A Llama's `d_hid` defaults to a width of `ffn_mult` and `ffn_factor`.
    """
    keys = Keys(raw, where)
    kind, hidden = keys.choice("arch_name", ("gpt", "llama", "mistral")), keys.integer("d_embd")
    factor, multiple = keys.number("ffn_mult", 1.0), keys.integer("ffn_factor", 256)
    given = {key: raw[key] for key in keys.leftover() if raw[key] is not None}
    if kind == "gpt":
        names = FIRST_DIALECT | dict(d_hid="n_inner")
        defaults = dict(model_type="gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    else:
        names, width = FIRST_DIALECT, int(int(8 * hidden / 3) * factor)
        defaults = dict(model_type=kind, d_hid=-(-width // multiple) * multiple, norm_eps=1e-5)
        defaults |= dict(n_kv_heads=None, window_size=None)
    renamed = {names.get(key, key): value for key, value in (defaults | given).items()}
    return renamed | dict(hidden_size=hidden)


# fmt: off
# How keys are read that their default does not tell, by a key or its last word.
BY_TYPE: dict[type, Callable[..., Any]] = {bool: Keys.boolean, float: Keys.number}
RULES: dict[str, Callable[..., Any]] = dict.fromkeys(("dropout", "pdrop", "rate"), Keys.fraction)
RULES |= dict.fromkeys(("act", "activation", "function"), Keys.activation)
RULES |= dict.fromkeys(("multiplier", PART), partial(Keys.number, null=False))
RULES |= dict.fromkeys("num_key_value_heads head_dim q_lora_rank".split(),
                       partial(Keys.integer, null=True))
RULES |= dict(
    sliding_window=Reader.window, layer_types=Reader.layers_of_types, pad_token_id=Reader.padding_row,
    n_shared_experts=partial(Keys.integer, null=True, minimum=0),
    num_nextn_predict_layers=Reader.left_out_modules,
    first_k_dense_replace=lambda *read: range(Keys.integer(*read, minimum=0)),
    max_window_layers=lambda *read: range(Keys.integer(*read, minimum=0), len(ALL_LAYERS)),
    router_aux_loss_coef=partial(Keys.fraction, below=1e6, to="on"),
    query_pre_attn_scalar=lambda *read: Keys.number(*read) ** -0.5,
    logits_scaling=lambda *read: 1 / Keys.number(*read, null=False))
# Names that transformers takes for a key, the strongest first.
MAMBA_SPELLINGS = dict(
    time_step_min="mamba_dt_min", n_groups="mamba_n_groups", conv_kernel="mamba_d_conv",
    chunk_size="mamba_chunk_size", use_conv_bias="mamba_conv_bias")
SPELLINGS = MAMBA_SPELLINGS | dict(
    n_embd="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
    n_positions="max_position_embeddings", num_experts="num_experts num_local_experts",
    num_local_experts="num_local_experts num_experts",
    n_routed_experts="n_routed_experts num_experts num_local_experts")
# The number of modules of multi-token prediction.
MTP_KEYS = "num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers num_mtp_modules".split()
# The fields of ModelConfig, Latent, Recurrent and Experts, with the keys that give them.
MODEL = by_key(
    **{name: name for name in """vocab_size tie_word_embeddings num_key_value_heads head_dim mlp_bias
       qkv_bias attention_out_bias initializer_range pad_token_id""".split()},
    hidden_size="hidden_size n_embd", num_hidden_layers="num_hidden_layers n_layer",
    num_attention_heads="num_attention_heads n_head", intermediate_size="intermediate_size n_inner",
    max_position_embeddings="max_position_embeddings n_positions", qk_norm="use_qk_norm",
    activation="hidden_act hidden_activation mlp_hidden_act activation_function",
    norm_eps="rms_norm_eps layer_norm_epsilon", embedding_dropout="embd_pdrop",
    residual_dropout="resid_pdrop residual_dropout", attention_dropout="attn_pdrop attention_dropout",
    residual_scale="residual_multiplier", attention_scale="attention_multiplier query_pre_attn_scalar",
    embedding_scale="embedding_multiplier", logit_scale="logits_scaling",
    dense_layers="first_k_dense_replace mlp_only_layers mlp_layer_types",
    no_rope_layers="no_rope_layers position_embedding_type", mtp_layers="num_nextn_predict_layers")
LATENT = by_key(q_rank="q_lora_rank", kv_rank="kv_lora_rank", nope_dim="qk_nope_head_dim",
                rope_dim="qk_rope_head_dim", value_dim="v_head_dim")
RECURRENT = by_key(
    groups="linear_num_key_heads n_groups mamba_n_groups",
    state="linear_key_head_dim ssm_state_size mamba_d_state", conv_bias="use_conv_bias mamba_conv_bias",
    heads="linear_num_value_heads mamba_num_heads mamba_n_heads", least_step="time_step_min",
    head_dim="linear_value_head_dim mamba_head_dim mamba_d_head", bias="use_bias mamba_proj_bias",
    kernel="linear_conv_kernel_dim conv_kernel mamba_d_conv", chunk="chunk_size mamba_chunk_size",
    activation="mamba_hidden_act")
EXPERTS = by_key(
    number="num_experts num_local_experts n_routed_experts", per_token="num_experts_per_tok",
    size="moe_intermediate_size", scores="scoring_func", normalised="norm_topk_prob", groups="n_group",
    shared_size="shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    scale="routed_scaling_factor router_scaling_factor", groups_per_token="topk_group",
    correction_rate="router_bias_update_rate", aux_loss="router_aux_loss_coef", limit="swiglu_limit",
    gain="swiglu_alpha", latent="moe_latent_size")
# Keys of the first llm-train-bench's dialect, and those that they become.
FIRST_DIALECT = dict(
    n_layers="num_hidden_layers", n_heads="num_attention_heads", n_kv_heads="num_key_value_heads",
    max_seq_len="max_position_embeddings", d_hid="intermediate_size", norm_eps="rms_norm_eps",
    rope_base="rope_theta", window_size="sliding_window")

# Rows and fields that several families have.
PLAIN: Row = dict(
    gated_mlp=True, rms_norm=True, learned_positions=False, qk_norm=False, pre_norm=True, post_norm=False,
    mlp_bias=False, embedding_dropout=0.0, residual_dropout=0.0)
SHAPE: Row = dict(
    hidden_size=..., num_attention_heads=..., num_hidden_layers=..., head_dim=None, vocab_size=...,
    max_position_embeddings=2048, num_key_value_heads=None, intermediate_size=...,
    tie_word_embeddings=False, attention_dropout=0.0, initializer_range=0.02, pad_token_id=None)
LLAMA: Row = SHAPE | dict(rope_theta=1e4, hidden_act="silu", rms_norm_eps=1e-6)
BIAS: Row = dict(attention_bias=False)
BIASED: Row = BIAS | LLAMA
BIASES: Row = BIASED | dict(mlp_bias=False)
SIZES: Row = dict(max_position_embeddings=131072, num_key_value_heads=8)
SWITCHED: Row = dict(max_position_embeddings=32768, use_sliding_window=False, sliding_window=4096)
SPARSE: Row = dict(decoder_sparse_step=1, mlp_only_layers=Reader.dense_between)
ROUTER: Row = dict(num_experts_per_tok=8, router_aux_loss_coef=0.001, router_bias_update_rate=0.0,
                   output_router_logits=False)
QWEN: Row = LLAMA | SWITCHED | dict(
    num_key_value_heads=32, max_window_layers=28, layer_types="max_window_layers")
QWEN_EXPERTS: Row = ROUTER | dict(
    moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512)
OLMO: Row = BIASED | dict(rms_norm_eps=1e-5, pad_token_id=1)
OLMO_FIXED: Row = dict(qk_norm=True, whole_qk_norm=True)
POST_NORM: Row = dict(pre_norm=False, post_norm=True)
GRANITE: Row = BIASES | dict(attention_multiplier=1.0, embedding_multiplier=1.0, residual_multiplier=1.0,
                             logits_scaling=1.0)
GROUPED: Row = ROUTER | dict(
    moe_intermediate_size=2048, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
    routed_scaling_factor=1.0, scoring_func=["sigmoid"], n_routed_experts=128, router_aux_loss_coef=0.0,
    num_nextn_predict_layers=0)
DEEPSEEK: Row = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                     q_lora_rank=1536) | BIASED | GROUPED | dict(
    head_dim=lambda reader, key: reader["qk_nope_head_dim"] + reader["qk_rope_head_dim"],
    attention_bias=[False], max_position_embeddings=4096, topk_method=["noaux_tc"], moe_layer_freq=[1],
    rope_interleave=True, first_k_dense_replace=3, n_group=8, topk_group=4, routed_scaling_factor=2.5,
    n_routed_experts=256, num_nextn_predict_layers=1)
YARN: Row = dict(rope_type="yarn", llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0)
QWEN_HYBRID: Row = BIASED | dict(
    max_position_embeddings=32768, head_dim=256, num_key_value_heads=2, partial_rotary_factor=0.25,
    full_attention_interval=4, attn_output_gate=[True], layer_types="full_attention_interval",
    linear_num_key_heads=16, linear_key_head_dim=128, linear_num_value_heads=32,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, num_nextn_predict_layers=0)
QWEN_FIXED: Row = dict(qk_norm=True, output_gate=True, norm_offset=True)
DELTA_NET: Row = dict(delta=True, chunk=64)
# A layer's mixer and MLP, by its letter or name.
NEMOTRON_LAYERS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), ("recurrent", None)), "E": (None, "experts"),
    **dict.fromkeys(("*", "attention", "full_attention"), ("attention", None)), "-": (None, "dense"),
    "moe": (None, "experts"), "mlp": (None, "dense")}
# Keys that concern its first values, kernels and generation, or that its code does not read.
NEMOTRON_UNREAD = " ".join(MAMBA_SPELLINGS) + """
    num_hidden_layers rope_theta partial_rotary_factor rope_scaling rope_parameters attention_bias
    expand sliding_window num_logits_to_keep mamba_expand time_step_max mamba_dt_max time_step_limit
    mamba_dt_limit time_step_floor mamba_dt_init_floor time_step_rank rescale_prenorm_residual
    use_mamba_kernels mamba_ssm_cache_dtype moe_shared_expert_overlap residual_in_fp32 hidden_dropout
    norm_eps rms_norm_eps mtp_layers_block_type mtp_hybrid_override_pattern attention_head_dim"""
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        dict(n_embd=..., n_layer=..., n_head=..., n_positions=1024, scale_attn_weights=[True],
             scale_attn_by_inverse_layer_idx=[False], embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1,
             vocab_size=50257, n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5,
             tie_word_embeddings=True, initializer_range=0.02),
        dict(gated_mlp=False, rms_norm=False, learned_positions=True, rope_theta=0.0, rope_scaling=None,
             no_rope_layers=ALL_LAYERS, pad_token_id=None, qkv_bias=True, attention_out_bias=True,
             mlp_bias=True)),
    "llama": Family(BIASES),
    "mistral": Family(LLAMA | SIZES | dict(sliding_window=4096)),
    "qwen2": Family(QWEN, dict(qkv_bias=True)),
    "qwen3": Family(BIAS | QWEN | dict(head_dim=128), dict(qk_norm=True)),
    "phi3": Family(LLAMA | dict(
        max_position_embeddings=4096, rms_norm_eps=1e-5, partial_rotary_factor=1.0, sliding_window=None,
        pad_token_id=32000, embd_pdrop=0.0, resid_pdrop=0.0)),
    "olmo2": Family(OLMO, OLMO_FIXED | POST_NORM),
    "smollm3": Family(BIASES | dict(
        max_position_embeddings=32768, num_key_value_heads=4, rope_theta=2e6, pad_token_id=128004,
        tie_word_embeddings=True, no_rope_layer_interval=4, no_rope_layers=Reader.no_rope_layers,
        use_sliding_window=False, sliding_window=None, layer_types="no_rope_layers")),
    "granite": Family(GRANITE),
    "mixtral": Family(
        LLAMA | SIZES | ROUTER | dict(
            rope_theta=1e6, rms_norm_eps=1e-5, sliding_window=None, num_local_experts=8,
            num_experts_per_tok=2),
        experts=dict(normalised=True)),
    "olmoe": Family(OLMO | ROUTER | dict(
        max_position_embeddings=4096, clip_qkv=[None], norm_topk_prob=False, num_experts=64,
        router_aux_loss_coef=0.01), OLMO_FIXED),
    "qwen2_moe": Family(
        QWEN | SPARSE | QWEN_EXPERTS | dict(
            num_key_value_heads=16, qkv_bias=True, moe_intermediate_size=1408, num_experts=60,
            shared_expert_intermediate_size=5632, num_experts_per_tok=4, norm_topk_prob=False,
            max_window_layers=lambda reader, key: range(0, reader.integer(key, 28, minimum=0), 2)),
        experts=dict(shared_gate=True)),
    "qwen3_moe": Family(
        BIASED | SWITCHED | SPARSE | ROUTER | dict(
            num_key_value_heads=4, moe_intermediate_size=768, norm_topk_prob=False, num_experts=128),
        dict(qk_norm=True)),
    "gpt_oss": Family(
        LLAMA | SIZES | ROUTER | dict(
            head_dim=64, attention_bias=True, rope_theta=150000.0, rms_norm_eps=1e-5, sliding_window=128,
            layer_types=2, hidden_act=["silu"], swiglu_limit=7.0, swiglu_alpha=1.702,
            num_local_experts=128, num_experts_per_tok=4),
        dict(sinks=True), experts=dict(biases=True, scores="softmax_chosen"),
        rope=dict(rope_type="yarn", factor=32.0, truncate=False, **{TRAINED: 4096})),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), Family(DEEPSEEK, unread="head_dim")),
    "glm4_moe": Family(
        BIASED | SIZES | GROUPED | dict(
            rms_norm_eps=1e-5, partial_rotary_factor=0.5, use_qk_norm=False, first_k_dense_replace=1,
            moe_intermediate_size=1408, num_nextn_predict_layers=1),
        dict(attention_out_bias=False)),
    "olmo3": Family(
        OLMO | dict(rope_theta=5e5, sliding_window=4096, layer_types=4),
        OLMO_FIXED | POST_NORM, rope=dict(sliding_attention=5e5)),
    "ministral3": Family(
        LLAMA | dict(max_position_embeddings=262144, num_key_value_heads=8, head_dim=128,
                     rms_norm_eps=1e-5, pad_token_id=11, sliding_window=None),
        rope=YARN | dict(rope_theta=1e6, factor=16.0, **{TRAINED: 16384})),
    "mistral4": Family(
        DEEPSEEK | dict(
            max_position_embeddings=1048576, num_key_value_heads=32, pad_token_id=11,
            intermediate_size=12288, kv_lora_rank=256, qk_nope_head_dim=64, q_lora_rank=1024,
            head_dim=lambda reader, key:
                reader.only(key, reader["qk_nope_head_dim"] + reader["qk_rope_head_dim"]),
            partial_rotary_factor=1.0, first_k_dense_replace=0, n_group=1, topk_group=1,
            routed_scaling_factor=1.0, n_routed_experts=128, scoring_func=["softmax"],
            num_experts_per_tok=4, num_nextn_predict_layers=[0]),
        rope=YARN | dict(rope_theta=1e4, factor=128.0, **{TRAINED: 8192}),
        unread="head_dim"),
    "minimax_m2": Family(
        LLAMA | ROUTER | dict(
            max_position_embeddings=196608, num_key_value_heads=8, head_dim=128, rope_theta=5e6,
            rotary_dim=None, partial_rotary_factor=1.0, intermediate_size=1536,
            use_qk_norm=[True], qk_norm_type=["per_layer"], scoring_func=["sigmoid"],
            shared_intermediate_size=[0], use_routing_bias=[True], num_local_experts=256,
            num_nextn_predict_layers=0),
        dict(whole_qk_norm=True), experts=dict(normalised=True)),
    "hy_v3": Family(
        BIASES | SIZES | ROUTER | dict(
            head_dim=128, rope_theta=11158840.0, rms_norm_eps=1e-5, initializer_range=0.006,
            intermediate_size=13312, first_k_dense_replace=[1], mlp_layer_types=Reader.dense_by_name,
            qk_norm=[True], moe_intermediate_size=1536, num_shared_experts=1, route_norm=[True],
            moe_router_use_sigmoid=[True], moe_router_enable_expert_bias=[True],
            expert_hidden_dim=lambda reader, key: reader.only(key, reader["moe_intermediate_size"]),
            router_scaling_factor=2.826, num_experts=192, router_aux_loss_coef=0.0,
            num_nextn_predict_layers=0),
        dict(qk_norm=True), experts=dict(scores="sigmoid", normalised=True)),
    "gemma": Family(
        BIAS | LLAMA | dict(
            vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=16, head_dim=256, max_position_embeddings=8192,
            tie_word_embeddings=True, pad_token_id=0, hidden_act=Reader.gemma_activation),
        dict(norm_offset=True, embedding_scale=lambda reader: reader["hidden_size"] ** 0.5),
        unread="hidden_activation"),
    "gemma3_text": Family(  # its files on the Hub leave out what is at its defaults
        BIAS | SHAPE | dict(
            vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
            num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131072,
            hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, pad_token_id=0,
            rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4, query_pre_attn_scalar=256.0,
            sliding_window=4096, sliding_window_pattern=6, layer_types="sliding_window_pattern"),
        dict(qk_norm=True, post_norm=True, norm_offset=True,
             embedding_scale=lambda reader: reader["hidden_size"] ** 0.5),
        rope=dict(sliding_attention=1e4)),
    "seed_oss": Family(BIASES | dict(
        max_position_embeddings=524288, num_key_value_heads=8, head_dim=128, attention_bias=True,
        pad_token_id=1, intermediate_size=27648, attention_dropout=0.1, attention_out_bias=False,
        residual_dropout=0.1)),
    "qwen3_next": Family(
        QWEN_HYBRID | SPARSE | QWEN_EXPERTS | dict(
            intermediate_size=5632, norm_topk_prob=True, num_experts_per_tok=10,
            num_nextn_predict_layers=1),
        QWEN_FIXED, experts=dict(shared_gate=True), recurrent=DELTA_NET),
    "qwen3_5_text": Family(
        QWEN_HYBRID | dict(num_key_value_heads=4), QWEN_FIXED, recurrent=DELTA_NET,
        unread="mlp_only_layers"),
    "qwen3_5_moe_text": Family(
        QWEN_HYBRID | QWEN_EXPERTS | dict(intermediate_size=1, num_experts=256),  # no layer has that MLP
        QWEN_FIXED, experts=dict(normalised=True, shared_gate=True), recurrent=DELTA_NET,
        unread="mlp_only_layers"),
    "nemotron_h": Family(
        dict(layers_block_type=Reader.nemotron_layers) | SHAPE | GROUPED | dict(
            num_hidden_layers=lambda reader, key: len(reader["layers_block_type"]),  # as in transformers
            max_position_embeddings=4096, num_key_value_heads=8, head_dim=128, intermediate_size=21504,
            mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, time_step_min=0.001,
            pad_token_id=lambda reader, key: None,  # no row of its embedding stays 0
            n_groups=8, ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=64, conv_kernel=4,
            chunk_size=128, mamba_hidden_act="silu", use_conv_bias=True,
            mamba_proj_bias=[False], use_bias=False,  # of both, the second counts
            mlp_bias=lambda reader, key:
                reader.only(key, False) if reader.has_experts else reader.boolean(key, False),
            tie_word_embeddings=[False], moe_intermediate_size=7688, n_routed_experts=8,
            num_experts_per_tok=2, moe_shared_expert_intermediate_size=7688, moe_latent_size=None),
        dict(gated_mlp=False, rope_theta=1e4, rope_scaling=None, no_rope_layers=ALL_LAYERS),
        experts=dict(gated=False), recurrent=dict(delta=False), unread=NEMOTRON_UNREAD),
    "granitemoehybrid": Family(
        dict(num_local_experts=Reader.experts_if_any) | GRANITE | ROUTER | dict(
            num_experts_per_tok=2, shared_intermediate_size=1024,
            layer_types=lambda reader, key: reader.layers_of_types(
                "layers_block_type" if "layers_block_type" in reader.raw else key, ALL_LAYERS),
            mamba_n_heads=128, position_embedding_type=Reader.unrotated_layers,
            mamba_expand=2, mamba_d_head=Reader.mamba_head_size, time_step_limit=Reader.step_limits,
            mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_chunk_size=256,
            mamba_conv_bias=True, mamba_proj_bias=False),
        dict(mlp_bias=False, intermediate_size=lambda reader:
                 reader["intermediate_size" if reader.has_experts else "shared_intermediate_size"]),
        experts=dict(scores="softmax_chosen"),
        recurrent=dict(delta=False)),
}
# fmt: on

# Families that users ask for and that compute what is not implemented, with what that is.
NOT_IMPLEMENTED = {
    "gemma2": "soft-capped scores and logits",
    "deepseek_v2": "groups scored by their maximum",
    "llama4": "chunked attention",
    "phimoe": "sparsemixer routing",
}
