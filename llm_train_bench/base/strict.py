"""The base of all schemas of our files."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A part of a file of ours; keys that its schema does not know are errors."""

    model_config = ConfigDict(extra="forbid")
