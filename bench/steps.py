"""What each step took and gave, read without making the device wait.

The end of one step is the start of the next, so that the step times of a window add up to the window.
"""

import contextlib
import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.clock import Clock, Stamp

PARTS = ("data", "forward", "backward", "optimizer")


@dataclasses.dataclass(frozen=True)
class Step:
    """One finished step, as a line of steps.jsonl; times in seconds, tokens over all ranks."""

    step: int
    phase: str
    loss: float
    lr: float
    grad_norm: float | None
    step_time_s: float
    tokens: int
    data_time_s: float
    forward_time_s: float
    backward_time_s: float
    optimizer_time_s: float


@dataclasses.dataclass
class _Pending:
    step: int
    phase: str
    lr: float
    tokens: int
    marks: list[tuple[str, Stamp]]
    values: Tensor  # loss and gradient norm, on the CPU once the last mark has passed


class StepLog:
    """Collects stamps and values during the loop, and hands on finished steps now and then."""

    # Steps are handed on no more often than this, so that files and screen cost the loop nothing.
    INTERVAL_S = 1.0

    def __init__(self, device: torch.device, sinks: list[Callable[[Step], None]]):
        self.clock = Clock(device)
        self.device = device
        self.sinks = sinks
        self.steps: list[Step] = []
        self.pending: deque[_Pending] = deque()
        self.marks: list[tuple[str, Stamp]] = []
        self.last_drain = 0.0

    def start(self) -> None:
        """Stamp the start of the first step after a pause."""
        self.marks = [("start", self.clock.stamp())]

    def mark(self, part: str) -> None:
        """Stamp the end of a part of the step."""
        self.marks.append((part, self.clock.stamp()))

    def finish(
        self, step: int, phase: str, lr: float, tokens: int, loss: Tensor, grad_norm: Tensor | None
    ) -> None:
        """End the step: send its values to the CPU without waiting, and hand on what has passed."""
        on_device = torch.stack((loss, loss.new_full((), -1.0) if grad_norm is None else grad_norm))
        values = torch.empty(2, pin_memory=self.device.type == "cuda")
        values.copy_(on_device, non_blocking=True)
        self.mark("optimizer")
        self.pending.append(_Pending(step, phase, lr, tokens, self.marks, values))
        self.marks = self.marks[-1:]
        if time.perf_counter() - self.last_drain > self.INTERVAL_S:
            self.drain()

    def drain(self) -> None:
        """Hand on the steps that the device has finished."""
        self.last_drain = time.perf_counter()
        while self.pending and self.clock.passed(self.pending[0].marks[-1][1]):
            step = self._read(self.pending.popleft())
            self.steps.append(step)
            for sink in self.sinks:
                sink(step)

    def _read(self, pending: _Pending) -> Step:
        parts = dict.fromkeys(PARTS, 0.0)
        for (_, begin), (part, end) in zip(pending.marks, pending.marks[1:], strict=False):
            parts[part] += self.clock.seconds(begin, end)
        loss, grad_norm = pending.values.tolist()
        return Step(
            step=pending.step,
            phase=pending.phase,
            loss=loss,
            lr=pending.lr,
            grad_norm=None if grad_norm == -1.0 else grad_norm,
            step_time_s=self.clock.seconds(pending.marks[0][1], pending.marks[-1][1]),
            tokens=pending.tokens,
            **{f"{part}_time_s": seconds for part, seconds in parts.items()},
        )

    def of_phase(self, phase: str) -> list[Step]:
        """Finished steps of `warmup` or `measure`."""
        return [step for step in self.steps if step.phase == phase]


class StepsFile:
    """steps.jsonl: one JSON object a line and step; infinite and undefined values become null."""

    def __init__(self, path: Path):
        self.file = path.open("w", encoding="utf-8")

    def __call__(self, step: Step) -> None:
        fields = {k: finite(v) for k, v in dataclasses.asdict(step).items()}
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    def close(self) -> None:
        # What could not be written was reported when it was written; the buffer may still hold it.
        with contextlib.suppress(OSError):
            self.file.close()


def finite(value):
    """A number JSON can hold, or None."""
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return None
    return value
