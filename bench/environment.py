"""Where and with what a run happened: host, driver, libraries, settings, source revision."""

import functools
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.device import cpu_count, device_name
from bench.installed import installed_version

ROOT = Path(__file__).parent.parent
LIBRARIES = ("torch", "triton", "numpy", "transformer-engine", "torchao", "liger-kernel")
# Settings of the environment that change speed or numerics; others, which may be private, stay out.
SETTINGS = (
    "CUDA_", "HIP_", "ROCR_", "NCCL_", "RCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "NVTE_",
    "OMP_", "MKL_", "KMP_", "CUBLAS", "ROCBLAS_", "HIPBLASLT_", "DISABLE_ADDMM_", "HSA_", "CK_",
    "GLOO_",
    "GPU_MAX_HW_QUEUES", "SLURM_JOB_ID", "TRITON_",
)  # fmt: skip


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Plain JSON data on host, software and revision; what cannot be read is None."""
    return {
        "hostname": platform.node(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu": device_name(torch.device("cpu")),
        "cpu_count": cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "libraries": {name: installed_version(name) for name in LIBRARIES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "nccl": _nccl() if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "image": container_image(os.environ),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
        **source_revision(),
    }


def container_image(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Name and digest of the container image, where docker/launch.sh (or a manifest) told them."""
    known = {key: environ.get(f"BENCH_IMAGE_{key.upper()}") for key in ("name", "digest")}
    return known if any(known.values()) else None


def source_revision() -> dict[str, str | bool | None]:
    """Git revision of this source tree, and whether it holds uncommitted changes."""
    # In a container the tree often belongs to another user, which git refuses to read unasked.
    git = ("git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT))
    # An image has the tree without its history; it knows the revision it was built from.
    sha = _output(*git, "rev-parse", "HEAD")
    if not sha:
        told = os.environ.get("BENCH_GIT_SHA")
        return {"git_sha": None if told in ("", "unknown") else told, "git_dirty": None}
    changes = _output(
        *git, "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!configs/roofs.json"
    )
    return {"git_sha": sha, "git_dirty": bool(changes)}


def _nccl() -> str | None:
    """Version of NCCL, or of RCCL on AMD."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AttributeError):  # a build without it
        return None


@functools.cache
def _driver() -> str | None:
    if torch.version.hip:
        return _output("cat", "/sys/module/amdgpu/version") or None
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
