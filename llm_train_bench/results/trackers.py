"""--track: exports a finished run to W&B, MLflow or Prometheus. Needs no torch.

Everything is written after the run has ended, outside the measured window.
"""

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.base.files import how_to_install, write_whole
from llm_train_bench.results.result_files import Step, finite_numbers, read_steps, step_figures
from llm_train_bench.results.schema import Result

PROJECT = "llm-train-bench"
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


def check_trackers(names: Iterable[str]) -> None:
    """UsageError where a tracker's library is not installed."""
    for name in names:
        library = PACKAGES.get(name)
        if library and importlib.util.find_spec(library) is None:
            get = how_to_install("pip install -e '.[track]'")
            raise UsageError(f"--track {name}: needs {library}: {get}")


def track(names: Iterable[str], r: Result, directory: Path) -> Iterator[str]:
    """Export a run; yields a line for each tracker: where the run is, or why it failed."""
    for name in names:
        try:
            steps = [Step(**step) for step in read_steps(directory / "steps.jsonl")]
            yield f"{name}: {TRACKERS[name](r, steps, directory)}"
        except Exception as error:  # the run is measured and written: no tracker may take that away
            yield f"{name}: not tracked: {type(error).__name__}: {one_line(error)}"


def final_figures(r: Result) -> dict[str, float]:
    """The final metrics that are numbers."""
    return finite_numbers(r.metrics.model_dump())


def facts_of(r: Result) -> dict[str, str]:
    """What identifies a run."""
    names = ("run", "model", "hardware", "devices", "entrypoint", "status")
    device = r.device.hardware, str(r.device.count)
    return dict(
        zip(names, (r.run_name, r.model.name, *device, r.entrypoint, r.status), strict=True)
    )


def _wandb(r: Result, steps: list[Step], directory: Path) -> str:
    """A run of the project; offline where nobody is logged in: `wandb sync` sends it later."""
    wandb = importlib.import_module("wandb")
    mode = os.environ.get("WANDB_MODE") or (None if wandb.api.api_key else "offline")
    project, settings = os.environ.get("WANDB_PROJECT", PROJECT), wandb.Settings(console="off")
    place = dict(project=project, name=r.run_name, dir=str(directory))
    run = wandb.init(**place, mode=mode, config=r.args | facts_of(r), settings=settings)
    for step in steps:
        run.log(finite_numbers(step_figures(step)), step=step.step)
    run.summary.update(final_figures(r))
    where = str(Path(run.dir).parent)
    run.finish()
    return f"offline; send it by: wandb sync {where}" if mode == "offline" else where


def _mlflow(r: Result, steps: list[Step], directory: Path) -> str:
    """A run of the experiment at MLFLOW_TRACKING_URI, or in a file store beside the runs."""
    entities = importlib.import_module("mlflow.entities")
    # Release 3 wants a word before it writes into files.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = os.environ.get("MLFLOW_TRACKING_URI") or (directory.parent / "mlruns").resolve().as_uri()
    client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(PROJECT)
    number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    run = client.create_run(number, run_name=r.run_name).info.run_id
    params = [entities.Param(name, str(value)[:500]) for name, value in r.args.items()]
    tags = [entities.RunTag(name, value) for name, value in facts_of(r).items()]
    client.log_batch(run, params=params, tags=tags)
    figures = [(s.step, finite_numbers(step_figures(s))) for s in steps]
    figures.append((0, {f"final/{name}": value for name, value in final_figures(r).items()}))
    now = int(time.time() * 1000)
    metrics = [entities.Metric(n, v, now, step) for step, row in figures for n, v in row.items()]
    for i in range(0, len(metrics), 1000):
        client.log_batch(run, metrics=metrics[i : i + 1000])
    client.set_terminated(run, "FINISHED" if r.status == "ok" else "FAILED")
    return f"run {run} at {uri}"


def _openmetrics(r: Result, steps: list[Step], directory: Path) -> str:
    """A text file for node_exporter's textfile collector, or any reader of OpenMetrics."""
    escaped = {k: re.sub(r'(["\\])', r"\\\1", v).replace("\n", " ") for k, v in facts_of(r).items()}
    labels = ",".join(f'{key}="{value}"' for key, value in escaped.items())
    lines = []
    for name, value in final_figures(r).items():
        metric = f"llm_train_bench_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
        lines += [f"# TYPE {metric} gauge", f"{metric}{{{labels}}} {value!r}"]
    path = directory / "metrics.prom"
    write_whole(path, "\n".join([*lines, "# EOF"]) + "\n")
    return str(path)


Export = Callable[[Result, list[Step], Path], str]
TRACKERS: dict[str, Export] = {"wandb": _wandb, "mlflow": _mlflow, "openmetrics": _openmetrics}
