"""Saving and going on: promises, refusals, and the campaign of tests/faults.py in small."""

import fcntl
import json
import os
import shutil
import signal
import time
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llm_train_bench.apply import precision
from llm_train_bench.apply.optimizer import learning_rate
from llm_train_bench.base.token_files import write_tokens
from llm_train_bench.model.config import load_config
from llm_train_bench.model.hf import save_pretrained, to_hf
from llm_train_bench.results import result_files
from llm_train_bench.results.goodput import fill_goodput
from llm_train_bench.results.result_files import begin_attempt, is_alive, this_process
from llm_train_bench.results.schema import Attempt, Metrics
from llm_train_bench.run import loop, signals
from llm_train_bench.run.checkpoint.attempt import checkpoints_at, read_facts
from tests import faults, helpers
from tests.faults import losses_of, steps_of
from tests.helpers import noted, only_result, records_of, run_train

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


def train(out, *flags, dies=None, at=(0, int), config=faults.CONFIG):
    """Exit code of a run of 20 steps, which fails at step `dies`, and at a step does something else."""

    def rate(number, *args, real=learning_rate):
        if number == dies:
            raise RuntimeError("this run was to die")
        if number == at[0]:
            at[1]()
        return real(number, *args)

    with mock.patch.object(loop, "learning_rate", rate):
        return run_train(config, *FLAGS, "--output-dir", out, *flags)


def result(out, name="r") -> dict:
    return json.loads((out / name / "result.json").read_text())


def first_steps(out, name="r") -> list[int]:
    return [attempt["first_step"] for attempt in result(out, name)["attempts"]]


def steps_in(run) -> list[str]:
    return [path.name[-2:] for path in checkpoints_at(run)]


@pytest.mark.parametrize("part", ["calls 9", "disks", "damage 200"])
def test_the_campaign_in_small(part):
    name, *count = part.split()
    print(faults.PARTS[name](*map(int, count)))


def test_a_result_tells_what_saving_cost_and_where_it_went_on(saved, tmp_path):
    m = result(saved.parent, "whole")["metrics"]
    assert steps_in(saved) == ["05", "10", "15", "20"]
    assert m["n_checkpoints"] == 4 and m["window_saves"] == 3 and m["checkpoint_bytes"] > 10_000
    assert m["checkpoint_write_s"] > 0 and m["restart_s"] is None
    steps = steps_of(saved)
    assert [s["step"] for s in steps if s.get("saved")] == [4, 9, 14, 19]
    from_10 = ["--resume", saved / "checkpoints/step-00000010", "--run-name", "r"]
    assert train(tmp_path, *from_10) == 0  # a run of its own
    again = steps_of(tmp_path / "r")
    assert first_steps(tmp_path) == [10]
    assert result(tmp_path)["metrics"]["restart_s"] > 0
    assert [s["phase"] for s in again] == ["resume"] * 5 + ["measure"] * 5
    assert [s["loss"] for s in again] == [s["loss"] for s in steps[10:]]


@pytest.mark.parametrize("start", ["15", "20"])
def test_a_resumed_run_that_measures_nothing_says_so(start, saved, tmp_path):
    assert train(tmp_path, "--resume", saved / f"checkpoints/step-000000{start}") == 0
    r = only_result(tmp_path)
    assert r["status"] == "ok" and r["metrics"]["n_measured_steps"] == 0
    assert ["invalid", "no step was measured"] in [[x["kind"], x["text"]] for x in r["remarks"]]


