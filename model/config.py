"""Model shapes, read from Hugging Face `config.json` files. Needs no torch.

Every key of a file is accounted for. It is used, or known not to matter to a training step, or
refused: it changes the computation in a way that is not implemented here. Unknown keys are reported
in `ModelConfig.unknown_keys`. Defaults of absent keys are those of transformers 5.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, cast

from llm_train_bench.model import config_keys
from llm_train_bench.model.families import open_reader
from llm_train_bench.model.json_files import CONFIGS, parse_json, plain_text
from llm_train_bench.model.json_keys import ConfigError, kind_of
from llm_train_bench.model.shapes import Experts, Latent, LayerSpec, Recurrent, RopeScaling
from llm_train_bench.model.weights import Weight, list_weights

# The number of layers, and what has an entry for each of them.
LAYER_KEYS = "num_hidden_layers", "n_layer"
PER_LAYER = """layer_types layers_block_type hybrid_override_pattern mlp_layer_types
    no_rope_layers""".split()
# The lists of layers in a model's shape: the part that their layers have in common.
LAYER_LISTS = dict(
    recurrent_layers=("mixer", "recurrent"), mlp_alone=("mixer", None), dense_layers=("mlp", "dense"),
    mixer_alone=("mlp", None), no_rope_layers=("rope", None))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One model's shape, with the same names for all families (Llama's in Hugging Face)."""

    name: str
    path: str
    model_type: str
    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    gated_mlp: bool
    rms_norm: bool
    norm_eps: float
    learned_positions: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layers: tuple[LayerSpec, ...]
    embedding_dropout: float
    residual_dropout: float
    attention_dropout: float
    initializer_range: float
    pad_token_id: int | None
    vocab_multiple: int
    """Rows of the embedding and head are padded up to a multiple of this; 1 means not at all."""
    raw: dict[str, Any] = dataclasses.field(repr=False, compare=False)
    unknown_keys: tuple[str, ...] = ()
    first_layers: int | None = None
    """The number of layers that `keep_first_layers` left; None for a model as its file has it."""
    # What only some families have. `shape` leaves out what is at these defaults.
    experts: Experts | None = None
    latent: Latent | None = None
    sinks: bool = False
    """A learned score for each head that takes part in the softmax and attends to nothing."""
    rotary_size: int | None = None
    """Rotated elements of a head, if not all."""
    rope_pairs: str = "halves"
    """Elements that rotate together: i and i + half, or `neighbours` 2i and 2i + 1."""
    whole_qk_norm: bool = False
    """The norms of queries and keys span all heads."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies in layers with a window, if they have their own."""
    query_scale: tuple[float, int] | None = None
    """Queries at position p are multiplied by 1 + a log(1 + floor(p / b)), of these a and b."""
    output_gate: bool = False
    """Attention's output is multiplied by a sigmoid of the token, element by element."""
    recurrent: Recurrent | None = None
    mtp_layers: int = 0
    """Modules of multi-token prediction that the file names; they are left out."""
    attention_scale: float | None = None
    """Factor of the scores, if not head_dim ** -0.5."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def query_size(self) -> int:
        """Elements of all query heads at a position."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads at a position."""
        return self.num_key_value_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Rotated elements of a head."""
        return self.latent.rope_dim if self.latent else self.rotary_size or self.head_dim

    @property
    def parts(self) -> frozenset[str | None]:
        """The kinds of mixers and MLPs that its layers have."""
        return frozenset(part for layer in self.layers for part in (layer.mixer, layer.mlp))

    def experts_of(self, layer: int) -> Experts | None:
        """The experts that a layer has in place of an MLP."""
        return self.experts if self.layers[layer].mlp == "experts" else None

    def mlp_groups(self, size: int) -> int:
        """Groups of rows of an MLP with `size` elements: one for each key/value head if they divide."""
        return math.gcd(self.num_key_value_heads, size)

    @functools.cached_property
    def weights(self) -> dict[str, Weight]:
        """The table of parameters, by name."""
        return {weight.name: weight for weight in list_weights(cast(Any, self))}

    @functools.cached_property
    def matrices(self) -> list[list[Weight]]:
        """The matrices of each block: its linear layers, and those of all experts, stacked."""
        every = [weight for weight in self.weights.values() if weight.is_matrix]
        return [[w for w in every if w.layer == layer] for layer in range(len(self.layers))]

    def linear_layers(self, layer: int) -> list[Weight]:
        """The linear layers of a block that every token passes, (out, in) each."""
        return [weight for weight in self.matrices[layer] if not weight.of_experts]

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the resolved shape."""
        apart = ("name", "mtp_layers")
        shape = {k: v for k, v in self.shape().items() if k not in apart} | {"vocab_multiple": 1}
        text = json.dumps(shape, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def shape(self) -> dict[str, Any]:
        """The resolved values as plain JSON data, without the file's own text."""
        shape = dataclasses.asdict(dataclasses.replace(self, raw={}))
        for field in dataclasses.fields(self):
            left_out = field.name in ("raw", "unknown_keys", "path", "first_layers", "layers")
            if left_out or getattr(self, field.name) == field.default:
                del shape[field.name]
        # Fields of later versions do not change a model's hash.
        for name in ("gated", "latent", "shared_gate") if self.experts else ():
            if shape["experts"][name] == getattr(Experts, name):
                del shape["experts"][name]
        lists = {name: value for name, value in list_layers(self).items() if value}
        recurrent_layers = lists.pop("recurrent_layers", ())
        if self.recurrent is not None:
            shape["recurrent"]["layers"] = recurrent_layers
        return shape | lists


def list_layers(config: ModelConfig) -> dict[str, Any]:
    """The table of layers as lists of their numbers: a model's hash is of these."""
    lists: dict[str, Any] = {
        name: tuple(i for i, layer in enumerate(config.layers) if getattr(layer, part) == kind)
        for name, (part, kind) in LAYER_LISTS.items()
    }
    lists |= {} if config.experts else {"dense_layers": ()}
    lists |= {"no_rope_layers": ()} if config.learned_positions else {}
    before, after = config.layers[0].pre_norm, config.layers[0].post_norm
    lists |= dict(norm_after=after and not before, norm_around=after and before)
    return lists | {"windows": tuple(layer.window for layer in config.layers)}


def model_name(path: str | Path, layers: int | None = None) -> str:
    """A model's name: that of its config file, or of the directory of its config.json; and --layers."""
    path, end = Path(path), f"-{layers}-layers" if layers else ""
    with contextlib.suppress(OSError):  # a name that is too long for any file
        if path.is_dir():
            return path.resolve().name + end
    return (path.resolve().parent.name if path.name == "config.json" else path.stem) + end


def suggest_config(path: Path) -> str:
    """What to use in place of a file that is not there."""
    shipped = sorted(p.stem for p in CONFIGS.glob("*-*.json"))
    name = path.name.lower().removesuffix(".json")
    whole = name.removesuffix("-proxy")
    if whole != name and whole in shipped:
        return f"use configs/{whole}.json --layers N"
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(path)) and path.suffix != ".json":
        same = f"configs/{name}.json has its shape; or " if name in shipped else ""
        fetch = f"hf download {path} config.json --local-dir {path.name}"
        return f"{same}fetch a config of the Hugging Face Hub: {fetch}"
    near = difflib.get_close_matches(name, shipped, n=1, cutoff=0.7)
    return f"did you mean configs/{near[0]}.json?" if near else "configs/ has gpt2-125m and others"


