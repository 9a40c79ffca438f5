"""Model shapes, read from Hugging Face `config.json` files. Needs no torch.

Every key of a file is accounted for. It is used, or known not to matter to a training step, or
refused: it changes the computation in a way that is not implemented here. Unknown keys are reported
in `ModelConfig.unknown_keys`. Defaults of absent keys are those of transformers 5.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.json_keys import ConfigError, Keys, is_directory, kind_of, plain_file


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: `linear` by factor, or `llama3` by wavelength."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


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
    windows: tuple[int | None, ...]
    """Sliding window of each layer (positions seen, including its own), None for full attention."""
    embedding_dropout: float
    residual_dropout: float
    attention_dropout: float
    initializer_range: float
    pad_token_id: int | None
    vocab_multiple: int
    """Rows of the embedding and head are padded up to a multiple of this; 1 means not at all."""
    raw: dict[str, Any] = dataclasses.field(repr=False, compare=False)
    unknown_keys: tuple[str, ...] = ()

    @property
    def query_size(self) -> int:
        """Elements of all query heads at a position."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads at a position; value heads have as many."""
        return self.num_key_value_heads * self.head_dim

    def block_shapes(self, layer: int = 0) -> dict[str, tuple[int, int]]:
        """(out, in) of a block's linear layers; `up` is gate and up together in a gated MLP.

        All blocks of the families here are alike; formulas ask for each, so that they need not be.
        """
        d, f = self.hidden_size, self.intermediate_size
        return {
            "qkv": (self.query_size + 2 * self.kv_size, d),
            "out": (d, self.query_size),
            "up": (2 * f if self.gated_mlp else f, d),
            "down": (d, f),
        }

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the resolved shape.

        The file's name and padding rows do not change it: they are no part of the model.
        """
        shape = {k: v for k, v in self.shape().items() if k != "name"} | {"vocab_multiple": 1}
        text = json.dumps(shape, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def shape(self) -> dict[str, Any]:
        """The resolved values as plain JSON data, without the file's own text."""
        kept = dataclasses.replace(self, raw={}, unknown_keys=())
        shape = dataclasses.asdict(kept)
        for key in ("raw", "unknown_keys", "path"):
            del shape[key]
        shape["windows"] = list(self.windows)
        return shape


def model_name(path: str | Path) -> str:
    """A model's name: that of its config file, or of the directory of its config.json."""
    path = Path(path)
    if is_directory(path):
        return path.resolve().name
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def load_config(path: str | Path, vocab_multiple: int = 1) -> ModelConfig:
    """Read a Hugging Face config.json (or a directory that holds one); ConfigError if unusable."""
    path = Path(path)
    if is_directory(path):
        path = path / "config.json"
    try:
        raw = json.loads(plain_file(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        shipped = ", ".join(sorted(p.stem for p in Path("configs").glob("*-*.json")))
        hint = f"; configs/ has: {shipped}" if shipped else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; expected a Hugging Face config.json") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a config.json") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg};"
            " is the file complete?"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: not usable JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object with a model_type, found {kind_of(raw)}")
    return parse_config(raw, path, vocab_multiple)


def parse_config(raw: dict[str, Any], path: str | Path, vocab_multiple: int = 1) -> ModelConfig:
    """Turn the object of a config.json into a ModelConfig; `path` is for messages and the name."""
    path = Path(path)
    keys = Keys(raw, str(path))
    model_type = keys.choice("model_type", tuple(FAMILIES))
    fields = FAMILIES[model_type](keys)
    keys.refuse_unsupported()
    config = ModelConfig(
        name=model_name(path),
        path=str(path),
        model_type=model_type,
        vocab_multiple=vocab_multiple,
        raw=raw,
        unknown_keys=keys.unknown(),
        **fields,
    )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{path}: num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}; query heads share them evenly"
        )
    if not config.learned_positions and config.head_dim % 2:
        raise ConfigError(
            f"{path}: head_dim {config.head_dim} is odd; rotary embeddings need pairs"
        )
    if config.pad_token_id is not None and config.pad_token_id >= config.vocab_size:
        raise ConfigError(
            f"{path}: pad_token_id {config.pad_token_id} is outside vocab_size {config.vocab_size}"
        )
    return config


