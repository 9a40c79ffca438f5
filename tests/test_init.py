"""Initial values: known numbers, their statistics, and that they depend on seed, name and place alone."""

import hashlib
import statistics

import pytest
import torch

from llm_train_bench.model import init
from llm_train_bench.model.init import fill_normal, quantiles
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


def test_quantiles_are_those_of_the_normal_distribution():
    exact, ours = statistics.NormalDist(), quantiles()
    for i in (0, 1, 100, 32767, 32768, 50000, 65535):
        assert ours[i].item() == pytest.approx(exact.inv_cdf((i + 0.5) / 2**16), abs=1e-10)
    assert torch.equal(ours, -ours.flip(0)) and (ours.diff() > 0).all()


def test_moments_and_correlations_are_those_of_independent_normal_numbers():
    n = 2_000_000
    x, y = values(n), values(n, "0/y")
    assert abs(x.mean()) < 5 / n**0.5 and abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 5 * (15 / n) ** 0.5 and abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    for lag in (1, 2, 3, 64, 768, 4096, init.CPU_HASHES, 2 * init.CPU_HASHES):
        assert abs((x[lag:] * x[:-lag]).mean()) < 5 / n**0.5, lag
        # Of the squares: values of a size must not come in groups.
        assert abs(((x[lag:] ** 2 - 1) * (x[:-lag] ** 2 - 1)).mean()) < 10 / n**0.5, lag
    assert abs((x * y).mean()) < 5 / n**0.5
    # Every 16th part of the distribution has its share, in both halves of a hash.
    for half in (x[::2], x[1::2]):
        shares = torch.histc(torch.special.ndtr(half), 16, 0, 1) / len(half)
        assert (shares - 1 / 16).abs().max() < 5 * (1 / 16 / len(half)) ** 0.5


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_values_do_not_depend_on_how_many_are_made_at_once(chunk, monkeypatch):
    whole = values(5001)
    monkeypatch.setattr(init, "CPU_HASHES", chunk)
    assert torch.equal(values(5001), whole) and torch.equal(values(4), whole[:4])


def test_seed_and_name_change_all_values():
    x = values(1000)
    for key in ("1/x", "0/y", "0/x."):
        assert (values(1000, key) == x).float().mean() < 0.01


def test_a_layer_that_writes_into_the_residual_stream_is_smaller():
    shape = config("llama", hidden_size=96, head_dim=16, intermediate_size=192)
    for name, parameter in built(shape, 3).named_parameters():
        module = name.split(".")[-2]
        expected = 0.02 / (6**0.5 if module in ("out", "down") else 1)
        if parameter.ndim > 1:
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
