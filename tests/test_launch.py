"""Starting, joining and ending several ranks, as separate processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import types
import uuid
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError, DistStoreError

import train_fsdp
from llm_train_bench.base.errors import Interrupted, NoStep, NotJoined, UsageError
from llm_train_bench.parallel.ranks import Ranks, collective_timeout, find_ranks, join
from llm_train_bench.run.agent import first_failure
from llm_train_bench.run.failures import classify, first_error, is_our_fault, keep_error
from llm_train_bench.run.hang import HangWatch, patience
from llm_train_bench.run.launch import launch_ranks
from tests.helpers import ROOT, TORCHRUN, free_port, only_result, processes_with, read_steps

TINY = ["configs/gpt2-tiny.json", "--seq-len", "32", "--bsz", "2", "--device", "cpu",
        "--amp", "off", "--no-tensorboard"]  # fmt: skip
MARK = "LLM_TRAIN_BENCH_TEST"
STARTED: list[subprocess.Popen] = []
FOREVER = ["--n-steps", "1000000", "--warmup-steps", "1"]
SHORT = ["--n-steps", "4", "--warmup-steps", "1"]


def start(script, out, *argv, prefix=(sys.executable,), env=None):
    """The process, with a mark in its environment that finds everything it starts."""
    command = [*prefix, script, *TINY, "--output-dir", str(out), "--dist-timeout", "20", *argv]
    mark = f"{MARK}={uuid.uuid4().hex}"
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | (env or {}) | dict([mark.split("=")]),
    )  # fmt: skip
    process.mark = mark
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def nothing_goes_on():
    """A test that fails before it ends its processes does not leave them to the next."""
    yield
    while STARTED:
        for pid in members(STARTED.pop()):
            os.kill(pid, signal.SIGKILL)


def finish(process, timeout=240):
    """(exit code, stdout, stderr); nothing it started is left afterwards."""
    try:
        out, err = process.communicate(timeout=timeout)
        assert wait_until(lambda: not members(process), 10), "processes are left behind"
        return process.returncode, out, err
    finally:
        for pid in members(process):
            os.kill(pid, signal.SIGKILL)


def members(process) -> dict[int, dict[str, str]]:
    """Living processes that carry the mark of this one, with their environments."""
    return processes_with(process.mark)


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def training(out) -> bool:
    return bool(list(out.glob("*/steps.jsonl"))) and len(read_steps(out)) > 5


def ranks_of(process) -> dict[int, int]:
    """Rank to process id of the workers that were started."""
    everyone = members(process).items()
    return {int(env["RANK"]): pid for pid, env in everyone if "LOCAL_RANK" in env}


def interrupt(process, times=1):
    """Ctrl-C on a terminal: SIGINT to every process."""
    pids = list(members(process))
    for again in range(times):
        if again:
            time.sleep(0.003)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)


def test_a_script_starts_its_own_ranks_and_only_rank_0_prints(tmp_path):
    code, out, err = finish(start("train_ddp.py", tmp_path, *SHORT))
    assert code == 0, err
    assert out.count("| tokens/s per device ") == err.count("batch: 2 x 1 x 2 = 4 samples") == 1
    r = only_result(tmp_path)
    assert r["device"]["count"] == 2 and r["entrypoint"] == "train_ddp.py"
    files = {p.name for p in next(tmp_path.iterdir()).iterdir()}
    assert files == {"result.json", "steps.jsonl"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sac-freq", "5/4"], "--sac-freq 5/4: q must be from 1 to p = 4"),
        (["--bucket-cap-mb", "5"], "--bucket-cap-mb has no meaning for train_fsdp.py"),
        (["--amp", "fp16", "--optimizer", "sgd"], "no fused SGD for sharded parameters"),
        ("--pt-compile --compile-mode reduce-overhead --warmup-steps 3".split(),
         "--pt-compile --compile-mode reduce-overhead: CUDA graphs need parameters at fixed"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_any_rank_starts(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, "Popen", None)
    argv = [*TINY, *SHORT, "--output-dir", str(tmp_path / "runs"), *argv]
    assert launch_ranks(train_fsdp.train, argv, "train_fsdp.py") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("train_fsdp.py: ") and message in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        # The ranks find these errors; each is still one line.
        (["--global-bsz", "6"], "6 is not a multiple of --bsz 2 x 2 ranks = 4; 4 or 8"),
        (["--nproc", "1", "--data", "none.bin"], "none.bin: no such file"),
        (["--output-dir", "/proc/x"], "--output-dir /proc/x: cannot be written"),
    ],
)
def test_bad_input_of_ranks_is_one_line(argv, message, tmp_path):
    code, out, err = finish(start("train_fsdp.py", tmp_path / "runs", *SHORT, *argv))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("train_fsdp.py: ") and message in err
    assert not (tmp_path / "runs").exists()


def test_a_gpu_that_is_not_counted_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert launch_ranks(train_fsdp.train, ["configs/gpt2-tiny.json"], "train_fsdp.py") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_fsdp.py: PyTorch has a GPU but counts none")


ONE_RANK_FAILS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
import train_ddp
from llm_train_bench.run.launch import launch_ranks
from llm_train_bench.model.transformer import Transformer

def train(plan, device, ranks):
    steps, forward = [], Transformer.forward
    def fail_late(self, *inputs):
        steps.append(1)
        if ranks.rank == 1 and len(steps) > 6:
            raise torch.OutOfMemoryError("made up")
        return forward(self, *inputs)
    Transformer.forward = fail_late
    train_ddp.train(plan, device, ranks)

sys.exit(launch_ranks(train, sys.argv[1:], __file__))
"""


