"""Collectives by size: the bus bandwidth that ranks really get, and the latency of small ones.

    python benchmarks/collectives.py [--nproc N] [--mib X ...] [--rounds N] [--hardware NAME]
    torchrun --nproc-per-node 8 benchmarks/collectives.py

All-reduce, all-gather, reduce-scatter and all-to-all of fp32 tensors, by NCCL or RCCL on GPUs, gloo on a
CPU. The size is that of the whole tensor; bus bandwidth is what a ring has on each link: (n - 1) / n of
the bytes over the time, twice that for an all-reduce (nccl-tests, PERFORMANCE.md). `--hardware NAME`
writes an entry for the user's own hardware.json with the measured `ring_gb_per_s`, which estimates take.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common import save
from llm_train_bench.errors import UsageError
from llm_train_bench.files import write_whole
from llm_train_bench.formulas.hardware import devices, find_hardware, own_hardware_file
from llm_train_bench.measure.device import pick_device, synchronize
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
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    n = torch.tensor([max(1, min(1000, at_least_s / (time.perf_counter() - begin)))], device=device)
    dist.broadcast(n, 0)
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(int(n)):
        call()
    synchronize(device)
    spent = torch.tensor([(time.perf_counter() - begin) / int(n)], device=device)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def measure(device: torch.device, ranks: Ranks, sizes: list[float], rounds: int) -> list[dict]:
    """A row for each kind and size, in turn round after round; the first round does not count."""
    calls = {
        (kind, mib): call_of(kind, int(mib * MIB), device, ranks.world)
        for mib in sizes
        for kind in KINDS
    }
    times: dict[tuple[str, float], list[float]] = {key: [] for key in calls}
    for number in range(rounds + 1):
        for key, call in calls.items():
            seconds = seconds_of(call, device)
            times[key] += [seconds] * (number > 0)
    rows = []
    for (kind, mib), seconds in times.items():
        carried = KINDS[kind] * (ranks.world - 1) / ranks.world * mib * MIB
        rows.append({
            "kind": kind, "mib": mib, "seconds": [min(seconds), statistics.median(seconds)],
            "bus_gb_per_s": carried / statistics.median(seconds) / 1e9,
        })  # fmt: skip
    return rows


def keep_for_estimates(name: str, rows: list[dict]) -> None:
    """Write the bus bandwidth of the largest gathers into the user's own hardware.json."""
    largest = max(row["mib"] for row in rows)
    kinds = ("all_gather", "reduce_scatter")
    rate = min(r["bus_gb_per_s"] for r in rows if r["mib"] == largest and r["kind"] in kinds)
    known, path = find_hardware(name), own_hardware_file()
    entry = {
        "name": known.name, "driver_names": list(known.driver_names), "bf16_tflops": known.bf16_tflops,
        "memory_gib": known.memory_gib, "memory_tb_per_s": known.memory_tb_per_s,
    }  # fmt: skip
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"devices": []}
    same = [e for e in content["devices"] if e.get("name") == known.name]
    if same:
        entry = same[0]
    else:  # all that is known of it, so that the user's entry hides nothing
        more = ("fp8_tflops", "fp32_tflops", "mxfp8", "tdp_w", "nic_gb_per_s", "measured_bf16_tflops",
                "measured_fp8_tflops", "usd_per_hour", "fitted")  # fmt: skip
        entry |= {key: getattr(known, key) for key in more}
        content["devices"].append(entry)
    entry["ring_gb_per_s"] = round(rate, 2)
    entry["source"] = (
        f"{entry.get('source', known.source)}; ring_gb_per_s: benchmarks/collectives.py"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")
    devices.cache_clear()
    print(f"ring_gb_per_s of {known.name}: {rate:.1f}, in {path}")


def worker(rank: int, world: int, args: argparse.Namespace, meeting: str) -> None:
    """One rank that this script started."""
    import os

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    device = pick_device(args.device, rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
    run(device, Ranks(rank, world, rank), args)
    dist.destroy_process_group()


def run(device: torch.device, ranks: Ranks, args: argparse.Namespace) -> None:
    """Measure; rank 0 prints and saves."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = measure(device, ranks, args.mib, args.rounds)
    if not ranks.main:
        return
    table = Table(box=box.MARKDOWN)
    for name in ("collective", "MiB", "ms: min, median", "bus GB/s"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for row in rows:
        low, middle = (1e3 * s for s in row["seconds"])
        table.add_row(row["kind"], f"{row['mib']:g}", f"{low:.3f}, {middle:.3f}",
                      f"{row['bus_gb_per_s']:.2f}")  # fmt: skip
    print(f"{ranks.world} ranks, {device.type}")
    Console(width=100, highlight=False).print(table)
    if args.hardware:
        keep_for_estimates(args.hardware, rows)
    if not args.no_save:
        save("collectives", {"ranks": ranks.world, "rounds": args.rounds, "rows": rows}, device)


def main() -> None:
    """Join a launcher's ranks, or start one a device."""
    import os
    import tempfile

    import torch.multiprocessing as mp

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nproc", type=int, help="Ranks to start; by default one a GPU, two on a CPU."
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--mib", type=float, nargs="+", default=[0.001, 0.1, 1, 10, 100],
                        help="Sizes of the whole tensor [MiB].")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--hardware", metavar="NAME", help="Keep the rate for estimates of this GPU."
    )
    parser.add_argument("--no-save", action="store_true", help="Only print.")
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
            return
        cuda = args.device != "cpu" and torch.cuda.is_available()
        n = args.nproc or (torch.cuda.device_count() if cuda else 2)
        if n < 2:
            raise UsageError("one rank has nothing to exchange; use --nproc 2 --device cpu")
    except UsageError as error:
        raise SystemExit(f"collectives.py: {error}") from None
    with tempfile.TemporaryDirectory(prefix="llm-train-bench-") as private:
        mp.spawn(worker, (n, args, f"{private}/meeting"), nprocs=n)


if __name__ == "__main__":
    main()
