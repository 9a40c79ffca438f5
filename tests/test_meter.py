"""Meter and HFMeterCallback: measured loops of others, and that their results are read as any run's."""

import contextlib
import copy
import json
import os
import re
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
from llm_train_bench.base.files import shown_command, without_secrets
from llm_train_bench.compare.setting import identity, name_by_itself
from llm_train_bench.formulas.flops import flops_per_token
from llm_train_bench.model.config import load_config
from llm_train_bench.model.json_keys import ConfigError
from llm_train_bench.results.result_files import read_result
from llm_train_bench.run import meter as meter_module
from llm_train_bench.run.meter import Meter
from tests import helpers
from tests.helpers import ROOT, noted, only_result, read_steps, records_of, trained
from tests.processes import TORCHRUN, forked

TINY = str(ROOT / "configs/gpt2-tiny.json")
SMALL = {"tokens_per_step": 32, "warmup_steps": 2, "n_steps": 3}


def measure(directory, steps=5, body=lambda step, i: None, config=TINY, **options) -> Path:
    """The result.json of a loop under a Meter."""
    with Meter(config, output_dir=directory, quiet=True, **SMALL | options) as meter:
        for i in range(steps):
            with meter.step() as step:
                body(step, i)
    return meter.directory / "result.json"


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
    with Meter(TINY, output_dir=tmp_path, tokens_per_step=64, warmup_steps=1, n_steps=3) as meter:
        while not meter.done:
            ids = torch.randint(model.config.vocab_size, (2, 32))
            with meter.step() as step:
                step.loss = model(input_ids=ids, labels=ids).loss
                step.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    theirs = json.loads((meter.directory / "result.json").read_text())
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
    assert list((meter.directory / "tensorboard").iterdir())
    (record,) = records_of(meter.directory)
    assert record.invalid == [] and record.tokens_per_sec_per_gpu and record.step_times_s


def test_step_times_add_up_and_hold_the_time_between_steps(tmp_path):
    with Meter(flops_per_token=1e6, output_dir=tmp_path, quiet=True, **SMALL) as meter:
        began = time.perf_counter()
        for _ in range(5):
            time.sleep(0.02)  # as a loader does
            with meter.step():
                time.sleep(0.01)
                with meter.part("forward"):
                    time.sleep(0.01)
        elapsed = time.perf_counter() - began
    r, steps = only_result(tmp_path), read_steps(tmp_path)
    assert all(s["data_time_s"] >= 0.02 and s["forward_time_s"] >= 0.02 for s in steps)
    assert all(s["step_time_s"] >= 0.04 and s["backward_time_s"] is None for s in steps)
    assert sum(s["step_time_s"] for s in steps) <= elapsed
    assert r["metrics"]["window_s"] == pytest.approx(sum(s["step_time_s"] for s in steps[2:]))
    m = r["metrics"]
    assert m["model_tflops_per_gpu"] == pytest.approx(m["tokens_per_sec"] / 1e6)
    assert m["flops_per_token_causal"] is m["mfu_causal"] is None


def test_the_device_is_waited_for_at_the_windows_ends_alone(measured, monkeypatch):
    waited, n = [], []
    monkeypatch.setattr(meter_module, "synchronize", lambda device: waited.append(len(n)))
    measured(6, lambda step, i: n.append(i))
    assert set(waited) <= {2, 5, 6} and {2, 5} <= set(waited)


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


