"""An experiment resolved to cells, each a command line that a script takes. Needs no torch."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any, get_args

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import Hardware, device_called, find_cpu, find_hardware
from llm_train_bench.base.machine import cpu_name, detect_platform, gpu_name
from llm_train_bench.compare.setting import setting_name
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import model_name
from llm_train_bench.model.json_files import shipped_config
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import (
    SETTABLE,
    USUAL_STAGES,
    Args,
    Script,
    differing,
    to_argv,
    usual_values,
)
from llm_train_bench.settings.plan import Plan, Platform, make_plan
from llm_train_bench.settings.run_file import read_flags
from llm_train_bench.sweep.experiment import Experiment, Flags


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting: the script, its model and its flags; `axes` is what tells it from other cells."""

    script: Script
    config: str
    flags: tuple[tuple[str, Any], ...]
    axes: tuple[str, ...]
    resolved: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """All arguments as its plan has them, and its global batch where the number of ranks is known."""

    @property
    def model(self) -> str:
        """The model's name."""
        return model_name(self.config, dict(self.flags).get("layers"))

    @functools.cached_property
    def args(self) -> Args:
        """Its command line, checked; UsageError."""
        return parse_args(self.argv(), self.script)

    @property
    def world(self) -> int | None:
        """Ranks of its run; None where that is left to the machine that runs it."""
        return 1 if self.script is Script.ONE else self.args.nproc

    def argv(self) -> list[str]:
        """Model and flags as a command line."""
        return [self.config, *to_argv(dict(self.flags))]

    def label(self) -> str:
        """The model and the values on the axes."""
        flags = usual_values() | dict(self.flags)
        words = setting_name({axis: flags[axis] for axis in self.axes}, {})
        return f"{self.model} {words}".strip()


def make_cells(e: Experiment, platform: Platform, where: str = "experiment") -> list[Cell]:
    """All settings of an experiment on one platform; UsageError if one of them could not run."""
    axes = list(e.grid)
    listed_axes = dict.fromkeys(key for row in e.cells for key in row)
    names = tuple(dict.fromkeys([*axes, *listed_axes]))
    if both := sorted(set(axes) & set(listed_axes)):
        raise UsageError(
            f"{where}: {both[0]} is in the grid and in cells; each cell runs with the whole grid"
        )
    combinations = (dict(zip(axes, c, strict=True)) for c in itertools.product(*e.grid.values()))
    gpu, cells = sweep_gpu(e, platform), []
    for model, chosen, listed in itertools.product(e.models, combinations, e.cells or [{}]):
        layout = e.layouts.get(model) or e.layouts.get(Path(model).stem) or {}
        flags = e.training | e.platforms.get(platform, {}) | layout.get(platform, {})
        flags |= chosen | listed
        flags = read_flags(flags, SETTABLE, f"{where}: ")
        flags = _with_machine(flags, e, platform, where)
        ordered = tuple(sorted(flags.items()))
        script = Script.PP if flags.get("pp") and e.script is Script.FSDP else e.script
        cell = Cell(script, shipped_config(model), ordered, names)
        try:
            plan = plan_of(cell, cell.world, platform, gpu)
        except UsageError as error:  # a ConfigError names its file itself
            raise UsageError(f"{where}: {cell.label()}: {error}") from None
        if cell not in cells:
            batch = plan.work.batch
            resolved = dataclasses.asdict(cell.args)
            resolved |= {"amp": plan.work.amp, "seq_len": batch.seq_len}
            if cell.world:
                resolved["global_batch"] = batch.global_batch
            cells.append(dataclasses.replace(cell, resolved=resolved))
    return cells


def sweep_gpu(e: Experiment, platform: Platform) -> Hardware | None:
    """The GPU that the experiment names, or else this machine's; None where neither is known."""
    machine, here = e.hardware.get(platform), platform == detect_platform()
    if machine is None or machine.gpu is None:
        return device_called(gpu_name()) if here and platform != "cpu" else None
    return find_hardware(machine.gpu)


def _with_machine(flags: Flags, e: Experiment, platform: Platform, where: str) -> Flags:
    """The flags with what the experiment's hardware says."""
    machine = e.hardware.get(platform)
    if e.script is Script.ONE and machine and machine.gpus > 1:
        raise UsageError(
            f"{where}: hardware: {machine.gpus} GPUs, but train.py runs on one; use train_fsdp.py"
        )
    if e.script is not Script.ONE and machine:
        nproc = flags.setdefault("nproc", machine.gpus)
        if nproc != machine.gpus:
            why = f"nproc {nproc}, but hardware says {machine.gpus} GPUs; leave it out"
            raise UsageError(f"{where}: {why}")
    if machine and machine.usd_per_hour:
        flags.setdefault("usd_per_hour", machine.usd_per_hour)
    return flags


def differences(e: Experiment, where: str) -> list[str]:
    """Hyperparameters in which platforms differ, a line each; `identical_config` allows none."""
    resolved = {
        platform: [cell.resolved for cell in make_cells(e, platform, where)]
        for platform in get_args(Platform)
        if platform in {*e.hardware, *e.platforms}
    }
    lines = []
    for (a, ours), (b, theirs) in itertools.pairwise(resolved.items()):
        for left, right in zip(ours, theirs, strict=False):
            model = model_name(left["config"], left["layers"])
            for name in differing(left, right):
                sides = f"{a} {left[name]}, {b} {right[name]}"
                lines.append(f"{model}: {name}: {sides}")
        if len(ours) != len(theirs):
            lines.append(f"{a} has {len(ours)} settings, {b} {len(theirs)}")
    return list(dict.fromkeys(lines))


def plan_of(
    cell: Cell,
    world: int | None,
    platform: Platform,
    gpu: Hardware | None,
    memory_gib: float | None = None,
) -> Plan:
    """The plan of a cell; where the number of ranks is not known, for as few as its layout needs.

    --amp auto hangs on the GPU, if it is known; --bsz auto and the loss's chunks on its memory.
    """
    args = cell.args
    if args.device == "cpu":
        platform, gpu, memory_gib = "cpu", None, None
    if world is None:
        stages = (args.pp or USUAL_STAGES) if cell.script is Script.PP else 1
        world = args.tp * args.cp * args.ep * stages
        alone = {"global_bsz": None, "dp_replicate": 1, "fp8_all_gather": False}
        args = dataclasses.replace(args, **alone)
    has = {"memory_gib": memory_gib, "native_amp": gpu and gpu.native_amp}
    return make_plan(args, cell.script, world, platform, **has)


def work_on(cell: Cell, e: Experiment, platform: Platform) -> tuple[Work, Hardware]:
    """A setting's step, and the device that runs it.

    DoesNotFit for a bsz auto of which not even 1 fits; UsageError where the device is not known.
    """
    platform = "cpu" if cell.args.device == "cpu" else platform
    processes = 2 if platform == "cpu" and cell.script is not Script.ONE else 1
    world = cell.args.nproc or (e.hardware[platform].gpus if platform in e.hardware else processes)
    gpu = find_cpu(cpu_name(), world) if platform == "cpu" else sweep_gpu(e, platform)
    if gpu is None:
        raise UsageError(f"an experiment file must say the GPU, as hardware: {platform}: gpu")
    return plan_of(cell, world, platform, gpu, gpu.memory_gib).work, gpu