def test_the_result_says_what_another_rank_failed_of(tmp_path):
    """Rank 0 writes the result, and of itself only notices that the other is gone."""
    script = tmp_path / "train_ddp.py"
    script.write_text(ONE_RANK_FAILS)
    code, _, err = finish(start(str(script), tmp_path / "runs", *FOREVER))
    assert code == 3 and "rank 1: out of memory: made up" in err.splitlines()[-1]
    assert "--grad-acc-steps" in err
    r = only_result(tmp_path / "runs")
    assert r["status"] == "oom" and r["error"].startswith("rank 1: out of memory: made up")
    assert r["metrics"]["n_measured_steps"] > 0
    (kept,) = tmp_path.glob("runs/*/errors/rank1.txt")
    assert "Traceback" in kept.read_text()


def test_a_rank_that_hangs_in_a_collective_still_writes_its_result(tmp_path):
    """A stopped peer is not gone: nothing breaks, rank 0 waits and runs no signal handler."""
    process = start("train_ddp.py", tmp_path, *FOREVER, "--dist-timeout", "600")
    assert wait_until(lambda: training(tmp_path), 240), process.poll()
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(1)
    os.kill(ranks[0], signal.SIGTERM)
    assert wait_until(lambda: only_result(tmp_path)["status"] != "running", 25)
    time.sleep(2)  # the agent counts in whole seconds
    os.kill(ranks[1], signal.SIGKILL)
    assert finish(process)[0] == 1
    r = only_result(tmp_path)
    assert r["status"] == "interrupted" and r["error"] == "interrupted by SIGTERM"
    # All finished steps are there, also those after the last write.
    steps = read_steps(tmp_path)
    assert r["metrics"]["n_measured_steps"] == len(steps) - 1
    assert r["metrics"]["final_loss"] == steps[-1]["loss"]


NO_STEP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import llm_train_bench.run.life as life
import train_ddp
from llm_train_bench.run.launch import launch_ranks

