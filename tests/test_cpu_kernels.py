"""Kernels of our own for a CPU against PyTorch's: oneDNN's linear layers, attention in blocks, GELU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from llm_train_bench.base import machine
from llm_train_bench.model import block_attention, onednn
from llm_train_bench.model.block_attention import attend_in_blocks
from llm_train_bench.model.layers import gelu_tanh
from llm_train_bench.model.loss import LinearCrossEntropy, matmul_transposed
from llm_train_bench.model.products import replace_linear
from tests import helpers
from tests.helpers import FAMILIES, plan_of, trained, words

needs_onednn = pytest.mark.skipif(not onednn.available(), reason="a PyTorch without oneDNN")
SHAPES = [(1, 1, 1), (3, 7, 5), (33, 48, 80), (130, 257, 64), (64, 80, 1024)]


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def gradients(function, inputs, grad):
    """The output, and the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def gradients_of_layer(layer, x, grad):
    """The output, and the gradients of the input and of the parameters."""
    y = layer(x := x.clone().requires_grad_())
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)]


def by_onednn(layer):
    """The layer by oneDNN, with the same parameters."""
    replace_linear(model := nn.Sequential(layer), "0", onednn.OnednnLinear)
    return model[0]


def error(actual, exact):
    return ((actual.double() - exact.double()).norm() / exact.double().norm()).item()


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_onednn_linear_layers_and_gradients_are_plain_ones(shape, bias):
    m, n, k = shape
    layer, x, grad = nn.Linear(k, n, bias=bias), normal(2, m, k), normal(2, m, n)
    results = [gradients_of_layer(layer, x, grad)]
    results.append(gradients_of_layer(by_onednn(layer), x, grad))
    for right, ours in zip(*results, strict=True):
        assert ours.shape == right.shape and error(ours, right) < 2e-6


@needs_onednn
def test_onednn_layers_leave_other_formats_and_frozen_weights_alone():
    layer, x = nn.Linear(24, 40), normal(6, 24)
    right = layer(x)
    layer = by_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert torch.equal(layer(x[:0]), right[:0])
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@needs_onednn
@pytest.mark.parametrize("elements", [16 * 211, 10**9])
def test_the_loss_by_onednn_is_the_plain_one(elements):
    hidden, weight, labels = normal(75, 32), normal(211, 32), torch.arange(75) % 211
    losses = [
        LinearCrossEntropy(211, elements, matmul) for matmul in (matmul_transposed, onednn.product)
    ]
    plain, ours = (
        gradients(lambda h, w, f=f: f(h, w, labels), (hidden, weight), torch.tensor(0.5))
        for f in losses
    )
    assert all(error(a, b) < 2e-6 for a, b in zip(ours, plain, strict=True))


