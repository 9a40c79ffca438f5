"""What a rank says and leaves behind when it fails, and which of several failed first."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from bench.dist import Ranks
from bench.endings import NO_CAUSE, classify, exit_code, full_traceback, is_our_fault
from bench.errors import OwnError
from bench.files import write_whole

# The id of a script that starts its ranks itself: what they have to say about an error goes into their
# error files, and the parent prints the first of them.
PARENT = "LLM_TRAIN_BENCH_PARENT"


def keep_error(directory: Path, rank: int, error: BaseException) -> None:
    """Write a rank's error into its run's directory: status and message, then the traceback.

    On a machine that shares no disk with rank 0 the directory is made first.
    """
    status, text = classify(error)
    with contextlib.suppress(OSError):
        directory = directory / "errors"
        directory.mkdir(parents=True, exist_ok=True)
        content = f"{status}: {text}\n\n{full_traceback(error)}"
        write_whole(directory / f"rank{rank}.txt", content)  # nobody reads half of it
        error.kept = True


def first_error(
    directory: Path, before_s: float, consequences: bool = False
) -> tuple[str, str] | None:
    """Status and message of the rank that failed first, and before a time (`time.time()`) [s].

    Of its own; with `consequences`, if there is none, of one that lost another. Interrupted ones do
    not count.
    """
    found = []
    for path in (directory / "errors").glob("rank*.txt"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            status, text = path.read_text(encoding="utf-8").splitlines()[0].split(": ", 1)
            when = path.stat().st_mtime
            lost = text.startswith(NO_CAUSE)
            if status in ("oom", "failed") and when <= before_s and (consequences or not lost):
                who = f"rank {path.stem.removeprefix('rank')}"
                found.append((lost, when, status, f"{who}: {text}"))
    return min(found)[2:] if found else None


def has_parent() -> bool:
    """Whether this is a rank that a script started itself."""
    return os.environ.get(PARENT, str(os.getpid())) != str(os.getpid())


def report(error: BaseException, prog: str, ranks: Ranks) -> None:
    """One line, and for torchrun's agent a file.

    Above the line a traceback where the fault is ours and no error file has it. What is wrong with the
    arguments, a config or a file one rank of each machine says for all of them.
    """
    _, text = classify(error)
    shown = is_our_fault(error) and not getattr(error, "kept", False)
    _tell_agent(error, text, shown)
    if has_parent():
        return
    if exit_code(error) == 2 and ranks.local_rank and not isinstance(error, OwnError):
        return
    if shown:
        print(full_traceback(error), file=sys.stderr, end="")
    who = f"{prog}: rank {ranks.rank}" if ranks.world > 1 else prog
    print(f"{who}: {text}", file=sys.stderr, flush=True)


def _tell_agent(error: BaseException, text: str, shown: bool) -> None:
    """Write the error where torchrun's agent looks for it, if there is one."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The form torchrun reads, in whole seconds; nanoseconds tell who failed first.
        now = time.time_ns()
        info = {
            "timestamp": str(now // 10**9),
            "time_ns": now,
            "py_callstack": full_traceback(error) if is_our_fault(error) else text,
            "shown": shown,
        }
        message = {"message": text, "extraInfo": info}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))
