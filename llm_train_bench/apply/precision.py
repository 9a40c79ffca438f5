"""Number formats: autocast, TF32, what a device supports, and loss scaling for fp16."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.machine import cpu_multiplies

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}


def autocast(amp: str, device: torch.device) -> contextlib.AbstractContextManager:
    """The context a forward pass runs in; parameters and their gradients stay fp32."""
    if amp == "off":
        return contextlib.nullcontext()
    return torch.autocast(device.type, AMP_DTYPES[amp])


def native_amp(device: torch.device) -> str:
    """The format of `--amp auto` on this device, unless a rule refuses it: bf16, fp16 or off."""
    if device.type == "cpu":
        return "bf16" if cpu_multiplies("bf16") else "off"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def set_precision(amp: str, tf32: bool, device: torch.device) -> None:
    """Allow TF32 in every fp32 matmul of the process, or forbid it.

    UsageError for a format that the device lacks: PyTorch would emulate or ignore it.
    """
    gpu = device.type == "cuda"
    if amp == "bf16" and gpu and native_amp(device) != "bf16":
        name = torch.cuda.get_device_name(device)
        raise UsageError(f"--amp bf16: {name} has no bf16 matmuls; use --amp fp16, or off")
    if tf32 and (not gpu or torch.version.hip or not torch.cuda.is_tf32_supported()):
        raise UsageError("--tf32: is for NVIDIA GPUs from Ampere on; leave it out")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018), without waiting for the device.

    The norm of all gradients shows whether one overflowed. Under FSDP it is the norm over all
    ranks, so every rank skips the same steps. The optimizer must be fused: it divides by the scale
    and skips by itself.
    """

    START, GROWTH_STEPS, LOWEST = 2.0**16, 2000, 2.0**-14

    def __init__(self, device: torch.device):
        self.scale = torch.full((), self.START, device=device)
        self.good_steps = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)

    def state(self) -> dict[str, Tensor]:
        """What training changes, by its name in a checkpoint."""
        return {f"scaler/{name}": number for name, number in vars(self).items()}

    def before_step(self, optimizer: Any, scaled_norm: Tensor) -> None:
        """Tell the optimizer what to divide gradients by and whether to skip; adapt the scale."""
        overflow = (~scaled_norm.isfinite()).float()
        optimizer.grad_scale, optimizer.found_inf = self.scale.clone(), overflow
        self.skipped += overflow
        self.good_steps.add_(1).mul_(1 - overflow)
        grown = (self.good_steps >= self.GROWTH_STEPS).float()
        self.good_steps.mul_(1 - grown)
        self.scale.mul_((1 - 0.5 * overflow) * (1 + grown)).clamp_(min=self.LOWEST)
