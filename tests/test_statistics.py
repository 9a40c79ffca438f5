"""Statistics of step times and the figures made of them."""

import numpy as np
import pytest

from bench.statistics import bootstrap_mean, describe


def test_against_numpy_and_by_hand():
    s = describe([1.0, 2.0, 3.0, 4.0, 10.0])
    assert s["step_time_median_s"] == 3.0 and s["step_time_mean_s"] == 4.0
    assert s["step_time_std_s"] == pytest.approx(np.sqrt(50 / 4))
    assert s["step_time_cv"] == pytest.approx(np.sqrt(50 / 4) / 4)
    assert (s["step_time_min_s"], s["step_time_max_s"]) == (1.0, 10.0)
    assert s["step_time_p10_s"] == pytest.approx(1.4) and s["step_time_p90_s"] == pytest.approx(7.6)


def test_one_step_has_no_spread():
    s = describe([0.5])
    assert s["step_time_std_s"] == 0.0 and s["step_time_cv"] == 0.0
    assert s["step_time_ci95_low_s"] == s["step_time_ci95_high_s"] == 0.5


def test_bootstrap_interval_covers_the_mean_as_often_as_it_says():
    """Of 200 normal samples of 40, about 95 % of the intervals hold the true mean."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        low, high = bootstrap_mean(rng.normal(1.0, 0.1, 40))
        hits += low <= 1.0 <= high
    assert 180 <= hits <= 198
    low, high = bootstrap_mean(rng.normal(1.0, 0.1, 40))
    # Width of a 95 % normal interval: 2 x 1.96 x 0.1 / sqrt(40) = 0.062.
    assert 0.04 < high - low < 0.085
