"""Where the time of a traced step went. Needs no torch."""

from bench.breakdown_cpu import break_down_cpu
from bench.breakdown_gpu import break_down_gpu
from bench.breakdown_parts import Breakdown
from bench.trace import Trace


def break_down(trace: Trace, matmul_flops: float | None = None) -> Breakdown:
    """The breakdown of a trace; a trace without marked steps counts as one step.

    `matmul_flops`, the FLOPs of a step's matmuls, are taken from recorded shapes where not given.
    """
    return (break_down_gpu if trace.gpu else break_down_cpu)(trace, matmul_flops)
