"""Whose GPUs a machine has. Needs nothing but Python, of any version."""

from pathlib import Path


def detect_platform():
    """`nvidia` or `amd` by the driver's device files, `cpu` without."""
    if Path("/dev/nvidiactl").exists():
        return "nvidia"
    return "amd" if Path("/dev/kfd").exists() else "cpu"