@pytest.mark.parametrize("steps, measured_steps, note", [
    (1, 0, "the loop ended after 0 of 3 measured steps"),
    (4, 2, "the loop ended after 2 of 3 measured steps"),
    (5, 3, "mfu and TFLOP/s are null: no seq_len was given; lengths seen: none"),
    (9, 3, None),
])  # fmt: skip
def test_a_loop_of_any_length(measured, tmp_path, steps, measured_steps, note):
    """After the measured steps and the traced one nothing is written."""
    embed = nn.Embedding(9, 4)
    r = measured(steps, lambda step, i: embed(torch.arange(8).view(2, 4)).sum().backward())
    assert r["status"] == "ok" and r["metrics"]["n_measured_steps"] == measured_steps
    assert len(read_steps(tmp_path)) == min(steps, 5)
    assert note is None or noted(r, note)
    assert records_of(tmp_path)[0].invalid == ([note] if steps < 5 else [])
    assert (r["observed"] is not None) == (steps > 5)
    if steps > 5:  # no attention ran, and the look-up has four tokens a sample
        assert r["observed"]["attention"] == {"forward": [], "backward": []}
        assert r["batch"]["seq_len"] == 4 and r["metrics"]["flops_per_token_palm"]


def test_losses_that_are_unknown_and_not_finite(tmp_path):
    assert read_result(measure(tmp_path, 6)).invalid == []
    path = measure(tmp_path, 6, lambda step, i: setattr(step, "loss", torch.tensor(float("nan"))))
    assert read_result(path).invalid == ["loss not finite"]


def test_an_evaluation_between_steps_belongs_to_none(tmp_path):
    with Meter(TINY, output_dir=tmp_path, quiet=True, **SMALL) as meter:
        for _ in range(6):
            with meter.step():
                pass
            time.sleep(0.05)
            meter.paused("evaluation")
    r = only_result(tmp_path)
    assert r["metrics"]["window_evaluations"] == 3 and r["metrics"]["window_s"] < 0.05
    path = tmp_path / r["run_name"] / "result.json"
    assert read_result(path).invalid == ["evaluated in the window"]


def test_runs_without_settings_are_repeats_if_their_words_are_equal(tmp_path, monkeypatch):
    keys = []
    for i, argv in enumerate(("a.py --lr 1", "a.py --lr 1", "a.py --lr 2")):
        monkeypatch.setattr(sys, "argv", argv.split())
        keys.append(identity(*records_of(measure(tmp_path, run_name=f"r{i}"))))
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("options, error", [
    *((json.loads(options), error) for options, error in helpers.answers("meter_arguments.txt")),
    ({"settings": {"amp": torch.bfloat16}}, "settings.amp=torch.bfloat16: Input should be a valid"),
    ({"config": nn.Linear(1, 1)}, "must be a path, the content of a config.json, or a config of"),
])  # fmt: skip
def test_bad_arguments_are_one_line(tmp_path, options, error):
    with pytest.raises(UsageError, match=re.escape(error)):
        Meter(**{"config": TINY, "output_dir": tmp_path} | SMALL | options)
    assert not list(tmp_path.iterdir())


def test_bad_use_is_one_line(tmp_path, monkeypatch):
    def refused(message: str, context) -> None:
        with pytest.raises(UsageError, match=message), context:
            pass

    def meter_of(**options) -> Meter:
        return Meter(TINY, output_dir=tmp_path, quiet=True, **SMALL | options)

    one, two = meter_of(run_name="once"), meter_of()
    refused("must be called between two steps; the meter is not entered", one.step())
    with one:
        refused("another one is open in this process", two)
        refused("must be called inside a step", one.part("forward"))
        with pytest.raises(UsageError, match="'checkpoint' is not evaluation or save"):
            one.paused("checkpoint")
        with one.step() as step:
            refused("the meter is inside a step", one.step())
            refused("is not data, forward, backward", one.part("loss"))
            with one.part("forward"):
                refused("the meter is inside a part", one.part("backward"))
                with pytest.raises(UsageError, match="the meter is inside a part"):
                    one.paused("save")
            step.loss = 1.0
    refused("the meter is at its end", one.step())
    refused("cannot be used twice", one)
    refused("exists already", meter_of(run_name="once"))
    with two, two.step():
        pass
    same_second = meter_of()  # under another name
    two_losses = pytest.raises(UsageError, match=r"step\.loss=.* has 2 elements")
    with two_losses, same_second, same_second.step() as step:
        step.loss = torch.zeros(2)
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ConfigError, match="no such file"):
        Meter("no-model.json", **SMALL)
    path = measure(tmp_path, config=None, name="meta-llama/Llama")
    assert path.parents[1] == tmp_path
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="a launcher started several ranks"):
        Meter(TINY, **SMALL)


