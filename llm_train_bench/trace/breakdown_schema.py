"""The parts of a breakdown, and what is the same for GPU and CPU. Needs no torch."""

import itertools
import math
from collections import Counter

from llm_train_bench.strict import Strict, about
from llm_train_bench.trace.kernel_names import ELEMENTWISE, LOSS, MATMUL, OPTIMIZER
from llm_train_bench.trace.read_trace import Span

HOST = "host"
N_COSTLIEST = 10


class CostlyKernel(Strict):
    """A kernel, or on a CPU an operator."""

    name: str = about("- its name;")
    kind: str = about("- its class;")
    calls: float = about("- calls a step;")
    time_s: float = about("- seconds a step.")


class HostGaps(Strict):
    """Moments in which the GPU waited for the host to give it its next kernel, per step."""

    count: float = about("- how many a step;")
    time_s: float = about("- their sum [s];")
    longest_s: float = about("- the longest [s];")
    by_part: dict[str, float] = about("- that sum by the part of the step that launched late [s].")


class Breakdown(Strict):
    """Seconds per step; the classes add up to `step_time_s`."""

    n_steps: int
    step_time_s: float
    classes_s: dict[str, float]
    communication_overlapped_s: float
    host_gaps: HostGaps | None
    kernels: list[CostlyKernel]
    matmul_s: float
    matmul_flops: float | None
    # Known for our own runs only: they know the device's measured rate.
    matmul_roof_fraction: float | None = None

    @property
    def costliest(self) -> list[CostlyKernel]:
        """The kernels that take longest."""
        return self.kernels[:N_COSTLIEST]

    @property
    def matmul_tflops(self) -> float | None:
        """Rate of the matmuls while they run [TFLOP/s]."""
        if self.matmul_flops is None or not self.matmul_s:
            return None
        return self.matmul_flops / self.matmul_s / 1e12


def mark_of(span: Span) -> str | None:
    """The class that a range of the host gives its elementwise work."""
    if span.category != "user_annotation":
        return None
    if span.name == LOSS:
        return LOSS
    return OPTIMIZER if span.name == OPTIMIZER or span.name.startswith("Optimizer.step#") else None


def marked(label: str, mark: str | None) -> str:
    """An optimizer range claims all computation, matmuls too; a loss range all except those."""
    if mark == OPTIMIZER and label in (MATMUL, ELEMENTWISE, LOSS):
        return OPTIMIZER
    return LOSS if mark == LOSS and label == ELEMENTWISE else label


def matmul_flops_of(dims: list | None) -> float | None:
    """2 x M x N x K (x batch) of the first two matrices among an operator's input shapes."""
    shapes = [d for d in dims or [] if isinstance(d, list) and 2 <= len(d) < 8 and
              all(isinstance(n, int) and 0 <= n < 2**48 for n in d)]  # fmt: skip
    for a, b in itertools.pairwise(shapes):
        if a[-1] == b[-2] and a[:-2] == b[:-2]:
            return 2.0 * math.prod(a) * b[-1]
    return None


def per_step(micros: dict[str, float], n: int) -> dict[str, float]:
    """Microseconds over all steps to seconds per step, longest first."""
    ordered = sorted(micros.items(), key=lambda item: -item[1])
    return {name: value / n / 1e6 for name, value in ordered if value > 0}


def by_time(calls: Counter, time: Counter, n: int) -> list[CostlyKernel]:
    """Kernels or operators, those that take longest first."""
    return [
        CostlyKernel(name=name, kind=kind, calls=calls[name, kind] / n, time_s=micros / n / 1e6)
        for (name, kind), micros in time.most_common()
    ]