@needs_onednn
def test_onednn_layers_compile_in_one_graph():
    layer, x, grad = nn.Linear(24, 40), normal(3, 6, 24), normal(3, 6, 40)
    right = gradients_of_layer(layer, x, grad)
    layer = by_onednn(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for ours, plain in zip(gradients_of_layer(compiled, x, grad), right, strict=True):
        assert error(ours, plain) < 2e-6


HEADS = [(2, 3, 3, 256, 16, 16), (1, 6, 2, 131, 8, 8), (2, 4, 1, 64, 24, 8), (1, 2, 2, 5, 8, 8)]
HEADS += [(1, 1, 1, 1, 8, 8), (1, 2, 1, 1030, 8, 8)]


@pytest.mark.parametrize("sizes", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_blocks_is_exact(dtype, sizes):
    """Against fp64: as exact as PyTorch's in fp32; in bf16 within the roundings of flash attention."""
    B, H, K, T, D, E = sizes
    inputs = [normal(B, T, n, d, dtype=dtype).transpose(1, 2) for n, d in ((H, D), (K, D), (K, E))]
    grad = normal(B, T, H, E + 1, dtype=dtype)[..., :E].transpose(1, 2)

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K, scale=0.3)

    exact = gradients(plain, [x.double() for x in inputs], grad.double())
    ours = gradients(lambda q, k, v: attend_in_blocks(q, k, v, 0.3), inputs, grad)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == dtype
        if b.any():  # one key alone gives its query no gradient
            assert error(a, b) < {torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]


def operators():
    """Each operator of ours with inputs of which an output could be a view: dense, and one head."""
    q, rows = normal(2, 1, 40, 8), normal(40, 24)
    yield block_attention.block_attention, (q, q.clone(), q.clone(), 1.0)
    one = q[:, :, :1].contiguous()
    yield block_attention.block_attention, (one, one.clone(), one.clone(), 1.0)
    kept = block_attention.block_attention(q, q.clone(), q.clone(), 1.0)[1:]
    yield block_attention.block_attention_backward, (q.clone(), *kept, 1, 1.0)
    if onednn.available():
        yield onednn.onednn_linear, (rows, normal(16, 24), None)
        yield onednn.onednn_linear, (rows, normal(24, 16).t(), normal(16))
        yield onednn.onednn_grad_weight, (normal(40, 16), rows)
        yield onednn.onednn_grad_weight, (normal(40, 48), rows)


def test_no_operator_returns_a_view_of_its_inputs_or_another_shape_than_it_says():
    """The compiler reuses the memory of inputs, and takes shapes and strides from the fake one."""
    for operator, inputs in operators():
        torch.library.opcheck(operator, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(not helpers.INDUCTOR_LINKS, reason="PyTorch lies in a path with a space")
def test_compiled_attention_of_one_head_has_its_gradients():
    """Inductor's own code: q, k and v are dense, and their memory is used again."""
    x, grad = normal(2, 64, 48), normal(2, 1, 64, 16)

    def attend(x, blocks):
        q, k, v = (t[:, None] for t in (2 * x).split(16, dim=-1))
        q, k, v = q.cos(), k.sin(), v.exp()
        if blocks:
            return attend_in_blocks(q, k, v, None)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    right = gradients(lambda x: attend(x, False), [x.double()], grad.double())
    ours = gradients(torch.compile(lambda x: attend(x, True), fullgraph=True), [x], grad)
    assert all(error(a, b) < 1e-6 for a, b in zip(ours, right, strict=True))


def test_compiled_gelu_is_the_tanh_form():
    x, grad = normal(5, 300) * 4, normal(5, 300)
    plain = gradients(lambda x: F.gelu(x, approximate="tanh"), [x.double()], grad.double())
    compiled = torch.compile(gelu_tanh, backend="aot_eager", fullgraph=True)
    for ours, right in zip(gradients(compiled, [x], grad), plain, strict=True):
        assert error(ours, right) < 1e-6


def plan(tmp_path, *flags, platform="cpu", **changes):
    path = helpers.write_config(tmp_path, FAMILIES["gpt2"] | changes)
    return plan_of([path, *flags], "train.py", 1, platform)


def test_who_takes_blocks_and_onednn(tmp_path):
    short, long = ("--seq-len", 32, "--amp", "off"), ("--seq-len", 1024, "--amp", "off")
    wide = dict(n_positions=4096)
    assert plan(tmp_path, *short).work.attention.causal == "blocks"
    assert plan(tmp_path, *long, **wide).work.attention.causal == "auto"
    assert plan(tmp_path, "--seq-len", 1024, **wide).work.attention.causal == "blocks"  # bf16
    assert plan(tmp_path, *short, "--attention", "flash").work.attention.causal == "flash"
    assert plan(tmp_path, *short, platform="nvidia").work.attention.causal == "auto"
    assert plan(tmp_path, *short, attn_pdrop=0.1).work.attention.causal == "auto"
    assert plan(tmp_path, *long, "--attention", "blocks", **wide).work.attention.causal == "blocks"
    assert plan(tmp_path, *short).work.linear == "plain"
    assert plan(tmp_path).work.linear is None  # bf16; refusals are in tests/records/refusals.txt


@needs_onednn
def test_long_steps_on_a_cpu_of_amd_are_by_onednn(tmp_path, monkeypatch):
    flags = words("--device cpu --amp off --bsz 2 --seq-len 32 --warmup-steps 1 --n-steps 2")
    config = helpers.write_config(tmp_path, FAMILIES["gpt2"])
    cases = ("AMD X", 0, "onednn"), ("AMD X", 1e99, "plain"), ("Another", 0, "plain")
    for name, least, library in cases:
        monkeypatch.setattr(machine, "_processor", lambda name=name: (name, set()))
        monkeypatch.setattr("llm_train_bench.settings.plan.LONG_STEP", least)
        result = trained(tmp_path / f"{name}{least}", config, flags)
        assert result["linear"] == library
        paths = result["observed"]["paths"]
        assert paths.get("linear layers", "plain") == library
