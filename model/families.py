"""The reader of model configs. What it knows of a family is one row of data in families.json.

A row has the keys of a config.json: those of its groups, then its own; of two values the later counts. A
value is transformers' default of an absent key, and tells what the key is: a whole number from 1 on, a
number above 0, or true or false. null is a whole number that need not be there; "required" is one that
must be there; "all" is all layers; a list of one is the only value implemented. RULES has other ways to
read a key: by family and key, by key, or by its last word. A text and a longer list need a rule. A rule
takes the reader, the key's name in the file and its default. It may use the keys that come before.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llm_train_bench.model import config_keys
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
# In families.json two words stand for what JSON has no value for.
WORDS = {"required": ..., "all": ALL_LAYERS}
TABLE = json.loads(
    Path(__file__).with_name("families.json").read_text(),
    object_hook=lambda row: {key: WORDS.get(str(value), value) for key, value in row.items()},
)
# What families compute that users ask for, and that is not implemented.
NOT_IMPLEMENTED: dict[str, str] = TABLE["not_implemented"]
# A layer's mixer and MLP, by its letter or name.
NEMOTRON_LAYERS: dict[str, list[str | None]] = TABLE["nemotron_layers"]


class Family(NamedTuple):
    """A family's row. `fields`, `experts` and `recurrent` have what no key says, by our names."""

    keys: Row
    names: dict[str, str]
    """Of modules in files, each without the prefix of its block. Of a key that ends with a parameter's
    kind it is the whole name; modules of recurrent layers are called `recurrent` here."""
    architecture: str  # the class in transformers
    fields: Row = NONE  # of ModelConfig
    experts: Row = NONE
    recurrent: Row | None = None  # None without recurrent layers
    rope: Row = NONE  # rotary parameters of a file without any
    scales_embedding: bool = False  # by the square root of the model's width
    unread: Sequence[str] = ()  # keys that do not matter to a training step
    note: str = ""


def read_families() -> dict[str, Family]:
    """The rows of families.json, by model_type."""
    families = {}
    for name, row in TABLE["families"].items():
        keys: Row = {}
        for group in row.pop("groups", ()):
            keys |= TABLE["groups"][group]
        names = TABLE["names"]["llama"]
        for part in row.pop("names", ()):
            names = names | (TABLE["names"][part] if isinstance(part, str) else part)
        usual = f"{name.title().replace('_', '')}ForCausalLM"
        defaults = dict(names=names, architecture=usual)
        families[name] = Family(**defaults | row | dict(keys=keys | row.get("keys", NONE)))
    return families


