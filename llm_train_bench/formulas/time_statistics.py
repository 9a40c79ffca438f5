"""Statistics of step times, and of runs. Needs no torch."""

import dataclasses
import functools
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
    low, high = bootstrap_mean(times) or (None, None)
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
    if n < 3 or not 0 < min(times) <= max(times) < 1e9:  # seconds; or somebody edited them
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

    x = np.asarray(sample, dtype=np.float64)
    means = np.array([part.mean() for part in np.array_split(x, min(WINDOW_PARTS, len(x)))])
    if (k := len(means)) < 2:
        return None
    picks = np.random.default_rng(0).integers(0, k, (BOOTSTRAP_SAMPLES, k))
    low, high = np.percentile(means[picks].mean(axis=1), [2.5, 97.5])
    wider = STUDENT_T[k - 2] / NORMAL * math.sqrt(k / (k - 1))
    center, middle = float(np.mean(sample)), float(means.mean())
    low = center - wider * (middle - float(low))
    # With two or three unlike times the interval can reach below 0; times cannot.
    return max(0.0, low) if min(sample) >= 0 else low, center + wider * (float(high) - middle)


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean of runs, their standard deviation, and its degrees of freedom; 0: it is not known."""

    value: float
    n: int
    std: float = 0.0
    degrees: int = 0

    @property
    def error(self) -> float:
        """Variance of the mean."""
        return self.std**2 / self.n


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of the runs' values."""
    n = len(values)
    return Mean(statistics.fmean(values), n, statistics.stdev(values) if n > 1 else 0.0, n - 1)


def difference(a: Mean, b: Mean) -> tuple[float, float, float] | None:
    """a - b, its standard error and degrees of freedom (Welch 1947); None where no noise is known."""
    if not (a.degrees or b.degrees):
        return None
    if not (a.degrees and b.degrees):  # one run takes the other side's noise, by its value
        known, single = (a, b) if a.degrees else (b, a)
        std = known.std * abs(single.value / known.value)
        error = math.sqrt(known.error + max(std, single.std) ** 2 / single.n)
        return a.value - b.value, error, known.degrees
    error = a.error + b.error
    degrees = error**2 / (a.error**2 / a.degrees + b.error**2 / b.degrees) if error else 1.0
    return a.value - b.value, math.sqrt(error), degrees


@functools.lru_cache(maxsize=256)
def _half_of_t(degrees: float):
    """Angles and the mass of Student's t from 0 up to them: t = sqrt(degrees) tan(angle)."""
    import numpy as np

    angle = np.linspace(0.0, math.pi / 2, 8001)
    density = np.cos(angle) ** (degrees - 1)
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return angle, mass / mass[-1] / 2


def student_t(probability: float, degrees: float) -> float:
    """Quantile of Student's t, for a probability above one half."""
    import numpy as np

    degrees = round(min(degrees, 1e4), 1)
    angle, mass = _half_of_t(degrees)
    return math.sqrt(degrees) * math.tan(float(np.interp(probability - 0.5, mass, angle)))


def chance_of(t: float, degrees: float) -> float:
    """Probability of a Student's t beyond +-t."""
    import numpy as np

    degrees = round(min(degrees, 1e4), 1)
    angle, mass = _half_of_t(degrees)
    return 1 - 2 * float(np.interp(math.atan(abs(t) / math.sqrt(degrees)), angle, mass))
