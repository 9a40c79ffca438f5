"""Model families, each one row of data: its keys, and what it computes though no key says so.

A row has the keys of a config.json in the order in which they are read. A plain value is transformers'
default of an absent key, and tells what it is: a whole number from 1 on (`...` has no default, None may
be null), a number above 0, true or false, or the only text implemented. RULES has the keys that are read
in another way. A tuple is a rule with its options, mostly a method of Reader: it may use what was read
before. An entry called like a field of ours is no key: its rule computes the field.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llm_train_bench.model.json_keys import Keys, kind_of
from llm_train_bench.model.shapes import Experts, Latent, Recurrent, RopeScaling, Yarn

Fields = dict[str, Any]
Row = dict[str, Any]
Layers = tuple[int, ...]
PART, TRAINED = "partial_rotary_factor", "original_max_position_embeddings"


class Reader(Keys):
    """The keys of a config.json, and the rules by which a family's row is read."""

    def __init__(self, raw: Fields, where: str):
        super().__init__(raw, where)
        self.values: Fields = {}  # what was read, by the row's names

    def read_row(self, row: Row) -> None:
        """Read a row's keys into `self.values`."""
        by_type = {bool: Keys.boolean, float: Keys.number, str: Reader.one_of}
        for key, entry in row.items():
            if not isinstance(entry, tuple):
                entry = (RULES.get(key) or by_type.get(type(entry), Keys.integer), entry)
            rule, *options = entry
            self.values[key] = rule(self, self.spelling(key), *options)

    def spelling(self, key: str) -> str:
        """The name of a key in this file, where transformers takes several."""
        return next((name for name in SPELLINGS.get(key, "").split() if name in self.raw), key)

    def ours(self, names: dict[str, str]) -> Fields:
        """The values that are fields of ours, by our names."""
        return {names[key]: value for key, value in self.values.items() if key in names}

    # Rules of single keys.
    def one_of(self, key: str, *names: str) -> str:
        """One of these texts, by default the first."""
        return self.choice(key, names, names[0])

    def only_sum(self, key: str, *parts: str) -> None:
        """A key that repeats others."""
        self.only(key, sum(self.values[part] for part in parts))

    def kv_heads(self, key: str, default: int | None) -> int:
        """Heads of keys and values; null means one for each query head."""
        return self.integer(key, default, null=True) or self.values["num_attention_heads"]

    def all_heads(self, key: str, default: int | None) -> int:
        """The same, where no other number than that of queries is implemented."""
        heads = self.values["num_attention_heads"]
        if default is not None:
            self.raw = {key: default} | self.raw  # for the message
        if self.kv_heads(key, None) != heads:
            raise self.error(key, f"must be num_attention_heads = {heads}")
        return heads

    def head_size(self, key: str, default: int | None) -> int:
        """Elements of a head; absent means the default, but null the model's width by heads."""
        size = self.integer(key, default, null=True)
        return size or self.divide(self.values["hidden_size"], self.values["num_attention_heads"])

    def pad_token(self, key: str, default: int | None) -> int | None:
        """The row of padding; negative ones count from the end, as in torch."""
        words = self.values["vocab_size"]
        token = self.integer(key, default, minimum=-words, null=True)
        return token + words if token is not None and token < 0 else token

    def multiplier(self, key: str, default: float) -> float:
        """A factor; null is no number here."""
        return self.number(key) if key in self.raw else default

    def shared_size(self, key: str, default: int, minimum: int = 0) -> int:
        """The width of so many shared experts; where there may be none, null means none."""
        count = self.integer(key, default, minimum, null=minimum == 0)
        return self.values["moe_intermediate_size"] * (count or 0)

    # Rules about layers.
    def per_layer(self, key: str, kind: type, names: tuple[str, ...] = ()) -> list | None:
        """A list with one entry for each layer, perhaps of these names; None if absent or null."""
        entries, layers = self.get(key, None), self.values["num_hidden_layers"]
        if entries is None:
            return None
        fits = isinstance(entries, list) and len(entries) == layers
        if not fits or not all(isinstance(entry, kind) for entry in entries):
            what = "names" if kind is str else "numbers"
            raise self.error(key, f"must be a list of num_hidden_layers = {layers} {what}")
        for entry in entries if names else ():
            if entry not in names:
                raise self.error(key, f"{entry!r} is not implemented")
        return entries

    def window(self) -> int | None:
        """The sliding window, unless it is switched off."""
        on = self.values.get("use_sliding_window", True)
        return self.values.get("sliding_window") if on else None

    def windows(self, _: str, slides: Callable[[Fields, int], bool]) -> tuple[int | None, ...]:
        """Each layer's window; `slides` tells which layers have one if layer_types does not."""
        window, layers = self.window(), self.values["num_hidden_layers"]
        names = ("full_attention", "attention", "sliding_attention")
        kinds = self.per_layer("layer_types", str, names)
        if kinds is None:
            sliding = [slides(self.values, layer) for layer in range(layers)]
        else:
            sliding = [kind == "sliding_attention" for kind in kinds]
            if "use_sliding_window" in self.values and window is None and any(sliding):
                why = "names sliding_attention, but use_sliding_window or sliding_window is off"
                raise self.error("layer_types", why)
        return tuple(window if has else None for has in sliding)

    def no_rope_layers(self, key: str, _: None) -> Layers:
        """Layers of SmolLM3 that do not rotate; its key has a 0 for them."""
        layers, every = self.values["num_hidden_layers"], self.values["no_rope_layer_interval"]
        rotates = self.per_layer(key, int) or [(i + 1) % every for i in range(layers)]
        return tuple(i for i in range(layers) if not rotates[i])

    def first_dense(self, key: str, default: int) -> Layers:
        """The layers before the first one with experts."""
        first = self.integer(key, default, minimum=0)
        return tuple(range(min(self.values["num_hidden_layers"], first)))

    def dense_between(self, key: str, default: None) -> Layers:
        """The layers listed, and those that decoder_sparse_step passes over."""
        layers, step = self.values["num_hidden_layers"], self.values["decoder_sparse_step"]
        dense = self.get(key, default) or []
        fits = isinstance(dense, list) and all(type(i) is int and 0 <= i < layers for i in dense)
        if not fits:
            raise self.error(key, f"must be a list of layers from 0 to {layers - 1}")
        return tuple(i for i in range(layers) if i in dense or (i + 1) % step)

    def dense_by_name(self, key: str) -> Layers:
        """The layers of Hy3 that are named dense: the first, unless the list says otherwise."""
        kinds = self.per_layer(key, str)
        kinds = kinds or ["dense"] + ["sparse"] * (self.values["num_hidden_layers"] - 1)
        if {*kinds} - {"dense", "sparse"} or self.get("first_k_dense_replace", 1) != 1:
            raise self.error(key, "must name dense or sparse for each layer")
        return tuple(i for i, kind in enumerate(kinds) if kind == "dense")

    def recurrent_layers(self, _: str) -> Layers:
        """Layers with a recurrent mixer in place of attention: without layer_types all, or most."""
        layers, every = self.values["num_hidden_layers"], self.values.get("full_attention_interval")
        names = ("linear_attention", "mamba", "full_attention", "attention")
        kinds = self.per_layer("layer_types", str, names)
        if kinds is not None:
            return tuple(i for i, kind in enumerate(kinds) if kind in names[:2])
        return tuple(i for i in range(layers) if every is None or (i + 1) % every)

    # Rules of Nemotron-H.
    def nemotron_kinds(self, key: str) -> list[str]:
        """The kind of each layer; their number replaces num_hidden_layers, as in transformers."""
        older = {"mamba": "linear_attention", "attention": "full_attention"}
        kinds, pattern = self.get(key, None), self.get("hybrid_override_pattern", None)
        if kinds is None and isinstance(pattern, str):
            kinds = [NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
        kinds = [*NEMOTRON_LETTERS.values()] if kinds is None else kinds
        if not isinstance(kinds, list) or not kinds or not all(isinstance(k, str) for k in kinds):
            raise self.error(key, "must be a list of names")
        kinds = [older.get(kind, kind) for kind in kinds]
        if unknown := {*kinds} - {*NEMOTRON_LETTERS.values()}:
            raise self.error(key, f"{unknown.pop()!r} is not implemented")
        self.raw = self.raw | {"num_hidden_layers": len(kinds)}
        return kinds

    def layers_of(self, _: str, *kinds: str) -> Layers:
        """The layers of these kinds."""
        of_layer = self.values["layers_block_type"]
        return tuple(i for i, kind in enumerate(of_layer) if kind in kinds)

    def nemotron_is_dense(self) -> bool:
        """Whether no layer has experts; then the keys of experts have no meaning."""
        if "moe" not in self.values["layers_block_type"]:
            self.used |= {k for k in self.raw if "expert" in k or "moe_" in k or "group" in k}
            self.used |= {"norm_topk_prob", "routed_scaling_factor"}
            return True
        if self.values["mlp_bias"]:
            raise self.error("mlp_bias", "only false is implemented with experts")
        return False

    # Rules of Granite 4.
    def granite_is_dense(self) -> bool:
        """Whether it has only the MLP that else is beside the experts."""
        if self.values["num_local_experts"]:
            return False
        self.used |= {"num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"}
        return True

    def granite_width(self, key: str) -> int:
        """The width of an expert or, without experts, of the MLP."""
        width, shared = self.integer(key), self.values["shared_intermediate_size"]
        return width if self.values["num_local_experts"] else shared

    def preferred_layer_types(self, key: str) -> None:
        """Another name of layer_types, which wins."""
        if key in self.raw:
            self.raw = self.raw | {"layer_types": self.get(key)}

    def mamba_head_size(self, key: str) -> int:
        """Elements of a head; all heads together have mamba_expand times the model's width."""
        heads = self.values["mamba_n_heads"]
        inner = self.values["mamba_expand"] * self.values["hidden_size"]
        size = inner // heads if self.get(key, "auto") == "auto" else self.integer(key)
        if size * heads != inner:
            raise self.error(key, f"x mamba_n_heads must be mamba_expand x hidden_size = {inner}")
        return size

    def step_limits(self, key: str) -> tuple[float, float]:
        """The bounds of Mamba2's steps; infinity may be an object in JSON."""
        limits = self.get(key, None) or (0.0, math.inf)
        try:
            least, most = (math.inf if isinstance(x, dict) else float(x) for x in limits)
        except (TypeError, ValueError):
            raise self.error(key, "must be a list of two numbers") from None
        return least, most

    def unrotated_layers(self, _: str) -> Layers:
        """All layers, unless position_embedding_type is rope."""
        key = "position_embedding_type"
        if self.get(key, None) is not None and self.choice(key, ("rope", "nope")) == "rope":
            return ()
        return tuple(range(self.values["num_hidden_layers"]))

    # Rules of rotary embeddings.
    def rope_if_absent(self, key: str, default: Fields) -> None:
        """Let a file without rotary parameters have the family's."""
        if not (self.raw.get("rope_scaling") or self.raw.get("rope_parameters")):
            self.raw = self.raw | {key: default}

    def two_ropes(self, _: str, theta: float) -> float:
        """Leave the rotary parameters of layers without windows in `raw`; return theta of the others.

        They are those of rope_parameters by kind of layer, or are in older keys. `theta` is the default.
        """
        by_kind = self.raw.get("rope_parameters") or {}
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(by_kind, dict) or not {*by_kind} <= {*kinds}:
            raise self.error("rope_parameters", f"must hold {' and '.join(kinds)} for this family")
        full, slides = ((by_kind.get(kind) or {}) for kind in kinds)
        if not isinstance(full, dict) or not isinstance(slides, dict):
            raise self.error("rope_parameters", "must hold an object for each kind of layer")
        inner = Keys(slides, self.where, prefix="rope_parameters.sliding_attention.")
        inner.choice("rope_type", ("default",), "default")
        local_theta = inner.number("rope_theta", self.values.get("rope_local_base_freq", 5e5))
        if extra := inner.leftover():
            raise inner.error(extra[0], "is not implemented for layers with windows")
        old = self.raw.get("rope_scaling") or {}
        if not isinstance(old, dict) or "type" in old:
            raise self.error("rope_scaling", "must be an object with a rope_type for this family")
        full = {"rope_theta": self.raw.get("rope_theta", theta)} | full | old
        self.raw = self.raw | {"rope_scaling": None, "rope_parameters": full}
        return local_theta

    def query_scale(self, key: str) -> tuple[float, int] | None:
        """How far queries at late positions grow."""
        inner = self.rotary_parameters()
        inner.prefix = "rope_parameters."
        if inner.raw.get(key) is None:
            return None
        trained = self.integer(TRAINED, None)
        kind = inner.raw.get("rope_type") or inner.raw.get("type")
        if trained is None or kind not in ("yarn", "llama3"):
            trained = inner.integer(TRAINED)
        return inner.number(key), trained

    def rotary_parameters(self) -> Keys:
        """Those of rope_scaling or, in later files, of rope_parameters."""
        where = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        parameters = self.raw.get(where) or {}
        if not isinstance(parameters, dict):
            raise self.error(where, f"must be an object or null, found {kind_of(parameters)}")
        return Keys(parameters, self.where, prefix=where + ".")

    def rotary(self, key: str, default: float, family_keys: str = "") -> float:
        """The base of rotary frequencies; their scaling becomes the value of rope_scaling.

        A family may have keys of its own among the rotary parameters; some have no meaning for text.
        """
        theta, inner = self.number(key, default), self.rotary_parameters()
        where = inner.prefix[:-1]
        self.used |= {"rope_scaling", "rope_parameters"}
        if any(isinstance(value, dict) for value in inner.raw.values()):
            why = "rotary parameters that differ by layer type are not implemented"
            raise self.error(where, why)
        theta = inner.number(key, theta)
        kind, old = inner.raw.get("rope_type"), inner.raw.get("type")
        inner.used |= {"rope_type", "type", PART, *family_keys.split()}
        if kind and old and kind != old:
            raise self.error(where, f"rope_type {kind!r} and type {old!r} disagree")
        kind, scaling = kind or old or "default", None
        if kind == "linear":
            scaling = RopeScaling("linear", inner.number("factor"))
        elif kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            factor, low, high = (inner.number(name) for name in names)
            scaling = RopeScaling(kind, factor, low, high, self.trained_positions(inner))
            if high <= low:
                raise inner.error("high_freq_factor", "must be above low_freq_factor")
        elif kind == "yarn":
            scaling = self.yarn(inner)
            if theta <= 1:
                place = inner if key in inner.raw else self
                raise place.error(key, "must be above 1 for rope type 'yarn'")
        elif kind != "default":
            known = "default, linear, llama3 and yarn"
            raise self.error(where, f"rope type {kind!r} is not implemented; there are {known}")
        if extra := inner.leftover():
            raise self.error(where, f"{extra[0]!r} has no meaning for rope type {kind!r}")
        self.values["rope_scaling"] = scaling
        return theta

    def trained_positions(self, inner: Keys) -> int:
        """As in transformers, a value at the top level overrides the one inside."""
        inside = inner.integer(TRAINED, self.values["max_position_embeddings"])
        return self.integer(TRAINED, None) or inside

    def yarn(self, inner: Keys) -> Yarn:
        """YaRN's numbers; the factor of rotated numbers follows from `factor`, or from two mscales."""
        original = self.trained_positions(inner)
        factor = inner.number("factor", self.values["max_position_embeddings"] / original)
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

    def whole_head(self, key: str) -> None:
        """No part of a head alone may rotate; null is the default, but not among rotary parameters."""
        inner = self.rotary_parameters()
        for place in (self, inner):
            if place.number(key, 1.0) != 1.0:
                raise place.error(key, "only 1 (the whole head) is implemented")
        if inner.raw.get(key, 1.0) is None:
            raise inner.error(key, "must be a number, found null")

    def part(self, key: str, default: float) -> float:
        """The part of a head that rotates; that among rotary parameters wins."""
        inner = self.rotary_parameters()
        for place in (self, inner):
            if place.raw.get(key, default) is None:
                raise place.error(key, "must be a number, found null")
        return inner.number(key, self.number(key, default))

    def rotary_size(self, key: str, default: float) -> int | None:
        """Rotated elements of a head; None if that is all."""
        head_dim = self.values["head_dim"]
        turned = int(head_dim * self.part(key, default))
        if not 2 <= turned <= head_dim:
            raise self.error(key, f"would rotate {turned} of a head's {head_dim} elements")
        return None if turned == head_dim else turned

    def minimax_size(self, key: str) -> int | None:
        """The same; MiniMax-M2's files give the number of elements."""
        size = self.integer("rotary_dim", None)
        if size is not None:
            self.raw = {key: size / self.values["head_dim"]} | self.raw
        return self.rotary_size(key, 1.0)

    def latent_part(self, key: str) -> None:
        """The part of a head that must be that of qk_rope_head_dim, where it is given."""
        self.part(key, 1.0)
        rotated, part = self.values["qk_rope_head_dim"], self.rotary_parameters().raw.get(key)
        if part is not None and int((self.values["qk_nope_head_dim"] + rotated) * part) != rotated:
            raise self.error("rope_parameters", f"{key} must be that of qk_rope_head_dim")

    # What follows from several keys.
    def narrow_attention(self) -> Fields:
        """Attention through narrow layers, and its scale, which YaRN raises."""
        if self.values["attention_bias"]:
            raise self.error("attention_bias", "only false is implemented for this family")
        latent, scaling = Latent(**self.ours(LATENT)), self.values["rope_scaling"]
        head_dim = latent.nope_dim + latent.rope_dim
        scale, mscale = head_dim**-0.5, self.rotary_parameters().raw.get("mscale_all_dim")
        if isinstance(scaling, Yarn) and mscale:
            scale *= yarn_mscale(scaling.factor, mscale) ** 2
        pairs = "neighbours" if self.values["rope_interleave"] else "halves"
        return dict(head_dim=head_dim, latent=latent, attention_scale=scale, rope_pairs=pairs)

    def recurrent(self, fixed: Fields) -> Recurrent:
        """The recurrent layers; the groups of Mamba2 are also those of its norm."""
        fields = fixed | self.ours(RECURRENT)
        if not fields["delta"]:
            fields["norm_groups"] = fields["groups"]
        if "time_step_limit" in self.values:
            fields["least_step"], fields["most_step"] = self.values["time_step_limit"]
        if fields["heads"] % fields["groups"]:
            key = next(key for key in self.values if RECURRENT.get(key) == "heads")
            groups = "linear_num_key_heads" if fields["delta"] else f"the {fields['groups']} groups"
            raise self.error(key, f"is not a multiple of {groups}")
        return Recurrent(**fields)

    def experts(self, row: Row, fixed: Fields) -> Experts:
        """The experts of a layer, which may be chosen from the best groups."""
        self.read_row(row)
        fields = dict(size=self.values["intermediate_size"]) | self.ours(EXPERTS) | fixed
        fields["correction"] = fields.get("scores") == "sigmoid"
        if not self.values["output_router_logits"]:
            fields["aux_loss"] = 0.0  # as in transformers
        e = Experts(**fields)
        if e.per_token > e.number:
            key = next(self.spelling(key) for key in row if EXPERTS.get(key) == "number")
            raise self.error("num_experts_per_tok", f"is above {key} {e.number}")
        if e.correction_rate and not e.correction:
            raise self.error("router_bias_update_rate", "this family's router has no such bias")
        if e.number % e.groups or (e.groups > 1 and e.number // e.groups < 2):
            divisors = [str(g) for g in range(1, e.number // 2 + 1) if e.number % g == 0]
            why = f"{e.number} experts do not divide into groups of two or more"
            raise self.error("n_group", f"{why}; {', '.join(divisors or ['1'])} would do")
        if e.groups_per_token > e.groups:
            raise self.error("topk_group", f"is above n_group {e.groups}")
        if e.per_token > e.number // e.groups * e.groups_per_token:
            raise self.error("topk_group", "its groups have fewer experts than a token needs")
        return e


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN raises attention's temperature (Peng et al. 2023, eq. 22; DeepSeek's mscale)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def by_key(**keys_of_field: str) -> dict[str, str]:
    """The field of each key."""
    return {key: field for field, keys in keys_of_field.items() for key in keys.split()}


NONE: Fields = {}


class Family(NamedTuple):
    """What there is to know of a family's config.json."""

    keys: Row
    fixed: Fields = NONE  # fields of ModelConfig that no key says
    experts: Row | None = None
    router: Fields = NONE  # fields of its experts that no key says
    is_dense: Callable[[Reader], bool] = lambda reader: False  # whether a file has no experts
    recurrent: Fields | None = None  # fields of its recurrent layers that no key says
    unread: str = ""  # keys that do not matter to a training step

    def read(self, reader: Reader) -> Fields:
        """The fields of a ModelConfig."""
        reader.used |= {*self.unread.split()}
        reader.read_row(self.keys)
        bias = reader.values.get("attention_bias", False)
        fields = PLAIN | dict(qkv_bias=bias, attention_out_bias=bias) | reader.ours(MODEL)
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        fields["intermediate_size"] = fields["intermediate_size"] or 4 * hidden  # GPT-2's default
        fields.setdefault("num_key_value_heads", heads)
        fields.setdefault("windows", (reader.window(),) * fields["num_hidden_layers"])
        if "kv_lora_rank" in reader.values:
            fields |= reader.narrow_attention()
        elif "head_dim" not in fields:
            fields["head_dim"] = reader.divide(hidden, heads)
        if self.recurrent is not None:
            activation = dict(activation=fields["activation"])
            fields["recurrent"] = reader.recurrent(activation | self.recurrent)
        if self.experts is None or self.is_dense(reader):
            fields["dense_layers"] = ()
        else:
            fields["experts"] = reader.experts(self.experts, self.router)
        return fields | self.fixed


def from_first_dialect(reader: Reader) -> Fields:
    """The config of the first llm-train-bench (`arch_name`, `d_embd`, ...) as Hugging Face has it.

    Other keys are unchanged. Its GPT has no dropout. A Llama's `d_hid` defaults to a width computed from
    `ffn_mult` and `ffn_factor`.
    """
    family = reader.choice("arch_name", tuple(FIRST_ROWS))
    reader.read_row(FIRST | FIRST_ROWS[family])
    values, fields = reader.values, reader.ours(FIRST_NAMES)
    if family == "gpt":
        fields |= dict(model_type="gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
        fields |= {} if values["d_hid"] is None else dict(n_inner=values["d_hid"])
    else:
        factor, width = values["ffn_factor"], int(4 * values["d_embd"] * 2 / 3)
        width = -(-int(width * values["ffn_mult"]) // factor) * factor
        fields |= dict(model_type=family, intermediate_size=values["d_hid"] or width)
    return fields | {key: reader.raw[key] for key in reader.leftover()}


# fmt: off
# How keys are read that their default does not tell.
RULES: dict[str, Callable[..., Any]] = dict(
    num_key_value_heads=Reader.kv_heads, head_dim=Reader.head_size, pad_token_id=Reader.pad_token,
    windows=Reader.windows, rope_parameters=Reader.rope_if_absent, local_rope_theta=Reader.two_ropes,
    n_shared_experts=Reader.shared_size, mlp_only_layers=Reader.dense_between,
    no_rope_layers=Reader.no_rope_layers, first_k_dense_replace=Reader.first_dense,
    rope_theta=Reader.rotary, partial_rotary_factor=Reader.rotary_size,
    max_window_layers=partial(Keys.integer, minimum=0),
    sliding_window=partial(Keys.integer, null=True), q_lora_rank=partial(Keys.integer, null=True),
    router_aux_loss_coef=partial(Keys.fraction, below=1e6, to="on"),
    logits_scaling=lambda *read: 1 / Reader.multiplier(*read))
MULTIPLIERS = "attention_multiplier embedding_multiplier residual_multiplier"
DROPOUTS = "attention_dropout residual_dropout embd_pdrop resid_pdrop attn_pdrop"
ACTIVATIONS = "hidden_act hidden_activation mlp_hidden_act mamba_hidden_act activation_function"
RULES |= dict.fromkeys(MULTIPLIERS.split(), Reader.multiplier)
RULES |= dict.fromkeys([*DROPOUTS.split(), "router_bias_update_rate"], Keys.fraction)
RULES |= dict.fromkeys(ACTIVATIONS.split(), Keys.activation)
# Names that transformers takes for a key, the strongest first.
MAMBA_SPELLINGS = dict(
    time_step_min="mamba_dt_min", n_groups="mamba_n_groups", conv_kernel="mamba_d_conv",
    chunk_size="mamba_chunk_size", use_conv_bias="mamba_conv_bias")
SPELLINGS = MAMBA_SPELLINGS | dict(
    n_embd="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
    n_positions="max_position_embeddings", num_experts="num_experts num_local_experts",
    num_local_experts="num_local_experts num_experts",
    n_routed_experts="n_routed_experts num_experts num_local_experts")
# The fields of ModelConfig, Latent, Recurrent and Experts, with the keys that give them.
MODEL = by_key(
    **{name: name for name in """vocab_size tie_word_embeddings num_key_value_heads head_dim mlp_bias
       attention_out_bias initializer_range pad_token_id windows no_rope_layers mlp_alone mixer_alone
       local_rope_theta rope_theta rope_scaling""".split()}, rotary_size="partial_rotary_factor",
    hidden_size="hidden_size n_embd", num_hidden_layers="num_hidden_layers n_layer",
    num_attention_heads="num_attention_heads n_head", intermediate_size="intermediate_size n_inner",
    max_position_embeddings="max_position_embeddings n_positions", qk_norm="use_qk_norm",
    activation="hidden_act hidden_activation mlp_hidden_act activation_function",
    norm_eps="rms_norm_eps layer_norm_epsilon", embedding_dropout="embd_pdrop",
    residual_dropout="resid_pdrop residual_dropout", attention_dropout="attn_pdrop attention_dropout",
    residual_scale="residual_multiplier",
    attention_scale="attention_multiplier attention_scale", query_scale="llama_4_scaling_beta",
    embedding_scale="embedding_multiplier embedding_scale", logit_scale="logits_scaling",
    recurrent_layers="layers",
    dense_layers="first_k_dense_replace mlp_only_layers mlp_layer_types dense_layers")
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
    shared_size="""n_shared_experts num_shared_experts shared_intermediate_size
        shared_expert_intermediate_size moe_shared_expert_intermediate_size""",
    scale="routed_scaling_factor router_scaling_factor", groups_per_token="topk_group",
    correction_rate="router_bias_update_rate", aux_loss="router_aux_loss_coef", limit="swiglu_limit",
    gain="swiglu_alpha", latent="moe_latent_size")
# The keys of the first llm-train-bench, and the keys that they become.
FIRST: Row = dict(d_embd=..., vocab_size=..., n_layers=..., n_heads=..., max_seq_len=..., d_hid=None)
FIRST_LLAMA: Row = dict(n_kv_heads=None, ffn_factor=256, ffn_mult=1.0, rope_base=1e4, norm_eps=1e-5)
FIRST_ROWS: dict[str, Row] = dict(gpt={}, llama=FIRST_LLAMA, mistral=FIRST_LLAMA | dict(window_size=None))
FIRST_NAMES = by_key(
    vocab_size="vocab_size", num_hidden_layers="n_layers", num_attention_heads="n_heads",
    max_position_embeddings="max_seq_len", hidden_size="d_embd", num_key_value_heads="n_kv_heads",
    rope_theta="rope_base", rms_norm_eps="norm_eps", sliding_window="window_size")

# Rows and fields that several families have.
only, layers_of = Keys.only, Reader.layers_of
UNREAD = (lambda reader, key: reader.used.add(key),)
UNTIED = (lambda reader, key: reader.boolean(key, False) and reader.only(key, False),)
PLAIN: Fields = dict(gated_mlp=True, rms_norm=True, learned_positions=False, qk_norm=False,
                     mlp_bias=False, embedding_dropout=0.0, residual_dropout=0.0)
SHAPE: Row = dict(
    hidden_size=..., num_attention_heads=..., num_hidden_layers=..., head_dim=None,
    max_position_embeddings=2048, rope_theta=1e4, partial_rotary_factor=(Reader.whole_head,),
    vocab_size=..., num_key_value_heads=None, intermediate_size=..., tie_word_embeddings=False,
    attention_dropout=0.0, initializer_range=0.02, pad_token_id=None)
LLAMA: Row = SHAPE | dict(hidden_act="silu", rms_norm_eps=1e-6)
BIAS: Row = dict(attention_bias=False)
BIASED: Row = BIAS | LLAMA
BIASES: Row = BIASED | dict(mlp_bias=False)
SIZES: Row = dict(max_position_embeddings=131072, num_key_value_heads=8)
SWITCHED: Row = dict(max_position_embeddings=32768, sliding_window=4096, use_sliding_window=False)
SPARSE: Row = dict(decoder_sparse_step=1, mlp_only_layers=None)
QWEN: Row = LLAMA | SWITCHED | dict(
    num_key_value_heads=32, max_window_layers=28,
    windows=lambda values, layer: layer >= values["max_window_layers"])
OLMO: Row = BIASED | dict(rms_norm_eps=1e-5, pad_token_id=1)
OLMO_FIXED: Fields = dict(qk_norm=True, whole_qk_norm=True)
GRANITE: Row = dict(attention_multiplier=1.0, embedding_multiplier=1.0, residual_multiplier=1.0,
                    logits_scaling=1.0) | BIASES
ROUTER: Row = dict(num_experts_per_tok=8, router_aux_loss_coef=0.001, router_bias_update_rate=0.0,
                   output_router_logits=False)
GROUPED: Row = dict(
    moe_intermediate_size=2048, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
    routed_scaling_factor=1.0, scoring_func="sigmoid", n_routed_experts=128)
GROUPED |= ROUTER | dict(router_aux_loss_coef=0.0)
DEEPSEEK: Row = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                     q_lora_rank=1536) | BIASED | dict(
    head_dim=UNREAD, max_position_embeddings=4096, topk_method="noaux_tc",
    num_key_value_heads=(Reader.all_heads, None), moe_layer_freq=(only, 1), rope_interleave=True,
    first_k_dense_replace=3)
DEEPSEEK_UNREAD = "quantization_config auto_map qk_head_dim"  # of weights and code on the Hub
YARN: Fields = dict(rope_type="yarn", llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0)
YARN_KEYS = "llama_4_scaling_beta max_position_embeddings"
QWEN_HYBRID: Row = BIASED | dict(
    max_position_embeddings=32768, head_dim=256, num_key_value_heads=2, partial_rotary_factor=0.25,
    full_attention_interval=4, layers=(Reader.recurrent_layers,), attn_output_gate=(only, True),
    linear_num_key_heads=16, linear_key_head_dim=128, linear_num_value_heads=32,
    linear_value_head_dim=128, linear_conv_kernel_dim=4)
# For text all sections of positions are alike.
MROPE: Row = dict(rope_theta=(Reader.rotary, 1e4, "mrope_section mrope_interleaved"))
QWEN_FIXED: Fields = dict(qk_norm=True, output_gate=True, norm_offset=True)
QWEN_EXPERTS: Row = dict(moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512)
QWEN_EXPERTS |= ROUTER
QWEN_UNREAD = "mamba_ssm_dtype mtp_use_dedicated_embeddings"
DELTA_NET: Fields = dict(delta=True, chunk=64)
NEMOTRON_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
# Keys that concern its first values, kernels and generation, or that its code does not read.
NEMOTRON_UNREAD = " ".join(MAMBA_SPELLINGS) + """
    rope_scaling rope_parameters attention_bias sliding_window
    num_logits_to_keep expand mamba_expand time_step_max mamba_dt_max time_step_limit mamba_dt_limit
    time_step_floor mamba_dt_init_floor time_step_rank rescale_prenorm_residual use_mamba_kernels
    mamba_ssm_cache_dtype moe_shared_expert_overlap residual_in_fp32 hidden_dropout norm_eps rms_norm_eps
    mtp_layers_block_type mtp_hybrid_override_pattern attention_head_dim auto_map"""
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        dict(n_embd=..., n_layer=..., n_head=..., n_positions=1024, scale_attn_weights=(only, True),
             scale_attn_by_inverse_layer_idx=(only, False), embd_pdrop=0.1, resid_pdrop=0.1,
             attn_pdrop=0.1, vocab_size=50257, n_inner=None, activation_function="gelu_new",
             layer_norm_epsilon=1e-5, tie_word_embeddings=True, initializer_range=0.02),
        dict(gated_mlp=False, rms_norm=False, learned_positions=True, rope_theta=0.0, rope_scaling=None,
             pad_token_id=None, qkv_bias=True, attention_out_bias=True, mlp_bias=True)),
    "llama": Family(BIASES),
    "mistral": Family(LLAMA | SIZES | dict(sliding_window=4096)),
    "qwen2": Family(QWEN, dict(qkv_bias=True)),
    "qwen3": Family(BIAS | QWEN | dict(head_dim=128), dict(qk_norm=True)),
    "phi3": Family(LLAMA | dict(
        max_position_embeddings=4096, rms_norm_eps=1e-5, partial_rotary_factor=1.0, sliding_window=None,
        pad_token_id=32000, embd_pdrop=0.0, resid_pdrop=0.0)),
    "olmo2": Family(OLMO, OLMO_FIXED | dict(norm_after=True)),
    "smollm3": Family(BIASES | dict(
        max_position_embeddings=32768, num_key_value_heads=4, rope_theta=2e6, pad_token_id=128004,
        tie_word_embeddings=True, no_rope_layer_interval=4, no_rope_layers=None,
        sliding_window=None, use_sliding_window=False,
        windows=lambda values, layer: layer in values["no_rope_layers"])),
    "granite": Family(GRANITE),
    "mixtral": Family(
        LLAMA | SIZES | dict(rope_theta=1e6, rms_norm_eps=1e-5, sliding_window=None,
                             router_jitter_noise=(only, 0)),
        experts=dict(num_local_experts=8) | ROUTER | dict(num_experts_per_tok=2),
        router=dict(normalised=True)),
    "olmoe": Family(
        OLMO | dict(max_position_embeddings=4096, clip_qkv=(only, None)), OLMO_FIXED,
        experts=dict(norm_topk_prob=False, num_experts=64) | ROUTER | dict(router_aux_loss_coef=0.01)),
    "qwen3_moe": Family(
        BIASED | SWITCHED | SPARSE | dict(num_key_value_heads=4), dict(qk_norm=True),
        experts=dict(moe_intermediate_size=768, norm_topk_prob=False, num_experts=128) | ROUTER),
    "gpt_oss": Family(
        dict(rope_parameters=dict(rope_type="yarn", factor=32.0, truncate=False, **{TRAINED: 4096}))
        | LLAMA | SIZES | dict(
            head_dim=64, attention_bias=True, rope_theta=150000.0, rms_norm_eps=1e-5, sliding_window=128,
            windows=lambda values, layer: layer % 2 == 0),
        dict(sinks=True),
        experts=dict(hidden_act=(Reader.one_of, "silu"), swiglu_limit=7.0, swiglu_alpha=1.702,
                     num_local_experts=128) | ROUTER | dict(num_experts_per_tok=4),
        router=dict(biases=True, scores="softmax_chosen"),
        unread="quantization_config initial_context_length"),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), Family(
        DEEPSEEK, experts=GROUPED | dict(n_group=8, topk_group=4, routed_scaling_factor=2.5,
                                         n_routed_experts=256), unread=DEEPSEEK_UNREAD)),
    "glm4_moe": Family(
        BIASED | SIZES | dict(rms_norm_eps=1e-5, partial_rotary_factor=0.5, use_qk_norm=False,
                                    first_k_dense_replace=1),
        dict(attention_out_bias=False), experts=GROUPED | dict(moe_intermediate_size=1408)),
    "olmo3": Family(
        dict(local_rope_theta=5e5) | OLMO | dict(
            sliding_window=4096, windows=lambda values, layer: (layer + 1) % 4 != 0),
        OLMO_FIXED | dict(norm_after=True)),
    "ministral3": Family(
        dict(rope_parameters=YARN | dict(rope_theta=1e6, factor=16.0, **{TRAINED: 16384}),
             llama_4_scaling_beta=(Reader.query_scale,))
        | LLAMA | dict(max_position_embeddings=262144, num_key_value_heads=8, head_dim=128,
                       rms_norm_eps=1e-5, pad_token_id=11, sliding_window=None,
                       rope_theta=(Reader.rotary, 1e4, YARN_KEYS))),
    "mistral4": Family(
        dict(rope_parameters=YARN | dict(rope_theta=1e4, factor=128.0, **{TRAINED: 8192}),
             llama_4_scaling_beta=(Reader.query_scale,))
        | DEEPSEEK | dict(
            max_position_embeddings=1048576, num_key_value_heads=(Reader.all_heads, 32), pad_token_id=11,
            intermediate_size=12288, rope_theta=(Reader.rotary, 1e4, YARN_KEYS), kv_lora_rank=256,
            qk_nope_head_dim=64, q_lora_rank=1024, partial_rotary_factor=(Reader.latent_part,),
            head_dim=(Reader.only_sum, "qk_nope_head_dim", "qk_rope_head_dim"),
            first_k_dense_replace=0),
        experts=GROUPED | dict(scoring_func="softmax", num_experts_per_tok=4), unread=DEEPSEEK_UNREAD),
    "minimax_m2": Family(
        LLAMA | dict(
            max_position_embeddings=196608, num_key_value_heads=8, head_dim=128, rope_theta=5e6,
            partial_rotary_factor=(Reader.minimax_size,), intermediate_size=1536,
            router_jitter_noise=(only, 0), use_qk_norm=(only, True), qk_norm_type="per_layer"),
        dict(whole_qk_norm=True),
        experts=dict(scoring_func="sigmoid", shared_intermediate_size=(only, 0),
                     use_routing_bias=(only, True), num_local_experts=256) | ROUTER,
        router=dict(normalised=True), unread="use_mtp mtp_transformer_layers"),
    "hy_v3": Family(
        BIASES | SIZES | dict(
            head_dim=128, rope_theta=11158840.0, rms_norm_eps=1e-5, initializer_range=0.006,
            intermediate_size=13312, mlp_layer_types=(Reader.dense_by_name,), qk_norm=(only, True)),
        dict(qk_norm=True),
        experts=dict(moe_intermediate_size=1536, num_shared_experts=(Reader.shared_size, 1, 1),
                     route_norm=(only, True), moe_router_use_sigmoid=(only, True),
                     moe_router_enable_expert_bias=(only, True),
                     expert_hidden_dim=(Reader.only_sum, "moe_intermediate_size"),
                     router_scaling_factor=2.826, num_experts=192)
        | ROUTER | dict(router_aux_loss_coef=0.0),
        router=dict(scores="sigmoid", normalised=True), unread="enable_moe_fp32_combine"),
    "gemma3_text": Family(  # its files on the Hub leave out what is at its defaults
        dict(sliding_window_pattern=6, rope_local_base_freq=1e4, local_rope_theta=1e6)
        | BIAS | SHAPE | dict(
            vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
            num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131072,
            hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, pad_token_id=0,
            rms_norm_eps=1e-6, query_pre_attn_scalar=256.0, sliding_window=4096,
            windows=lambda values, layer: (layer + 1) % values["sliding_window_pattern"] != 0,
            attention_scale=(lambda reader, _: reader.values["query_pre_attn_scalar"] ** -0.5,),
            embedding_scale=(lambda reader, _: reader.values["hidden_size"] ** 0.5,)),
        dict(qk_norm=True, norm_around=True, norm_offset=True)),
    "seed_oss": Family(BIASES | dict(
        max_position_embeddings=524288, num_key_value_heads=8, head_dim=128, attention_bias=True,
        pad_token_id=1, intermediate_size=27648, attention_dropout=0.1, attention_out_bias=False,
        residual_dropout=0.1)),
    "qwen3_next": Family(
        QWEN_HYBRID | SPARSE | dict(intermediate_size=5632), QWEN_FIXED,
        experts=QWEN_EXPERTS | dict(norm_topk_prob=True, num_experts_per_tok=10),
        router=dict(shared_gate=True), recurrent=DELTA_NET, unread=QWEN_UNREAD),
    "qwen3_5_text": Family(
        QWEN_HYBRID | MROPE | dict(num_key_value_heads=4), QWEN_FIXED, recurrent=DELTA_NET,
        unread=QWEN_UNREAD + " mlp_only_layers"),
    "qwen3_5_moe_text": Family(
        QWEN_HYBRID | MROPE | dict(intermediate_size=1), QWEN_FIXED,  # no layer has an MLP of that size
        experts=QWEN_EXPERTS | dict(num_experts=256), router=dict(normalised=True, shared_gate=True),
        recurrent=DELTA_NET, unread=QWEN_UNREAD + " mlp_only_layers"),
    "nemotron_h": Family(
        dict(layers_block_type=(Reader.nemotron_kinds,)) | SHAPE | dict(
            rope_theta=UNREAD, partial_rotary_factor=UNREAD,
            max_position_embeddings=4096, num_key_value_heads=8, head_dim=128, intermediate_size=21504,
            mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, pad_token_id=0, time_step_min=0.001,
            n_groups=8, ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=64, conv_kernel=4,
            chunk_size=128, mamba_hidden_act="silu", use_conv_bias=True,
            mamba_proj_bias=(only, False), use_bias=False,  # of both, the second counts
            mlp_bias=False, tie_word_embeddings=UNTIED, layers=(layers_of, "linear_attention"),
            dense_layers=(layers_of, "mlp"), mlp_alone=(layers_of, "moe", "mlp"),
            no_rope_layers=(layers_of, *NEMOTRON_LETTERS.values()),
            mixer_alone=(layers_of, "linear_attention", "full_attention")),
        # Its embedding knows no padding row.
        dict(pad_token_id=None, gated_mlp=False, rope_theta=1e4, rope_scaling=None),
        experts=GROUPED | dict(moe_intermediate_size=7688, n_routed_experts=8, num_experts_per_tok=2,
                               moe_shared_expert_intermediate_size=7688, moe_latent_size=None),
        router=dict(gated=False), is_dense=Reader.nemotron_is_dense, recurrent=dict(delta=False),
        unread=NEMOTRON_UNREAD),
    "granitemoehybrid": Family(
        dict(num_local_experts=(Keys.get, 8), shared_intermediate_size=1024,
             layers_block_type=(Reader.preferred_layer_types,))
        | GRANITE | dict(
            intermediate_size=(Reader.granite_width,), layers=(Reader.recurrent_layers,),
            no_rope_layers=(Reader.unrotated_layers,), mamba_n_heads=128, mamba_expand=2,
            mamba_d_head=(Reader.mamba_head_size,), time_step_limit=(Reader.step_limits,),
            mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_chunk_size=256,
            mamba_conv_bias=True, mamba_proj_bias=False),
        dict(mlp_bias=False), experts=dict(num_local_experts=8) | ROUTER | dict(num_experts_per_tok=2),
        router=dict(scores="softmax_chosen"), is_dense=Reader.granite_is_dense,
        recurrent=dict(delta=False)),
}
# fmt: on

# The number of modules of multi-token prediction, and the families that have them, with its default:
# that of transformers, or of the published files of Qwen3-Next, whose config does not say.
MTP_KEYS = "num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers num_mtp_modules".split()
MTP_FAMILIES = dict(deepseek_v3=1, kimi_k2=1, glm4_moe=1, hy_v3=0, minimax_m2=0, nemotron_h=0)
MTP_FAMILIES |= dict(qwen3_next=1, qwen3_5_text=0, qwen3_5_moe_text=0)


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
