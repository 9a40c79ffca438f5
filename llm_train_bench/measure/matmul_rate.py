"""Matmuls of one rank's device, without waiting for other ranks: how fast, and to warm it."""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from llm_train_bench.measure.device import time_steps

# So small that it fits beside any model: 24 MiB in bf16.
GPU_SIZE, CPU_SIZE = 2048, 256
SECONDS = 0.1


def device_tflops(device: torch.device) -> float:
    """Rate of a square matmul on random data, in bf16 on a GPU, in fp32 on a CPU [TFLOP/s].

    Median of batches of calls over about a tenth of a second. Step times cannot tell a slow device
    among several, since all ranks wait for it in every collective.
    """
    multiply, n = _square_matmul(device)
    time_steps(multiply, 3, device)
    calls = max(1, int(SECONDS / 10 / time_steps(multiply, 3, device)))
    seconds = statistics.median(time_steps(multiply, calls, device) for _ in range(10))
    return 2 * n**3 / seconds / 1e12


def heat(device: torch.device, seconds: float) -> None:
    """Multiply for so many seconds: clocks fall as a GPU warms, and a cool one is faster."""
    if seconds <= 0:
        return
    multiply, _ = _square_matmul(device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time_steps(multiply, 20, device)


def _square_matmul(device: torch.device) -> tuple[Callable[[], object], int]:
    """A function that multiplies two matrices of random numbers, and their side."""
    cuda = device.type == "cuda"
    n = GPU_SIZE if cuda else CPU_SIZE
    dtype = torch.bfloat16 if cuda else torch.float32
    generator = torch.Generator(device).manual_seed(0)  # does not change the run's generator
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a)), n
