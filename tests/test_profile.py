"""--profile and --memory-snapshot in the three scripts, as a user runs them on a CPU."""

import contextlib
import itertools
import json
import re
import shutil
import types
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trace_report
from llm_train_bench.apply.data import MicroBatch
from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.apply.optimizer import build_optimizer
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.measure.memory import HISTORY, AllocatorRecord, n_bytes
from llm_train_bench.measure.steps import StepLog
from llm_train_bench.model import onednn
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.parallel.ranks import ALONE
from llm_train_bench.results.schema import Result
from llm_train_bench.run import loop, profiling
from llm_train_bench.settings.flags import Args, declared, defaults
from llm_train_bench.trace.breakdown import break_down
from llm_train_bench.trace.read_trace import read_trace
from tests import helpers, layouts
from tests.dist_worker import Job, run_jobs
from tests.helpers import ROOT, noted, plan_of, read_steps, trained, words
from tests.processes import forked

TINY = words("configs/llama-tiny.json --seq-len 64 --bsz 4 --device cpu --amp off --n-steps 4 "
             "--warmup-steps 2 --no-observe")  # fmt: skip
GIB = 2**30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with everything switched on."""
    out = tmp_path_factory.mktemp("runs")
    flags = "--profile --profile-steps 2 --memory-snapshot"
    result = trained(out, TINY, flags, "--sac-freq 1/4 --pad-vocab 384 --peak-tflops 1")
    (path,) = out.glob("*/trace/rank0.pt.trace.json.gz")
    directory, steps, trace = path.parents[1], read_steps(out), read_trace(path)
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    return types.SimpleNamespace(
        directory=directory, result=result, steps=steps, trace=trace, events=events
    )


def test_only_bytes_on_the_device_count():
    tensors = [torch.zeros(3), torch.zeros(5, device="meta"), torch.zeros(2, dtype=torch.bfloat16)]
    assert n_bytes(tensors, torch.device("cpu")) == 16


def test_captured_steps_are_extra_and_marked(run):
    phases, r = [s["phase"] for s in run.steps], run.result
    assert phases == ["warmup"] * 2 + ["measure"] * 4 + ["profile"] * 4
    assert r["metrics"]["n_measured_steps"] == 4 and len(r["step_times_s"]) == 4
    assert r["profile"]["first_step"] == 8 and r["profile"]["n_steps"] == 2
    assert r["profile"]["in_window"] is False
    assert noted(r, "a profiler looked at steps after")


def test_ranges_lie_where_they_belong(run):
    """Blocks in order inside forward, their backward in reverse order inside backward; no overlap."""
    spans = sorted((s for v in run.trace.host.values() for s in v), key=lambda s: s.start)
    assert [s.name for s in run.trace.steps] == ["ProfilerStep#8", "ProfilerStep#9"]
    step = run.trace.steps[1]
    inside = [s for s in spans if step.start <= s.start and s.end <= step.end]
    assert {"data", "optimizer", "loss"} <= {s.name for s in inside}
    (forward,) = [s for s in inside if s.name == "forward"]
    (backward,) = [s for s in inside if s.name == "backward"]
    for outer, order, end in ((forward, range(4), ""), (backward, (3, 2, 1, 0), " backward")):
        blocks = [s for s in inside if re.fullmatch(rf"blocks\.\d{end}", s.name)]
        assert [s.name for s in blocks] == [f"blocks.{i}{end}" for i in order]
        assert outer.start <= blocks[0].start and blocks[-1].end <= outer.end
        assert all(a.end <= b.start + 1 for a, b in itertools.pairwise(blocks))
        # The blocks are most of the work: their ranges are no empty marks.
        assert sum(s.length for s in blocks) > 0.4 * outer.length


def test_classes_add_up_to_the_steps_own_times(run):
    """The sum is the step within 2 %; the step's time is also known from the run's own clock."""
    p = run.result["profile"]
    total = sum(p["classes_s"].values())
    assert total == pytest.approx(p["step_time_s"], rel=0.02)
    assert total == pytest.approx(sum(s["step_time_s"] for s in run.steps[8:]) / 2, rel=0.1)
    classes = {"matmul fp32", "attention", "elementwise", "optimizer", "loss", "host"}
    assert classes <= set(p["classes_s"])
    assert p["classes_s"]["matmul fp32"] > p["classes_s"]["loss"]
    costs = [kernel["time_s"] for kernel in p["costliest"]]
    assert len(costs) == 10 and costs == sorted(costs, reverse=True)


def test_formula_and_recorded_shapes_agree_on_the_matmuls(run):
    """FLOPs by formula (recomputed blocks and padded rows too) are those of the shapes in the trace.

    The exception is the matmul at which a recomputation stops: the trace has its call, but its work
    is not done.
    """
    stopped, by_formula = 2 * 256 * 688 * 256, run.result["profile"]["matmul_flops"]
    assert break_down(run.trace).matmul_flops - stopped == pytest.approx(by_formula, rel=1e-9)


@pytest.mark.skipif(not onednn.available(), reason="a PyTorch without oneDNN")
def test_they_agree_on_onednns_matmuls_too(tmp_path):
    r = trained(tmp_path, TINY, "--profile --profile-steps 1 --linear onednn")
    (path,) = tmp_path.glob("*/trace/rank0.pt.trace.json.gz")
    by_formula = r["profile"]["matmul_flops"]
    assert break_down(read_trace(path)).matmul_flops == pytest.approx(by_formula, rel=1e-9)


# A model of tests/layouts.py, and flags for two ranks.
LAYOUTS = {
    "lora": ("qwen3", "--lora-rank 4 --lora-targets o_proj --cp 2"), "pp": ("qwen3", "--pp 2"),
    "ep": ("moe", "--ep 2 --route balanced"), "tp": ("wide-latent", "--tp 2"),
}  # fmt: skip


def test_each_device_counts_its_own_matmuls(tmp_path):
    """By the shapes in its own trace: parts of matrices, tokens and layers, and no gradients of frozen
    weights."""
    jobs = []
    for name, (model, flags) in LAYOUTS.items():
        case = layouts.Case(2, model, flags, mutant="without validation")
        flags = [*layouts.flags_of(case, tmp_path), "--profile", "--profile-steps", "1"]
        jobs.append(Job(name, case.script, flags, case.ranks))
    run_jobs(jobs, tmp_path)
    for name in LAYOUTS:
        (path,) = (tmp_path / name).glob("**/trace/rank0*")
        profile = json.loads((path.parents[1] / "result.json").read_text())["profile"]
        recorded = break_down(read_trace(path)).matmul_flops
        assert recorded == pytest.approx(profile["matmul_flops"], rel=1e-9), name


def test_the_report_of_a_stored_trace_says_what_the_run_said(run, tmp_path, output_of):
    """The fraction of the measured roof too, which no trace knows. No rate if the run has none."""
    shutil.copytree(run.directory, tmp_path / "run")
    path, result = tmp_path / "run/trace/rank0.pt.trace.json.gz", tmp_path / "run/result.json"
    content = json.loads(result.read_text())
    p = content["profile"]
    p["matmul_roof_fraction"] = 0.61
    result.write_text(json.dumps(content))
    (report,) = json.loads(output_of(trace_report.main, path, "--json"))
    assert report["matmul_tflops"] == pytest.approx(p["matmul_tflops"])
    assert report["classes_s"] == pytest.approx(p["classes_s"])
    assert report["matmul_roof_fraction"] == 0.61
    assert "while they run, 61.0% of the measured roof" in output_of(trace_report.main, path)
    p["matmul_tflops"], p["matmul_flops"] = None, 1.0  # as with --attention math
    result.write_text(json.dumps(content))
    (report,) = json.loads(output_of(trace_report.main, path, "--json"))
    assert report["matmul_flops"] != 1.0


def test_memory_by_kind(run):
    """Parameters are the model's, with padding; gradients as large, AdamW's state twice that."""
    m, model = run.result["memory"], run.result["model"]
    padding = (384 - model["shape"]["vocab_size"]) * model["shape"]["hidden_size"] * 2
    parameters = 4 * (model["n_parameters"] + padding) / GIB
    assert m["parameters_gib"] == pytest.approx(parameters, rel=1e-6)
    assert m["gradients_gib"] == pytest.approx(parameters, rel=1e-6)
    assert m["optimizer_gib"] == pytest.approx(2 * parameters, rel=1e-3)
    parts = m["parameters_gib"] + m["optimizer_gib"] + m["workspace_gib"]
    assert m["peak_gib"] == pytest.approx(parts + max(m["activations_gib"], m["gradients_gib"]))
    assert m["workspace_gib"] > 0


def test_matmuls_against_the_measured_roof(tmp_path, monkeypatch):
    """On a device with a known roof: 0.5 TFLOP/s."""
    entry = {"bf16_tflops": 0.5, "fp8_tflops": None, "source": "this test"}
    roofs = {cpu_name(): entry, "another": {"bf16_tflops": 9.0}}
    (tmp_path / "roofs.json").write_text(json.dumps(roofs))
    monkeypatch.setattr("llm_train_bench.base.hardware.ROOFS_FILE", tmp_path / "roofs.json")
    flags = "--seq-len 16 --bsz 1 --amp bf16 --grad-acc-steps 2 --profile"
    r = trained(tmp_path / "runs", TINY, flags)
    assert (r["device"]["roof_bf16_tflops"], r["device"]["roof_source"]) == (0.5, "this test")
    p, m = r["profile"], r["metrics"]
    assert p["matmul_roof_fraction"] == pytest.approx(p["matmul_tflops"] / 0.5)
    rate = m["tokens_per_sec"] * m["flops_per_token_causal"]
    assert m["roof_time_fraction"] == pytest.approx(rate / 0.5e12)
    for step in read_steps(tmp_path / "runs"):
        assert len(step["micro_batch_times_s"]) == 2
        parts = step["data_time_s"] + step["forward_time_s"] + step["backward_time_s"]
        assert sum(step["micro_batch_times_s"]) == pytest.approx(parts)
    # Dropout of scores makes a CPU's attention plain matmuls, whose time cannot be told apart.
    tiny = json.loads((ROOT / TINY[0]).read_text()) | {"attention_dropout": 0.1}
    argv = words(helpers.write_config(tmp_path, tiny), TINY[1:], flags, "--profile-steps 1")
    p = trained(tmp_path / "dropout", argv)["profile"]
    assert p["matmul_tflops"] is p["matmul_roof_fraction"] is None


def test_the_nsys_range_holds_the_steps_asked_for(monkeypatch):
    """On a CPU, with a recorder in place of CUDA's profiler and NVTX."""
    calls = []
    monkeypatch.setattr(profiling, "_profiler_api", lambda start: calls.append(start))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    draw = lambda name: contextlib.nullcontext(calls.append(name))  # noqa: E731
    monkeypatch.setattr(torch.cuda.nvtx, "range", draw)
    argv = words(TINY, "--nsys-start 3 --nsys-end 5")
    plan, cpu = plan_of(argv, "train_ddp.py", 2), torch.device("cpu")
    run = types.SimpleNamespace(
        plan=plan, device=cpu, ranks=ALONE, scaler=None, fp8=Fp8(),
        log=StepLog(cpu, 8, []), begin_micro_step=lambda step: None, schedule=plan.schedule,
        start_together=lambda: calls.append("go on"),
    )  # fmt: skip
    model = Transformer(plan.work.config, 8)
    ids = torch.ones(1, 8, dtype=torch.int64)
    passes = loop.build_passes(run, model, itertools.repeat(MicroBatch(ids, ids)))
    step_fn = loop.build_step(run, model, build_optimizer(model, plan.optimizer), passes, None)
    (capture,) = profiling.build_capture(run, model)
    run.log.start()
    for step in range(6):
        capture.before(step)
        step_fn(step, "measure")
        capture.after(step)
    steps = [c for c in calls if c in (True, False, "pop", "go on") or c.startswith("step")]
    assert steps == [True, "step 3", "pop", "step 4", "pop", False, "go on"]
    order = ["data", "forward", *(f"blocks.{i}" for i in range(4)), "backward", "optimizer"]
    parts = calls[calls.index("step 3") : calls.index("step 4")]
    assert [c for c in parts if c in order] == order


