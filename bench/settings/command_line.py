"""From a command line to checked arguments; what is wrong with it becomes one line. Needs no torch."""

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

from bench.errors import UsageError
from bench.settings.checks import check
from bench.settings.flags import Args
from model.json_keys import ConfigError

Parsed = TypeVar("Parsed")
Main = Callable[[Sequence[str]], int]


def parse_args(argv: Sequence[str], prog: str) -> Args:
    """Parse and check; UsageError in one line on bad input. `--help` prints and exits with 0."""
    return check(parse_dataclass(Args, argv, prog), prog)


def parse_dataclass(kind: type[Parsed], argv: Sequence[str], prog: str) -> Parsed:
    """A command line as a dataclass of that kind; what cannot be parsed is a UsageError."""
    messages = io.StringIO()
    wide = contextlib.nullcontext() if {"-h", "--help"} & set(argv) else _columns("500")
    try:
        with contextlib.redirect_stderr(messages), wide:
            return tyro.cli(
                kind, prog=prog, args=list(argv), config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(f"{_first_message(messages.getvalue())}; see {prog} --help") from None


def tool(prog: str) -> Callable[[Main], Main]:
    """Decorates a tool's `main`: what is wrong with its input becomes one line, and exit code 2."""

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def guarded(argv: Sequence[str]) -> int:
            try:
                return main(argv)
            except (UsageError, ConfigError) as error:
                print(f"{prog}: {error}", file=sys.stderr)
                return 2

        return guarded

    return decorate


@contextlib.contextmanager
def _columns(width: str):
    """A terminal so wide that no message is broken into lines."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = width
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _first_message(panel: str) -> str:
    """The message of the parser's boxed error text (drawn in ASCII or not), on one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in panel.splitlines()][1:]  # the first is the title
    message: list[str] = []
    for line in lines:
        if set(line) <= {"─", "-"}:  # a rule stands below the title or ends the message
            if message:
                break
        else:
            message.append(line)
    return re.sub(r"\s+", " ", " ".join(message)) or "bad arguments"
