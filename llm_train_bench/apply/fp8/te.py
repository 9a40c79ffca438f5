"""FP8 by Transformer Engine (sources of 2.2 to 2.20): recipes, weights, optimizer, checkpoint."""

import contextlib
import dataclasses
import importlib
import types
from typing import Any

import torch
from torch import Tensor, nn

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
    both_orientations: bool
    info: Fp8Info | None
    exact_in_optimizer: bool

    def forward(self, micro: int) -> contextlib.AbstractContextManager:
        """Under the recipe; the first micro batch of a step casts the weights for the others."""
        self.micro_batch.first = micro == 0
        return fp8_context(self.te, self.recipe)

    def checkpoint(self, forward, *args, **options) -> Tensor:
        """Transformer Engine's own, which recomputes under the FP8 context of the forward."""
        if not torch.is_grad_enabled():  # before 2.20 TE does not check
            return forward(*args)
        return self.te.checkpoint(forward, *args, use_reentrant=False)

    def allocate(self, model: nn.Module, device: torch.device) -> None:
        """Give a sharded meta-device model storage, in place: weights made under a recipe in FP8.

        One module at a time, since its rows are in fp32 for a moment; values are set afterwards. A
        shard of MXFP8 holds both orientations of its rows, since both are gathered. The others' FP8
        is transposed after the gather.
        """
        if not self.exact_in_optimizer:
            return super().allocate(model, device)
        ours = (self.te.Linear, self.te.LayerNormLinear, self.te.LayerNormMLP)
        for module in model.modules():
            if not isinstance(module, ours):
                module.to_empty(device=device, recurse=False)
                continue
            converted: Any = module
            # By this it decides on the orientations.
            with torch.set_grad_enabled(self.both_orientations):
                converted.reset_parameters()
            for parameter in converted.parameters(recurse=False):
                local = parameter.to_local()
                if isinstance(local, self.te.QuantizedTensor):
                    # All shards of a weight have one scale, also when values are copied into them.
                    local.amax_reduction_group = parameter.device_mesh.get_group()
        return None

    def adamw(self, groups: list[dict], **options) -> torch.optim.Optimizer:
        """AdamW; with primary weights its state holds the fp32 values of the model's FP8 copies."""
        if not self.exact_in_optimizer:
            return super().adamw(groups, **options)
        return self.te.optimizers.FusedAdam(groups, master_weights=True, **options)

    @torch.no_grad()
    def set_exact(self, optimizer: Any, parameter: Any, rows: Tensor, amax: Tensor) -> None:
        """Let the optimizer start from a shard's fp32 rows, rather than their FP8 rounding.

        `amax` is the largest magnitude in the whole parameter. Delayed scaling would round the first
        weights with scale 1, by which small ones lose a tenth and more of their norm.
        """
        optimizer.initialize_state(parameter, store_param_remainders=False)
        local = parameter.to_local()
        if isinstance(local, self.te.QuantizedTensor):
            optimizer.set_scaled_state(parameter, "master_param", rows.float())
            if isinstance(local._quantizer, self.te.Float8Quantizer) and amax > 0:
                # AMD's E4M3 format has half the range of the other, for which a bit is lost.
                e4m3 = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
                local._quantizer.amax.copy_(amax)
                local._quantizer.scale.copy_(torch.finfo(e4m3).max / amax)
                local.quantize_(rows)
        else:  # it is in fp32 itself, and a copy of an embedding is large
            del optimizer.state[parameter]["master_param"]


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
    shardable = hasattr(library, "quantized_model_init") and hasattr(library, "QuantizedTensor")
    if fp8.primary_weights and not shardable:
        raise UsageError(
            f"--fp8-all-gather: Transformer Engine {version()} has none that FSDP2 shards; update it"
        )
    excluded = {name for name, layers in TE_MODULES.items() if not {*layers} <= {*fp8.layers}}
    info = describe_fp8(fp8, work.config, version())
    # A cast for one micro batch serves the next ones of its step, where no weight is sharded.
    cached = work.batch.grad_acc_steps > 1 and not fp8.primary_weights
    primary = recipe if fp8.primary_weights else None
    micro_batch = te_blocks.convert(model, library, cached, primary, excluded)
    both = fp8.recipe == "mxfp8"
    return TransformerEngineFp8(library, recipe, micro_batch, both, info, fp8.primary_weights)


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