# As on a GPU, where a collective with a lost peer never returns, but with a shorter wait.
assert life.patience
life.patience = lambda device, timeout_s: timeout_s / 200
sys.exit(launch_ranks(train_ddp.train, sys.argv[1:], __file__))
"""


def test_a_rank_that_begins_no_step_in_time_says_so_and_ends(tmp_path):
    """A lost host sends no signal, and on a GPU a collective that waits for it raises no error."""
    script = tmp_path / "train_ddp.py"
    script.write_text(NO_STEP)
    process = start(str(script), tmp_path / "runs", *FOREVER, "--dist-timeout", "600")
    assert wait_until(lambda: training(tmp_path / "runs"), 240), process.poll()
    time.sleep(3.5)  # as long as steps follow each other, nothing ends
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)
    assert wait_until(lambda: 0 not in ranks_of(process), 15)
    os.kill(ranks[1], signal.SIGKILL)
    assert finish(process)[0] == 1
    r = only_result(tmp_path / "runs")
    assert r["status"] == "failed" and r["error"].startswith("no step in 3 s: waits for a rank")
    (kept,) = tmp_path.glob("runs/*/errors/rank0.txt")
    assert (
        "the main thread is in" in kept.read_text()
        and "llm_train_bench/run/loop.py" in kept.read_text()
    )
    assert r["metrics"]["n_measured_steps"] > 5


def test_our_watch_ends_a_rank_before_nccl_would():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert patience(gpu, 100.0) == 100.0 < collective_timeout(gpu, 100.0).total_seconds() == 125.0
    assert patience(cpu, 100.0) is None and collective_timeout(cpu, 100.0).total_seconds() == 100.0


def test_the_watch_counts_from_step_to_step_only(monkeypatch):
    """Not before the first step, not while steps follow each other, and not after the last."""
    ended, last_resorts = [], []
    later = lambda seconds, exit: last_resorts.append((seconds, exit))  # noqa: E731
    monkeypatch.setattr("faulthandler.dump_traceback_later", later)
    watch = HangWatch(lambda error, when: ended.append(str(error)), 1.0)
    try:
        time.sleep(1.1)
        begin = time.monotonic()
        for _ in range(25):
            watch.step()
            time.sleep(0.05)
        watch.rest()
        seconds = time.monotonic() - begin
        time.sleep(1.1)
        assert ended == [] and last_resorts[0] == (pytest.approx(11.1), True)
        assert len(last_resorts) <= 1 + seconds  # once a second, not once a step
        watch.step()
        assert wait_until(lambda: ended, 10)
    finally:
        watch.close()
    assert ended[0].startswith("no step in 1 s")


def test_a_rank_of_its_own_goes_before_those_that_lost_it(tmp_path):
    directory = tmp_path / "run"  # which only rank 0 makes, on its own machine
    for rank, error in enumerate((NoStep("no step in 5 s"), MemoryError("full"), Interrupted("X"))):
        keep_error(directory, rank, error)
    now = time.time() + 1
    status, text = first_error(directory, now)
    assert status == "oom" and text.startswith("rank 1: out of memory: full")
    assert first_error(directory, now - 10) is None
    (directory / "errors/rank1.txt").write_text("")  # as while it is written
    assert first_error(directory, now) is None
    assert first_error(directory, now, consequences=True) == ("failed", "rank 0: no step in 5 s")
    with pytest.raises(RuntimeError) as on_a_cpu:
        torch.empty(2**60)
    assert classify(on_a_cpu.value)[0] == "oom"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (DistBackendError("It can be caused by unexpected exit of a remote peer"), True),
        (RuntimeError("[../pair.cc:1] Read error [10.0.0.2]:1: Connection timed out"), True),
        (DistBackendError("Watchdog caught collective operation timeout: ALLREDUCE"), True),
        (DistStoreError("wait timeout after 5000ms, keys: /0/1"), True),
        (DistBackendError("NCCL error: unhandled cuda error, Last error: Cuda failure 2"), False),
        (DistBackendError("Duplicate GPU detected : rank 1 and rank 0 on CUDA device 1000"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_whose_error_it_is(error, lost):
    """An error in a collective comes from another rank or from this one."""
    assert classify(error)[1].startswith("lost another rank") is lost


def test_ranks_that_do_not_meet_say_where_they_looked(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(NotJoined) as stop:
            join(Ranks(0, 2, 0), torch.device("cpu"), 5.0)
    text = classify(stop.value)[1]
    assert f"the 2 ranks that meet at 127.0.0.1:{port}" in text and "address already in use" in text
    assert not is_our_fault(stop.value)


def test_a_rank_that_never_comes_is_named(monkeypatch):
    """The ranks that wait name it within --dist-timeout: NCCL itself would wait without an end."""
    port = free_port()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", str(port))):  # fmt: skip
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(NotJoined) as stop:
        join(Ranks(0, 3, 0), torch.device("cpu"), 1.0)
    assert 1.0 <= time.monotonic() - start < 10.0
    text = classify(stop.value)[1]
    assert f"meet at 127.0.0.1:{port}: after 1 s there is no rank 1, 2; check that all" in text


def listening(process) -> set[str]:
    """Addresses, in the kernel's form, at which any process of a run listens for connections."""
    sockets = set()
    for pid in members(process):
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(str(path.readlink()))
    found = set()
    for name in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


