"""Tests that need a GPU; `python benchmarks/on_gpu.py tests` runs them on a machine that has one."""

import contextlib
import gzip
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from llm_train_bench.apply.blocks import apply_linear_layers
from llm_train_bench.apply.fp8 import te as fp8_te
from llm_train_bench.apply.sharded import materialize
from llm_train_bench.base.errors import UsageError
from llm_train_bench.model.config import load_config
from llm_train_bench.model.hf import to_hf
from llm_train_bench.model.layers import attend, block_mask
from llm_train_bench.model.loss import _add_product, adds_wide, matmul_transposed
from llm_train_bench.model.piece_attention import Seen, attend_in_pieces
from llm_train_bench.model.transformer import Transformer
from tests import helpers
from tests.helpers import ROOT, only_result, plan_of, read_steps, remark_texts, run_train
from tests.test_combinations import ONLY_ON_A_GPU
from tests.test_combinations import flags as cell_flags
from tests.test_combinations import name as cell_name

pytestmark = pytest.mark.gpu
COMPILE_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
RANKED = ("train_ddp.py", "train_fsdp.py")
MARKS = {"te": pytest.mark.transformer_engine, "torchao": pytest.mark.torchao}
# As wide as gpt2-125m, on real text (bytes): a few steps can learn something from it.
TEXT = Path(tempfile.gettempdir()) / f"llm-train-bench-gpu-tests-{os.getpid()}"
# At this learning rate rounding stays rounding: on a CPU bf16 is within 5e-4 of fp32 in every step.
# At ten times that rate the loss jumps to 9, and two ways to compute the same end far apart.
COMMON = [*"--device cuda --warmup-seconds 0 --lr 1e-4".split(), "--data", TEXT / "train.bin"]
FLAGS = "--bsz 4 --seq-len 256 --n-steps 8 --warmup-steps 4 --lr-warmup-steps 2".split() + COMMON
SMALL = [TEXT / "small.json", *FLAGS]


@pytest.fixture(autouse=True, scope="module")
def text():
    """The data and the models of these tests."""
    import prepare_data

    assert torch.cuda.is_available(), "these tests were asked for, and there is no GPU"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert prepare_data.main(["--stdlib", "--output-dir", str(TEXT)]) == 0
        for name, of in (("small", "gpt2-125m"), ("one_b", "llama-3.2-1b")):
            values = json.loads((ROOT / f"configs/{of}.json").read_text()) | {"vocab_size": 256}
            (TEXT / f"{name}.json").write_text(json.dumps(values))
        yield
    shutil.rmtree(TEXT)


def steps(out, *flags, argv=SMALL) -> list[dict]:
    """Losses and gradient norms of a run of train.py."""
    assert run_train(*argv, *flags, "--output-dir", out) == 0
    return read_steps(out)


def each(tmp_path, argv, *flags: str) -> list[list[dict]]:
    """Steps of a run of train.py with each of these flags."""
    return [steps(tmp_path / str(i), *words.split(), argv=argv) for i, words in enumerate(flags)]


def losses(steps):
    return [s["loss"] for s in steps]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    plain = steps(tmp_path_factory.mktemp("plain") / "x")
    assert plain[-1]["loss"] < plain[0]["loss"] - 1
    return plain


def assert_alike(other, plain, tolerance=1e-2):
    """Losses over the run and, while the weights are still the same, the norm of the gradients.

    The blocks' are by far the largest part of it: losses fall for some steps without them.
    """
    assert losses(other) == pytest.approx(losses(plain), rel=tolerance)
    assert other[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=3 * tolerance)


def test_parts_add_up_to_steps(tmp_path):
    steps(tmp_path)
    r = only_result(tmp_path)
    m = r["metrics"]
    parts = [m[f"{p}_time_mean_s"] for p in ("data", "forward", "backward", "optimizer")]
    assert sum(parts) == pytest.approx(m["step_time_mean_s"], rel=1e-3)
    assert m["peak_allocated_gib"] > 1 and m["peak_reserved_gib"] >= m["peak_allocated_gib"]
    if r["device"]["peak_bf16_tflops"]:
        assert 0 < m["mfu"] < 0.85


