"""Hugging Face weights: names, layouts, reading and writing safetensors."""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llm_train_bench.model.config import ConfigError, ModelConfig, load_config
from llm_train_bench.model.families import FAMILIES
from llm_train_bench.model.json_keys import parse_json, plain_file
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.stored import Part, read_block
from llm_train_bench.model.transformer import Transformer

# Qwen3MoeForCausalLM of qwen3_moe; three are called differently.
ARCHITECTURES = {kind: f"{kind.title().replace('_', '')}ForCausalLM" for kind in FAMILIES}
ARCHITECTURES |= dict(gpt2="GPT2LMHeadModel", smollm3="SmolLM3ForCausalLM")
ARCHITECTURES["kimi_k2"] = "DeepseekV3ForCausalLM"
ARCHITECTURES |= {
    kind: f"{name}ForCausalLM"
    for kind, name in dict(
        qwen3_5_text="Qwen3_5", qwen3_5_moe_text="Qwen3_5Moe", granitemoehybrid="GraniteMoeHybrid",
        minimax_m2="MiniMaxM2", hy_v3="HYV3", gemma3_text="Gemma3",
    ).items()
}  # fmt: skip
# Fields that may differ between the weights' config and the run's: they do not change the function.
TRAINING_KEYS = """name path raw unknown_keys embedding_dropout residual_dropout attention_dropout
    initializer_range pad_token_id mtp_layers""".split()
# Tables that old checkpoints kept beside the weights.
NO_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
GPT2_NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "attn.q": "self_attn.q_proj",
    "attn.q_down": "self_attn.q_a_proj",
    "attn.q_down_norm": "self_attn.q_a_layernorm",
    "attn.q_up": "self_attn.q_b_proj",
    "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_down_norm": "self_attn.kv_a_layernorm",
    "attn.kv_up": "self_attn.kv_b_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up": "mlp.gate_proj mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate_up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
