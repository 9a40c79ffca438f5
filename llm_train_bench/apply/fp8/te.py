"""FP8 by Transformer Engine (sources of 2.2 to 2.20): recipes and checkpoint."""

import contextlib
import dataclasses
import importlib
import types
from typing import Any

import torch
from torch import Tensor

from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import how_to_install
from llm_train_bench.formulas.work import Work
from llm_train_bench.model import te as te_blocks
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.results.figures import describe_fp8
from llm_train_bench.results.schema import Fp8Info
from llm_train_bench.settings.plan import TE_MODULES

RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
SUPPORT = {
    "nvfp4": "is_nvfp4_available",
    "mxfp8": "is_mxfp8_available",
    "blockwise": "is_fp8_block_scaling_available",
}


@dataclasses.dataclass(eq=False)
class TransformerEngineFp8(Fp8):
    """Transformer Engine's modules under one recipe; `te` is the library."""

    te: types.ModuleType
    recipe: Any
    micro_batch: types.SimpleNamespace
    info: Fp8Info | None

    def forward(self, micro: int) -> contextlib.AbstractContextManager:
        """Under the recipe; the first micro batch of a step casts the weights for the others."""
        self.micro_batch.first = micro == 0
        return fp8_context(self.te, self.recipe)

    def checkpoint(self, forward, *args, **options) -> Tensor:
        """Transformer Engine's own, which recomputes under the FP8 context of the forward."""
        if not torch.is_grad_enabled():  # before 2.20 TE does not check
            return forward(*args)
        return self.te.checkpoint(forward, *args, use_reentrant=False)


def apply_te(model: Transformer, work: Work, device: torch.device) -> Fp8:
    """Convert the blocks' linear layers and norms, in place; for --linear te they stay in bf16.

    UsageError where the hardware or an absent library stands against it.
    """
    fp8 = work.fp8
    library = import_te(device, "--fp8-backend te" if fp8 else "--linear te")
    if not fp8:
        te_blocks.convert(model, library, cache_weights=False)
        return Fp8()
    _quantization_state().reset()  # delayed scaling goes on updating the modules of earlier models
    recipe = make_recipe(fp8.recipe)
    excluded = {name for name, layers in TE_MODULES.items() if not {*layers} <= {*fp8.layers}}
    info = describe_fp8(fp8, work.config, version())
    # A cast for one micro batch serves the next ones of its step, where no weight is sharded.
    micro_batch = te_blocks.convert(model, library, work.batch.grad_acc_steps > 1, excluded)
    return TransformerEngineFp8(library, recipe, micro_batch, info)


def import_te(device: torch.device, flag: str) -> types.ModuleType:
    """`transformer_engine.pytorch`; UsageError in one line where it or its GPU is missing."""
    if device.type != "cuda":
        raise UsageError(
            f"{flag}: Transformer Engine needs a GPU; leave it out (--fp8-backend torchao --fp8-emulate "
            "computes FP8 on a CPU)"
        )
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # besides ImportError, whatever its search for cuDNN raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        get = how_to_install("pip install --no-build-isolation -e '.[te]'")
        if torch.version.hip:
            get = "take an image with ROCm's build of it (rocm/primus)"
        raise UsageError(
            f"{flag}: Transformer Engine cannot be imported: {reason}; {get}, or use --fp8-backend "
            "torchao"
        ) from None


def version() -> str:
    """The installed Transformer Engine's; AMD's distribution has another name, so ask the module."""
    return importlib.import_module("transformer_engine").__version__


def make_recipe(kind: str):
    """A recipe object; UsageError where the hardware or the installed version lacks it."""
    recipe = importlib.import_module("transformer_engine.common.recipe")
    check = getattr(_quantization_state(), SUPPORT.get(kind, "is_fp8_available"), None)
    if check is None or not hasattr(recipe, RECIPES[kind]):
        raise UsageError(f"--fp8-recipe {kind}: Transformer Engine {version()} has none; update it")
    usable, reason = check()
    if not usable:
        raise UsageError(f"--fp8-recipe {kind}: {reason}")
    return getattr(recipe, RECIPES[kind])()


def _quantization_state():
    """Transformer Engine's FP8 state of the process."""
    try:  # 2.9 and newer
        module = importlib.import_module("transformer_engine.pytorch.quantization")
    except ImportError:
        module = importlib.import_module("transformer_engine.pytorch.fp8")
    return module.FP8GlobalStateManager


def fp8_context(te: types.ModuleType, recipe) -> contextlib.AbstractContextManager:
    """The FP8 context of one forward pass of the whole model; amax is reduced over all ranks."""
    if hasattr(te, "autocast"):  # 2.9 and newer
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)
