"""What the schemas of our files are made of."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A part of a file of ours; keys that its schema does not know are errors."""

    model_config = ConfigDict(extra="forbid")


def about(meaning: str, default: Any = ..., **limits: float) -> Any:
    """A field of such a part, with what it means and its limits (ge, gt, ...)."""
    return Field(default, description=meaning, **limits)
