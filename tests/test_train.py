"""train.py as a user runs it, on the CPU: results, toggles, endings."""

import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from llm_train_bench.base import start
from llm_train_bench.base.token_files import write_tokens
from llm_train_bench.results.result_files import read_result
from llm_train_bench.results.schema import SCHEMA_VERSION
from llm_train_bench.results.wandb_run import WandbRun
from llm_train_bench.run import loop
from tests import helpers
from tests.helpers import ROOT, only_result, read_steps, run_train, train_main, trained, words
from tests.processes import Warm, training, wait_until

TINY = ["configs/gpt2-tiny.json", "--seq-len", "32", "--bsz", "2", "--device", "cpu"]
FP32 = [*TINY, "--amp", "off"]


def losses(tmp_path, name, *argv):
    """Losses of 6 + 2 steps under the given flags."""
    flags = "--n-steps 6 --warmup-steps 2 --lr-warmup-steps 2 --no-tensorboard"
    trained(tmp_path / name, *argv, flags)
    return losses_in(tmp_path / name)


def losses_in(out):
    return [s["loss"] for s in read_steps(out)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The directory of one run under the default flags, with which others are compared."""
    losses(out := tmp_path_factory.mktemp("plain"), "runs", *FP32)
    return out / "runs"


@pytest.fixture(scope="module")
def learnable(tmp_path_factory):
    """A token file with a simple rule: each token is the one before plus 1, 2 or 3, modulo 64."""
    steps = np.random.default_rng(0).integers(1, 4, 20000)
    path = tmp_path_factory.mktemp("data") / "train.bin"
    write_tokens(path, [np.cumsum(steps) % 64], 256)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory, learnable):
    """One ordinary run with everything on, looked at by several tests."""
    out = tmp_path_factory.mktemp("runs")
    flags = "--n-steps 60 --warmup-steps 4 --grad-acc-steps 2 --bsz 8 --lr 3e-3"
    prices = "--peak-tflops 1 --usd-per-hour 3.6"
    trained(out, FP32, "--data", learnable, "--val-data", learnable, flags, prices)
    return out


def test_it_learns_and_figures_follow_from_the_step_times(run):
    """ln 256 = 5.5 at the start; the rule's own entropy is ln 3 = 1.1. For all figures see records."""
    r = only_result(run)
    m, times = r["metrics"], r["step_times_s"]
    assert 5.3 < m["first_loss"] < 5.8 and m["final_loss"] < 2.2
    assert 5.3 < m["val_loss_before"] < 5.8 and abs(m["val_loss"] - m["final_loss"]) < 0.3
    assert r["status"] == "ok" and r["error"] is None
    assert len(times) == m["n_measured_steps"] == 60 and len(r["warmup_step_times_s"]) == 4
    assert r["batch"] == {
        "micro_batch": 8, "grad_acc_steps": 2, "data_parallel_size": 1, "global_batch": 16,
        "seq_len": 32, "tokens_per_step": 512,
    }  # fmt: skip
    assert m["mfu_causal"] < m["mfu"] == m["hfu"] and m["peak_rss_gib"] > 0.1


def test_result_is_complete(run):
    r = only_result(run)
    assert r["args"]["lr"] == 3e-3 and r["args"]["seq_len"] == 32
    assert r["model"]["config"] == json.loads((ROOT / "configs/gpt2-tiny.json").read_text())
    assert r["model"]["n_parameters"] == 462_336
    assert r["environment"]["libraries"]["torch"] and r["environment"]["cpu"]
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    assert r["environment"]["git_sha"] == (head or None)
    assert r["command"][0] == "train.py" and r["schema_version"] == SCHEMA_VERSION
    (path,) = run.glob("*/result.json")
    assert read_result(path).metrics.final_loss == r["metrics"]["final_loss"]
    files = {p.name for p in path.parent.iterdir()}
    assert files == {"result.json", "run.lock", "steps.jsonl", "tensorboard"}
    assert r["profile"] is None and r["memory"] is None


def test_dropout_is_for_training_alone(tmp_path, learnable):
    """At learning rate 0, validation is the same before and after, and does not change training."""
    values = json.loads((ROOT / "configs/gpt2-tiny.json").read_text()) | {"resid_pdrop": 0.5}
    (tmp_path / "dropout.json").write_text(json.dumps(values))
    argv = [tmp_path / "dropout.json", *FP32[1:], "--data", learnable, "--lr", "0"]
    plain = losses(tmp_path, "plain", *argv)
    assert losses(tmp_path, "val", *argv, "--val-data", learnable) == plain
    m = only_result(tmp_path / "val")["metrics"]
    assert m["val_loss_before"] == m["val_loss"]
    assert losses(tmp_path, "none", FP32[0], *argv[1:]) != plain


def test_toggles_do_not_change_what_is_computed(tmp_path, learnable):
    """Padding, attention kernels: same losses; bf16 nearly."""
    argv = [*FP32, "--data", learnable, "--lr", "3e-3", "--seed", "1"]  # fp16 skips no step
    plain = losses(tmp_path, "plain", *argv, "--bsz", 4)
    assert plain[0] - plain[-1] > 0.3  # the tolerances below are small against what was learnt
    for name, tolerance, *flags in (
        ("pad", 1e-5, "--bsz", 4, "--pad-vocab", 384),
        ("math", 1e-5, "--bsz", 4, "--attention", "math"),
        ("flash", 1e-5, "--bsz", 4, "--attention", "flash"),
        ("bf16", 1e-2, "--bsz", 4, "--amp", "bf16"),
        ("fp16", 1e-2, "--bsz", 4, "--amp", "fp16"),
    ):
        # tests/test_combinations.py runs Inductor's code, and bf16 compiled.
        with helpers.without_inductor():
            other = losses(tmp_path, name, *argv, *flags)
        assert other == pytest.approx(plain, rel=tolerance), name
    kernels = {n: only_result(tmp_path / n)["attention_kernel"] for n in ("plain", "math", "flash")}
    assert kernels == {"plain": "blocks", "math": "math", "flash": "flash"}


def test_the_seed_the_optimizer_and_clipping_change_losses(tmp_path, plain):
    adamw = losses_in(plain)
    assert adamw != losses(tmp_path, "seed", *FP32, "--seed", 1)
    sgd = losses(tmp_path, "sgd", *FP32, "--optimizer", "sgd")
    assert adamw[:1] == sgd[:1] and adamw[4:] != sgd[4:]
    clipped = losses(tmp_path, "clip", *FP32, "--optimizer", "sgd", "--grad-clip", 0.01)
    free = losses(tmp_path, "free", *FP32, "--optimizer", "sgd", "--grad-clip", 0)
    assert clipped[4:] != free[4:] != sgd[4:]


@pytest.mark.parametrize("name, start", [("SIGINT", subprocess.Popen), ("SIGTERM", Warm)])
def test_a_signal_keeps_what_was_measured(tmp_path, name, start):
    flags = words(FP32, "--n-steps 100000 --warmup-steps 2 --output-dir", tmp_path / "runs")
    argv = [sys.executable, "train.py", *flags]
    process = start(argv, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: process.poll() is not None or training(tmp_path / "runs"), 240)
    for _ in range(20):  # an impatient user
        process.send_signal(signal.Signals[name])
        time.sleep(0.003)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert f"interrupted by {name}" in stderr
    r = only_result(tmp_path / "runs")
    assert (r["status"], r["error"]) == ("interrupted", f"interrupted by {name}")
    assert r["metrics"]["n_measured_steps"] >= 3 and r["metrics"]["tokens_per_sec"] > 0
    assert len(read_steps(tmp_path / "runs")) == r["metrics"]["n_measured_steps"] + 2


def test_out_of_memory(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2 * 2**30, before[1]))
    try:
        code = run_train(*FP32, "--bsz", 20000, "--seq-len", 256, "--output-dir", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    stderr = capsys.readouterr().err
    assert code == 3 and "--bsz" in stderr and "--seq-len" in stderr, stderr
    assert "Traceback" not in stderr and only_result(tmp_path)["status"] == "oom"


def test_full_disk(tmp_path, capsys):
    """A small file system: the step file fills it up, the result still gets written."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted only by root")
    try:
        flags = words("--n-steps 2000 --warmup-steps 1 --output-dir", tmp_path)
        assert run_train(*FP32, *flags) == 1
        stderr, r = capsys.readouterr().err, only_result(tmp_path)
        assert "Traceback" not in stderr and "disk full" in stderr
        assert r["status"] == "failed" and "disk full" in r["error"]
        assert r["metrics"]["n_measured_steps"] > 100
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_bad_input_writes_nothing_and_a_run_that_exists_stays(tmp_path, refused, plain):
    write_tokens(tmp_path / "x.bin", [np.full(1000, 300)], 50257)
    argv = words(FP32, "--output-dir", tmp_path / "runs")
    refused(train_main, "token id 300", argv, "--data", tmp_path / "x.bin")
    if not torch.cuda.is_available():
        refused(train_main, "train.py: --device cuda: PyTorch", argv, "--device cuda")
    assert not (tmp_path / "runs").exists()
    for where in ("/proc/none/here", "README.md/x"):
        refused(train_main, f"--output-dir {where}: cannot be written", argv, "--output-dir", where)
    (path,) = plain.glob("*/result.json")
    before = path.read_bytes()
    argv = words(FP32, "--output-dir", plain, "--run-name", path.parent.name)
    refused(train_main, "exists already", argv)
    assert path.read_bytes() == before


@pytest.fixture
def tracked(tmp_path, monkeypatch, capsys):
    """Runs with --track wandb under a name, with a stand-in for the library; what is said."""

    def run(name: str, **functions) -> str:
        run.wandb = mock.MagicMock(__spec__="installed", **functions)
        run.wandb.init.return_value.dir = f"{tmp_path}/wandb/files"
        monkeypatch.setitem(sys.modules, "wandb", run.wandb)
        argv = words(FP32, "--n-steps 3 --warmup-steps 1 --no-tensorboard --quiet --track wandb")
        assert run_train(*argv, "--run-name", name, "--output-dir", tmp_path) == 0
        assert helpers.result_of(tmp_path / name)["status"] == "ok"
        return capsys.readouterr().err

    return run


def test_a_run_goes_to_wandb(tracked, tmp_path, monkeypatch, refused):
    """Each step, the final figures and the files; its failure takes nothing from the run."""
    assert f"wandb: {tmp_path}/wandb\n" in tracked("good")
    run = tracked.wandb.init.return_value
    result = helpers.result_of(tmp_path / "good")
    assert tracked.wandb.init.call_args.kwargs["config"]["bsz"] == result["args"]["bsz"]
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [0, 1, 2, 3]
    summary = run.summary.update.call_args.args[0]
    assert summary["tokens_per_sec"] == result["metrics"]["tokens_per_sec"]
    files = tracked.wandb.Artifact.return_value.add_file.call_args_list
    assert [Path(call.args[0]).name for call in files] == ["result.json", "steps.jsonl"]
    assert run.log_artifact.called and run.finish.call_args.kwargs == {"exit_code": 0}
    said = tracked("bad", **{"init.side_effect": OSError("no\nspace")})
    assert "wandb: not tracked: OSError: no space" in said
    assert "wandb sync" in tracked("offline", **{"api.api_key": None})
    monkeypatch.setitem(sys.modules, "wandb", None)
    argv = words(FP32, "--track wandb --run-name b --output-dir", tmp_path)
    refused(train_main, "--track wandb: needs wandb: pip install", argv)
    assert not (tmp_path / "b").exists()


def test_wandb_that_does_not_answer_delays_the_end_only_so_long(tracked, monkeypatch):
    """Whether it stands still at the start, in a step or at the end."""
    monkeypatch.setattr(WandbRun, "PATIENCE_S", 0.2)
    for name in ("init", "init.return_value.log", "init.return_value.finish"):
        began = time.monotonic()
        said = tracked(name, **{f"{name}.side_effect": lambda *_, **__: time.sleep(60)})
        assert time.monotonic() - began < 30
        assert "wandb: not tracked to the end: no answer for 0.2 s" in said


def test_warm_up_by_seconds_fills_what_steps_leave(tmp_path):
    """The first three steps may compile, and do not count; training itself is the same."""
    argv = words(FP32, "--n-steps 2 --warmup-steps 6 --no-tensorboard")
    plain, began = trained(tmp_path / "plain", argv), time.perf_counter()
    warmed = trained(tmp_path / "warmed", argv, "--warmup-seconds 1.5")
    assert losses_in(tmp_path / "plain") == losses_in(tmp_path / "warmed")
    assert not helpers.noted(plain, "warmed")
    (note,) = [note for note in helpers.remark_texts(warmed) if "warmed the device" in note]
    worked = sum(warmed["warmup_step_times_s"][3:])
    assert float(note.split()[0]) == pytest.approx(1.5 - worked, abs=0.06)
    assert warmed["metrics"]["setup_s"] < plain["metrics"]["setup_s"] + 0.7
    assert time.perf_counter() - began > 1.4 - worked


def test_a_program_that_calls_a_script_keeps_no_model(tmp_path):
    """A script's own process never collects what its imports left; another program's must."""

    def models():
        gc.collect()
        gc.unfreeze()  # what was frozen was not collected
        return sum(type(x).__name__ == "Transformer" for x in gc.get_objects())

    gc.unfreeze()  # what earlier tests left
    before = models()
    for name in ("a", "b"):
        trained(tmp_path / name, TINY, "--n-steps 1 --warmup-steps 1")
    assert models() == before
    gc.freeze()


def test_a_run_is_one_file(tmp_path):
    """YAML with a config and flags; a result.json is run again as it was; what is typed goes before."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "script: train.py\nconfig: configs/gpt2-tiny.json\nbsz: 3\nseq-len: 16\nn_steps: 2\namp: off\n"
        "warmup_steps: 1\nno_tensorboard: true\npt_compile: false\nusd_per_hour: 2\n"
    )
    first = trained(tmp_path / "a", "--from", file, "--lr 0.01")
    typed = {"bsz": 3, "amp": "off", "lr": 0.01, "usd_per_hour": 2}
    assert typed.items() <= first["args"].items()
    (result,) = (tmp_path / "a").glob("*/result.json")
    again = trained(tmp_path / "b", f"--from={result}", "--seed 5")
    unlike = {k for k in first["args"] if first["args"][k] != again["args"][k]}
    assert unlike == {"output_dir", "seed", "no_tensorboard", "usd_per_hour"}
    assert again["model"]["hash"] == first["model"]["hash"] and again["args"]["lr"] == 0.01


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_output_ends_no_run(name, tmp_path, monkeypatch, capsys):
    """As under `| head`: the table goes to the other output, and the result is whole."""
    monkeypatch.setattr(sys, name, open("/dev/full", "w"))  # noqa: PTH123, SIM115
    assert trained(tmp_path, FP32, "--n-steps 2 --warmup-steps 1")["status"] == "ok"
    printed = capsys.readouterr()
    assert "| tokens/s " in (printed.err if name == "stdout" else printed.out)


