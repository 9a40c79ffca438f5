"""Operators of our own for PyTorch and its compiler, and which of several equal ways the model took."""

from collections.abc import Callable
from typing import Any

import torch

# By what is computed, how, in this process. Noted by the code that runs, not by the one that decides.
_paths: dict[str, str] = {}


def note_path(what: str, how: str) -> None:
    """Note which of several equal ways the code that runs takes."""
    _paths[what] = how


def noted_paths() -> dict[str, str]:
    """What was noted in this process since `forget_paths`."""
    return dict(_paths)


def forget_paths() -> None:
    """A run begins."""
    _paths.clear()


def operator(
    *devices: str, fake: Callable[..., Any] | None = None, note: tuple[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function an operator of its name and signature, for these types of devices.

    `fake` makes empty outputs for the compiler; by default the function itself does. Each call notes
    `note` (note_path). The compiler keeps the strides of inputs. Autograd knows no such operator, and
    would silently give no gradient: call it inside a torch.autograd.Function.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args):
            if note is not None:
                note_path(*note)
            return function(*args)

        name = f"llm_train_bench::{function.__name__}"
        schema = torch.library.infer_schema(function, mutates_args=())
        tags = torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag
        torch.library.define(name, schema, tags=tags)
        torch.library.register_fake(name, fake or function)
        torch.library.impl(name, devices, kernel)
        return getattr(torch.ops.llm_train_bench, function.__name__).default

    return register


class OwnFunction(torch.autograd.Function):
    """A function with a backward of its own, inside blocks; apply_compile looks for its subclasses."""
