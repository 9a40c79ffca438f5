"""A tool's process from its arguments to its exit code. Needs nothing but Python."""

import functools
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from llm_train_bench.base import start
from llm_train_bench.base.errors import DoesNotFit, Interrupted, UsageError, printable
from llm_train_bench.model.json_keys import ConfigError

Main = Callable[[Sequence[str]], int]


def print_apart(prog: str, text: str) -> None:
    """A line on standard error, apart from what the tool prints."""
    print(f"{prog}: {printable(text)}", file=sys.stderr)


def tool(prog: str, file_error: int = 1) -> Callable[[Main], Main]:
    """Decorates a tool's `main`: bad input becomes one line and exit code 2.

    What cannot fit exits with 4, and a file that cannot be read or written with `file_error`.
    """

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def guarded(argv: Sequence[str]) -> int:
            try:
                return main(argv)
            except (UsageError, ConfigError) as error:
                print_apart(prog, str(error))
                return 4 if isinstance(error, DoesNotFit) else 2
            except OSError as error:
                print_apart(prog, f"{error.filename or 'output'}: {error.strerror}")
                return file_error

        return guarded

    return decorate


def run_tool(main: Main) -> NoReturn:
    """Run a tool and exit with its code: one line on a signal, none when its output is closed."""
    start.imported()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(main(sys.argv[1:]))
    except (KeyboardInterrupt, Interrupted) as error:
        name = str(error) or "SIGINT"
        print(f"{Path(sys.argv[0]).name}: interrupted by {name}", file=sys.stderr)
        sys.exit(128 + signal.Signals[name])


def _terminated(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)
