"""Number formats: autocast, TF32, and the loss scaling that fp16 needs."""

import contextlib

import torch
from torch import Tensor

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


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018), without waiting for the device.

    Whether a gradient overflowed is read off the norm of all of them, which under FSDP is the norm
    over all ranks: so every rank skips the same steps. The optimizer must be fused, for it divides by
    the scale and skips by itself.
    """

    START, GROWTH_STEPS, LOWEST = 2.0**16, 2000, 2.0**-14

    def __init__(self, device: torch.device):
        self.scale = torch.full((), self.START, device=device)
        self.good_steps = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)

    def before_step(self, optimizer: torch.optim.Optimizer, scaled_norm: Tensor) -> None:
        """Tell the optimizer what to divide gradients by and whether to skip; adapt the scale.

        Half the scale after an overflow, twice after 2000 steps without one.
        """
        overflow = (~scaled_norm.isfinite()).float()
        optimizer.grad_scale, optimizer.found_inf = self.scale.clone(), overflow
        self.skipped += overflow
        self.good_steps.add_(1).mul_(1 - overflow)
        grown = (self.good_steps >= self.GROWTH_STEPS).float()
        self.good_steps.mul_(1 - grown)
        self.scale.mul_((1 - 0.5 * overflow) * (1 + grown)).clamp_(min=self.LOWEST)
