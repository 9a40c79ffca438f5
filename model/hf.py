"""Hugging Face weights: names, layouts, reading and writing safetensors."""

import functools
import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llm_train_bench.model.config import ConfigError, ModelConfig, load_config
from llm_train_bench.model.config_keys import WITHOUT_EFFECT
from llm_train_bench.model.families import FAMILIES, MTP_KEYS
from llm_train_bench.model.hf_names import hf_names, row_sizes
from llm_train_bench.model.json_keys import parse_json, plain_file, plain_text
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.lora import adapter_settings, adapters_of
from llm_train_bench.model.stored import Part, read_block
from llm_train_bench.model.transformer import Transformer

# Qwen3MoeForCausalLM of qwen3_moe; some are called differently.
ARCHITECTURES = {kind: f"{kind.title().replace('_', '')}ForCausalLM" for kind in FAMILIES}
ARCHITECTURES |= dict(
    gpt2="GPT2LMHeadModel", smollm3="SmolLM3ForCausalLM", kimi_k2="DeepseekV3ForCausalLM",
    qwen3_5_text="Qwen3_5ForCausalLM", qwen3_5_moe_text="Qwen3_5MoeForCausalLM",
    granitemoehybrid="GraniteMoeHybridForCausalLM", minimax_m2="MiniMaxM2ForCausalLM",
    hy_v3="HYV3ForCausalLM", gemma3_text="Gemma3ForCausalLM",
)  # fmt: skip
# Fields that may differ between the weights' config and the run's: they do not change the function.
TRAINING_KEYS = """name path raw unknown_keys embedding_dropout residual_dropout attention_dropout
    initializer_range pad_token_id mtp_layers""".split()
# Tables that old checkpoints kept beside the weights.
NO_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# A parameter's name to the function that reads it, whole but for padding rows.
Pretrained = dict[str, Callable[[], Tensor]]


class _Stored(NamedTuple):
    """A tensor of a safetensors file, by the file's header; `kind` is F32, BF16, ..."""

    path: Path
    name: str
    shape: list[int]
    kind: str

    def read(self) -> Tensor:
        with safe_open(self.path, framework="pt") as f:
            return f.get_tensor(self.name)


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


