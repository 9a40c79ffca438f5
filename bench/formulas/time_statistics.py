"""Statistics of step times. Needs no torch."""

import math
import statistics
from collections.abc import Sequence

BOOTSTRAP_SAMPLES = 2000
WINDOW_PARTS = 10
# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom, and the normal one.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NORMAL = 1.960
# Step times may change by this fraction over a window.
STEADY = 0.02


def describe(times: list[float]) -> dict[str, float | None]:
    """Median, mean, least, greatest, 10th and 90th percentile, standard deviation, 95 % interval [s];
    CV and drift, which have no unit.

    The standard deviation is a sample's (n - 1). Spread and interval of a single step are None.
    The drift is the mean of the last third over that of the first, minus 1; None below nine steps.
    """
    import numpy as np  # takes 0.1 s; --help of the tools need not wait for it

    x = np.asarray(times, dtype=np.float64)
    mean = float(x.mean())
    std = float(x.std(ddof=1)) if len(x) > 1 else None
    low, high = bootstrap_mean(x) or (None, None)
    return {
        "step_time_median_s": float(np.median(x)),
        "step_time_mean_s": mean,
        "step_time_std_s": std,
        "step_time_cv": None if std is None else std / mean,
        "step_time_min_s": float(x.min()),
        "step_time_max_s": float(x.max()),
        "step_time_p10_s": float(np.percentile(x, 10)),
        "step_time_p90_s": float(np.percentile(x, 90)),
        "step_time_ci95_low_s": low,
        "step_time_ci95_high_s": high,
        "step_time_drift": drift(times)[0],
    }


def drift(times: Sequence[float]) -> tuple[float | None, bool]:
    """Mean of the last third over that of the first, minus 1, and whether that is beyond chance.

    None below nine values. Beyond chance is 2 % and four standard errors of the difference.
    """
    n = len(times) // 3
    if n < 3:
        return None, False
    first, last = times[:n], times[-n:]
    change = statistics.fmean(last) / statistics.fmean(first) - 1
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / n)
    sure = abs(statistics.fmean(last) - statistics.fmean(first)) > 4 * error
    return change, sure and abs(change) > STEADY


def bootstrap_mean(sample: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of values in their order; None for a single one.

    Percentile bootstrap (Efron 1979), fixed seed, of the means of up to ten consecutive parts:
    steps near each other are alike (clocks, temperature). It is expanded for the small number of
    parts (Hesterberg 2015: by t / z and sqrt(k / (k - 1)); without it three values cover 73 %).
    """
    import numpy as np

    means = means_of_parts(sample)
    if len(means) < 2:
        return None
    low, high = np.percentile(resampled_means(means, seed=0), [2.5, 97.5])
    center, wider = float(np.mean(sample)), expansion(len(means))
    middle = float(means.mean())
    low = center - wider * (middle - float(low))
    # With two or three unlike times the interval can reach below 0; times cannot.
    return max(0.0, low) if min(sample) >= 0 else low, center + wider * (float(high) - middle)


def bootstrap_ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of mean(a) / mean(b) of times, likewise; None with fewer than three in either."""
    import numpy as np

    if min(len(a), len(b)) < 3:
        return None
    x, y = means_of_parts(a), means_of_parts(b)
    ratios = resampled_means(x, seed=0) / resampled_means(y, seed=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    middle, wider = float(x.mean() / y.mean()), expansion(min(len(x), len(y)))
    center = float(np.mean(a) / np.mean(b))
    low = center - wider * (middle - float(low))
    return max(0.0, low), center + wider * (float(high) - middle)


def means_of_parts(sample: Sequence[float]):
    """Means of up to ten consecutive parts of about equal length, as an array."""
    import numpy as np

    x = np.asarray(sample, dtype=np.float64)
    return np.array([part.mean() for part in np.array_split(x, min(WINDOW_PARTS, len(x)))])


def resampled_means(values, seed: int):
    """Means of samples drawn with replacement from an array."""
    import numpy as np

    picks = np.random.default_rng(seed).integers(0, len(values), (BOOTSTRAP_SAMPLES, len(values)))
    return values[picks].mean(axis=1)


def expansion(k: int) -> float:
    """How much wider the percentile interval of k values must be to cover as often as it says."""
    return STUDENT_T[k - 2] / NORMAL * math.sqrt(k / (k - 1))
