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

import llm_train_bench.start  # noqa: F401

from pydantic import ValidationError

from llm_train_bench.compare.gate import gate
from llm_train_bench.errors import UsageError, printable
from llm_train_bench.files import write_whole
from llm_train_bench.results.result_files import first_problem
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import Script, changed, check_bounds, flag, flag_of, positional
from llm_train_bench.settings.machine import detect_platform
from llm_train_bench.settings.plan import Platform
from llm_train_bench.settings.tool_main import run_tool, tool
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
    """The settings to run."""

    experiment: str = positional("[FILE.yaml]", "An experiment file; without one, --models and "
        "--set say what to run.", "")  # fmt: skip
    models: tuple[str, ...] = flag((), "Model configs; with an experiment file, those of its "
        "models to run.", metavar="CONFIG")  # fmt: skip
    script: Literal[tuple(map(str, Script))] = flag("train.py", "Script that runs them.")
    set: tuple[str, ...] = flag((), "flag=value for all, or flag=value,value,... for an axis of "
        "the grid.", metavar="FLAG=VALUE")  # fmt: skip
    platform: Literal["auto", "nvidia", "amd", "cpu"] = flag("auto", "Platform, for its part of "
        "the experiment file; auto looks at the drivers.")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """How they run."""

    repeats: int = flag(1, "How often each setting runs; interleaved, so that a drifting machine "
        "drifts for all.", at_least=1)  # fmt: skip
    timeout_s: float = flag(3600.0, "Seconds after which a run is ended.", above=0)
    auto_bsz: bool = flag(False, "Find the largest --bsz that runs, for each setting, and use it.")
    tune: bool = flag(False, "Find the fastest setting and run few: the estimate keeps a fifth, "
        "short runs halve these, and the two best run in full, in turn, five times.")  # fmt: skip
    output_dir: str | None = flag(None, "Where rows, results and tables go; by default sweeps/ and "
        "the experiment's name.", metavar="DIR")  # fmt: skip
    launcher: Literal["here", "slurm", "local"] = flag("here", "Runs go one after the other on "
        "this machine, or as jobs of SLURM; local: as processes, all at once, to try it.")  # fmt: skip
    slurm: tuple[str, ...] = flag((), "What sbatch is told, as submitit names it: partition=gpu "
        "gpus_per_node=8 exclusive=true.", metavar="KEY=VALUE")  # fmt: skip
    cooldown: float = flag(0.0, "Seconds of rest before each run, so that all begin as cool.",
        at_least=0)  # fmt: skip
    grid_gco2_per_kwh: float = flag(445.0, "Grams of CO2 per kWh, for the CO2 of each run; the "
        "default is the world's mean of 2024 (IEA, Electricity 2025).", above=0)  # fmt: skip
    baseline: str | None = flag(None, "Judge the runs by these baselines at the end, as compare.py "
        "does: exit code 1 if one got worse.", metavar="FILE")  # fmt: skip
    tolerance: str = flag("5%", "Allowed loss of speed, and growth of memory.", metavar="PERCENT",
        needs="baseline")  # fmt: skip
    update_baselines: bool = flag(False, "Make the runs the baselines.", needs="baseline")
    retry: bool = flag(False, "Run again what failed or timed out before in the same --output-dir.")
    dry_run: bool = flag(False, "Print the settings and stop.")


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
    if args.tune and (args.auto_bsz or args.launcher != "here"):
        other = "--auto-bsz" if args.auto_bsz else f"--launcher {args.launcher}"
        raise UsageError(f"--tune and {other} do not go together; leave one out")
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
    if args.launcher != "slurm" and args.slurm:
        raise UsageError("--slurm: needs --launcher slurm")
    if args.launcher != "here" and args.cooldown:
        raise UsageError("--cooldown: is for runs on this machine; leave it out, or --launcher")
    if args.baseline and not args.update_baselines and not Path(args.baseline).exists():
        raise UsageError(f"--baseline {args.baseline}: no such file; --update-baselines makes it")
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
        write_csv(measured, directory / "results.csv", args.grid_gco2_per_kwh)
        show_ranking(rank(measured), directory)
    except KeyboardInterrupt:
        print(f"\nsweep.py: interrupted; rows kept: {len(rows.rows)}; {again}", file=sys.stderr)
        return 1
    except OSError as error:
        what = f"{error.filename or directory}: {error.strerror}"
        print(f"sweep.py: {what}; rows kept: {len(rows.rows)}; {again}", file=sys.stderr)
        return 1
    if not any(row["status"] == "ok" for row in measured):
        return 1
    if not args.baseline:
        return 0
    places = [str(Path(row["result"]).parent) for row in measured if row["status"] == "ok"]
    return gate(places, Path(args.baseline), args.tolerance, args.update_baselines)


def read(args: SweepArgs) -> tuple[Experiment, str]:
    """The experiment that the arguments name or describe, and its name for messages."""
    if args.experiment:
        if given := changed(args, ("set", "script", "repeats", "timeout_s")):
            raise UsageError(
                f"{flag_of(given)} and an experiment file, which says that itself: leave one out"
            )
        experiment = read_experiment(args.experiment)
        names = {model: {model, Path(model).stem} for model in experiment.models}
        if lost := [name for name in args.models if not any(name in n for n in names.values())]:
            known = ", ".join(Path(model).stem for model in names)
            raise UsageError(f"--models {lost[0]}: {args.experiment} has none such; it has {known}")
        chosen = [m for m in names if not args.models or names[m] & set(args.models)]
        return experiment.model_copy(update={"models": chosen}), args.experiment
    if not args.models:
        raise UsageError("nothing to run: give an experiment file, or --models")
    given = args.script, args.models, args.set, args.repeats, args.timeout_s
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
    if args.launcher == "here":
        fresh = _run_here(todo, directory, experiment.timeout_s, args.cooldown)
    else:
        options = options_of(args.slurm)
        fresh = run_as_jobs(todo, directory, experiment.timeout_s, args.launcher, options)
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
