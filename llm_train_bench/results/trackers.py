"""--track: sends a run to W&B, MLflow or Prometheus while it goes on. Needs no torch.

A thread hands finished steps to the tracker's library, as often as the step log hands them on: every two
seconds. At the end come the final figures, and result.json and steps.jsonl as artifacts.
"""

import importlib
import importlib.util
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.base.files import ROOT, how_to_install, write_whole
from llm_train_bench.results.result_files import Step, finite_numbers, step_figures
from llm_train_bench.results.schema import Result

PROJECT = "llm-train-bench"
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}
FILES = ("result.json", "steps.jsonl")


def check_trackers(names: Iterable[str]) -> None:
    """UsageError where a tracker's library is not installed."""
    for name in names:
        library = PACKAGES.get(name)
        if library and importlib.util.find_spec(library) is None:
            get = how_to_install("pip install -e '.[track]'")
            raise UsageError(f"--track {name}: needs {library}: {get}")


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


class Tracker(Protocol):
    """A run at a tracker: made at the run's start, from its result and directory."""

    def log(self, steps: list[Step]) -> None:
        """Send the figures of finished steps."""

    def finish(self, result: Result) -> str:
        """Send the final figures and the files of the directory; where the run is."""
        ...


class TrackedRun:
    """A sink of steps, for a thread in which the tracker's library works from the first call to the last.

    No failure of a tracker ends the run: `finish` returns a line that says it.
    """

    # A tracker that does not answer delays the end by so long [s].
    PATIENCE_S = 60.0

    def __init__(self, name: str, result: Result, directory: Path):
        self.name, self.outcome = name, ""
        self.waiting: queue.SimpleQueue[list[Step] | Result] = queue.SimpleQueue()
        begun = result.model_copy(deep=True)
        self.thread = threading.Thread(target=self._work, args=(begun, directory), daemon=True)
        self.thread.start()

    def _work(self, result: Result, directory: Path) -> None:
        try:
            tracker = TRACKERS[self.name](result, directory)
            while isinstance(item := self.waiting.get(), list):
                tracker.log(item)
            self.outcome = tracker.finish(item)
        except Exception as error:
            self.outcome = f"not tracked: {type(error).__name__}: {one_line(error)}"

    def __call__(self, steps: list[Step]) -> None:
        self.waiting.put(steps)

    def finish(self, result: Result) -> str:
        """End the run there, once its result.json is written; a line that says where it is."""
        self.waiting.put(result)
        self.thread.join(self.PATIENCE_S)
        silent = f"not tracked to the end: no answer for {self.PATIENCE_S:g} s"
        return f"{self.name}: {self.outcome or silent}"


class WandbTracker:
    """A run of the project; offline where nobody is logged in: `wandb sync` sends it later."""

    def __init__(self, r: Result, directory: Path):
        wandb = self.library = importlib.import_module("wandb")
        self.mode = os.environ.get("WANDB_MODE") or (None if wandb.api.api_key else "offline")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        place = dict(project=project, name=r.run_name, dir=str(directory), mode=self.mode)
        settings = wandb.Settings(console="off")
        self.run = wandb.init(**place, config=r.args | facts_of(r), settings=settings)
        self.directory = directory

    def log(self, steps: list[Step]) -> None:
        for step in steps:
            self.run.log(finite_numbers(step_figures(step)), step=step.step)

    def finish(self, result: Result) -> str:
        self.run.summary.update(final_figures(result) | {"status": result.status})
        name = re.sub(r"[^\w.-]", "-", result.run_name)[:120]
        artifact = self.library.Artifact(name, type="run")
        for file in FILES:
            artifact.add_file(str(self.directory / file))
        self.run.log_artifact(artifact)
        where = str(Path(self.run.dir).parent)
        self.run.finish(exit_code=int(result.status != "ok"))
        return f"offline; send it by: wandb sync {where}" if self.mode == "offline" else where


