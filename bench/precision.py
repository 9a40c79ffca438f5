"""Number formats: what the matmuls run in, and the loss scaling that fp16 needs."""

import contextlib

import torch

from bench.errors import UsageError

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}


def autocast(amp: str, device: torch.device) -> contextlib.AbstractContextManager:
    """The context a forward pass runs in; parameters and their gradients stay fp32."""
    if amp == "off":
        return contextlib.nullcontext()
    return torch.autocast(device.type, AMP_DTYPES[amp])


def set_tf32(enabled: bool, device: torch.device) -> None:
    """Allow or forbid TF32 in every fp32 matmul of the process."""
    if enabled and (device.type != "cuda" or torch.version.hip):
        raise UsageError("--tf32: only NVIDIA GPUs have TF32; leave it out")
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled


def grad_scaler(amp: str, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling for fp16; passes everything through for the other formats."""
    return torch.amp.GradScaler(device.type, enabled=amp == "fp16")