def _gpt2(keys: Keys) -> dict[str, Any]:
    # transformers accepts the general names too, and prefers them.
    def size(general: str, own: str, default: Any = ...) -> int:
        return keys.integer(general if general in keys.raw else own, default)

    hidden = size("hidden_size", "n_embd")
    layers = size("num_hidden_layers", "n_layer")
    heads = size("num_attention_heads", "n_head")
    positions = size("max_position_embeddings", "n_positions", 1024)
    head_dim = keys.divide(hidden, heads)
    for key, neutral in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
    ):
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
) -> dict[str, Any]:
    """A decoder with RMS norms, rotary embeddings and a gated MLP.

    `positions`, `kv_heads` and `head_dim` are the family's defaults of absent keys. `bias_keys` are the
    keys among attention_bias and mlp_bias that it has; `windows` reads its sliding windows.
    """
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    # Absent and null differ in transformers: absent takes the family's default, null the head count.
    head_dim = keys.integer("head_dim", head_dim, null=True)
    bias = "attention_bias" in bias_keys and keys.boolean("attention_bias", False)
    positions = keys.integer("max_position_embeddings", positions)
    theta, scaling = _rope(keys, positions)
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
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        learned_positions=False,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias or bias,
        attention_out_bias=bias,
        mlp_bias="mlp_bias" in bias_keys and keys.boolean("mlp_bias", False),
        qk_norm=qk_norm,
        windows=windows(keys, layers) if windows else (None,) * layers,
        embedding_dropout=0.0,
        residual_dropout=0.0,
        attention_dropout=keys.fraction("attention_dropout", 0.0),
        initializer_range=keys.number("initializer_range", 0.02),
        pad_token_id=_pad_token(keys),
    )


def _pad_token(keys: Keys) -> int | None:
    """The embedding row that gets no gradient; negative ones count from the end, as torch does."""
    token = keys.integer("pad_token_id", None, minimum=-keys.integer("vocab_size"))
    return token if token is None or token >= 0 else token + keys.integer("vocab_size")


def _windows_everywhere(keys: Keys, layers: int) -> tuple[int | None, ...]:
    return (keys.integer("sliding_window", 4096, null=True),) * layers


def _windows_by_layer(keys: Keys, layers: int) -> tuple[int | None, ...]:
    window = keys.integer("sliding_window", 4096, null=True)
    if not keys.boolean("use_sliding_window", False):
        window = None
    first = keys.integer("max_window_layers", 28, minimum=0)
    kinds = keys.raw.get("layer_types")
    keys.used.add("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.error("layer_types", f"must be a list of num_hidden_layers = {layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "attention", "sliding_attention"):
            raise keys.error("layer_types", f"{kind!r} is not implemented")
    if "sliding_attention" in kinds and window is None:
        raise keys.error(
            "layer_types",
            "names sliding_attention, but use_sliding_window or sliding_window is off",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(keys: Keys, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` with both inside."""
    theta = keys.number("rope_theta", 10000.0)
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
    for partial in (keys, inner):
        if partial.number("partial_rotary_factor", 1.0) != 1.0:
            raise partial.error("partial_rotary_factor", "only 1 (the whole head) is implemented")
    scaling = None
    if kind == "linear":
        scaling = RopeScaling("linear", inner.number("factor"))
    elif kind == "llama3":
        # As in transformers, a value at the top level overrides the one inside.
        outer = keys.integer("original_max_position_embeddings", None)
        original = inner.integer("original_max_position_embeddings", max_positions)
        scaling = RopeScaling(
            "llama3",
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            outer or original,
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise inner.error("high_freq_factor", "must be above low_freq_factor")
    elif kind != "default":
        raise keys.error(
            where, f"rope type {kind!r} is not implemented; there are default, linear and llama3"
        )
    if extra := inner.leftover():
        raise keys.error(where, f"{extra[0]!r} has no meaning for rope type {kind!r}")
    return theta, scaling


# The reader of each family's config, by its model_type.
FAMILIES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": functools.partial(
        _llama_family, positions=2048, bias_keys=("attention_bias", "mlp_bias")
    ),
    "mistral": functools.partial(
        _llama_family, positions=131072, kv_heads=8, windows=_windows_everywhere
    ),
    "qwen2": functools.partial(
        _llama_family, positions=32768, kv_heads=32, qkv_bias=True, windows=_windows_by_layer
    ),
    "qwen3": functools.partial(
        _llama_family, positions=32768, kv_heads=32, head_dim=128, bias_keys=("attention_bias",),
        qk_norm=True, windows=_windows_by_layer,
    ),
}  # fmt: skip
