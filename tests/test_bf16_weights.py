"""Weights in bf16: fp32 master copies, and stochastic rounding."""

import copy
import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from llm_train_bench.apply import optimizer as module
from llm_train_bench.apply.optimizer import Bf16AdamW, optimizer_of, optimizer_step
from llm_train_bench.apply.precision import set_weights
from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.collectives import ddp_bytes, fsdp_bytes
from llm_train_bench.formulas.parameters import count_parameters, parameter_shapes
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.run.checkpoint.manifest import check_same_training, read_manifest
from llm_train_bench.settings.flags import OptimizerFlags
from tests.dist_worker import Traffic
from tests.helpers import FAMILIES, config, plan_of, remark_texts, run_train, words, write_config
from tests.memory_trace import traced_memory

FLAGS = OptimizerFlags(lr=0.01, weight_decay=0.1)


def some_parameters(dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = {"a.weight": (7, 5), "b.weight": (40, 3), "norm.weight": (5,)}
    return {n: nn.Parameter(torch.randn(s).to(torch.bfloat16).to(dtype)) for n, s in shapes.items()}


def set_gradients(named, step):
    torch.manual_seed(step)
    for p in named.values():
        p.grad = torch.randn(p.shape).to(torch.bfloat16).to(p.dtype)


@pytest.mark.parametrize("at_once", [2**24, 11])
def test_master_copies_take_the_steps_of_fp32(at_once):
    """With clipping and decay, in pieces of any size; the weights are their rounding."""
    flags = OptimizerFlags(lr=0.01, weight_decay=0.1, bf16_weights="master")
    low, wide = some_parameters(), some_parameters(torch.float32)
    ours, plain = optimizer_of(low, flags), optimizer_of(wide, FLAGS)
    with mock.patch.object(module, "AT_ONCE", at_once):
        for step in range(5):
            set_gradients(low, step)
            set_gradients(wide, step)
            both = (low, ours), (wide, plain)
            norms = [optimizer_step([*p.values()], o, 0.01, 0.5, None) for p, o in both]
            torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
            masters = {name: ours.state[p]["master"] for name, p in low.items()}
            torch.testing.assert_close(masters, dict(wide), rtol=2e-6, atol=1e-7)
            assert all(torch.equal(p, masters[n].to(torch.bfloat16)) for n, p in low.items())


def test_stochastic_rounding_keeps_small_updates_on_average():
    """A step is a sixteenth of a unit of bf16: nearest rounding would never leave 1."""
    named = {"x.weight": nn.Parameter(torch.ones(100, 200, dtype=torch.bfloat16))}
    (p,) = named.values()
    unit = 2.0**-8  # between 1/2 and 1
    flags = OptimizerFlags(lr=unit / 16, weight_decay=0.0, bf16_weights="stochastic")
    optimizer = optimizer_of(named, flags)
    p.grad = torch.ones_like(p)
    optimizer.step()
    values = p.detach().float()
    assert set(values.unique().tolist()) == {1.0, 1.0 - unit}
    # Of 20,000 numbers a sixteenth, with a standard deviation of 0.17 %.
    assert (values < 1).float().mean().item() == pytest.approx(1 / 16, abs=0.008)
    for _ in range(31):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.detach().float().mean().item() == pytest.approx(1 - 2 * unit, abs=0.03 * unit)


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_chooses_a_neighbour_and_leaves_what_is_exact(sign):
    optimizer = Bf16AdamW([{"params": [nn.Parameter(torch.zeros(1))]}], lr=1.0, masters=False)
    torch.manual_seed(0)
    exact = sign * torch.randn(5000).to(torch.bfloat16).float()
    values = exact.clone()
    optimizer._round(values, "a")
    assert torch.equal(values, exact)
    fine = sign * torch.rand(5000) + sign
    values = fine.clone()
    optimizer._round(values, "a")
    low = fine.view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)
    assert ((values == low) | (values == low + sign * 2.0**-7)).all()
    assert (values - fine).mean().abs() < 4 * 2.0**-7 / 5000**0.5
    again, other = fine.clone(), fine.clone()
    optimizer._round(again, "a")
    optimizer._round(other, "b")
    assert torch.equal(again, values) and not torch.equal(other, values)
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    optimizer._round(odd, "a")
    assert odd.isinf().tolist() == [True, True, False, False] and odd[2].isnan() and odd[3] == 0


