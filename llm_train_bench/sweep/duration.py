"""How long a sweep takes: estimated before it runs, and by its own runs as they end. Needs no torch."""

import statistics
from collections.abc import Sequence

from llm_train_bench.base.errors import DoesNotFit, UsageError
from llm_train_bench.base.hardware import Hardware, find_cpu
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.base.tables import grouped
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.formulas.work import Work
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import Platform
from llm_train_bench.sweep.cell_runs import CellRow
from llm_train_bench.sweep.experiment import Experiment
from llm_train_bench.sweep.grid import Cell, plan_of, sweep_gpu

# Seconds from the start of a process to its first step (6 to 9 on two CPU cores); compilation is extra.
START_S = 8.0


def work_on(cell: Cell, e: Experiment, platform: Platform) -> tuple[Work, Hardware]:
    """A setting's step, and the device that runs it.

    DoesNotFit for a bsz auto of which not even 1 fits; UsageError where the device is not known.
    """
    args = parse_args(cell.argv(), cell.script)
    platform = "cpu" if args.device == "cpu" else platform
    processes = 2 if platform == "cpu" and cell.script != Script.ONE else 1
    world = args.nproc or (e.hardware[platform].gpus if platform in e.hardware else processes)
    gpu = find_cpu(cpu_name(), world) if platform == "cpu" else sweep_gpu(e, platform, e.experiment)
    if gpu is None:
        raise UsageError(f"an experiment file must say the GPU, as hardware: {platform}: gpu")
    return plan_of(args, cell.script, world, platform, gpu, gpu.memory_gib).work, gpu


def estimated_seconds(cells: Sequence[Cell], e: Experiment, platform: Platform) -> float | None:
    """Seconds of a run of each setting, one after the other; None where a device is not known."""
    seconds = 0.0
    for cell in cells:
        args = parse_args(cell.argv(), cell.script)
        try:
            work, device = work_on(cell, e, platform)
            step_s = estimate_speed(work, device).step_s
        except DoesNotFit:
            step_s = 0.0
        except UsageError:
            return None
        seconds += min(START_S + step_s * (args.warmup_steps + args.n_steps), e.timeout_s)
    return seconds


def time_left(cells: Sequence[Cell], done: Sequence[tuple[Cell, CellRow]]) -> str:
    """How long a run of each of `cells` takes: the mean of the setting's runs so far, or of all."""
    walls = [(cell, row["wall_s"]) for cell, row in done if "wall_s" in row]
    if not walls:
        return "time left unknown"
    mean = statistics.fmean(wall_s for _, wall_s in walls)
    means = {
        cell: statistics.fmean(wall_s for _, wall_s in runs)
        for cell, runs in grouped(walls, lambda pair: pair[0]).items()
    }
    return f"{duration_text(sum(means.get(cell, mean) for cell in cells))} left"


def duration_text(seconds: float) -> str:
    """Seconds as people say them: 40 s, 5 min 20 s, 3 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
