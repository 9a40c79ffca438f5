"""Meter and its callbacks: measured loops of others, and that their results are read as any run's."""

import contextlib
import copy
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

import compare
import llm_train_bench
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.redaction import redact_command, shown_command
from llm_train_bench.compare.setting import identity, name_by_itself
from llm_train_bench.results.result_files import read_result
from llm_train_bench.run import record as record_module
from llm_train_bench.run.meter import Meter
from tests import helpers
from tests.helpers import ROOT, noted, only_result, read_steps, records_of, trained
from tests.processes import forked

TINY = str(ROOT / "configs/gpt2-tiny.json")
SMALL = {"tokens_per_step": 32, "warmup_steps": 2, "n_steps": 3}
LOOP = f"""
import os, signal, sys, time
from llm_train_bench import Meter
sys.last_value = KeyError("of an earlier cell of a notebook")
meter = Meter({TINY!r}, output_dir="runs", quiet=True, tokens_per_step=8, warmup_steps=1, n_steps=100)
"""


def measure(directory, steps=5, body=lambda step, i: None, config=TINY, **options) -> Path:
    """The result.json of a loop under a Meter."""
    with Meter(config, output_dir=directory, quiet=True, **SMALL | options) as meter:
        for i in range(steps):
            with meter.step() as step:
                body(step, i)
    return directory / meter.result.run_name / "result.json"


@pytest.fixture
def measured(tmp_path):
    """Measures a loop, and returns its result."""
    return lambda *loop, **options: json.loads(measure(tmp_path, *loop, **options).read_text())


def transformer(path=TINY):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads(Path(path).read_text()))
    return AutoModelForCausalLM.from_config(config)


def test_a_loop_has_the_figures_of_train_py(tmp_path):
    """Of the same model: FLOPs, tokens, and the same fields; its kernels are those that ran."""
    own = trained(tmp_path / "own", TINY, "--device cpu --amp off --bsz 2 --seq-len 32 --n-steps 3")
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sizes = {"tokens_per_step": 64, "seq_len": 32, "warmup_steps": 1, "n_steps": 3}
    with Meter(TINY, output_dir=tmp_path, **sizes) as meter:
        for _ in range(5):
            ids = torch.randint(model.config.vocab_size, (2, 32))
            with meter.step() as step:
                step.loss = model(input_ids=ids, labels=ids).loss
                step.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    directory = tmp_path / meter.result.run_name
    theirs = json.loads((directory / "result.json").read_text())
    assert theirs["status"] == "ok" and theirs.keys() == own.keys()
    assert theirs["model"]["hash"] == own["model"]["hash"]
    same = ("flops_per_token_palm", "flops_per_token_causal", "n_measured_steps")
    assert {k: theirs["metrics"][k] for k in same} == {k: own["metrics"][k] for k in same}
    assert theirs["batch"]["global_batch"] == 2 and theirs["batch"]["seq_len"] == 32
    m = theirs["metrics"]
    assert m["tokens_per_sec"] == pytest.approx(3 * 64 / sum(theirs["step_times_s"]))
    ideal = m["tokens_per_sec"] * m["flops_per_token_palm"] / 1e12
    assert m["model_tflops_per_gpu"] == pytest.approx(ideal)
    # One product of each linear layer and the head forward, and two backward (but not the first's).
    assert sum(theirs["observed"]["matmuls"].values()) == sum(own["observed"]["matmuls"].values())
    assert not noted(theirs, "fallback")
    lines = read_steps(tmp_path)
    assert [s["phase"] for s in lines] == ["warmup"] + 3 * ["measure"]
    assert theirs["metrics"]["first_loss"] == lines[0]["loss"] > 0
    assert list((directory / "tensorboard").iterdir())
    (record,) = records_of(directory)
    assert record.invalid == [] and record.tokens_per_sec_per_gpu and record.step_times_s
    result = llm_train_bench.read_result(directory)
    assert result.model_dump(mode="json")["metrics"] == theirs["metrics"]
    assert meter.result.metrics.tokens_per_sec == m["tokens_per_sec"]


