"""Whose GPUs a machine has. Needs nothing but Python, of any version."""

from pathlib import Path


def detect_platform():
    """`nvidia` or `amd` by the driver's device files, `cpu` without."""
    # Linux in Windows (WSL) has no such device file, but the driver's library.
    if any(Path(p).exists() for p in ("/dev/nvidiactl", "/usr/lib/wsl/lib/libnvidia-ml.so.1")):
        return "nvidia"
    return "amd" if Path("/dev/kfd").exists() else "cpu"
