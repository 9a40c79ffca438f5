"""What a sweep runs: an experiment file (YAML) or the command line, resolved to cells. Needs no torch.

One file serves NVIDIA and AMD: `platforms` holds what differs, and the platform at hand is detected.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bench.args import Args
from bench.command_line import parse_args
from bench.errors import UsageError
from bench.hardware import find_hardware
from bench.sizes import resolve_batch, resolve_seq_len, resolve_shards
from model.config import ConfigError, load_config

Platform = Literal["nvidia", "amd", "cpu"]
Value = bool | int | float | str | None
Flags = dict[str, Value]
FLAGS = {f.name for f in dataclasses.fields(Args)} - {"config", "output_dir", "run_name"}
# Flags that say where a run happens or what is looked at, and nothing of the training itself.
NOT_HYPERPARAMETERS = {
    "device", "nproc", "n_workers", "dist_timeout", "max_restarts", "no_tensorboard", "export",
    "profile", "profile_start", "profile_steps", "profile_shapes", "profile_stacks", "nsys_start",
    "nsys_end", "memory_snapshot", "peak_tflops", "peak_fp8_tflops", "usd_per_hour",
    "output_dir", "run_name",
}  # fmt: skip


class Strict(BaseModel):
    """A part of the file; keys that it does not know are errors."""

    model_config = ConfigDict(extra="forbid")


class Machine(Strict):
    """The hardware of one platform, for the arithmetic of batches and for cost."""

    gpu: str | None = None
    gpus: int = Field(1, ge=1)
    usd_per_hour: float | None = Field(None, gt=0)
    tdp_w: float | None = Field(None, gt=0)


class Parallel(Strict):
    """How the GPUs are shared out: replicas x shards."""

    dp_replicate: int = Field(1, ge=1)
    dp_shard: int | None = Field(None, ge=1)


class Experiment(Strict):
    """The file as it is written; docs/SWEEPS.md explains each key."""

    experiment: str = Field(pattern=r"^[\w.-]+$")
    methodology: Literal["maximum_performance", "identical_config"] = "maximum_performance"
    script: Literal["train.py", "train_ddp.py", "train_fsdp.py"] = "train.py"
    hardware: dict[Platform, Machine] = {}
    parallel: Parallel = Parallel()
    models: list[str] = Field(min_length=1)
    training: Flags = {}
    grid: dict[str, Annotated[list[Value], Field(min_length=1)]] = {}
    cells: list[Flags] = []
    platforms: dict[Platform, Flags] = {}
    repeats: int = Field(1, ge=1)
    timeout_s: float = Field(3600.0, gt=0)

    @field_validator("training", "grid", "cells", "platforms", mode="before")
    @classmethod
    def _by_either_name(cls, value: Any) -> Any:
        """Flags by their names with `-` or `_`."""
        if isinstance(value, list):
            return [cls._by_either_name(row) for row in value]
        if not isinstance(value, dict):
            return value
        names = {n: n.replace("-", "_") if isinstance(n, str) else n for n in value}
        return {
            names[n]: cls._by_either_name(v) if isinstance(v, dict) else v for n, v in value.items()
        }


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting: the script, its model and its flags; `axes` is what tells it from other cells."""

    script: str
    config: str
    flags: tuple[tuple[str, Value], ...]
    axes: tuple[str, ...]

    def argv(self) -> list[str]:
        """Model and flags as a command line."""
        return [self.config, *to_argv(dict(self.flags))]

    def label(self) -> str:
        """The model and the values on the axes."""
        flags = dict(self.flags)
        parts = [f"{name}={_plain(flags.get(name))}" for name in self.axes]
        return " ".join([Path(self.config).stem, *parts])