TOGGLES = [
    "--pt-compile",
    *(f"--pt-compile --compile-mode {mode}" for mode in COMPILE_MODES),
    *(f"--attention {kernel}" for kernel in ("flash", "cudnn", "efficient", "math")),
    *("--sac-freq 1/2", "--sac-freq 1/1 --sac-policy op", "--pt-compile --sac-freq 1/2"),
    *("--pad-vocab 384", "--bsz 2 --grad-acc-steps 2", "--amp fp16", "--nsys-start 6 --nsys-end 8"),
    "--bsz 2 --grad-acc-steps 2 --pt-compile --compile-mode reduce-overhead",
    pytest.param("--linear te", marks=MARKS["te"]),
    pytest.param("--linear te --sac-freq 1/2", marks=MARKS["te"]),
]


@pytest.mark.parametrize("flags", TOGGLES)
def test_toggles_compute_the_same(flags, tmp_path, plain):
    flags = flags.split()
    assert_alike(steps(tmp_path, *flags), plain)
    r = only_result(tmp_path)
    if "--attention" in flags:
        assert r["attention_kernel"] == flags[1]
    if {"reduce-overhead", "max-autotune"} & set(flags):
        assert not any("recorded again" in note for note in remark_texts(r)), remark_texts(r)
        assert r["memory"] is None


WINDOWED = dict(hidden_size=512, intermediate_size=1024, head_dim=64, sliding_window=96,
                num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2)  # fmt: skip
DROPOUT = dict(vocab_size=256, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)
# A config, what changes of it, the tolerance, flags of all runs, and of each: the first is right.
ALIKE = {
    # Its logits' rows are aligned another way; in two chunks, by every path of the loss.
    "odd vocabulary": ("gpt2-125m", {}, 1e-2, "--bsz 16", "--pad-vocab 8", "", "--pt-compile",
                       "--amp fp16", "--amp fp16 --pt-compile"),
    # Other draws would change the first gradients' norm at once.
    "dropout": ("gpt2-125m", DROPOUT, 2e-3, "", "", "--sac-freq 1/1 --sac-policy block",
                "--sac-freq 1/1 --sac-policy op"),
    "window": ("mistral-7b-v0.1", WINDOWED, 1e-2, "", "--attention flash", "--attention flex",
               "--pt-compile"),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIKE)
def test_a_model_learns_alike_by_every_path(case, tmp_path):
    of, changes, tolerance, common, *flags = ALIKE[case]
    values = json.loads((ROOT / f"configs/{of}.json").read_text()) | changes
    argv = [helpers.write_config(tmp_path, values), *FLAGS, *common.split()]
    right, *others = each(tmp_path, argv, *flags)
    for other in others:
        assert_alike(other, right, tolerance)


