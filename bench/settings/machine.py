"""What this machine has: GPU drivers, CPU, installed libraries. Needs nothing but Python."""

import importlib.metadata
from pathlib import Path


def detect_platform():
    """`nvidia` or `amd` by the driver's device files, `cpu` without."""
    # Linux in Windows (WSL) has no such device file, but the driver's library.
    if any(Path(p).exists() for p in ("/dev/nvidiactl", "/usr/lib/wsl/lib/libnvidia-ml.so.1")):
        return "nvidia"
    return "amd" if Path("/dev/kfd").exists() else "cpu"


def cpu_name():
    """The CPU's model name, or `CPU` where the system does not tell."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as f:
            return next(
                line.split(":", 1)[1].strip() for line in f if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return "CPU"


# AMD's builds of these modules have other names.
ALSO_CALLED = {
    "triton": ("triton-rocm", "pytorch-triton-rocm"),
    "transformer-engine": (
        "transformer-engine-rocm7",
        "transformer-engine-rocm10",
        "transformer-engine-rocm-torch",
    ),
}


def installed_version(library):
    """The version of an installed distribution, or None."""
    for name in (library, *ALSO_CALLED.get(library, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
