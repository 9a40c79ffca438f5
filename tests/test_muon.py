"""Muon: against PyTorch's, matrix by matrix, and its learning beside AdamW's."""

import pytest
import torch

from llm_train_bench.apply.muon import Muon
from llm_train_bench.apply.optimizer import build_optimizer, optimizer_step
from llm_train_bench.formulas.flops import muon_flops
from llm_train_bench.model.hf import segment_rows
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.settings.flags import OptimizerFlags
from tests.helpers import built, config, plan_of

MUON = OptimizerFlags(optimizer="muon", lr=1e-2, weight_decay=0.1)


def model_of(family: str, **changes) -> Transformer:
    return built(config(family, **changes))


def gradients_of(model: Transformer) -> None:
    ids = torch.arange(32).view(2, 16) % 97
    model(ids, ids).backward()


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_step_is_pytorchs_for_each_matrix(family, monkeypatch):
    """Queries, keys, values, gate, up and each expert are matrices of their own; both in fp32 here."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # as torch 2.15 names it
    model = model_of(family)
    gradients_of(model)
    learnt = {weight: p for weight, p in model.weights() if p.requires_grad}
    before = {weight: p.detach().clone() for weight, p in learnt.items()}
    expected, count = {}, 0
    for weight, parameter in learnt.items():
        if not weight.is_matrix:
            continue
        stack = before[weight] if parameter.ndim == 3 else before[weight][None]
        grads = parameter.grad if parameter.ndim == 3 else parameter.grad[None]
        assert sum(weight.segments) == stack.shape[1]
        wholes = []
        for matrix, grad in zip(stack, grads, strict=True):
            after = torch.empty_like(matrix)
            for rows in segment_rows(weight):
                own = torch.nn.Parameter(matrix[rows])
                own.grad = grad[rows]
                options = dict(lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
                torch.optim.Muon([own], **options).step()
                after[rows] = own.detach()
            wholes.append(after)
            count += 1
        expected[weight] = torch.stack(wholes).view_as(before[weight])
    optimizer = build_optimizer(model, MUON)
    assert isinstance(optimizer, Muon) and len(optimizer.exchange.own) == count
    optimizer.step()
    for weight, after in expected.items():
        step, theirs = learnt[weight].detach() - before[weight], after - before[weight]
        assert (step - theirs).norm() < 1e-3 * theirs.norm(), weight.name


def test_the_rest_takes_the_steps_of_adamw():
    model, other = model_of("qwen3"), model_of("qwen3")
    for m, flags in ((model, MUON), (other, OptimizerFlags(lr=1e-2))):
        gradients_of(m)
        build_optimizer(m, flags).step()
    for (weight, a), (_, b) in zip(model.weights(), other.weights(), strict=True):
        assert torch.equal(a, b) != weight.is_matrix, weight.name


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "qwen3_moe", "nemotron_h"])
def test_flops_of_the_iterations_are_those_counted(name):
    """Those of a step; fused layers and experts are matrices of their own."""
    from torch.utils.flop_counter import FlopCounterMode

    model = model_of(name)
    gradients_of(model)
    optimizer = build_optimizer(model, MUON)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    matrices = [weight for weight, _ in model.weights() if weight.is_matrix]
    expected = sum(muon_flops(w) * (w.shape[0] if w.of_experts else 1) for w in matrices)
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_optimizers_hold_as_many_bytes_as_the_formula_says(name):
    shape = config("qwen3", hidden_size=64, intermediate_size=256, vocab_size=128)
    model = built(shape)
    optimizer = build_optimizer(model, OptimizerFlags(optimizer=name))
    gradients_of(model)
    optimizer_step([*model.parameters()], optimizer, 1e-3, 1.0, None)
    tensors = [t for s in optimizer.state.values() for t in s.values() if t.ndim]
    held = sum(t.nbytes for t in tensors)
    work = plan_of(["x.json", "--optimizer", name, "--seq-len", "16"], config=shape).work
    expected = work.state_bytes * sum(p.numel() for p in model.parameters())
    assert held == pytest.approx(expected, rel=0.02)