@pytest.mark.parametrize("killed", ["rank 0", "rank 1", "the launcher"])
def test_nothing_listens_beyond_this_machine_and_whoever_is_killed_is_told(killed, tmp_path):
    """Nobody else may reach the ranks; the launcher, or the readers, say what the ranks could not."""
    process = start("train_fsdp.py", tmp_path / "runs", *FOREVER, env={"TMPDIR": str(tmp_path)})
    assert wait_until(lambda: training(tmp_path / "runs"), 240), process.poll()
    found = listening(process)
    loopback = socket.inet_aton("127.0.0.1"), socket.inet_pton(socket.AF_INET6, "::1")
    words = [struct.unpack(f"{len(address) // 4}I", address) for address in loopback]
    assert found and found <= {"".join(f"{word:08X}" for word in each) for each in words}
    rank = {"the launcher": None, "rank 0": 0, "rank 1": 1}[killed]
    os.kill(process.pid if rank is None else ranks_of(process)[rank], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == (-9 if rank is None else 1)
    r = only_result(tmp_path / "runs")
    if rank is not None:
        assert (r["status"], r["error"]) == ("failed", f"{killed}: killed by SIGKILL")
        lines = [line for line in err.splitlines() if line.startswith("train_fsdp.py: ")]
        assert lines == [f"train_fsdp.py: {killed}: killed by SIGKILL"]
        assert rank == 0 or r["metrics"]["n_measured_steps"] > 0
    else:
        assert r["status"] == "interrupted"
        assert r["error"] == "interrupted by the end of its launcher"
    assert wait_until(lambda: not members(process), 30)
    left = {p.name for p in tmp_path.iterdir() if not p.name.startswith("torchinductor")}
    assert left == {"runs"}
    (directory,) = (tmp_path / "runs").iterdir()
    assert not list(directory.glob(".result*"))


SLOW_IMPORT = """
import os, sys, time
if os.environ.get("RANK") == "1":
    time.sleep(600)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["pydantic"]
import pydantic
"""


@pytest.mark.parametrize("launcher", ["script", "torchrun"])
def test_ranks_end_soon_after_their_launcher_before_they_have_met(launcher, tmp_path):
    """Rank 1 still imports, rank 0 waits for it."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/pydantic.py").write_text(SLOW_IMPORT)
    path = os.pathsep.join([str(tmp_path / "slow"), os.environ["PYTHONPATH"]])
    prefix = [*TORCHRUN, "2"] if launcher == "torchrun" else [sys.executable]
    process = start("train_ddp.py", tmp_path, *FOREVER, "--dist-timeout", "600", prefix=prefix,
                    env={"PYTHONPATH": path})  # fmt: skip
    assert wait_until(lambda: len(ranks_of(process)) == 2, 240)
    assert wait_until(lambda: handles_sigterm(ranks_of(process)[0]), 240)
    time.sleep(1)
    process.kill()
    assert wait_until(lambda: not members(process), 60)  # 5 on a quiet machine, not 600


def test_a_rank_that_connects_to_nobody_hears_a_signal(tmp_path):
    """The connection is made in C, where Python's signal handlers do not run."""
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port())}  # fmt: skip
    process = start("train_ddp.py", tmp_path, *SHORT, "--dist-timeout", "600", env=env)
    assert wait_until(lambda: handles_sigterm(process.pid), 240)
    time.sleep(2)
    process.terminate()
    code, _, err = finish(process, timeout=60)
    assert code == 1 and err.splitlines()[-1] == "train_ddp.py: rank 1: interrupted by SIGTERM"


def handles_sigterm(pid: int) -> bool:
    """Whether a process has come so far that it has a handler for SIGTERM."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_the_rank_that_failed_first_is_named():
    """A rank killed for not ending in time comes after the error that was the cause; a rank killed
    in the first place comes before what the others then say."""

    def failure(at_s, exitcode, told, text="x"):
        said = {"message": text, "extraInfo": {"time_ns": at_s * 1e9}} if told else "<NONE>"
        return types.SimpleNamespace(
            error_file_data={"message": said}, exitcode=exitcode, timestamp=int(at_s)
        )

    def first(**failures):
        return first_failure(failures)

    cause = failure(1000.2, 1, told=True)
    ended, late = failure(1001, -15, False), failure(1031, -9, False)
    assert first(cause=cause, ended=ended, killed=late) == "cause"
    killed = failure(1001.1, -9, told=False)  # seen after the others had noticed
    assert first(killed=killed, other=failure(1000.9, 1, True)) == "killed"
    told = failure(1001.2, 1, True, "interrupted by SIGTERM")  # by the agent
    assert first(killed=killed, told=told) == "killed"
    assert first(cause=cause, told=told) == "cause"
    alone = failure(1000.9, 1, True, "interrupted by SIGTERM")
    assert first(killed=killed, alone=alone) == "alone"


@pytest.mark.parametrize("reacts", [False, True])
def test_what_nccl_reports_ends_a_rank_that_does_not_notice(reacts, monkeypatch):
    """The main thread hears of a peer's death by its own exception, or hangs in C until it is aborted."""
    ended, asked = [], []

    def broken():
        asked.append(1)
        return "REMOTE_ERROR" if len(asked) > 1 else None

    monkeypatch.setattr(HangWatch, "PATIENCE_S", 1.0)
    watch = HangWatch(lambda error, when: ended.append(str(error)), 600.0, broken)
    try:
        watch.step()
        assert wait_until(lambda: len(asked) > 1, 5) and not ended
        if reacts:
            watch.close()
        assert wait_until(lambda: ended, 3) is not reacts
    finally:
        if not reacts:
            watch.close()
    assert ended == ([] if reacts else ["lost another rank: NCCL reports REMOTE_ERROR"])


