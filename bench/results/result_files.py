"""Writing result.json so that it survives whatever ends the run, and reading it. Needs no torch."""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.results import Result
from bench.stepfile import finite

# Held on disk from the start, so that a full disk cannot keep the result from being written.
RESERVED_BYTES = 2**20
RESERVED_BYTES_PER_STEP = 48


def first_problem(error: ValidationError) -> str:
    """The first of what a schema found wrong: where, and what."""
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
    """A result.json, checked against the schema; pydantic's ValidationError if it is none, or OSError."""
    return Result.model_validate_json(Path(path).read_text(encoding="utf-8"))
