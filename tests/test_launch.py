"""Starting, joining and ending several ranks, as separate processes."""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed import DistBackendError, DistStoreError, HashStore
from torch.distributed.elastic.multiprocessing import ProcessFailure

import train
import train_fsdp
from llm_train_bench.base.errors import Interrupted, NotJoined, Preempted, RunFailed, UsageError
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.parallel import ranks
from llm_train_bench.parallel.ranks import MEETING, Ranks, find_ranks, join
from llm_train_bench.results.result_files import complete_result
from llm_train_bench.run import agent, failures, launch, signals
from llm_train_bench.run.failures import LOST, classify, first_error, first_failure, keep_error
from llm_train_bench.run.hang import HangWatch
from llm_train_bench.run.launch import launch_ranks
from llm_train_bench.run.training_run import Run
from tests.helpers import ROOT, answers, free_port, only_result, read_steps, result_of
from tests.processes import TORCHRUN, Started, signal_all, training, wait_until

TINY = "configs/gpt2-tiny.json --seq-len 32 --bsz 2 --device cpu --amp off --no-tensorboard".split()
FOREVER = ["--n-steps", "1000000", "--warmup-steps", "1"]
SHORT = ["--n-steps", "4", "--warmup-steps", "1", "--no-observe"]
COLD = ("env", sys.executable)


@pytest.fixture
def start():
    """Starts a script; what goes on after the test is killed."""
    started = []

    def begin(script, out, *argv, prefix=(sys.executable,), **env) -> Started:
        command = [*prefix, script, *TINY, "--output-dir", str(out), "--dist-timeout", "20", *argv]
        pipe = subprocess.PIPE
        started.append(Started(command, env, stdout=pipe, stderr=pipe))
        return started[-1]

    yield begin
    for process in started:
        signal_all(process.members(), signal.SIGKILL)
        process.communicate()


@pytest.fixture
def start_training(start):
    """Starts a script that trains without end, and waits until it does."""

    def begin(script, out, *argv, **env) -> Started:
        process = start(script, out, *FOREVER, *argv, **env)
        assert wait_until(lambda: training(out), 240), process.poll()
        return process

    return begin


def finish(process, timeout=240):
    """(exit code, stdout, stderr); nothing it started is left afterwards."""
    out, err = process.communicate(timeout=timeout)
    assert wait_until(lambda: not process.members(), 10), "processes are left behind"
    return process.returncode, out, err


def test_a_script_starts_its_own_ranks_and_only_rank_0_prints(start, tmp_path):
    flags = [*SHORT, "--peak-tflops", "0.001"]
    code, out, err = finish(start("train_ddp.py", tmp_path, *flags, prefix=COLD))
    assert code == 0, err
    assert out.count("| tokens/s per device ") == err.count("batch: 2 x 1 x 2 = 4 samples") == 1
    r = only_result(tmp_path)
    assert r["device"]["count"] == 2 and r["entrypoint"] == "train_ddp.py"
    files = {p.name for p in next(tmp_path.iterdir()).iterdir()}
    assert files == {"result.json", "run.lock", "steps.jsonl"}
    step = read_steps(tmp_path)[-1]  # whose MFU is that of each of the two devices
    tflops = step["tokens"] / step["step_time_s"] * r["metrics"]["flops_per_token_palm"] / 1e12
    assert f"MFU {tflops / 2 / 0.001:.1%}" in err


def fsdp(argv) -> int:
    return launch_ranks(train_fsdp.train, argv, "train_fsdp.py")


def test_bad_input_is_one_line_before_any_rank_starts(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, "Popen", None)
    argv = [*TINY, *SHORT, "--output-dir", tmp_path / "runs"]
    error = refused(fsdp, "does not apply to train_fsdp.py", argv, "--bucket-cap-mb 5")
    assert error.startswith("train_fsdp.py: --bucket-cap-mb ")
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refused(fsdp, "train_fsdp.py: PyTorch has a GPU but counts none", "configs/gpt2-tiny.json")


