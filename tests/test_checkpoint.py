"""Saving and going on: promises, refusals, and the campaign of tests/faults.py in small."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from bench.compare.find_results import read_records
from bench.compare.records import LogFacts
from bench.errors import UsageError
from bench.results.schema import Lineage, Writer
from bench.run.checkpoint import lineage
from bench.run.checkpoint.manifest import committed, newest, verify
from tests import faults
from tests.helpers import ROOT, only_result, run_train

FLAGS = [*faults.FLAGS, "--n-steps", "18"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 20 steps that kept all of its checkpoints, and its config."""
    out = tmp_path_factory.mktemp("saved")
    config = faults.make_config(out)
    argv = [config, *FLAGS, "--output-dir", out, "--run-name", "whole", "--save-every", 5]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert run_train(*argv, "--save-keep", 100) == 0
    return out, config


def train(config, out, *flags):
    return run_train(config, *FLAGS, "--output-dir", out, *flags)


@pytest.mark.parametrize("part", ["states", "errors", "pieces"])
def test_the_campaign(part):
    print(faults.PARTS[part]())


@pytest.mark.parametrize(("part", "count"), [("damage", 200), ("kills", 6), ("disk", 2)])
def test_the_campaign_in_small(part, count):
    print(faults.PARTS[part](count))


def test_a_result_tells_what_saving_cost_and_where_it_went_on(saved, tmp_path):
    out, config = saved
    r = json.loads((out / "whole/result.json").read_text())
    assert [p.name[-2:] for p in committed(out / "whole/checkpoints")] == ["05", "10", "15", "20"]
    m = r["metrics"]
    assert m["n_checkpoints"] == 4 and m["window_saves"] == 3 and m["checkpoint_bytes"] > 10_000
    assert m["checkpoint_stall_s"] > 0 and m["checkpoint_write_s"] > 0 and m["restart_s"] is None
    steps = [json.loads(line) for line in (out / "whole/steps.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s.get("saved")] == [4, 9, 14, 19]
    assert train(config, tmp_path, "--resume", out / "whole/checkpoints/step-00000010") == 0
    r = only_result(tmp_path)
    assert r["resumed_from"]["run"] == "whole" and r["resumed_from"]["step"] == 10
    assert r["metrics"]["restart_s"] > 0 and r["metrics"]["n_measured_steps"] == 5
    (path,) = tmp_path.glob("*/steps.jsonl")
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert [s["phase"] for s in again] == ["resume"] * 5 + ["measure"] * 5
    assert [s["loss"] for s in again] == [s["loss"] for s in steps[10:]]


def test_a_finished_run_is_resumed_at_once(saved, tmp_path, capsys):
    out, config = saved
    assert train(config, tmp_path, "--resume", out / "whole") == 0
    assert only_result(tmp_path)["resumed_from"]["step"] == 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "2e-2"], "--lr 0.02: the checkpoint {} was trained with 0.01; give the same, or"),
        (["--bsz", "2"], "--global-bsz 2: the checkpoint {} was trained with 4"),
        (["--n-steps", "19"], "--n-steps 19: the checkpoint {} was trained with 18"),
        (["--seed", "1"], "--seed 1: the checkpoint"),
        (["--optimizer", "sgd"], "--optimizer sgd: the checkpoint"),
        (["--n-steps", "2"], "is at step 20, and this run ends at 4"),
    ],
)
def test_another_training_is_refused_by_name(flags, message, saved, tmp_path, capsys):
    out, config = saved
    assert train(config, tmp_path, "--resume", out / "whole", *flags) == 2
    err = capsys.readouterr().err
    assert message.format(out / "whole/checkpoints/step-00000020") in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_model_or_nothing_is_refused(saved, tmp_path, capsys):
    out, config = saved
    other = tmp_path / "other.json"
    other.write_text(json.dumps(faults.SHAPE | {"n_layer": 1}))
    assert train(other, tmp_path / "x", "--resume", out / "whole") == 2
    assert "is of another model than" in capsys.readouterr().err
    assert train(config, tmp_path / "x", "--resume", tmp_path) == 2
    assert "holds no checkpoint that can be read" in capsys.readouterr().err
    assert train(config, tmp_path / "x", "--resume", "auto") == 2
    assert "--resume auto needs --run-name" in capsys.readouterr().err
    assert train(config, tmp_path / "x", "--resume", "auto", "--run-name", "new") == 0
    notes = only_result(tmp_path / "x")["notes"]
    assert any("no checkpoint of new; starts from 0" in note for note in notes)


