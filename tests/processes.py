"""Processes of our scripts: forked from this one, which has imported torch, and found by a mark.

Importing torch takes seconds, several times over for a launcher and its ranks.
"""

import contextlib
import gc
import importlib.util
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import train_ddp  # noqa: F401 (for the processes)
import train_fsdp  # noqa: F401
from llm_train_bench.base import start
from llm_train_bench.run import agent  # noqa: F401
from tests.helpers import ROOT, words

TORCHRUN = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node".split()
TORCHRUN.insert(0, sys.executable)
# The directory in which every warm process of a launcher writes its environment.
MARK = "LLM_TRAIN_BENCH_MARK"
LOGGERS = logging.Logger.manager.loggerDict
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class Warm(subprocess.Popen):
    """A process as Popen starts it, but `python SCRIPT ...` and `python -m MODULE ...` are forked."""

    def _execute_child(self, *values):
        execute = super()._execute_child
        call = inspect.signature(execute).bind(*values).arguments
        program, *argv = call["args"]
        if program != sys.executable or argv[0] == "-c":
            execute(*values)
            return
        ready, kept = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(kept)
            os.read(ready, 1)  # ends when the process has a session and handlers of its own
            os.close(ready)
            self._child_created = True
            self._close_pipe_fds(*(call[name] for name in PIPES))
            return
        code: object = 1
        try:
            code = _run([arg for arg in argv if arg != "-u"], call)
        except SystemExit as end:
            code = end.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else code is not None)


def _run(argv: list[str], call: dict) -> int:
    """Make this forked process what a new Python would be, and run its script or module."""
    # A file of the parent's that is collected later would close a new one of the same number.
    gc.freeze()
    subprocess._active.clear()
    if call["start_new_session"]:
        os.setsid()
    if call["preexec_fn"]:
        call["preexec_fn"]()
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if call[name] != -1:
            os.dup2(call[name], number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest's log file is closed, and its number will be another file's.
    loggers = logging.root, *LOGGERS.values()
    for handlers in (vars(logger).get("handlers", []) for logger in loggers):
        handlers[:] = [h for h in handlers if not type(h).__module__.startswith("_pytest")]
    os.closerange(3, 4096)
    os.chdir(call["cwd"] or ".")
    if call["env"] is not None:
        os.environ.clear()
        os.environ |= call["env"]
    if directory := os.environ.get(MARK):
        (Path(directory) / str(os.getpid())).write_text(json.dumps(dict(os.environ)))
    torch.set_num_threads(1)  # OpenMP's other threads were not forked
    tempfile.tempdir = start._agent = start._requested = None
    subprocess.Popen = subprocess_handler.Popen = Warm
    if argv[0] == "-m":
        argv = [importlib.util.find_spec(argv[1]).origin, *argv[2:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, sys.argv = argv[0], argv
    start._begin()
    exec(compile(Path(argv[0]).read_text(), argv[0], "exec"), vars(main))
    return 0


class Started(Warm):
    """A process in the repository's root, with a mark in the environment of all that it starts."""

    def __init__(self, command: list[str], env: dict[str, str], **streams):
        self.directory = tempfile.TemporaryDirectory(prefix="marks-")
        self.mark = self.directory.name
        env = os.environ | {"OMP_NUM_THREADS": "1"} | env | {MARK: self.mark}
        super().__init__(command, cwd=ROOT, env=env, text=True, **streams)

    def members(self) -> dict[int, dict[str, str]]:
        """Living processes of this one, itself included, with their environments."""
        members = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                marked, state = Path(self.mark) / path.name, (path / "stat").read_text()
                items = os.fsdecode((path / "environ").read_bytes()).split("\0")
                environ = dict(item.split("=", 1) for item in items if "=" in item)
                if marked.exists():
                    environ = json.loads(marked.read_text())
                if environ.get(MARK) == self.mark and state.rpartition(")")[2].split()[0] != "Z":
                    members[int(path.name)] = environ
        return members

    def ranks(self, name: str = "RANK") -> dict[int, int]:
        """Rank to process id."""
        return {int(env[name]): pid for pid, env in self.members().items() if name in env}


def forked(*parts, cwd=ROOT, code=0, **environment) -> subprocess.CompletedProcess:
    """As tests.helpers.python, but forked from this process, with all that it starts."""
    command, environment = [sys.executable, *words(*parts)], os.environ | environment
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = Warm(command, cwd=cwd, env=environment, text=True, **streams)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return subprocess.CompletedProcess(command, code, out, err)


def signal_all(pids, number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def training(out: Path) -> bool:
    """Whether six steps are on disk; the last line may be half written."""
    return any(path.read_text().count("\n") > 5 for path in out.glob("*/steps.jsonl"))


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
