"""TensorBoard: scalars of each step, and hparams with the final metrics."""

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from llm_train_bench.results.metrics import RUN_COLUMNS
from llm_train_bench.results.result_files import Step, finite_numbers, step_figures, storable
from llm_train_bench.results.schema import METER_LENGTH, Result
from llm_train_bench.settings.flags import OUTPUT, Args, declared, defaults

Event: Any = vars(event_pb2)["Event"]  # classes of protocol buffers are made at run time
SessionLog: Any = vars(event_pb2)["SessionLog"]
Summary: Any = vars(summary_pb2)["Summary"]


class TensorBoardFile:
    """A sink of steps that writes their figures to an event file.

    `flops_per_token` (palm) is per device; with its dense `peak_tflops` steps have an MFU.
    """

    def __init__(
        self,
        directory: Path,
        flops_per_token: float | None,
        peak_tflops: float | None,
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
        self.last_step = 0

    def __call__(self, steps: list[Step]) -> None:
        for step in steps:
            self._scalars(step_figures(step, self.flops_per_token, self.peak_tflops), step.step)
        self.last_step = steps[-1].step
        self.file.flush()

    def _scalars(self, figures: Mapping[str, float | None], step: int) -> None:
        """Write the known figures, each under its tag."""
        known = finite_numbers(figures)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._add(step=step, summary=Summary(value=values))

    def _add(self, **fields: Any) -> None:
        self.records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def conclude(self, result: Result) -> None:
        """Write the final metrics, the settings for the HPARAMS tab, and the validation losses."""
        from torch.utils.tensorboard.summary import hparams  # takes a second; --help need not wait

        m, last = result.metrics, self.last_step
        metrics = finite_numbers({f"final/{name}": getattr(m, name) for name in RUN_COLUMNS})
        for summary in hparams(storable(_settings(result)), metrics):
            self._add(summary=summary)
        self._scalars(metrics, last)
        losses = [(result.first_step, m.val_loss_before), *m.val_losses, (last + 1, m.val_loss)]
        for step, loss in losses if m.val_loss_before is not None else ():
            self._scalars({"validation/loss": loss}, step)
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _settings(result: Result) -> dict[str, Any]:
    """What distinguishes a run from others: headline flags, and those that are not at a default."""
    told = {k: v for k, v in result.args.items() if result.ours or k not in METER_LENGTH}
    if result.ours:
        flags, usual = declared(Args), defaults(Args)
        known = {name: told.get(name, usual[name]) for name in flags.keys() - {"config"}}
        told = {
            name: value
            for name, value in known.items()
            if flags[name].kind != OUTPUT and (flags[name].headline or value != usual[name])
        }
    plain = bool | int | float | str
    texts = {k: v if isinstance(v, plain) else str(v).lower() for k, v in told.items()}
    return {"model": result.model.name} | texts