def to_argv(flags: Flags) -> list[str]:
    """Flags as a command line: true is the bare flag, false and null leave it out."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, _plain(value)]
    return words


def _plain(value: Value) -> str:
    """A value as it stands on a command line or in a table."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_experiment(path: str | Path) -> Experiment:
    """An experiment file, checked; UsageError with the file, the key and what is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    try:
        content = yaml.safe_load(substitute(text, os.environ, path))
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a mapping with experiment, models, ...; docs/SWEEPS.md")
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"{path}: {where}: {first['msg']}") from None


def substitute(text: str, environ: dict[str, str], path: str | Path = "text") -> str:
    """`${VAR}` and `${VAR:-default}` replaced from the environment; UsageError for an unset one.

    Lines that are comments go.
    """
    text = re.sub(r"(?m)^[ \t]*#.*$", "", text)

    def value(match: re.Match) -> str:
        name, default = match[1], match[3]
        found = environ.get(name) or default
        if found is None:
            raise UsageError(
                f"{path}: ${{{name}}} is not set, and has no default (${{{name}:-...}})"
            )
        return found

    return re.sub(r"\$\{(\w+)(:-([^}]*))?\}", value, text)


def make_cells(e: Experiment, platform: Platform, where: str = "experiment") -> list[Cell]:
    """All settings of an experiment on one platform; UsageError if one of them could not run."""
    axes = list(e.grid)
    combinations = [
        dict(zip(axes, values, strict=True)) for values in itertools.product(*e.grid.values())
    ]
    machine = e.hardware.get(platform)
    if machine and machine.gpu:
        try:
            find_hardware(machine.gpu)
        except UsageError as error:
            reason = str(error).removeprefix("--gpu ")
            raise UsageError(f"{where}: hardware: {platform}: gpu: {reason}") from None
    cells = []
    for model, chosen, listed in itertools.product(e.models, combinations, e.cells or [{}]):
        flags = e.training | e.platforms.get(platform, {}) | chosen | listed
        unknown = sorted(set(flags) - FLAGS)
        if unknown:
            raise UsageError(f"{where}: {unknown[0]}: no such flag; {e.script} --help lists them")
        flags = {name: _meant(name, value, where) for name, value in flags.items()}
        flags = _resolve_sizes(flags, e, platform, where)
        names = tuple(dict.fromkeys([*axes, *(key for row in e.cells for key in row)]))
        cell = Cell(e.script, model, tuple(sorted(flags.items())), names)
        try:
            args = parse_args(cell.argv(), e.script)
            seq_len = resolve_seq_len(args.seq_len, load_config(args.config, args.pad_vocab))
            if world := _world(flags, e, machine):
                resolve_batch(args, seq_len, world)
                if e.script == "train_fsdp.py":
                    resolve_shards(args, world, "cuda")
        except (UsageError, ConfigError) as error:
            raise UsageError(f"{where}: {cell.label()}: {error}") from None
        if cell not in cells:
            cells.append(cell)
    return cells


def _meant(name: str, value: Value, where: str) -> Value:
    """A value as the flag's type has it: `off`, which YAML reads as false, and quoted numbers."""
    kind = get_type_hints(Args)[name]
    kinds = get_args(kind) or (kind,)
    if value is False and "off" in kinds:
        return "off"
    if not isinstance(value, str) or str in kinds or value in kinds:
        return value
    try:
        if bool in kinds:
            return {"true": True, "false": False}[value.lower()]
        return int(value) if int in kinds else float(value)
    except (KeyError, ValueError):
        raise UsageError(
            f"{where}: {name}: {value!r} is no value of --{name.replace('_', '-')}"
        ) from None


def _world(flags: Flags, e: Experiment, machine: Machine | None) -> int | None:
    """Ranks of a run; None where that is left to the machine it runs on."""
    if e.script == "train.py":
        return 1
    return flags.get("nproc") or (machine.gpus if machine else None)


