"""Rates of one device: matmuls by format, memory, kernel launches, attention, and copies to the host.

All are measured on normally distributed data: zeros draw less power and run faster.
"""

import contextlib
import datetime
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from llm_train_bench.base.hardware import threads_of
from llm_train_bench.measure.device import device_name, memory_gib, time_steps

Call = Callable[[int], object]
COPIES = 4  # operands taken in turn, so that they do not stay in the cache


def matmul(
    m: int, n: int, k: int, layout: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Call:
    """A function of the round number that computes one of several products of random matrices."""

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return torch.randn(columns, rows, device=device, dtype=dtype).t()
        return torch.randn(rows, columns, device=device, dtype=dtype)

    # With row-major matrices, forward is x w^T, the input's gradient g w, the weight's g^T x.
    a = [matrix(m, k, layout == "NT") for _ in range(COPIES)]
    b = [matrix(k, n, layout == "TN") for _ in range(COPIES)]
    out = torch.empty(m, n, device=device, dtype=dtype)
    return lambda i: torch.mm(a[i % COPIES], b[i % COPIES], out=out)


def fp8_matmul(m: int, n: int, k: int, _: str, device: torch.device, fast: bool = True) -> Call:
    """The same with e4m3 operands and one scale each, to a bf16 result.

    Always in the one layout that Hopper has FP8 matmuls for; libraries transpose where needed. `fast`
    adds up with fewer bits, as libraries do in the forward pass only.
    """
    # MI300 has its own e4m3, with half the range.
    fnuz = torch.version.hip and "gfx94" in torch.cuda.get_device_properties(device).gcnArchName
    e4m3 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    a = [torch.randn(m, k, device=device).to(e4m3) for _ in range(COPIES)]
    b = [torch.randn(n, k, device=device).to(e4m3) for _ in range(COPIES)]
    one = torch.ones((), device=device)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    scaled_mm = torch.ops.aten._scaled_mm
    return lambda i: scaled_mm(a[i % COPIES], b[i % COPIES].t(), one, one, **options)


def rate(run: Call, work: float, seconds: float, device: torch.device) -> tuple[float, float]:
    """(best, median) work per second, over batches of calls that last `seconds`; a call does `work`."""
    numbers = itertools.count()

    def mean_of(n: int) -> float:
        return time_steps(lambda: run(next(numbers)), n, device)

    mean_of(COPIES)
    calls, rates = max(1, int(0.02 / max(1e-6, mean_of(1)))), []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not rates:
        rates.append(work / mean_of(calls))
    return max(rates), statistics.median(rates)


def square_rate(
    make: Callable[..., Call], side: int, device: torch.device, seconds: float
) -> float:
    """Median TFLOP/s of a product of square matrices; `make` is one of `formats_of`."""
    return rate(make(side, side, side, "TN", device), 2 * side**3 / 1e12, seconds, device)[1]


def cpu_entry(device: torch.device, seconds: float) -> dict[str, Any]:
    """An entry of hardware.json for torch's present threads; `bf16_tflops` is the faster format's."""
    kinds = formats_of(device)
    small, large = (square_rate(kinds["fp32"], side, device, seconds) for side in (128, 1024))
    # efficiency (side / (side + half))^3 of the one and of the other
    r = min(0.999, small / large) ** (1 / 3)
    half = max(0.0, 128 * 1024 * (1 - r) / (1024 * r - 128)) if 1024 * r > 128 else 128.0
    half = min(half, 128.0)  # another process may have slowed only the small one
    whole = ((1024 + half) / 1024) ** 3
    fp32, bf16 = whole * large, whole * square_rate(kinds["bf16"], 1024, device, seconds)
    forward, both = attention_rates((4, 6, 512, 64), torch.float32, device, seconds)
    backward = 2 / max(1e-9, 1 / both - 1 / forward)
    whole = "sustained fp32_of_peak bandwidth layer_norms losses optimizers serial_host"
    fitted = dict.fromkeys(whole.split(), 1.0)
    fitted |= {"half_side": half, "half_keys": 0.0, "half_head": 0.0, "grouped": 1.0}
    fitted |= {"launch_s": launch_seconds(device, seconds)}
    fitted |= {"attention_forward": forward / fp32, "attention_backward": backward / fp32}
    rates = {"bf16_tflops": max(fp32, bf16), "fp32_tflops": fp32, "measured_bf16_tflops": bf16}
    bandwidth = memory_rate(device, seconds) / 1e12
    memory = {"memory_gib": memory_gib(device) or 16.0, "memory_tb_per_s": bandwidth}
    links = {"ring_gb_per_s": 2.0, "nic_gb_per_s": 1.0, "fitted": fitted}
    source = f"measured, {datetime.date.today()}, torch {torch.__version__}"
    name = threads_of(device_name(device), torch.get_num_threads())
    return {"name": name, **rates, **memory, **links, "source": source}


def memory_rate(device: torch.device, seconds: float) -> float:
    """Bytes a second that an elementwise kernel reads and writes, of tensors that no cache holds."""
    x = torch.randn(2**28 if device.type == "cuda" else 2**24, device=device)
    out = torch.empty_like(x)
    return rate(lambda i: torch.add(x, 1.0, out=out), 8 * x.numel(), seconds, device)[1]


def launch_seconds(device: torch.device, seconds: float) -> float:
    """Seconds between one small kernel and the next, which the host's launches take."""
    tiny = torch.randn(8, device=device)
    return 1 / rate(lambda i: tiny + 1.0, 1, seconds, device)[1]


def attention_rates(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, seconds: float
) -> tuple[float, float]:
    """TFLOP/s of causal attention: forward, and forward with backward by the forward's FLOPs.

    `shape` is (batch, heads, T, head size).
    """
    B, H, T, D = shape
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    tflop = 4 * B * H * T * D * (T + 1) / 2 / 1e12
    attend = functools.partial(scaled_dot_product_attention, is_causal=True)
    with torch.no_grad():
        forward = rate(lambda i: attend(q, k, v), tflop, seconds, device)[1]
    both = lambda i: torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))  # noqa: E731
    return forward, rate(both, tflop, seconds, device)[1]


