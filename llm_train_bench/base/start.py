"""Imported first by every script, before torch: what ends it while it starts, ends it in one line.

Needs nothing but Python. Nothing happens where another program imports the scripts.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from pathlib import Path

# Process id of a script that starts its ranks itself. Its ranks write errors into their error
# files, and the parent prints the first one.
PARENT = "LLM_TRAIN_BENCH_PARENT"
# Launchers' variables for rank, world size and rank on the node: torchrun, Open MPI, SLURM's srun
# (it may have started Open MPI's daemons), MPICH.
# SLURM_NTASKS would not do: a batch script has it and SLURM_PROCID=0 too, but no rank.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_PACKAGE = Path(__file__).resolve().parents[1]
# The directory of the scripts and of configs/: the top of a source tree, or a part of a wheel.
ROOT = _PACKAGE / "scripts" if (_PACKAGE / "scripts").exists() else _PACKAGE.parent
# The exit code after Ctrl-C, or another signal that ended a run: a shell's for SIGINT.
INTERRUPTED = 130
_agent: int | None = None
_requested: int | None = None


def is_script() -> bool:
    """Whether one of our scripts is what this process runs."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return main is not None and Path(main).resolve().parent == ROOT


def _begin() -> None:
    if not is_script():
        return
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        end_with_parent()
    sys.excepthook = _explain_missing
    # Looking for garbage among a million objects of imported modules takes a fifth of the start.
    gc.disable()
    atexit.register(gc.freeze)
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _request_stop)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def imported() -> None:
    """The imports are done: Ctrl-C is Python's KeyboardInterrupt again, and garbage is collected."""
    if not gc.isenabled():  # not where another program calls the scripts
        gc.freeze()
        gc.enable()
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _request_stop(number: int, frame) -> None:
    global _requested
    _requested = number


def early_stop_request() -> int | None:
    """SIGUSR1, if it came before the training did: it asks to save and to end."""
    return _requested


def refuse_stop_requests() -> None:
    """This run saves nothing: SIGUSR1 ends it, as it ends every process."""
    if signal.getsignal(signal.SIGUSR1) is _request_stop:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        if _requested:
            signal.raise_signal(_requested)


def orphaned() -> bool:
    """Whether this is a rank whose agent is gone."""
    if _agent is None or os.getppid() != _agent:
        return _agent is not None
    with contextlib.suppress(OSError):  # its threads may outlive the one that started this
        return Path(f"/proc/{_agent}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return False


def end_with_parent() -> None:
    """End this rank when its agent is gone. Ranks of an agent that was killed would otherwise go on
    training and hold their GPUs."""
    global _agent
    _agent = int(os.environ.get(PARENT, os.getppid()))
    end_with(_agent)


def end_with(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its parent ends, even by SIGKILL (on Linux).

    If the parent is gone already, this ends the process.
    """
    pr_set_pdeathsig = 1  # prctl(2)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))
    if os.getppid() != parent:
        _say("interrupted by the end of its parent process")
        os._exit(1)


def _interrupted(number: int, frame) -> None:
    # An exception would pass through modules that are half imported, which print about it.
    _say("interrupted by SIGINT")
    os._exit(INTERRUPTED)


def _explain_missing(kind, error, trace) -> None:
    name = getattr(error, "name", None)
    if (
        kind is not ModuleNotFoundError
        or not name
        or (_PACKAGE.parent / name.partition(".")[0]).exists()
    ):
        sys.__excepthook__(kind, error, trace)
        return
    make = "" if ROOT.parent == _PACKAGE else ": make .venv/.runs && . .venv/bin/activate"
    _say(
        f"this Python ({sys.executable}) has no {name}; activate the environment that has it, or make "
        f"one{make}"
    )


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)


_begin()
