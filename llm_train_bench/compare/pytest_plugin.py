"""pytest's fixture `no_regression`: a test fails where a run got slower than its baseline.

def test_speed(no_regression, tmp_path):
    subprocess.run([sys.executable, "train.py", ..., "--output-dir", tmp_path], check=True)
    no_regression(tmp_path)

pytest --train-baseline baselines.json --train-tolerance 5%
"""

import functools

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    group = parser.getgroup("llm-train-bench")
    group.addoption(
        "--train-baseline", metavar="FILE", help="Baselines that runs are held against."
    )
    group.addoption(
        "--train-tolerance", metavar="PERCENT", default="5%", help="Allowed loss (default: 5%%)."
    )


@pytest.fixture
def no_regression(request: pytest.FixtureRequest):
    """Call it with results or directories: fails the test on a regression, or what cannot be judged.

    Baselines that the test did not measure do not count. Without --train-baseline the test is skipped.
    """
    # Not before: every pytest run of this environment loads this module.
    from llm_train_bench.base.errors import UsageError
    from llm_train_bench.compare.gate import assert_no_regression, tolerance_of

    baseline = request.config.getoption("--train-baseline")
    if baseline is None:
        pytest.skip("no --train-baseline to hold the run against")
    try:
        tolerance = tolerance_of(str(request.config.getoption("--train-tolerance")))
    except UsageError as error:
        raise pytest.UsageError(str(error).replace("--tolerance", "--train-tolerance")) from None
    return functools.partial(
        assert_no_regression, baseline=baseline, tolerance=tolerance, allowed=["NOT MEASURED"]
    )
