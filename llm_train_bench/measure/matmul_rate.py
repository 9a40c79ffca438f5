"""Matmuls of a rank's device alone, without waiting for other ranks: how fast, and to warm it."""

import statistics
import time

import torch

from llm_train_bench.measure.device import synchronize

# So small that it fits beside any model: 24 MiB in bf16.
GPU_SIZE, CPU_SIZE = 2048, 256
SECONDS = 0.1


def device_tflops(device: torch.device) -> float:
    """Rate of a square matmul on random data, in bf16 on a GPU, in fp32 on a CPU [TFLOP/s].

    Median of batches of calls over about a tenth of a second. Step times cannot tell a slow device
    among several, since all ranks wait for it in every collective.
    """
    a, b, out = _operands(device)
    n = len(a)

    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, b, out=out)
        synchronize(device)
        return (time.perf_counter() - start) / calls

    batch(3)
    calls = max(1, int(SECONDS / 10 / batch(3)))
    return 2 * n**3 / statistics.median(batch(calls) for _ in range(10)) / 1e12


def heat(device: torch.device, seconds: float) -> None:
    """Multiply for so many seconds: clocks fall as a GPU warms, and a cool one is faster."""
    if seconds <= 0:
        return
    a, b, out = _operands(device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(a, b, out=out)
        synchronize(device)


def _operands(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two square matrices of random numbers, and one for their product."""
    cuda = device.type == "cuda"
    n = GPU_SIZE if cuda else CPU_SIZE
    dtype = torch.bfloat16 if cuda else torch.float32
    generator = torch.Generator(device).manual_seed(0)  # leaves the run's generator alone
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
    return a, b, torch.empty_like(a)
