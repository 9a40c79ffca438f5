"""Which setting is best: run many, one process each, and compare them.

    python sweep.py configs/sweeps/gpt2-context.yaml
    python sweep.py --models configs/gpt2-tiny.json --set bsz=4,8 pt-compile=true,false --repeats 3
    python sweep.py --models configs/gpt2-125m.json --set pt-compile=true bsz=auto
    python sweep.py configs/sweeps/gpt2-context.yaml --tune

A run that fails is a row, not the end. A sweep can be killed at any point: started again with the
same --output-dir, it goes on where it was. docs/SWEEPS.md explains the experiment file. Needs no
torch itself.
"""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from llm_train_bench.base.start import ROOT

from llm_train_bench.base.errors import Interrupted, UsageError, printable
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.machine import Platform, detect_platform
from llm_train_bench.base.tables import write_rows
from llm_train_bench.base.tool_main import print_apart, run_tool, tool
from llm_train_bench.compare.ratios import compare, prices_of
from llm_train_bench.compare.report import by_speed, runs_table, show_comparison
from llm_train_bench.model.json_files import shipped_config
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import changed, flag, flag_of
from llm_train_bench.sweep.all_runs import estimated_seconds, hours, run_all
from llm_train_bench.sweep.cell_runs import Rows
from llm_train_bench.sweep.experiment import (
    Experiment,
    from_command_line,
    machines_of,
    read_experiment,
)
from llm_train_bench.sweep.grid import Cell, differences, make_cells
from llm_train_bench.sweep.rows_as_records import records_of_rows


@dataclasses.dataclass(frozen=True)
class SweepArgs:
    """Run many settings, each in a separate process, and compare them.

    experiment: An experiment file. Without one, --models and --set describe the runs.
    models: Model configs. With an experiment file, which of its models to run.
    script: Script to run.
    set: flag=value for all runs, or flag=value,value,... for an axis of the grid.
    platform: Platform, which selects its part of the experiment file. auto detects the driver.
    repeats: Runs of each setting, interleaved so that a drifting machine affects all settings.
    tune: Find the fastest setting with few runs. The estimate keeps the fastest fifth, short runs
        halve it repeatedly, and the two best settings run in full, alternating, five times.
    output_dir: Directory of rows.jsonl, runs.csv and the runs. By default sweeps/EXPERIMENT.
    retry: Repeat runs that failed or timed out earlier in the same --output-dir.
    dry_run: Print the commands and stop.
    """

    experiment: str = flag("", metavar="[FILE.yaml]", positional=True)
    models: tuple[str, ...] = flag((), metavar="CONFIG ...")
    script: Literal["train.py", "train_ddp.py", "train_fsdp.py", "train_pp.py"] = flag("train.py")
    set: tuple[str, ...] = flag((), metavar="FLAG=VALUE ...")
    platform: Literal["auto", "nvidia", "amd", "cpu"] = flag("auto")
    repeats: int = flag(1, at_least=1, at_most=1000)
    tune: bool = flag(False)
    output_dir: str | None = flag(None, metavar="DIR")
    retry: bool = flag(False)
    dry_run: bool = flag(False)


@tool("sweep.py")
def main(argv: Sequence[str]) -> int:
    """Sweep, and return the exit code: 0; 2 for bad input; 1 if no run was ok. A signal passes on."""
    args = parse_dataclass(SweepArgs, argv, "sweep.py")
    experiment, where = experiment_of(args)
    platform = detect_platform() if args.platform == "auto" else args.platform
    cells = make_cells(experiment, platform, where)
    commands = [[cell.script, *cell.argv()] for cell in cells]
    unlike = differences(experiment, where)
    if experiment.methodology == "identical_config" and unlike:
        more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
        raise UsageError(
            f"{where}: methodology is identical_config, and platforms differ: {unlike[0]}{more}; "
            "make them equal, or take maximum_performance"
        )
    if args.dry_run:
        for script, *words in commands:
            name = script.removesuffix(".py").replace("_", "-")
            program = ["python", script] if Path.cwd() == ROOT else ["llm-train-bench", name]
            print(printable(shlex.join([*program, *words])))
        print(summary(cells, experiment, platform, args.tune))
        return 0
    directory = Path(args.output_dir or f"sweeps/{experiment.experiment}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        rows = Rows(directory / "rows.jsonl")
        if args.retry:
            rows.forget("failed", "timeout")
        described = {"experiment": experiment.model_dump(), "platform": platform}
        described |= {"differences": unlike, "settings": commands}
        write_whole(directory / "sweep.json", json.dumps(described, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"--output-dir {directory}: {error.strerror}") from None
    try:
        # The directory may hold rows of other settings, from an earlier form of the experiment.
        measured = run_all(cells, experiment, rows, platform, args.tune)
        records = records_of_rows(measured)
        prices = prices_of(machines_of([experiment]), [], records)
        rows_of_table = sorted(compare(records, prices, None), key=by_speed)
        write_rows(directory / "runs.csv", runs_table(rows_of_table))
        show_comparison(rows_of_table)
        written = f"wrote rows.jsonl, runs.csv and runs/ in {directory}"
        print(f"{written}; compare.py {directory} makes a report")
    except (KeyboardInterrupt, Interrupted, OSError):
        print_apart("sweep.py", f"rows kept: {len(rows.rows)}; the same command resumes there")
        raise
    return 0 if any(row["status"] == "ok" for row in measured) else 1


def experiment_of(args: SweepArgs) -> tuple[Experiment, str]:
    """The experiment that the arguments name or describe, and its name for messages."""
    if not (args.experiment or args.models):
        raise UsageError("nothing to run: give an experiment file, or --models")
    if not args.experiment:
        return from_command_line(args.script, args.models, args.set, args.repeats), "--set"
    for name in sorted({"set", "script", "repeats"} & set(changed(args))):
        raise UsageError(f"{flag_of(name)}: the experiment file decides that; leave the flag out")
    if shipped_config(args.experiment) != args.experiment:
        raise UsageError(f"{args.experiment}: is a model; use --models {args.experiment}")
    experiment = read_experiment(args.experiment)
    names = {model: {model, Path(model).stem} for model in experiment.models}
    if unknown := set(args.models) - set().union(*names.values()):
        known = ", ".join(Path(model).stem for model in names)
        why = f"unknown model of {args.experiment}; available: {known}"
        raise UsageError(f"--models {min(unknown)}: {why}")
    chosen = [m for m in names if not args.models or names[m] & set(args.models)]
    return experiment.model_copy(update={"models": chosen}), args.experiment


def summary(cells: list[Cell], e: Experiment, platform: Platform, searches: bool) -> str:
    """How many runs there are, and how long they take, as a comment of a shell."""
    counts = {"setting": len(cells), "repeat": e.repeats, "run": len(cells) * e.repeats}
    settings, repeats, runs = (f"{n} {word}{'s' * (n > 1)}" for word, n in counts.items())
    text = f"# {settings} x {repeats} = {runs}"
    if searches:
        return f"{text}; a search decides which of them run, and for how long"
    seconds = estimated_seconds(cells, e, platform)
    if seconds is None:
        return f"{text}; the time is unknown until the first run ends"
    return f"{text}; estimated {hours(e.repeats * seconds)}; compilation is extra"


if __name__ == "__main__":
    run_tool(main)
