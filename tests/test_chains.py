"""Short forms of tests/chains.py: chains that change their layout, and signals on slow disks."""

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.checkpoint.filesystem import FileSystem

from llm_train_bench.results.result_files import read_result
from llm_train_bench.run import loop
from llm_train_bench.run.checkpoint.attempt import checkpoints_at, step_of
from tests import chains
from tests.chains import SETTINGS, Job, arguments
from tests.processes import signal_all, wait_until

ENDLESS = ["--save-every", "100000", "--n-steps", "100000"]


@pytest.mark.parametrize("name, kind, seed", [("tp", "script", 2), ("packed", "torchrun", 3)])
def test_a_chain_ends_as_the_run_that_nobody_disturbed(name, kind, seed, tmp_path):
    reference = chains.make_reference(tmp_path, name)
    assert chains.chain(kind, name, random.Random(seed), tmp_path, reference) >= 1


@contextlib.contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """What is forked inside writes so slowly; rank 1 is late in each step."""

    def create_stream(self, path, mode, real=FileSystem.create_stream):
        time.sleep(seconds if mode == "wb" and Path(path).suffix == ".distcp" else 0.0)
        return real(self, path, mode)

    def rate(*args, real=loop.learning_rate):
        time.sleep(0.004 * (os.environ.get("RANK") == "1"))
        return real(*args)

    disk = mock.patch.object(FileSystem, "create_stream", create_stream)
    with disk, mock.patch.object(loop, "learning_rate", rate):
        yield


def wait_for(condition: Callable[[], object], job: Job, log: Path) -> None:
    assert wait_until(lambda: condition() or not job.alive(), 120), log.read_text()[-2000:]
    assert job.alive(), log.read_text()[-2000:]


@contextlib.contextmanager
def running(kind: str, top: Path, *flags: str, slow: float = 0.0, **env: str):
    """A run "r" in its own directory, ended in any case; on a disk with `slow` seconds a file."""
    out = Path(tempfile.mkdtemp(dir=top, prefix=kind))
    argv, log = arguments(out, SETTINGS["dropout"], *flags), out.with_suffix(".log")
    layout = SETTINGS["dropout"].layouts[0] if kind != "itself" else "train.py 1"
    with slow_disk(slow):
        job = Job(kind, layout, argv, log, **env)
    try:
        wait_for((out / "r/steps.jsonl").exists, job, log)
        yield job, out / "r", log, layout, argv
    finally:
        job.kill()


@pytest.mark.parametrize(
    "request_", ["itself launchers USR1", "nodes one TERM", "script one TERM", "srun rank INT"]
)
def test_a_run_is_saved_on_request_however_slow_the_disk(request_, tmp_path):
    """A signal to one saves all ranks at one step, on a disk slower than the agent would wait."""
    kind, who, name = request_.split()
    number = signal.Signals[f"SIG{name}"]
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    with running(kind, tmp_path, *ENDLESS, slow=4.0, **patience) as (job, run, log, *_):
        wait_for(lambda: (run / "steps.jsonl").stat().st_size, job, log)
        if who == "launchers":
            job.signal_launchers(number)
        else:
            signal_all([job.launchers[0].pid if who == "one" else job.ranks()[1]], number)
        codes = job.finish(90)
    assert set(codes) == {75}, (request_, codes, log.read_text()[-2000:])
    r, (checkpoint,) = read_result(run / "result.json"), checkpoints_at(run)
    assert r.status == "preempted", r.error
    assert r.error == f"saved at step {step_of(checkpoint)} and stopped by SIG{name}"
    assert r.attempts[0].ended == f"preempted: {r.error}"
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("kind", ["itself", "script"])
def test_a_second_signal_ends_a_run_that_saves(kind, tmp_path):
    """It ends the run at once, a second after the first, while a disk stands still."""
    with running(kind, tmp_path, *ENDLESS, slow=50.0) as (job, run, log, *_):
        wait_for(lambda: (run / "steps.jsonl").stat().st_size, job, log)
        job.signal_launchers(signal.SIGTERM)
        wait_for(lambda: list(run.glob("checkpoints/step-*.tmp")), job, log)
        time.sleep(0.5)
        job.signal_launchers(signal.SIGTERM)
        begin = time.monotonic()
        codes = job.finish(60)
        took = time.monotonic() - begin
    r = read_result(run / "result.json")
    said = took, codes, log.read_text()[-2000:]
    assert took < 25 and set(codes) == {130}, said
    why = "a second signal" if kind == "script" else "SIGTERM"
    assert (r.status, r.error) == ("interrupted", f"interrupted by {why}"), r.error
    assert "Traceback" not in log.read_text() and not checkpoints_at(run)


def test_two_runs_do_not_write_in_one_directory(tmp_path):
    """The same command while the first still runs is refused, and disturbs nothing."""
    with running("script", tmp_path, "--n-steps", "3000") as (job, run, log, layout, argv):
        wait_for(lambda: list(run.glob("checkpoints/step-*")), job, log)
        for kind in ("script", "srun"):
            assert 2 in Job(kind, layout, argv, tmp_path / "other.log").finish(90)
        why = f"process {job.ranks()[0]} on"
        assert (tmp_path / "other.log").read_text().count(why) >= 2
        signal_all([job.launchers[0].pid], signal.SIGTERM)
        assert job.finish() == [75], log.read_text()
        assert len(read_result(run / "result.json").attempts) == 1
