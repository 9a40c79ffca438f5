"""Activations on the host: the policy with a stand-in for the copies, and gradients of every family."""

import functools

import pytest
import torch

from llm_train_bench.apply.offload import Copies, apply_offload
from llm_train_bench.apply.recompute import apply_recompute
from llm_train_bench.formulas.work import Recompute
from tests.helpers import FAMILIES, built, config
from tests.test_parity import some_tokens

# So many samples that their tokens are as many as no side of a weight.
B, T, CPU = 7, 24, torch.device("cpu")


class Recorder(Copies):
    """Notes every copy, and whose memory was sent."""

    def __init__(self):
        self.calls, self.memory = [], set()

    def out(self, x):
        self.calls.append(("out", tuple(x.shape)))
        self.memory.add(x.untyped_storage().data_ptr())
        return x.detach().clone()

    def back(self, host):
        self.calls.append(("back", tuple(host.shape)))
        return host.clone()


def step(model, tokens, micro=1):
    """Gradients of `micro` micro batches whose backwards follow all forwards, in their order."""
    losses = [model(t[:, :-1], t[:, 1:]) for t in tokens.chunk(micro)]
    for loss in losses:
        loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def two_steps(model):
    for _ in range(2):
        grads = step(model, some_tokens(2 * B, T + 1), micro=2)
    return grads


@functools.cache
def plain_gradients(family):
    """Those of a model that neither recomputes nor offloads."""
    return two_steps(built(config(family), 0, T))


@pytest.mark.parametrize("recomputed", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same(family, recomputed):
    copies, model = Recorder(), built(config(family), 0, T)
    apply_recompute(model, Recompute(recomputed))
    apply_offload(model, True, CPU, copies)
    torch.testing.assert_close(two_steps(model), plain_gradients(family), rtol=1e-5, atol=1e-7)
    sent = [shape for way, shape in copies.calls if way == "out"]
    assert len(sent) == sum(way == "back" for way, _ in copies.calls)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not weights & copies.memory
    if len(recomputed) == model.config.num_hidden_layers:  # the inputs of blocks alone
        assert sent == [(B * T * model.config.hidden_size,)] * 12


def test_the_block_before_comes_while_one_computes():
    """In backward the last block and the one before are asked for at once, then one at a time."""
    copies, model = Recorder(), built(config("llama"), 0, T)
    apply_recompute(model, Recompute((0, 1, 2)))
    apply_offload(model, True, CPU, copies)
    order = []
    for layer, block in model.blocks.items():
        block.attn_norm.register_forward_hook(lambda *_, layer=layer: order.append(int(layer)))
    back = copies.back
    copies.back = lambda host: (order.append("back"), back(host))[1]
    step(model, some_tokens(B, T + 1))
    assert order == [0, 1, 2, "back", "back", 2, "back", 1, 0]


def test_a_tensor_that_several_operators_save_is_copied_once():
    model = built(config("gpt2"), 0, T)
    copies = Recorder()
    apply_offload(model, True, CPU, copies)
    step(model, some_tokens(B, T + 1))
    sent = [shape for way, shape in copies.calls if way == "out"]
    # A block of GPT-2 saves the norms' inputs and outputs, q/k/v, attention's output, and of the MLP
    # both sides of GELU; beside a mean and a deviation of each norm, and the log-sum-exp.
    n = B * T * 48
    assert sent.count((4 * n,)) == 2 * 3 and sent.count((n,)) == 5 * 3
