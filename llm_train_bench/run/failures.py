"""Endings of a run: signals, status and exit code of an error, and which rank failed first."""

import contextlib
import errno
import json
import os
import re
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from llm_train_bench.base.start import INTERRUPTED, PARENT

from llm_train_bench.base import errors
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.redaction import redact_text
from llm_train_bench.measure.device import is_out_of_memory
from llm_train_bench.model.config import ConfigError
from llm_train_bench.parallel.ranks import MEETING, Ranks
from llm_train_bench.results.console import say
from llm_train_bench.results.result_files import RUN_POINTER, complete_result, run_told
from llm_train_bench.results.schema import Status

LOST = "lost another rank"
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
# The time [s] after which writing a checkpoint is given up.
SAVE_S = 600.0
# The note of an error whose traceback is in a file.
KEPT = "its traceback is in"
# Beginnings of messages about a consequence: something went wrong elsewhere first.
NO_CAUSE = (LOST, "no step in")
OOM_ADVICE = (
    "what helps: a smaller --bsz with more --grad-acc-steps, a shorter --seq-len, --amp bf16, "
    "--sac-freq 1/1, --pt-compile, train_fsdp.py on more devices, and on a GPU "
    "PYTORCH_ALLOC_CONF=expandable_segments:True against fragmentation"
)


class Ending(NamedTuple):
    """How a run ends by an exception: its status, the message on one line, and the exit code.

    0 is finished before, 2 bad input, 3 out of memory, 4 cannot fit, 75 saved and stopped, 130
    interrupted, 1 the rest.
    """

    status: Status
    text: str
    code: int = 1
    ours: bool = False
    """Whether the fault is ours, and a traceback helps."""


