"""The input of a sweep: an experiment file (YAML) or the command line. Needs no torch.

One file serves NVIDIA and AMD: `platforms` holds what differs. sweep/grid.py resolves it to cells.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import find_hardware
from llm_train_bench.base.strict import first_problem
from llm_train_bench.model.json_files import parse_json, plain_text
from llm_train_bench.settings.flags import SETTABLE, Script, field_of, flag_of
from llm_train_bench.settings.other_names import in_our_words, no_such_flag
from llm_train_bench.settings.plan import Platform
from llm_train_bench.settings.run_file import parse_yaml

Value = bool | int | float | str | None
Flags = dict[str, Any]  # as they are checked already


def _full_name(gpu: str) -> str:
    try:
        return find_hardware(gpu).name
    except UsageError as error:
        raise ValueError(error) from None


class Machine(BaseModel, extra="forbid"):
    """The hardware of one platform, for the arithmetic of batches and for cost."""

    gpu: Annotated[str, AfterValidator(_full_name)] | None = None
    gpus: int = Field(default=1, ge=1)
    usd_per_hour: float | None = Field(default=None, gt=0)
    tdp_w: float | None = Field(default=None, gt=0)


# More cells than anybody can run: at a minute each, a week.
MOST_CELLS = 10_000


def _underscored(value: Any) -> Any:
    """Flags by their names with `-` or `_`."""
    if not isinstance(value, dict):
        return value
    return {n.replace("-", "_") if isinstance(n, str) else n: v for n, v in value.items()}


Row = Annotated[dict[str, Value], BeforeValidator(_underscored)]
Axes = dict[str, Annotated[list[Value], Field(min_length=1)]]


class Experiment(BaseModel, extra="forbid"):
    """The file as it is written; docs/SWEEPS.md explains each key."""

    experiment: str = Field(pattern=r"^\w[\w.-]*$")
    methodology: Literal["maximum_performance", "identical_config"] = "maximum_performance"
    script: Script = Script.ONE
    hardware: dict[Platform, Machine] = {}
    models: list[Annotated[str, Field(pattern=r"^[^-]")]] = Field(min_length=1)
    training: Row = {}
    grid: Annotated[Axes, BeforeValidator(_underscored)] = {}
    cells: list[Row] = []
    platforms: dict[Platform, Row] = {}
    layouts: dict[str, dict[Platform, Row]] = {}
    repeats: int = Field(1, ge=1, le=1000)
    timeout_s: float = Field(3600.0, gt=0)

    @model_validator(mode="after")
    def _lays_out_its_models(self) -> "Experiment":
        names = {name for model in self.models for name in (model, Path(model).stem)}
        if unknown := sorted(self.layouts.keys() - names):
            raise ValueError(f"layouts: {unknown[0]} is not among models")
        return self


def _checked(content: Mapping[str, Any], where: str) -> Experiment:
    """The experiment; UsageError for a bad key, or for more cells than anybody can run."""
    try:
        e = Experiment.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"{where}: {first_problem(error)}") from None
    except UsageError as error:
        raise UsageError(f"{where}: hardware: gpu: {error}") from None
    n = math.prod([len(e.models), len(e.cells) or 1, *map(len, e.grid.values())])
    if n > MOST_CELLS:
        raise UsageError(f"{where}: {n:,} settings; at most {MOST_CELLS:,} are run in one sweep")
    return e


def read_experiment(path: str | Path) -> Experiment:
    """An experiment file, checked; UsageError with the file, the key and what is wrong."""
    try:
        content = parse_yaml(substitute(plain_text(path), path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # or it is not UTF-8
        raise UsageError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a mapping with experiment, models, ...; docs/SWEEPS.md")
    if isinstance(content.get("experiment"), dict):
        why = "is a file of another suite; docs/MIGRATING.md names the file to use instead"
        raise UsageError(f"{path}: {why}")
    return _checked(content, str(path))


def machines_of(experiments: Iterable[Experiment]) -> dict[str, Machine]:
    """The machines of experiments by the name of their hardware."""
    machines = [machine for e in experiments for machine in e.hardware.values()]
    return {machine.gpu: machine for machine in machines if machine.gpu}


def swept(paths: Iterable[str]) -> dict[str, tuple[Experiment, list[str]]]:
    """The experiments of those paths that are directories of a sweep, and how its platforms differ."""
    found = {}
    for path in paths:
        try:
            content = parse_json(plain_text(Path(path) / "sweep.json"))
            unlike = [str(line) for line in content["differences"]]
            content["experiment"].pop("environment", None)  # of older sweeps
            found[path] = Experiment.model_validate(content["experiment"]), unlike
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def substitute(text: str, path: str | Path) -> str:
    """`${VAR}` and `${VAR:-default}` from the environment, no comments; UsageError if unset."""

    def value(match: re.Match) -> str:
        value = os.environ.get(match[1]) or match[3]
        if value is None:
            why = f"is not set, and has no default (${{{match[1]}:-...}})"
            raise UsageError(f"{path}: ${{{match[1]}}} {why}")
        return value

    without_comments = re.sub(r"(?m)^[ \t]*#.*$", "", text)
    return re.sub(r"\$\{(\w+)(:-([^}]*))?\}", value, without_comments)


def from_command_line(
    script: str, models: Sequence[str], settings: Sequence[str], repeats: int
) -> Experiment:
    """An experiment from `--set flag=value,value` options: several values make an axis."""
    axes: Axes = {}
    for setting in settings:
        flag, equals, text = setting.partition("=")
        flag = field_of(*in_our_words([flag_of(field_of(flag))]))
        values = text.split(",")
        if not equals:
            raise UsageError(f"--set {setting}: must be flag=value or flag=value,value,...")
        if flag in ("config", "output_dir", "run_name"):
            raise UsageError(f"--set {setting}: is set by the sweep; use --models or --output-dir")
        if flag not in SETTABLE:
            raise UsageError(f"--set {setting}: {no_such_flag(flag, SETTABLE)}")
        if "" in values:
            raise UsageError(f"--set {setting}: a value is empty; `null` leaves a flag out")
        if flag in axes:
            raise UsageError(f"--set {setting}: {flag} was set before")
        try:
            axes[flag] = [parse_yaml(value) for value in values]
        except ValueError:
            raise UsageError(f"--set {setting}: {text!r} is not a value") from None
    training = {flag: values[0] for flag, values in axes.items() if len(values) == 1}
    grid = {flag: values for flag, values in axes.items() if len(values) > 1}
    content = {"script": script, "models": list(models), "training": training, "grid": grid}
    # Each such command has one directory, and finds it again.
    name = f"command-line-{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    return _checked(content | {"experiment": name, "repeats": repeats}, "--set")
