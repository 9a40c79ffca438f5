"""Step times; tokens/s and memory stand beside them in the JSON."""

import pytest

from tests.benchmarks.conftest import SETTINGS


def test_step_time(run, record, benchmark):
    result = run("--n-steps", 20, "--warmup-steps", 5)
    record("step time", result.step_times_s)
    for name in ("tokens_per_sec", "peak_rss_gib", "peak_allocated_gib"):
        benchmark.extra_info[name] = getattr(result.metrics, name)


@pytest.mark.parametrize("name", SETTINGS)
def test_against_its_baseline(name, measured, no_regression):
    no_regression(measured(name))