@pytest.mark.parametrize("how", ["", "--pt-compile"])
def test_memory_falls_as_more_blocks_recompute(how, tmp_path):
    compiled = bool(how)
    argv = words(TINY, how, "--memory-snapshot --n-steps 1")
    flags = ["", "--sac-freq 1/1", "--sac-freq 1/1 --sac-policy op"]
    flags += [] if compiled else ["--sac-freq 1/4", "--sac-freq 1/2"]
    with helpers.without_inductor():
        runs = [trained(tmp_path / str(i), argv, more) for i, more in enumerate(flags)]
    bytes_held = [run["memory"]["activations_gib"] * GIB for run in runs]
    none, block, op, *parts = bytes_held
    assert 0 < block < 0.3 * none and 2 * block < op < 0.8 * none
    # Each of the four blocks saves the same amount.
    for part, fraction in zip(parts, (1 / 4, 1 / 2), strict=False):
        assert none - part == pytest.approx((none - block) * fraction, rel=0.1)


def test_tensorboard_has_the_final_figures(run):
    (final,) = run.events.Scalars("final/tokens_per_sec")
    assert final.value == pytest.approx(run.result["metrics"]["tokens_per_sec"])
    assert final.step == len(run.steps) - 1


def test_tensorboard_hparams_are_those_of_the_run(run):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = run.events.PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(content["_hparams_/session_start_info"])
    shown = start.session_start_info.hparams
    assert shown["model"].string_value == "llama-tiny" and shown["pad_vocab"].number_value == 384
    assert shown["sac_freq"].string_value == "1/4"
    default, flags, args = defaults(Args), declared(Args), run.result["args"]
    assert {"lr", "output_dir", "config"}.isdisjoint(shown)
    assert {"amp", "bsz", "cp", "ep", "grad_acc_steps", "pt_compile", "route", "tp"} <= set(shown)
    names = set(shown) - {"model"}
    assert all(flags[name].headline or args[name] != default[name] for name in names)


