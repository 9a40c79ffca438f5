"""A tool's process from its arguments to its exit code. Needs nothing but Python."""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn


def run_tool(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """A tool's whole process: its exit code, one line on Ctrl-C, none when its output is closed."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted by SIGINT", file=sys.stderr)
        sys.exit(1)
