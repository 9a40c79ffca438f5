"""How a run can end: status, message and exit code of each kind of exception."""

import errno
import traceback

from bench.device import is_out_of_memory
from bench.errors import CompileError, Interrupted, NoStep, NotJoined, UsageError
from model.config import ConfigError

LOST = "lost another rank"
# Their messages say all there is to say.
EXPECTED = (UsageError, ConfigError, CompileError, NotJoined, NoStep)
# How messages begin that tell of a consequence: somewhere else something went wrong first.
NO_CAUSE = (LOST, "no step in")
OOM_ADVICE = (
    "what helps: a smaller --bsz with more --grad-acc-steps, a shorter --seq-len, --amp bf16, "
    "--sac-freq 1/1, --pt-compile, train_fsdp.py on more devices, and on a GPU "
    "PYTORCH_ALLOC_CONF=expandable_segments:True against fragmentation"
)


def classify(error: BaseException | None) -> tuple[str, str | None]:
    """Status of a run that ended with this exception, and its message on one line."""
    if error is None:
        return "ok", None
    text = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return "interrupted", f"interrupted by {str(error) or 'SIGINT'}"
    if isinstance(error, EXPECTED):
        return "failed", text
    if is_out_of_memory(error):
        return "oom", f"out of memory: {text}; {OOM_ADVICE}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left on device" in text:
        return "failed", f"disk full: {text}"
    if lost_a_rank(error):
        return "failed", f"{LOST}, whose own error says why: {text}"
    return "failed", f"{type(error).__name__}: {text}"


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed because its other end is gone or silent."""
    # Of gloo, of the store, and of NCCL and RCCL. All else that they raise is this rank's own trouble.
    signs = (
        "closed by peer",
        "reset by peer",
        "broken pipe",
        "timed out waiting",
        "caused pair closure",
        "connection was likely closed",
        "failed to recv",
        "wait timeout",
        "socket timeout",
        "client socket has timed out",
        "remote process exit",  # -ed, -ing
        "unexpected exit of a remote peer",
        "socket closed",
        "connection timed out",
        "collective operation timeout",
        "communicator was aborted",
    )
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def exit_code(error: BaseException) -> int:
    """2 for bad input, 3 for out of memory, 1 for everything else."""
    if isinstance(error, UsageError | ConfigError):
        return 2
    return 3 if is_out_of_memory(error) else 1


def is_our_fault(error: BaseException) -> bool:
    """Whether a traceback helps: not for bad input, signals, full memory or a full disk."""
    status, text = classify(error)
    expected = isinstance(error, EXPECTED) or text.startswith("disk full")
    return status == "failed" and not expected


def full_traceback(error: BaseException) -> str:
    """The traceback as text."""
    return "".join(traceback.format_exception(error))
