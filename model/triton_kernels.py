"""A Triton kernel for initial values."""

# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _hashed_choice(table, out, total, first, second, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = ((pair & 0xFFFFFFFF).to(tl.uint32) ^ first).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h ^= (second + (pair >> 32) * 0x9E3779B1).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x27D4EB2F
    h = (h ^ (h >> 15)) * 0x165667B1
    h ^= h >> 16
    for half in tl.static_range(2):
        place = 2 * pair + half
        index = ((h >> (16 * half)) & 0xFFFF) ^ 0x8000
        value = tl.load(table + index, mask=place < total)
        tl.store(out + place, value, mask=place < total)


def hashed_choice(table: Tensor, out: Tensor, first: int, second: int) -> None:
    """Set `out` (n,) to entries of `table` (65536,), by the hash of `model.init.fill_normal`."""
    total, block = out.numel(), 1024
    _hashed_choice[(triton.cdiv(total, 2 * block),)](
        table, out, total, first, second, block, num_warps=4
    )
