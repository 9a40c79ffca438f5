"""Initial values: known numbers, their statistics, and that they depend on seed, name and place alone."""

import hashlib

import pytest
import torch

from llm_train_bench.model import init
from llm_train_bench.model.init import fill_normal
from tests.helpers import built, config


def values(n: int, key: str = "0/x", std: float = 1.0) -> torch.Tensor:
    numbers = torch.empty(n)
    fill_normal(numbers, std, key)
    return numbers


def test_these_are_the_values_on_every_machine():
    """Integer and exactly rounded operations alone: a digest of the bytes holds them all."""
    few = [0.519, -0.7147, -0.3639]
    assert values(3).tolist() == pytest.approx(few, abs=1e-4)
    digest = hashlib.sha256(values(100_001, "7/blocks.0.mlp.up", 0.02).numpy().tobytes())
    assert digest.hexdigest()[:16] == "16e1d74f49a2f666"


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_values_do_not_depend_on_how_many_are_made_at_once(chunk, monkeypatch):
    whole = values(5001)
    monkeypatch.setattr(init, "CPU_HASHES", chunk)
    assert torch.equal(values(5001), whole) and torch.equal(values(4), whole[:4])


def test_a_layer_that_writes_into_the_residual_stream_is_smaller():
    shape = config("llama", hidden_size=96, head_dim=16, intermediate_size=192)
    for name, parameter in built(shape, 3).named_parameters():
        module = name.split(".")[-2]
        expected = 0.02 / (6**0.5 if module in ("out", "down") else 1)
        if parameter.ndim > 1:
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