@pytest.mark.parametrize("flags, message", [
    ("--lr 2e-2", "--lr 0.02: the checkpoint {} was trained with 0.01; give the same"),
    ("--bsz 2", "--global-bsz 2: the checkpoint {} was trained with 4"),
    ("--n-steps 19", "--n-steps 19: the checkpoint {} was trained with 18"),
    ("--seed 1", "--seed 1: the checkpoint"),
    ("--optimizer sgd", "--optimizer sgd: the checkpoint"),
    ("tests/configs/micro-plain.json", "the model "),
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
    steps = iter(range(100))

    def spoil(parameters, *args, real=loop.optimizer_step):
        norm = real(parameters, *args)
        if next(steps) == 7:
            with torch.no_grad():
                parameters[0][0, 0] = float("nan")
        return norm

    monkeypatch.setattr(loop, "optimizer_step", spoil)
    assert train(tmp_path, *NAMED) == 0
    assert steps_in(tmp_path / "r") == ["05"]
    assert noted(result(tmp_path), "step 10 was not saved: rank 0: a number in it is not finite")


def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(38, "no locks")))
    assert train(tmp_path, *AUTO) == 0
    assert steps_in(tmp_path / "r") == ["15", "20"]


def test_attempts_go_on_in_one_directory(saved, tmp_path):
    """Also if the attempt before died before its first save."""
    for dies in (2, 8, 7, None):
        assert train(tmp_path, *AUTO, "--save-every", "3", dies=dies) == (1 if dies else 0)
    r = result(tmp_path)
    assert first_steps(tmp_path) == [0, 0, 6, 6] and [*tmp_path.iterdir()] == [tmp_path / "r"]
    why = "failed: RuntimeError: this run was to die"
    assert [attempt["ended"] for attempt in r["attempts"]] == [why] * 3 + ["ok"]
    faults.check_like(saved, tmp_path / "r")
    (record,) = records_of(tmp_path)  # no checkpoint is a run
    assert record.losses == losses_of(saved)
    parts = r["metrics"]["time_parts_s"]
    assert min(parts.values()) >= 0 and parts["lost"] > 0
    assert sum(parts.values()) < time.time() - r["attempts"][0]["start"]
    assert r["metrics"]["goodput"] == pytest.approx(parts["steps"] / sum(parts.values()))


