"""Parts of tensors, as torch.distributed.checkpoint plans, writes and reads them."""

import dataclasses
import functools
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from llm_train_bench.apply.sharded import local_shard
from llm_train_bench.model.config import ConfigError, ModelConfig
from llm_train_bench.model.hf import Pretrained, misfit, segment_rows
from llm_train_bench.model.weights import Shard, Weight
from llm_train_bench.run.checkpoint.facts import read_facts, reason

# What PyTorch raises for files that are damaged or absent.
UNREADABLE = (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError)


def stored_name(key: str, weight: Weight) -> str:
    """The name of a tensor: `p` or the optimizer's key, the weight's, and the order of its rows."""
    order = f", rows in {weight.groups} groups" if weight.groups > 1 else ""
    return f"{key}/{weight.name}{order}"


class Part(NamedTuple):
    """A rank's part of a tensor: its values, their place in the whole, and the shape of the whole."""

    values: Tensor
    shard: Shard
    shape: tuple[int, ...]

    def size(self) -> torch.Size:
        """The shape of the whole, which must be that of what is read."""
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        offsets, sizes = map(torch.Size, self.shard)
        return [ChunkStorageMetadata(offsets, sizes)] if self.values.numel() else []

    def __create_write_items__(self, name: str, part: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]


class LoadPlanner(DefaultLoadPlanner):
    """Reads a dict of parts by their names."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].values


class SavePlanner(DefaultSavePlanner):
    """Writes a dict of parts by their names."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].values


def stored_tensors(directory: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name, with shape (`size`) and format (`properties.dtype`)."""
    metadata = FileSystemReader(directory).read_metadata()
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


def read_parts(directory: Path, parts: Mapping[str, Part]) -> None:
    """Fill the values of each named part from a checkpoint, whatever parts its ranks wrote.

    ValueError or RuntimeError for a tensor that is not in it, or has another shape.
    """
    reader, planner = FileSystemReader(directory), LoadPlanner(flatten_state_dict=False)
    planner.metadata, planner.state_dict = reader.read_metadata(), dict(parts)
    plan = planner.create_local_plan()
    reader.set_up_storage_reader(planner.metadata, is_coordinator=True)
    reader.read_data(plan, planner).wait()


def weights_of(config: ModelConfig, directory: Path) -> Pretrained:
    """What reads each parameter of a model from a checkpoint of any layout.

    ConfigError if the checkpoint is damaged, or if a tensor is missing or does not fit.
    """
    try:
        read_facts(directory)
        tensors = stored_tensors(directory)
    except UNREADABLE as error:
        raise ConfigError(f"--init-from {directory}: {reason(error)}") from None
    stored = {name.partition(",")[0]: (name, tuple(t.size)) for name, t in tensors.items()}
    readers = {}
    for name, weight in config.weights.items():
        if f"p/{name}" not in stored:
            raise ConfigError(f"{directory}: has no {name}; is it a checkpoint of that model?")
        full_name, shape = stored[f"p/{name}"]
        if shape != weight.shape:
            raise misfit(f"{directory}: {name}", list(shape), config, weight.shape)
        readers[name] = functools.partial(_read_whole, directory, full_name)
    return readers


def _read_whole(directory: Path, name: str, weight: Weight) -> Tensor:
    """A parameter, with its rows in the order of `weight`."""
    value = torch.empty(weight.shape)
    read_parts(directory, {name: Part(*local_shard(value), weight.shape)})
    order = re.search(r", rows in (\d+) groups", name)
    stored = dataclasses.replace(weight, groups=int(order[1]) if order else 1)
    if stored != weight:
        value[torch.cat(segment_rows(weight))] = value[torch.cat(segment_rows(stored))]
    return value
