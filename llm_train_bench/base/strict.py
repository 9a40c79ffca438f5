"""The base of all schemas of our files, and what it says of a file that does not fit."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Strict(BaseModel):
    """A part of a file of ours; keys that its schema does not know are errors."""

    model_config = ConfigDict(extra="forbid")


def first_problem(error: ValidationError) -> str:
    """The first error that a schema found: where, and what."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))[:200]  # names are the file's own
    return ": ".join(filter(None, (where, first["msg"].removeprefix("Value error, "))))
