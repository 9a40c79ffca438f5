"""Writing result.json so that it survives whatever ends the run, and reading it. Needs no torch."""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.results.schema import Result

# Held on disk from the start, so that a full disk cannot keep the result from being written.
RESERVED_BYTES = 2**20
RESERVED_BYTES_PER_STEP = 48


def first_problem(error: ValidationError) -> str:
    """The first error that a schema found: where, and what."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


class ResultFile:
    """`result.json` of a run: space is reserved at once, and every write replaces the whole file."""

    def __init__(self, directory: Path, n_steps: int):
        self.size = RESERVED_BYTES + RESERVED_BYTES_PER_STEP * n_steps
        self.path = directory / "result.json"
        self.spare = directory / ".result.json.reserved"
        self._reserve()

    def _reserve(self) -> None:
        with self.spare.open("wb") as f:
            f.write(bytes(self.size))
            f.flush()
            os.fsync(f.fileno())

    def write(self, result: Result, last: bool = False) -> None:
        """Write into the reserved blocks and rename; after the `last` write nothing is reserved."""
        content = without_nan(result.model_dump(mode="json"))
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        with self.spare.open("r+b") as f:
            f.write(text.encode())
            f.truncate()
            f.flush()
            os.fsync(f.fileno())
        self.spare.replace(self.path)
        if not last:
            self._reserve()


def without_nan(value: Any) -> Any:
    """JSON data with null in place of what JSON cannot hold: infinities and undefined numbers."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return finite(value)


def read_result(path: str | Path) -> Result:
    """A result.json of any version; ValueError (a wrong schema) or OSError if it is none."""
    return parse_result(json.loads(Path(path).read_text(encoding="utf-8")))


def parse_result(content: Any) -> Result:
    """The content of a result.json of any version; pydantic's ValidationError if it is none."""
    if isinstance(content, dict) and content.get("schema_version") == 1:
        content = content | {"schema_version": 2, "profile": _profile_of_1(content.get("profile"))}
    return Result.model_validate(content)


def _profile_of_1(profile: Any) -> Any:
    """A profile of schema version 1, with gaps in four fields, as one of version 2."""
    if not isinstance(profile, dict):
        return profile
    names = {"count": "host_gaps", "time_s": "host_gaps_s", "longest_s": "longest_host_gap_s",
             "by_part": "host_gaps_by_part_s"}  # fmt: skip
    gaps = {name: profile.get(old) for name, old in names.items()}
    rest = {k: v for k, v in profile.items() if k not in names.values()}
    return rest | {"host_gaps": None if gaps["count"] is None else gaps}


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
        # A failed write was reported when it happened; the buffer may still hold its data.
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
