"""Saving and going on: promises, refusals, and the campaign of tests/faults.py in small."""

import json
import os
import shutil
import signal
import threading
import time
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llm_train_bench.apply.optimizer import learning_rate
from llm_train_bench.base.token_files import write_tokens
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.records import LogFacts
from llm_train_bench.model import stored
from llm_train_bench.model.config import load_config
from llm_train_bench.model.hf import to_hf
from llm_train_bench.parallel import ranks
from llm_train_bench.parallel.ranks import MEETING
from llm_train_bench.results import result_files
from llm_train_bench.results.goodput import time_parts
from llm_train_bench.results.result_files import command_began, is_alive, this_process
from llm_train_bench.run import loop
from llm_train_bench.run.checkpoint import durable, lineage, saver
from llm_train_bench.run.checkpoint.manifest import committed
from tests import faults
from tests.faults import steps_of
from tests.helpers import ROOT, noted, only_result, read_steps, records_of, remark_texts, run_train

NAMED = ["--save-every", 5, "--run-name", "r"]
AUTO = [*NAMED, "--resume", "auto"]
FLAGS = [*faults.FLAGS, "--n-steps", "18"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 20 steps that kept all of its checkpoints."""
    out = tmp_path_factory.mktemp("saved")
    with faults.KEEP_ALL:
        assert train(out, "--run-name", "whole", "--save-every", 5) == 0
    return out / "whole"


def train(out, *flags, dies=None, config=faults.CONFIG):
    """Exit code of a run of 20 steps, which fails at step `dies`."""

    def rate(number, *args, real=learning_rate):
        if number == dies:
            raise RuntimeError("this run was to die")
        return real(number, *args)

    with mock.patch.object(loop, "learning_rate", rate):
        return run_train(config, *FLAGS, "--output-dir", out, *flags)


def result(out, attempt=0, name="r") -> dict:
    directory = out / (f"{name}-restart{attempt}" if attempt else name)
    return json.loads((directory / "result.json").read_text())


def steps_in(place) -> list[str]:
    return [path.name[-2:] for path in committed(place)]


def test_an_attempt_with_nothing_left_to_do_removes_older_checkpoints(tmp_path):
    """The one before was killed after its last checkpoint had its name, before older ones went."""
    argv = faults.arguments(tmp_path, "r")
    faults.run_here(argv)
    place = tmp_path / "r/checkpoints"
    kept = [path.name for path in faults.committed(place)]
    shutil.copytree(place / kept[-1], place / "step-00000001")
    faults.run_here(argv)
    assert [path.name for path in faults.committed(place)] == kept and len(kept) == 2
    (record,) = records_of(tmp_path)  # the run keeps its speed
    assert record.label == "r" and record.tokens_per_sec and len(record.losses) == 22


@pytest.mark.parametrize("part", ["states", "errors", "pieces", "damage 200", "kills 6"])
def test_the_campaign_in_small(part):
    name, *count = part.split()
    print(faults.PARTS[name](*map(int, count)))


def test_a_result_tells_what_saving_cost_and_where_it_went_on(saved, tmp_path):
    m = result(saved.parent, name="whole")["metrics"]
    assert steps_in(saved / "checkpoints") == ["05", "10", "15", "20"]
    assert m["n_checkpoints"] == 4 and m["window_saves"] == 3 and m["checkpoint_bytes"] > 10_000
    assert m["checkpoint_stall_s"] > 0 and m["checkpoint_write_s"] > 0 and m["restart_s"] is None
    written = m["checkpoint_gb_per_s"] * m["checkpoint_write_s"]
    assert written == pytest.approx(m["checkpoint_bytes"] / 1e9)
    steps = steps_of(saved)
    assert [s["step"] for s in steps if s.get("saved")] == [4, 9, 14, 19]
    from_10 = ["--resume", saved / "checkpoints/step-00000010", "--run-name", "r"]
    assert train(tmp_path, *from_10) == 0
    r, again = result(tmp_path), steps_of(tmp_path / "r")
    assert r["resumed_from"]["run"] == "whole" and r["resumed_from"]["step"] == 10
    assert r["metrics"]["restart_s"] > 0 and r["metrics"]["n_measured_steps"] == 5
    assert [s["phase"] for s in again] == ["resume"] * 5 + ["measure"] * 5
    assert [s["loss"] for s in again] == [s["loss"] for s in steps[10:]]
    assert train(tmp_path / "end", "--resume", saved) == 0  # of a run that had finished
    assert only_result(tmp_path / "end")["resumed_from"]["step"] == 20


@pytest.mark.parametrize("flags, message", [
    ("--lr 2e-2", "--lr 0.02: the checkpoint {} was trained with 0.01; give the same"),
    ("--bsz 2", "--global-bsz 2: the checkpoint {} was trained with 4"),
    ("--n-steps 19", "--n-steps 19: the checkpoint {} was trained with 18"),
    ("--seed 1", "--seed 1: the checkpoint"),
    ("--optimizer sgd", "--optimizer sgd: the checkpoint"),
    ("--n-steps 2", "--n-steps 2: the checkpoint {} was trained with 18"),
    ("tests/configs/micro-plain.json", "is of another model than"),
    ("--resume tests", "holds no checkpoint that can be read"),
    ("--resume auto", "--resume auto needs --run-name"),
])  # fmt: skip
def test_another_training_or_none_is_refused(flags, message, saved, tmp_path, capsys):
    words = flags.split()
    config = words.pop() if words[0].endswith(".json") else faults.CONFIG
    assert train(tmp_path, "--resume", saved, *words, config=config) == 2
    err = capsys.readouterr().err
    assert message.format(saved / "checkpoints/step-00000020") in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_not_finite_is_never_committed(tmp_path, monkeypatch):
    steps, save = iter(range(100)), saver.Saver._save

    def spoil(parameters, *args, real=loop.optimizer_step):
        norm = real(parameters, *args)
        if next(steps) == 7:
            with torch.no_grad():
                parameters[0][0, 0] = float("nan")
        return norm

    def save_at_once(self, *args) -> None:
        save(self, *args)
        self.finish()

    monkeypatch.setattr(loop, "optimizer_step", spoil)
    monkeypatch.setattr(saver.Saver, "_save", save_at_once)
    assert train(tmp_path, *NAMED) == 1
    r = result(tmp_path)
    assert steps_in(tmp_path / "r/checkpoints") == ["05"]
    assert noted(r, "step 10 was not saved: a number in it is not finite")
    assert r["status"] == "failed" and "last good checkpoint: step 5" in r["error"]


@pytest.mark.parametrize("method, sleep_s, note", [
    ("make", 3, "given up after 0.2 s"), ("write", 0, "rank 0: No space left on device"),
])  # fmt: skip
def test_a_save_that_hangs_or_fails_fails_no_run(method, sleep_s, note, tmp_path, monkeypatch):
    def fail(self, *args):
        time.sleep(sleep_s)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.Files, method, fail)
    monkeypatch.setattr(saver, "SAVE_S", 0.2)
    assert train(tmp_path, *NAMED) == 0
    assert noted(result(tmp_path), note)
    assert not list((tmp_path / "r/checkpoints").glob("step*"))
    monkeypatch.undo()
    assert train(tmp_path, *AUTO) == 0  # the next attempt saves
    assert steps_in(tmp_path / "r/checkpoints") == ["15", "20"]


def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(lineage.fcntl, "lockf", mock.Mock(side_effect=OSError(38, "no locks")))
    assert train(tmp_path, *AUTO) == 0
    assert steps_in(tmp_path / "r/checkpoints") == ["15", "20"]


def run_again(tmp_path, number, *flags, dies=None, name="r", before=0):
    """A restart, as the launcher of the run before starts it; its result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        patch.setattr(ranks, "_WORDS", [])
        patch.setenv(MEETING, str(tmp_path))
        patch.setenv("LLM_TRAIN_BENCH_PARENT", str(os.getppid()))
        code = train(tmp_path / "runs", "--run-name", name, *flags, dies=dies)
    assert code == (1 if dies else 0)
    return result(tmp_path / "runs", number + before, name)


@pytest.mark.parametrize("first", [0, 5])
def test_a_restart_goes_on_from_its_whole_chain(first, saved, tmp_path):
    """Also if the attempt before died before its first save."""
    flags = ["--save-every", "3"]
    flags += ["--resume", saved / "checkpoints/step-00000005"] if first else []
    for number, (dies, starts) in enumerate([(8, first), (7, 6), (None, 6)]):
        r = run_again(tmp_path, number, *flags, dies=dies)
        assert (r["resumed_from"] or {"step": 0})["step"] == starts, number
        assert r["lineage"]["attempt"] == number and r["lineage"]["name"] == "r"
    place = tmp_path / "runs/r/checkpoints"
    assert steps_in(place) == ["18", "20"]  # two are kept of all attempts
    assert (tmp_path / "runs/r-restart2/checkpoints").resolve() == place.resolve()
    ends = [faults.whole_state(faults.last_of(at)) for at in (place, saved / "checkpoints")]
    faults.assert_equal(*ends)
    (record,) = read_records([str(tmp_path)], pytest.fail, LogFacts())  # no checkpoint is a run
    expected = [x for x in sorted(faults.losses_of(saved.parent, "whole")) if x[0] >= first]
    assert record.losses == expected
    parts, began = r["metrics"]["time_parts_s"], r["lineage"]["began"]
    assert (
        parts["lost steps"] > 0 and parts["save"] > 0 and sum(parts.values()) < time.time() - began
    )
    assert r["metrics"]["goodput"] == pytest.approx(parts["steps"] / sum(parts.values()))


def test_a_restart_of_a_run_that_left_nothing_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert train(tmp_path, *NAMED) == 0
    r = result(tmp_path)
    assert "no checkpoint of r; starts from 0" in remark_texts(r) and r["resumed_from"] is None


def test_two_runs_by_one_name_are_told_from_each_other(tmp_path):
    """A run may be called as the restart of another would be."""
    for name in ("r", "r-restart1"):
        assert train(tmp_path, "--save-every", 5, "--run-name", name, dies=12) == 1
    first, other = result(tmp_path), result(tmp_path, 1)
    assert train(tmp_path, *AUTO) == 0
    assert train(tmp_path, *AUTO, "--run-name", "r-restart1") == 0
    again = result(tmp_path, 2), result(tmp_path, 1, "r-restart1")
    assert [r["lineage"]["id"] for r in again] == [r["lineage"]["id"] for r in (first, other)]


def test_an_attempt_by_a_later_name_is_of_the_same_run(tmp_path):
    later = ["--run-name", "r-restart1"]
    for dies, more in ((7, []), (12, []), (None, later)):
        assert train(tmp_path, *AUTO, *more, dies=dies) == (1 if dies else 0)
    first, last = result(tmp_path), result(tmp_path, 2)
    assert "no checkpoint of r; starts from 0" in remark_texts(first)
    assert last["resumed_from"]["step"] == 10 and last["lineage"]["attempt"] == 2
    assert last["lineage"]["name"] == "r" and last["lineage"]["id"] == first["lineage"]["id"]
    assert steps_in(tmp_path / "r/checkpoints") == ["15", "20"]  # two are kept of all attempts
    (record,) = records_of(tmp_path)
    assert [step for step, _ in record.losses] == list(range(20))
    assert any("3 attempts of one run" in note for note in record.texts("information"))


def test_restarts_of_an_earlier_run_are_none_of_a_new_one_of_its_name(tmp_path):
    """Whose checkpoints may also be moved to another disk."""
    for dies in (7, 12):
        assert train(tmp_path, *AUTO, dies=dies) == 1
    shutil.rmtree(tmp_path / "r")
    assert train(tmp_path, *NAMED, dies=7) == 1
    place = tmp_path / "r/checkpoints"
    place.rename(tmp_path / "larger disk")
    place.symlink_to(tmp_path / "larger disk")
    assert train(tmp_path, *AUTO) == 0
    last = result(tmp_path, 2)
    assert last["lineage"]["id"] == result(tmp_path)["lineage"]["id"]
    assert last["resumed_from"]["step"] == 5


def test_a_copy_under_another_name_goes_its_own_way(tmp_path):
    """Also when a launcher starts it again: from its own newest checkpoint, and not in the first's."""
    run_again(tmp_path, 0, "--save-every", "5", dies=7)
    (tmp_path / "run").unlink()
    first = sorted(p.name for p in (tmp_path / "runs/r/checkpoints").iterdir())
    shutil.copytree(tmp_path / "runs/r", tmp_path / "runs/s")
    for number, (dies, starts) in enumerate([(12, 5), (None, 10)]):
        flags = ["--save-every", "5", "--resume", "auto"]
        r = run_again(tmp_path, number, *flags, dies=dies, name="s", before=1)
        assert r["resumed_from"]["step"] == starts
    assert sorted(p.name for p in (tmp_path / "runs/r/checkpoints").iterdir()) == first
    records = records_of(tmp_path / "runs")
    assert {r.label for r in records} == {"r", "s-restart2"}


def test_a_copy_of_a_restart_does_not_save_in_the_place_of_the_first(tmp_path, capsys):
    for dies in (7, 12):
        assert train(tmp_path, *AUTO, dies=dies) == 1
    shutil.copytree(tmp_path / "r-restart1", tmp_path / "s", symlinks=True)
    assert train(tmp_path, *AUTO, "--run-name", "s") == 2
    assert "leads to the checkpoints of another run; give --resume" in capsys.readouterr().err
    assert steps_in(tmp_path / "r/checkpoints") == ["05", "10"]


def test_plain_torchrun_without_a_shared_store_goes_on_too(tmp_path, monkeypatch):
    """By the name of the run."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for number, dies in enumerate((7, None)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        assert train(tmp_path, *NAMED, dies=dies) == (1 if dies else 0)
    r = result(tmp_path, 1)
    assert r["resumed_from"]["step"] == 5 and r["lineage"]["attempt"] == 1


@pytest.mark.parametrize("what", ["away", "old", "torn"])
def test_checkpoints_that_cannot_be_read_are_not_passed_over(what, tmp_path, capsys):
    """They were moved away, or no manifest can be read: no new training under the same name."""
    assert train(tmp_path / "a", *AUTO) == 0
    place = tmp_path / "a/r/checkpoints"
    if what == "away":
        assert train(tmp_path / "a", *AUTO) == 0
        (tmp_path / "a/r").rename(tmp_path / "elsewhere")
        place = tmp_path / "a/r-restart1/checkpoints"
    for path in place.glob("step-*/manifest.json"):
        text = path.read_text()
        old = json.loads(text)["manifest"] | {"schema_version": 2}
        crc = zlib.crc32(json.dumps(old, sort_keys=True).encode())
        path.write_text(
            text[:-5] if what == "torn" else json.dumps({"crc32": crc, "manifest": old})
        )
    assert train(tmp_path / "a", *AUTO) == 2
    why = dict(
        away="is its disk mounted?", old="another version of llm-train-bench", torn="can be read ("
    )
    assert why[what] in capsys.readouterr().err
    assert [*(tmp_path / "a").iterdir()] == [place.parent]
    assert train(tmp_path / "b", "--resume", place) == 2
    assert what == "away" or "step-00000020: is left out" in capsys.readouterr().err
    if what == "old":
        newest = committed(place)[-1]
        assert train(tmp_path / "c", "--init-from", newest) == 2
        assert f"{newest}: {stored.OTHER_VERSION}" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_set_aside_and_its_step_saved_again(tmp_path):
    assert train(tmp_path, *AUTO, dies=12) == 1
    place = tmp_path / "r/checkpoints"
    (damaged,) = committed(place)[-1].glob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert train(tmp_path, *AUTO) == 0
    r = result(tmp_path, 1)
    assert r["resumed_from"]["step"] == 5 and r["metrics"]["n_checkpoints"] == 3
    why = "is left out: rank00000.safetensors is not what was written"
    assert noted(r, why)
    assert len(list(place.glob("damaged-step-00000010-*"))) == 1
    assert steps_in(place) == ["15", "20"]


class Slow(saver.Files):
    """A disk that stands still until it is told to go on; the first file alone."""

    def __init__(self):
        self.goes_on, self.waits = threading.Event(), threading.Event()

    def write(self, path, parts):
        if not self.waits.is_set():
            self.waits.set()
            self.goes_on.wait(60)
        return super().write(path, parts)


def test_a_save_that_was_given_up_is_never_committed(tmp_path, monkeypatch):
    """Its thread wakes up when the loop is far ahead. No later save touches what it writes."""
    files = Slow()
    run = faults.OneRun(tmp_path, files)
    monkeypatch.setattr(saver, "SAVE_S", 0.1)
    threads = []
    for step in (10, 20, 30):
        run.begin_save(step)
        threads += [run.saver.saving.thread] if run.saver.saving else []
        assert files.waits.wait(10)
        run.saver.finish()
    files.goes_on.set()
    for thread in threads:
        thread.join(10)
    assert len(threads) == 1 and committed(tmp_path / "checkpoints") == []
    assert run.notes[0] == "step 10 was not saved: given up after 0.1 s; no more saves are made"
    run.end()
    assert not list((tmp_path / "checkpoints").glob(".step*"))


def test_a_save_waits_for_the_one_before(tmp_path):
    """Otherwise it would overwrite what that still writes."""
    files = Slow()
    run = faults.OneRun(tmp_path, files)
    run.begin_save(10)
    threading.Timer(0.3, files.goes_on.set).start()
    run.begin_save(20)
    run.saver.finish()
    for path, step in zip(committed(tmp_path / "checkpoints"), (10, 20), strict=True):
        assert (faults.whole_state(path)["p/w.weight"] == step).all()
    run.end()


def test_what_is_committed_is_synchronised_first(tmp_path, monkeypatch):
    """Content and losses, then the names beside them, then the final name.

    Steps are handed on once a second; those of a committed state must not be lost with the rest.
    """
    place, synced, losses = tmp_path / "r/checkpoints", [], []

    def fsync(descriptor, real=os.fsync):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    def rename(old, new, real=Path.rename):
        if losses:
            assert synced.pop(0) == place
        files = [old / "rank00000.safetensors", old / "manifest.json", tmp_path / "r/steps.jsonl"]
        assert {*files} <= {*synced} and synced[-1] == old
        synced.clear()
        losses.append(len(steps_of(tmp_path / "r")))
        return real(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    assert train(tmp_path, *NAMED, "--save-every", 10) == 0
    assert losses == [10, 20] and synced[0] == place and steps_in(place) == ["10", "20"]


def test_a_disk_that_returns_other_bytes_costs_no_good_checkpoint(tmp_path):
    """The older ones go only once the newest reads back as it was written."""

    class Rotten(saver.Files):
        def write(self, path, parts):
            size_and_crc = super().write(path, parts)
            if run.parameter[0, 0] > 10 and path.name != "manifest.json":
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            return size_and_crc

    run = faults.OneRun(tmp_path, Rotten())
    for step in (5, 10, 15, 20, 25):
        run.save(step)
    run.end()
    assert faults.last_of(tmp_path / "checkpoints").name == "step-00000010"
    assert sum("older checkpoints stay" in note for note in run.notes) == 3


def test_dropout_in_another_layout_draws_numbers_of_its_own(saved, tmp_path, monkeypatch):
    """Not those of the first steps again, nor the same after each resumption."""
    seeds = []

    def measure(*args, real=loop.measure):
        seeds.append(torch.initial_seed())
        real(*args)

    monkeypatch.setattr(loop, "measure", measure)
    for step in ("05", "10"):
        other = ["--bsz", "2", "--grad-acc-steps", "2", "--run-name", step]
        assert train(tmp_path, "--resume", saved / f"checkpoints/step-000000{step}", *other) == 0
        assert noted(result(tmp_path, 0, step), "dropout draws other numbers")
    assert train(tmp_path, "--run-name", "0") == 0
    assert len(set(seeds)) == 3


def test_a_command_began_with_its_launcher_unless_that_started_it_again(monkeypatch):
    monkeypatch.setattr(result_files, "seconds_alive", lambda pid: 70.0 if pid else 20.0)
    alone = command_began(started_again=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    ages = [time.time() - t for t in (alone, command_began(True), command_began(False))]
    assert ages == pytest.approx([20, 20, 70], abs=10)


def test_a_wish_from_before_the_training_ends_it_two_steps_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saver, "early_wish", lambda: signal.SIGUSR1)
    for step in (2, 4):
        assert train(tmp_path, *AUTO) == 75
        assert f"saved at step {step} and stopped by" in capsys.readouterr().err
    assert [s["step"] for s in steps_of(tmp_path / "r") if s.get("saved")] == [1]


def test_time_parts_of_a_killed_attempt_and_its_restart(tmp_path):
    """The first attempt compiled, saved at step 2 and was killed; the second waited for its last save."""
    step = {"step_time_s": 1.0}
    first = [step | {"step": 0, "at": 106.0, "step_time_s": 3.0, "compile_s": 2.5},
             step | {"step": 1, "at": 107.0, "saved": True},
             step | {"step": 2, "at": 109.5}, step | {"step": 3, "at": 111.0}]  # fmt: skip
    second = [step | {"step": 2, "at": 131.0, "saved": True}]
    raw = json.loads((ROOT / "tests/sample/plain/result.json").read_text())
    for i, (started, steps) in enumerate(((100.0, first), (120.0, second), (150.0, []))):
        lineage = {"id": "x", "name": "a", "attempt": i, "began": 95.0, "started": started}
        again = {"run": "a", "step": 2, "path": "a"} if i == 1 else None  # the third starts anew
        (tmp_path / str(i)).mkdir()
        content = raw | {"lineage": lineage, "ended_at": None, "resumed_from": again}
        (tmp_path / f"{i}/result.json").write_text(json.dumps(content))
        (tmp_path / f"{i}/steps.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in steps))
    parts = time_parts([tmp_path / "0", tmp_path / "1"], now=140.0, saved_at=133.0)
    assert parts == pytest.approx({
        "steps": 0.5 + 1 + 1, "start": 3.0, "restart": 10.0, "compile": 2.5, "save": 1.5 + 2.0,
        "lost steps": 2.0, "waiting": 9.0, "other": 45.0 - 32.5,
    })  # fmt: skip
    assert time_parts([tmp_path / i for i in "012"], 170.0, None)["lost steps"] == 0.5 + 4


def test_a_token_file_is_told_from_another_by_all_of_its_bytes(tmp_path, capsys):
    """A copy is the same file, whatever its time; one byte in the middle makes it another."""
    path = tmp_path / "x.bin"
    write_tokens(path, [np.arange(2**21) % 32], 32)
    flags = [*AUTO, "--data", path]
    assert train(tmp_path / "a", *flags, dies=7) == 1
    os.utime(path, (1, 1))
    assert train(tmp_path / "a", *flags, dies=7) == 1
    assert "is not the one" not in capsys.readouterr().err
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert train(tmp_path / "a", *flags) == 2
    assert "--data: the file is not the one that" in capsys.readouterr().err


def test_evaluation_on_the_way_is_marked(tmp_path):
    write_tokens(tmp_path / "val.bin", [np.arange(200) % 32], 32)
    flags = ["--val-data", tmp_path / "val.bin", "--eval-every", 5, "--run-name", "r"]
    assert train(tmp_path, *flags) == 0
    m = only_result(tmp_path)["metrics"]
    assert [step for step, _ in m["val_losses"]] == [5, 10, 15, 20]
    assert m["val_losses"][-1][1] == m["val_loss"] and m["window_evaluations"] == 3
    assert m["val_perplexity"] == pytest.approx(2.718281828 ** m["val_loss"])


def test_weights_of_a_checkpoint_are_exported(saved, tmp_path):
    """--init-from CHECKPOINT --export makes a Hugging Face model of it, and trains nothing."""
    where = saved / "checkpoints/step-00000020"
    assert train(tmp_path, "--init-from", where, "--export", "--run-name", "r") == 0
    exported = load_file(tmp_path / "r/export/model.safetensors")
    state = faults.whole_state(where)
    assert torch.equal(exported["transformer.ln_f.weight"], state["p/norm.weight"])
    assert torch.equal(exported["transformer.wte.weight"], state["p/embed.weight"])
    qkv = exported["transformer.h.1.attn.c_attn.weight"]
    weight = load_config(faults.CONFIG).weights["blocks.1.attn.qkv.weight"]
    stored = dict(to_hf(weight, state[f"p/{weight.name}"]))
    assert torch.equal(qkv, stored["transformer.h.1.attn.c_attn.weight"])
    assert only_result(tmp_path)["metrics"]["n_measured_steps"] in (None, 0)


def test_experts_start_from_a_checkpoint_as_from_an_export(tmp_path):
    """Their rows are in the second dimension."""
    moe = ROOT / "tests/configs/qwen3_moe.json"
    assert train(tmp_path, "--run-name", "a", "--save-every", 10, "--export", config=moe) == 0
    losses = []
    for weights in ("checkpoints/step-00000020", "export"):
        out = tmp_path / weights
        assert train(out, "--init-from", tmp_path / "a" / weights, "--n-steps", 2, config=moe) == 0
        losses.append([step["loss"] for step in read_steps(out)])
    assert losses[0] == losses[1]


def test_a_dead_writer_is_distinguished_from_a_living_one():
    me = this_process()
    assert me.started is not None and is_alive(me) is True
    changes = ({"started": me.started + 1}, False), ({"host": "x"}, None), ({"boot": "x"}, False)
    for change, alive in changes:
        assert is_alive(me.model_copy(update=change)) is alive