def test_a_rank_says_what_only_it_or_its_machine_has(monkeypatch, capsys, tmp_path):
    """Not all 64 say the same: one per machine reports a missing file, but all tell their agent."""

    class Left(BaseException):
        pass

    def run(rank, local, *argv) -> str:
        def leave(code):
            raise Left(code)

        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        for name, value in zip(names, (rank, 64, local), strict=True):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(os, "_exit", leave)
        told = tmp_path / "told.json"
        told.unlink(missing_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
        try:
            code = launch_ranks(train_fsdp.train, [*TINY, *argv], "train_fsdp.py")
        except Left as left:
            (code,) = left.args
        assert code == 2 and json.loads(told.read_text())["message"]["message"]
        return capsys.readouterr().err

    missing = ("--data", "none.bin")
    assert run(8, 0, *missing).startswith("train_fsdp.py: rank 8: none.bin: no such file")
    assert run(9, 1, *missing) == ""
    assert run(0, 0, "--n-steps", "0").startswith("train_fsdp.py: rank 0: --n-steps 0")
    assert "--nproc: this script was started by a launcher" in run(0, 0, "--nproc", "2")
    assert "--max-restarts: this script was started by a" in run(0, 0, "--max-restarts", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    alone = run(9, 1, "--device", "cuda")
    assert "rank 1 of this machine sees no GPU for itself, only 1" in alone and "gpu-bind" in alone


def test_ctrl_c_ends_all(tmp_path):
    process = start("train_ddp.py", tmp_path, *FOREVER)
    assert wait_until(lambda: training(tmp_path), 240), process.poll()
    # More than once: the user may be impatient, and the ranks' agent signals after the terminal.
    interrupt(process, times=20)
    code, _, err = finish(process)
    assert code == 1 and "train_ddp.py: interrupted by SIGINT" in err and "Traceback" not in err
    assert only_result(tmp_path)["status"] == "interrupted"


def torchrun(node, port, host="127.0.0.1", local="127.0.0.1"):
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
            "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test",
            "--rdzv-endpoint", f"{host}:{port}", "--local-addr", local]  # fmt: skip


def is_free(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def two_hosts():
    """Two network namespaces with an address each; only root can make them."""
    if shutil.which("ip") is None:
        pytest.skip("no ip (iproute2) here")
    names = [f"ltb{os.getpid()}{side}" for side in "ab"]
    setup = [["ip", "netns", "add", name] for name in names]
    setup.append(["ip", "link", "add", names[0], "netns", names[0], "type", "veth",
                  "peer", "name", names[1], "netns", names[1]])  # fmt: skip
    for i, name in enumerate(names):
        inside = ["ip", "-n", name]
        setup.append([*inside, "addr", "add", f"10.77.0.{i + 1}/24", "dev", name])
        setup += [[*inside, "link", "set", link, "up"] for link in (name, "lo")]
        setup.append(["ip", "netns", "exec", name, "true"])
    try:
        try:
            for command in setup:
                subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_hosts_train_together_until_the_network_between_them_is_cut(two_hosts, tmp_path):
    """Nobody is told that the other host is gone, as when its power fails: only time tells."""
    agents = []
    for node, name in enumerate(two_hosts):
        launcher = torchrun(node, 29400, host="10.77.0.1", local=f"10.77.0.{node + 1}")
        # A namespace shares its host's name, and torchrun decides by that name who keeps the store.
        launcher += ["--rdzv-conf", f"is_host={1 - node}"]
        env = {"GLOO_SOCKET_IFNAME": name}
        prefix = ["ip", "netns", "exec", name, *launcher]
        timeout = ["--dist-timeout", "10"]
        agents.append(start("train_fsdp.py", tmp_path, *FOREVER, *timeout, prefix=prefix, env=env))

    def cut(lost):
        link = two_hosts[0]
        subprocess.run(["ip", "-n", link, "link", "set", link, "down"], check=True)

    check_lost_node(agents, tmp_path, cut)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_lost_node_ends_the_job_within_the_timeout(rank, tmp_path):
    port = free_port()
    agents = [start("train_ddp.py", tmp_path, *FOREVER, prefix=torchrun(n, port)) for n in (0, 1)]

    def kill(lost):
        for pid in members(lost):
            os.kill(pid, signal.SIGKILL)

    check_lost_node(agents, tmp_path, kill, rank)


def check_lost_node(agents, out, lose, rank=1):
    """Two agents train; the one with that rank is lost; the job ends in time and says why."""
    try:
        assert wait_until(lambda: training(out) or any(a.poll() is not None for a in agents), 120)
        assert [a.poll() for a in agents] == [None, None], agents[0].communicate()[1][-2000:]
        # The agents decide which of them gets rank 0.
        lost = next(a for a in agents if rank in ranks_of(a))
        kept = next(a for a in agents if a is not lost)
        lose(lost)
        when = time.monotonic()
        code, _, err = finish(kept)
        assert code != 0 and time.monotonic() - when < 20 + 60
        # The agent may miss the other's store before its rank misses the other, and end it.
        told = re.search(rf"rank {1 - rank}: (lost another rank|interrupted by SIGTERM)", err)
        assert told, err
        assert "Traceback" not in err[: told.start()]
        (kept,) = out.glob(f"*/errors/rank{1 - rank}.txt")
        status = "failed" if told[1] == "lost another rank" else "interrupted"
        assert kept.read_text().startswith(f"{status}: {told[1]}")
        # Only rank 0 writes the result: if it is lost, the result still says that the run goes on.
        assert only_result(out)["status"] == (status if rank else "running")
        assert only_result(out)["batch"]["data_parallel_size"] == 2
        # The other side of a cut ends too; its agent waits longer for its store than ranks do.
        assert wait_until(lambda: not ranks_of(lost), 40), "ranks are left behind"
    finally:
        for agent in agents:
            for pid in members(agent):
                os.kill(pid, signal.SIGKILL)
            agent.communicate()


def test_launchers_are_recognised():
    assert find_ranks({}) is None
    assert find_ranks({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Ranks(3, 8, 1)
    assert find_ranks({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == Ranks(0, 1, 0)
    # Open MPI's daemons are tasks of srun.
    daemon = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "OMPI_COMM_WORLD_RANK": "17",
              "OMPI_COMM_WORLD_SIZE": "32", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}  # fmt: skip
    assert find_ranks(daemon) == Ranks(17, 32, 1)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16",
             "SLURM_LOCALID": "5"}  # fmt: skip
    assert find_ranks(slurm) == Ranks(5, 16, 5)
    assert find_ranks(slurm | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert find_ranks({"SLURM_NTASKS": "8"}) is None  # inside salloc, outside srun
    # A batch script itself, which is one process however many tasks it asked for.
    assert find_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}) is None
    mpi = {n: v for n, v in daemon.items() if n.startswith("OMPI")}
    assert find_ranks(mpi) == Ranks(17, 32, 1)
    with pytest.raises(UsageError, match=r"RANK='x', WORLD_SIZE='2'.* must be whole numbers"):
        find_ranks({"RANK": "x", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="RANK=2 and LOCAL_RANK=0: both must be below WORLD_"):
        find_ranks({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    # torchrun inside a SLURM job: what torchrun says counts.
    assert find_ranks(slurm | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}) == Ranks(0, 2, 0)


def test_ranks_by_slurm_environment(tmp_path):
    """Two processes with srun's variables find each other without torchrun: at the first host of the
    node list, at a port that the job's number gives."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        "#!/bin/sh\n[ \"$*\" = 'show hostnames node[7-8]' ] && echo 127.0.0.1 && echo node8\n"
    )
    scontrol.chmod(0o755)
    job = next(n for n in range(os.getpid(), os.getpid() + 999) if is_free(29500 + n % 1000))
    agents = []
    for rank in ("0", "1"):
        env = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": rank,
               "SLURM_STEP_NODELIST": "node[7-8]", "SLURM_JOB_ID": str(job),
               "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}  # fmt: skip
        agents.append(start("train_fsdp.py", tmp_path, *SHORT, env=env))
    ends = [finish(agent) for agent in agents]
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2][-2000:]
    assert json.dumps(only_result(tmp_path)["ranks"]).count('"rank"') == 2