class Reader(Keys):
    """A family's file, read as its row tells: `reader[key]` is a key's value or its default."""

    def __init__(self, raw: Row, where: str, beside: tuple[str, ...] = ()):
        super().__init__(raw, where)
        if reason := NOT_IMPLEMENTED.get(str(raw.get("model_type")).removesuffix("_text")):
            there = f"there are {', '.join(FAMILIES)}"
            raise self.error("model_type", f"{reason}: not implemented; {there}")
        self.model_type = self.choice("model_type", FAMILIES)
        self.family = family = FAMILIES[self.model_type]
        self.values: Row = {}
        self.elsewhere = [*beside]  # keys without effect in other objects of the file
        self.used |= {*family.unread}
        numbers = (key for key in family.keys if config_keys.EXPERTS.get(key) == "number")
        self.experts_key = next(numbers, "")
        self.has_experts = self.experts_key != ""
        for key, default in family.keys.items():
            name = self.spelling(key)
            if key in config_keys.EXPERTS and not self.has_experts:
                self.used.add(name)  # has no meaning
            elif isinstance(default, list):
                self.values[key] = self.only(name, *default)
            else:
                names = f"{self.model_type}.{key}", key, key.split("_")[-1]
                rules = [RULES[name] for name in names if name in RULES]
                rule = rules[0] if rules else BY_TYPE.get(type(default), Keys.integer)
                self.values[key] = rule(self, name, default)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def spelling(self, key: str) -> str:
        """The name of a key in this file, where transformers takes several."""
        return next((name for name in config_keys.SPELLINGS.get(key, ()) if name in self.raw), key)

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

    def no_rope_layers(self, key: str, default: None) -> list[int]:
        """Layers of SmolLM3 that do not rotate; its key has a 0 for them."""
        layers, every = range(self["num_hidden_layers"]), self["no_rope_layer_interval"]
        rotates = self.per_layer(key, 0, 1) or [(layer + 1) % every for layer in layers]
        return [layer for layer in layers if not rotates[layer]]

    def dense_between(self, key: str, default: None) -> list[int]:
        """The layers listed, and those that decoder_sparse_step passes over."""
        layers, dense = range(self["num_hidden_layers"]), self.get(key, None) or []
        fits = isinstance(dense, list) and all(type(i) is int and i in layers for i in dense)
        self.check(fits, key, f"must be a list of layers from 0 to {layers[-1]}")
        return [i for i in layers if i in dense or (i + 1) % self["decoder_sparse_step"]]

    def dense_by_name(self, key: str, default: None) -> list[int]:
        """The layers of Hy3 that are named dense: the first, unless the list says otherwise."""
        kinds = self.per_layer(key, "dense", "sparse") or ["dense"]
        return [layer for layer, kind in enumerate(kinds) if kind == "dense"]

    def nemotron_layers(self, key: str, default: None) -> list:
        """The mixer or MLP of each layer; older files have a text with a letter for each."""
        older = self.get("hybrid_override_pattern", None)
        names = self.get(key, "ME*-" if older is None else older)
        names = names if isinstance(names, list | str) else []
        parts = [NEMOTRON_LAYERS.get(str(name)) for name in names]
        known = len(parts) > 0 and None not in parts
        self.check(known, key, f"must be a list of {', '.join(NEMOTRON_LAYERS)}")
        self.has_experts = [None, "experts"] in parts
        return parts

    def experts_if_any(self, key: str, default: int) -> int:
        """Their number in a layer; with 0 the shared MLP is the only one."""
        number = self.integer(key, default, minimum=0, null=True) or 0
        self.has_experts = number > 0
        return number

    def granite_layers(self, key: str, default: range) -> list[int]:
        """Recurrent layers by the stronger of two names, as in transformers."""
        stronger = "layers_block_type"
        return self.layers_of_types(stronger if stronger in self.raw else key, default)

    def bias_without_experts(self, key: str, default: bool) -> bool:
        """Whether MLPs have biases; experts have none."""
        return self.only(key, False) if self.has_experts else self.boolean(key, default)

    def latent_head_size(self) -> int:
        """Elements of a query head with latent attention, of which only some are rotated."""
        return self["qk_nope_head_dim"] + self["qk_rope_head_dim"]

    def unrotated_layers(self, key: str, default: None) -> range:
        """All layers, unless position_embedding_type is rope."""
        rotates = self.get(key, None) is not None and self.choice(key, ("rope", "nope")) == "rope"
        return range(0) if rotates else ALL_LAYERS

    def mamba_head_size(self, key: str, default: str) -> int:
        """Elements of a head; all heads together have mamba_expand times the model's width."""
        heads, inner = self["mamba_n_heads"], self["mamba_expand"] * self["hidden_size"]
        why = f"must divide mamba_expand x hidden_size = {inner}"
        self.check(inner % heads == 0, "mamba_n_heads", why)
        size = inner // heads
        return size if self.get(key, default) == default else self.only(key, size)

    def step_limits(self, key: str, default: None) -> tuple[float, float]:
        """The bounds of Mamba2's steps; infinity may be an object in JSON."""
        limits = self.get(key, None) or (0.0, math.inf)
        try:
            least, most = (math.inf if isinstance(x, dict) else float(x) for x in limits)
        except (TypeError, ValueError):
            raise self.error(key, "must be a list of two numbers") from None
        return least, most

    def gemma_activation(self, key: str, default: str) -> str:
        """Gemma's; its first files say gelu and mean the approximation, as in transformers."""
        name = self.activation(key, default)
        return "gelu_tanh" if name == "gelu" else name

    def padding_row(self, key: str, default: int | None) -> int | None:
        """The row of the embedding that stays 0; a negative one counts from the end."""
        vocab = self["vocab_size"]
        token = self.integer(key, default, minimum=-vocab, null=True)
        why = f"row {token} is outside vocab_size {vocab}"
        self.check(token is None or token < vocab, key, why)
        return None if token is None else token % vocab

    def left_out_modules(self, key: str, default: int) -> int:
        """The number of modules of multi-token prediction, by whatever names the file has."""
        names = [name for name in config_keys.MTP_KEYS if name in self.raw]
        numbers = [self.integer(name, minimum=0, null=True) for name in names]
        return max((number or 0 for number in numbers), default=default)

    # What follows from several keys.
    def read(self) -> Row:
        """The fields of a ModelConfig."""
        family, bias = self.family, self.values.get("attention_bias", False)
        biases: Row = dict(qkv_bias=bias, attention_out_bias=bias)
        fields = TABLE["usual_fields"] | biases | self.fields_of(config_keys.MODEL)
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        fields["intermediate_size"] = fields["intermediate_size"] or 4 * hidden  # GPT-2's default
        fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
        if not fields.get("head_dim"):
            why = f"is not a multiple of {heads} attention heads; change one, or give head_dim"
            width = next(key for key in self.values if config_keys.MODEL.get(key) == "hidden_size")
            self.check(hidden % heads == 0, width, why)
            fields["head_dim"] = hidden // heads
        if "rope_theta" in self.values:
            fields |= self.rope(fields["head_dim"])
        if family.recurrent is not None:
            fields["recurrent"] = self.recurrent(dict(activation=fields["activation"]))
        if self.has_experts:
            fields["experts"] = self.experts()
        if "shared_intermediate_size" in self.values and not self.has_experts:  # Granite 4
            fields["intermediate_size"] = self["shared_intermediate_size"]
        if family.scales_embedding:
            fields["embedding_scale"] = hidden**0.5
        fields |= family.fields
        if fields["qk_norm"]:  # a file may say so
            self.used |= {key for key in QK_NORM if self.raw.get(key) is True}
        fields["layers"] = self.layers(fields)
        return fields

    def layers(self, fields: Row) -> tuple[LayerSpec, ...]:
        """The table of layers; the lists of layers are taken out of the fields."""
        dense, unrotated = fields.pop("dense_layers", ()), fields.pop("no_rope_layers", ())
        before, after = fields.pop("pre_norm"), fields.pop("post_norm")
        usual = "latent" if "latent" in fields else "attention"
        other = usual if self.family.recurrent is None else "recurrent"
        local = "local" if "local_rope_theta" in fields else "global"
        others = self.values.get("layer_types", ALL_LAYERS)
        parts, table = self.values.get("layers_block_type"), []
        for layer in range(fields["num_hidden_layers"]):
            mixer = other if layer in others else usual
            mlp = "experts" if self.has_experts and layer not in dense else "dense"
            mixer, mlp = parts[layer] if parts else (mixer, mlp)
            window = self.values.get("sliding_window") if layer in others else None
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
        types = [inner.raw[key] for key in ("rope_type", "type") if inner.raw.get(key) is not None]
        kind, *same = types or ["default"]
        inner.check(same in ([], [kind]), "type", f"is not rope_type {kind!r}")
        why = f"{kind!r} is not implemented; there are {', '.join(ROPE_TYPES)}"
        inner.check(kind in ROPE_TYPES, "rope_type", why)
        scaling = self.rope_scaling(kind, inner)
        inner.check(kind != "yarn" or theta > 1, "rope_type", "needs a rope_theta above 1")
        for key in inner.leftover():
            known = kind == "yarn" and key in config_keys.WITHOUT_EFFECT
            inner.check(known, key, f"does not apply to rope type {kind!r}")
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
        # As in transformers, a value at the top level counts more; but not where there are two ropes.
        positions, two = self["max_position_embeddings"], "sliding_attention" in self.family.rope
        inside = inner.integer(TRAINED, positions)
        original = (None if two else self.integer(TRAINED, None)) or inside
        if kind == "llama3":
            factor = inner.number("factor")
            low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
            inner.check(high > low, "high_freq_factor", "must be above low_freq_factor")
            return RopeScaling(kind, factor, low, high, original)
        told = original == positions or inner.raw.get("factor") is not None
        factor = inner.number("factor") if told else positions / original
        keys, gain = ("mscale", "mscale_all_dim"), yarn_mscale(factor)
        mscales = [inner.number(key) for key in keys if inner.get(key, 0) not in (0, None)]
        if len(mscales) == 2:
            gain = yarn_mscale(factor, mscales[0]) / yarn_mscale(factor, mscales[1])
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
        latent, scale = Latent(**self.fields_of(config_keys.LATENT)), self["head_dim"] ** -0.5
        if isinstance(scaling, Yarn) and inner.raw.get("mscale_all_dim"):
            scale *= yarn_mscale(scaling.factor, inner.number("mscale_all_dim")) ** 2
        pairs = "neighbours" if self["rope_interleave"] else "halves"
        return dict(latent=latent, attention_scale=scale, rope_pairs=pairs)

    def recurrent(self, fields: Row) -> Recurrent:
        """The recurrent layers; the groups of Mamba2 are also those of its norm."""
        fields = fields | self.fields_of(config_keys.RECURRENT) | (self.family.recurrent or NONE)
        if not fields["delta"]:
            fields["norm_groups"] = fields["groups"]
        if "time_step_limit" in self.values:
            fields["least_step"], fields["most_step"] = self["time_step_limit"]
        key = next(key for key in self.values if config_keys.RECURRENT.get(key) == "heads")
        groups = "linear_num_key_heads" if fields["delta"] else f"the {fields['groups']} groups"
        self.check(fields["heads"] % fields["groups"] == 0, key, f"is not a multiple of {groups}")
        return Recurrent(**fields)

    def experts(self) -> Experts:
        """The experts of a layer, which may be chosen from the best groups."""
        fields = self.fields_of(config_keys.EXPERTS) | self.family.experts
        fields.setdefault("size", self["intermediate_size"])
        shared = self.values.get("n_shared_experts", self.values.get("num_shared_experts")) or 0
        shared_size = self.values.get("shared_intermediate_size", shared * fields["size"])
        fields.setdefault("shared_size", shared_size)
        fields["correction"] = fields.get("scores") == "sigmoid"
        if not self["output_router_logits"]:
            fields["aux_loss"] = 0.0  # as in transformers
        experts = Experts(**fields)
        number, groups, per_token = experts.number, experts.groups, experts.per_token
        key = self.spelling(self.experts_key)
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