class MlflowTracker:
    """A run of the experiment at MLFLOW_TRACKING_URI, or in a file store beside the runs."""

    def __init__(self, r: Result, directory: Path):
        self.entities = importlib.import_module("mlflow.entities")
        # Release 3 wants a word before it writes into files.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        beside = (directory.parent / "mlruns").resolve().as_uri()
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or beside
        client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self.uri)
        experiment = client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
        self.run = client.create_run(number, run_name=r.run_name).info.run_id
        self.client, self.directory = client, directory
        params = [self.entities.Param(name, str(value)[:500]) for name, value in r.args.items()]
        client.log_batch(self.run, params=params)

    def log(self, steps: list[Step]) -> None:
        self._metrics([(s.step, finite_numbers(step_figures(s))) for s in steps])

    def _metrics(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        now, metric = int(time.time() * 1000), self.entities.Metric
        metrics = [metric(n, v, now, step) for step, row in rows for n, v in row.items()]
        for i in range(0, len(metrics), 1000):
            self.client.log_batch(self.run, metrics=metrics[i : i + 1000])

    def finish(self, result: Result) -> str:
        self._metrics([(0, {f"final/{n}": v for n, v in final_figures(result).items()})])
        tags = [self.entities.RunTag(name, value) for name, value in facts_of(result).items()]
        self.client.log_batch(self.run, tags=tags)
        for file in FILES:
            self.client.log_artifact(self.run, str(self.directory / file))
        self.client.set_terminated(self.run, "FINISHED" if result.status == "ok" else "FAILED")
        return f"run {self.run} at {self.uri}"


# Endings of our names, the unit of OpenMetrics that replaces each, and the factor to it.
OPENMETRICS_UNITS = {
    "_gb_per_s": ("_bytes_per_second", 1e9),
    "_gib": ("_bytes", 2.0**30),
    "_bytes": ("_bytes", 1.0),
    "_s": ("_seconds", 1.0),
    "_j": ("_joules", 1.0),
    "_w": ("_watts", 1.0),
    "_fraction": ("_ratio", 1.0),
}


class OpenMetricsTracker:
    """metrics.prom, for node_exporter's textfile collector or any reader of OpenMetrics.

    During the run it has the last step's figures, and afterwards the final ones.
    """

    def __init__(self, r: Result, directory: Path):
        self.facts, self.path = facts_of(r), directory / "metrics.prom"
        self.meanings: dict[str, str] = {}
        page = ROOT / "docs/METRICS.md"
        if page.exists():
            rows = re.findall(
                r"^\| `(\w+)` \| [^|]* \| (.*) \|$", page.read_text(encoding="utf-8"), re.M
            )
            self.meanings = {name: text.replace("`", "").replace("\\", "") for name, text in rows}

    def log(self, steps: list[Step]) -> None:
        figures = {f"step_{k.split('/')[1]}": v for k, v in step_figures(steps[-1]).items()}
        self._write(finite_numbers({"step": steps[-1].step} | figures))

    def finish(self, result: Result) -> str:
        self.facts = facts_of(result)
        self._write(final_figures(result))
        return str(self.path)

    def _write(self, figures: dict[str, float]) -> None:
        escaped = {
            k: re.sub(r'(["\\])', r"\\\1", v).replace("\n", " ") for k, v in self.facts.items()
        }
        labels = ",".join(f'{key}="{value}"' for key, value in escaped.items())
        lines = []
        for name, value in figures.items():
            ending = next((e for e in OPENMETRICS_UNITS if name.endswith(e) and name != e[1:]), "")
            unit, factor = OPENMETRICS_UNITS.get(ending, ("", 1.0))
            metric = "llm_train_bench_" + name.removesuffix(ending) + unit
            lines.append(f"# TYPE {metric} gauge")
            lines += [f"# UNIT {metric} {unit[1:]}"] if unit else []
            lines.append(f"# HELP {metric} {self.meanings.get(name, name.replace('_', ' '))}")
            lines.append(f"{metric}{{{labels}}} {value * factor!r}")
        write_whole(self.path, "\n".join([*lines, "# EOF"]) + "\n")


TRACKERS: dict[str, Callable[[Result, Path], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "openmetrics": OpenMetricsTracker,
}
