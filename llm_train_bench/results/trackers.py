"""--track: a finished run for W&B, MLflow or Prometheus. Needs no torch.

All is written when the run has ended, so that nothing of it is in the window.
"""

import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import write_whole
from llm_train_bench.results.result_files import finite
from llm_train_bench.results.schema import Result

PROJECT = "llm-train-bench"
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}
Steps = list[dict[str, Any]]


def check_trackers(names: Iterable[str]) -> None:
    """UsageError where a library that is asked for is not installed."""
    for name in names:
        library = PACKAGES.get(name)
        if library and importlib.util.find_spec(library) is None:
            raise UsageError(f"--track {name}: needs {library}: pip install -e '.[track]'")


def track(names: Iterable[str], r: Result, directory: Path) -> Iterator[str]:
    """Hand a run on; yields a line for each tracker that took it, or did not and why."""
    for name in names:
        try:
            yield f"{name}: {TRACKERS[name](r, _steps_of(directory), directory)}"
        except Exception as error:  # the run is measured and written: no tracker may take that away
            yield f"{name}: not tracked: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _steps_of(directory: Path) -> Steps:
    lines = (directory / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def figures_of(step: dict[str, Any]) -> dict[str, float]:
    """A step's numbers by the names that TensorBoard has for them."""
    known = {
        "train/loss": step.get("loss"), "train/lr": step.get("lr"),
        "train/grad_norm": step.get("grad_norm"), "speed/step_time_s": step.get("step_time_s"),
        "speed/tokens_per_sec": step["tokens"] / step["step_time_s"] if step.get("step_time_s") else None,
    }  # fmt: skip
    return {name: float(value) for name, value in known.items() if finite(value) is not None}


def final_figures(r: Result) -> dict[str, float]:
    """The final metrics that are numbers."""
    found = r.metrics.model_dump()
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and finite(value) is not None
    }


def facts_of(r: Result) -> dict[str, str]:
    """What identifies a run."""
    return {
        "run": r.run_name, "model": r.model.name, "hardware": r.device.hardware,
        "devices": str(r.device.count), "entrypoint": r.entrypoint, "status": r.status,
    }  # fmt: skip


def _wandb(r: Result, steps: Steps, directory: Path) -> str:
    """A run of the project; offline where nobody is logged in: `wandb sync` sends it later."""
    import wandb

    mode = os.environ.get("WANDB_MODE") or (None if wandb.api.api_key else "offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), name=r.run_name, mode=mode,
        dir=str(directory), config=r.args | facts_of(r), settings=wandb.Settings(console="off"),
    )  # fmt: skip
    for step in steps:
        run.log(figures_of(step), step=step["step"])
    run.summary.update(final_figures(r))
    where = str(Path(run.dir).parent)
    run.finish()
    return f"offline; send it by: wandb sync {where}" if mode == "offline" else where


def _mlflow(r: Result, steps: Steps, directory: Path) -> str:
    """A run of the experiment at MLFLOW_TRACKING_URI, or in a file store beside the runs."""
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    # Release 3 wants a word before it writes into files.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = os.environ.get("MLFLOW_TRACKING_URI") or (directory.parent / "mlruns").resolve().as_uri()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(PROJECT)
    number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    run = client.create_run(number, run_name=r.run_name).info.run_id
    params = [Param(name, str(value)[:500]) for name, value in r.args.items()]
    tags = [RunTag(name, value) for name, value in facts_of(r).items()]
    now = int(time.time() * 1000)
    metrics = [Metric(n, v, now, s["step"]) for s in steps for n, v in figures_of(s).items()]
    metrics += [Metric(f"final/{name}", value, now, 0) for name, value in final_figures(r).items()]
    client.log_batch(run, params=params, tags=tags)
    for i in range(0, len(metrics), 1000):
        client.log_batch(run, metrics=metrics[i : i + 1000])
    client.set_terminated(run, "FINISHED" if r.status == "ok" else "FAILED")
    return f"run {run} at {uri}"


def _openmetrics(r: Result, steps: Steps, directory: Path) -> str:
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


TRACKERS: dict[str, Callable[[Result, Steps, Path], str]] = {
    "wandb": _wandb, "mlflow": _mlflow, "openmetrics": _openmetrics,
}  # fmt: skip