def test_replicas_round_alike_and_steps_differ():
    flags = OptimizerFlags(lr=0.01, bf16_weights="stochastic")
    first, second = some_parameters(), some_parameters()
    both = [(named, optimizer_of(named, flags)) for named in (first, second)]
    seen = []
    for _ in range(3):
        before = copy.deepcopy(first["b.weight"].data)
        for named, optimizer in both:
            set_gradients(named, 0)
            optimizer.step()
        assert all(torch.equal(first[n], second[n]) for n in first)
        seen.append((first["b.weight"].data.float() - before.float()).flatten())
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("how", ["stochastic", "master"])
def test_a_run_is_in_bf16_and_goes_on_from_its_checkpoint(how, tmp_path):
    """Six steps at once, or three and three: the same weights, bit for bit; others do not resume it."""
    source = write_config(tmp_path, FAMILIES["llama"])
    common = [source, *"--seq-len 16 --bsz 2 --device cpu --warmup-steps 0 --lr 1e-2".split()]
    common += words("--n-steps 6 --save-every 3 --save-keep 9 --export --bf16-weights", how)
    assert run_train(*common, "--output-dir", tmp_path, "--run-name", "whole") == 0
    saved = tmp_path / "whole/checkpoints/step-00000003"
    assert run_train(*common, "--output-dir", tmp_path, "--run-name", "b", "--resume", saved) == 0
    exports = [load_file(tmp_path / name / "export/model.safetensors") for name in ("whole", "b")]
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(exports[0][n], exports[1][n]) for n in exports[0])
    assert {t.dtype for t in exports[0].values()} == {torch.bfloat16}
    tensors = json.loads((saved / "manifest.json").read_text())["manifest"]["tensors"]
    kinds = {name.split("/")[0]: t["dtype"] for name, t in tensors.items() if "/" in name}
    assert kinds["p"] == "BF16" and kinds["exp_avg"] == "F32"
    assert ("master" in kinds) == (how == "master")
    result = json.loads((tmp_path / "whole/result.json").read_text())
    assert "in bf16, moments in fp32" in json.dumps(remark_texts(result))
    assert run_train(*common[:-1], "off", "--output-dir", tmp_path, "--resume", saved) == 2
    # In another format if asked to: of master copies the exact values.
    for other in {"off", "stochastic", "master"} - {how}:
        again = tmp_path / f"to {other}"
        flags = ["--resume", saved, "--resume-anyway", "--export", "--output-dir", again]
        assert run_train(*common[:-1], other, *flags) == 0
        (export,) = again.glob("*/export/model.safetensors")
        ends = [{n: t.float() for n, t in e.items()} for e in (load_file(export), exports[0])]
        torch.testing.assert_close(*ends, atol=0.02, rtol=0.02)
        (last,) = again.glob("*/checkpoints/step-00000006/manifest.json")
        assert ("master/" in last.read_text()) == (other == "master")
    # A checkpoint from before the flag was trained at its default.
    manifest, plan = read_manifest(saved), plan_of(common)
    older = {key: value for key, value in manifest.args.items() if key != "bf16_weights"}
    manifest, flags = manifest.model_copy(update={"args": older}), vars(plan.args)
    with pytest.raises(UsageError, match=f"--bf16-weights {how}: .* was trained with off"):
        check_same_training(manifest, saved, plan.work, 6, flags, plan.data)
    off = flags | {"bf16_weights": "off"}
    check_same_training(manifest, saved, plan.work, 6, off, plan.data)


def test_all_but_the_correction_of_a_routers_choice_is_in_bf16():
    """A step of 0.001 would be lost beside a correction of 1."""
    shape = config("deepseek_v3", router_bias_update_rate=0.001)
    argv = words("x.json --device cpu --bf16-weights stochastic")
    with torch.device("meta"):
        model = Transformer(shape, 8)
    set_weights(model, plan_of(argv, config=shape).work)
    kinds = {name.endswith(".correction"): p.dtype for name, p in model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


def test_gradients_move_in_bf16_under_ddp_and_weights_under_fsdp():
    """The router too, which FSDP otherwise gathers in fp32; reductions of FSDP stay in fp32."""
    shape = config("deepseek_v3")
    argv = words("x.json --bf16-weights master --seq-len 16 --bsz 1")
    work = plan_of(argv, "train_ddp.py", 2, config=shape).work
    assert ddp_bytes(parameter_shapes(shape), work) == {"all_reduce": 2 * count_parameters(shape)}
    plan, traffic = plan_of(argv, "train_fsdp.py", 4, config=shape), Traffic(False)
    traffic.looking = False
    with traffic:
        traced_memory(plan.work, plan.optimizer)
    moved = fsdp_bytes(parameter_shapes(shape), plan.work)
    for kind in ("all_gather", "reduce_scatter"):
        assert moved[kind] == traffic.bytes[kind] / 2, kind  # it traces two steps
