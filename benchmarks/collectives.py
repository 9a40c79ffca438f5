"""Collectives by size: the bus bandwidth that ranks really get, and the latency of small ones.

    python benchmarks/collectives.py [--nproc N] [--mib X ...] [--rounds N] [--hardware NAME]
    torchrun --nproc-per-node 8 benchmarks/collectives.py

All-reduce, all-gather, reduce-scatter and all-to-all of fp32 tensors, by NCCL or RCCL on GPUs, gloo on a
CPU. The size is that of the whole tensor; bus bandwidth is what a ring has on each link: (n - 1) / n of
the bytes over the time, twice that for an all-reduce (nccl-tests, PERFORMANCE.md). `--hardware NAME`
writes an entry for the user's own hardware.json with the measured `ring_gb_per_s`, which estimates take.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

from benchmarks.common import keep_devices, parser_of, save, show, time_steps
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import find_hardware
from llm_train_bench.measure.device import pick_device
from llm_train_bench.parallel.ranks import Ranks, find_ranks, join, leave

# Torch 2.13 renamed two collectives that 2.11 has under these names only.
warnings.filterwarnings("ignore", category=FutureWarning)
KINDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
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

    n = torch.tensor([max(1, min(1000, at_least_s / mean_of(1)))], device=device)
    dist.broadcast(n, 0)
    seconds = torch.tensor([mean_of(int(n))], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def measure(device: torch.device, ranks: Ranks, sizes: list[float], rounds: int) -> list[dict]:
    """A row for each kind and size, in turn round after round; the first round does not count."""
    cases = [(kind, mib) for mib in sizes for kind in KINDS]
    calls = [call_of(kind, int(mib * MIB), device, ranks.world) for kind, mib in cases]
    _, *times = [[seconds_of(call, device) for call in calls] for _ in range(rounds + 1)]
    rows = []
    for (kind, mib), *seconds in zip(cases, *times, strict=True):
        median = statistics.median(seconds)
        rate = KINDS[kind] * (ranks.world - 1) / ranks.world * mib * MIB / median / 1e9
        row = {"kind": kind, "mib": mib, "seconds": [min(seconds), median]}
        rows.append(row | {"bus_gb_per_s": rate})
    return rows


def keep_for_estimates(name: str, rows: list[dict]) -> None:
    """Write the bus bandwidth of the largest gathers into the user's own hardware.json."""
    largest = max(row["mib"] for row in rows)
    kinds = ("all_gather", "reduce_scatter")
    rate = min(r["bus_gb_per_s"] for r in rows if r["mib"] == largest and r["kind"] in kinds)
    # All that is known of it, so that the user's entry hides nothing.
    entry = dataclasses.asdict(find_hardware(name))
    entry["ring_gb_per_s"] = round(rate, 2)
    entry["source"] += "; ring_gb_per_s: benchmarks/collectives.py"
    print(f"ring_gb_per_s of {entry['name']}: {rate:.1f}, in {keep_devices([entry])}")


def run(device: torch.device, ranks: Ranks, args: argparse.Namespace) -> None:
    """Measure; rank 0 prints and saves."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = measure(device, ranks, args.mib, args.rounds)
    if not ranks.main:
        return
    print(f"{ranks.world} ranks, {device.type}")
    cells = []
    for row in rows:
        times = ", ".join(f"{1e3 * s:.3f}" for s in row["seconds"])
        cells.append((row["kind"], f"{row['mib']:g}", times, f"{row['bus_gb_per_s']:.2f}"))
    show(("collective", "MiB", "ms: min, median", "bus GB/s"), cells)
    if args.hardware:
        keep_for_estimates(args.hardware, rows)
    if not args.no_save:
        save("collectives", {"ranks": ranks.world, "rounds": args.rounds, "rows": rows}, device)


def main() -> int:
    """Join a launcher's ranks, or start one a device; returns the exit code."""
    parser = parser_of(__doc__, 5)
    parser.add_argument("--nproc", type=int, help="Ranks to start; default: GPUs, or 2 on a CPU.")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--mib", type=float, nargs="+", help="Sizes of the whole tensor [MiB].")
    parser.add_argument("--hardware", metavar="NAME", help="GPU whose estimates take the rate.")
    parser.add_argument("--no-save", action="store_true", help="Only print.")
    parser.set_defaults(mib=[0.001, 0.1, 1, 10, 100])
    args = parser.parse_args()
    try:
        if args.hardware:
            find_hardware(args.hardware)
        ranks = find_ranks(os.environ)
        if ranks is not None:
            device = pick_device(args.device, ranks.local_rank)
            join(ranks, device, 600)
            run(device, ranks, args)
            leave()
            return 0
        cuda = args.device != "cpu" and torch.cuda.is_available()
        n = args.nproc or (torch.cuda.device_count() if cuda else 2)
        if n < 2:
            raise UsageError("one rank has nothing to exchange; use --nproc 2 --device cpu")
    except UsageError as error:
        raise SystemExit(f"collectives.py: {error}") from None
    # "--", since its parser would take --nproc for an option of its own.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return subprocess.run([sys.executable, *launcher, "--", *sys.argv]).returncode


if __name__ == "__main__":
    sys.exit(main())