def test_anyway_takes_another_learning_rate_and_no_sample_twice(saved, tmp_path):
    out, config = saved
    where = out / "whole/checkpoints/step-00000010"
    assert train(config, tmp_path, "--resume", where, "--resume-anyway", "--lr", "2e-2") == 0
    assert only_result(tmp_path)["resumed_from"]["step"] == 10


@pytest.mark.parametrize(("on_nan", "code"), [("stop", 1), ("continue", 0)])
def test_a_state_that_is_not_finite_is_never_committed(on_nan, code, saved, tmp_path, monkeypatch):
    _, config = saved
    from bench.run import loop

    real = loop.optimizer_step

    def spoil(parameters, *args):
        norm = real(parameters, *args)
        if spoil.steps == 7:
            with torch.no_grad():
                parameters[0][0, 0] = float("nan")
        spoil.steps += 1
        return norm

    spoil.steps = 0
    monkeypatch.setattr(loop, "optimizer_step", spoil)
    flags = ["--save-every", 5, "--on-nan", on_nan, "--run-name", "r", "--no-save-async"]
    assert train(config, tmp_path, *flags) == code
    r = only_result(tmp_path)
    assert [p.name[-2:] for p in committed(tmp_path / "r/checkpoints")] == ["05"]
    assert any("step 10 was not saved: a number in it is not finite" in n for n in r["notes"])
    if on_nan == "stop":
        assert r["status"] == "failed" and "last good checkpoint: step 5" in r["error"]


def test_a_save_that_hangs_is_given_up(saved, tmp_path, monkeypatch):
    from bench.run.checkpoint import saver

    class Stuck(saver.Files):
        def make(self, directory):
            time.sleep(3)
            raise OSError(5, "Input/output error")

    _, config = saved
    monkeypatch.setattr(saver, "Files", Stuck)
    assert train(config, tmp_path, "--save-every", 5, "--save-timeout", 0.2) == 0
    assert any("given up after 0.2 s" in note for note in only_result(tmp_path)["notes"])


def fork_of(work) -> int:
    """A forked process that does some work and then waits to be killed; its id, once that is done."""
    ready, done = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
            os.write(done, b"x")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def hold(place, host=None):
    """Take a directory as another run does, on this host or as if on another."""
    line = Lineage(id="other", name="r", attempt=3, began=0.0, started=0.0)
    if host:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lineage, "this_process", lambda: Writer(host=host, boot="x", pid=1))
            lease = lineage.Lease(place)
            lease.take(line)
            lease.ended.set()
            os.close(lease.file)
    else:
        lineage.Lease(place).take(line)


def test_two_runs_do_not_save_in_one_place(saved, tmp_path, capsys):
    """The second is refused while the first lives, before anything is written, and not after."""
    _, config = saved
    place = tmp_path / "ck/r"
    holder = fork_of(lambda: hold(place))
    flags = ["--save-every", 5, "--save-dir", tmp_path / "ck", "--run-name", "r"]
    for more in ([], ["--resume", "auto"]):
        assert train(config, tmp_path / "x", *flags, *more) == 2
        assert f"another run saves there: process {holder} on" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    end(holder)
    assert train(config, tmp_path / "y", *flags, "--resume", "auto") == 0
    assert newest([place]).name == "step-00000020"
    assert lineage.lineage_of(place).id == "other" and lineage.lineage_of(place).attempt == 4


def test_a_run_of_another_host_is_gone_after_a_while(saved, tmp_path, capsys, monkeypatch):
    _, config = saved
    place = tmp_path / "ck/r"
    hold(place, "elsewhere")
    flags = ["--save-every", 5, "--save-dir", tmp_path / "ck", "--run-name", "r"]
    assert train(config, tmp_path / "x", *flags) == 2
    assert "process 1 on elsewhere is alive; 60 s after its last sign" in capsys.readouterr().err
    past = time.time() - 61
    os.utime(place / "lineage.json", (past, past))
    assert train(config, tmp_path / "x", *flags) == 0


