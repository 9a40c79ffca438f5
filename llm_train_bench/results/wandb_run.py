"""--track wandb: sends a run to Weights & Biases while it goes on. Needs no torch."""

import importlib
import os
import queue
import re
import threading
from pathlib import Path

from llm_train_bench.base.errors import one_line
from llm_train_bench.results.result_files import Step, finite_numbers, step_figures, storable
from llm_train_bench.results.schema import Result


class WandbRun:
    """A sink of steps. The library works in a thread, where it delays no step and ends no run."""

    # W&B that does not answer delays the end by so long [s].
    PATIENCE_S = 60.0

    def __init__(self, begun: Result, directory: Path):
        self.outcome = f"not tracked to the end: no answer for {self.PATIENCE_S:g} s"
        self.waiting: queue.SimpleQueue[list[Step] | Result] = queue.SimpleQueue()
        place = begun.model_copy(deep=True), directory
        self.thread = threading.Thread(target=self._work, args=place, daemon=True)
        self.thread.start()

    def __call__(self, steps: list[Step]) -> None:
        self.waiting.put(steps)

    def finish(self, result: Result) -> str:
        """End the run there, once its result.json is written; a line says where it is, or why not."""
        self.waiting.put(result)
        self.thread.join(self.PATIENCE_S)
        return f"wandb: {self.outcome}"

    def _work(self, begun: Result, directory: Path) -> None:
        try:
            self.outcome = self._send(begun, directory)
        except Exception as error:
            self.outcome = f"not tracked: {type(error).__name__}: {one_line(error)}"

    def _send(self, begun: Result, directory: Path) -> str:
        """Offline without a login: `wandb sync` sends the run later."""
        wandb = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE") or (None if wandb.api.api_key else "offline")
        device = begun.device.model_dump()
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "llm-train-bench"), name=begun.run_name,
            config=storable(begun.args | {"model": begun.model.name} | {"device": device}),
            dir=str(directory), mode=mode, settings=wandb.Settings(console="off"),
        )  # fmt: skip
        while isinstance(item := self.waiting.get(), list):
            for step in item:
                run.log(finite_numbers(step_figures(step)), step=step.step)
        run.summary.update(finite_numbers(item.metrics.model_dump()) | {"status": item.status})
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", item.run_name)[:120], type="run")
        for name in ("result.json", "steps.jsonl"):
            artifact.add_file(str(directory / name))
        run.log_artifact(artifact)
        run.finish(exit_code=int(item.status != "ok"))
        where = str(Path(run.dir).parent)
        return f"offline; send it by: wandb sync {where}" if mode == "offline" else where
