"""Which setting is best: run many, one process each, and rank them.

    python sweep.py configs/sweeps/gpt2-context.yaml
    python sweep.py --models configs/gpt2-tiny.json --set bsz=4,8 pt-compile=true,false --repeats 3
    python sweep.py --models configs/gpt2-125m.json --set pt-compile=true --auto-bsz
    python sweep.py configs/sweeps/gpt2-context.yaml --tune

A run that fails is a row, not the end. A sweep can be killed at any point: started again with the
same --output-dir, it goes on where it was. docs/SWEEPS.md explains the experiment file. Needs no
torch itself.
"""

import dataclasses
import itertools
import json
import shlex
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import llm_train_bench.base.start  # noqa: F401

from pydantic import ValidationError

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.machine import detect_platform
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.results.result_files import first_problem
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import changed, check_bounds, flag, flag_of, positional
from llm_train_bench.settings.plan import Platform
from llm_train_bench.sweep.auto_batch import check_auto_batch, with_largest_batch
from llm_train_bench.sweep.cell_runs import (
    CellRow,
    Rows,
    cell_key,
    outcome,
    refuse_foreign_row,
    run_cell,
)
from llm_train_bench.sweep.experiment import Experiment, from_command_line, read_experiment
from llm_train_bench.sweep.grid import Cell, differences, make_cells
from llm_train_bench.sweep.jobs import options_of, run_as_jobs
from llm_train_bench.sweep.ranking import rank, show_ranking, write_csv
from llm_train_bench.sweep.tune import tune


@dataclasses.dataclass(frozen=True)
class SettingsFlags:
    """The settings to run.

    experiment: An experiment file. Without one, --models and --set describe the runs.
    models: Model configs. With an experiment file, those of its models to run.
    script: Script to run.
    set: flag=value for all runs, or flag=value,value,... for an axis of the grid.
    platform: Platform, for its part of the experiment file. auto looks at the drivers.
    """

    experiment: str = positional("[FILE.yaml]", "")
    models: tuple[str, ...] = flag((), metavar="CONFIG ...")
    script: Literal["train.py", "train_ddp.py", "train_fsdp.py", "train_pp.py"] = flag("train.py")
    set: tuple[str, ...] = flag((), metavar="FLAG=VALUE ...")
    platform: Literal["auto", "nvidia", "amd", "cpu"] = flag("auto")


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """How they run.

    repeats: Runs of each setting, interleaved so that a drifting machine affects all settings.
    auto_bsz: Find the largest --bsz that runs for each setting, and use it.
    tune: Find the fastest setting with few runs. The estimate keeps a fifth of the settings, short
        runs halve these, and the two best run in full, alternating, five times.
    output_dir: Directory of rows, results and tables. By default sweeps/ and the experiment's
        name.
    slurm: Submit each run as a SLURM job, with sbatch options as submitit names them:
        partition=gpu gpus_per_node=8 exclusive=true.
    cooldown: Seconds of rest before each run, so that all start equally cool.
    retry: Repeat runs that failed or timed out earlier in the same --output-dir.
    dry_run: Print the settings and stop.
    """

    repeats: int = flag(1, at_least=1)
    auto_bsz: bool = flag(False)
    tune: bool = flag(False)
    output_dir: str | None = flag(None, metavar="DIR")
    slurm: tuple[str, ...] = flag((), metavar="KEY=VALUE ...")
    cooldown: float = flag(0.0, at_least=0)
    retry: bool = flag(False)
    dry_run: bool = flag(False)


@dataclasses.dataclass(frozen=True)
class SweepArgs(ProcessFlags, SettingsFlags):
    """Run many settings, one process each, and rank them."""