@pytest.mark.parametrize(
    ("script", "flags"),
    [("train_fsdp.py", "--profile-steps 2 --sac-freq 1/2"),
     ("train_ddp.py", "--pt-compile --profile-steps 1")],
)  # fmt: skip
def test_every_rank_leaves_a_trace(script, flags, tmp_path):
    argv = words(TINY, "--profile --memory-snapshot", flags, "--output-dir", tmp_path)
    forked(script, argv, TORCHDYNAMO_DISABLE="1")
    r = Result.model_validate(helpers.only_result(tmp_path))
    p = r.profile
    for rank in (0, 1):
        (path,) = tmp_path.glob(f"*/trace/rank{rank}.pt.trace.json.gz")
        trace = read_trace(path)
        assert len(trace.steps) == p.n_steps == (2 if "2" in flags else 1)
        names = {s.name for spans in trace.host.values() for s in spans}
        assert {"blocks.0", "blocks.3 backward", "loss", "optimizer"} <= names
    assert p.classes_s["communication"] > 0 and p.classes_s["matmul fp32"] > 0
    assert "matmul" not in p.classes_s
    assert sum(p.classes_s.values()) == pytest.approx(p.step_time_s)
    shards = 2 if script == "train_fsdp.py" else 1
    gib = 4 * r.model.n_parameters / GIB / shards
    assert r.memory.parameters_gib == pytest.approx(gib, rel=0.01)
    # DDP's buckets hold the gradients all the time, beside the activations.
    m, either = r.memory, sum if shards == 1 else max
    kinds = m.parameters_gib + m.optimizer_gib + either((m.activations_gib, m.gradients_gib))
    assert 0 <= m.workspace_gib == pytest.approx(m.peak_gib - kinds)


@pytest.mark.parametrize("history", [True, False])
def test_an_allocators_record_is_written_when_memory_runs_out(history, monkeypatch, tmp_path):
    memory, path, full = mock.Mock(), tmp_path / "new" / "m.pickle", []
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", full.append, raising=False)
    record = AllocatorRecord(path, history)
    full[0](0, 1, 2, 3)
    record.stop()
    record.stop()
    record.close()
    full[0](0, 1, 2, 3)  # of what runs afterwards
    begin = mock.call._record_memory_history(max_entries=HISTORY, stacks="python")
    dump, end = mock.call._dump_snapshot(str(path)), mock.call._record_memory_history(enabled=None)
    assert memory.mock_calls == ([begin, dump, dump, end] if history else [dump])
