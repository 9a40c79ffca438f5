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
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import keep_devices, parser_of, save, show
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import find_hardware
from llm_train_bench.check.collective_rates import collective_rates
from llm_train_bench.measure.device import pick_device
from llm_train_bench.parallel.ranks import Ranks, find_ranks, join, leave


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
    rows = collective_rates(device, args.mib, args.rounds)
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