@pytest.mark.parametrize("family", sorted(helpers.FAMILIES))
def test_configs_of_transformers_are_read_as_their_files(family, tmp_path):
    """The library writes more keys than a file has, and its own names of some."""
    from transformers import AutoConfig

    try:
        theirs = AutoConfig.for_model(**copy.deepcopy(helpers.FAMILIES[family]))  # it adds keys
    except Exception as error:
        pytest.skip(f"transformers does not read it: {error}")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(helpers.FAMILIES[family]))
    ours, read = (Meter(config, seq_len=16, **SMALL) for config in (path, theirs))
    assert read.flops_per_token == ours.flops_per_token and ours.flops_per_token


def trainer_of(out, model, warmup, measured, n=6, length=16, **options):
    """A Trainer of `n` steps whose measured run is in `out`, and its callback."""
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
    return Trainer(model, args, **data, callbacks=[callback]), callback


def test_the_trainers_steps(tmp_path):
    trainer, _ = trainer_of(tmp_path / "runs", transformer(), 1, 4, logging_steps=1)
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
    assert r["args"]["grad_acc_steps"] == 2 and r["args"]["amp"] == "off"
    ours = {"bsz", "grad_clip", "lr", "lr_warmup_steps", "optimizer", "pt_compile", "weight_decay"}
    assert ours < set(r["args"]) and {"optim", "learning_rate", "bf16"}.isdisjoint(r["args"])
    assert r["environment"]["libraries"]["transformers"] and r["observed"]["matmuls"]


def test_the_trainer_evaluates_in_the_window_and_frozen_parameters_have_no_flops(tmp_path):
    model = transformer()
    model.get_input_embeddings().weight.requires_grad = False
    options = {"eval_strategy": "steps", "eval_steps": 2}
    trainer_of(tmp_path / "runs", model, 1, 3, 5, **options)[0].train()
    r = only_result(tmp_path / "runs")
    assert r["metrics"]["window_evaluations"] == 1 and r["metrics"]["flops_per_token_palm"] is None
    assert noted(r, "FLOPs are unknown: some parameters are frozen; pass flops_per_token")
    assert [s["tokens"] for s in read_steps(tmp_path / "runs")] == 4 * [64]


@pytest.mark.parametrize("next_training", [False, True])
def test_a_training_that_fails_is_no_finished_one(next_training, tmp_path, monkeypatch):
    """The Trainer tells callbacks of no exception: the end of the process does, or the next training."""
    from transformers import OPTConfig, OPTForCausalLM

    small = dict(hidden_size=16, ffn_dim=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=50,
                 word_embed_proj_dim=16, max_position_embeddings=32)  # fmt: skip
    model = OPTForCausalLM(OPTConfig(**small))
    trainer, callback = trainer_of(tmp_path / "runs", model, 1, 3, 9)
    right, calls = trainer.training_step, []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 8:
            raise ValueError("broken")
        return right(*args, **kwargs)

    trainer.training_step = broken
    with pytest.raises(ValueError) as raised:
        trainer.train()
    if next_training:  # as in a notebook: with a callback of its own
        trainer_of(tmp_path / "other", transformer(), 1, 1, 3)[0].train()
        assert only_result(tmp_path / "other")["status"] == "ok"
        error = "RuntimeError: another Meter began"
    else:
        monkeypatch.setattr(sys, "last_value", raised.value, raising=False)
        callback._left()
        error = "ValueError: broken"
    r = only_result(tmp_path / "runs")
    assert r["status"] == "failed" and r["error"] == error
    assert r["metrics"]["n_measured_steps"] == 2 and r["metrics"]["mfu"] is None
    assert noted(r, "FLOPs are unknown") and noted(r, "model_type")