def _resolve_sizes(flags: Flags, e: Experiment, platform: Platform, where: str) -> Flags:
    """Check that replicas x shards are the GPUs, and global = micro x data parallel x accumulation."""
    flags = dict(flags)
    machine = e.hardware.get(platform)
    if e.script == "train.py" and machine and machine.gpus > 1:
        raise UsageError(
            f"{where}: hardware: {machine.gpus} GPUs, but train.py runs on one; use train_fsdp.py"
        )
    p = e.parallel
    if machine is None and "parallel" in e.model_fields_set:
        raise UsageError(
            f"{where}: hardware has no {platform}, so how many GPUs `parallel` is to share out is not "
            "known; add it, or choose another --platform"
        )
    if "dp_replicate" in flags and "parallel" in e.model_fields_set:
        raise UsageError(f"{where}: dp_replicate is in `parallel` already; leave out the flag")
    if machine and p.dp_shard is not None and p.dp_replicate * p.dp_shard != machine.gpus:
        right = machine.gpus / p.dp_replicate
        advice = f"dp_shard must be {right:g}" if right.is_integer() else "choose divisors"
        raise UsageError(
            f"{where}: parallel: {p.dp_replicate} x {p.dp_shard} = {p.dp_replicate * p.dp_shard}, "
            f"but there are {machine.gpus} GPUs; {advice}"
        )
    if p.dp_replicate > 1:
        flags["dp_replicate"] = p.dp_replicate
    if e.script != "train.py" and machine:
        if flags.get("nproc", machine.gpus) != machine.gpus:
            raise UsageError(
                f"{where}: nproc {flags['nproc']}, but hardware says {machine.gpus} GPUs; leave it out"
            )
        flags["nproc"] = machine.gpus
    if machine and machine.usd_per_hour:
        flags.setdefault("usd_per_hour", machine.usd_per_hour)
    size, steps = flags.get("global_bsz"), flags.get("grad_acc_steps")
    if size is not None and steps is not None:
        world = _world(flags, e, machine)
        if world is None:
            raise UsageError(
                f"{where}: global_bsz and grad_acc_steps: hardware must say how many GPUs"
            )
        right = (flags.get("bsz") or Args.bsz) * world * steps
        if size != right:
            raise UsageError(
                f"{where}: global_bsz {size}, but {flags.get('bsz') or Args.bsz} (bsz) x "
                f"{world} GPUs x {steps} (grad_acc_steps) = {right}; make it {right}"
            )
        del flags["global_bsz"]
    return flags


def differences(e: Experiment) -> list[str]:
    """Hyperparameters in which the platforms of an experiment differ, each as a line for the report.

    Under `identical_config` there should be none.
    """
    named = e.hardware if "parallel" in e.model_fields_set else {*e.hardware, *e.platforms}
    platforms = [p for p in ("nvidia", "amd", "cpu") if p in named]
    resolved = {}
    for platform in platforms:
        cells = make_cells(e, platform)
        resolved[platform] = [
            _resolved(cell, _world(dict(cell.flags), e, e.hardware.get(platform))) for cell in cells
        ]
    lines = []
    for a, b in itertools.pairwise(platforms):
        for left, right in zip(resolved[a], resolved[b], strict=False):
            lines += [
                f"{Path(left['config']).stem}: {name}: {a} {_plain(left[name])}, "
                f"{b} {_plain(right[name])}"
                for name in hyperparameter_differences(left, right)
            ]
        if len(resolved[a]) != len(resolved[b]):
            lines.append(f"{a} has {len(resolved[a])} settings, {b} {len(resolved[b])}")
    return list(dict.fromkeys(lines))


def _resolved(cell: Cell, world: int | None) -> dict[str, Any]:
    """All arguments of a cell, and its global batch where the number of ranks is known."""
    args = parse_args(cell.argv(), cell.script)
    content = dataclasses.asdict(args) | {"config": cell.config}
    if world:
        config = load_config(args.config, args.pad_vocab)
        batch = resolve_batch(args, resolve_seq_len(args.seq_len, config), world)
        content["global_batch"] = batch.global_batch
    return content


def hyperparameter_differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of the arguments that make two runs different trainings."""
    names = [n for n in left if n in right and n not in NOT_HYPERPARAMETERS]
    return [n for n in names if left[n] != right[n]]


def from_command_line(
    name: str,
    script: str,
    models: Sequence[str],
    settings: Sequence[str],
    repeats: int,
    timeout_s: float,
) -> Experiment:
    """An experiment from `--set flag=value,value` options: several values make an axis."""
    training: Flags = {}
    grid: dict[str, list[Value]] = {}
    for setting in settings:
        flag, equals, values = setting.partition("=")
        flag = flag.lstrip("-").replace("-", "_")
        if not equals or flag not in FLAGS:
            raise UsageError(f"--set {setting}: must be flag=value or flag=value,value,...")
        try:
            parsed = [yaml.safe_load(v) if v else None for v in values.split(",")]
        except yaml.YAMLError:
            raise UsageError(f"--set {setting}: {values!r} is no value") from None
        if flag in training or flag in grid:
            raise UsageError(f"--set {setting}: {flag} was set before")
        if len(parsed) == 1:
            training[flag] = parsed[0]
        else:
            grid[flag] = parsed
    return Experiment(
        experiment=name, script=script, models=list(models), training=training, grid=grid,
        repeats=repeats, timeout_s=timeout_s,
    )  # fmt: skip
