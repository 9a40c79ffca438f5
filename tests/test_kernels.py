"""The Triton kernels against PyTorch's operators, on a GPU or in Triton's interpreter on a CPU.

`make test-oldest` and `make bytes` have an environment with Triton, and run this file alone. The CPU
build of torch has none.
"""

import sys

import pytest
import torch
import torch.nn.functional as F

from llm_train_bench.model import fused_backward, init

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernels():
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setenv("TRITON_INTERPRET", "1")
        if "triton" in sys.modules and not CUDA:  # by another test: too late for its interpreter
            pytest.skip("Triton is imported without its interpreter; run this file alone")
        pytest.importorskip("triton")
        from llm_train_bench.model import triton_kernels

        yield triton_kernels


def normal(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to("cuda" if CUDA else "cpu", dtype)


def assert_near(actual, exact, dtype):
    """Near fp64's result: two roundings, and in fp32 those of a polynomial too."""
    error = (actual.double() - exact).abs().max() / exact.abs().max()
    assert error < max(2e-6, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (200, 192), (1030, 65)])
@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_backward(kernels, shape, dtype, tanh):
    grad, h = normal(*shape, dtype=dtype), 2 * normal(*shape, 1, dtype=dtype)[..., 0]
    h[0, 0] = 30.0  # far beyond where the slope is 1
    out, sums = kernels.gelu_backward(grad, h, tanh)
    exact = torch.ops.aten.gelu_backward(
        grad.double(), h.double(), approximate="tanh" if tanh else "none"
    )
    assert_near(out, exact, dtype)
    assert_near(sums, out.double().sum(0), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(3, 3, 64), (6, 2, 20), (1, 1, 128)])
def test_join_heads(kernels, heads, dtype):
    H, K, D = heads
    B, T = 2, 261
    q = normal(B, T, H, D, dtype=dtype)
    k = normal(B, K, T, D, dtype=dtype).transpose(1, 2)
    v = normal(T, B, K, D + 8, dtype=dtype).transpose(0, 1)[..., :D]
    out, sums = kernels.join_heads(q, k, v)
    assert torch.equal(out, torch.cat((q, k, v), dim=2))
    assert_near(sums, out.double().sum((0, 1)).flatten(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 100), (700, 48), (530, 257)])
@pytest.mark.parametrize("centred", [True, False])
def test_norm_backward(kernels, shape, dtype, centred):
    x, grad, stream = (normal(*shape, i, dtype=dtype)[..., 0] for i in (1, 2, 3))
    weight, d = normal(shape[1]), shape[1:]
    x, wide, w = x.contiguous(), x.double().requires_grad_(), weight.double().requires_grad_()
    bias = torch.zeros_like(w, requires_grad=True)
    if centred:
        mean, normed = x.float().mean(1, keepdim=True), F.layer_norm(wide, d, w, bias, 1e-5)
        rstd = torch.rsqrt(x.float().var(1, unbiased=False, keepdim=True) + 1e-5)
    else:
        mean, normed = None, F.rms_norm(wide, d, w, 1e-5) + 0 * bias
        rstd = torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5)
    grad, stream = grad.contiguous(), stream.contiguous()
    out, sums = kernels.norm_backward(grad, x, mean, rstd, weight, stream)
    exact, *vectors = torch.autograd.grad(normed, (wide, w, bias), grad.double())
    assert_near(out, exact + stream.double(), dtype)
    vectors = [*vectors, stream.double().sum(0)] if centred else vectors[:1]
    assert len(sums) == len(vectors)
    for actual, right in zip(sums, vectors, strict=True):
        assert_near(actual, right, torch.float32)


@pytest.mark.parametrize("tanh", [True, False])
def test_plain_operators_compute_the_same(kernels, tanh):
    """What runs where there is no Triton."""
    grad, h = normal(40, 24), normal(24, 40).T.contiguous()
    heads = normal(2, 9, 4, 8), normal(2, 9, 2, 8), normal(2, 2, 9, 8).transpose(1, 2)
    rows = normal(40, 24), normal(40, 1).abs(), normal(24), normal(24, 40).T.contiguous()
    for name, inputs in (
        ("gelu_backward", (grad, h, tanh)),
        ("join_heads", heads),
        ("norm_backward", (grad, h, None, *rows[1:])),
        ("norm_backward", (grad, h, normal(40, 1), *rows[1:])),
    ):
        plain = getattr(fused_backward, f"_plain_{name}")(*inputs)
        for actual, right in zip(getattr(kernels, name)(*inputs), plain, strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 2049, 70_001])
def test_hashed_choice(kernels, n):
    """The kernel chooses what PyTorch's operators choose, bit by bit."""
    table = normal(2**16)
    out, expected = torch.zeros_like(table[:1].expand(n).contiguous()), torch.zeros(n)
    kernels.hashed_choice(table, out, -1234567, 2**31 - 5)
    init.choose(table.cpu(), expected, -1234567, 2**31 - 5)
    assert torch.equal(out.cpu(), expected)
