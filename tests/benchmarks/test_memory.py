"""Peak memory of a step's tensors, as the only round: a second stands for a GiB."""

import pytest

from llm_train_bench.compare.gate import judge_all
from tests.benchmarks.conftest import SETTINGS
from tests.benchmarks.plugin import tolerance_in


def test_memory(run, record, benchmark):
    result = run("--n-steps", 1, "--warmup-steps", 2, "--memory-snapshot")
    benchmark.extra_info |= result.memory.model_dump()
    record("peak memory (1 s = 1 GiB)", [result.memory.peak_gib])


@pytest.mark.parametrize("name", SETTINGS)
def test_against_its_baseline(name, measured, request):
    directory, option = measured(name), request.config.getoption
    verdicts = judge_all([directory], option("--train-baseline"), tolerance_in(request.config))
    (verdict,) = (v for v in verdicts if v.status != "NOT MEASURED")
    assert verdict.was and verdict.was.memory_gib and verdict.now, verdict.line
    assert "MORE MEMORY" not in verdict.status, verdict.line
