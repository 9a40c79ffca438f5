"""First values of a model's parameters.

`Weight.init` says what a parameter's values are; the scheme is GPT-2's (Radford et al. 2019): weights
that write into the residual stream are smaller. A random value is a function of the run's seed, its
parameter's name and its place in the parameter. Only integer and exactly rounded operations make it, so
that every device has the same values, bit for bit, in every layout of ranks.
"""

import functools
import hashlib
import statistics

import torch
from torch import Tensor

from llm_train_bench.model.hf import Pretrained, segment_rows
from llm_train_bench.model.weights import Ramp, Weight


def fill(
    parameter: Tensor, weight: Weight, seed: int, pretrained: Pretrained | None = None
) -> None:
    """Set or read one whole parameter in place.

    Rows take their random numbers segment by segment, whatever the order in which they lie.
    """
    real = parameter[: len(parameter) - weight.padding]
    parameter[len(real) :].zero_()
    if pretrained is not None and weight.name in pretrained:
        real.copy_(pretrained[weight.name](weight)[: len(real)])
    elif isinstance(weight.init, Ramp):
        ramp = torch.linspace(*weight.init, real.numel(), device="cpu")
        real.copy_(ramp.view_as(real))
    elif weight.groups == 1:
        fill_normal(real, weight.init.std, f"{seed}/{weight.name}")
    else:
        values = torch.empty_like(real)
        fill_normal(values, weight.init.std, f"{seed}/{weight.name}")
        real[torch.cat(segment_rows(weight)).to(real.device)] = values


LEVELS = 2**16
# Shifts and odd factors of the hashes: MurmurHash3's 32-bit finaliser, and two more as in xxHash.
ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0x27D4EB2F), (15, 0x165667B1))
# Hashes made at once: their temporary tensors fit a CPU's cache, or take 64 MiB on a GPU.
CPU_HASHES, GPU_HASHES = 2**15, 2**22


@functools.cache
def quantiles() -> Tensor:
    """(65536,) float64: the normal distribution's quantiles at (i + 1/2) / 65536, in order.

    To ten decimals, which are the same by every compiler's arithmetic.
    """
    at, half = statistics.NormalDist().inv_cdf, range(LEVELS // 2)
    lower = torch.tensor([round(at((i + 0.5) / LEVELS), 10) for i in half], dtype=torch.float64)
    return torch.cat((lower, -lower.flip(0)))


@functools.lru_cache(4)
def _scaled_quantiles(std: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (quantiles() * std).to(dtype).to(device)


@torch.no_grad()
def fill_normal(values: Tensor, std: float, key: str) -> None:
    """Set a contiguous tensor in place to normal numbers by a hash of `key` and place.

    Each is one of 65536 numbers. Two values are the halves of a 32-bit hash of their number, by two keys
    and rounds as in MurmurHash3.
    """
    digest, out = hashlib.sha256(key.encode()).digest(), values.view(-1)
    first, second = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    table = _scaled_quantiles(std, values.dtype, values.device)
    pairs = (len(out) + 1) // 2
    at_once = min(GPU_HASHES if out.device.type == "cuda" else CPU_HASHES, pairs)
    options = {"dtype": torch.int32, "device": out.device}
    positions, indices = torch.arange(at_once, **options), torch.empty(2 * at_once, **options)
    h, spare = torch.empty_like(positions), torch.empty_like(positions)

    def mix(shift: int) -> Tensor:
        """The hashes, XORed in place by themselves, shifted right with zeros coming in."""
        torch.bitwise_right_shift(h, shift, out=spare)
        return h.bitwise_xor_(spare.bitwise_and_(2 ** (32 - shift) - 1))

    for start in range(0, pairs, at_once):
        torch.add(positions, _signed(start), out=h)
        h.bitwise_xor_(first)
        for shift, factor in ROUNDS[:2]:
            mix(shift).mul_(_signed(factor))
        h.bitwise_xor_(_signed(second + (start >> 32) * 0x9E3779B1))
        for shift, factor in ROUNDS[2:]:
            mix(shift).mul_(_signed(factor))
        mix(16)
        part = out[2 * start : 2 * (start + at_once)]
        indices.copy_(h.view(torch.int16)).add_(LEVELS // 2)
        torch.index_select(table, 0, indices[: len(part)], out=part)


def _signed(number: int) -> int:
    """The lowest 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
