"""Loss scaling, FP8 conversion, compile counts and errors, and the numerics gate that watches them."""

import contextlib
import json
import logging
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import gemm, numerics
from llm_train_bench.apply.blocks import apply_linear_layers
from llm_train_bench.apply.compile import apply_compile, compile_counts, compile_error
from llm_train_bench.apply.fp8 import te as fp8_te
from llm_train_bench.apply.fp8 import torchao
from llm_train_bench.apply.optimizer import build_optimizer, learning_rate, optimizer_step
from llm_train_bench.apply.precision import LossScaler, set_precision
from llm_train_bench.apply.recompute import apply_recompute
from llm_train_bench.apply.sharded import materialize
from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.work import Recompute
from llm_train_bench.measure.steps import StepLog
from llm_train_bench.model.config import parse_config
from llm_train_bench.model.transformer import Block, Transformer
from llm_train_bench.results.figures import describe_fp8
from llm_train_bench.results.schema import DeviceUse, Result
from llm_train_bench.settings.flags import OptimizerFlags
from tests import helpers, te_standin
from tests.helpers import FAMILIES, config, noted, plan_of, read_steps, train_main, trained

CPU = torch.device("cpu")
TINY = [
    "tests/configs/gpt2-small.json",
    *"--seq-len 32 --bsz 4 --device cpu --n-steps 4 --warmup-steps 3 --no-tensorboard".split(),
]
EMULATED = ["--use-fp8", "--fp8-emulate"]
ODD = "is not in multiples of 16"


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
@pytest.mark.parametrize("max_norm", [0.0, 0.3, 2.0, 1e9])
def test_scaled_and_clipped_steps_are_those_of_pytorchs_own_clipping(max_norm, optimizer_name):
    """SGD shows how large a gradient is."""
    outcomes = []
    for scaler, inside in ((None, False), (None, True), (LossScaler(CPU), True)):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        parameters = list(model.parameters())
        optimizer = build_optimizer(model, OptimizerFlags(optimizer=optimizer_name))
        for _ in range(3):
            loss = model(torch.randn(4, 8)).square().sum()
            (loss if scaler is None else loss * scaler.scale).backward()
            if inside:
                norm = optimizer_step(parameters, optimizer, 1e-2, max_norm, scaler)
                assert scaler is not None or not hasattr(optimizer, "grad_scale")
            else:
                norm = nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))
                optimizer_step(parameters, optimizer, 1e-2, 0.0, None)
            optimizer.zero_grad()
        outcomes.append((norm, *(p.detach() for p in parameters)))
    plain, *others = outcomes
    assert plain[0] > 2.0
    for other in others:
        torch.testing.assert_close(other, plain, rtol=2e-5, atol=1e-7)


def test_adamw_takes_its_flags_and_decays_matrices_alone():
    """Two steps of constant gradients by hand (Loshchilov and Hutter 2019, algorithm 2)."""
    model = nn.Linear(1, 1)
    optimizer = build_optimizer(model, OptimizerFlags(lr=0.1, weight_decay=0.5))
    expected = {name: p.item() for name, p in model.named_parameters()}
    m = v = 0.0
    for step, g in enumerate((1.0, 3.0), 1):
        for p in model.parameters():
            p.grad = torch.full_like(p, g)
        optimizer_step(list(model.parameters()), optimizer, 0.1, 0.0, None)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        move = 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)) ** 0.5 + 1e-8)
        expected["weight"] *= 1 - 0.1 * 0.5
        expected = {name: value - move for name, value in expected.items()}
    updated = {name: p.item() for name, p in model.named_parameters()}
    assert updated == pytest.approx(expected, rel=1e-5)


