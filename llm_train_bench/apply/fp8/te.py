"""Transformer Engine's modules in blocks, and its FP8: recipes and checkpoint (2.9 or newer).

The modules inside a block are replaced and its forward stays: rotary embedding, attention, windows
and dropout are ours. Weight names are those of the plain block (`Transformer.weights`), so that
first values and Hugging Face files are the same.
"""

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import how_to_install
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.config_keys import TE_ACTIVATIONS
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.model.weights import Weight
from llm_train_bench.settings.plan import TE_MODULES

# The library's names of a recipe, and of the function that says whether the GPU has it.
RECIPES = {
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "current": ("Float8CurrentScaling", "is_fp8_available"),
    "blockwise": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
    "nvfp4": ("NVFP4BlockScaling", "is_nvfp4_available"),
}


@dataclasses.dataclass(eq=False)
class TransformerEngineFp8(Fp8):
    """Transformer Engine's modules under one recipe; `te` is the library."""

    te: types.ModuleType
    recipe: Any
    version: str | None
    first: bool = True
    """Whether the micro batch about to run is its step's first."""

    def forward(self, micro: int) -> contextlib.AbstractContextManager:
        """Under the recipe, with amax over all ranks; a step's first micro batch casts the weights."""
        self.first = micro == 0
        return self.te.autocast(enabled=True, recipe=self.recipe)

    def checkpoint(self, forward, *args, **options) -> Tensor:
        """Transformer Engine's own, which recomputes under the FP8 context of the forward."""
        if not torch.is_grad_enabled():  # before 2.20 TE does not check
            return forward(*args)
        return self.te.checkpoint(forward, *args, use_reentrant=False)

    def cached(self, forward: Callable) -> Callable:
        """A module's forward that casts its weights for the first micro batch of a step only."""
        return lambda x: forward(x, is_first_microbatch=self.first)


def apply_te(model: Transformer, work: Work, device: torch.device) -> Fp8:
    """Convert the blocks' linear layers and norms, in place; for --linear te they stay in bf16.

    UsageError where the hardware or an absent library stands against it.
    """
    fp8 = work.fp8
    library = import_te(device, "--fp8-backend te" if fp8 else "--linear te")
    if not fp8:
        convert(model, library)
        return Fp8()
    # Delayed scaling would go on updating the modules of earlier models.
    library.quantization.FP8GlobalStateManager.reset()
    recipe = make_recipe(library, fp8.recipe)
    excluded = {name for name in TE_MODULES if not any(x.startswith(name) for x in fp8.layers)}
    # AMD's distribution has another name than NVIDIA's, so ask the module.
    version = importlib.import_module("transformer_engine").__version__
    hooks = TransformerEngineFp8(library, recipe, version)
    for module in convert(model, library, excluded):
        if work.batch.grad_acc_steps > 1:  # sharded modules ignore it
            module.forward = hooks.cached(module.forward)
    return hooks


def import_te(device: torch.device, flag: str) -> types.ModuleType:
    """`transformer_engine.pytorch`; UsageError in one line where it or its GPU is missing."""
    if device.type != "cuda":
        raise UsageError(
            f"{flag}: Transformer Engine needs a GPU; leave it out (--fp8-backend torchao --fp8-emulate "
            "computes FP8 on a CPU)"
        )
    try:
        importlib.import_module("transformer_engine.pytorch.quantization")  # since 2.9
        return importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # besides ImportError, whatever its search for cuDNN raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        get = how_to_install("pip install --no-build-isolation -e '.[te]'")
        if torch.version.hip:
            get = "take an image with ROCm's build of it (rocm/primus)"
        raise UsageError(
            f"{flag}: needs Transformer Engine 2.9 or newer: {reason}; {get}, or use --fp8-backend "
            "torchao"
        ) from None


def make_recipe(te: types.ModuleType, kind: str):
    """A recipe object; UsageError where the hardware or the installed version lacks it."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    name, support = RECIPES[kind]
    check = getattr(te.quantization.FP8GlobalStateManager, support, None)
    if check is None or not hasattr(recipes, name):
        raise UsageError(f"--fp8-recipe {kind}: this Transformer Engine has none; update it")
    usable, reason = check()
    if not usable:
        raise UsageError(f"--fp8-recipe {kind}: {reason}")
    return getattr(recipes, name)()


def convert(
    model: Transformer, te: types.ModuleType, excluded: Collection[str] = ()
) -> list[nn.Module]:
    """Replace the linear layers and norms of all blocks, on the meta device, in place.

    Those in `excluded` stay: `attn.qkv`, `attn.out` or `mlp`. Returns the new modules with linear layers.
    """
    config, blocks = model.config, model.blocks.values()
    modules = [module for block in blocks for module in _convert_block(block, config, te, excluded)]
    model.replace_rows(lambda name: converted_row(config.weights[native_name(name, config)], name))
    return modules


def _convert_block(
    block: Any, config: ModelConfig, te: types.ModuleType, excluded: Collection[str]
) -> Iterator[nn.Module]:
    # A string: TE compares it with "meta", which a torch.device does not equal.
    common = {"params_dtype": torch.float32, "device": "meta"}
    norm = {"normalization": "RMSNorm" if config.rms_norm else "LayerNorm", "eps": config.norm_eps}
    norm |= common
    d, f, qkv, out = config.hidden_size, config.intermediate_size, block.attn.qkv, block.attn.out
    if "attn.qkv" not in excluded:
        block.attn.qkv = te.LayerNormLinear(d, qkv.out_features, bias=qkv.bias is not None, **norm)
        block.attn_norm = nn.Identity()
        yield block.attn.qkv
    if "attn.out" not in excluded:
        block.attn.out = te.Linear(out.in_features, d, bias=out.bias is not None, **common)
        yield block.attn.out
    if "mlp" not in excluded:
        name = TE_ACTIVATIONS[config.activation][config.gated_mlp]
        block.mlp = te.LayerNormMLP(d, f, bias=config.mlp_bias, activation=name, **norm)
        block.mlp_norm = nn.Identity()
        yield block.mlp


def converted_row(weight: Weight, name: str) -> Weight:
    """The row of a parameter, called `name` in its module; LayerNormMLP has all gates before up."""
    return dataclasses.replace(weight, groups=1) if ".mlp.fc1_" in name else weight


def native_name(name: str, config: ModelConfig) -> str:
    """The plain block's name of a converted block's parameter."""
    name = name.replace("attn.qkv.layer_norm_", "attn_norm.").replace("mlp.fc2_", "mlp.down.")
    name = name.replace("mlp.fc1_", "mlp.gate_up." if config.gated_mlp else "mlp.up.")
    return name.replace("mlp.layer_norm_", "mlp_norm.")