def test_step_times_hold_the_time_between_steps_but_no_pause(tmp_path):
    with Meter(flops_per_token=1e6, output_dir=tmp_path, quiet=True, **SMALL) as meter:
        began = time.perf_counter()
        for i in range(5):
            time.sleep(0.02)  # as a loader does
            with meter.step():
                time.sleep(0.01)
            if i == 0:
                with meter.paused():
                    time.sleep(0.2)
        elapsed = time.perf_counter() - began
    r, steps = only_result(tmp_path), read_steps(tmp_path)
    assert all(s["data_time_s"] >= 0.02 and s["backward_time_s"] is None for s in steps)
    assert all(s["step_time_s"] >= 0.03 for s in steps)
    assert sum(s["step_time_s"] for s in steps) <= elapsed - 0.2
    assert r["metrics"]["window_s"] == pytest.approx(sum(s["step_time_s"] for s in steps[2:]))
    m = r["metrics"]
    assert m["model_tflops_per_gpu"] == pytest.approx(m["tokens_per_sec"] / 1e6)
    assert m["flops_per_token_causal"] is m["mfu_causal"] is None
    assert read_result(tmp_path / r["run_name"]).invalid == []


def test_the_device_is_waited_for_at_the_windows_ends_alone(measured, monkeypatch):
    waited, n = [], []
    monkeypatch.setattr(record_module, "synchronize", lambda device: waited.append(len(n)))
    measured(6, lambda step, i: n.append(i))
    assert set(waited) == {2, 5}


@pytest.mark.parametrize("at, n", [(4, 2), (5, 3)], ids=["measured", "traced"])
def test_a_failure_leaves_what_was_measured(at, n, tmp_path, measured):
    """That of the loop is no other's in the traced step."""

    def broken(step, i):
        step.loss = 2.5
        if i == at:
            raise ValueError("the loader broke")

    with pytest.raises(ValueError, match="the loader broke"):
        measured(9, broken)
    r = only_result(tmp_path)
    assert r["status"] == "failed" and r["error"] == "ValueError: the loader broke"
    assert r["metrics"]["n_measured_steps"] == n and len(read_steps(tmp_path)) == n + 2


def sleeping(*pauses):
    """Steps of 20 ms, and longer at some numbers."""

    def steps(step, i):
        time.sleep(dict(pauses).get(i, 0.02))
        torch.ones(3).sum()

    return steps


