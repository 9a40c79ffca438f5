"""TensorBoard scalars, one event a step."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from bench.stepfile import Step, finite


class TensorBoardFile:
    """A sink of steps that writes their figures to an event file.

    Rates are derived from `flops_per_token` (palm) and, where known, `peak_tflops` of each of
    `n_devices`; `memory` gives figures in GiB, asked for about once a second.
    """

    MEMORY_INTERVAL_S = 1.0

    def __init__(
        self,
        directory: Path,
        flops_per_token: float,
        peak_tflops: float | None,
        n_devices: int,
        memory: Callable[[], dict[str, float | None]],
    ):
        # Written by the caller: a writing thread would take time from the loop whenever it liked, and
        # has nobody to tell of a full disk.
        directory.mkdir()
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        self.file = (directory / name).open("wb")
        self.records = RecordWriter(self.file)
        self.records.write(
            Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()
        )
        self.flops_per_token, self.peak_tflops = flops_per_token, peak_tflops
        self.n_devices, self.memory = n_devices, memory
        self.last_memory = 0.0

    def __call__(self, steps: list[Step]) -> None:
        for step in steps:
            self.write(step)
        self.file.flush()

    def write(self, step: Step) -> None:
        """Write the event of one step."""
        rate = step.tokens / step.step_time_s
        tflops = rate * self.flops_per_token / 1e12 / self.n_devices
        scalars = {
            "train/loss": step.loss,
            "train/lr": step.lr,
            "train/grad_norm": step.grad_norm,
            "speed/step_time_s": step.step_time_s,
            "speed/tokens_per_sec": rate,
            "speed/model_tflops_per_gpu": tflops,
            "speed/mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }
        if time.perf_counter() - self.last_memory > self.MEMORY_INTERVAL_S:
            self.last_memory = time.perf_counter()
            scalars |= {f"memory/{name}": value for name, value in self.memory().items()}
        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
            if finite(value) is not None
        ]
        event = Event(wall_time=time.time(), step=step.step, summary=Summary(value=values))
        self.records.write(event.SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self.file.close()
