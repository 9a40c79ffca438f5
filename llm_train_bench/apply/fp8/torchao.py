"""FP8 by torchao: which linear layers run in it, and on what hardware."""

import dataclasses
import os

import torch
from torch import nn

from llm_train_bench.apply.fp8.base import Fp8, describe_fp8
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import how_to_install
from llm_train_bench.formulas.parameters import layer_names
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.results.schema import Fp8Info


class TorchaoFp8(Fp8):
    """torchao's FP8 matmuls."""

    def __init__(self, info: Fp8Info):
        self.info = info

    def after_step(self, model: nn.Module) -> None:
        """The scales of the weights that the next step gathers in FP8, all at once."""
        if self.info and self.info.all_gather:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)


def apply_torchao(model: Transformer, work: Work, device: torch.device) -> TorchaoFp8:
    """Convert the blocks' linear layers, in place; UsageError without the hardware or the library."""
    # Its compiled extensions serve other purposes, and warn where they do not fit the machine.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    try:
        import torchao
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        get = how_to_install("pip install -e '.[fp8]'")
        raise UsageError(f"--fp8-backend torchao: {error}; {get}") from None
    fp8, names = work.fp8, layer_names(work.config)
    if not fp8.emulated:
        _check_device(device, fp8.recipe)
    ends = tuple(f".{names[layer]}" for layer in fp8.layers)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.") and name.endswith(ends)
    }
    convert_to_float8_training(
        model,
        config=dataclasses.replace(
            Float8LinearConfig.from_recipe_name(fp8.recipe),
            emulate=fp8.emulated,
            enable_fsdp_float8_all_gather=fp8.all_gather,
        ),
        module_filter_fn=lambda module, name: name in linear,
    )
    return TorchaoFp8(describe_fp8(fp8, torchao.__version__, linear.values()))


def _check_device(device: torch.device, recipe: str) -> None:
    """UsageError on hardware without the matmuls a torchao recipe needs."""
    if device.type != "cuda":
        raise UsageError(
            "--use-fp8: a CPU has no FP8 matmuls; --fp8-emulate computes what they would, slowly"
        )
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        if not architecture.startswith(("gfx94", "gfx95")):
            raise UsageError(f"--use-fp8: {name} ({architecture}) has no FP8 matmuls; MI300 has")
        return
    # PyTorch's scaled matmul by rows may hang on 8.9 before 2.12 (pytorch/pytorch#177651).
    needed = (8, 9) if recipe == "tensorwise" else (9, 0)
    has = torch.cuda.get_device_capability(device)
    if has < needed:
        advice = "use --fp8-recipe tensorwise" if has >= (8, 9) else "leave out --use-fp8"
        raise UsageError(
            f"--fp8-recipe {recipe}: {name} has compute capability {has[0]}.{has[1]}, and "
            f"{needed[0]}.{needed[1]} is needed; {advice}"
        )
