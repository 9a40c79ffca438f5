"""Passes over activations, counted: an eager step's operators and bytes on tensors without memory.

A change that adds a pass makes these red, on any machine.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llm_train_bench.model.config import load_config
from llm_train_bench.model.transformer import Transformer
from tests.helpers import ROOT

META = torch.device("meta")
VIEWS = """
    view _unsafe_view t transpose permute slice split split_with_sizes detach expand unsqueeze squeeze
    select alias as_strided unbind chunk empty empty_like new_empty reshape lift_fresh empty_strided
    _reshape_alias
""".split()


class Counted(TorchDispatchMode):
    """How many operators ran, and the bytes of their inputs and outputs; views do not count."""

    def __init__(self):
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
            self.calls += 1
            self.bytes += sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))
        return out


class OnePass(torch.autograd.Function):
    """Attention as one operator each way, whichever kernel this version of PyTorch takes."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q).fill_(0)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        return tuple(torch.empty_like(x).fill_(0) for x in (q, k, v))


def step(name, depth, B, T, monkeypatch):
    """Calls and bytes of a forward and backward of a model of so many blocks."""
    config = load_config(ROOT / f"configs/{name}.json", layers=depth)
    one_pass = lambda q, k, v, **_: OnePass.apply(q, k, v)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", one_pass)
    with META:
        model = Transformer(config, T)
        ids = torch.empty(B, T, dtype=torch.int64)
        model(ids, ids).backward()  # makes what is made once
        for parameter in model.parameters():
            parameter.grad = None
        with Counted() as counted:
            model(ids, ids).backward()
    return counted


# (operators, bytes over those of one activation of d numbers a token) of a block and of all the rest.
COUNTS = {"gpt2-tiny": ((31, 113.629), (30, 52.634)), "llama-tiny": ((83, 196.733), (44, 57.383))}


@pytest.mark.parametrize("name", COUNTS)
def test_a_step_passes_over_activations_as_often_as_recorded(name, monkeypatch):
    B, T = 64, 128  # so many tokens that activations, not weights, are what is moved
    config = load_config(ROOT / f"configs/{name}.json")
    one, two = (step(name, depth, B, T, monkeypatch) for depth in (1, 2))
    activation = 4 * B * T * config.hidden_size
    block = two.calls - one.calls, (two.bytes - one.bytes) / activation
    rest = one.calls - block[0], one.bytes / activation - block[1]
    for (calls, n_bytes), recorded in zip((block, rest), COUNTS[name], strict=True):
        assert calls == recorded[0]
        assert n_bytes == pytest.approx(recorded[1], rel=1e-3)