@pytest.mark.parametrize(
    ("name", "ranks"), [("trainer", 1), ("lightning_loop", 1), ("accelerate_loop", 2)]
)
def test_examples_measure_what_they_run(tmp_path, name, ranks):
    launcher = [*TORCHRUN[1:], ranks] if ranks > 1 else []
    # A fork's accelerate would keep this process' ranks.
    start = helpers.python if launcher else forked
    start(launcher, ROOT / f"examples/{name}.py", TINY, cwd=tmp_path)
    r = only_result(tmp_path / "runs")
    tokens = {1: 4 * 128, 2: 4 * 128 * 2 * 2}[ranks]
    flags = "--device cpu --amp off --bsz 1 --seq-len 128 --n-steps 1"
    own = trained(tmp_path / "own", TINY, flags)
    assert r["status"] == "ok" and r["metrics"]["n_measured_steps"] == 20
    assert r["device"]["count"] == ranks and r["batch"]["tokens_per_step"] == tokens
    assert r["metrics"]["flops_per_token_causal"] == own["metrics"]["flops_per_token_causal"]
    assert len(r["ranks"]) == (ranks if ranks > 1 else 0)
    assert r["metrics"]["first_loss"] == pytest.approx(5.55, abs=0.2)
    assert bool(r["observed"]["collectives"]) == (ranks > 1)