@tool("sweep.py")
def main(argv: Sequence[str]) -> int:
    """Sweep, and return the exit code: 0; 2 for bad input; 1 if no run was ok, or on Ctrl-C."""
    args = parse_dataclass(SweepArgs, argv, "sweep.py")
    check_bounds(args)
    experiment, where = read(args)
    platform = detect_platform() if args.platform == "auto" else args.platform
    cells = make_cells(experiment, platform, where)
    if args.auto_bsz:
        check_auto_batch(experiment)
    if args.tune and (args.auto_bsz or args.slurm):
        raise UsageError(
            f"--tune does not work with {'--auto-bsz' if args.auto_bsz else '--slurm'}; leave one out"
        )
    unlike = differences(experiment)
    directory = Path(args.output_dir or f"sweeps/{experiment.experiment}")
    if not (args.output_dir or args.experiment):
        # Each such command has one directory, and finds it again.
        text = json.dumps([[cell.script, *cell.argv()] for cell in cells])
        directory = directory.with_name(f"{directory.name}-{zlib.crc32(text.encode()):08x}")
    if experiment.methodology == "identical_config":
        if unlike:
            more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
            raise UsageError(
                f"{where}: methodology is identical_config, and platforms differ: {unlike[0]}{more}; "
                "make them equal, or take maximum_performance"
            )
        print("identical_config: the platforms' hyperparameters are the same")
    if args.slurm and args.cooldown:
        raise UsageError("--cooldown is for runs on this machine; leave out --slurm")
    if args.dry_run:
        for cell in cells:
            settings = [f"{name}={shlex.quote(value)}" for name, value in cell.environment]
            command = shlex.join(["python", cell.script, *cell.argv()])
            print(printable(" ".join([*settings, command])))
        return 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        described = {
            "experiment": experiment.model_dump(),
            "platform": platform,
            "differences": unlike,
            "settings": [[cell.script, *cell.argv()] for cell in cells],
        }
        rows = Rows(directory / "rows.jsonl")
        if args.retry:
            rows.forget("failed", "timeout")
        write_whole(directory / "sweep.json", json.dumps(described, indent=1) + "\n")
    except OSError as error:
        print(f"sweep.py: --output-dir {directory}: {error.strerror}", file=sys.stderr)
        return 2
    again = "the same command goes on from there"
    try:
        # The directory may hold rows of other settings, from an earlier form of the experiment.
        measured = run_all(cells, experiment, rows, directory, args, platform)
        write_csv(measured, directory / "results.csv")
        show_ranking(rank(measured), directory)
    except KeyboardInterrupt:
        print(f"\nsweep.py: interrupted; rows kept: {len(rows.rows)}; {again}", file=sys.stderr)
        return 1
    except OSError as error:
        what = f"{error.filename or directory}: {error.strerror}"
        print(f"sweep.py: {what}; rows kept: {len(rows.rows)}; {again}", file=sys.stderr)
        return 1
    return 0 if any(row["status"] == "ok" for row in measured) else 1


def read(args: SweepArgs) -> tuple[Experiment, str]:
    """The experiment that the arguments name or describe, and its name for messages."""
    if args.experiment:
        if given := changed(args, ("set", "script", "repeats")):
            raise UsageError(
                f"{flag_of(given)}: the experiment file sets it already; leave one out"
            )
        experiment = read_experiment(args.experiment)
        names = {model: {model, Path(model).stem} for model in experiment.models}
        if lost := [name for name in args.models if not any(name in n for n in names.values())]:
            known = ", ".join(Path(model).stem for model in names)
            raise UsageError(
                f"--models {lost[0]}: unknown model of {args.experiment}; available: {known}"
            )
        chosen = [m for m in names if not args.models or names[m] & set(args.models)]
        return experiment.model_copy(update={"models": chosen}), args.experiment
    if not args.models:
        raise UsageError("nothing to run: give an experiment file, or --models")
    given = args.script, args.models, args.set, args.repeats
    try:
        return from_command_line(*given), "--set"
    except ValidationError as error:
        raise UsageError(f"--{first_problem(error)}") from None


def run_all(
    cells: list[Cell],
    experiment: Experiment,
    rows: Rows,
    directory: Path,
    args: SweepArgs,
    platform: Platform,
) -> list[CellRow]:
    """Run what has no row yet: all settings once, then all of them again, and so on.

    Returns all rows, those from before first.
    """
    if args.auto_bsz:
        machine = experiment.hardware.get(platform)
        gpu = machine.gpu if machine else None
        cells = [with_largest_batch(c, rows, directory, experiment.timeout_s, gpu) for c in cells]
    # Each key is made once: a file that is edited meanwhile would give another key.
    measured, todo = [], []
    runs = itertools.product(range(experiment.repeats), cells)
    if args.tune:
        runs = ((i, cell) for cell, i in tune(cells, experiment, rows, directory, platform))
    for repeat, cell in runs:
        if row := rows.rows.get(cell_key(cell, repeat)):
            refuse_foreign_row(row, rows.path)
            measured.append(row)
        else:
            todo.append((cell, repeat))
    if done := len(measured):
        print(f"rows from before: {done}", flush=True)
    start = time.monotonic()
    labels = {cell_key(cell, repeat): cell.label() for cell, repeat in todo}
    if args.slurm:
        fresh = run_as_jobs(todo, directory, experiment.timeout_s, options_of(args.slurm))
    else:
        fresh = _run_here(todo, directory, experiment.timeout_s, args.cooldown)
    for i, row in enumerate(fresh):
        rows.add(row)
        measured.append(row)
        left = (time.monotonic() - start) / (i + 1) * (len(todo) - i - 1)
        text = f"[{done + i + 1}/{done + len(todo)}] {outcome(row)}  {labels[row['key']]}"
        print(f"{text}  ({_duration(left)} left)", flush=True)
    return measured


def _run_here(
    todo: list[tuple[Cell, int]], directory: Path, timeout_s: float, cooldown_s: float
) -> Iterator[CellRow]:
    for i, (cell, repeat) in enumerate(todo):
        if i:
            time.sleep(cooldown_s)
        yield run_cell(cell, repeat, directory, timeout_s)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


if __name__ == "__main__":
    run_tool(main)