def classify(error: BaseException, advice: bool = True) -> Ending:
    """What status, message and exit code a run has that ended with this exception.

    `advice` names flags of our scripts that need less memory.
    """
    text = errors.one_line(error) or type(error).__name__
    if isinstance(error, errors.Preempted) and error.step is not None:
        return Ending("preempted", f"saved at step {error.step} and stopped by {error}", PREEMPTED)
    if isinstance(error, errors.Finished):
        return Ending("ok", text, 0)
    if isinstance(error, KeyboardInterrupt | errors.Interrupted):
        return Ending("interrupted", f"interrupted by {str(error) or 'SIGINT'}", INTERRUPTED)
    if isinstance(error, errors.UsageError | ConfigError):
        return Ending("failed", text, 4 if isinstance(error, errors.DoesNotFit) else 2)
    if isinstance(error, errors.RunFailed):
        return Ending("failed", text)
    if is_out_of_memory(error):
        return Ending("oom", f"out of memory: {text}{f'; {OOM_ADVICE}' if advice else ''}", 3)
    if isinstance(error, FileNotFoundError) and error.filename:
        return Ending("failed", f"{error.filename}: is gone; was the run's directory removed?")
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left on device" in text:
        return Ending("failed", f"disk full: {text}")
    if lost_a_rank(error):
        return Ending("failed", f"{LOST}, whose own error says why: {text}", ours=True)
    return Ending("failed", f"{type(error).__name__}: {text}", ours=True)


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed because its other end is gone or silent."""
    # Messages of gloo, the store, NCCL and RCCL. Their other errors are this rank's own trouble.
    signs = (
        r"(closed|reset) by peer|broken pipe|timed out waiting|caused pair closure|failed to recv"
        r"|connection was likely closed|(wait|socket) timeout|client socket has timed out"
        r"|remote process exit|unexpected exit of a remote peer|socket closed|connection timed out"
        r"|collective operation timeout|communicator was aborted|timed out connecting"
    )
    return isinstance(error, RuntimeError) and re.search(signs, str(error).lower()) is not None


def keep_error(directory: Path, rank: int, error: BaseException) -> None:
    """Write a rank's error into its run's directory: status and message, then the traceback.

    The directory is created on machines that share no disk with rank 0.
    """
    ending = classify(error)
    with contextlib.suppress(OSError):
        directory = directory / "errors"
        directory.mkdir(parents=True, exist_ok=True)
        content = "".join(
            [f"{ending.status}: {ending.text}\n\n", *traceback.format_exception(error)]
        )
        write_whole(directory / f"rank{rank}.txt", redact_text(content))
        error.add_note(f"{KEPT} {directory.name}/rank{rank}.txt")


def first_error(
    directory: Path, before_s: float, consequences: bool = False
) -> tuple[Status, str] | None:
    """Status and message of the rank that failed first, before `before_s` (`time.time()`) [s].

    A rank that lost another counts only with `consequences`, and only if no other rank failed.
    Interrupted ranks do not count.
    """
    failed: list[tuple[bool, float, Status, str]] = []
    for path in (directory / "errors").glob("rank*.txt"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            status, text = path.read_text(encoding="utf-8").splitlines()[0].split(": ", 1)
            when, lost = path.stat().st_mtime, text.startswith(NO_CAUSE)
            if status in ("oom", "failed") and when <= before_s and (consequences or not lost):
                rank = path.stem.removeprefix("rank")
                failed.append((lost, when, status, f"rank {rank}: {text}"))
    return min(failed)[2:] if failed else None


def has_parent() -> bool:
    """Whether this is a rank that a script started itself."""
    return os.environ.get(PARENT, str(os.getpid())) != str(os.getpid())


def report(error: BaseException, prog: str, ranks: Ranks) -> int:
    """Print one line, and write the error file that torchrun's agent reads; the exit code.

    A traceback comes first if the fault is ours and no error file has it. If the arguments, a
    config or a file are wrong, one rank of each machine reports it for all.
    """
    status, text, code, ours = classify(error)
    trace = "".join(traceback.format_exception(error)) if ours else ""
    shown = bool(trace) and not any(
        note.startswith(KEPT) for note in getattr(error, "__notes__", ())
    )
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # By the timestamp, in whole seconds, agents find the rank that failed first. A consequence seems
        # later than it is, and what holds for all ranks earlier.
        late_s = 10 if text.startswith((*NO_CAUSE, "interrupted by")) else 0
        late_s = -10 if code == PREEMPTED else late_s
        info = {"timestamp": str(int(time.time()) + late_s), "py_callstack": trace or text}
        info |= {"rank": ranks.rank, "status": status, "text": text, "code": code}
        message = {"message": text, "extraInfo": info | {"trace": trace if shown else ""}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))
    everywhere = code in (0, 2) and not isinstance(error, errors.OwnError)
    told = has_parent() and code  # the parent prints it
    if not told and not (everywhere and ranks.local_rank):
        who = f"rank {ranks.rank}: " if ranks.world > 1 else ""
        say(f"{trace if shown else ''}{prog}: {who}{text}")
    return code


def first_failure(failed: dict[int, Any]) -> dict[str, Any]:
    """What the rank that failed first said (failures.report), or how it was killed.

    Times are in whole seconds. Of equal ones, that counts which torchrun's agent saw first.
    """
    rank = min(failed, key=lambda rank: failed[rank].timestamp)
    failure, message = failed[rank], failed[rank].error_file_data["message"]
    if isinstance(message, dict):
        return message["extraInfo"]
    signalled = failure.exitcode < 0
    text = f"killed by {failure.signal_name()}" if signalled else f"exit code {failure.exitcode}"
    return dict(rank=rank, text=text, status="failed", code=1, killed=True)


def report_first(first: dict[str, Any], prog: str, several_nodes: bool, asked: str | None) -> None:
    """Print the error of the rank that failed first, and put it into the result.

    `asked` is the signal that asked the run to end, in which case nothing failed.
    """
    pointer = Path(os.environ[MEETING]) / RUN_POINTER
    rank, text, status = first["rank"], first["text"], first["status"]
    run, who = run_told(pointer), f"rank {rank}: {text}"
    if asked:
        status, who = "interrupted", f"interrupted by {asked}"
    elif run and first.get("killed"):  # other nodes read it there
        keep_error(run, rank, errors.RunFailed(text))
    elif run and text.startswith(NO_CAUSE) and several_nodes:
        time.sleep(4.0)  # another node's agent writes that its rank was killed
        status, who = first_error(run, time.time()) or (status, who)
    shown = text if first["code"] in (2, 4) and not asked else who
    say(f"{'' if asked else first.get('trace', '')}{prog}: {shown}")
    complete_result(pointer, status, who, (LOST,))
