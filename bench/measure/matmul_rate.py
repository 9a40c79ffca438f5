"""How fast this rank's device multiplies alone, without waiting for other ranks."""

import statistics
import time

import torch

from bench.measure.device import synchronize

# So small that it fits beside any model: 24 MiB in bf16.
GPU_SIZE, CPU_SIZE = 2048, 256
SECONDS = 0.1


def device_tflops(device: torch.device) -> float:
    """Rate of a square matmul on random data, in bf16 on a GPU, in fp32 on a CPU [TFLOP/s].

    Median of batches of calls over about a tenth of a second. Step times cannot tell a slow device
    among several, since all ranks wait for it in every collective.
    """
    cuda = device.type == "cuda"
    n = GPU_SIZE if cuda else CPU_SIZE
    dtype = torch.bfloat16 if cuda else torch.float32
    generator = torch.Generator(device).manual_seed(0)  # leaves the run's generator alone
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
    out = torch.empty_like(a)

    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, b, out=out)
        synchronize(device)
        return (time.perf_counter() - start) / calls

    batch(3)
    calls = max(1, int(SECONDS / 10 / batch(3)))
    return 2 * n**3 / statistics.median(batch(calls) for _ in range(10)) / 1e12