def test_a_finished_run_keeps_its_result(tmp_path, capsys):
    assert train(tmp_path, *AUTO) == 0
    files = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert train(tmp_path, *AUTO) == 0
    assert "the run is finished; its result.json stays as it is" in capsys.readouterr().err
    del before[tmp_path / "r/run.lock"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_restart_without_auto_leaves_another_run_alone(tmp_path, monkeypatch, capsys):
    assert train(tmp_path, *NAMED, dies=12) == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path, *NAMED) == 2
    assert "exists already" in capsys.readouterr().err and steps_in(tmp_path / "r") == ["05", "10"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    assert train(tmp_path, *AUTO, "--run-name", "mine") == 2
    assert "is not the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize("same_name", [False, True])
def test_a_copy_is_a_run_of_its_own(same_name, tmp_path):
    for dies in (7, 12):
        assert train(tmp_path / "a", *AUTO, dies=dies) == 1
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "a/r").rglob("*")}
    copy = tmp_path / ("b/r" if same_name else "a/s")
    copy.parent.mkdir(exist_ok=True)
    shutil.copytree(tmp_path / "a/r", copy, symlinks=True)
    assert train(copy.parent, *AUTO, "--run-name", copy.name) == 0
    assert first_steps(copy.parent, copy.name) == [0, 5, 10] and steps_in(copy) == ["15", "20"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a/r").rglob("*")} == first
    assert len(records_of(tmp_path)) == 2 and len(losses_of(copy)) == 20
    ids = result(tmp_path / "a")["run_id"], result(copy.parent, copy.name)["run_id"]
    assert (ids[0] == ids[1]) is same_name


@pytest.mark.parametrize("what, why", [
    ("torn", "Expecting "), ("old", "facts.json is of another version"), ("gone", "facts.json: No such"),
])  # fmt: skip
def test_checkpoints_that_cannot_be_read_are_not_passed_over(what, why, tmp_path, capsys):
    """No new training under the same name, and one clear line."""
    assert train(tmp_path, *AUTO) == 0
    for path in (tmp_path / "r").glob("checkpoints/step-*/facts.json"):
        facts = json.loads(path.read_text())["facts"] | {"schema_version": 3}
        crc = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
        text = json.dumps({"crc32": crc, "facts": facts})
        path.write_text(text[:-5] if what == "torn" else text)
        if what == "gone":
            path.unlink()
    before = (tmp_path / "r/result.json").read_bytes()
    capsys.readouterr()
    assert train(tmp_path, *AUTO) == 2
    err = capsys.readouterr().err
    assert f"step-00000020 cannot be used: {why}" in err and err.count("\n") == 1
    assert (tmp_path / "r/result.json").read_bytes() == before
    assert train(tmp_path / "b", "--resume", tmp_path / "r") == 2


def test_a_damaged_checkpoint_is_set_aside_and_its_step_saved_again(tmp_path):
    assert train(tmp_path, *AUTO, dies=12) == 1
    (damaged,) = checkpoints_at(tmp_path / "r")[-1].glob("*.distcp")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert train(tmp_path, *AUTO) == 0
    r = result(tmp_path)
    assert first_steps(tmp_path) == [0, 5] and r["metrics"]["n_checkpoints"] == 3
    assert noted(r, "step-00000010 cannot be used: __0_0.distcp is not what was written")
    assert len(list((tmp_path / "r/checkpoints").glob("damaged-step-00000010-*"))) == 1
    assert steps_in(tmp_path / "r") == ["15", "20"]


@pytest.mark.parametrize("where", ["moved", "gone"])
def test_a_run_whose_directory_is_moved_writes_into_no_other(where, tmp_path):
    """Another run may have its name by then."""
    run, other = tmp_path / "r", tmp_path / "s"
    states: list[int] = []

    def move():
        run.rename(other)
        if where == "moved":
            assert train(tmp_path, *NAMED, "--seed", "5") == 0
            states.append(read_facts(faults.last_of(run)).result.args["seed"])

    assert train(tmp_path, *NAMED, at=(7, move)) == 1
    assert steps_in(other) in ([], ["05"]) and run.exists() == (where == "moved")
    if where == "moved":
        assert states == [5] == [read_facts(faults.last_of(run)).result.args["seed"]]
        assert result(tmp_path)["status"] == "ok" and result(tmp_path)["args"]["seed"] == 5


def test_what_others_did_to_a_run_is_said(saved, tmp_path, capsys):
    """A checkpoint under another number, lines that are missing, a damaged one as a start."""
    run = tmp_path / "r"
    shutil.copytree(saved, run)
    (run / "checkpoints/step-00000020").rename(run / "checkpoints/step-00000030")
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    (run / "steps.jsonl").write_text("".join(lines[:4] + lines[5:]) + '{"step": "x"}')
    (run / "result.json").write_text("{")
    (run / "run.lock").unlink()
    assert train(tmp_path, *AUTO) == 0
    for note in ("step-00000030 cannot be used: it is of step 20", "earlier attempts are unknown"):
        assert noted(result(tmp_path), note)
    assert first_steps(tmp_path) == [15] and noted(result(tmp_path), "steps.jsonl lacks steps")
    (data,) = faults.last_of(run).glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-99] + b"?" * 99)
    assert train(tmp_path, "--init-from", data.parent, "--run-name", "s") == 2
    assert "__0_0.distcp is not what was written" in capsys.readouterr().err