def test_without_locks_time_tells(tmp_path, monkeypatch):
    """Also on this host; and who took a directory away from another commits there, the other not."""

    def no_locks(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lineage.fcntl, "lockf", no_locks)
    first = lineage.Lease(tmp_path / "p")
    first.take(Lineage(id="one", name="r", attempt=0, began=0.0, started=0.0))
    with pytest.raises(UsageError, match="is alive"):
        lineage.Lease(tmp_path / "p")
    past = time.time() - 61
    os.utime(tmp_path / "p/lineage.json", (past, past))
    hold(tmp_path / "p", "elsewhere")
    assert not first.held()
    first.release()
    assert lineage.lineage_of(tmp_path / "p").id == "other"


def test_evaluation_on_the_way_is_marked(saved, tmp_path):
    import numpy as np

    from bench.apply.tokens import write_tokens

    _, config = saved
    write_tokens(tmp_path / "val.bin", [np.arange(200) % 32], 32)
    flags = ["--val-data", tmp_path / "val.bin", "--eval-every", 5, "--run-name", "r"]
    assert train(config, tmp_path, *flags) == 0
    m = only_result(tmp_path)["metrics"]
    assert [step for step, _ in m["val_losses"]] == [5, 10, 15, 20]
    assert m["val_losses"][-1][1] == m["val_loss"] and m["window_evaluations"] == 3
    assert m["val_perplexity"] == pytest.approx(2.718281828 ** m["val_loss"])


def test_weights_of_a_checkpoint_are_exported(saved, tmp_path):
    """--init-from CHECKPOINT --export makes a Hugging Face model of it, and trains nothing."""
    from safetensors.torch import load_file

    out, config = saved
    where = out / "whole/checkpoints/step-00000020"
    assert train(config, tmp_path, "--init-from", where, "--export", "--run-name", "r") == 0
    exported = load_file(tmp_path / "r/export/model.safetensors")
    state = faults.whole_state(where)
    assert torch.equal(exported["transformer.ln_f.weight"], state["p/norm.weight"])
    assert torch.equal(exported["transformer.wte.weight"], state["p/embed.weight"])
    qkv = exported["transformer.h.1.attn.c_attn.weight"]
    assert torch.equal(qkv, state["p/blocks.1.attn.qkv.weight"].t())
    assert only_result(tmp_path)["metrics"]["n_measured_steps"] in (None, 0)


def test_a_signal_saves_all_ranks_at_one_step_and_auto_goes_on(tmp_path):
    """SIGTERM to the launcher, as SLURM sends it; rank 1 is slow, and steps take milliseconds."""
    config = faults.make_config(tmp_path)
    plain = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    config.write_text(json.dumps(faults.SHAPE | plain))
    slow = "import os, time\nimport bench.run.loop as loop\nreal = loop.learning_rate\n"
    slow += "def late(*a):\n    time.sleep(0.004 * (os.environ.get('RANK') == '1'))\n"
    slow += "    return real(*a)\n"
    slow += "loop.learning_rate = late\n"
    script = tmp_path / "train_ddp.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{slow}import train_ddp\n"
                      "from bench.run.launch import launch_ranks\n"
                      "sys.exit(launch_ranks(train_ddp.train, sys.argv[1:], __file__))\n")  # fmt: skip
    argv = [str(config), *faults.FLAGS, "--n-steps", "400", "--output-dir", str(tmp_path / "runs"),
            "--run-name", "r", "--save-every", "1000", "--resume", "auto", "--bsz", "2",
            "--dist-timeout", "60"]  # fmt: skip
    process = subprocess.Popen([sys.executable, str(script), *argv], stderr=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    steps = tmp_path / "runs/r/steps.jsonl"
    deadline = time.monotonic() + 120
    while not (steps.exists() and steps.read_text().count("\n") > 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    r = json.loads((tmp_path / "runs/r/result.json").read_text())
    found = newest([tmp_path / "runs/r/checkpoints"])
    assert r["status"] == "preempted" and f"saved at step {verify(found).step}" in r["error"]
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *argv[:-2], "--bsz", "4"],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    r = json.loads((tmp_path / "runs/r-restart1/result.json").read_text())
    assert r["status"] == "ok" and r["resumed_from"]["step"] == verify(found).step
    (record,) = read_records([str(tmp_path / "runs")], print, LogFacts())  # the two are one run
    assert [step for step, _ in record.losses] == list(range(402))
    assert any("2 attempts of one run" in note for note in record.notes)
    losses = dict(faults.losses_of(tmp_path / "runs", "r"))
    assert sorted(losses) == list(range(402))