def to_hf(config: ModelConfig, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Our parameter (or its gradient) as the Hugging Face tensors it stands for."""
    if name in ("embed.weight", "lm_head.weight"):
        value = value[: config.vocab_size]
    value, names = _converted(config, name, value), hf_names(config, name)
    sizes = row_sizes(config, name, names)
    parts = value.chunk(len(names)) if sizes is None else value.split(sizes)
    for hf_name, part in zip(names, parts, strict=True):
        yield hf_name, part.contiguous()


def check_pretrained(config: ModelConfig, directory: str | Path | None) -> Pretrained | None:
    """What reads each parameter of a model from a directory of safetensors.

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
        other = load_config(directory, config.vocab_multiple, config.first_layers)
        ours, theirs = vars(config), vars(other)
        differ = [key for key in ours if ours[key] != theirs[key] and key not in TRAINING_KEYS]
        if differ:
            key = differ[0]
            raise ConfigError(
                f"{directory}/config.json: {key} is {theirs[key]}, but {config.path} "
                f"says {ours[key]}; give the config that belongs to the weights"
            )
    index = _index(directory)
    readers, used = {}, {}
    for name, parameter in model.weights():
        parts = []
        for hf_name, part in to_hf(config, name, parameter.detach()):
            # Hub files of GPT-2 often lack the prefix.
            stored = index.get(hf_name) or index.get(hf_name.removeprefix("transformer."))
            if stored is None:
                raise ConfigError(
                    f"{directory}: has no tensor {hf_name}; are these weights of that model?"
                )
            where = f"{stored.path}: {stored.name}"
            if stored.shape != list(part.shape):
                raise _misfit(where, stored.shape, config, part.shape)
            if stored.kind not in ("F64", "F32", "F16", "BF16"):
                raise ConfigError(f"{where} holds {stored.kind}; quantised weights are not read")
            parts.append(stored)
            used[stored.name] = name
        readers[name] = functools.partial(_read, config, name, parameter.shape, parts)
    for name in index.keys() - used.keys():
        if config.tie_word_embeddings and name == "lm_head.weight":
            embed = next(theirs for theirs, ours in used.items() if ours == "embed.weight")
            if not torch.equal(index[name].read(), index[embed].read()):
                raise ConfigError(
                    f"{index[name].path}: {name} is not {embed}, though config.json ties them; set "
                    "tie_word_embeddings to false in it, and in the run's config"
                )
        elif not name.endswith(NO_PARAMETERS) and not _further(config, name, index):
            raise ConfigError(
                f"{index[name].path}: {name} has no place in {config.path}; are these weights of that "
                "model?"
            )
    return readers


def _misfit(name: str, shape: list[int], config: ModelConfig, right: Sequence[int]) -> ConfigError:
    fit = f"which does not fit {config.path}: it should have {list(right)}"
    return ConfigError(f"{name} has shape {shape}, {fit}")


def _further(config: ModelConfig, name: str, index: Container[str]) -> bool:
    """Whether a tensor is of a layer that --layers leaves out, or of multi-token prediction."""
    later = re.match(r"(\w+\.)?(layers|h)\.(\d+)\.", name) if config.first_layers else None
    if later and int(later[3]) >= config.num_hidden_layers:
        return True
    layer = name.removeprefix("model.layers.").partition(".")[0]
    after = layer.isdecimal() and int(layer) >= config.num_hidden_layers
    after &= f"model.layers.{layer}.eh_proj.weight" in index
    return after or name.startswith("mtp.")


def _check_checkpoint(model: Transformer, directory: Path) -> Pretrained:
    """What reads each parameter from a checkpoint of ours, whose tensors have our names and layouts."""
    readers = {}
    try:
        stored = parse_json((directory / "manifest.json").read_text())["manifest"]["tensors"]
        for name, parameter in model.weights():
            if (tensor := stored.get(f"p/{name}")) is None:
                raise ConfigError(f"{directory}: has no {name}; is it a checkpoint of that model?")
            if (shape := list(tensor["shape"])) != list(parameter.shape):
                raise _misfit(f"{directory}: {name}", shape, model.config, parameter.shape)
            parts = [Part(**part) for part in tensor["parts"]]
            block = [0] * len(shape), shape, torch.float32
            readers[name] = functools.partial(read_block, directory, f"p/{name}", parts, *block)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{directory}: is no checkpoint of this model: {error!r}") from None
    return readers


def _read(config: ModelConfig, name: str, shape: Sequence[int], parts: list[_Stored]) -> Tensor:
    values = []
    for part in parts:
        values.append(part.read())
        if not values[-1].isfinite().all():
            raise ConfigError(f"{part.path}: {part.name} holds numbers that are not finite")
    return _converted(config, name, torch.cat(values), shape)


def _index(directory: Path) -> dict[str, _Stored]:
    """The tensors of a directory's safetensors files, by name."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not single.exists() and not index.exists():
        raise ConfigError(
            f"{directory}: has no model.safetensors and no model.safetensors.index.json"
        )
    path, stored = single, {}
    try:
        files, weight_map = {single.name}, {}
        if not single.exists():
            path = index
            weight_map = parse_json(plain_text(index, encoding="utf-8-sig"))["weight_map"]
            files = {*weight_map.values()}
        for file in files:
            if Path(file).name != file:
                raise ConfigError(f"{index}: {file!r} is no name of a file beside it")
            path = plain_file(directory / file)
            with safe_open(path, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 (it is no dictionary)
                    if weight_map.get(name, file) == file:
                        tensor = f.get_slice(name)
                        stored[name] = _Stored(path, name, tensor.get_shape(), tensor.get_dtype())
    except ConfigError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return stored


def _tensors_of(model: HasWeights, write: bool) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors by their Hugging Face names, on ranks that `write`; all ranks iterate."""
    parts = ((name, parameter.detach()) for name, parameter in model.weights())
    for name, value in model.layout.wholes(model.config, parts):
        if write:
            yield from to_hf(model.config, name, value)


@torch.no_grad()
def save_pretrained(model: HasWeights, directory: str | Path, write: bool = True) -> None:
    """Write config.json and model.safetensors, which `AutoModelForCausalLM` opens; or adapters, for peft.

    Where ranks share parameters, every rank calls this, and only the one with `write` keeps and writes.
    """
    directory, config, prefix = Path(directory), model.config, "adapter_" if model.lora else ""
    pairs = adapters_of(model) if model.lora else _tensors_of(model, write)
    tensors = {name: value.cpu() for name, value in pairs if write}
    if not write:
        return
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / f"{prefix}model.safetensors", metadata={"format": "pt"})
    if model.lora:
        settings = adapter_settings(model, tensors)
    else:
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        settings = dict(architectures=[ARCHITECTURES[config.model_type]], dtype=dtype)
        settings |= {key: 0 for key in MTP_KEYS if config.raw.get(key)}  # the file has no modules
        kept = {key: v for key, v in config.raw.items() if key not in WITHOUT_EFFECT}
        settings = kept | settings
    (directory / f"{prefix}config.json").write_text(json.dumps(settings, indent=2) + "\n")