def test_the_learning_rate_rises_and_falls_as_its_flags_say():
    flags = OptimizerFlags(lr=1.0, min_lr_ratio=0.2, lr_warmup_steps=3)
    rates = [learning_rate(step, flags, 12) for step in range(13)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[7] == pytest.approx(0.2 + 0.8 * 0.5)  # half way down a cosine
    assert rates[5] == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2)
    assert rates[11] == rates[12] == learning_rate(4, flags, 5) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("mode", "loss_mode", "logs", "level"),
    [("default", "default", None, "CRITICAL"), ("reduce-overhead", "default", None, "CRITICAL"),
     ("max-autotune", "max-autotune-no-cudagraphs", None, "CRITICAL"),
     ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs", "+all", "NOTSET")],
)  # fmt: skip
def test_every_block_gets_the_compile_mode(mode, loss_mode, logs, level, monkeypatch):
    """Candidates that max-autotune cannot use are logged only on request."""
    spy = mock.Mock(side_effect=lambda function, **options: function)
    monkeypatch.setattr(torch, "compile", spy)
    logger = logging.getLogger("torch._inductor.select_algorithm")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    if logs:
        monkeypatch.setenv("TORCH_LOGS", logs)
    with torch.device("meta"):
        apply_compile(Transformer(config("llama"), 8), mode)
    modes = [{"mode": name} for name in (mode, mode, mode, loss_mode)]
    always = {"fullgraph": True, "dynamic": False}
    assert [call.kwargs for call in spy.mock_calls] == [always | name for name in modes]
    assert logging.getLevelName(logger.level) == level


@pytest.mark.parametrize("policy", ["block", "op"])
@pytest.mark.parametrize(("residual", "attention"), [(0.1, 0.1), (0.1, 0.0), (0.0, 0.1)])
def test_recomputed_dropout_draws_the_same(policy, residual, attention):
    gradients, ids = [], torch.arange(32).view(2, 16)
    for blocks in ((), (0, 1, 2)):
        model = Transformer(config("gpt2", resid_pdrop=residual, attn_pdrop=attention), 16)
        materialize(model, CPU, seed=0)
        apply_recompute(model, Recompute(blocks, policy))
        torch.manual_seed(1)
        model(ids, ids).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "moments"), [("adamw", "exp_avg"), ("sgd", "momentum_buffer")])
def test_an_overflow_is_skipped_and_halves_the_scale(name, moments):
    """SGD's fused kernel makes its buffers in the first step and fills them only without overflow."""
    flags = OptimizerFlags(optimizer=name, weight_decay=0.0)
    model = nn.Linear(64, 64)
    optimizer, scaler = build_optimizer(model, flags), LossScaler(CPU)
    before = model.weight.detach().clone()
    for value, other in ((float("inf"), 1.0), (0.0, 0.0)):
        model.weight.grad = torch.full((64, 64), other)
        model.weight.grad[0, 0], model.bias.grad = value, torch.full((64,), other)
        norm = optimizer_step(list(model.parameters()), optimizer, 0.1, 1.0, scaler)
        assert norm.isfinite() == (value == 0.0) and torch.equal(model.weight, before)
    assert (scaler.scale.item(), scaler.skipped.item()) == (2.0**15, 1)
    assert all((s[moments] == 0).all() for s in optimizer.state.values())


def test_skipped_steps_are_counted(tmp_path, monkeypatch):
    """The run lowers a scale that is far too large to one that works."""
    monkeypatch.setattr(LossScaler, "START", 2.0**26)
    metrics = trained(tmp_path, TINY, "--n-steps 20 --amp fp16")["metrics"]
    steps = read_steps(tmp_path)
    skipped = sum(step["grad_norm"] is None for step in steps)
    assert 0 < skipped == metrics["skipped_steps"] < 20
    assert steps[-1]["grad_norm"] is not None and steps[-1]["loss"] < steps[0]["loss"] + 0.1


