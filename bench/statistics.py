"""Statistics of step times. Needs no torch."""

from collections.abc import Sequence

BOOTSTRAP_SAMPLES = 2000


def describe(times: list[float]) -> dict[str, float]:
    """Median, mean, standard deviation, CV, 10th and 90th percentile, and a 95 % interval [s].

    The interval is the percentile bootstrap of the mean (Efron 1979), with a fixed seed; it takes
    steps as independent. The standard deviation is that of a sample (n - 1), 0 for one step.
    """
    import numpy as np  # a tenth of a second, which --help of the tools need not wait for

    x = np.asarray(times, dtype=np.float64)
    mean = float(x.mean())
    std = float(x.std(ddof=1)) if len(x) > 1 else 0.0
    low, high = bootstrap_mean(x)
    return {
        "step_time_median_s": float(np.median(x)),
        "step_time_mean_s": mean,
        "step_time_std_s": std,
        "step_time_cv": std / mean,
        "step_time_min_s": float(x.min()),
        "step_time_max_s": float(x.max()),
        "step_time_p10_s": float(np.percentile(x, 10)),
        "step_time_p90_s": float(np.percentile(x, 90)),
        "step_time_ci95_low_s": low,
        "step_time_ci95_high_s": high,
    }


def bootstrap_mean(sample: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of the mean of a sample."""
    import numpy as np

    x = np.asarray(sample, dtype=np.float64)
    rng = np.random.default_rng(0)
    means = np.empty(BOOTSTRAP_SAMPLES)
    for i in range(BOOTSTRAP_SAMPLES):  # one at a time: long runs would need gigabytes at once
        means[i] = x[rng.integers(0, len(x), len(x))].mean()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
