"""What each rank of several leaves behind when it fails, and which of them failed first."""

import contextlib
import json
import os
import time
from pathlib import Path

from bench.endings import LOST, classify, full_traceback


def keep_error(directory: Path, rank: int, error: BaseException) -> None:
    """Write a rank's error into its run's directory: status and message, then the traceback."""
    status, text = classify(error)
    with contextlib.suppress(OSError):
        directory = directory / "errors"
        directory.mkdir(exist_ok=True)
        path = directory / f"rank{rank}.txt"
        spare = path.with_suffix(".new")  # so that nobody reads half of it
        spare.write_text(f"{status}: {text}\n\n{full_traceback(error)}", encoding="utf-8")
        spare.replace(path)


def first_error(directory: Path, before_s: float) -> tuple[str, str] | None:
    """Status and message of the rank that failed first, and before a time (`time.time()`) [s].

    None if no rank failed of its own: those that lost another or were interrupted do not count.
    """
    found = []
    for path in (directory / "errors").glob("rank*.txt"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            status, text = path.read_text(encoding="utf-8").splitlines()[0].split(": ", 1)
            when = path.stat().st_mtime
            if status in ("oom", "failed") and not text.startswith(LOST) and when <= before_s:
                found.append((when, status, f"rank {path.stem.removeprefix('rank')}: {text}"))
    return min(found)[1:] if found else None


def tell_agent(error: BaseException) -> None:
    """Write the error where torchrun's agent looks for it, if there is one."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The form torchrun reads, in whole seconds; nanoseconds tell who failed first.
        now = time.time_ns()
        info = {
            "timestamp": str(now // 10**9),
            "time_ns": now,
            "py_callstack": full_traceback(error),
        }
        message = {"message": classify(error)[1], "extraInfo": info}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))
