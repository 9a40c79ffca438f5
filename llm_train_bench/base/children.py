"""Processes of our own that never outlive this one, and directories that are gone after it."""

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.start import end_with

# A child that is asked to end has this time [s] before it is killed.
END_S = 20.0


@contextlib.contextmanager
def child(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a process in a session of its own; it ends with the block, and with this process.

    `options` are those of Popen.
    """
    process = subprocess.Popen(
        list(map(str, command)),
        start_new_session=True,
        preexec_fn=functools.partial(end_with, os.getpid()),
        **options,
    )
    try:
        yield process
    finally:
        for number, timeout_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, None)):
            if process.poll() is None:
                signal_session(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)


def run_child(
    command: Sequence[object], timeout_s: float | None = None, **options: Any
) -> tuple[int, str]:
    """The exit code of a child and what it wrote on standard error; TimeoutExpired."""
    options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with child(command, **options) as process:
        _, errors = process.communicate(timeout=timeout_s)
    return process.returncode, errors


def signal_session(pid: int, number: int) -> None:
    """Send a signal to the process that leads a session, and to those that it started."""
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A temporary directory that is removed when this process ends, even if it is killed."""
    with tempfile.TemporaryDirectory("", "llm-train-bench-", ignore_cleanup_errors=True) as path:
        # The shell reads until this process has ended, and its children had the time to end too.
        remove = f"cat; sleep 2; rm -rf -- {shlex.quote(path)}"
        shell, null = ["/bin/sh", "-c", remove], subprocess.DEVNULL
        watch = subprocess.Popen(
            shell, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        )
        try:
            yield Path(path)
        finally:
            watch.kill()
            watch.communicate()