def open_reader(raw: Row, where: str) -> Reader:
    """The reader of a config.json; of its text_config in a model of text and images, if it is known.

    The whole file says whether embeddings are tied, if it says so.
    """
    if "arch_name" in raw and "model_type" not in raw:
        return Reader(from_first_dialect(raw, where), where)
    text, tied = raw.get("text_config"), "tie_word_embeddings"
    ours = str(raw.get("model_type")) in FAMILIES  # such a family refuses text_config
    if ours or not isinstance(text, dict) or str(text.get("model_type")) not in FAMILIES:
        return Reader(raw, where)
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
        names = config_keys.FIRST_DIALECT | dict(d_hid="n_inner")
        defaults = dict(model_type="gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    else:
        names, width = config_keys.FIRST_DIALECT, int(int(8 * hidden / 3) * factor)
        defaults = dict(model_type=kind, d_hid=-(-width // multiple) * multiple, norm_eps=1e-5)
        defaults |= dict(n_kv_heads=None, window_size=None)
    required = dict(hidden_size=hidden, max_seq_len=None, vocab_size=None)
    return {names.get(key, key): value for key, value in (required | defaults | given).items()}


# fmt: off
# How keys are read that their default does not tell, by a key or its last word.
BY_TYPE: dict[type, Callable[..., Any]] = {bool: Keys.boolean, float: Keys.number}
RULES: dict[str, Callable[..., Any]] = dict.fromkeys(("dropout", "pdrop", "rate"), Keys.fraction)
RULES |= dict.fromkeys(("act", "activation", "function"), Keys.activation)
RULES |= dict.fromkeys(("multiplier", PART), partial(Keys.number, null=False))
RULES |= dict.fromkeys("num_key_value_heads head_dim q_lora_rank".split(),
                       partial(Keys.integer, null=True))
RULES |= dict(
    mlp_only_layers=Reader.dense_between, mlp_layer_types=Reader.dense_by_name,
    no_rope_layers=Reader.no_rope_layers, position_embedding_type=Reader.unrotated_layers,
    layers_block_type=Reader.nemotron_layers, mamba_d_head=Reader.mamba_head_size,
    time_step_limit=Reader.step_limits, n_shared_experts=partial(Keys.integer, null=True, minimum=0),
    expert_hidden_dim=lambda reader, key, _: reader.only(key, reader["moe_intermediate_size"]),
    sliding_window=Reader.window, layer_types=Reader.layers_of_types, pad_token_id=Reader.padding_row,
    num_nextn_predict_layers=Reader.left_out_modules,
    router_aux_loss_coef=partial(Keys.fraction, below=1e6),
    first_k_dense_replace=lambda *read: range(Keys.integer(*read, minimum=0)),
    max_window_layers=lambda *read: range(Keys.integer(*read, minimum=0), len(ALL_LAYERS)),
    query_pre_attn_scalar=lambda *read: Keys.number(*read) ** -0.5,
    logits_scaling=lambda *read: 1 / Keys.number(*read, null=False))
RULES |= {
    "qwen2_moe.max_window_layers": lambda *read: range(0, Keys.integer(*read, minimum=0), 2),
    "gemma.hidden_act": Reader.gemma_activation,
    "granitemoehybrid.num_local_experts": Reader.experts_if_any,
    "granitemoehybrid.layer_types": Reader.granite_layers,
    "nemotron_h.num_hidden_layers": lambda reader, *_: len(reader["layers_block_type"]),
    "nemotron_h.pad_token_id": lambda *_: None,  # no row of its embedding stays 0
    "nemotron_h.mlp_bias": Reader.bias_without_experts,
    "deepseek_v3.head_dim": lambda reader, *_: reader.latent_head_size(),
    "kimi_k2.head_dim": lambda reader, *_: reader.latent_head_size(),
    "mistral4.head_dim": lambda reader, key, _: reader.only(key, reader.latent_head_size()),
}
FAMILIES = read_families()
# fmt: on
