"""Weights in bf16, with their gradients and moments, and no exact copies."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from llm_train_bench.apply.blocks import apply_linear_layers
from llm_train_bench.apply.optimizer import optimizer_of, optimizer_step
from llm_train_bench.formulas.collectives import traffic
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.settings.flags import OptimizerFlags
from tests.dist_worker import Traffic
from tests.faults import whole_state
from tests.helpers import FAMILIES, config, plan_of, remark_texts, run_train, words, write_config
from tests.memory_trace import traced_memory


def test_a_step_is_adamws_rounded_once_and_a_nan_stays_one():
    """With clipping and decay. A diverged run must not look alive."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40, 3).bfloat16())
    weight.grad = torch.randn(40, 3).bfloat16()
    optimizer = optimizer_of({"a.weight": weight}, OptimizerFlags(weight_decay=0.1))
    wide, grad = weight.detach().double(), weight.grad.double()
    norm = optimizer_step([weight], optimizer, 0.01, 0.5, None)
    assert norm.item() == pytest.approx(grad.norm().item(), rel=1e-5)
    exact = wide * (1 - 0.01 * 0.1) - 0.01 * grad.sign()  # the first step of Adam
    torch.testing.assert_close(weight.detach().double(), exact, rtol=2**-8, atol=1e-6)
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    weight.grad = torch.full_like(weight, float("nan"))
    assert optimizer_step([weight], optimizer, 0.01, 0.5, None).isnan()
    assert weight.isnan().all()


def test_a_run_is_in_bf16_and_goes_on_from_its_checkpoint(tmp_path):
    """Six steps at once, or three and three: the same weights, bit for bit; others do not resume it."""
    source = write_config(tmp_path, FAMILIES["llama"])
    common = [source, *words("--seq-len 16 --bsz 2 --device cpu --warmup-steps 0 --lr 1e-2")]
    common += words("--amp bf16 --n-steps 6 --save-every 3 --export")
    low = [*common, "--bf16-weights"]
    assert run_train(*low, "--output-dir", tmp_path, "--run-name", "whole") == 0
    saved = tmp_path / "whole/checkpoints/step-00000003"
    assert run_train(*low, "--output-dir", tmp_path, "--run-name", "b", "--resume", saved) == 0
    exports = [load_file(tmp_path / name / "export/model.safetensors") for name in ("whole", "b")]
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(exports[0][n], exports[1][n]) for n in exports[0])
    assert {t.dtype for t in exports[0].values()} == {torch.bfloat16}
    state, low_bits = whole_state(saved), torch.bfloat16
    kinds = {name.split("/")[0]: tensor.dtype for name, tensor in state.items()}
    assert kinds == dict(p=low_bits, exp_avg=low_bits, exp_avg_sq=low_bits, step=torch.float32)
    result = json.loads((tmp_path / "whole/result.json").read_text())
    assert "gradients and moments in bf16" in json.dumps(remark_texts(result))
    assert run_train(*common, "--output-dir", tmp_path, "--resume", saved) == 2


def test_all_but_the_correction_of_a_routers_choice_is_in_bf16():
    """A step of 0.001 would be lost beside a correction of 1."""
    shape = config("deepseek_v3", router_bias_update_rate=0.001)
    argv = words("x.json --device cpu --bf16-weights")
    with torch.device("meta"):
        model = Transformer(shape, 8)
    apply_linear_layers(model, plan_of(argv, config=shape).work, torch.device("cpu"))
    kinds = {name.endswith(".correction"): p.dtype for name, p in model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


def test_gradients_move_in_bf16_under_ddp_and_weights_under_fsdp():
    """The router too, which FSDP otherwise gathers in fp32; reductions of FSDP stay in fp32."""
    shape = config("deepseek_v3")
    argv = words("x.json --bf16-weights --seq-len 16 --bsz 1")
    work = plan_of(argv, "train_ddp.py", 2, config=shape).work
    assert traffic(work) == {"all_reduce": 2 * count_parameters(shape)}
    plan, seen = plan_of(argv, "train_fsdp.py", 4, config=shape), Traffic(False)
    seen.looking = False
    with seen:
        traced_memory(plan.work, plan.optimizer)
    moved = traffic(plan.work)
    for kind in ("all_gather", "reduce_scatter"):
        assert moved[kind] == seen.bytes[kind] / 2, kind  # it traces two steps