@pytest.mark.parametrize("argv, message", [
    ("--global-bsz 6", "6 is not a multiple of --bsz 2 x 2 ranks = 4; 4 or 8"),
    ("--nproc 1 --data none.bin", "none.bin: no such file"),
    ("--output-dir /proc/x", "--output-dir /proc/x: cannot be written"),
])  # fmt: skip
def test_bad_input_that_ranks_find_is_one_line(argv, message, start, tmp_path):
    code, out, err = finish(start("train_fsdp.py", tmp_path / "runs", *SHORT, *argv.split()))
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1 and err.startswith("train_fsdp.py: ") and message in err
    assert not (tmp_path / "runs").exists()


def test_a_signal_between_an_error_and_its_report_hides_neither(monkeypatch, capsys):
    """The agent ends a rank when another one has failed, at any moment."""

    def signalled(handler, *numbers, real=signals.handled_by):
        if handler is signal.SIG_IGN:
            signal.raise_signal(signal.SIGTERM)
        return real(handler, *numbers)

    monkeypatch.setattr(signals, "handled_by", signalled)
    assert launch.launch(train.train, ["configs/none.json"], "train.py") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: ") and "none.json" in line


@pytest.mark.parametrize("made", [True, False], ids=["as it ends", "as it begins"])
def test_a_signal_around_a_run_is_one_line(made, monkeypatch, capsys):
    def signalled(*args):
        signal.raise_signal(signal.SIGTERM)

    watch = (lambda *args: mock.Mock(close=signalled)) if made else signalled
    monkeypatch.setattr(launch, "HangWatch", watch)
    monkeypatch.setattr(launch, "train_planned", lambda *args: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert launch_ranks(train_fsdp.train, [], "x.py") == 130
    assert capsys.readouterr().err == "x.py: rank 0: interrupted by SIGTERM\n"


def test_the_result_says_what_another_rank_failed_of(start, tmp_path, monkeypatch):
    """Rank 0 writes the result, and of itself only notices that the other is gone."""
    steps = itertools.count()

    def fail_late(self, *inputs, real=Transformer.forward):
        if os.environ.get("RANK") == "1" and next(steps) > 6:
            raise torch.OutOfMemoryError("made up")
        return real(self, *inputs)

    monkeypatch.setattr(Transformer, "forward", fail_late)
    code, _, err = finish(start("train_ddp.py", tmp_path / "runs", *FOREVER))
    assert code == 3 and "rank 1: out of memory: made up" in err.splitlines()[-1]
    assert "--grad-acc-steps" in err
    r = only_result(tmp_path / "runs")
    assert r["status"] == "oom" and r["error"].startswith("rank 1: out of memory: made up")
    assert r["metrics"]["n_measured_steps"] > 0
    (error,) = tmp_path.glob("runs/*/errors/rank1.txt")
    assert "Traceback" in error.read_text()


def test_a_rank_that_hangs_in_a_collective_still_writes_its_result(start_training, tmp_path):
    """A stopped peer is not gone: nothing breaks, rank 0 waits and runs no signal handler."""
    process = start_training("train_ddp.py", tmp_path, "--dist-timeout", "600")
    ranks = process.ranks()
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(1)
    os.kill(ranks[0], signal.SIGTERM)
    assert wait_until(lambda: only_result(tmp_path)["status"] != "running", 25)
    time.sleep(2)  # the agent counts in whole seconds
    os.kill(ranks[1], signal.SIGCONT)  # a rank that does not react is killed after half a minute
    assert finish(process)[0] == 130
    r = only_result(tmp_path)
    assert r["status"] == "interrupted" and r["error"] == "interrupted by SIGTERM"
    # All finished steps are there, also those after the last write.
    steps = read_steps(tmp_path)
    assert r["metrics"]["n_measured_steps"] == len(steps) - 1
    assert r["metrics"]["final_loss"] == steps[-1]["loss"]


def test_a_rank_that_begins_no_step_in_time_says_so_and_ends(start_training, tmp_path, monkeypatch):
    """A lost host sends no signal, and on a GPU a collective that waits for it raises no error."""

    def open_run(self, real=Run.open):
        real(self)
        self.step_limit_s = 4.0  # a step of a busy machine may take a second

    monkeypatch.setattr(Run, "open", open_run)
    process = start_training("train_ddp.py", tmp_path / "runs", "--dist-timeout", "600")
    time.sleep(5)  # as long as steps follow each other, nothing ends
    ranks = process.ranks()
    os.kill(ranks[1], signal.SIGSTOP)
    assert wait_until(lambda: 0 not in process.ranks(), 20)
    os.kill(ranks[1], signal.SIGKILL)
    assert finish(process)[0] == 1
    r = only_result(tmp_path / "runs")
    assert r["status"] == "failed" and r["error"].startswith("no step in 4 s: waits for a rank")
    (error,) = tmp_path.glob("runs/*/errors/rank0.txt")
    text = error.read_text()
    assert "the main thread is in" in text and "llm_train_bench/run/loop.py" in text
    assert r["metrics"]["n_measured_steps"] > 5


def test_the_watch_counts_from_step_to_step_only():
    """Not before the first step, not while steps follow each other, and not after the last."""
    ended = []
    with contextlib.closing(HangWatch(lambda error, when: ended.append(str(error)))) as watch:
        time.sleep(1.2)
        for _ in range(25):
            watch.allow(0.5)
            time.sleep(0.05)
        watch.allow(math.inf)
        time.sleep(1.2)
        assert ended == []
        watch.allow(0.5)
        assert wait_until(lambda: ended, 10)
    assert ended[0].startswith("no step in 0.5 s")


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_ends_a_main_thread_that_does_not_react(saves, monkeypatch):
    """At once where nothing is saved, or at the second signal."""
    ended, number = [], signal.SIGTERM
    monkeypatch.setattr(HangWatch, "PATIENCE_S", 0.2)
    with (
        signals.handled_by(lambda number, frame: None),
        contextlib.closing(HangWatch(lambda error, when: ended.append(error))) as watch,
    ):
        watch.save_s = 600.0 * saves
        signal.raise_signal(number)
        assert wait_until(lambda: ended, 1.0) is not saves
        if saves:
            signal.raise_signal(number)
            assert wait_until(lambda: ended, 5.0)
    assert str(ended[0]) == "SIGTERM" and "test_launch.py" in ended[0].__notes__[0]


def test_a_rank_of_its_own_goes_before_those_that_lost_it(tmp_path):
    directory = tmp_path / "run"  # which only rank 0 makes, on its own machine
    for rank, error in enumerate(
        (RunFailed("no step in 5 s"), MemoryError("full"), Interrupted("X"))
    ):
        keep_error(directory, rank, error)
    now = time.time() + 1
    failure = first_error(directory, now)
    assert failure and failure[0] == "oom" and failure[1].startswith("rank 1: out of memory: full")
    assert first_error(directory, now - 10) is None
    (directory / "errors/rank1.txt").write_text("")  # as while it is written
    assert first_error(directory, now) is None
    assert first_error(directory, now, consequences=True) == ("failed", "rank 0: no step in 5 s")
    with pytest.raises(RuntimeError) as on_a_cpu:
        torch.empty(2**60)
    assert classify(on_a_cpu.value).status == "oom"
    full = [classify(OSError(number, "x")).text for number in (errno.EDQUOT, errno.ENOSPC)]
    assert all(text.startswith("disk full: ") for text in full)
    assert classify(ValueError("a\n b " * 200))[:2] == ("failed", f"ValueError: {'a b ' * 125}")
    assert classify(Preempted("SIGTERM"))[:2] == ("interrupted", "interrupted by SIGTERM")
    assert classify(Preempted("x", 3))[:2] == ("preempted", "saved at step 3 and stopped by x")


@pytest.mark.parametrize("was, status, kept", [
    ("running", "failed", False), ("interrupted", "failed", False), ("failed: mine", "oom", True),
    ("interrupted", "interrupted", True), ("failed: rank 3: lost another rank", "oom", False),
])  # fmt: skip
def test_the_launcher_gives_a_result_its_true_end(was, status, kept, tmp_path):
    content = result_of(ROOT / "tests/sample/plain")
    content["status"], _, content["error"] = was.partition(": ")
    (tmp_path / "result.json").write_text(json.dumps(content))
    complete_result(tmp_path, status, "rank 1: full", (LOST,))
    end = result_of(tmp_path)
    expected = (content["status"], content["error"]) if kept else (status, "rank 1: full")
    assert (end["status"], end["error"]) == expected


@pytest.mark.parametrize(("text", "said"), answers("collective_errors.txt"))
def test_whose_error_it_is(text, said):
    kind, _, message = text.partition(": ")
    kinds = {k.__name__: k for k in (RuntimeError, DistBackendError, DistStoreError)}
    assert classify(kinds[kind](message)).text.startswith(said)


def join_as_rank_0(world, port, timeout_s) -> str:
    """What rank 0 says when it does not find the others."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ = mock.patch.dict(os.environ, where, RANK="0", WORLD_SIZE=str(world))
    with environ, pytest.raises(NotJoined) as stop:
        join(Ranks(0, world, 0), torch.device("cpu"), timeout_s)
    assert not classify(stop.value).ours
    return classify(stop.value).text


@mock.patch.dict(os.environ, RANK="2", WORLD_SIZE="4", OMPI_COMM_WORLD_LOCAL_SIZE="2")
def test_ranks_on_several_hosts_need_the_address_of_the_first():
    assert ranks._first_host({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == "127.0.0.1"
    with pytest.raises(UsageError, match="MASTER_ADDR is not set; give the address of rank 0's"):
        join(Ranks(2, 4, 0), torch.device("cpu"), 1.0)


def test_ranks_that_do_not_meet_say_where_they_looked_and_name_nine_of_those_that_never_come():
    """Within --dist-timeout: NCCL itself would wait without an end."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        text = join_as_rank_0(2, port, 5.0)
    assert f"the 2 ranks that meet at 127.0.0.1:{port}" in text and "address already in use" in text
    port, start = free_port(), time.monotonic()
    text = join_as_rank_0(3, port, 1.0)
    assert 1.0 <= time.monotonic() - start < 10.0
    assert f"meet at 127.0.0.1:{port}: after 1 s rank 1, 2 is missing; check that all" in text
    names = ", ".join(map(str, range(1, 10)))
    for world, more in ((10, ""), (11, ", ...")):
        with pytest.raises(NotJoined, match=f"rank {names}{more} is missing"):
            ranks._wait_for_all(HashStore(), Ranks(0, world, 0), 0.01, "x")


def listening(process) -> set[str]:
    """Addresses, in the kernel's form, at which any process of a run listens for connections."""
    sockets = set()
    for pid in process.members():
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(str(path.readlink()))
    tables = [p.read_text().splitlines()[1:] for p in Path("/proc/net").glob("tcp*")]
    table = [line.split() for lines in tables for line in lines]
    return {f[1].split(":")[0] for f in table if f[3] == "0A" and f"socket:[{f[9]}]" in sockets}


@pytest.mark.parametrize("killed", [0, 1, None])
def test_nothing_listens_outside_and_the_killed_is_named(killed, start_training, tmp_path):
    """Nobody else may reach the ranks; the launcher, or the readers, say what the ranks could not."""
    process = start_training("train_fsdp.py", tmp_path / "runs", TMPDIR=str(tmp_path))
    addresses = listening(process)
    assert addresses and addresses <= {"0100007F", f"{0x01000000:032X}"}  # 127.0.0.1 and ::1
    os.kill(process.pid if killed is None else process.ranks()[killed], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == (-9 if killed is None else 1)
    r = only_result(tmp_path / "runs")
    if killed is None:
        assert r["status"] == "interrupted"
        assert r["error"] == "interrupted by the end of its launcher"
    else:
        why = f"rank {killed}: killed by SIGKILL"
        assert (r["status"], r["error"]) == ("failed", why)
        lines = [line for line in err.splitlines() if line.startswith("train_fsdp.py: ")]
        assert lines == [f"train_fsdp.py: {why}"]
        assert killed == 0 or r["metrics"]["n_measured_steps"] > 0
    left = {p.name for p in tmp_path.iterdir() if not p.name.startswith("torchinductor")}
    assert left == {"runs"}
    assert not list(tmp_path.glob("runs/*/.result*"))


SLOW_IMPORT = """
import os, sys, time
if os.environ.get("RANK") == "1":
    time.sleep(600)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["pydantic"]
import pydantic
"""


@pytest.mark.parametrize("prefix", [COLD, ("env", *TORCHRUN, "2")])
def test_ranks_end_soon_after_their_launcher_before_they_have_met(prefix, start, tmp_path):
    """Rank 1 still imports, rank 0 waits for it."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/pydantic.py").write_text(SLOW_IMPORT)
    path = os.pathsep.join([str(tmp_path / "slow"), os.environ["PYTHONPATH"]])
    flags = [*FOREVER, "--dist-timeout", "600"]
    process = start("train_ddp.py", tmp_path, *flags, prefix=prefix, PYTHONPATH=path)
    assert wait_until(lambda: len(process.ranks()) == 2, 240)
    assert wait_until(lambda: handles_sigterm(process.ranks()[0]), 240)
    time.sleep(1)
    process.kill()
    assert wait_until(lambda: not process.members(), 60)  # 5 on a quiet machine, not 600


def test_a_rank_that_connects_to_nobody_hears_a_signal(start, tmp_path):
    """The connection is made in C, where Python's signal handlers do not run."""
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    flags = [*SHORT, "--dist-timeout", "600"]
    process = start("train_ddp.py", tmp_path, *flags, **env, MASTER_PORT=str(free_port()))
    assert wait_until(lambda: handles_sigterm(process.pid), 240)
    time.sleep(1)
    process.terminate()
    code, _, err = finish(process, timeout=60)
    assert code == 130 and err.splitlines()[-1] == "train_ddp.py: rank 1: interrupted by SIGTERM"


def handles_sigterm(pid: int) -> bool:
    """Whether a process has come so far that it has a handler for SIGTERM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_the_rank_that_failed_first_is_named(monkeypatch, tmp_path):
    """A rank killed for not ending in time comes after the error that was the cause; a rank killed
    in the first place comes before what the others then say."""

    def reported(rank, at_s, error):
        path = tmp_path / f"{rank}.json"
        monkeypatch.setattr(time, "time", lambda: at_s)
        with mock.patch.dict(os.environ, TORCHELASTIC_ERROR_FILE=str(path)):
            code = failures.report(error, "x.py", Ranks(rank, 9, rank))
        return ProcessFailure(rank, 0, code, str(path))

    def killed(rank, at_s, number):
        monkeypatch.setattr(time, "time", lambda: at_s)
        return ProcessFailure(rank, 0, -number, "none")

    def first(*failures):
        return first_failure({failure.local_rank: failure for failure in failures})["text"]

    cause = reported(3, 1000.2, MemoryError())
    by_agent = reported(4, 1000.3, Interrupted("SIGTERM"))
    told, late = killed(5, 1000.3, signal.SIGTERM), killed(6, 1031, signal.SIGKILL)
    assert first(cause, by_agent, told, late).startswith("out of memory")
    shot = killed(2, 1001.1, signal.SIGKILL)  # seen after the others had noticed
    lost = reported(0, 1000.9, RuntimeError("Connection closed by peer"))
    assert first(lost, shot, by_agent) == "killed by SIGKILL"
    assert first(by_agent, lost, late) == "interrupted by SIGTERM"
    saved = reported(1, 1002, Preempted("SIGTERM", 7))
    assert first(cause, saved) == "saved at step 7 and stopped by SIGTERM"
    assert first_failure({3: cause})["code"] == 3 and first_failure({1: saved})["code"] == 75


@pytest.mark.parametrize("reacts", [False, True])
def test_what_nccl_reports_ends_a_rank_that_does_not_notice(reacts, monkeypatch):
    """The main thread hears of a peer's death by its own exception, or hangs in C until it is aborted."""
    ended = []
    broken = mock.Mock(side_effect=itertools.chain([None], itertools.repeat("REMOTE_ERROR")))
    monkeypatch.setattr(HangWatch, "PATIENCE_S", 1.0)
    watch = HangWatch(lambda error, when: ended.append(str(error)), broken)
    with contextlib.closing(watch):
        assert wait_until(lambda: broken.call_count > 1, 5) and not ended
        if reacts:
            watch.close()
        assert wait_until(lambda: ended, 3) is not reacts
    assert ended == ([] if reacts else ["lost another rank: NCCL reports REMOTE_ERROR"])


def test_a_rank_says_what_only_it_or_its_machine_has(monkeypatch, capsys, tmp_path):
    """Not all 64 say the same: one per machine reports a missing file, but all tell their agent."""

    def run(rank, local, *argv) -> str:
        error_file = tmp_path / "error.json"
        error_file.unlink(missing_ok=True)
        environ = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "64"}
        environ |= {"SLURM_LOCALID": str(local), "TORCHELASTIC_ERROR_FILE": str(error_file)}
        with mock.patch.dict(os.environ, environ):
            assert launch_ranks(train_fsdp.train, [*TINY, *argv], "train_fsdp.py") == 2
        assert json.loads(error_file.read_text())["message"]["message"]
        return capsys.readouterr().err

    missing = ("--data", "none.bin")
    assert run(8, 0, *missing).startswith("train_fsdp.py: rank 8: none.bin: no such file")
    assert run(9, 1, *missing) == ""
    assert run(0, 0, "--n-steps", "0").startswith("train_fsdp.py: rank 0: --n-steps 0")
    assert "--nproc 2: this script was started by a launcher" in run(0, 0, "--nproc", "2")
    assert "--max-restarts: no such flag; use torchrun's own" in run(0, 0, "--max-restarts", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    alone = run(9, 1, "--device", "cuda")
    assert "rank 1 of this machine sees no GPU for itself, only 1" in alone and "gpu-bind" in alone


def test_ctrl_c_ends_all(start_training, tmp_path):
    """SIGINT from a terminal goes to every process, more than once if the user is impatient."""
    process = start_training("train_ddp.py", tmp_path)
    pids = list(process.members())
    for _ in range(20):
        signal_all(pids, signal.SIGINT)
        time.sleep(0.003)
    code, _, err = finish(process)
    assert code == 130 and "train_ddp.py: interrupted by SIGINT" in err and "Traceback" not in err
    assert only_result(tmp_path)["status"] == "interrupted"


def is_free(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    "rank, number", [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_lost_node_ends_the_job_within_the_timeout(rank, number, start, tmp_path):
    """Nobody is told of a node that stands still, as when a host's power fails: only time tells."""
    agents, store = [], f"127.0.0.1:{free_port()}"
    for node in (0, 1):
        options = (
            f"--nnodes 2 --node-rank {node} --nproc-per-node 1 --rdzv-backend c10d --rdzv-id x"
        )
        # Both have one host's name, by which torchrun would decide who keeps the store.
        options += f" --rdzv-conf is_host={1 - node} --rdzv-endpoint {store} --local-addr 127.0.0.1"
        command = [sys.executable, "-m", "torch.distributed.run", *options.split()]
        flags = [*FOREVER, "--dist-timeout", "10"]
        agents.append(start("train_fsdp.py", tmp_path, *flags, prefix=command))
    assert wait_until(lambda: training(tmp_path) or any(a.poll() is not None for a in agents), 120)
    assert [a.poll() for a in agents] == [None, None], agents[0].communicate()[1][-2000:]
    # The agents decide which of them gets rank 0.
    lost = next(a for a in agents if rank in a.ranks())
    other = next(a for a in agents if a is not lost)
    signal_all(lost.members(), number)
    when = time.monotonic()
    code, _, err = finish(other)
    assert code != 0 and time.monotonic() - when < 10 + 60
    # The agent may miss the other's store before its rank misses the other, and end it.
    why = re.search(rf"rank {1 - rank}: (lost another rank|interrupted by SIGTERM)", err)
    assert why, err
    assert "Traceback" not in err[: why.start()]
    (error,) = tmp_path.glob(f"*/errors/rank{1 - rank}.txt")
    status = "failed" if why[1] == "lost another rank" else "interrupted"
    assert error.read_text().startswith(f"{status}: {why[1]}")
    # Only rank 0 writes the result: if it is lost, the result still says that the run goes on.
    assert only_result(tmp_path)["status"] == (status if rank else "running")
    assert only_result(tmp_path)["batch"]["data_parallel_size"] == 2


@pytest.fixture
def asked(monkeypatch):
    """What torchrun's agent is asked to start: its settings, the program and the arguments of a rank."""
    asked = []

    def elastic_launch(config, program):
        return lambda *arguments: asked.append((config, program, arguments))

    monkeypatch.setattr(agent.api, "elastic_launch", elastic_launch)
    monkeypatch.setattr(agent.api, "LocalElasticAgent", None)  # given back afterwards
    monkeypatch.setattr(agent.logging, "disable", lambda level: None)
    with mock.patch.dict(os.environ):
        yield asked


@pytest.mark.parametrize(("given", "place"), [([], MEETING), (["--log-dir", "mine"], None)])
def test_logs_of_ranks_are_where_torchruns_flag_says(given, place, asked):
    words = [*given, "--nproc-per-node=2", "train_ddp.py", *TINY]
    assert agent.run_agent(agent.torchrun.parse_args(words)) == 0
    assert asked[0][0].logs_specs.root_log_dir == (os.environ[place] if place else "mine")


def test_the_ranks_of_a_script_share_the_cores(asked, monkeypatch):
    monkeypatch.setattr(launch, "n_cores", lambda: 8)
    del os.environ["OMP_NUM_THREADS"]
    argv = (*TINY, "--nproc", "3", "--save-every", "5")
    launch.start_ranks(argv, "train_ddp.py")
    assert os.environ["OMP_NUM_THREADS"] == "2"
    config, program, arguments = asked[0]
    assert (config.nproc_per_node, config.max_nodes, config.max_restarts) == (3, 1, 0)
    assert config.rdzv_endpoint == f"{os.environ[MEETING]}/agent"
    assert config.rdzv_configs["store_type"] == "file"
    assert (program, arguments[:2]) == (sys.executable, ("-u", str(ROOT / "train_ddp.py")))
    assert arguments[2:] == argv


@pytest.mark.parametrize(("variables", "found"), answers("launchers.txt"))
def test_launchers_are_recognised(variables, found):
    environ = dict(word.split("=") for word in variables.split())
    if found == "none":
        assert find_ranks(environ) is None
    elif found[0].isdigit():
        assert find_ranks(environ) == Ranks(*map(int, found.split()))
    else:
        with pytest.raises(UsageError, match=re.escape(found)):
            find_ranks(environ)


def test_ranks_by_slurm_environment(start, tmp_path):
    """Two processes with srun's variables find each other without torchrun: at the first host of the
    node list, at a port that the job's number gives."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    answer = "[ \"$*\" = 'show hostnames node[7-8]' ] && echo 127.0.0.1 && echo node8\n"
    scontrol.write_text(f"#!/bin/sh\n{answer}")
    scontrol.chmod(0o755)
    job = next(n for n in range(os.getpid(), os.getpid() + 999) if is_free(29500 + n % 1000))
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[7-8]"}
    env |= {"SLURM_JOB_ID": str(job), "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    tasks = [env | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    ends = list(map(finish, [start("train_fsdp.py", tmp_path, *SHORT, **task) for task in tasks]))
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2][-2000:]
    assert json.dumps(only_result(tmp_path)["ranks"]).count('"rank"') == 2
