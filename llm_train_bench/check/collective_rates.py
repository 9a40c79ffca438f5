"""Rates of collectives by size, measured by all ranks of a process group together."""

import statistics
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from llm_train_bench.measure.device import time_steps

# Bus bytes of each collective, in (n - 1) / n of the tensor's.
COLLECTIVES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
MIB = 2**20


def call_of(kind: str, nbytes: int, device: torch.device, world: int) -> Callable[[], object]:
    """A function that runs one collective; `nbytes` is the size of the whole tensor."""
    part = max(1, nbytes // 4 // world)
    whole, own = torch.randn(part * world, device=device), torch.randn(part, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, own)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(own, whole)
    out = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(out, whole)


def seconds_of(call: Callable[[], object], device: torch.device, at_least_s: float = 0.05) -> float:
    """Seconds of a call, of the slowest rank: as many calls as fill `at_least_s` on rank 0."""

    def mean_of(n: int) -> float:
        dist.barrier()
        return time_steps(call, n, device)

    wanted = float(max(1, min(1000, at_least_s / mean_of(1))))  # on all ranks of one type
    n = torch.tensor([wanted], device=device)
    dist.broadcast(n, 0)
    seconds = torch.tensor([mean_of(int(n))], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def collective_rates(device: torch.device, sizes: Sequence[float], rounds: int) -> list[dict]:
    """A row for each kind and size, in turn round after round; the first round does not count."""
    world = dist.get_world_size()
    cases = [(kind, mib) for mib in sizes for kind in COLLECTIVES]
    calls = [call_of(kind, int(mib * MIB), device, world) for kind, mib in cases]
    with warnings.catch_warnings():
        # Torch 2.13 renamed two collectives that 2.11 has under these names only.
        warnings.simplefilter("ignore", FutureWarning)
        _, *times = [[seconds_of(call, device) for call in calls] for _ in range(rounds + 1)]
    rows = []
    for (kind, mib), *seconds in zip(cases, *times, strict=True):
        median = statistics.median(seconds)
        rate = COLLECTIVES[kind] * (world - 1) / world * mib * MIB / median / 1e9
        rows.append({"kind": kind, "mib": mib, "seconds": median, "bus_gb_per_s": rate})
    return rows