def load_config(
    source: str | Path | Any, vocab_multiple: int = 1, layers: int | None = None
) -> ModelConfig:
    """The model of a config.json, or its first `layers`; ConfigError if unusable.

    `source` is its path, that of a directory with one, its content, or a config of transformers.
    """
    if not isinstance(source, str | Path):
        raw = dict(source.to_dict() if hasattr(source, "to_dict") else source)
        return parse_config(
            raw, getattr(source, "name_or_path", "") or raw.get("model_type", "model")
        )
    path = Path(source)
    try:
        path = path / "config.json" if path.is_dir() else path
        raw = parse_json(plain_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {suggest_config(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; expected a Hugging Face config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}; is the file complete?") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object with a model_type, found {kind_of(raw)}")
    config = parse_config(raw, path, vocab_multiple)
    return config if layers is None else keep_first_layers(config, layers)


def keep_first_layers(config: ModelConfig, number: int) -> ModelConfig:
    """The model of a config's first layers, as if its file had no more; ConfigError if it has fewer."""
    if number > len(config.layers):
        raise ConfigError(f"--layers {number}: {config.path} has {len(config.layers)} layers")
    raw = dict(config.raw)
    for key in PER_LAYER:
        if isinstance(raw.get(key), list | str):
            raw[key] = raw[key][:number]
    if "mlp_only_layers" in raw:
        raw["mlp_only_layers"] = [i for i in range(number) if config.layers[i].mlp == "dense"]
    raw |= dict.fromkeys([key for key in LAYER_KEYS if key in raw] or LAYER_KEYS[:1], number)
    short = parse_config(raw, config.path, config.vocab_multiple)
    if short.num_hidden_layers != number:  # the family has a list of them, and the file does not
        raise ConfigError(
            f"--layers {number}: {config.path} does not list its layers; add the list"
        )
    name, unknown = model_name(config.path, number), config.unknown_keys
    return dataclasses.replace(short, name=name, first_layers=number, unknown_keys=unknown)


def describe_keys_without_effect(config: ModelConfig) -> str | None:
    """What a run says about the keys of its config file that have no effect; None if there are none."""
    by_reason: dict[str, list[str]] = {}
    for key in config.unknown_keys:
        reason = "unknown" if key in config.raw else "only text_config is read"
        reason = config_keys.WITHOUT_EFFECT.get(key.split(".")[-1], reason)
        by_reason.setdefault(reason, []).append(key)
    named = [f"{', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]
    return f"{config.path}: keys without effect: {'; '.join(named)}" if named else None


def parse_config(raw: dict[str, Any], path: str | Path, vocab_multiple: int = 1) -> ModelConfig:
    """Turn the object of a config.json into a ModelConfig; `path` is for messages and the name."""
    path = Path(path)
    reader = open_reader(raw, str(path))
    fields = reader.read()
    reader.refuse_unsupported()
    fields |= dict(name=model_name(path), path=str(path), vocab_multiple=vocab_multiple)
    fields |= dict(model_type=reader.model_type, raw=reader.raw)
    config = ModelConfig(**fields, unknown_keys=(*reader.unknown(), *reader.elsewhere))
    key_heads = config.num_key_value_heads
    why = f"is not a multiple of num_key_value_heads {key_heads}; query heads share them evenly"
    reader.check(config.num_attention_heads % key_heads == 0, "num_attention_heads", why)
    key = "qk_rope_head_dim" if config.latent else "head_dim"
    why = f"{config.rope_dim} rotated elements are odd; rotary embeddings need pairs"
    has_pairs = config.rope_dim % 2 == 0 or not any(layer.rope for layer in config.layers)
    reader.check(has_pairs, key, why)
    return config