def test_the_public_names_are_those_of_the_page():
    page = (ROOT / "docs/PYTHON.md").read_text()
    assert set(re.findall(r"^## `(\w+)`", page, re.MULTILINE)) == set(llm_train_bench.__all__)
    for name in llm_train_bench.__all__:
        assert getattr(llm_train_bench, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Meters'"):
        llm_train_bench.Meters  # noqa: B018


def test_a_profiler_of_the_loop_is_left_alone(measured, tmp_path):
    """A second profiler would destroy its trace; the figures under one are no undisturbed run's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        r = measured(7, lambda step, i: torch.ones(3).sum())
    assert any("aten::sum" in event.key for event in profiler.key_averages())
    assert r["observed"] is None
    assert noted(r, "not observed: the loop has a profiler on")
    invalid = read_result(tmp_path / r["run_name"] / "result.json").invalid
    assert invalid == ["a profiler was on in the window"]


WHOLE, NUMBER = "Input should be (a valid integer|greater)", "Input should be a valid number"


@pytest.mark.parametrize("name, value, error", [
    ("tokens", np.int64(64), None), ("tokens", torch.tensor(64), None), ("tokens", 0, WHOLE),
    ("tokens", True, WHOLE), ("tokens", 2.5, WHOLE), ("tokens", -5, WHOLE),
    ("lr", np.float32(0.5), None), ("lr", torch.tensor(0.5), None), ("lr", [0.1], NUMBER),
    ("lr", torch.zeros(2), NUMBER), ("loss", "abc", NUMBER), ("loss", [1.0], NUMBER),
    ("loss", torch.ones(1) * 1j, NUMBER), ("loss", 10**400, NUMBER),
])  # fmt: skip
def test_what_a_step_tells_is_a_number_of_any_library(tmp_path, name, value, error):
    refusal = pytest.raises(UsageError, match=rf"step\.{name}=.* {error}")
    with refusal if error else contextlib.nullcontext():
        measure(tmp_path, 6, lambda step, i: setattr(step, name, value))
    assert only_result(tmp_path)["status"] == ("failed" if error else "ok")
    assert error or {s[name] for s in read_steps(tmp_path)} == {float(value)}
    with pytest.raises(AttributeError):
        meter_module.MeterStep().token = 3


def test_steps_of_other_sizes_have_the_rates_of_their_tokens(measured, tmp_path):
    """A last, smaller step does not hide the samples' length, and samples/s follow from the tokens."""
    embed = nn.Embedding(9, 4)

    def body(step, i):
        step.tokens = 32 if i == 4 else 64
        embed(torch.zeros(2, 16, dtype=torch.long))

    r = measured(7, body, tokens_per_step=None)
    m = r["metrics"]
    assert [s["tokens"] for s in read_steps(tmp_path)] == [64, 64, 64, 64, 32]
    assert r["batch"]["tokens_per_step"] == 53
    assert r["batch"]["seq_len"] == 16 and r["batch"]["global_batch"] is None  # 53.3 tokens a step
    assert m["flops_per_token_palm"] == flops_per_token(load_config(TINY), 16, False)
    assert m["tokens_per_sec"] == pytest.approx((64 + 64 + 32) / m["window_s"])
    assert m["samples_per_sec"] == pytest.approx((4 + 4 + 2) / m["window_s"])


def test_a_generator_or_a_program_that_ends_has_not_failed(tmp_path):
    def batches(name):
        with Meter(TINY, output_dir=tmp_path / name, quiet=True, **SMALL) as meter:
            while True:
                with meter.step():
                    yield meter

    for meter in batches("generator"):
        if meter.n == 5:
            break
    for code, status in ((0, "ok"), (3, "failed")):
        out = tmp_path / str(code)
        with pytest.raises(SystemExit):
            measure(out, 5, lambda step, i, code=code: sys.exit(code) if i == 4 else None)
        assert only_result(out)["status"] == status
    r = only_result(tmp_path / "generator")
    assert r["status"] == "ok" and r["metrics"]["n_measured_steps"] == 3


def test_settings_of_a_loop_are_not_our_flags(measured, tmp_path):
    """A loop's `profile` is no profiler, and TensorBoard shows no defaults of flags that it has not."""
    measured(6, settings={"profile": "fast", "nsys_start": 3, "sample": 7})
    (path,) = tmp_path.glob("*/result.json")
    assert read_result(path).invalid == []
    events = EventAccumulator(str(path.parent / "tensorboard")).Reload()
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    shown = HParamsPluginData.FromString(content).session_start_info.hparams
    names = {"model", "profile", "nsys_start", "sample", "tokens_per_step", "seq_len"}
    assert shown.keys() == names and shown["sample"].number_value == 7


def test_a_loop_may_change_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measure("runs", 6, lambda step, i: os.chdir("/"))
    assert only_result(tmp_path / "runs")["metrics"]["n_measured_steps"] == 3
    assert len(read_steps(tmp_path / "runs")) == 5


def test_several_lengths_are_no_length(measured):
    """Of images, of samples that are grouped by length, or where one does not divide the tokens."""
    embed = nn.Embedding(9, 4)

    def body(*lengths):
        return lambda step, i: [embed(torch.zeros(1, n, dtype=torch.long)) for n in lengths]

    r = measured(7, body(16, 577))
    assert r["batch"]["seq_len"] is r["metrics"]["flops_per_token_palm"] is None
    assert noted(r, "no seq_len was given; lengths seen: [16, 577]")


def test_a_group_with_train_py_is_named_by_what_both_know(tmp_path, output_of, monkeypatch):
    secrets = ["--hf-token", "hf_SECRET", "--key=SECRET2", "https://u:SECRET3@host/x"]
    monkeypatch.setattr(sys, "argv", ["theirs.py", *secrets, '{"p": "/home/alice/z"}'])
    argv = "--device cpu --amp off --bsz 1 --seq-len 32 --n-steps 3 --warmup-steps 1"
    trained(tmp_path / "own", TINY, argv)
    text = measure(tmp_path / "theirs", seq_len=32).read_text()
    assert "SECRET" not in text and "://...@host/x" in text
    out = tmp_path / "out"
    shown = output_of(compare.main, tmp_path / "own", tmp_path / "theirs", "--output-dir", out)
    (out / "all").write_text(shown)
    for path in out.iterdir():
        assert not re.search("SECRET|alice", path.read_text()), path
    names = {row["setting"] for row in json.loads((out / "compare.json").read_text())["settings"]}
    assert names == {"train", "Meter in theirs"}


def test_a_trainer_whose_work_is_not_the_configs_has_no_flops(tmp_path):
    """A classifier has no head of the vocabulary, and two models of one class are two models."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    hashes = []
    for layers in (1, 2):
        content = json.loads(Path(TINY).read_text()) | {"n_layer": layers, "pad_token_id": 0}
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**content))
        trainer, _ = trainer_of(tmp_path / f"{layers}", model, 1, 2, 3)
        trainer.train_dataset = [{"input_ids": torch.ones(16, dtype=int), "labels": 0}] * 40
        trainer.train()
        r = only_result(tmp_path / f"{layers}")
        assert r["metrics"]["flops_per_token_palm"] is None and r["metrics"]["tokens_per_sec"] > 0
        assert noted(r, "and its config says")
        hashes.append(r["model"]["hash"])
    assert len(set(hashes)) == 2


def test_a_training_goes_on_where_nothing_can_be_counted(tmp_path, capsys):
    model = transformer()
    trainer, _ = trainer_of(tmp_path / "runs", model, 1, 2, 3)
    embeds = torch.zeros(16, model.config.hidden_size)
    trainer.train_dataset = [{"inputs_embeds": embeds, "labels": torch.ones(16, dtype=int)}] * 40
    trainer.train()
    assert trainer.state.global_step == 3
    r = only_result(tmp_path / "runs")
    assert r["status"] == "failed" and "given no input_ids; pass tokens_per_step" in r["error"]
    trainer.args._n_gpu = 2
    begin = trainer.callback_handler.on_train_begin
    begin(trainer.args, trainer.state, trainer.control)
    assert "nothing is measured: one process uses 2 GPUs" in capsys.readouterr().err


def two_measured_trainings(rank, directory, port):
    """A rank of two: a Trainer of its own, then a loop that ends earlier on rank 1."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    os.environ |= where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(directory)
    PartialState._reset_state()  # this process was forked from one without ranks
    torch.manual_seed(0)
    trainer, _ = trainer_of("runs", transformer(), 1, 2, 3, 8 if rank else 16, logging_steps=1)
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
                meter.paused("save")
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


def test_two_ranks_that_end_apart_and_a_trainer_of_two(tmp_path):
    """Ranks that measure different steps are invalid; a loss is not halved by another rank's tokens."""
    args = tmp_path, str(helpers.free_port())
    torch.multiprocessing.start_processes(two_measured_trainings, args, 2, start_method="fork")
    uneven = only_result(tmp_path / "uneven")
    assert uneven["metrics"]["window_saves"] == 1  # of the other rank
    reasons = [r["text"] for r in uneven["remarks"] if r["kind"] == "invalid"]
    assert "ranks measured different numbers of steps: 2 to 4" in reasons
    logged = json.loads((tmp_path / "losses").read_text())
    losses = [s["loss"] for s in read_steps(tmp_path / "runs")]
    assert losses == pytest.approx(logged, rel=0.1) and len(losses) == 3
    assert only_result(tmp_path / "runs")["batch"]["tokens_per_step"] == 2 * 2 * (8 + 16)


def test_a_compiled_model_is_not_compiled_again_for_the_callback(tmp_path):
    """Its hook looks on from outside the graphs."""
    torch._dynamo.reset()
    options = {"torch_compile": True, "torch_compile_backend": "eager", "warmup_steps": 2}
    trainer_of(tmp_path / "runs", transformer(), 1, 3, 5, adam_beta2=0.5, **options)[0].train()
    r = only_result(tmp_path / "runs")
    told = {"adam_beta2": 0.5, "lr_warmup_steps": 2, "warmup_steps": 1, "dataloader_num_workers": 0}
    assert told.items() <= r["args"].items() and "disable_tqdm" not in r["args"]
    assert r["args"]["pt_compile"] and r["metrics"]["n_recompilations"] == 0
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
    secrets = ['{"api_key": "a", "b": 1}', "X-Auth: a"]
    assert without_secrets(secrets) == ['{"api_key":...', "X-Auth:..."]
