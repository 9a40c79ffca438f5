"""Tensors that lie in parts in several safetensors files: writing a file, reading any block of one."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from llm_train_bench.model.weights import Shard

DTYPES = dict(F64=torch.float64, F32=torch.float32, BF16=torch.bfloat16, F16=torch.float16)
DTYPES |= dict(U8=torch.uint8, I64=torch.int64)
NAMES = {dtype: name for name, dtype in DTYPES.items()}


# The version of a checkpoint's manifest, and what is said of another, or of a tensor in another order.
MANIFEST_VERSION = 3
EXPORT = "export it there (--init-from CHECKPOINT --export), and give the export to --init-from"
OTHER_VERSION = f"is a checkpoint of another version of llm-train-bench; {EXPORT}"
OTHER_ORDER = (
    "has rows in another order: only one of the two runs has Transformer Engine's modules; "
    "use --init-from"
)


@dataclasses.dataclass(frozen=True)
class StoredShard:
    """A shard of a tensor, and the file that has it."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (it is part of a manifest's schema)

    file: str
    shard: Shard


def encoded(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, piece by piece, without a second copy of the tensors (CPU)."""
    header, position = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        shape, offsets = list(tensor.shape), [position, position + size]
        header[name] = dict(dtype=NAMES[tensor.dtype], shape=shape, data_offsets=offsets)
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            yield tensor.contiguous().flatten().view(torch.uint8).numpy().data


def read_block(
    directory: Path, name: str, parts: Sequence[StoredShard], shard: Shard, dtype: torch.dtype
) -> Tensor:
    """Any shard of a stored tensor, on the CPU; only the bytes that it needs are read."""
    block = torch.empty(shard.sizes, dtype=dtype)
    filled = 0
    for part in parts:
        cut = [
            (max(a, b), min(a + n, b + m), a, b)
            for a, n, b, m in zip(*shard, *part.shard, strict=True)
        ]
        if any(end <= begin for begin, end, _, _ in cut):
            continue
        ours = tuple(slice(begin - a, end - a) for begin, end, a, _ in cut)
        theirs = tuple(slice(begin - b, end - b) for begin, end, _, b in cut)
        with safe_open(directory / part.file, framework="pt") as f:
            value = f.get_slice(name)[theirs] if theirs else f.get_tensor(name)
        block[ours].copy_(value)
        filled += value.numel()
    if filled != block.numel():
        raise ValueError(f"{directory}: {name} is not complete in it")
    return block
