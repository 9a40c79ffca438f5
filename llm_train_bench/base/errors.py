"""The exceptions a run can end with, apart from bugs, and text that may go to a terminal."""

import difflib
from collections.abc import Iterable
from typing import Any


def printable(text: str, kept: str = "") -> str:
    """Text from anybody's file without what a terminal obeys: control characters as escapes.

    Those in `kept` stay.
    """
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def printable_data(value: Any) -> Any:
    """JSON data with all of its texts printable, keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_data(k): printable_data(v) for k, v in value.items()}
    return type(value)(map(printable_data, value)) if isinstance(value, list | tuple) else value


def one_line(error: object) -> str:
    """What an exception of a library says, in one line that is not too long."""
    return " ".join(str(error).split())[:500]


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """The end of a message on an unknown word: the nearest known one, if one is near."""
    near = difflib.get_close_matches(word, known, 1, cutoff)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


# A message may quote a value of a file, whatever its size.
LONGEST = 1000


class UsageError(Exception):
    """The user's input cannot be used; the message is one line: what, where, what to do.

    Names from a file may be in it: it is kept printable, and on its line.
    """

    def __init__(self, message: object = ""):
        super().__init__(printable(str(message)[:LONGEST]))


class DoesNotFit(UsageError):
    """The run needs more memory than the device has, whatever else is true."""


class OwnError(UsageError):
    """A UsageError that the machine's other ranks do not have."""


class Interrupted(BaseException):
    """A signal asked the run to end; the message is its name. Like KeyboardInterrupt, it is no
    Exception: `except Exception` must not swallow it."""


class Preempted(Interrupted):
    """A signal asked the run to end; all ranks stopped at `step`, which was saved; None if not."""

    def __init__(self, name: str, step: int | None = None):
        super().__init__(name)
        self.step = step


class Finished(Exception):
    """The run that was to go on has done all of its steps; the message says where its result is."""


class RunFailed(Exception):
    """The run cannot go on, or did not come to its end; the message says why, and is enough."""


class CompileError(RunFailed):
    """torch.compile failed; the message names the part of the model and the first cause."""


class NotJoined(RunFailed):
    """This rank and the others did not find each other; the message says where it looked."""
