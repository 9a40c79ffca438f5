"""Speed and memory of the tiny configs under pytest-benchmark, for comparing one revision with another.

    python -m pytest tests/benchmarks --benchmark-enable --benchmark-json now.json
    python -m pytest tests/benchmarks --benchmark-enable --benchmark-compare

Timings are looked at, never asserted; without --benchmark-enable nothing here runs.
"""

import pytest

from benchmarks.common import run_train

CASES = {
    "gpt2-tiny fp32": ["configs/gpt2-tiny.json", "--amp", "off", "--bsz", 8, "--seq-len", 128],
    "gpt2-tiny bf16": ["configs/gpt2-tiny.json", "--amp", "bf16", "--bsz", 8, "--seq-len", 128],
    "llama-tiny fp32": ["configs/llama-tiny.json", "--amp", "off", "--bsz", 4, "--seq-len", 128],
    "llama-tiny sac": ["configs/llama-tiny.json", "--amp", "off", "--bsz", 4, "--seq-len", 128,
                       "--sac-freq", "1/2"],
}  # fmt: skip
SHORT = ["--n-steps", 20, "--warmup-steps", 5, "--no-tensorboard"]


@pytest.fixture(autouse=True)
def only_when_asked(benchmark):
    if benchmark.disabled:
        pytest.skip("--benchmark-enable runs it")


@pytest.mark.parametrize("name", CASES)
def test_step_time(name, benchmark, tmp_path):
    """The steps of a run are the rounds; tokens/s and memory stand beside them in the JSON."""
    benchmark.group = "step time"
    result = run_train(*CASES[name], *SHORT, "--output-dir", tmp_path)
    times = iter(result.step_times_s)
    clock = [0.0]

    def timer() -> float:
        return clock[0]

    def step() -> None:
        clock[0] += next(times)

    benchmark._timer = timer
    benchmark.pedantic(step, rounds=len(result.step_times_s), iterations=1)
    benchmark.extra_info |= {
        "tokens_per_sec": result.metrics.tokens_per_sec,
        "peak_rss_gib": result.metrics.peak_rss_gib,
        "peak_allocated_gib": result.metrics.peak_allocated_gib,
    }


@pytest.mark.parametrize("name", CASES)
def test_memory(name, benchmark, tmp_path):
    """Peak memory of one step's tensors as the only round: a second stands for a GiB."""
    benchmark.group = "peak memory (1 s = 1 GiB)"
    flags = [
        *CASES[name],
        "--n-steps",
        1,
        "--warmup-steps",
        2,
        "--no-tensorboard",
        "--memory-snapshot",
    ]
    result = run_train(*flags, "--output-dir", tmp_path)
    benchmark.extra_info |= result.memory.model_dump()
    clock = [0.0]
    benchmark._timer = lambda: clock[0]

    def use() -> None:
        clock[0] += result.memory.peak_gib

    benchmark.pedantic(use, rounds=1, iterations=1)
