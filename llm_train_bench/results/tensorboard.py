"""TensorBoard: scalars of each step, what ran as text, and hparams with the final metrics."""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from llm_train_bench.base.tables import markdown_cell, markdown_table
from llm_train_bench.results.metrics import RUN_COLUMNS
from llm_train_bench.results.result_files import Step, finite_numbers, step_figures, storable
from llm_train_bench.results.schema import METER_LENGTH, Result
from llm_train_bench.settings.flags import OUTPUT, Args, declared, defaults

Event: Any = vars(event_pb2)["Event"]  # classes of protocol buffers are made at run time
SessionLog: Any = vars(event_pb2)["SessionLog"]
Summary: Any = vars(summary_pb2)["Summary"]


class TensorBoardFile:
    """A sink of steps that writes their figures to an event file.

    Rates are derived from `flops_per_token` (palm) and `peak_tflops` of each of `n_devices`, where
    known. `memory` gives figures in GiB, asked for every ten seconds.
    """

    MEMORY_INTERVAL_S = 10.0

    def __init__(
        self,
        directory: Path,
        flops_per_token: float | None,
        peak_tflops: float | None,
        n_devices: int,
        memory: Callable[[], dict[str, float | None]],
        first_step: int = 0,
    ):
        # The caller writes: a writing thread would take time from the loop at any moment, and could
        # not report a full disk.
        directory.mkdir(exist_ok=True)
        # TensorBoard reads the files by their names, also where a clock was set back.
        before = [int(path.name.split(".")[3]) for path in directory.glob("events.out.tfevents.*")]
        number = max(int(time.time()), max(before, default=0) + 1)
        name = f"events.out.tfevents.{number:010d}.{platform.node()}.{os.getpid()}"
        self.file = (directory / name).open("wb")
        self.records = RecordWriter(self.file)
        self._add(file_version="brain.Event:2")
        # What earlier attempts wrote of this step and of later ones is not shown.
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self.flops_per_token, self.peak_tflops = flops_per_token, peak_tflops
        self.n_devices, self.memory = n_devices, memory
        self.last_memory, self.last_memory_step = 0.0, -1
        self.last_step = 0

    def __call__(self, steps: list[Step]) -> None:
        for step in steps:
            self.write(step)
        self.file.flush()

    def write(self, step: Step) -> None:
        """Write the event of one step."""
        rate = step.tokens / step.step_time_s
        flops = self.flops_per_token
        tflops = rate * flops / 1e12 / self.n_devices if flops else None
        mfu = tflops / self.peak_tflops if tflops and self.peak_tflops else None
        scalars = step_figures(step) | {"speed/model_tflops_per_gpu": tflops, "speed/mfu": mfu}
        if time.perf_counter() - self.last_memory > self.MEMORY_INTERVAL_S:
            self._add_memory(step.step)
        self.last_step = step.step
        self._scalars(scalars, step.step)

    def _add_memory(self, step: int) -> None:
        self.last_memory, self.last_memory_step = time.perf_counter(), step
        self._scalars({f"memory/{name}": gib for name, gib in self.memory().items()}, step)

    def _scalars(self, figures: Mapping[str, float | None], step: int) -> None:
        """Write the known figures, each under its tag."""
        known = finite_numbers(figures)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._add(step=step, summary=Summary(value=values))

    def _add(self, **fields: Any) -> None:
        self.records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def describe(self, result: Result) -> None:
        """Write as text what is about to run."""
        # Takes a second; --help need not wait for it.
        from torch.utils.tensorboard.summary import text

        parts = {"arguments": result.args, "model": result.model.shape}
        parts |= {"device": result.device.model_dump(), "environment": result.environment}
        for name, content in parts.items():
            cells = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in content.items()]
            rows = [(k, markdown_cell(" ".join(v.splitlines()))) for k, v in cells]
            table = markdown_table((name, "value"), rows, left=["value"])
            self._add(summary=text(f"run/{name}", storable(table)))
        self.file.flush()

    def conclude(self, result: Result) -> None:
        """Write the arguments and the final metrics for the HPARAMS tab, which compares runs."""
        from torch.utils.tensorboard.summary import hparams

        m, last = result.metrics, self.last_step
        settings: dict[str, Any] = {"model": result.model.name}
        told = {k: v for k, v in result.args.items() if k not in METER_LENGTH}
        if result.ours:
            default = defaults(Args)
            told = {
                name: value
                for name, flag in declared(Args).items()
                if (
                    (value := result.args.get(name, default[name])) != default[name]
                    or flag.headline
                )
                and flag.kind is not OUTPUT
            }
        for name, value in told.items():
            plain = isinstance(value, bool | int | float | str)
            settings[name] = value if plain else str(value).lower()
        settings.pop("config", None)
        metrics = finite_numbers({f"final/{name}": getattr(m, name) for name in RUN_COLUMNS})
        for summary in hparams(storable(settings), metrics):
            self._add(summary=summary)
        self._scalars(metrics, last)  # the HPARAMS tab shows a tag's last value
        if last > self.last_memory_step:
            self._add_memory(last)
        losses = [(result.first_step, m.val_loss_before), *m.val_losses, (last + 1, m.val_loss)]
        for step, loss in losses if m.val_loss_before is not None else ():
            self._scalars({"validation/loss": loss}, step)
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()
