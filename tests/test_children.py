"""Tools that start processes: whatever ends them, nothing that they started is left."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import Started, wait_until

# A tool with a child that ignores SIGINT, and a temporary directory with a file in it.
TOOL = """
import sys
from llm_train_bench.base.children import child, private_directory, run_child
from llm_train_bench.base.tool_main import run_tool

def main(argv):
    with private_directory() as directory:
        (directory / "file").write_text("x")
        print(directory, flush=True)
        return run_child([sys.executable, "-c", "import time; time.sleep(600)", "sleeper"])[0]

run_tool(main)
"""
CASES = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]


def run_until(text: str, command: list, temporary: Path) -> Started:
    """A tool, once a process with this text in its command line is among its own."""
    command = ["env", sys.executable, *command]  # a new Python, not a fork of this one
    process = Started(command, {"TMPDIR": str(temporary)}, stdout=-1, stderr=-1)

    def is_started() -> bool:
        commands = (Path(f"/proc/{pid}/cmdline") for pid in process.members())
        return any(path.exists() and text in path.read_text() for path in commands)

    assert wait_until(is_started, 120), process.poll()
    return process


def end(process: Started, number: int, code: int, temporary: Path) -> str:
    os.kill(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert wait_until(lambda: not process.members(), 15), "processes are left behind"
    assert not list(temporary.glob("llm-train-bench-*"))
    return error


@pytest.mark.parametrize("number, code", CASES)
def test_nothing_is_left_of_a_tool(number, code, tmp_path):
    (tmp_path / "tool.py").write_text(TOOL)
    process = run_until("sleeper", [tmp_path / "tool.py"], tmp_path)
    said = "" if number == signal.SIGKILL else f"tool.py: interrupted by {number.name}\n"
    assert end(process, number, code, tmp_path) == said


@pytest.mark.parametrize("number, code", CASES)
@pytest.mark.parametrize("command, started", [
    ("check.py", "check.probe"),
    ("sweep.py --models gpt2-tiny --set n_steps=100000 --platform cpu --output-dir {}/out", "train.py"),
])  # fmt: skip
def test_nothing_is_left_of_a_check_or_a_sweep(command, started, number, code, tmp_path):
    process = run_until(started, command.format(tmp_path).split(), tmp_path)
    error = end(process, number, code, tmp_path)
    if number != signal.SIGKILL:
        assert error.splitlines()[-1] == f"{command.split()[0]}: interrupted by {number.name}"
