"""FP8 by torchao: which linear layers run in it, and on what hardware."""

import dataclasses
import os

import torch
from torch import nn

from bench.apply.fp8.base import Fp8
from bench.errors import UsageError
from bench.results.schema import Fp8Info
from bench.settings.flags import Args
from model.transformer import Transformer


def apply_torchao(
    model: Transformer, args: Args, device: torch.device, tokens: int, shards: int
) -> Fp8:
    """Convert the blocks' linear layers, in place; `tokens` are those of a micro batch on a device.

    UsageError where hardware, sizes or an absent library stand against it.
    """
    # Its compiled extensions serve other purposes, and warn where they do not fit the machine.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    try:
        import torchao
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )
    except ImportError as error:
        raise UsageError(f"--fp8-backend torchao: {error}; pip install -e '.[fp8]'") from None
    recipe = args.fp8_recipe
    if not args.fp8_emulate:
        _check_device(device, recipe)
    # The gradient of the weight is summed over tokens, which need not divide where it is no FP8.
    if tokens % 16 and recipe != "rowwise_with_gw_hp":
        raise UsageError(
            f"--use-fp8: --bsz x --seq-len = {tokens} tokens is not a multiple of 16, which FP8 "
            "matmuls need; change either"
        )
    linear, kept = {}, {"head": "always", "embeddings, norms, attention": "no linear layers"}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not name.startswith("blocks."):
            continue
        sizes = module.in_features, module.out_features
        if any(size % 16 for size in sizes):
            pattern = f"blocks.*.{name.split('.', 2)[2]}"
            kept[pattern] = f"{sizes[0]} x {sizes[1]} is not in multiples of 16"
        else:
            linear[name] = module
    if not linear:
        raise UsageError(
            "--use-fp8: no linear layer of the blocks has sizes in multiples of 16; leave it out"
        )
    if args.fp8_all_gather:
        for name, module in linear.items():
            if module.out_features % shards:
                raise UsageError(
                    f"--fp8-all-gather: {module.out_features} rows of {name} do not divide evenly "
                    f"over {shards} ranks; leave it out"
                )
    convert_to_float8_training(
        model,
        config=dataclasses.replace(
            Float8LinearConfig.from_recipe_name(recipe),
            emulate=args.fp8_emulate,
            enable_fsdp_float8_all_gather=args.fp8_all_gather,
        ),
        module_filter_fn=lambda module, name: name in linear,
    )
    info = Fp8Info(
        backend="torchao",
        version=torchao.__version__,
        recipe=recipe,
        emulated=args.fp8_emulate,
        all_gather=args.fp8_all_gather,
        n_linear_layers=len(linear),
        n_parameters=sum(module.weight.numel() for module in linear.values()),
        high_precision=kept,
    )
    fp8 = Fp8(info)
    if args.fp8_all_gather:
        fp8.gathered = {f"{name}.weight" for name in linear}
        fp8.after_step = precompute_float8_dynamic_scale_for_fsdp
    return fp8


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
