"""Files of runs: what --save writes, the gate compares with, and people share. Needs no torch.

A file holds results with their steps, by setting. compare/shareable.py says what of a result is in it.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import FailFast, Field, ValidationError

from llm_train_bench.base.errors import UsageError, printable_data
from llm_train_bench.base.strict import Strict, first_problem
from llm_train_bench.model.json_files import parse_json, plain_text
from llm_train_bench.results.result_files import Step, step_fields, storable
from llm_train_bench.results.schema import Result

MOST_BYTES = 64 * 2**20
ABOUT = "Runs with their steps, written by compare.py RUN... --save FILE; see docs/COMPARE.md."


class SavedRun(Strict):
    """A result with its steps."""

    result: Result
    steps: Annotated[list[Step], FailFast()]


class SavedSetting(Strict):
    """The runs of one setting, its name in words, and the tolerance that the gate has for it."""

    setting: str
    tolerance: Annotated[float | None, Field(strict=True, ge=0, lt=1)] = None
    runs: Annotated[list[SavedRun], Field(min_length=1), FailFast()]


class RunsFile(Strict):
    """A file of runs."""

    about: str = ABOUT
    schema_version: Literal[5] = 5
    settings: Annotated[list[SavedSetting], Field(min_length=1), FailFast()]


def read_runs_file(path: Path) -> RunsFile:
    """A file of runs; UsageError if it is none."""
    try:
        path.stat()  # the package's own file of this name is not the user's
        content = parse_json(plain_text(path))
        return RunsFile.model_validate(storable(printable_data(content)))
    except OSError as error:
        why = f"{error.strerror}; compare.py RUN... --save FILE makes such a file"
        raise UsageError(f"{path}: cannot be read: {why}") from None
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise UsageError(f"{path}: is not a file of runs: {why}") from None


def file_text(file: RunsFile) -> str:
    """A file of runs as JSON, a line for each run; without figures that a result does not have."""
    entries = []
    for entry in file.settings:
        lines = []
        for run in entry.runs:
            result = storable(run.result.model_dump(mode="json", exclude_unset=True))
            steps = [step_fields(step) for step in run.steps]
            lines.append(json.dumps({"result": result, "steps": steps}, allow_nan=False))
        runs = ",\n".join(lines)
        content = entry.model_dump(mode="json", exclude={"runs"}, exclude_unset=True)
        entries.append(f'{json.dumps(content)[:-1]}, "runs": [\n{runs}]}}')
    head = json.dumps(file.model_dump(exclude={"settings"}))[:-1]
    return f'{head}, "settings": [\n' + ",\n".join(entries) + "]}\n"
