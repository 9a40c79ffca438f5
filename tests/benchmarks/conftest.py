"""Speed and memory of the tiny configs under pytest-benchmark, for comparing one revision with another.

    python -m pytest tests/benchmarks/test_throughput.py -v
    python -m pytest tests/benchmarks --benchmark-json now.json
    python -m pytest tests/benchmarks --benchmark-compare

Timings are looked at, never asserted: `sweep.py --baseline` judges. `make test` passes them over.
"""

import pytest


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


@pytest.fixture(params=[
    ["configs/gpt2-tiny.json", "--amp", "off", "--bsz", 8, "--seq-len", 128],
    ["configs/gpt2-tiny.json", "--amp", "bf16", "--bsz", 8, "--seq-len", 128],
    ["configs/llama-tiny.json", "--amp", "off", "--bsz", 4, "--seq-len", 128],
    ["configs/llama-tiny.json", "--amp", "off", "--bsz", 4, "--seq-len", 128, "--sac-freq", "1/2"],
], ids=["gpt2-tiny fp32", "gpt2-tiny bf16", "llama-tiny fp32", "llama-tiny sac"])  # fmt: skip
def setting(request):
    """A command line of train.py."""
    return request.param