def fp8_model(recipe: str, values: dict):
    shape = parse_config(values, "x.json")
    argv = ["x.json", "--bsz", 1, "--seq-len", 64, *EMULATED, "--fp8-recipe", recipe]
    with torch.device("meta"):
        model = Transformer(shape, 64)
    work = plan_of(argv, platform="cpu", config=shape).work
    fp8 = apply_linear_layers(model, work, CPU)
    materialize(model, CPU, seed=0)
    return model, describe_fp8(work.fp8, shape, fp8.version)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_rounds_the_blocks_and_nothing_else(recipe):
    values = FAMILIES["llama"] | dict(intermediate_size=88)
    shape = parse_config(values, "x.json")
    plain = Transformer(shape, 64)
    materialize(plain, CPU, seed=0)
    model, info = fp8_model(recipe, values)
    torch.testing.assert_close(dict(model.weights()), dict(plain.weights()), rtol=0, atol=0)
    ids = torch.arange(64)[None] % shape.vocab_size
    with torch.autocast("cpu", torch.bfloat16):
        exact, rounded = plain(ids), model(ids)
    assert 1e-3 < ((rounded - exact).norm() / exact.norm()).item() < 0.2
    assert str(model).count("Float8Linear(") == info.n_linear_layers == 3
    # Layers that do not fit stay and are named.
    assert info.high_precision["head"] == "always"
    assert info.high_precision["blocks.*.attn.qkv"] == f"48 x 120 {ODD}"
    assert info.high_precision["blocks.*.mlp.down"] == f"88 x 48 {ODD}"
    assert "blocks.*.mlp.gate_up" not in info.high_precision
    assert info.n_parameters == 3 * 176 * 48


@pytest.mark.parametrize(
    ("recipe", "has", "message"),
    [("tensorwise", (8, 9), None),
     ("tensorwise", (8, 6), "capability 8.6, and 8.9 is needed; leave out --use-fp8"),
     ("rowwise", (8, 9), "8.9, and 9.0 is needed; use --fp8-recipe tensorwise"),
     ("rowwise", (9, 0), None), ("rowwise", "gfx942:sramecc+", None),
     ("tensorwise", "gfx90a", r"card \(gfx90a\) has no such matmuls; MI300 has")],
)  # fmt: skip
def test_fp8_needs_a_device_with_its_matmuls(recipe, has, message, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0" if isinstance(has, str) else None)
    arch = mock.Mock(gcnArchName=has)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: arch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: has)
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        torchao._check_device(torch.device("cuda"), recipe)


