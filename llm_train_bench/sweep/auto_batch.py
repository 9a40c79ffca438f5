"""--auto-bsz: try micro batches of a setting, and find the largest that runs. Needs no torch."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import find_hardware
from llm_train_bench.base.machine import detect_platform
from llm_train_bench.formulas.memory_model import largest_batch
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.sweep.cell_runs import Rows, probe
from llm_train_bench.sweep.experiment import Experiment
from llm_train_bench.sweep.grid import Cell, plan_of


def check_auto_batch(e: Experiment) -> None:
    """UsageError where a searched micro batch would change what the experiment fixes."""
    if e.methodology == "identical_config":
        raise UsageError("--auto-bsz: batches would differ, and methodology is identical_config")
    flags = [e.training, e.grid, *e.cells, *e.platforms.values()]
    if any("global_bsz" in group for group in flags):
        raise UsageError("--auto-bsz chooses --bsz, which global_bsz would bind; leave one out")


def with_largest_batch(cell: Cell, rows: Rows, timeout_s: float, gpu: str | None) -> Cell:
    """The setting with the largest micro batch that runs; every attempt is a row (`probe`)."""

    def runs(bsz: int) -> bool:
        if bsz > most:
            return False
        short = {"bsz": bsz, "n_steps": 2, "warmup_steps": 3, "no_tensorboard": True}
        row = probe(cell, short, rows, timeout_s, f"--bsz {bsz}")
        return row["status"] == "ok"

    first, most = guess_batch(cell, gpu)
    best = search_batch(runs, first)
    if not best:
        print(f"  not even --bsz 1 runs: {cell.label()}", flush=True)
    axes = tuple(dict.fromkeys([*cell.axes, "bsz"]))
    # If not even 1 runs, its row says why.
    return dataclasses.replace(cell.with_flags({"bsz": max(1, best)}), axes=axes)


def guess_batch(cell: Cell, gpu: str | None) -> tuple[int, float]:
    """First size to try, and the largest: what estimate.py says fits the named GPU, and no bound.

    Without a GPU: the setting's own size, and what fits this machine's free memory. A CPU that runs
    out of memory may take other processes down.
    """
    args = parse_args(cell.argv(), cell.script)
    if args.bsz == "auto":
        raise UsageError("--auto-bsz tries batches, and bsz is auto, the estimate's; leave one out")
    hardware = find_hardware(gpu) if gpu is not None else None
    platform = hardware.platform if hardware else detect_platform()
    plan = plan_of(args, cell.script, args.nproc, platform)

    def memory(bsz: int) -> float:
        return plan.needs(plan.work.with_micro_batch(bsz))

    if hardware is not None:
        return max(1, largest_batch(memory, hardware.memory_gib * 2**30)), math.inf
    if platform != "cpu":
        return args.bsz, math.inf
    free = 2.0**40
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = 1024.0 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
    return args.bsz, largest_batch(memory, 0.8 * free)


def search_batch(runs: Callable[[int], bool], first: int, closeness: float = 0.03) -> int:
    """The largest size for which `runs(size)` is true, to within `closeness`; 0 if not even 1 is.

    Starts at `first` (an estimate). It goes up by a quarter, then by more, or down by half, until
    one size runs and one does not. Then it bisects between them.
    """
    size, good, bad, growth = max(1, first), 0, None, 0.25
    while True:
        if runs(size):
            good = size
        else:
            bad = size
        if bad is not None and bad - good <= max(1, closeness * good):
            return good
        size = good + max(1, int(good * growth)) if bad is None else (good + bad) // 2
        growth = min(1.0, 2 * growth)
