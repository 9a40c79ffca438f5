"""Operators of our own for PyTorch and its compiler, and which of several equal ways the model took."""

from collections.abc import Callable
from typing import Any

import torch

# By what is computed, how, in this process. Noted by the code that runs, not by the one that decides.
taken: dict[str, str] = {}


def operator(
    fake: Callable[..., Any], kernel: Callable[..., Any], *devices: str
) -> Callable[..., Any]:
    """An operator of the name and the signature of `fake`, which makes its empty outputs.

    `kernel` computes it, on those types of devices. The compiler keeps the strides of inputs. Autograd
    knows no such operator, and would silently give no gradient: call it inside a torch.autograd.Function.
    """
    name = f"llm_train_bench::{fake.__name__}"
    tags = torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag
    torch.library.define(name, torch.library.infer_schema(fake, mutates_args=()), tags=tags)
    torch.library.register_fake(name, fake)
    torch.library.impl(name, devices, kernel)
    return getattr(torch.ops.llm_train_bench, fake.__name__).default


class OwnFunction(torch.autograd.Function):
    """A function with a backward of its own, inside blocks; apply_compile looks for its subclasses."""
