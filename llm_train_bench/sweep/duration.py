"""How long a sweep takes: estimated before it runs, and from its own runs as they end. Needs no torch."""

import statistics
from collections.abc import Iterable, Sequence

from llm_train_bench.base.errors import DoesNotFit, UsageError
from llm_train_bench.base.hardware import Hardware, find_cpu
from llm_train_bench.base.machine import cpu_name, n_cores
from llm_train_bench.formulas.flops import step_flops_per_token
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
# FLOP/s of a core that was never measured: in fp32, small models reach 6e10 and 12e10 on two AMD EPYCs.
CPU_FLOPS = 8e10
Name = tuple[str, str]


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


class Durations:
    """Seconds of runs: as a setting's own runs took, or scaled from others by the work of the steps."""

    def __init__(self, cells: Sequence[Cell], e: Experiment, platform: Platform):
        self.timeout_s, self.estimated, self.on_cpu = e.timeout_s, True, platform == "cpu"
        self.work: dict[Name, float] = {}  # seconds of all steps, as far as they are known
        for cell in cells:
            try:
                work, device = work_on(cell, e, platform)
                self.work[name_of(cell)] = estimate_speed(work, device).step_s * n_steps(cell)
            except DoesNotFit:
                self.work[name_of(cell)] = 0.0
            except UsageError:  # the device is not known
                self.estimated = False
        for cell in [] if self.estimated else cells:
            args = parse_args(cell.argv(), cell.script)
            work = plan_of(args, cell.script, args.nproc, platform).work
            flops = step_flops_per_token(work, causal=True) * work.batch.tokens_per_step
            self.work[name_of(cell)] = flops * n_steps(cell) / (CPU_FLOPS * n_cores())
        self.walls: dict[Name, list[float]] = {}
        self.starts: list[float] = []  # of each run, the seconds beside its steps
        self.scales: list[float] = []  # and its seconds per unit of work

    def add(self, cell: Cell, row: CellRow) -> None:
        """A run has ended."""
        if (wall := row.get("wall_s")) is None:
            return
        self.walls.setdefault(name_of(cell), []).append(wall)
        if times := row.get("step_times_s"):
            stepping = statistics.fmean(times) * n_steps(cell)
            self.starts.append(max(0.0, wall - stepping))
            if work := self.work[name_of(cell)]:
                self.scales.append(stepping / work)

    def of(self, cells: Iterable[Cell]) -> float | None:
        """Seconds of one run of each, one after the other; None where nothing tells."""
        seconds = [self._of_one(cell) for cell in cells]
        return None if None in seconds else sum(filter(None, seconds))

    def _of_one(self, cell: Cell) -> float | None:
        if walls := self.walls.get(name_of(cell)):
            return statistics.fmean(walls)
        if not (self.scales or self.estimated or self.on_cpu):
            return None
        scale = statistics.median(self.scales) if self.scales else 1.0
        start = statistics.median(self.starts) if self.starts else START_S
        return min(start + scale * self.work[name_of(cell)], self.timeout_s)


def name_of(cell: Cell) -> Name:
    """What tells a setting from others of its sweep."""
    return cell.config, cell.label()


def n_steps(cell: Cell) -> int:
    """Steps of a setting's run, with warm-up."""
    args = parse_args(cell.argv(), cell.script)
    return args.warmup_steps + args.n_steps


def duration_text(seconds: float) -> str:
    """Seconds as people say them: 40 s, 5 min 20 s, 3 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
