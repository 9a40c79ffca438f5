"""pytest's fixture `no_regression`: a test fails where a run got slower than its baseline.

def test_speed(no_regression, tmp_path):
    subprocess.run([sys.executable, "train.py", ..., "--output-dir", tmp_path], check=True)
    no_regression(tmp_path)

pytest --train-baseline baselines.json --train-tolerance 5%
"""

import contextlib
import functools

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    group = parser.getgroup("llm-train-bench")
    group.addoption(
        "--train-baseline", metavar="FILE", help="File of runs (compare.py --save) to compare with."
    )
    group.addoption(
        "--train-tolerance", metavar="PERCENT", default="5%", help="Allowed loss (default: 5%%)."
    )


def tolerance_in(config: pytest.Config) -> float:
    """--train-tolerance as a fraction: of 5%, 0.05."""
    from llm_train_bench.base.number_text import parse_number

    text = str(config.getoption("--train-tolerance"))
    with contextlib.suppress(ValueError):
        if 0 <= (tolerance := parse_number(text, float, percent=True)) < 1:
            return tolerance
    raise pytest.UsageError(f"--train-tolerance {text}: must be from 0 to below 100%, such as 5%")


@pytest.fixture
def no_regression(request: pytest.FixtureRequest):
    """Call it with results or directories: fails the test on a regression, or what cannot be judged.

    Baselines that the test did not measure do not count. Without --train-baseline the test is skipped.
    """
    # Not before: every pytest run of this environment loads this module.
    from llm_train_bench.compare.gate import assert_no_regression

    baseline = request.config.getoption("--train-baseline")
    if baseline is None:
        pytest.skip("no --train-baseline to hold the run against")
    tolerance = tolerance_in(request.config)
    return functools.partial(
        assert_no_regression, baseline=baseline, tolerance=tolerance, allowed=["NOT MEASURED"]
    )
