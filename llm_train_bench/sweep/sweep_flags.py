"""The flags of sweep.py, and the experiment that they describe. Needs no torch."""

import dataclasses
from pathlib import Path
from typing import Literal

from llm_train_bench.base.errors import UsageError
from llm_train_bench.model.json_keys import shipped_config
from llm_train_bench.settings.flags import changed, flag, flag_of
from llm_train_bench.sweep.experiment import Experiment, from_command_line, read_experiment


@dataclasses.dataclass(frozen=True)
class SettingsFlags:
    """The settings to run.

    experiment: An experiment file. Without one, --models and --set describe the runs.
    models: Model configs. With an experiment file, which of its models to run.
    script: Script to run.
    set: flag=value for all runs, or flag=value,value,... for an axis of the grid.
    platform: Platform, which selects its part of the experiment file. auto detects the driver.
    """

    experiment: str = flag("", metavar="[FILE.yaml]", positional=True)
    models: tuple[str, ...] = flag((), metavar="CONFIG ...")
    script: Literal["train.py", "train_ddp.py", "train_fsdp.py", "train_pp.py"] = flag("train.py")
    set: tuple[str, ...] = flag((), metavar="FLAG=VALUE ...")
    platform: Literal["auto", "nvidia", "amd", "cpu"] = flag("auto")


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """How to run them.

    repeats: Runs of each setting, interleaved so that a drifting machine affects all settings.
    tune: Find the fastest setting with few runs. The estimate keeps the fastest fifth, short runs
        halve it repeatedly, and the two best settings run in full, alternating, five times.
    output_dir: Directory of rows.jsonl, runs.csv and the runs. By default sweeps/EXPERIMENT.
    retry: Repeat runs that failed or timed out earlier in the same --output-dir.
    dry_run: Print the commands and stop.
    """

    repeats: int = flag(1, at_least=1)
    tune: bool = flag(False)
    output_dir: str | None = flag(None, metavar="DIR")
    retry: bool = flag(False)
    dry_run: bool = flag(False)


@dataclasses.dataclass(frozen=True)
class SweepArgs(ProcessFlags, SettingsFlags):
    """Run many settings, each in a separate process, and compare them."""


def experiment_of(args: SweepArgs) -> tuple[Experiment, str]:
    """The experiment that the arguments name or describe, and its name for messages."""
    if args.experiment:
        if name := changed(args, ("set", "script", "repeats")):
            raise UsageError(
                f"{flag_of(name)}: the experiment file decides that; leave the flag out"
            )
        if shipped_config(args.experiment) != args.experiment:
            raise UsageError(f"{args.experiment}: is a model; use --models {args.experiment}")
        experiment = read_experiment(args.experiment)
        names = {model: {model, Path(model).stem} for model in experiment.models}
        if unknown := set(args.models) - set().union(*names.values()):
            available = ", ".join(Path(model).stem for model in names)
            raise UsageError(
                f"--models {min(unknown)}: unknown model of {args.experiment}; available: {available}"
            )
        chosen = [m for m in names if not args.models or names[m] & set(args.models)]
        return experiment.model_copy(update={"models": chosen}), args.experiment
    if not args.models:
        raise UsageError("nothing to run: give an experiment file, or --models")
    return from_command_line(args.script, args.models, args.set, args.repeats), "--set"
