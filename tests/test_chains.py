"""Short forms of tests/chains.py: one chain under each launcher, and signals on slow disks."""

import random
import signal

import pytest

from tests import chains


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return chains.make_reference(tmp_path_factory.mktemp("chains"))


@pytest.mark.parametrize(
    ("kind", "script"),
    [
        ("script", chains.Script(
            inner=True, auto=False, given=True, save_dir=False,
            kills=[("one rank", "while training"), ("all ranks", "in set-up")])),
        ("nodes", chains.Script(
            inner=True, auto=False, given=False, save_dir=True,
            kills=[("one rank", "while training"), ("one rank", "in set-up")])),
    ], ids=["script", "nodes"],
)  # fmt: skip
def test_a_chain_ends_as_the_run_that_nobody_disturbed(kind, script, reference, tmp_path):
    assert chains.chain(0, reference, kind, random.Random(7), tmp_path, script) == 2


@pytest.mark.parametrize(
    ("kind", "who", "number"),
    [("itself", "launchers", signal.SIGUSR1), ("nodes", "one", signal.SIGTERM)],
)
def test_a_run_is_saved_on_request_however_slow_the_disk(kind, who, number, tmp_path):
    """One of two nodes is told to end, and both do."""
    chains.check_saved_on_request(kind, tmp_path, who, number)


@pytest.mark.parametrize("kind", ["itself", "script"])
def test_a_second_signal_ends_a_run_that_saves(kind, tmp_path):
    chains.check_second_signal(kind, tmp_path)