# The steps of a loop and what they do; the result's status, measured steps, why invalid, a remark.
LOOPS = {
    "none": (0, sleeping(), {}, "failed", 0, "status failed", None),
    "warm-up": (2, sleeping(), {}, "failed", 0, "status failed", None),
    "two of three": (4, sleeping(), {}, "failed", 2, "status failed", None),
    "all": (5, sleeping(), {}, "ok", 3, None, "give seq_len"),
    "traced": (6, sleeping(), {}, "ok", 3, None, "give seq_len"),
    "longer": (9, sleeping(), {}, "ok", 3, None, None),
    "no warm-up": (3, sleeping(), {"warmup_steps": 0}, "ok", 3, None, None),
    "one step": (1, sleeping(), {"warmup_steps": 0, "n_steps": 1}, "ok", 1, None, None),
    "stalled": (8, sleeping((4, 0.6)), {"n_steps": 6}, "ok", 6, None, "times the median"),
    "stalled before": (8, sleeping((1, 0.6)), {"n_steps": 6}, "ok", 6, None, None),
    "nan": (5, lambda step, i: setattr(step, "loss", float("nan")), {}, "ok", 3, "loss not finite", None),
    "no loss": (5, lambda step, i: None, {}, "ok", 3, None, None),
    "other tokens": (5, lambda step, i: setattr(step, "tokens", 8 * (i + 1)), {}, "ok", 3, None, None),
    "lengths": (5, lambda step, i: setattr(step, "seq_len", 8 + i % 2), {}, "ok", 3, None, "have [8, 9]"),
    "a length": (5, lambda step, i: setattr(step, "seq_len", 8), {}, "ok", 3, None, "mfu is null"),
    "no config": (5, sleeping(), {"config": None}, "ok", 3, None, "give config or flops_per_token"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_any_kind(name, measured, tmp_path):
    """Half a window is no window, and after the measured steps and the traced one nothing is written."""
    steps, body, options, status, n, invalid, remark = LOOPS[name]
    r = measured(steps, body, **options)
    assert r["status"] == status and r["metrics"]["n_measured_steps"] == n
    warmup, wanted = (options.get(key, SMALL[key]) for key in ("warmup_steps", "n_steps"))
    assert len(read_steps(tmp_path)) == min(steps, warmup + wanted)
    assert records_of(tmp_path)[0].invalid == ([invalid] if invalid else [])
    assert remark is None or noted(r, remark)
    assert name != "stalled" or noted(r, "times the median")
    assert (r["observed"] is not None) == (steps > warmup + wanted)
    if status == "failed":
        assert r["error"] == f"the loop ended after {n} of {wanted} measured steps"
    if name == "other tokens":
        assert [s["tokens"] for s in read_steps(tmp_path)] == [8, 16, 24, 32, 40]
        assert r["batch"]["tokens_per_step"] == 32 and r["args"]["tokens_per_step"] is None
        rate = (24 + 32 + 40) / r["metrics"]["window_s"]
        assert r["metrics"]["tokens_per_sec"] == pytest.approx(rate)


@pytest.mark.parametrize("every", [1, 3])
def test_micro_batches_are_parts_of_a_step(every, tmp_path):
    with meter_of(tmp_path, tokens_per_step=None, warmup_steps=1, seq_len=4) as meter:
        for i in range(5 * every):
            with meter.step(every=every) as step:
                step.loss, step.tokens = torch.tensor(float(i)), 8
                time.sleep(0.02)
                torch.ones(2).sum()
    r, steps = only_result(tmp_path), read_steps(tmp_path)
    assert r["status"] == "ok" and [s["tokens"] for s in steps] == 4 * [8 * every]
    assert [s["loss"] for s in steps] == [every * n + (every - 1) / 2 for n in range(4)]
    assert sum(s["data_time_s"] for s in steps) < 0.4 * sum(s["step_time_s"] for s in steps)
    assert r["observed"] and r["batch"]["global_batch"] == 2 * every


def test_a_failed_pause_or_micro_batch_leaves_no_wrong_window(tmp_path):
    """The pause still counts, and the step is done anew from its first micro batch."""
    with Meter(TINY, output_dir=tmp_path, quiet=True, warmup_steps=0, n_steps=2) as meter:
        for i in range(6):
            with contextlib.suppress(OSError), meter.step(every=2) as step:
                step.tokens, step.loss = 8, float(i)
                if i == 1:
                    raise OSError
            if i == 3:
                with contextlib.suppress(OSError), meter.paused():
                    time.sleep(0.3)
                    raise OSError
    r, steps = only_result(tmp_path), read_steps(tmp_path)
    assert [(s["tokens"], s["loss"]) for s in steps] == [(16, 2.5), (16, 4.5)]
    assert noted(r, "paused in the window") and r["metrics"]["window_s"] < 0.3
    with pytest.raises(ValueError, match="every=0"), meter_of(tmp_path) as meter:
        meter.step(every=0).__enter__()
    with meter_of(tmp_path) as meter:
        for _ in range(5):
            with meter.step():
                if meter._n == 4:
                    meter.stop()
                    break
    assert meter.result.error == "the loop ended after 2 of 3 measured steps"


def meter_of(directory, **options) -> Meter:
    return Meter(TINY, output_dir=directory, quiet=True, **SMALL | options)


def test_starting_and_stopping_without_with(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    meter = meter_of(tmp_path).start()
    assert signal.getsignal(signal.SIGTERM) != before
    for _ in range(5):
        with meter.step():
            pass
    meter.stop()
    meter.stop()
    assert signal.getsignal(signal.SIGTERM) == before  # or a second Meter would lose its steps
    assert meter.result.metrics.n_measured_steps == 3
    assert only_result(tmp_path)["status"] == "ok"


# How a process ends in the middle of a window: what it runs, its exit code, and its result.
ENDS = {
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -15, "interrupted", "interrupted by SIGTERM"),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP)", -1, "interrupted", "interrupted by SIGHUP"),
    "exit": ("sys.exit(3)", 3, "failed", "SystemExit: 3"),
    "error": ("raise KeyError('x')", 1, "failed", "KeyError: 'x'"),
    "end": ("break", 0, "failed", "RuntimeError: the process ended before the loop did"),
    "theirs": ("signal.signal(15, lambda *_: sys.exit(7)); os.kill(os.getpid(), 15)", 7, "failed",
               "SystemExit: 7"),
    "child": ("os.fork() or sys.exit(9); os.wait(); os.kill(os.getpid(), 15)", -15, "interrupted",
              "interrupted by SIGTERM"),
}  # fmt: skip


@pytest.mark.parametrize("with_statement", [True, False])
@pytest.mark.parametrize("name", ENDS)
def test_whatever_ends_a_process_all_steps_are_kept(name, with_statement, tmp_path):
    """Also those that were not yet on disk; the process ends as it does without a Meter."""
    do, code, status, error = ENDS[name]
    loop = f"for i in range(60):\n    with meter.step():\n        pass\n    if i == 49:\n        {do}\n"
    if with_statement:
        loop = "with meter:\n" + "".join(f"    {line}\n" for line in loop.splitlines())
        error = "the loop ended after 49 of 100 measured steps" if name == "end" else error
    else:
        loop = f"meter.start()\n{loop}"
        if name in ("exit", "theirs"):  # nobody tells
            error = "RuntimeError: the process ended before the loop did"
    (tmp_path / "loop.py").write_text(LOOP + loop)
    # A fork runs no atexit.
    start = forked if with_statement or name.startswith("SIG") else helpers.python
    start([], tmp_path / "loop.py", cwd=tmp_path, code=code)
    r = only_result(tmp_path / "runs")
    assert (r["status"], r["error"]) == (status, error) and len(read_steps(tmp_path / "runs")) == 50
    assert r["metrics"]["n_measured_steps"] == 49


def test_runs_without_settings_are_repeats_if_their_words_are_equal(tmp_path, monkeypatch):
    keys = []
    for i, words in enumerate(("", "--seed 3", "--seed=4", "--seeds 5")):
        monkeypatch.setattr(sys, "argv", ["a.py", "--lr", "1", *words.split()])
        keys.append(identity(*records_of(measure(tmp_path, run_name=f"r{i}"))))
    assert keys[0] == keys[1] == keys[2] != keys[3]


@pytest.mark.parametrize("options, error", [
    *((json.loads(options), error.replace("\\n", "\n"))
      for options, error in helpers.answers("meter_arguments.txt")),
    ({"settings": {"amp": torch.bfloat16}}, "settings.amp"), ({"config": nn.Linear(1, 1)}, "Linear"),
    ({"n_steps": np.float64(2.5)}, "n_steps"), ({"wrong": "s3cret"}, "Meter: 'wrong' is not an argument"),
])  # fmt: skip
def test_bad_arguments_are_errors_of_an_api(tmp_path, options, error):
    errors = ValueError, TypeError, RuntimeError
    with pytest.raises(errors, match=re.escape(error)) as refused:
        Meter(**{"config": TINY, "output_dir": str(tmp_path)} | SMALL | options)
    assert not list(tmp_path.iterdir()) and "s3cret" not in str(refused.value)


def test_bad_use_is_an_error_that_says_where(tmp_path, monkeypatch):
    def refused(message: str, context) -> None:
        with pytest.raises(RuntimeError, match=message), context:
            pass

    one, two = meter_of(tmp_path, run_name="once"), meter_of(tmp_path)
    refused("must be called between two steps; the meter is not started", one.step())
    with one:
        with one.step() as step:
            refused("the meter is inside a step", one.step())
            refused("the meter is inside a step", one.paused())
            step.loss = 1.0
        with one.step(every=2):
            pass
        refused("not micro batches", one.paused())
        with two:  # as in a notebook, after a loop that failed
            refused("must be called between two steps; the meter is at its end", one.step())
    refused("cannot be used twice", one)
    assert one.result.error == "RuntimeError: another Meter began"
    message = "exists already; nothing was touched, choose another run_name or"
    with pytest.raises(UsageError, match=message):
        meter_of(tmp_path, run_name="once").start()
    two_losses = pytest.raises((ValueError, RuntimeError), match=r"one element|2 elements")
    with two_losses, meter_of(tmp_path) as meter, meter.step() as step:
        step.loss = torch.zeros(2)
    with pytest.raises(ValueError, match=r"give tokens_per_step, or set step\.tokens"):
        measure(tmp_path, tokens_per_step=None)
    with pytest.raises(ValueError, match="no such file"):
        Meter("no-model.json", **SMALL)
    path = measure(tmp_path, config=None, name="meta-llama/Llama")
    assert path.parents[1] == tmp_path
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="a launcher started several ranks"):
        Meter(TINY, **SMALL)