def test_what_is_committed_is_synchronised_first(tmp_path, monkeypatch):
    """Content and losses, then the names beside them, then the final name."""
    place, synced, losses = tmp_path / "r/checkpoints", [], []

    def fsync(descriptor, real=os.fsync):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    def rename(old, new, real=Path.rename):
        if new.parent == place:
            if losses:
                assert synced.pop(0) == place
            files = [old / name for name in ("__0_0.distcp", ".metadata", "facts.json")]
            assert {*files, tmp_path / "r/steps.jsonl"} <= {*synced} and synced[-1] == old
            synced.clear()
            losses.append(len(steps_of(tmp_path / "r")))
        return real(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    assert train(tmp_path, *NAMED, "--save-every", 10) == 0
    assert losses == [10, 20] and synced[0] == place and steps_in(tmp_path / "r") == ["10", "20"]


@pytest.mark.parametrize("flags", [
    ["--amp", "fp16"], ["--optimizer", "sgd", "--grad-acc-steps", "2", "--sac-freq", "1/2"],
    ["--data", "x.bin", "--val-data", "x.bin", "--pack"],
])  # fmt: skip
def test_a_run_in_two_pieces_is_the_run_in_one(flags, tmp_path, monkeypatch):
    """fp16 whose scale moves, accumulation, and documents that the pieces meet in the middle of."""
    monkeypatch.setattr(precision.LossScaler, "GROWTH_STEPS", 3)
    monkeypatch.chdir(tmp_path)
    write_tokens(Path("x.bin"), [np.arange(5000) % 32], 32)
    np.save("x.ends.npy", np.arange(13, 5013, 13).clip(max=5000))
    for name, dies in (("a", None), ("b", 7), ("b", None)):
        config = faults.PLAIN if "--pack" in flags else faults.CONFIG
        code = train(tmp_path, *AUTO, "--run-name", name, *flags, dies=dies, config=config)
        assert code == (1 if dies else 0)
    assert first_steps(tmp_path, "b") == [0, 5]
    faults.check_like(tmp_path / "a", tmp_path / "b")


def test_a_wish_from_before_the_training_ends_it_two_steps_on(tmp_path, monkeypatch, capsys):
    def measure(*args, real=loop.measure):
        monkeypatch.setattr(signals, "early_stop_request", lambda: signal.SIGUSR1)
        real(*args)

    monkeypatch.setattr(loop, "measure", measure)
    for step in (2, 4):
        assert train(tmp_path, *AUTO) == 75
        assert f"saved at step {step} and stopped by" in capsys.readouterr().err
    assert [s["step"] for s in steps_of(tmp_path / "r")] == [0, 1, 2, 3]
    assert first_steps(tmp_path) == [0, 2]


def test_a_command_began_with_its_launcher_unless_that_started_it_again(monkeypatch):
    monkeypatch.setattr(result_files, "seconds_alive", lambda pid: 70.0 if pid else 20.0)
    starts = []
    for count in ("", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        starts.append(time.time() - begin_attempt().start)
    assert starts == pytest.approx([20, 70, 20], abs=10)


def goodput_of(*attempts: Attempt, steps: list[dict]) -> mock.Mock:
    r = mock.Mock(attempts=list(attempts), metrics=Metrics())
    fill_goodput(r, steps)
    return r


def test_time_parts_of_a_killed_attempt_and_its_restart():
    """The first compiled and was killed; the second was started three seconds after that."""
    step = {"step_time_s": 1.0}
    steps = [step | {"step": 0, "at": 106.0, "step_time_s": 3.0, "compile_s": 2.5},
             step | {"step": 1, "at": 107.0}, step | {"step": 2, "at": 131.0}]  # fmt: skip
    one = Attempt(start=95.0, opened=97.0, end=111.0, ended="killed")
    two = Attempt(first_step=2, start=114.0, opened=120.0, end=133.0, lost_s=1.5)
    r = goodput_of(one, two, steps=steps)
    parts = {"compile": 2.5, "steps": 0.5 + 1 + 1, "lost": 1.5, "waiting": 3.0, "other": 38.0 - 9.5}
    assert r.metrics.time_parts_s == pytest.approx(parts)
    assert r.metrics.goodput == pytest.approx(2.5 / 38)
    r = goodput_of(one, two.model_copy(update={"opened": 105.0}), steps=steps)
    assert r.metrics.goodput is None and r.metrics.time_parts_s is None
    assert "attempt 0 ended after attempt 1 began" in r.remark.call_args[0][0]


def test_a_clock_that_is_set_in_a_run_does_not_change_its_goodput(tmp_path, monkeypatch):
    later = mock.Mock(side_effect=lambda real=time.time: real() + 3600)
    began = time.monotonic()
    monkeypatch.setattr(result_files, "seconds_alive", lambda pid=None: 1.0)
    assert train(tmp_path, *NAMED, at=(7, lambda: monkeypatch.setattr(time, "time", later))) == 0
    parts = result(tmp_path)["metrics"]["time_parts_s"]
    assert sum(parts.values()) < time.monotonic() - began + 2.0


def test_data_are_told_from_others_by_all_of_their_bytes(tmp_path, capsys):
    """A copy is the same, whatever its time; one byte in the middle makes it another."""
    tokens, index, lengths = (tmp_path / name for name in ("x.bin", "x.ends.npy", "lengths.json"))
    write_tokens(tokens, [np.arange(2**21) % 32], 32)
    np.save(index, np.array([50, 90, 2**21]))
    flags = [*AUTO, "--data", tokens, "--val-data", tokens, "--pack"]
    assert train(tmp_path, *flags, dies=7, config=faults.PLAIN) == 1
    os.utime(tokens, (1, 1))
    assert train(tmp_path, *flags, dies=7, config=faults.PLAIN) == 1
    capsys.readouterr()
    for path, message in ((tokens, "--data "), (index, "the index of --data ")):
        right = path.read_bytes()
        wrong = bytearray(right)
        wrong[len(wrong) - 16] ^= 1
        path.write_bytes(wrong)
        assert train(tmp_path, *flags, config=faults.PLAIN) == 2
        assert f"train.py: {message}{len(right)} bytes with" in capsys.readouterr().err
        path.write_bytes(right)
    lengths.write_text("[3, 5]")
    flags = [*AUTO, "--run-name", "s", "--pack", "--pack-lengths", lengths]
    assert train(tmp_path, *flags, dies=7, config=faults.PLAIN) == 1
    lengths.write_text("[5, 3]")
    assert train(tmp_path, *flags, config=faults.PLAIN) == 2
    assert "--pack-lengths 6 bytes with" in capsys.readouterr().err


def test_evaluation_on_the_way_is_marked(tmp_path):
    write_tokens(tmp_path / "val.bin", [np.arange(200) % 32], 32)
    flags = ["--val-data", tmp_path / "val.bin", "--eval-every", 5, "--run-name", "r"]
    assert train(tmp_path, *flags) == 0
    m = only_result(tmp_path)["metrics"]
    assert [step for step, _ in m["val_losses"]] == [5, 10, 15, 20]
    assert m["val_losses"][-1][1] == m["val_loss"] and m["window_evaluations"] == 3
    assert m["val_perplexity"] == pytest.approx(2.718281828 ** m["val_loss"])


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_others_may_read_an_export_if_the_umask_lets_them(umask, tmp_path):
    before = os.umask(umask)
    try:
        for _ in range(2):  # anew, and over a file that is there
            save_pretrained(helpers.built(helpers.config("llama")), tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~umask)


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


def test_weights_of_another_model_are_refused(saved, tmp_path, capsys):
    flags = ["--init-from", saved / "checkpoints/step-00000020"]
    assert train(tmp_path, *flags, config=faults.PLAIN) == 2
    assert train(tmp_path, *flags, "--pad-vocab", "64") == 2
    err = capsys.readouterr().err
    assert "the model " in err and "--pad-vocab 64: the checkpoint" in err


def test_a_run_whose_checkpoints_are_lost_does_not_begin_anew(saved, tmp_path, capsys):
    other = ["--resume", saved / "checkpoints/step-00000010"]
    assert train(tmp_path, *NAMED, *other, "--save-every", "9", dies=12) == 1
    assert train(tmp_path, *AUTO) == 2
    assert "and has no checkpoint of its own" in capsys.readouterr().err
    (tmp_path / "r/checkpoints").symlink_to("nowhere")
    assert train(tmp_path, *AUTO) == 2
    assert "checkpoints: cannot be used: No such file" in capsys.readouterr().err


def test_a_dead_writer_is_distinguished_from_a_living_one():
    me = this_process()
    assert me.started is not None and is_alive(me) is True
    changes = ({"started": me.started + 1}, False), ({"host": "x"}, None), ({"boot": "x"}, False)
    for change, alive in changes:
        assert is_alive(me.model_copy(update=change)) is alive