def copy_rates(device: torch.device, seconds: float) -> tuple[float, float]:
    """Bytes a second from pinned host memory to a GPU, and back."""
    host = torch.randn(2**26).pin_memory()
    there = host.to(device)
    to = rate(lambda i: there.copy_(host, non_blocking=True), 4 * 2**26, seconds, device)[1]
    back = rate(lambda i: host.copy_(there, non_blocking=True), 4 * 2**26, seconds, device)[1]
    return to, back


def formats_of(device: torch.device) -> dict[str, Callable[..., Call]]:
    """Makers of matmuls by format: bf16, and what the device also has."""
    kinds: dict[str, Callable[..., Call]] = {"bf16": matmul}
    if device.type != "cuda":
        return kinds | {"fp32": functools.partial(matmul, dtype=torch.float32)}
    with contextlib.suppress(RuntimeError):  # a device without FP8
        fp8_matmul(64, 64, 64, "TN", device)(0)
        kinds |= {"fp8": fp8_matmul, "fp8 exact sums": functools.partial(fp8_matmul, fast=False)}
    return kinds


def best_rates(medians: dict[str, list[float]]) -> dict[str, float]:
    """The rates of the best shapes, by their medians [TFLOP/s]: a single lucky batch is not a roof.

    In FP8 it is that of a training step: one forward matmul with fast sums, two backward without.
    """
    top = {kind: max(values) for kind, values in medians.items()}
    rates = {f"{kind}_tflops": top[kind] for kind in ("bf16", "fp32") if kind in top}
    if "fp8" in top:
        rates["fp8_tflops"] = 3 / (1 / top["fp8"] + 2 / top["fp8 exact sums"])
    return rates
