"""Parameters in Hugging Face files: reading and writing them."""

import functools
import json
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llm_train_bench.model.config import ConfigError, ModelConfig, load_config
from llm_train_bench.model.config_keys import MTP_KEYS, WITHOUT_EFFECT
from llm_train_bench.model.families import FAMILIES
from llm_train_bench.model.json_files import FACTS, parse_json, plain_file, plain_text
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.lora import adapter_settings
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.model.weights import Weight

# Fields that may differ between the weights' config and the run's: they do not change the function.
TRAINING_KEYS = """name embedding_dropout residual_dropout attention_dropout
    initializer_range pad_token_id mtp_layers""".split()
# Tables that old checkpoints kept beside the weights.
NO_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# A parameter's name to the function that reads it as a row of the run's own table says; a checkpoint's
# has padding rows too.
Pretrained = dict[str, Callable[[Weight], Tensor]]


class _Stored(NamedTuple):
    """A tensor of a safetensors file, by the file's header; `kind` is F32, BF16, ..."""

    path: Path
    name: str
    shape: list[int]
    kind: str

    def read(self) -> Tensor:
        with safe_open(self.path, framework="pt") as f:
            return f.get_tensor(self.name)


def segment_rows(weight: Weight) -> list[Tensor]:
    """The numbers of a parameter's rows, by segment."""
    by_group = torch.arange(sum(weight.segments)).view(weight.groups, -1)
    return [rows.flatten() for rows in by_group.split(weight.group_sizes, dim=1)]


def tensor_rows(weight: Weight) -> list[Tensor]:
    """The numbers of the rows that each of its Hugging Face tensors has, in their order."""
    rows = segment_rows(weight)
    return [
        torch.cat([rows[i].view(hf.groups, -1) for i in hf.segments], dim=1).flatten()
        for hf in weight.hf
    ]


def take_rows(value: Tensor, rows: Tensor, dimension: int) -> Tensor:
    """Those rows of a tensor, along a dimension: a view where they are consecutive."""
    first, count = int(rows[0]), len(rows)
    if torch.equal(rows, torch.arange(first, first + count)):
        return value.narrow(dimension, first, count)
    return value.index_select(dimension, rows.to(value.device))


