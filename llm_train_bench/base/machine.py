"""What this machine has: GPU drivers, CPU, installed libraries. Needs nothing but Python."""

import contextlib
import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import Literal

from llm_train_bench.base.start import ROOT

from llm_train_bench import __version__

Platform = Literal["nvidia", "amd", "cpu"]


def detect_platform() -> Platform:
    """`nvidia` or `amd` by the driver's device files, `cpu` without."""
    # Linux in Windows (WSL) has no such device file, but the driver's library.
    if any(Path(p).exists() for p in ("/dev/nvidiactl", "/usr/lib/wsl/lib/libnvidia-ml.so.1")):
        return "nvidia"
    return "amd" if Path("/dev/kfd").exists() else "cpu"


def system_text(path: str) -> str:
    """The text of a file that the system makes, as in /proc; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def output_of(*command: str) -> str | None:
    """What a system's tool prints; None where it is absent, fails or takes more than a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def gpu_name() -> str | None:
    """The name of this machine's first NVIDIA GPU, as its driver has it; None where nothing tells."""
    names = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return names.splitlines()[0] if names else None


# Instruction sets by which the matmuls of CPUs of one name differ.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "sve2", "bf16")
# Instruction sets with matmuls of 16-bit formats, as Linux names them on x86 and Arm.
MULTIPLY = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


# Measured on an AMD EPYC: 2.7 GFLOP/s without such instructions, 213 in fp32.
SLOW_FORMAT = (
    "this CPU has no instructions for it, and matmuls may take 80 times as long as in fp32"
)


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The CPU's model name with its instruction sets and cores; `CPU` where the system has no name.

    One name may stand for several generations: bf16 matmuls of an "AMD EPYC" differ ninefold.
    """
    model, flags = _processor()
    sets = " ".join(name for name in INSTRUCTION_SETS if name in flags)
    cores = n_cores()
    details = ", ".join(filter(None, (sets, f"{cores} core{'s' * (cores > 1)}")))
    return f"{model} ({details})"


def cpu_multiplies(number_format: str) -> bool:
    """Whether this CPU has instructions for matmuls in the format; others may take 80 times as long."""
    return bool(MULTIPLY[number_format] & _processor()[1])


def made_by_amd() -> bool:
    """Whether the CPU is one of AMD's."""
    return "AMD" in _processor()[0]


def _processor() -> tuple[str, set[str]]:
    """Model name and flags of the first processor, as Linux lists them; `CPU` and none elsewhere."""
    pairs = []
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as f:
        pairs = [line.partition(":")[::2] for line in f]
    processor = {key.strip(): value.strip() for key, value in reversed(pairs)}  # the first one's
    flags = processor.get("flags") or processor.get("Features") or ""
    return processor.get("model name", "CPU"), set(flags.split())


# AMD's builds of these modules have other names.
ALSO_CALLED = {
    "triton": ("triton-rocm", "pytorch-triton-rocm"),
    "transformer-engine": tuple(f"transformer-engine-rocm{s}" for s in ("7", "10", "-torch")),
}


def installed_version(library: str) -> str | None:
    """The version of an installed distribution, or None."""
    for name in (library, *ALSO_CALLED.get(library, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def version_text() -> str:
    """Version and commit of this project, as --version prints them."""
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "describe", "--always"]
    command += ["--dirty=, modified", "--abbrev=10", "--exclude=*"]
    commit = os.environ.get("BENCH_GIT_SHA", "unknown")
    if (ROOT / ".git").exists():  # an installed package may lie inside a user's repository
        commit = output_of(*command) or commit
    return f"llm-train-bench {__version__} (commit {commit})"
