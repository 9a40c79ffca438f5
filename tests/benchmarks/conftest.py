"""Speed and memory of the tiny configs under pytest-benchmark, for comparing one revision with another.

    python -m pytest tests/benchmarks/test_throughput.py -v
    python -m pytest tests/benchmarks --benchmark-json now.json
    python -m pytest tests/benchmarks --benchmark-compare

`make test` passes all of these over.
"""

import functools

import pytest

from benchmarks.common import run_train

SETTINGS = {
    "gpt2-tiny fp32": "configs/gpt2-tiny.json --amp off --bsz 8",
    "gpt2-tiny bf16": "configs/gpt2-tiny.json --amp bf16 --bsz 8",
    "llama-tiny fp32": "configs/llama-tiny.json --amp off --bsz 4",
    "llama-tiny sac": "configs/llama-tiny.json --amp off --bsz 4 --sac-freq 1/2",
}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Whoever names these files wants them measured."""
    named = any("tests/benchmarks" in str(word) for word in config.invocation_params.args)
    if named and hasattr(config.option, "benchmark_enable"):
        config.option.benchmark_enable = True


@pytest.fixture(autouse=True)
def only_when_asked(benchmark):
    if benchmark.disabled:
        pytest.skip("--benchmark-enable runs it")


@pytest.fixture(params=SETTINGS)
def run(request):
    """The result of train.py in one of the settings."""
    words = [*SETTINGS[request.param].split(), "--seq-len", 128, "--no-tensorboard"]
    return functools.partial(run_train, *words)


@pytest.fixture
def record(benchmark):
    """Takes values for the times [s] of a group's rounds."""

    def record(group, values):
        clock, numbers = [0.0], iter(values)

        def use():
            clock[0] += next(numbers)

        benchmark.group, benchmark._timer = group, lambda: clock[0]
        benchmark.pedantic(use, rounds=len(values), iterations=1)

    return record