@pytest.mark.parametrize("family", sorted(helpers.FAMILIES))
def test_configs_of_transformers_are_read_as_their_files(family, tmp_path):
    """The library writes more keys than a file has, and its own names of some."""
    from transformers import AutoConfig

    try:
        theirs = AutoConfig.for_model(**copy.deepcopy(helpers.FAMILIES[family]))  # it adds keys
    except Exception as error:
        pytest.skip(f"transformers does not read it: {str(error)[:80]}")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(helpers.FAMILIES[family]))
    ours, read = (Meter(config, seq_len=16, **SMALL) for config in (path, theirs))
    assert read.result.model.n_matmul_parameters == ours.result.model.n_matmul_parameters
    shapes = [meter.result.model.shape | {"name": None} for meter in (read, ours)]
    assert shapes[0] == shapes[1]
    flops = [meter._record.work.flops_per_token(16) for meter in (read, ours)]
    assert flops[0] == flops[1] and flops[1]


def trainer_of(out, model, warmup, measured, n=6, length=16, **options):
    """A Trainer of `n` steps whose measured run is in `out`."""
    from transformers import Trainer, TrainingArguments

    from llm_train_bench import HFMeterCallback

    ids = torch.randint(model.config.vocab_size, (40, length))
    samples = [{"input_ids": x, "labels": x} for x in ids]
    args = TrainingArguments(
        f"{out}-trainer", max_steps=n, per_device_train_batch_size=2, report_to=[],
        gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    callback = HFMeterCallback(warmup, measured, output_dir=out, quiet=True)
    data = {"train_dataset": samples, "eval_dataset": samples[:4]}
    return Trainer(model, args, **data, callbacks=[callback])


def test_the_trainers_steps(tmp_path):
    trainer = trainer_of(tmp_path / "runs", transformer(), 1, 4, logging_steps=1, seed=5)
    trainer.train()
    r, steps = only_result(tmp_path / "runs"), read_steps(tmp_path / "runs")
    assert r["status"] == "ok" and r["metrics"]["n_measured_steps"] == 4
    assert [s["tokens"] for s in steps] == 5 * [2 * 2 * 16]
    logged = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert [s["loss"] for s in steps] == pytest.approx(logged[:5], rel=1e-4)
    rates = [e["learning_rate"] for e in trainer.state.log_history if "loss" in e]
    assert [s["lr"] for s in steps] == pytest.approx(rates[:5])
    own = trained(tmp_path / "own", TINY, "--device cpu --amp off --bsz 2 --seq-len 16 --n-steps 1")
    assert r["metrics"]["flops_per_token_palm"] == own["metrics"]["flops_per_token_palm"]
    own_args = {"n_steps", "warmup_steps", "tokens_per_step", "seq_len"}
    said = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "seed": 5,
            "attention": "sdpa", "dtype": "float32"}  # fmt: skip
    assert {k: v for k, v in r["args"].items() if k not in own_args} == said
    assert r["environment"]["libraries"]["transformers"] and r["observed"]["matmuls"]


