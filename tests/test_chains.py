"""Short forms of tests/chains.py: one chain under each launcher, and signals on slow disks."""

import random

import pytest

from tests import chains


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return chains.make_reference(tmp_path_factory.mktemp("chains"))


@pytest.mark.parametrize("kind, second", [("script", "all ranks"), ("agents", "one rank")])
def test_a_chain_ends_as_the_run_that_nobody_disturbed(kind, second, reference, tmp_path):
    kills = [("one rank", "while training"), (second, "in set-up")]
    script = chains.Script(inner=True, resume="given" if kind == "script" else "", kills=kills)
    # A loaded machine may see the second set-up only when it is over.
    assert chains.chain(0, reference, kind, random.Random(7), tmp_path, script) >= 1


@pytest.mark.parametrize(
    "request_", ["itself launchers USR1", "agents one TERM", "script one TERM"]
)
def test_a_run_is_saved_on_request_however_slow_the_disk(request_, tmp_path):
    """One of two nodes is told to end, and both do."""
    chains.check_saved_on_request(request_, tmp_path)


@pytest.mark.parametrize("kind", ["itself", "script"])
def test_a_second_signal_ends_a_run_that_saves(kind, tmp_path):
    chains.check_second_signal(kind, tmp_path)


def test_two_runs_do_not_save_in_one_place(tmp_path):
    chains.check_second_run(tmp_path)
