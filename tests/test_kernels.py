"""The Triton kernel against PyTorch's operators, on a GPU or in Triton's interpreter on a CPU.

`make test-oldest` and `make bytes` have an environment with Triton, and run this file alone. The CPU
build of torch has none.
"""

import sys

import pytest
import torch

from llm_train_bench.model import init

CUDA = torch.cuda.is_available()


@pytest.fixture(scope="module")
def kernels():
    if "triton" in sys.modules and not CUDA:  # by another test: too late for its interpreter
        pytest.skip("Triton is imported without its interpreter; run this file alone")
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton")
        from llm_train_bench.model import triton_kernels

        yield triton_kernels


@pytest.mark.parametrize("n", [1, 2, 2049, 70_001])
def test_hashed_choice(kernels, n):
    """The kernel chooses what PyTorch's operators choose, bit by bit."""
    table = torch.randn(2**16, device="cuda" if CUDA else "cpu")
    out, expected = torch.zeros_like(table[:1].expand(n).contiguous()), torch.zeros(n)
    kernels.hashed_choice(table, out, -1234567, 2**31 - 5)
    init.choose(table.cpu(), expected, -1234567, 2**31 - 5)
    assert torch.equal(out.cpu(), expected)