def test_the_trainer_evaluates_in_the_window_and_frozen_parameters_have_no_flops(tmp_path):
    model = transformer()
    model.get_input_embeddings().weight.requires_grad = False
    options = {"eval_strategy": "steps", "eval_steps": 2}
    trainer_of(tmp_path / "runs", model, 1, 3, 5, **options).train()
    r = only_result(tmp_path / "runs")
    assert noted(r, "paused in the window") and r["metrics"]["flops_per_token_palm"] is None
    assert noted(r, "FLOPs are unknown: some parameters are frozen; pass flops_per_token")
    assert [s["tokens"] for s in read_steps(tmp_path / "runs")] == 4 * [64]


def test_a_training_that_fails_is_no_finished_one(tmp_path):
    """The Trainer tells callbacks of no exception: the next training does, as in a notebook."""
    from transformers import OPTConfig, OPTForCausalLM

    small = dict(hidden_size=16, ffn_dim=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=50,
                 word_embed_proj_dim=16, max_position_embeddings=32)  # fmt: skip
    trainer = trainer_of(tmp_path / "runs", OPTForCausalLM(OPTConfig(**small)), 1, 3, 9)
    right, calls = trainer.training_step, []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 8:
            raise ValueError("broken")
        return right(*args, **kwargs)

    trainer.training_step = broken
    with pytest.raises(ValueError):
        trainer.train()
    trainer.evaluate()  # in the middle of the meter's step
    trainer.args.output_dir = str(tmp_path / "again")
    (callback,) = [c for c in trainer.callback_handler.callbacks if hasattr(c, "_counts")]
    callback._options["output_dir"] = tmp_path / "other"
    trainer.train()  # its tokens are not counted twice
    assert only_result(tmp_path / "other")["status"] == "ok"
    assert {s["tokens"] for s in read_steps(tmp_path / "other")} == {64}
    r = only_result(tmp_path / "runs")
    assert r["status"] == "failed" and r["error"] == "RuntimeError: another training began"
    assert r["metrics"]["n_measured_steps"] == 2 and r["metrics"]["mfu"] is None
    assert noted(r, "FLOPs are unknown") and noted(r, "model_type")