@pytest.mark.parametrize(
    ("device", "hip", "has", "fine"),
    [("cpu", None, True, False), ("cuda", "7.0", True, False), ("cuda", None, False, False),
     ("cuda", None, True, True)],
)  # fmt: skip
def test_tf32_is_for_nvidias_gpus_that_have_it(device, hip, has, fine, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: has)
    with contextlib.nullcontext() if fine else pytest.raises(UsageError, match="--tf32: is for NV"):
        set_precision("off", True, torch.device(device))
        assert torch.get_float32_matmul_precision() == "high"
    set_precision("off", False, torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"


def test_bf16_where_it_would_be_emulated_is_refused(monkeypatch):
    """Before Ampere torch.compile would leave such blocks eager and only warn about it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    message = "--amp bf16: Tesla T4 has no bf16 matmuls; use --amp fp16"
    with pytest.raises(UsageError, match=message):
        set_precision("bf16", False, torch.device("cuda"))


@pytest.fixture
def te_in_place(monkeypatch):
    """Transformer Engine's modules by tests/te_standin.py, which computes in high precision."""
    monkeypatch.setattr(fp8_te, "import_te", lambda device, flag: te_standin)
    monkeypatch.setattr(fp8_te, "make_recipe", lambda te, kind: kind)
    monkeypatch.setitem(sys.modules, "transformer_engine", mock.Mock(__version__="stand-in"))
    modules = []

    def remembered(self, *args, real=te_standin.Module.__init__, **kwargs):
        real(self, *args, **kwargs)
        modules.append(self)

    monkeypatch.setattr(te_standin.Module, "__init__", remembered)
    return modules


TE_NAMES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling"}
TE_NAMES |= {"blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}


TE = ["--use-fp8", "--fp8-backend", "te", "--bsz", "2", "--lr", "1e-2", "--lr-warmup-steps", "0"]


def losses_with_te(argv, tmp_path) -> list[float]:
    """The losses with Transformer Engine, which are those without."""
    for name, these in (("plain", TE[3:]), ("te", TE)):
        trained(tmp_path / name, argv, these)
    plain, with_te = ([s["loss"] for s in read_steps(tmp_path / n)] for n in ("plain", "te"))
    assert with_te == pytest.approx(plain, rel=2e-3)
    return plain


@pytest.mark.parametrize("more", [[], ["--sac-freq", "1/2"]], ids=" ".join)
def test_te_blocks_take_cast_weights_from_a_steps_first_micro_batch(more, te_in_place, tmp_path):
    """They cast them anew in the next step: with old casts the losses would differ."""
    losses = losses_with_te([*TINY, "--grad-acc-steps", "2", *more], tmp_path)
    assert max(losses) - min(losses) > 0.02
    assert all(module.n_reused >= 7 for module in te_in_place) and len(te_in_place) == 6
    assert helpers.only_result(tmp_path / "te")["fp8"]["n_linear_layers"] == 8


def test_te_starts_from_exports_of_plain_runs_and_these_from_its_own(te_in_place, tmp_path, capsys):
    """Not from checkpoints: only LayerNormMLP has all gates before up."""
    argv = ["tests/configs/qwen3.json", *TINY[1:], "--lr", "1e-2", "--lr-warmup-steps", "0"]
    kinds = {"plain": [], "te": ["--linear", "te"]}
    for name, flags in kinds.items():
        trained(tmp_path / name, argv, flags, "--amp off --save-every 2 --export --run-name first")
        first, losses = tmp_path / name / "first", []
        for kind, more in kinds.items():
            out = tmp_path / f"{kind} from {name}"
            trained(out, argv, more, "--amp off --init-from", first / "export")
            losses.append(read_steps(out)[0]["loss"])
        assert losses[0] == pytest.approx(losses[1], rel=1e-6), name
        other, path = kinds["plain" if flags else "te"], max((first / "checkpoints").glob("step-*"))
        argv_of = [*argv, *other, "--amp", "off", "--output-dir", tmp_path / f"refused {name}"]
        assert helpers.run_train(*argv_of, "--init-from", path) == 2
        assert "Missing key" in (err := capsys.readouterr().err) and "export it" in err


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_te_without_fp8_is_plain_and_named(family, te_in_place, tmp_path):
    """The same losses and norms of gradients, by its modules."""
    losses = []
    for name in ("plain", "te"):
        argv = [helpers.write_config(tmp_path, FAMILIES[family]), *TINY[1:]]
        flags = ["--linear", name] if name == "te" else []
        result = trained(tmp_path / name, argv, "--lr 1e-2 --lr-warmup-steps 0 --amp off", flags)
        steps = read_steps(tmp_path / name)
        losses.append([s[key] for s in steps for key in ("loss", "grad_norm")])
        assert len(te_in_place) == (9 if flags else 0)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert result["linear"] == "te" and result["fp8"] is None
    assert noted(result, "by Transformer Engine, without FP8")


@pytest.mark.parametrize(
    ("changes", "excluded"),
    [(dict(intermediate_size=88), {"mlp": f"88 x 48 {ODD}"}),
     (dict(hidden_act="gelu"), {"mlp": "Transformer Engine has no gelu"}),
     (dict(head_dim=12), {"attn.qkv": f"48 x 120 {ODD}", "attn.out": f"72 x 48 {ODD}"})],
)  # fmt: skip
def test_layers_that_do_not_fit_te_stay_and_are_named(changes, excluded, te_in_place, tmp_path):
    path = helpers.write_config(tmp_path, FAMILIES["qwen3"] | changes)
    losses_with_te([path, *TINY[1:]], tmp_path)
    fp8 = helpers.only_result(tmp_path / "te")["fp8"]
    layers = {k: v for k, v in fp8["high_precision"].items() if k.startswith("blocks")}
    assert layers == {f"blocks.*.{layer}": why for layer, why in excluded.items()}
    assert len(te_in_place) == 3 * (3 - len(excluded)) and fp8["n_linear_layers"] == 6


def test_te_without_a_layer_that_fits_is_refused(te_in_place, tmp_path, refused):
    values = FAMILIES["qwen3"] | dict(head_dim=12, intermediate_size=88)
    path = helpers.write_config(tmp_path, values)
    error = refused(train_main, "no layer of", path, TINY[1:], TE, "--output-dir", tmp_path)
    assert "attn.out: 72 x 48" in error
    message = "--bsz x --seq-len = 40 tokens of a rank is not a multiple of 16"
    refused(train_main, message, TINY, TE, "--seq-len 20 --output-dir", tmp_path)


@pytest.mark.parametrize(("platform", "multiple"), [("nvidia", 32), ("amd", 128)])
def test_mxfp8_needs_multiples_by_who_multiplies(platform, multiple):
    argv = [*TINY[:-1], "--use-fp8", "--fp8-recipe", "mxfp8", "--bsz", "1"]
    shape = config("gpt2", n_embd=128, n_head=2, n_positions=256)
    plan = plan_of([*argv, "--seq-len", multiple], platform=platform, config=shape)
    assert plan.work.fp8.layers == ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    with pytest.raises(UsageError, match=f"tokens of a rank is not a multiple of {multiple};"):
        plan_of([*argv, "--seq-len", multiple + 16], platform=platform, config=shape)


@pytest.mark.parametrize(("hip", "get"), [(None, "pip install"), ("7.0", "rocm/primus")])
def test_where_te_is_missing_it_says_where_to_get_it(hip, get, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UsageError, match=f"2.9 or newer: .*; .*{get}.*, or use .*torchao"):
        fp8_te.import_te(torch.device("cuda"), "--linear te")


def test_an_fp8_run_says_what_it_did_and_exports(tmp_path):
    flags = "--fp8-recipe rowwise --export --lr 1e-2 --lr-warmup-steps 0"
    r = trained(tmp_path, TINY, EMULATED, flags)
    assert r["fp8"]["recipe"] == "rowwise" and r["fp8"]["version"]
    assert r["metrics"]["ideal_time_fraction"] is None
    assert noted(r, "emulated")
    (export,) = tmp_path.glob("*/export")
    first = read_steps(tmp_path)[0]["loss"]
    trained(tmp_path / "again", TINY, "--init-from", export)
    # On the batch that it was trained on first.
    assert read_steps(tmp_path / "again")[0]["loss"] < first - 0.05


@pytest.mark.parametrize(
    ("flags", "peak", "beyond"),
    [("", 1e-7, True), ("", 100, False), ("--amp off", 1e-7, True), (EMULATED, 1e-7, False)],
)
def test_a_run_that_is_faster_than_can_be_is_marked(flags, peak, beyond, tmp_path):
    """The cause is a wrong peak, or kernels that did nothing; emulated FP8 has no known rate."""
    result = Result.model_validate(trained(tmp_path, TINY, flags, "--peak-tflops", peak))
    assert ("faster than its peak" in result.invalid) == beyond
    assert noted(result.model_dump(), "of the peak, which is impossible") == beyond


def test_counts_of_compilation_are_those_of_the_run(tmp_path):
    """Earlier runs in the same process do not count."""
    counts = []
    for name in ("first", "second"):
        torch._dynamo.reset()  # which run_train does too
        before = compile_counts()["seconds"]
        with helpers.without_inductor():
            m = trained(tmp_path / name, TINY, "--pt-compile")["metrics"]
        counts.append([m[k] for k in ("n_compiled_graphs", "n_graph_breaks", "n_recompilations")])
        assert m["compile_s"] == pytest.approx(compile_counts()["seconds"] - before)
    assert counts[0] == counts[1] and counts[0][0] > 0


def failure(flags, tmp_path, capsys) -> str:
    """The one line of a compiled run that fails."""
    torch._dynamo.reset()
    assert train_main([*flags, "--pt-compile", "--output-dir", tmp_path]) == 1
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("train.py: ")]
    assert "Traceback" not in err and len(err.splitlines()) < 8
    return line


def test_a_compile_error_is_one_line_that_names_the_block(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Block, "add", lambda self, x, y: x + y + len(input()))
    line = failure(TINY, tmp_path, capsys)
    assert "torch.compile failed in blocks.0: " in line and "leave out --pt-compile" in line
    assert helpers.only_result(tmp_path)["status"] == "failed"
    (error_file,) = tmp_path.glob("*/errors/rank0.txt")
    assert "Traceback" in error_file.read_text()


def test_a_compile_error_in_backward_is_one_line_too(tmp_path, monkeypatch, capsys):
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.exc import InductorError

    def no_backward(graph, inputs):
        raise InductorError(RuntimeError("no code for this graph"), None)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=no_backward)

    def broken(function, mode=None, real=torch.compile, **options):
        return real(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", broken)
    line = failure(TINY, tmp_path, capsys)
    assert "torch.compile failed in " in line and "no code for this graph" in line


def test_too_many_recompilations_are_one_line(tmp_path, capsys):
    """Blocks with different windows need a graph each; here only one is allowed."""
    path = helpers.write_config(tmp_path, FAMILIES["qwen2"])
    with torch._dynamo.config.patch(recompile_limit=1), helpers.without_inductor():
        line = failure([path, *TINY[1:]], tmp_path, capsys)
    assert "torch.compile failed in blocks." in line and "recompile_limit" in line


def test_errors_of_the_compiler_are_told_apart(monkeypatch):
    error = RuntimeError("CppCompileError: C++ compile error")
    tries, spaced = "leave out --pt-compile, or try", "a path with a space; move it"
    for directory, message in (("someone", tries), ("some one", spaced)):
        monkeypatch.setattr(torch, "__file__", f"/home/{directory}/torch/__init__.py")
        assert message in str(compile_error(error, "blocks.0"))
    for text, why in (("x raised:\n\nA: b\nc", "x raised: A: b;"), ("A: b\nc", "blocks.0: A: b;")):
        assert why in str(compile_error(RuntimeError(text), "blocks.0"))
    error.__cause__ = torch.OutOfMemoryError("no memory")
    assert compile_error(error, "blocks.0") is error.__cause__


def after_step(monkeypatch, number, meddle):
    def finish(self, step, *args, real=StepLog.finish):
        real(self, step, *args)
        if step == number:
            meddle()

    monkeypatch.setattr(StepLog, "finish", finish)


def test_compiling_inside_the_window_is_flagged(tmp_path, monkeypatch):
    """Compiled graphs are guarded by the number of threads."""
    threads = torch.get_num_threads()
    after_step(monkeypatch, 4, lambda: torch.set_num_threads(threads + 1))
    try:
        with helpers.without_inductor():
            r = trained(tmp_path, TINY, "--amp off --pt-compile")
    finally:
        torch.set_num_threads(threads)
    assert r["metrics"]["window_compile_s"] > 0 and r["metrics"]["n_recompilations"] > 0
    assert noted(r, "s inside the window")
    assert Result.model_validate(r).invalid == ["compiled in the window"]


@pytest.mark.parametrize("refused", [0, 2])
def test_cuda_graphs_that_were_refused_are_noted(refused, tmp_path, monkeypatch):
    """PyTorch only counts them, and runs the compiled code as it is."""
    from torch._dynamo.utils import counters

    after_step(monkeypatch, 1, lambda: counters["inductor"].update(cudagraph_skips=refused))
    # As if blocks ran as CUDA graphs, whose refusals are counted.
    monkeypatch.setattr("llm_train_bench.run.launch.platform_of", lambda device: "nvidia")
    with helpers.without_inductor():
        flags = "--amp off --pt-compile --compile-mode reduce-overhead --warmup-seconds 0"
        r = trained(tmp_path, TINY, flags)
    notes = [n for n in helpers.remark_texts(r) if "without CUDA graphs" in n]
    assert [n.split()[0] for n in notes] == (["2"] if refused else [])


def test_numerics_gate_catches_what_learns_otherwise():
    reference = np.linspace(5, 2, 200)
    wrong = reference * np.linspace(1, 1.03, 200)
    bf16, fp8 = {"amp": "bf16"}, {"amp": "bf16", "use_fp8": True, "fp8_recipe": "tensorwise"}
    exact = {"amp": "off"}
    for ok, args, curve, noise in (
        (True, bf16, reference * 1.001, 0),
        (False, bf16, reference * 1.015, 0),
        (False, bf16, wrong, 0),
        (False, bf16, np.append(reference[:-1], np.nan), 0),
        (True, fp8, reference * 1.015, 0),
        (False, fp8, wrong, 0),
        (True, fp8 | {"fp8_recipe": "nvfp4"}, wrong, 0),
        (False, exact, reference * (1 + 2e-4), 0),
        # Where rounding alone carries a curve that far, it says nothing of the compiler.
        (True, exact, reference * (1 + 2e-4), 1e-4),
        (False, exact, reference * (1 + 4e-4), 1e-4),
    ):
        assert numerics.judge(args, curve, reference, noise)["ok"] is ok, args


def test_numerics_judges_every_run_and_names_those_that_failed(tmp_path, capsys):
    length = "--n-steps 4 --warmup-steps 1"
    for amp in ("off", "bf16"):
        trained(tmp_path / amp, TINY, f"--amp {amp} {length}")
    (low,) = (tmp_path / "bf16").glob("*/steps.jsonl")
    assert numerics.main([str(tmp_path)]) == 0
    steps = low.read_text().splitlines()
    lost = [json.dumps(json.loads(step) | {"loss": None}) for step in steps]
    for lines, code, verdict in ((steps[:2], 0, "failed: "), (lost, 1, "BEYOND")):
        low.write_text("\n".join(lines) + "\n")
        assert numerics.main([str(tmp_path)]) == code and verdict in capsys.readouterr().out
    assert numerics.main([str(low.parent)]) == 2 and "reference" in capsys.readouterr().err
    trained(tmp_path / "seed", TINY, f"--amp bf16 --seed 7 {length}")
    assert numerics.main([str(tmp_path)]) == 2 and "same config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("use", "rate", "stored"),
    [({}, 800.0, 800.0), ({}, 600.0, 700.0), ({"other_processes": 1}, 800.0, 700.0),
     ({"throttled": {"thermal (hardware)": 0.5}}, 800.0, 700.0),
     ({"throttled": {"power cap": 1.0}}, 800.0, 800.0)],
)  # fmt: skip
def test_a_disturbed_roof_is_not_stored(use, rate, stored, tmp_path, monkeypatch):
    roofs = tmp_path / "roofs.json"
    roofs.write_text(json.dumps({"GPU": {"bf16_tflops": 700.0, "source": "before"}}))
    monkeypatch.setattr(gemm, "ROOFS_FILE", roofs)
    content = {"date": "now", "environment": {"libraries": {"torch": "2"}}}
    gemm.keep("GPU", {"bf16_tflops": rate}, DeviceUse(rank=0, **use), content, replace=False)
    assert json.loads(roofs.read_text())["GPU"]["bf16_tflops"] == stored
