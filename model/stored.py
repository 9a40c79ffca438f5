"""Parts of tensors, as torch.distributed.checkpoint plans, writes and reads them."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from llm_train_bench.model.weights import Shard

# What PyTorch pickles into a checkpoint's metadata. The file of a stranger could name any function.
PICKLED = """_StorageInfo BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex Size StorageMeta
    TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING _get_layout""".split()


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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (name in PICKLED and module.partition(".")[0] == "torch"):
            return super().find_class(module, name)
        raise ValueError(f".metadata: {module}.{name} is no part of a checkpoint")


class _Planner(DefaultLoadPlanner):
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].values


def _read_metadata(directory: Path) -> Metadata:
    with (directory / ".metadata").open("rb") as f:
        return _Unpickler(f).load()


def stored_tensors(directory: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name, with shape (`size`) and format (`properties.dtype`)."""
    return cast(dict[str, TensorStorageMetadata], _read_metadata(directory).state_dict_metadata)


def read_parts(directory: Path, parts: Mapping[str, Part]) -> None:
    """Fill the values of each named part from a checkpoint, whatever parts its ranks wrote.

    ValueError or RuntimeError for a tensor that is not in it, or has another shape.
    """
    reader, planner = FileSystemReader(directory), _Planner(flatten_state_dict=False)
    planner.metadata = _read_metadata(directory)
    planner.state_dict = dict(parts)
    plan = planner.create_local_plan()
    reader.set_up_storage_reader(planner.metadata, is_coordinator=True)
    reader.read_data(plan, planner).wait()
