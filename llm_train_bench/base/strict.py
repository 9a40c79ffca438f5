"""The base of all schemas of our files, and what it says of a file that does not fit."""

import contextlib
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from llm_train_bench.base.errors import UsageError


class Strict(BaseModel):
    """A part of a file of ours; keys that its schema does not know are errors."""

    model_config = ConfigDict(extra="forbid")


def first_problem(error: ValidationError) -> str:
    """The first error that a schema found: where, and what."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))[:200]  # names are the file's own
    return ": ".join(filter(None, (where, first["msg"])))


@contextlib.contextmanager
def in_one_line(of: str) -> Iterator[None]:
    """UsageError for what a schema or the types of a function do not allow; `of` is its beginning."""
    try:
        yield
    except ValidationError as error:
        first, *more = error.errors()
        # Several where a value may have one of several types, whose names then end the places.
        problems = [first, *(problem for problem in more if problem["loc"][0] == first["loc"][0])]
        shared = [key for key in first["loc"] if all(key in problem["loc"] for problem in problems)]
        where = ".".join(map(str, shared))
        why = " or ".join(dict.fromkeys(problem["msg"] for problem in problems))
        raise UsageError(f"{of}{where}={first['input']!r:.80}: {why}") from None
