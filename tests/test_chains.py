"""Short forms of tests/chains.py: one chain under each launcher, and signals on slow disks."""

import random
import signal

import pytest

from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.records import LogFacts
from llm_train_bench.results.result_files import read_result
from llm_train_bench.run.checkpoint.manifest import step_of
from tests import chains, faults
from tests.helpers import run_train


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return chains.make_reference(tmp_path_factory.mktemp("chains"))


@pytest.mark.parametrize("kind, second", [("script", "all ranks"), ("agents", "one rank")])
def test_a_chain_ends_as_the_run_that_nobody_disturbed(kind, second, reference, tmp_path):
    kills, given = [("one rank", "while training"), (second, "in set-up")], kind == "script"
    script = chains.Script(inner=True, auto=False, given=given, kills=kills)
    # A loaded machine may see the second set-up only when it is over.
    assert chains.chain(0, reference, kind, random.Random(7), tmp_path, script) >= 1


@pytest.mark.parametrize("request_", ["itself launchers USR1", "agents one TERM"])
def test_a_run_is_saved_on_request_however_slow_the_disk(request_, tmp_path):
    """One of two nodes is told to end, and both do."""
    chains.check_saved_on_request(request_, tmp_path)


@pytest.mark.parametrize("kind", ["itself", "script"])
def test_a_second_signal_ends_a_run_that_saves(kind, tmp_path):
    chains.check_second_signal(kind, tmp_path)


def test_two_runs_do_not_save_in_one_place(tmp_path):
    chains.check_second_run(tmp_path)


def test_a_signal_saves_all_ranks_at_one_step_and_auto_goes_on(tmp_path):
    """SIGTERM to the launcher, as SLURM sends it; rank 1 is late, and steps take milliseconds."""
    flags = ["--resume", "auto", "--n-steps", "400", "--save-every", "1000"]
    with chains.running("script", tmp_path, *flags, slow=0.0) as (job, out, log, argv):
        chains.wait_for((out / "r/steps.jsonl").read_text, job, log)
        job.signal_launchers(signal.SIGTERM)
        assert job.finish() == [75], log.read_text()
    r, step = read_result(out / "r/result.json"), step_of(faults.last_of(out / "r/checkpoints"))
    assert r.status == "preempted" and f"saved at step {step}" in (r.error or "")
    assert run_train(*argv, "--bsz", "4") == 0
    r = read_result(out / "r-restart1/result.json")
    assert r.status == "ok" and r.resumed_from and r.resumed_from.step == step
    (record,) = read_records([str(out)], print, LogFacts())  # the two are one run
    assert [step for step, _ in record.losses] == list(range(402))
    assert any("2 attempts of one run" in note for note in record.texts("information"))
