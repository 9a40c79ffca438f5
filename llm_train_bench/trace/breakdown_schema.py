"""The parts of a breakdown. Needs no torch."""

from llm_train_bench.base.strict import Strict

N_COSTLIEST = 10


class CostlyKernel(Strict):
    """A kernel, or on a CPU an operator."""

    name: str
    kind: str
    calls: float
    time_s: float


class HostGaps(Strict):
    """Moments in which the GPU waited for the host to give it its next kernel, per step."""

    count: float
    time_s: float
    longest_s: float
    by_part: dict[str, float]


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