AROUND = dict(attn_after="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm")
AROUND |= dict(mlp_after="post_feedforward_layernorm")
QWEN_HYBRID = {
    "mlp.shared.gate_up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
QWEN35 = {"attn.project": " ".join(f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a"))}
# Where the parameters of layers with states are; and their names.
MIXERS: dict[str, str] = dict.fromkeys(
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "linear_attn"
)
MIXERS |= dict(nemotron_h="mixer", granitemoehybrid="mamba")
MIXER_NAMES = {"attn.project": "in_proj", "attn.conv": "conv1d", "attn.gated_norm": "norm"}
MIXER_NAMES |= {"attn.out": "out_proj"}
MIXER_KINDS = dict(decay="A_log", step_bias="dt_bias", skip="D")
# Names that differ in single families.
FAMILY_NAMES = {
    "mixtral": {"mlp.router": "block_sparse_moe.gate"},
    "gpt_oss": {"mlp.router": "mlp.router"},
    "phi3": {"attn.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"},
    "olmo2": {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "minimax_m2": {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
    },
    "hy_v3": {
        "mlp.router": "mlp.router.gate",
        "mlp.router.correction": "mlp.expert_bias",
        "mlp.shared.gate_up": "mlp.shared_mlp.gate_proj mlp.shared_mlp.up_proj",
        "mlp.shared.down": "mlp.shared_mlp.down_proj",
    },
    "gemma3_text": AROUND,
    "qwen3_next": QWEN_HYBRID | {"attn.project": "linear_attn.in_proj_qkvz linear_attn.in_proj_ba"},
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": QWEN_HYBRID | QWEN35,
    "granitemoehybrid": {
        "mlp.gate_up": "shared_mlp.input_linear",
        "mlp.down": "shared_mlp.output_linear",
        "mlp.shared.gate_up": "shared_mlp.input_linear",
        "mlp.shared.down": "shared_mlp.output_linear",
        "mlp.router": "block_sparse_moe.router.layer",
    },
    "nemotron_h": {
        "embed": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "attn_norm": "norm",
        "mlp_norm": "norm",
        "attn.qkv": "mixer.q_proj mixer.k_proj mixer.v_proj",
        "attn.out": "mixer.o_proj",
        "mlp.up": "mixer.up_proj",
        "mlp.down": "mixer.down_proj",
        "mlp.router": "mixer.gate",
        "mlp.latent_down": "mixer.fc1_latent_proj",
        "mlp.latent_up": "mixer.fc2_latent_proj",
        "mlp.shared.up": "mixer.shared_experts.up_proj",
        "mlp.shared.down": "mixer.shared_experts.down_proj",
    },
}
FAMILY_NAMES["olmo3"] = FAMILY_NAMES["olmo2"]


# A parameter's name to the files and tensors that make it up, or to the reader of a checkpoint's block.
Pretrained = dict[str, list[tuple[Path, str]] | Callable[..., Tensor]]


def hf_names(config: ModelConfig, name: str) -> list[str]:
    """The Hugging Face tensors that, stacked along dimension 0, make up our parameter `name`."""
    family, gpt2 = config.model_type, config.model_type == "gpt2"
    theirs = GPT2_NAMES if gpt2 else LLAMA_NAMES | FAMILY_NAMES.get(family, {})
    module, kind = name.rsplit(".", 1)
    if not module.startswith("blocks."):
        return [f"{theirs.get(module, module)}.{kind}"]
    _, layer, part = module.split(".", 2)
    base = "backbone" if family == "nemotron_h" else "model"
    prefix = f"transformer.h.{layer}" if gpt2 else f"{base}.layers.{layer}"
    if part.startswith("mlp.experts."):
        return [f"{prefix}.{name}" for name in _expert_names(config, part.split(".")[-1], kind)]
    if (whole := theirs.get(f"{part}.{kind}")) is not None:
        return [f"{prefix}.{whole}"]
    if int(layer) in config.recurrent.layers and part.split(".")[0] == "attn":
        mixer = MIXERS[family]
        if part == "attn":
            return [f"{prefix}.{mixer}.{MIXER_KINDS[kind]}"]
        if part not in theirs or part == "attn.out":
            return [f"{prefix}.{mixer}.{MIXER_NAMES[part]}.{kind}"]
    kind = {"correction": "e_score_correction_bias"}.get(kind, kind)
    names = theirs.get(part, f"self_{part}")  # self_attn, self_attn.q_norm and self_attn.k_norm
    return [f"{prefix}.{each}.{kind}" for each in names.split()]


def _expert_names(config: ModelConfig, part: str, kind: str) -> list[str]:
    """Names of the tensors of all experts, those of the first expert first."""
    if config.model_type == "gpt_oss":  # all experts in one tensor
        return [f"mlp.experts.{part}_proj" + ("_bias" if kind == "bias" else "")]
    if config.model_type == "mistral4":
        return [f"mlp.experts.{part}_proj"]
    if config.model_type == "granitemoehybrid":
        which = {"gate_up": "input", "down": "output"}[part]
        return [f"block_sparse_moe.{which}_linear.weight"]
    if config.model_type == "nemotron_h":
        inner, names = "mixer.experts", {"up": ("up_proj",), "down": ("down_proj",)}
    elif config.model_type in ("mixtral", "minimax_m2"):
        inner, names = "block_sparse_moe.experts", {"gate_up": ("w1", "w3"), "down": ("w2",)}
    else:
        inner, names = "mlp.experts", {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    return [f"{inner}.{e}.{p}.{kind}" for e in range(config.experts.number) for p in names[part]]


def _converted(
    config: ModelConfig, name: str, value: Tensor, shape: Sequence[int] | None = None
) -> Tensor:
    """A whole parameter of ours in the layout of the family's files or, with our `shape`, back."""
    *_, module, kind = name.split(".")
    if config.model_type == "gpt2" and module in ("qkv", "out", "up", "down"):
        return value.t()  # they keep its linear layers as (in, out)
    if ".mlp.experts." not in name:
        if (order := _row_order(config, name)) is not None:
            value = value[order if shape is None else order.argsort()]
        if module == "conv" and kind == "weight":
            value = value.unsqueeze(1) if shape is None else value.squeeze(1)
        return value
    if config.model_type in ("mistral4", "granitemoehybrid"):  # stacked like ours
        return value
    if config.model_type != "gpt_oss":
        return value.flatten(0, 1) if shape is None else value.view(shape)
    if shape is not None and kind == "weight":
        value = value.transpose(1, 2)
    if module == "gate_up":  # gate and up alternate in theirs
        halves = (2, -1) if shape is None else (-1, 2)
        value = value.unflatten(1, halves).transpose(1, 2).flatten(1, 2)
    return value.transpose(1, 2) if shape is None and kind == "weight" else value


def _row_order(config: ModelConfig, name: str) -> Tensor | None:
    """Which of our rows is which of theirs, where they keep them in another order."""
    module, r = ".".join(name.split(".")[2:-1]), config.recurrent
    if module == "attn.qkv" and config.output_gate:  # a head's queries, then its gates
        q, k, v, gate = torch.arange(sum(config.qkv_sizes)).split(config.qkv_sizes)
        heads = config.num_attention_heads
        return torch.cat(
            (torch.stack((q.view(heads, -1), gate.view(heads, -1)), 1).flatten(), k, v)
        )
    if module not in ("attn.project", "attn.conv") or not name.startswith("blocks."):
        return None
    sizes = r.segments if module == "attn.project" else r.channels
    parts = torch.arange(sum(sizes)).split(sizes)
    if not r.delta:  # gates, values, B, C, steps
        c, b, x, *rest = parts
        return torch.cat((*rest[:1], x, b, c, *rest[1:]))
    if config.model_type != "qwen3_next" or module == "attn.conv":
        return None
    by_group = [part.view(r.groups, -1) for part in parts]
    return torch.cat([torch.cat(some, 1).flatten() for some in (by_group[:4], by_group[4:])])


def _sizes(config: ModelConfig, name: str, names: list[str]) -> list[int] | None:
    """Rows of each of the tensors that make up a parameter; None where they are alike."""
    module, q, kv = name.split(".")[-2], config.query_size, config.kv_size
    if module == "qkv" and len(names) == 3:
        return [q * (1 + config.output_gate), kv, kv]
    if module != "project" or len(names) == 1:
        return None
    *wide, b, a = config.recurrent.segments
    if len(names) == 2:
        return [sum(wide), b + a]
    return [sum(wide[:3]), wide[3], b, a]


def to_hf(config: ModelConfig, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Our parameter (or its gradient) as the Hugging Face tensors it stands for."""
    if name in ("embed.weight", "lm_head.weight"):
        value = value[: config.vocab_size]
    value, names = _converted(config, name, value), hf_names(config, name)
    sizes = _sizes(config, name, names)
    parts = value.chunk(len(names)) if sizes is None else value.split(sizes)
    for hf_name, part in zip(names, parts, strict=True):
        yield hf_name, part.contiguous()


def check_pretrained(config: ModelConfig, directory: str | Path | None) -> Pretrained | None:
    """Where each parameter of a model lies in a directory of safetensors.

    None without a directory. ConfigError if a tensor is missing or does not fit, or if the directory's
    config is of another model. Only the files' headers are read.
    """
    if directory is None:
        return None
    directory = Path(directory)
    with torch.device("meta"):
        model = Transformer(config, 1)
    if (directory / "manifest.json").exists():
        return _check_checkpoint(model, directory)
    if (directory / "config.json").exists():
        ours, theirs = vars(config), vars(load_config(directory, config.vocab_multiple))
        for key in (k for k in ours if ours[k] != theirs[k] and k not in TRAINING_KEYS):
            raise ConfigError(
                f"{directory}/config.json: {key} is {theirs[key]}, but {config.path} "
                f"says {ours[key]}; give the config that belongs to the weights"
            )
    index = _index(directory)
    places, used = {}, set()
    for name, parameter in model.weights():
        places[name] = []
        for hf_name, part in to_hf(config, name, parameter.detach()):
            file, theirs = place = _find(index, hf_name, directory)
            shape, kind = _shape_and_dtype(*place)
            if shape != list(part.shape):
                raise _misfit(f"{file}: {theirs}", shape, config, part.shape)
            if kind not in ("F64", "F32", "F16", "BF16"):
                raise ConfigError(f"{file}: {theirs} holds {kind}; quantised weights are not read")
            places[name].append(place)
            used.add(theirs)
    if config.tie_word_embeddings and "lm_head.weight" in index:
        _refuse_other_head(index, places["embed.weight"][0])
    for theirs in index.keys() - used:
        tied = config.tie_word_embeddings and theirs == "lm_head.weight"
        if not tied and not theirs.endswith(NO_PARAMETERS) and not _further(config, theirs):
            raise ConfigError(
                f"{index[theirs]}: {theirs} has no place in {config.path}; are these weights of that "
                "model?"
            )
    return places


def _misfit(name: str, shape: list[int], config: ModelConfig, right: Sequence[int]) -> ConfigError:
    fit = f"which does not fit {config.path}: it should have {list(right)}"
    return ConfigError(f"{name} has shape {shape}, {fit}")


def _further(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of DeepSeek's modules that predict further tokens: layers after the last."""
    if name.startswith("mtp."):
        return True
    layer = name.removeprefix("model.layers.").split(".")[0]
    return bool(config.mtp_layers) and layer.isdecimal() and int(layer) >= config.num_hidden_layers


def _check_checkpoint(model: Transformer, directory: Path) -> Pretrained:
    """Where each parameter lies in a checkpoint of ours, whose tensors have our names and layouts."""
    places = {}
    try:
        stored = parse_json((directory / "manifest.json").read_text())["manifest"]["tensors"]
        for name, parameter in model.weights():
            tensor = stored[f"p/{name}"]
            if (shape := list(tensor["shape"])) != list(parameter.shape):
                raise _misfit(f"{directory}: {name}", shape, model.config, parameter.shape)
            parts = [Part(**part) for part in tensor["parts"]]
            places[name] = functools.partial(read_block, directory, f"p/{name}", parts)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{directory}: is no checkpoint of this model: {error!r}") from None
    return places


def read_pretrained(parameter: Tensor, name: str, config: ModelConfig, places: Pretrained) -> None:
    """Set one whole parameter in place; padding rows become zero."""
    parts, stored = [], places[name]
    if callable(stored):
        parameter.copy_(stored([0] * parameter.ndim, parameter.shape, torch.float32))
        return
    for path, hf_name in stored:
        with safe_open(path, framework="pt") as f:
            parts.append(f.get_tensor(hf_name))
            if not parts[-1].isfinite().all():
                raise ConfigError(f"{path}: {hf_name} holds numbers that are not finite")
    value = _converted(config, name, torch.cat(parts), parameter.shape)
    parameter[: value.shape[0]].copy_(value)
    parameter[value.shape[0] :].zero_()


def _refuse_other_head(index: dict[str, Path], embed: tuple[Path, str]) -> None:
    """ConfigError if the weights hold a head that the config's tie to the embedding would drop."""
    values = []
    for path, name in ((index["lm_head.weight"], "lm_head.weight"), embed):
        _shape_and_dtype(path, name)
        with safe_open(path, framework="pt") as f:
            values.append(f.get_tensor(name))
    if not torch.equal(*values):
        raise ConfigError(
            f"{index['lm_head.weight']}: lm_head.weight is not {embed[1]}, though config.json ties them; "
            "set tie_word_embeddings to false in it, and in the run's config"
        )


def _index(directory: Path) -> dict[str, Path]:
    """Tensor name to the file that holds it."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    try:
        if single.exists():
            with safe_open(plain_file(single), framework="pt") as f:
                return dict.fromkeys(f.keys(), single)
        weight_map = parse_json(plain_file(index).read_text(encoding="utf-8-sig"))["weight_map"]
        for file in weight_map.values():
            if Path(file).name != file:
                raise ConfigError(f"{index}: {file!r} is no name of a file beside it")
        return {name: directory / file for name, file in weight_map.items()}
    except FileNotFoundError:
        raise ConfigError(
            f"{directory}: has no model.safetensors and no model.safetensors.index.json"
        ) from None
    except ConfigError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{directory}: weights cannot be read: {error}") from None


def _find(index: dict[str, Path], name: str, directory: Path) -> tuple[Path, str]:
    # Hub files of GPT-2 often lack the prefix.
    for candidate in (name, name.removeprefix("transformer.")):
        if candidate in index:
            return index[candidate], candidate
    raise ConfigError(f"{directory}: has no tensor {name}; are these weights of that model?")


def _shape_and_dtype(path: Path, name: str) -> tuple[list[int], str]:
    """A tensor's shape, and its format as safetensors calls it: F32, BF16, ..."""
    try:
        with safe_open(plain_file(path), framework="pt") as f:
            tensor = f.get_slice(name)
            return tensor.get_shape(), tensor.get_dtype()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


@torch.no_grad()
def save_pretrained(model: HasWeights, directory: str | Path, write: bool = True) -> None:
    """Write config.json and model.safetensors, which `AutoModelForCausalLM` opens.

    Where ranks share parameters, every rank calls this, and only the one with `write` keeps and writes.
    """
    directory, config = Path(directory), model.config
    tensors, parts = {}, ((name, parameter.detach()) for name, parameter in model.weights())
    for name, value in model.layout.wholes(config, parts):
        if write:
            tensors |= {n: v.cpu() for n, v in to_hf(config, name, value)}
    if not write:
        return
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    meta = {"architectures": [ARCHITECTURES[config.model_type]], "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config.raw | meta, indent=2) + "\n")