def test_python_ends_without_complaint_after_a_full_output():
    """It flushes its outputs at the end."""
    text = "import os, sys; os.close(1); os.open('/dev/full', os.O_WRONLY); "
    text += "from llm_train_bench.results.console import say; sys.exit(say('x', sys.stdout))"
    assert helpers.python(["-c", text]).stderr == ""


def test_a_directory_removed_during_a_run_costs_only_the_files(tmp_path, monkeypatch, capsys):
    def remove(*args, real=loop.optimizer_step):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        return real(*args)

    monkeypatch.setattr(loop, "optimizer_step", remove)
    assert run_train(*FP32, "--n-steps", 12, "--output-dir", tmp_path / "r") == 1
    shown = capsys.readouterr()
    assert "| tokens/s " in shown.out and "is gone; was the run's directory removed?" in shown.err
    assert "Traceback" not in shown.err


def python_with(library: str, lines: str, *parts, **options):
    """Python in which a library is replaced by a few lines."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / f"{library}.py").write_text(lines)
        path = os.pathsep.join([place, os.environ["PYTHONPATH"]])
        return helpers.python(*parts, PYTHONPATH=path, **options)


@pytest.mark.parametrize(("script", "library"), [("train", "torch"), ("compare", "pydantic")])
def test_ctrl_c_during_imports_is_one_line(script, library):
    interrupts = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    done = python_with(library, interrupts, f"{script}.py gpt2-tiny", code=130)
    assert done.stderr == f"{script}.py: interrupted by SIGINT\n"


SIGNALLED = """
import os, signal
from llm_train_bench.base import start
os.kill(os.getpid(), signal.SIGUSR1)
print(start.early_stop_request(), flush=True)
start.refuse_stop_requests()
"""


def test_sigusr1_during_imports_is_remembered():
    """Without --save-every it ends the run, as does the end of the launcher."""
    done = python_with("torch", SIGNALLED, "train.py gpt2-tiny", code=-signal.SIGUSR1)
    assert done.stdout == f"{signal.SIGUSR1:d}\n"
    lost = helpers.python("train.py x", code=1, TORCHELASTIC_RUN_ID="x", LLM_TRAIN_BENCH_PARENT="1")
    assert lost.stderr == "train.py: interrupted by the end of its parent process\n"


def test_a_python_without_the_libraries_is_told_what_to_type():
    error = helpers.python("-S train.py x", code=1, PYTHONPATH="").stderr
    assert error.count("\n") == 1 and "has no numpy; activate the environment" in error
    with mock.patch("sys.__excepthook__") as usual:  # no library is missing
        for error in (NameError(name="torch"), ModuleNotFoundError(), ImportError(name="model")):
            start._explain_missing(type(error), error, None)
    assert usual.call_count == 3
