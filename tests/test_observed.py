"""The kernels that ran are those that a result names, and looking at them changes nothing."""

import json
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo.utils as dynamo

import train
from llm_train_bench.apply.compile import key_compiled_code
from llm_train_bench.apply.kernels import select_attention
from llm_train_bench.run import profiling
from llm_train_bench.run.profiling import observed_in
from llm_train_bench.trace.observed import fallbacks, observe
from llm_train_bench.trace.read_trace import Span, Trace, read_trace
from tests import helpers
from tests.helpers import ROOT, only_result, plan_of, remark_texts, run_train, trained, words
from tests.processes import forked

TINY = words("configs/gpt2-tiny.json --bsz 2 --seq-len 32 --warmup-steps 1 --n-steps 3 --device cpu "
             "--no-tensorboard")  # fmt: skip


@pytest.fixture
def switches(tmp_path, monkeypatch):
    """Compiler caches that nobody else has, and the tag of their keys, which is put back."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    tag = torch.compiler.config.cache_key_tag
    yield
    torch.compiler.config.cache_key_tag = tag
    torch._dynamo.reset()


def compiled(function, *inputs):
    """Run a function as a new process would compile it; its output, and whether code was made anew."""
    torch._dynamo.reset()
    before = dynamo.counters["inductor"]["fxgraph_cache_miss"]
    out = torch.compile(function)(*inputs)
    return out, dynamo.counters["inductor"]["fxgraph_cache_miss"] > before


SWITCHES = ["", "--attention math", "--attention flash", "--linear onednn",
            "--use-fp8 --fp8-backend torchao --fp8-emulate"]  # fmt: skip


def test_each_switch_is_in_the_key_of_compiled_code(switches):
    """One graph, compiled again and again into one cache: only another switch makes new code."""
    a = torch.randn(4, 4)
    for flags in SWITCHES:
        work = plan_of(
            [*TINY, "--amp", "bf16" if "fp8" in flags else "off", *words(flags)], platform="cpu"
        ).work
        key_compiled_code(work)
        assert compiled(torch.mm, a, a)[1], flags
        assert not compiled(torch.mm, a, a)[1], flags


def test_the_user_s_own_tag_is_kept(switches, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "mine-")
    key_compiled_code(plan_of(TINY, platform="cpu").work)
    assert torch.compiler.config.cache_key_tag.startswith("mine-")


@pytest.mark.parametrize(
    ("flags", "attention", "matmuls"),
    [("", {"forward": ["blocks"], "backward": ["blocks"]}, {"aten bf16"}),
     ("--amp off --attention flash", {"forward": ["flash"], "backward": ["flash"]}, {"aten fp32"}),
     ("--attention math --amp off", {"forward": ["math"], "backward": ["math"]}, {"aten fp32"}),
     ("--pass-type forward", {"forward": ["blocks"]}, {"aten bf16"}),
     ("--profile", {"forward": ["blocks"], "backward": ["blocks"]}, {"aten bf16"})],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_a_result_names_the_kernels_that_ran(flags, attention, matmuls, tmp_path):
    r = trained(tmp_path, TINY, flags)
    assert r["observed"]["attention"] == attention
    assert set(r["observed"]["matmuls"]) == matmuls
    assert not [x for x in r["remarks"] if x["kind"] == "invalid" or "fallback" in x["text"]]
    # Two blocks of four linear layers and the head, forward and twice in backward.
    if "math" not in flags:
        calls = (2 * 4 + 1) * (1 if "forward" in flags else 3)
        assert sum(r["observed"]["matmuls"].values()) == calls
    assert r["attention_kernel"] == attention["forward"][0]


@pytest.mark.parametrize(
    ("amp", "hip", "changes", "kernel"),
    [("bf16", None, {}, "flash"), ("off", None, {}, "math"), ("bf16", "6.4", {}, "math"),
     ("bf16", None, {"head_dim": 288}, "math"), ("bf16", "6.4", {"sliding_window": None}, "flash")],
)  # fmt: skip
def test_the_kernel_of_windows_and_sinks_on_a_gpu(amp, hip, changes, kernel, monkeypatch):
    """FlashAttention has no heads above 256 elements, no fp32, and on AMD no windows."""
    monkeypatch.setattr(torch.version, "hip", hip)
    shape = helpers.config("gpt_oss", **changes)
    work = plan_of(["x.json", "--seq-len", 32, "--amp", amp], config=shape).work
    assert select_attention(work, torch.device("cuda")) == kernel


def test_kernels_that_were_not_asked_for_make_a_run_invalid(tmp_path, monkeypatch, output_of):
    """Whatever let another kernel run, the table says it."""
    monkeypatch.setattr(train, "select_attention", lambda work, device: "math")
    runs = tmp_path / "runs"
    argv = [*TINY, "--attention", "math", "--output-dir", runs, "--run-name", "a"]
    why = "asked for math attention, flash ran"
    out = output_of(helpers.train_main, argv)
    assert f" {why} |" in out and f"note: invalid: {why}: update PyTorch" in out
    r = only_result(runs)
    assert [x["text"] for x in r["remarks"] if x["kind"] == "invalid"] == [why]
    assert r["attention_kernel"] == "flash"


def test_layers_without_attention_have_no_kernel_of_it(tmp_path):
    r = trained(tmp_path, "tests/configs/qwen3_next.json --layers 1", TINY[1:])
    assert r["attention_kernel"] is None and not any(r["observed"]["attention"].values())
    assert not [remark for remark in r["remarks"] if remark["kind"] == "invalid"]


def test_a_profiler_that_fails_is_a_note(tmp_path, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS")

    monkeypatch.setattr(profiling, "build_profiler", broken)
    r = trained(tmp_path, TINY)
    assert r["status"] == "ok" and r["observed"] is None
    assert [n for n in remark_texts(r) if "not observed: RuntimeError: CUPTI_ERROR_MULT" in n]
    assert sorted(p.name for p in tmp_path.glob("*/*s*.js*")) == ["result.json", "steps.jsonl"]


def test_looking_changes_nothing_that_is_saved_exported_validated_or_reported(tmp_path):
    """Bitwise, with dropout and balance losses, after a resumption too, and to the number of files."""
    np.arange(4000, dtype=np.uint16).__mod__(97).tofile(tmp_path / "t.bin")
    values = json.loads((ROOT / "configs/moe-tiny.json").read_text())
    values |= {"vocab_size": 97, "num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8}
    values |= {"output_router_logits": True, "router_aux_loss_coef": 0.1, "attention_dropout": 0.1}
    config = helpers.write_config(tmp_path, values)
    left = {}
    for name, flags in (("on", []), ("off", ["--no-observe"])):
        out = tmp_path / name
        argv = [config, "--data", tmp_path / "t.bin", "--data-dtype", "uint16", "--val-data",
                tmp_path / "t.bin", "--bsz", 2, "--seq-len", 16, "--n-steps", 4, "--warmup-steps", 2,
                "--amp", "off", "--export", "--save-every", 3, "--output-dir", out, *flags]  # fmt: skip
        assert run_train(*argv, "--run-name", "a") == 0
        shutil.rmtree(out / "a/checkpoints/step-00000006")
        assert run_train(*argv, "--run-name", "b", "--resume", out / "a") == 0
        for path in sorted(out.rglob("*")):
            if path.suffix in (".safetensors", ".distcp"):  # others have times and names
                left.setdefault(str(path.relative_to(out)), []).append(path.read_bytes())
        for run in ("a", "b"):
            r = helpers.result_of(out / run)
            assert (r["observed"] is None) == bool(flags)
            steps = [json.loads(x) for x in (out / run / "steps.jsonl").read_text().splitlines()]
            names = ("val_loss", "val_loss_before", "first_loss", "final_loss", "n_measured_steps",
                    "n_checkpoints", "window_saves", "expert_rows_max_over_mean")  # fmt: skip
            facts = [r["metrics"][k] for k in names], r["status"], len(r["step_times_s"])
            facts += ([(s["step"], s["phase"], s["loss"], s["grad_norm"]) for s in steps],)
            left.setdefault(run, []).append(facts)
    assert len(left) >= 6
    for name, (on, off) in left.items():
        assert on == off, name


@pytest.mark.parametrize(
    ("family", "length", "cp", "masked"),
    [("llama", 64, 8, True), ("llama", 64, 2, False), ("mistral", 32, 1, True), ("gpt_oss", 4, 1, True)],
)  # fmt: skip
def test_pieces_are_for_what_is_not_plainly_causal(family, length, cp, masked):
    """Gathered keys where heads do not divide; a window; sinks."""
    argv = ["x", "--seq-len", length, "--cp", cp]
    plan = plan_of(argv, "train_fsdp.py", 8, "cpu", helpers.config(family))
    assert plan.work.masked is masked


def test_kernels_of_gpus_are_known_by_operators_and_by_names():
    trace = read_trace(ROOT / "tests/traces/cuda_h100_training.json.gz")
    seen = observe(trace, True, 8)
    assert seen.attention == {"forward": ["flash"], "backward": ["flash"]}
    assert seen.matmuls == {"cublas bf16": 190, "cublas fp8": 3}
    assert any("Memcpy HtoD (Pageable -> Device)" in text for text, _ in fallbacks(trace))
    seen = observe(read_trace(ROOT / "tests/traces/rocm_mi300x_llama_block.json.gz"), False)
    assert seen.attention == {"forward": ["flash"]} and seen.matmuls == {"tensile bf16": 7}


def kernels(*names, host=(), args=None):
    """A trace of two steps with these kernels on a GPU, twice, and these operators."""
    spans = [Span(n, "kernel", 10.0 * i, 10.0 * i + 5, (0, 7), args=args or {})
             for i, n in enumerate(names * 2)]  # fmt: skip
    on_host = [Span(n, "cpu_op", 0.0, 1.0, (1, 1)) for n in host]
    steps = [Span(f"ProfilerStep#{i}", "user_annotation", 0.0, 1.0, (1, 1)) for i in range(2)]
    return Trace("t", None, spans, {(1, 1): on_host}, {}, steps)


# The kernels of forward and backward, by names; operators, which tell where AOTriton's serve two. Inside
# CUDA graphs no operator is recorded.
NAMES = (ROOT / "tests/traces/attention_kernels.txt").read_text().splitlines()


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row[:40])
def test_attention_is_named_by_operators_or_kernels(row):
    ways, *names = row.split(" | ")
    forward, backward = ways.split()
    host = [name for name in names if name.startswith("aten::")]
    seen = observe(kernels(*(n for n in names if n not in host), host=host), True).attention
    assert seen["forward"] == [forward]
    assert backward == "-" or seen["backward"] == [backward]


def test_what_fell_back_is_counted_by_the_step():
    seen = fallbacks(kernels("Memcpy DtoH (Device -> Pageable)", "multi_tensor_adam"))
    text = "fallback: copy that waits for the host: Memcpy DtoH (Device -> Pageable), 1 per step"
    assert [told for told, _ in seen] == [text]


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize(
    ("script", "ranks", "config", "least"),
    [("train.py", 1, "gpt2-tiny", 2 * 4), ("train_pp.py", 2, "gpt2-tiny", 1 * 4),  # rank 0's half
     # Attention's: grouped matmuls have no format in their names.
     ("train.py", 1, "moe-tiny", 4 * 2)],
)  # fmt: skip
def test_fp8_layers_in_a_higher_format_make_a_run_invalid(script, ranks, config, least, lacking):
    argv = [f"configs/{config}.json", "--use-fp8", "--fp8-backend", "torchao"]
    plan = plan_of([*argv, "--grad-acc-steps", "2"], script, ranks, "nvidia")
    calls = 2 * least - lacking
    result, remarks = mock.Mock(fp8=mock.Mock(emulated=False)), []
    result.remark = lambda text, kind="information", advice="": remarks.append((kind, text))
    run = mock.Mock(plan=plan, result=result, device=torch.device("cuda"))
    names = ["nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_bias_TNT"] * calls
    seen = observed_in(kernels(*names, "nvjet_sm90_tss_320x128_64x3_1x2_h_badd_coopB_NTT"), run)
    assert seen.matmuls == {"cublas bf16": 1, "cublas fp8": calls}
    text = f"asked for FP8, {calls} of at least {2 * least} FP8 matmuls ran"
    assert [text for kind, text in remarks if kind == "invalid"] == [text] * lacking


def test_the_bandwidth_of_collectives_is_what_a_ring_sends():
    """Four ranks, 5 us each: 3 x 8 kB of a gather, 3/4 of a reduction's 32 kB, twice that of both."""
    size = {"Group size": 4, "dtype": "BFloat16", "In msg nelems": 4000}
    for name, sent in (("AllGather", 3.0), ("ReduceScatter_Sum_bf16", 0.75), ("AllReduce", 1.5)):
        trace = kernels(f"ncclDevKernel_{name}_RING_LL", args=size)
        (use,) = observe(trace, True, 8).collectives.values()
        assert use.calls == 1 and use.input_bytes == 8000 and use.time_s == pytest.approx(5e-6)
        assert use.bus_gb_per_s == pytest.approx(sent * 8000 / 5e-6 / 1e9)
    for kind, width in {"Float": 4, "c10::Half": 2, "Long": 8, "Int": 4, "double": 8}.items():
        trace = kernels("ncclDevKernel_AllReduce_RING_LL", args=size | {"dtype": kind})
        (use,) = observe(trace, True, 8).collectives.values()
        assert use.input_bytes == 4000 * width
    (use,) = observe(kernels("ncclDevKernel_AllGather_RING_LL"), True, 8).collectives.values()
    assert use.bus_gb_per_s is None  # sizes are not recorded
    trace = kernels("ncclDevKernel_AllGather_RING_LL", args={"Input type": ["float"]})
    assert observe(trace, True, 8).collectives["all-gather"].input_bytes is None


def test_two_ranks_tell_the_bandwidth_of_their_collectives(tmp_path):
    done = forked("train_ddp.py", TINY, "--grad-acc-steps 3 --nproc 2 --output-dir", tmp_path)
    r = only_result(tmp_path)
    use = r["observed"]["collectives"]["all-reduce"]
    assert use["input_bytes"] == pytest.approx(r["metrics"]["all_reduce_bytes"], abs=64)
    assert use["bus_gb_per_s"] == pytest.approx(use["input_bytes"] / use["time_s"] / 1e9)
    assert "| all-reduce: calls, time, bus" in done.stdout
