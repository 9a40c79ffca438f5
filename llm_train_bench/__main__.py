"""The console command `llm-train-bench`, or `python -m llm_train_bench`: runs a script of this project.

llm-train-bench train configs/gpt2-tiny.json    is    python train.py configs/gpt2-tiny.json
"""

import ast
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from llm_train_bench.base.start import ROOT

from llm_train_bench import __version__

# The scripts by the names of their commands; each reads its own arguments.
COMMANDS = {
    name: ROOT / f"{name.replace('-', '_')}.py"
    for name in (
        "train train-ddp train-fsdp train-pp estimate sweep compare check doctor prepare-data"
    ).split()
} | {"trace": ROOT / "trace_report.py"}


def run_command() -> NoReturn:
    """Replace this process by Python with the script of the first argument."""
    command, *rest = sys.argv[1:] or ["--help"]
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if path := COMMANDS.get(command):
        os.execv(sys.executable, [sys.executable, str(path), *rest])
    if command == "--version":
        sys.exit(print(f"llm-train-bench {__version__}"))
    if command in ("--help", "-h"):
        sys.exit(print("usage: llm-train-bench COMMAND ...\n\n" + "\n".join(map(_line, COMMANDS))))
    known = ", ".join(COMMANDS)
    print(f"llm-train-bench: {command!r} is not a command; there are {known}", file=sys.stderr)
    sys.exit(2)


def _line(command: str) -> str:
    """A command with the first line of its script's docstring."""
    text = ast.get_docstring(ast.parse(Path(COMMANDS[command]).read_text("utf-8"))) or ""
    return f"  {command:14}{text.splitlines()[0]}"


if __name__ == "__main__":
    run_command()