def run_apart(script, out, *argv):
    """Steps of a run in a separate process.

    Profiled runs need it: CUPTI before 13.1 loses or mislabels kernels of later captures.
    """
    command = [sys.executable, script, *map(str, argv), "--output-dir", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    try:
        _, err = process.communicate(timeout=300)
    finally:  # a rank that hangs must not hold the GPU while other tests run
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    return read_steps(out)


# fp32 and fp16 with SAC in graphs only under LLM_TRAIN_BENCH_ALL_CELLS: a lent GPU has little time.
CELLS = [
    pytest.param(c, marks=MARKS.get(c.fp8, ()), id=cell_name(c))
    for c in ONLY_ON_A_GPU
    if c.amp == "bf16" or c.sac == "off" or "LLM_TRAIN_BENCH_ALL_CELLS" in os.environ
]


@pytest.mark.parametrize("cell", CELLS)
def test_cells_of_the_table_that_need_a_gpu(cell, tmp_path, plain):
    """Cells of Transformer Engine and CUDA graphs in every entrypoint; the others run on a CPU."""
    argv = [a for a in cell_flags(cell) if a != "--fp8-emulate"]
    if cell.entrypoint == "train.py":
        other = steps(tmp_path, *argv)
    else:
        other = by_one_rank(cell.entrypoint, tmp_path, *argv)
    assert_alike(other, plain, 1e-2 if cell.fp8 == "off" else 2e-2)
    r = only_result(tmp_path)
    assert (r["fp8"] or {"backend": "off"})["backend"] == cell.fp8
    assert (r["metrics"]["n_compiled_graphs"] or 0) > 0 or cell.compile == "off"
    assert not any("without CUDA graphs" in note for note in remark_texts(r))


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("window", [None, 96])
def test_kernels_see_windows_and_documents_and_no_more(window, packs):
    """FlexAttention, and flash attention in pieces, against fp32 in plain matmuls: all gradients."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = {"q": (2, 8, 256, 64), "k": (2, 2, 256, 64), "v": (2, 2, 256, 64)}
    qkv = [torch.randn(s, device="cuda", generator=generator) for s in shape.values()]
    above = torch.randn(shape["q"], device="cuda", generator=generator)
    sinks = torch.randn(8, device="cuda", generator=generator)
    begins = torch.zeros(2, 256, dtype=torch.bool)
    begins[0, [0, 7, 130]] = begins[1, [0, 128]] = True
    starts = torch.where(begins, torch.arange(256), 0).cummax(1).values if packs else None
    seen, flex = Seen(window, starts), block_mask(256, window, starts, torch.device("cuda"))
    pieces = lambda q, k, v, sinks=None: attend_in_pieces(q, k, v, seen, None, sinks)  # noqa: E731
    in_flex = lambda q, k, v: attend(q, k, v, flex, 0.0, None)  # noqa: E731

    def results(way, dtype, *more):
        inputs = [t.clone().to(dtype).requires_grad_() for t in qkv]
        out = way(*inputs, *more)
        out.backward(above.to(dtype))
        return [out.detach(), *(t.grad for t in inputs)]

    for way, more in ((pieces, ()), (in_flex, ()), (pieces, (sinks,))):
        right, made = results(pieces, torch.float32, *more), results(way, torch.bfloat16, *more)
        for what, a, b in zip(("out", "dq", "dk", "dv"), right, made, strict=True):
            assert ((a - b).norm() / a.norm()).item() < 2e-2, (way, more, what)


def test_groups_in_fp32_run_in_a_fused_kernel():
    """They give the same as the plain kernel."""
    q, k, v = (torch.randn(2, n, 256, 64, device="cuda") for n in (8, 2, 2))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        fused = attend(q, k, v, None, 0.0, None)
    q, k, v = (t.cpu() for t in (q, k, v))
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(fused.cpu(), plain, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_an_attention_kernel_that_cannot_is_refused_in_one_line(kernel, tmp_path, capsys):
    flags = ["--attention", kernel, "--amp", "off", "--output-dir", tmp_path]
    assert run_train(*SMALL, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--attention {kernel}: that kernel cannot run" in line


def test_tf32_is_a_flag_whose_state_is_in_the_result(tmp_path):
    if torch.version.hip:
        pytest.skip("only NVIDIA GPUs have TF32")
    fp32, tf32 = each(tmp_path, [*SMALL, "--amp", "off"], "", "--tf32")
    for i in (0, 1):
        assert only_result(tmp_path / str(i))["environment"]["tf32"] is bool(i)
    # The first loss repeats bit by bit; later ones differ by the order of sums.
    assert tf32[0]["loss"] != fp32[0]["loss"]
    assert losses(tf32) == pytest.approx(losses(fp32), rel=1e-2)


@pytest.mark.alone
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_profile_of_ranks(script, tmp_path):
    by_one_rank(script, tmp_path, *"--profile --profile-steps 2".split())
    p = only_result(tmp_path)["profile"]
    assert sum(p["classes_s"].values()) == pytest.approx(p["step_time_s"], rel=0.02)


def by_one_rank(script, out, *flags):
    """Steps of a run with one rank in a separate process, with NCCL."""
    return run_apart(script, out, *SMALL, "--nproc", "1", *flags)


ONE_RANK = [
    *((script, ["--amp", "off"], 1e-4) for script in RANKED),
    ("train_fsdp.py", ["--cpu-offload"], 1e-2),
    *((script, ["--bf16-weights"], 1e-2) for script in RANKED),
    *(
        pytest.param(script, ["--use-fp8", "--fp8-backend", backend], 1e-2, marks=mark)
        for backend, mark in MARKS.items()
        for script in RANKED
    ),
]


@pytest.mark.parametrize(("script", "flags", "tolerance"), ONE_RANK)
def test_one_rank_with_nccl_gives_the_losses_of_train(script, flags, tolerance, tmp_path):
    """World size 1 through the whole distributed path."""
    plain = steps(tmp_path / "plain", *(f for f in flags if f != "--cpu-offload"))
    assert_alike(by_one_rank(script, tmp_path / "d", *flags), plain, tolerance)


# A 16-layer shape of 1B parameters, as wide as llama-3.2-1b. On a CPU, with FP8 emulated, two
# layers of it end 0.3 % from bf16 at this rate, and 2.6 % at three times that, since the first
# steps are chaos there.
LONG = "--bsz 4 --seq-len 1024 --n-steps 45 --warmup-steps 5 --lr-warmup-steps 10".split()
ONE_B = [TEXT / "one_b.json", *LONG, *COMMON]
RECIPES = [("te", recipe) for recipe in ("current", "delayed", "blockwise", "mxfp8")]
RECIPES += [("torchao", recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
FP8_CASES = [("te", "--sac-freq 1/2"), ("te", "--bsz 2 --grad-acc-steps 2")]
FP8_CASES += [("torchao", "--sac-freq 1/1 --sac-policy op")]
FP8_CASES += [("torchao", "--compile-mode reduce-overhead")]
FP8_CASES += [(backend, f"--fp8-recipe {recipe}") for backend, recipe in RECIPES]


def one_b(out, *flags):
    """Losses of 50 steps of the 1B shape."""
    return losses(steps(out, *flags, argv=ONE_B))


@pytest.fixture(scope="module")
def bf16_losses(tmp_path_factory):
    plain = one_b(tmp_path_factory.mktemp("1b"))
    assert plain[-1] < plain[0] - 1
    return plain


@pytest.mark.parametrize(
    ("backend", "flags"), [pytest.param(b, f, marks=MARKS[b]) for b, f in FP8_CASES]
)
def test_fp8_learns_as_bf16_does(backend, flags, tmp_path, bf16_losses):
    if backend == "te" and "--fp8-recipe" in flags:
        te = fp8_te.import_te(torch.device("cuda"), "--use-fp8")  # fails where it is absent
        try:
            fp8_te.make_recipe(te, flags.split()[-1])
        except UsageError as error:
            pytest.skip(f"this GPU cannot: {error}")
    compiled = ["--pt-compile"] if backend == "torchao" else []
    fp8_losses = one_b(tmp_path, "--use-fp8", "--fp8-backend", backend, *compiled, *flags.split())
    assert fp8_losses != bf16_losses
    ratio = sum(fp8_losses[-10:]) / sum(bf16_losses[-10:])
    assert 0.95 < ratio < 1.02
    invalid = {r["text"] for r in only_result(tmp_path)["remarks"] if r["kind"] == "invalid"}
    assert invalid <= {"shared GPU"}  # other tests may be on it


@pytest.mark.transformer_engine
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_te_blocks_compute_what_plain_ones_do(family):
    """With the same weights they agree up to bf16's rounding, or with FP8 up to FP8's."""
    device, T = torch.device("cuda"), 256
    path = {"gpt2": "configs/gpt2-125m.json", "llama": "configs/llama-3.2-1b.json"}[family]
    flags = ["--use-fp8", "--fp8-backend", "te", "--bsz", "2", "--grad-acc-steps", "2"]
    shape = load_config(path, layers=2)
    work = plan_of([path, *flags, "--seq-len", T], config=shape).work
    with torch.device("meta"):
        plain, te = Transformer(shape, T), Transformer(shape, T)
    fp8 = apply_linear_layers(te, work, device)
    for model in (plain, te):
        materialize(model, device, seed=0)
    ids = torch.randint(shape.vocab_size, (2, T), device=device)
    with torch.autocast("cuda", torch.bfloat16):
        exact, high = plain(ids), te(ids)
        with fp8.forward(0):
            low = te(ids)
    assert ((high - exact).norm() / exact.norm()).item() < 2e-2
    # Three bits of mantissa leave a few percent, bf16's seven a few thousandths.
    assert 1e-2 < ((low - exact).norm() / exact.norm()).item() < 0.15
    with torch.autocast("cuda", torch.bfloat16):
        plain(ids, ids).backward()
        te(ids, ids).backward()
    # The weights cast in a step's first micro batch serve the others, even if the weights change.
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        outputs = []
        for micro in (0, 1, 0):
            with fp8.forward(micro):
                outputs.append(te(ids))
            if micro == 0:
                for weight, parameter in te.weights():
                    if weight.module == "attn.qkv":
                        parameter.mul_(2.0)
        assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    theirs = {name: g for w, p in te.weights() for name, g in to_hf(w, p.grad)}
    ours = {name: g for w, p in plain.weights() for name, g in to_hf(w, p.grad)}
    for name, gradient in ours.items():
        assert (theirs[name] - gradient).norm() / gradient.norm() < 5e-2, name


LONG_STEPS = ["--profile", "--profile-steps", 15, "--bsz", 16, "--seq-len", 512]


def profile_of(out, *argv):
    """The profile of a run of train.py; its classes add up to the step by CUDA events."""
    profiled = run_apart("train.py", out, *SMALL, *argv)
    p = only_result(out)["profile"]
    print(json.dumps(p, indent=1))
    total = sum(p["classes_s"].values())
    assert total == pytest.approx(p["step_time_s"], rel=0.02)
    # The first step's time by the clock includes the profiler's start.
    clocked = [s["step_time_s"] for s in profiled if s["step"] > p["first_step"]]
    # By the trace the steps include the drawing of ranges and an empty queue at the start.
    assert total == pytest.approx(sum(clocked) / len(clocked), rel=0.05)
    return p


@pytest.mark.alone
def test_profile_breaks_a_step_down(tmp_path):
    p = profile_of(tmp_path / "x", *LONG_STEPS)
    assert {"matmul bf16", "attention", "elementwise", "loss", "optimizer"} <= set(p["classes_s"])
    assert "matmul" not in p["classes_s"], "a matmul with no format in its name"
    assert 0 <= p["host_gaps"]["time_s"] <= p["classes_s"]["idle"] + 1e-9
    assert 50 < p["matmul_tflops"] < 990


@pytest.mark.alone
@pytest.mark.parametrize("backend", [pytest.param(b, marks=mark) for b, mark in MARKS.items()])
def test_fp8_matmuls_are_matmuls_in_fp8(backend, tmp_path):
    """By the names of their kernels: losses would be as good if nothing ran in FP8."""
    p = profile_of(tmp_path, *LONG_STEPS, "--use-fp8", "--fp8-backend", backend)
    assert p["classes_s"]["matmul fp8"] > p["classes_s"]["matmul bf16"] / 4  # which is the head's


@pytest.mark.alone
@pytest.mark.parametrize("flags", [[], ["--compile-mode", "reduce-overhead"]])
def test_profile_of_compiled_steps(flags, tmp_path):
    p = profile_of(tmp_path / "x", *LONG_STEPS, "--pt-compile", *flags)
    r = only_result(tmp_path / "x")
    assert p["classes_s"]["matmul bf16"] > 0
    # Kernels that the trace had lost would count as idle.
    assert p["classes_s"]["idle"] < p["step_time_s"] / 2 or "reduce-overhead" not in flags
    (path,) = (tmp_path / "x").glob("*/trace/*.json.gz")
    launched = re.search(b'"(cuda|hip)GraphLaunch"', gzip.decompress(path.read_bytes()))
    assert bool(launched) == ("reduce-overhead" in flags)
    assert not any("without CUDA graphs" in note for note in remark_texts(r))


def test_memory_history_opens_and_kinds_add_up(tmp_path):
    steps(tmp_path, "--memory-snapshot")
    r = only_result(tmp_path)
    (path,) = tmp_path.glob("*/memory.pickle")
    content = pickle.loads(path.read_bytes())
    assert any(content["device_traces"]) and content["segments"]
    m = r["memory"]
    assert m["optimizer_gib"] == pytest.approx(2 * m["parameters_gib"], rel=0.01)
    assert m["activations_gib"] > 0 and m["workspace_gib"] > 0
    assert m["peak_gib"] == pytest.approx(r["metrics"]["peak_allocated_gib"], rel=0.05)


@pytest.mark.alone
def test_out_of_memory_leaves_a_snapshot(tmp_path):
    # So large that nothing fits after the embedding.
    argv = ["configs/gpt2-1.5b.json", "--bsz", 16384, "--device", "cuda", "--output-dir", tmp_path]
    assert run_train(*argv) == 3
    assert only_result(tmp_path)["status"] == "oom"
    (path,) = tmp_path.glob("*/memory.pickle")
    assert pickle.loads(path.read_bytes())["segments"]


@pytest.mark.alone
def test_power_and_clocks_are_read(tmp_path):
    pytest.importorskip("pynvml" if torch.version.cuda else "amdsmi")
    steps(tmp_path, "--n-steps", 200, "--bsz", 16, "--seq-len", 512)
    r = only_result(tmp_path)
    (d,) = r["devices"]
    print(json.dumps(d, indent=1))
    assert d["energy_j"] > 0 and d["n_samples"] > 5
    # Energy over power is the window by the host's clock, step times are by CUDA events.
    assert r["metrics"]["window_s"] == pytest.approx(d["energy_j"] / d["average_power_w"], rel=1e-2)
    assert 50 < d["average_power_w"] < d["peak_power_w"] + 50 and d["power_limit_w"] >= 300
    assert 300 < d["sm_clock_mean_mhz"] <= d["sm_clock_limit_mhz"]
    assert d["throttled"] is not None and r["metrics"]["clocks_held_down"] is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_heads_gradient_is_summed_inside_its_matmuls(dtype):
    """In fp32, chunk by chunk, with no pass of its own; against the same products in fp64."""
    device = torch.device("cuda")
    if not torch.version.hip:
        assert adds_wide(device, dtype)
    parts = [[torch.randn(256, n, device=device).to(dtype) for n in (512, 128)] for _ in range(3)]
    total = None
    for a, b in parts:
        total = _add_product(total, a.t(), b, torch.float32, matmul_transposed)
    exact = sum(a.double().t() @ b.double() for a, b in parts)
    assert total.dtype == torch.float32
    assert ((total - exact).norm() / exact.norm()).item() < (5e-3 if torch.version.hip else 1e-5)


@pytest.mark.torchao
def test_experts_by_kernels_are_near_the_reference():
    """Output and gradients of FP8 experts against what a CPU's tests hold to explicit loops."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    from llm_train_bench.apply.fp8.torchao import grouped_product

    torch.manual_seed(0)
    options = dict(device="cuda", dtype=torch.bfloat16)
    rows, weight = torch.randn(1024, 512, **options), torch.randn(8, 768, 512, **options)
    counts = torch.tensor([100, 0, 300, 7, 17, 200, 272, 128], device="cuda")
    ends, results = counts.cumsum(0, dtype=torch.int32), []
    for emulated in (True, False):
        x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        y = grouped_product(emulated, x, w.transpose(1, 2), ends)
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
        results.append([y, x.grad, w.grad])
    for expected, made in zip(*results, strict=True):
        assert (made.float() - expected.float()).norm() < 0.02 * expected.float().norm()


@pytest.mark.torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_of_parts_by_kernels_are_near_the_emulated(recipe):
    from llm_train_bench.apply.fp8.torchao import ScaledProducts
    from llm_train_bench.model.layout import ALONE

    if torch.cuda.get_device_capability() < ((8, 9) if recipe == "tensorwise" else (9, 0)):
        pytest.skip("needs FP8 matmuls")
    torch.manual_seed(0)
    whole, options = {"N": (), "K": (), "M": ()}, dict(device="cuda", dtype=torch.bfloat16)
    x, w = torch.randn(512, 256, **options), torch.randn(384, 256, **options)
    grad = torch.randn(512, 384, **options)
    emulated, kernels = (ScaledProducts(recipe, e, ALONE, whole) for e in (True, False))
    for name, operands in (("output", (x, w)), ("of_input", (grad, w)), ("of_weight", (grad, x))):
        expected, made = (getattr(p, name)(*operands).float() for p in (emulated, kernels))
        assert (made - expected).norm() < 0.01 * expected.norm(), name


def test_muon_learns(tmp_path):
    losses = [s["loss"] for s in steps(tmp_path, "--optimizer", "muon")]
    assert losses[-1] < losses[0]