def test_the_program_in_the_docs_measures_what_it_runs(tmp_path):
    program = re.search(
        r"```python\n(import torch\nfrom transf.*?)```", (ROOT / "docs/PYTHON.md").read_text(), re.S
    )
    (tmp_path / "trainer.py").write_text(program[1].replace("configs/gpt2-tiny.json", TINY))
    forked(tmp_path / "trainer.py", cwd=tmp_path)
    r = only_result(tmp_path / "runs")
    flags = "--device cpu --amp off --bsz 1 --seq-len 128 --n-steps 1"
    own = trained(tmp_path / "own", TINY, flags)
    assert r["status"] == "ok" and r["metrics"]["n_measured_steps"] == 20
    assert r["batch"]["tokens_per_step"] == 4 * 128
    assert r["metrics"]["flops_per_token_causal"] == own["metrics"]["flops_per_token_causal"]
    assert r["metrics"]["first_loss"] == pytest.approx(5.55, abs=0.2)


def test_lightnings_steps(tmp_path):
    """Of accumulated batches, with a validation and a save between two measured steps."""
    import lightning

    from llm_train_bench import LightningMeterCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.told = nn.Linear(4, 1), []

        def training_step(self, batch, index):
            loss = self.layer(batch).mean()
            self.told.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            time.sleep(0.1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(name, n=6, **options) -> tuple[Model, dict]:
        sizes = dict(tokens_per_step=8, warmup_steps=1, n_steps=4)
        callback = LightningMeterCallback(None, output_dir=tmp_path / name, quiet=True, **sizes)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=n, logger=False, enable_progress_bar=False, callbacks=[callback],
            enable_model_summary=False, default_root_dir=tmp_path, **options,
        )  # fmt: skip
        model, data = Model(), torch.utils.data.DataLoader(torch.randn(40, 4), 2)
        validation = torch.utils.data.DataLoader(torch.randn(2, 4), 2)
        trainer.validate(model, validation, verbose=False)
        trainer.fit(model, data, validation)
        trainer.validate(model, validation, verbose=False)
        return model, only_result(tmp_path / name)

    quiet = {"enable_checkpointing": False, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    model, r = fit("plain", accumulate_grad_batches=2, **quiet)
    losses = [s["loss"] for s in read_steps(tmp_path / "plain")]
    pairs = zip(model.told[::2], model.told[1::2], strict=True)
    assert losses == pytest.approx([sum(pair) / 2 for pair in pairs][:5]) and r["observed"]
    assert r["status"] == "ok" and not noted(r, "paused")
    _, r = fit("paused", val_check_interval=3, enable_checkpointing=True)
    assert r["metrics"]["window_s"] < 0.1 and noted(r, "paused in the window")
    _, r = fit("short", 3, **quiet)
    assert r["error"] == "the loop ended after 2 of 4 measured steps"
    # Twenty batches make six steps of three, and one of two.
    _, r = fit("partial", 8, accumulate_grad_batches=3, limit_train_batches=5, **quiet)
    assert [s["tokens"] for s in read_steps(tmp_path / "partial")] == [8, 5, 8, 5, 8]
    _, r = fit("inside", accumulate_grad_batches=4, val_check_interval=10)
    assert noted(r, "paused inside a step")


def test_a_profiler_of_the_loop_is_left_alone(measured, tmp_path):
    """A second profiler would destroy its trace; the figures under one are no undisturbed run's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        r = measured(7, lambda step, i: torch.ones(3).sum())
    assert any("aten::sum" in event.key for event in profiler.key_averages())
    assert r["observed"] is None
    assert noted(r, "not observed: the loop has a profiler on")
    assert read_result(tmp_path / r["run_name"]).invalid == ["a profiler was on in the window"]
    with pytest.raises(OSError), torch.profiler.profile():
        measure(tmp_path / "failed", 4, lambda step, i: Path("absent").stat() if i == 3 else None)
    assert noted(only_result(tmp_path / "failed"), "a profiler was on in the window")


@pytest.mark.parametrize("name, value, fails", [
    ("tokens", np.int64(64), 0), ("tokens", torch.tensor(64), 0), ("tokens", 0, 1), ("tokens", 2.5, 1),
    ("tokens", -5, 1), ("tokens", "x", 1), ("lr", np.float32(0.5), 0), ("lr", torch.tensor(0.5), 0),
    ("lr", [0.1], 1), ("lr", torch.zeros(2), 1), ("loss", "abc", 1), ("loss", [1.0], 1),
    ("loss", torch.ones(1) * 1j, 1), ("loss", 10**400, 1), ("seq_len", np.int32(8), 0),
    ("seq_len", 1.5, 1),
    ("loss", np.float64(2), 0), ("loss", torch.ones(1, 1, requires_grad=True), 0), ("lr", None, 0),
])  # fmt: skip
def test_what_a_step_tells_is_a_number_of_any_library(tmp_path, name, value, fails):
    refusal = pytest.raises((ValueError, TypeError, ArithmeticError, RuntimeError))
    with refusal if fails else contextlib.nullcontext():
        measure(tmp_path, 6, lambda step, i: setattr(step, name, value))
    assert only_result(tmp_path)["status"] == ("failed" if fails else "ok")
    if not fails and name != "seq_len":
        wanted = None if value is None else float(value)
        assert {s[name] for s in read_steps(tmp_path)} == {wanted}
    meter = Meter(TINY, output_dir=tmp_path, **SMALL)
    with pytest.raises(ValueError, match="token"), meter, meter.step() as step:
        step.token = 3


def test_a_generator_or_a_program_that_ends_has_not_failed(tmp_path):
    def batches(name):
        with Meter(TINY, output_dir=tmp_path / name, quiet=True, **SMALL) as meter:
            while True:
                with meter.step():
                    yield meter

    for i, _ in enumerate(batches("generator")):
        if i == 5:
            break
    for code, status in ((0, "ok"), (3, "failed")):
        out = tmp_path / str(code)
        with pytest.raises(SystemExit):
            measure(out, 6, lambda step, i, code=code: sys.exit(code) if i == 5 else None)
        assert only_result(out)["status"] == status
    r = only_result(tmp_path / "generator")
    assert r["status"] == "ok" and r["metrics"]["n_measured_steps"] == 3


def test_settings_of_a_loop_are_not_our_flags(measured, tmp_path):
    """A loop's `profile` is no profiler, and TensorBoard shows no defaults of flags that it has not."""
    r = measured(6, settings={"profile": "fast", "nsys_start": 3, "sample": 7})
    assert read_result(tmp_path / r["run_name"]).invalid == []
    events = EventAccumulator(str(tmp_path / r["run_name"] / "tensorboard")).Reload()
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    shown = HParamsPluginData.FromString(content).session_start_info.hparams
    names = {"model", "profile", "nsys_start", "sample", "tokens_per_step", "seq_len"}
    assert shown.keys() == names and shown["sample"].number_value == 7


def test_a_loop_may_change_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measure(Path("runs"), 6, lambda step, i: os.chdir("/"))
    assert only_result(tmp_path / "runs")["metrics"]["n_measured_steps"] == 3
    assert len(read_steps(tmp_path / "runs")) == 5


def test_a_trainer_whose_work_is_not_the_configs_has_no_flops(tmp_path):
    """A classifier has no head of the vocabulary, and two models of one class are two models."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    hashes = []
    for layers in (1, 2):
        content = json.loads(Path(TINY).read_text()) | {"n_layer": layers, "pad_token_id": 0}
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**content))
        trainer = trainer_of(tmp_path / f"{layers}", model, 1, 2, 3)
        trainer.train_dataset = [{"input_ids": torch.ones(16, dtype=int), "labels": 0}] * 40
        trainer.train()
        r = only_result(tmp_path / f"{layers}")
        assert r["metrics"]["flops_per_token_palm"] is None and r["metrics"]["tokens_per_sec"] > 0
        assert noted(r, "and its config says")
        hashes.append(r["model"]["hash"])
    assert len(set(hashes)) == 2


def test_a_training_goes_on_where_nothing_can_be_counted(tmp_path, capsys):
    model = transformer()
    trainer = trainer_of(tmp_path / "runs", model, 1, 2, 3)
    embeds = torch.zeros(16, model.config.hidden_size)
    trainer.train_dataset = [{"inputs_embeds": embeds, "labels": torch.ones(16, dtype=int)}] * 40
    trainer.train()
    assert trainer.state.global_step == 3
    r = only_result(tmp_path / "runs")
    assert r["status"] == "failed" and "tokens=0: give tokens_per_step" in r["error"]
    trainer.args._n_gpu = 2
    begin = trainer.callback_handler.on_train_begin
    begin(trainer.args, trainer.state, trainer.control)
    assert "nothing is measured: ranks must have devices" in capsys.readouterr().err


def two_measured_trainings(rank, directory, port):
    """A rank of two: a Trainer of its own, then a loop that ends earlier on rank 1."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    os.environ |= where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(directory)
    PartialState._reset_state()  # this process was forked from one without ranks
    torch.manual_seed(0)
    trainer = trainer_of("runs", transformer(), 1, 2, 3, 8 if rank else 16, logging_steps=1)
    for sample in trainer.train_dataset:  # labels are not in proportion to tokens
        sample["labels"] = sample["input_ids"].clone()
        sample["labels"][:-4] = -100
    trainer.train()
    if rank == 0:
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path("losses").write_text(json.dumps(logged))
    sizes = dict(tokens_per_step=64, seq_len=8, warmup_steps=1, n_steps=4)
    with Meter(TINY, output_dir="uneven", quiet=True, **sizes) as meter:
        for i in range(3 if rank else 6):
            with meter.step() as step:
                step.loss = 1.0
            if i == rank == 1:
                with meter.paused():
                    pass
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


def test_two_ranks_that_end_apart_and_a_trainer_of_two(tmp_path):
    """Ranks that measure different steps are invalid; a loss is not halved by another rank's tokens."""
    args = tmp_path, str(helpers.free_port())
    torch.multiprocessing.start_processes(two_measured_trainings, args, 2, start_method="fork")
    uneven = only_result(tmp_path / "uneven")
    reasons = [r["text"] for r in uneven["remarks"] if r["kind"] == "invalid"]
    assert "paused in the window" in reasons  # of the other rank
    assert "ranks measured different numbers of steps: 2 to 4" in reasons
    logged = json.loads((tmp_path / "losses").read_text())
    losses = [s["loss"] for s in read_steps(tmp_path / "runs")]
    assert losses == pytest.approx(logged, rel=0.1) and len(losses) == 3
    assert only_result(tmp_path / "runs")["batch"]["tokens_per_step"] == 2 * 2 * (8 + 16)


def test_a_compiled_model_is_not_compiled_again_for_the_callback(tmp_path):
    """Its hook looks on from outside the graphs."""
    torch._dynamo.reset()
    options = {"torch_compile": True, "torch_compile_backend": "eager", "warmup_steps": 2}
    trainer_of(tmp_path / "runs", transformer(), 1, 3, 5, adam_beta2=0.5, **options).train()
    r = only_result(tmp_path / "runs")
    told = {"adam_beta2": 0.5, "lr_warmup_steps": 2, "warmup_steps": 1, "torch_compile": True}
    assert told.items() <= r["args"].items() and "disable_tqdm" not in r["args"]
    assert r["metrics"]["n_recompilations"] == 0
    assert not r["metrics"]["window_compile_s"] and r["metrics"]["n_measured_steps"] == 3
    assert [s["tokens"] for s in read_steps(tmp_path / "runs")] == 4 * [64]


def test_settings_of_a_loop_are_compared_and_told_apart(tmp_path, output_of, monkeypatch):
    """Nobody knows whether they change what is learnt, so they refuse no comparison."""
    paths = []
    for compiled in (False, False, False, True, True, True):
        monkeypatch.setattr(sys, "argv", ["a.py", "--out", f"x{len(paths)}"])
        # Our own flag n_workers tells no runs apart; this one is of their loop.
        settings = {"compile": compiled, "bsz": 8, "n_workers": int(compiled)}
        options = {"seq_len": 8, "run_name": f"r{len(paths)}", "settings": settings}
        paths.append(measure(tmp_path, 5, lambda step, i: time.sleep(0.001), **options))
    output_of(compare.main, tmp_path, "--output-dir", tmp_path / "out")
    rows = json.loads((tmp_path / "out/compare.json").read_text())["settings"]
    assert [row["runs"] for row in rows] == [3, 3]
    assert not any("not compared" in row["verdict"] for row in rows)
    assert {row["setting"] for row in rows} == {"no compile, n-workers 0", "compile, n-workers 1"}
    runs = records_of(*paths)
    assert len(set(map(identity, runs))) == len(set(map(name_by_itself, runs))) == 2
    assert "n-workers 1" in name_by_itself(runs[5])


@pytest.mark.parametrize("words, shown", helpers.answers("shown_commands.txt"))
def test_a_command_is_shown_without_secrets_and_places(words, shown):
    assert " ".join(shown_command(words.split())) == shown
    secrets = ['{"api_key": "abc", "b": 1}', "X-Auth: a"]
    assert redact_command(secrets) == ['{"api_key": "...", "b": 1}', "X-Auth:..."]
