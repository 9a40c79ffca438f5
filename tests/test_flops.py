"""FLOPs by formula against torch's own counter, and by counting attended pairs."""

import dataclasses
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from llm_train_bench.apply.recompute import apply_recompute
from llm_train_bench.formulas.flops import flops_per_token, recomputed_flops_per_token
from llm_train_bench.formulas.parameters import linear_parameters
from llm_train_bench.formulas.work import Fp8Work, Recompute
from llm_train_bench.model import layers
from llm_train_bench.model.config import load_config
from llm_train_bench.model.experts import Stacked
from llm_train_bench.model.transformer import Transformer
from tests.helpers import FAMILIES, config, plan_of

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")


@pytest.fixture(autouse=True)
def what_torch_counts(monkeypatch):
    """Grouped matmuls it does not: rows meet one expert each, here all the first. Attention in pieces
    is counted as the whole: these are below every window."""

    def attend(q, k, v, seen, scale, sinks=None):
        return layers.attend(q, k, v, None, 0.0, scale)

    def first_expert(self, rows, counts):
        return F.linear(rows, self.weight[0])

    def solve(system, columns, **how):
        return system @ columns

    # Neither a triangular system is counted, nor what is inside operators of our own.
    monkeypatch.setattr(torch.linalg, "solve_triangular", solve)
    monkeypatch.setattr(layers, "attend_in_pieces", attend)
    monkeypatch.setattr(Stacked, "forward", first_expert)


@register_flop_formula(torch.ops.llm_train_bench.chunk_states)
def states_flops(k, v, w, *args, out_shape=None, **kwargs) -> int:
    """Keys times values, and w times the state."""
    return (1 + (w is not None)) * 2 * math.prod(k) * v[-1]


@register_flop_formula(torch.ops.llm_train_bench.chunk_states_backward)
def states_backward_flops(of_states, of_added, k, w, *args, out_shape=None, **kwargs) -> int:
    return (1 + (w is not None)) * 2 * math.prod(k) * of_added[-1]


def counted(shape, seq_len: int, train=True, recompute=None, convert=lambda model: None) -> float:
    """FLOPs per token as torch counts them, on the meta device, where attention is plain matmuls."""
    with torch.device("meta"):
        model = Transformer(shape, seq_len)
        ids = torch.zeros(2, seq_len, dtype=torch.int64)
    convert(model)
    apply_recompute(model, recompute or Recompute())
    with FlopCounterMode(display=False) as counter:
        loss = model(ids, ids)
        if train:
            loss.backward()
    return counter.get_total_flops() / ids.numel()


def work_of(shape, seq_len, *flags):
    return plan_of(["x.json", "--seq-len", seq_len, *flags], config=shape).work


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    """The forward alone, all passes, and what checkpointing repeats: a norm after the last layer
    needs that layer's output again. torch counts the masked half of attention too, as `palm` does."""
    shape = config(family, sliding_window=None) if family == "mistral" else config(family)
    seq_len = 6  # below every window
    with torch.no_grad():
        forward = counted(shape, seq_len, train=False)
    assert forward == flops_per_token(shape, seq_len, False, "forward")
    step, block = counted(shape, seq_len), work_of(shape, seq_len, "--sac-freq", "1/1")
    assert step == flops_per_token(shape, seq_len, False, "forward-backward")
    assert step == 3 * forward
    again = counted(shape, seq_len, recompute=block.recompute) - step
    assert again == pytest.approx(recomputed_flops_per_token(block))
    kept = work_of(shape, seq_len, "--sac-freq", "1/1", "--sac-policy", "op")
    again = counted(shape, seq_len, recompute=kept.recompute) - step
    assert again == pytest.approx(recomputed_flops_per_token(kept))


@pytest.mark.parametrize("freq", ["1/1", "1/2", "1/3"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputed_flops_are_what_checkpointing_repeats(freq, dropout):
    """Counted with and without; the op policy repeats no matmul. A dropout at the end of a block needs
    its mask again, so that the last matmul is repeated as well."""
    shape = config("gpt2", resid_pdrop=dropout) if dropout else config("llama")
    plain, block = counted(shape, 16), work_of(shape, 16, "--sac-freq", freq)
    again = counted(shape, 16, recompute=block.recompute) - plain
    assert again == pytest.approx(recomputed_flops_per_token(block))
    kept = work_of(shape, 16, "--sac-freq", freq, "--sac-policy", "op").recompute
    assert counted(shape, 16, recompute=kept) == plain


def test_a_checkpoint_of_fp8_repeats_the_last_matmul_too():
    """With torchao's modules (emulated): their autograd functions save the input at their end."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    shape = config("llama")
    recipe = Float8LinearConfig.from_recipe_name("tensorwise")
    recipe = dataclasses.replace(recipe, emulate=True)
    block = work_of(shape, 16, "--sac-freq", "1/1")

    def convert(model):
        convert_to_float8_training(model.blocks, config=recipe)

    plain, again = (counted(shape, 16, True, r, convert) for r in (None, block.recompute))

    def formula(work=block, layers=("attn.qkv", "mlp.down")):
        fp8 = Fp8Work("torchao", "tensorwise", layers=layers)
        return recomputed_flops_per_token(dataclasses.replace(work, fp8=fp8))

    eager = formula()
    assert again - plain == pytest.approx(eager)
    down = 2 * shape.num_hidden_layers * shape.intermediate_size * shape.hidden_size
    compiled = work_of(shape, 16, "--sac-freq", "1/1", "--pt-compile")
    assert formula(compiled) == eager - down
    assert formula(layers=("attn.qkv",)) == eager - down


@pytest.mark.parametrize(
    ("name", "seq_len", "palm_keys", "causal_keys"),
    # A window of 4096: so many keys a query (palm), or 4096 - 4096^2 / 16384 (causal).
    [("mistral-7b-v0.1", 8192, 4096, 3072), ("gpt2-125m", 1024, 1024, 512)],
)
def test_conventions_by_hand(name, seq_len, palm_keys, causal_keys):
    """6 N + 12 L d T, and in causal attention half of T; the parameters N include a tied head."""
    shape = load_config(f"configs/{name}.json")
    n = sum(linear_parameters(shape).values())
    assert n == 12 * 12 * 768**2 + 50257 * 768 or name != "gpt2-125m"
    for keys, causal in ((palm_keys, False), (causal_keys, True)):
        attention = 12 * shape.num_hidden_layers * shape.hidden_size * keys
        assert flops_per_token(shape, seq_len, causal) == 6 * n + attention