def to_hf(weight: Weight, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Our parameter (or its gradient) as the Hugging Face tensors it stands for."""
    dimension = 1 if weight.of_experts else 0
    value = value[: len(value) - weight.padding]
    for hf, rows in zip(weight.hf, tensor_rows(weight), strict=True):
        part = take_rows(value, rows, dimension)
        part = part.transpose(-1, -2) if hf.transposed else part
        if weight.module == "attn.conv" and part.ndim == 2:
            part = part.unsqueeze(1)
        for number, expert in enumerate(part) if hf.each_expert else [(0, part)]:
            yield hf.name.format(number), expert.contiguous()


def from_hf(weight: Weight, tensors: list[Tensor]) -> Tensor:
    """The inverse of `to_hf`, without padding rows."""
    dimension, left, parts = 1 if weight.of_experts else 0, iter(tensors), []
    for hf in weight.hf:
        count = weight.shape[0] if hf.each_expert else 1
        own = [next(left) for _ in range(count)]
        part = torch.stack(own) if hf.each_expert else own[0]
        part = part.transpose(-1, -2) if hf.transposed else part
        parts.append(part.squeeze(1) if weight.module == "attn.conv" and part.ndim == 3 else part)
    order = torch.cat(tensor_rows(weight)).argsort()
    value = torch.cat(parts, dimension) if len(parts) > 1 else parts[0]
    return take_rows(value, order, dimension)


def check_pretrained(config: ModelConfig, directory: str | Path | None) -> Pretrained | None:
    """What reads each parameter of a model from a directory of safetensors.

    None without a directory, and for a checkpoint of a run (run/checkpoint). ConfigError if a tensor is
    missing or does not fit, or if the directory's config is of another model. Only headers are read, and
    a head that the config ties to the embedding.
    """
    if directory is None or (Path(directory) / FACTS).exists():
        return None
    directory = Path(directory)
    with torch.device("meta"):
        model = Transformer(config, 1)
    if (directory / "config.json").exists():
        other = load_config(directory, config.vocab_multiple, config.first_layers)
        ours, theirs = config.shape(), other.shape()
        for key in ours | theirs:
            if key not in TRAINING_KEYS and ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{directory}/config.json: {key} is {theirs.get(key)}, but {config.path} "
                    f"says {ours.get(key)}; give the config that belongs to the weights"
                )
    index = _index(directory)
    readers, used = {}, {}
    for weight, parameter in model.weights():
        parts = []
        for hf_name, part in to_hf(weight, parameter.detach()):
            # Hub files of GPT-2 often lack the prefix.
            stored = index.get(hf_name) or index.get(hf_name.removeprefix("transformer."))
            if stored is None:
                raise ConfigError(
                    f"{directory}: has no tensor {hf_name}; are these weights of that model?"
                )
            where = f"{stored.path}: {stored.name}"
            if stored.shape != list(part.shape):
                fit = f"which does not fit {config.path}: it should have {list(part.shape)}"
                raise ConfigError(f"{where} has shape {stored.shape}, {fit}")
            if stored.kind not in ("F64", "F32", "F16", "BF16"):
                raise ConfigError(f"{where} holds {stored.kind}; quantised weights are not read")
            parts.append(stored)
            used[stored.name] = weight.name
        readers[weight.name] = functools.partial(_read, parts)
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


def _further(config: ModelConfig, name: str, index: Container[str]) -> bool:
    """Whether a tensor is of a layer that --layers leaves out, or of multi-token prediction."""
    layer = re.match(r"(?!mtp\.)(\w+\.)?(layers|h)\.(\d+)\.", name)
    if layer and int(layer[3]) >= config.num_hidden_layers:
        return config.first_layers is not None or f"{layer[0]}eh_proj.weight" in index
    return name.startswith("mtp.")


def _read(parts: list[_Stored], weight: Weight) -> Tensor:
    values = []
    for part in parts:
        values.append(part.read())
        if not values[-1].isfinite().all():
            raise ConfigError(f"{part.path}: {part.name} holds numbers that are not finite")
    return from_hf(weight, values)


def _index(directory: Path) -> dict[str, _Stored]:
    """The tensors of model.safetensors, or of the files beside it that its index names, by name."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    path, stored, weight_map = single if single.exists() else index, {}, {}
    if not path.exists():
        raise ConfigError(f"{directory}: has no {single.name} and no {index.name}")
    try:
        if path == index:
            weight_map = parse_json(plain_text(index))["weight_map"]
        for file in {Path(name).name for name in weight_map.values()} or {single.name}:
            path = directory / file
            with safe_open(plain_file(path), framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 (it is not a dictionary)
                    if weight_map.get(name, file) == file:
                        tensor = f.get_slice(name)
                        stored[name] = _Stored(path, name, tensor.get_shape(), tensor.get_dtype())
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return stored


def hf_tensors_of(model: HasWeights, write: bool) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors by their Hugging Face names, or its adapters', on ranks that `write`.

    All ranks iterate.
    """
    parts = ((w, p.detach()) for w, p in model.weights() if not model.lora or w.of_adapter)
    for weight, value in model.layout.gather_parameters(parts):
        if write:
            yield from to_hf(weight, value)


@torch.no_grad()
def save_pretrained(model: HasWeights, directory: str | Path, write: bool = True) -> None:
    """Write config.json and model.safetensors, which `AutoModelForCausalLM` opens; or adapters, for peft.

    Where ranks share parameters, every rank calls this, and only the one with `write` keeps and writes.
    """
    directory, config, prefix = Path(directory), model.config, "adapter_" if model.lora else ""
    tensors = {name: value.cpu() for name, value in hf_tensors_of(model, write)}
    if not write:
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{prefix}model.safetensors"
    path.touch()  # with the permissions that new files have here; safetensors would take them all
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    if model.lora:
        settings = adapter_settings(config.name, model.lora)
    else:
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        settings = dict(architectures=[FAMILIES[config.model_type].architecture], dtype=dtype)
        settings |= {key: 0 for key in MTP_KEYS if config.raw.get(key)}  # the file has no modules
        kept = {key: v for key, v in config.raw.items() if key not in WITHOUT_EFFECT}
        settings = kept | settings
    (directory / f"{prefix}config.json").write_text(json.dumps(settings, indent=2) + "\n")
