"""Short forms of tests/chains.py: chains that change their layout, and signals on slow disks."""

import random

import pytest

from tests import chains


@pytest.mark.parametrize("name, kind, seed", [("tp", "script", 2), ("packed", "nodes", 3)])
def test_a_chain_ends_as_the_run_that_nobody_disturbed(name, kind, seed, tmp_path):
    reference = chains.make_reference(tmp_path, name)
    assert chains.chain(kind, name, random.Random(seed), tmp_path, reference) >= 1


@pytest.mark.parametrize("request_", ["itself launchers USR1", "nodes one TERM", "script one TERM"])
def test_a_run_is_saved_on_request_however_slow_the_disk(request_, tmp_path):
    """One of two nodes is told to end, and both do."""
    chains.check_saved_on_request(request_, tmp_path)


@pytest.mark.parametrize("kind", ["itself", "script"])
def test_a_second_signal_ends_a_run_that_saves(kind, tmp_path):
    chains.check_second_signal(kind, tmp_path)


def test_two_runs_do_not_write_in_one_directory(tmp_path):
    chains.check_second_run(tmp_path)
