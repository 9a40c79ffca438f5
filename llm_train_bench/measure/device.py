"""The device a run uses: choosing it, naming it, waiting for it, its peak memory."""

import contextlib
import ctypes
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.cuda import nccl

from llm_train_bench.base.errors import OwnError, UsageError
from llm_train_bench.base.machine import Platform, cpu_name

GIB = 2**30
# NCCL's own variable, with which ranks may share a GPU from NCCL 2.31 on; older ones refuse it.
SHARE_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """This rank's device for `auto`, `cuda` or `cpu`; UsageError if it does not exist."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        built = torch.version.cuda or torch.version.hip
        why = "PyTorch sees no GPU" if built else f"PyTorch {torch.__version__} has no GPU support"
        raise UsageError(f"--device cuda: {why}; use --device cpu, or check the driver")
    if name == "cpu" or not available:
        keep_freed_memory()
        return torch.device("cpu")
    n = torch.cuda.device_count()
    if local_rank >= n and os.environ.get(SHARE_GPU) != "1":
        raise OwnError(
            f"rank {local_rank} of this machine sees no GPU for itself, only {n} in all; start one rank "
            "per GPU, and let each see all of them (srun: --gpu-bind=none, not --gpus-per-task). "
            f"{SHARE_GPU}=1 lets ranks share GPUs, to test layouts (docs/MODELS.md)"
        )
    device = torch.device("cuda", local_rank % n)
    torch.cuda.set_device(device)
    return device


def nccl_version() -> str | None:
    """The version of NCCL, or RCCL on AMD, that is loaded: not always the one PyTorch was built with."""
    number = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):  # it may be a part of PyTorch's own library
        library = ctypes.CDLL("librccl.so.1" if torch.version.hip else "libnccl.so.2")
        library.ncclGetVersion(ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    with contextlib.suppress(RuntimeError, AttributeError):  # a build without it
        return ".".join(map(str, nccl.version()[:3]))
    return None


def platform_of(device: torch.device) -> Platform:
    """`nvidia`, `amd` or `cpu`."""
    if device.type == "cpu":
        return "cpu"
    return "amd" if torch.version.hip else "nvidia"


def keep_freed_memory() -> None:
    """Let this process keep what it frees on a CPU, as PyTorch's allocator does on a GPU.

    By default glibc returns memory at the top of its heap to the system. The next tensors' pages
    are then faulted in and zeroed again: 4 % of a small model's step. Tensors above 32 MiB, the
    most that mallopt takes, keep coming from the system, so that the heap does not fragment.
    Without glibc nothing is changed.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, 32 * 2**20)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def device_name(device: torch.device) -> str:
    """The name the driver gives a GPU, or the model name of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def memory_gib(device: torch.device) -> float | None:
    """Memory of a GPU, or of the machine for a CPU [GiB]."""
    if device.type != "cpu":
        return device_memory_gib(device)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def share_of_memory_gib(device: torch.device, ranks: int) -> float | None:
    """Memory that a rank may plan with [GiB]: its share of a GPU's, or of half of a CPU's machine."""
    has = memory_gib(device)
    if has and device.type == "cpu":
        return has / 2 / ranks
    if has and os.environ.get(SHARE_GPU) == "1":
        return has / math.ceil(ranks / torch.cuda.device_count())
    return has


def device_memory_gib(device: torch.device) -> float | None:
    """Memory of a GPU in GiB; None on a CPU, which shares it with everything else."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory / GIB


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(step: Callable[[], object], n: int, device: torch.device) -> float:
    """Mean seconds of n calls, the device idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(n):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / n


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak. A CPU process keeps its resident peak since its start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)  # the count of retries is one of those


def peak_memory(device: torch.device) -> dict[str, float | int | None]:
    """Peaks in GiB since the last reset, and how often the allocator had to free and retry."""
    names = ("peak_allocated_gib", "peak_reserved_gib", "allocator_retries", "peak_rss_gib")
    if device.type != "cuda":
        return dict.fromkeys(names) | {"peak_rss_gib": peak_resident_bytes() / GIB}
    stats = torch.cuda.memory_stats(device)
    peaks = (stats.get(f"{kind}_bytes.all.peak", 0) / GIB for kind in ("allocated", "reserved"))
    return dict(zip(names, (*peaks, stats.get("num_alloc_retries", 0), None), strict=True))


def memory_now(device: torch.device) -> float | None:
    """Memory that is in use now [GiB]: by tensors on a GPU, resident of a CPU run's process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    resident = _of_process("VmRSS")
    return resident and resident / GIB


def peak_resident_bytes() -> int:
    """Most memory this process had resident since its start.

    Read from /proc/self/status if it exists: getrusage's figure is at least that of the parent
    process.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return _of_process("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _of_process(name: str) -> int | None:
    """A size of this process in bytes; None where there is no /proc."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device (or the host, on a CPU) ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The last two: cuBLAS, cuDNN and NCCL; the card is full, but PyTorch's allocator does not know.
    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def cpu_seconds() -> tuple[float, ...] | None:
    """CPU seconds of the machine: all, busy, stolen by a virtual machine's host; and this process's.

    None where the system has no /proc/stat.
    """
    try:
        with Path("/proc/stat").open(encoding="utf-8") as f:
            ticks = [int(word) for word in f.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    _, _, _, idle, waiting, *_, stolen = ticks
    hertz = os.sysconf("SC_CLK_TCK")
    busy = sum(ticks) - idle - waiting - stolen
    return sum(ticks) / hertz, busy / hertz, stolen / hertz, sum(os.times()[:4])
