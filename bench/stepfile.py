"""steps.jsonl: what one step was, and the file of them. Needs no torch."""

import contextlib
import dataclasses
import json
from pathlib import Path

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


class StepsFile:
    """steps.jsonl: one JSON object a line and step; infinite and undefined values become null."""

    def __init__(self, path: Path):
        self.file = path.open("w", encoding="utf-8")

    def __call__(self, steps: list[Step]) -> None:
        for step in steps:
            fields = {k: finite(v) for k, v in dataclasses.asdict(step).items()}
            self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    def close(self) -> None:
        # What could not be written was reported when it was written; the buffer may still hold it.
        with contextlib.suppress(OSError):
            self.file.close()


def read_losses(path: Path) -> list[float]:
    """The loss of every step of a steps.jsonl; NaN where it was not finite."""
    losses = (json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines())
    return [float("nan") if loss is None else loss for loss in losses]


def finite(value):
    """A number JSON can hold, or None."""
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return None
    return value
