"""FP8: which linear layers run in it, by Transformer Engine or torchao, and on what hardware."""

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.args import Args
from bench.errors import UsageError
from bench.optim import FUSED_ADAMW
from bench.results import Batch, Fp8Info
from model import te
from model.config import ModelConfig
from model.transformer import Transformer


@dataclasses.dataclass
class Fp8:
    """What FP8 asks of a run; as it stands here, without FP8: nothing."""

    info: Fp8Info | None = None
    # The context of the forward pass of the n-th micro batch of a step.
    forward: Callable[[int], contextlib.AbstractContextManager] = lambda micro: (
        contextlib.nullcontext()
    )
    # Names of the weights that FSDP gathers in FP8.
    gathered: Collection[str] = ()
    # What checkpoints a block's forward.
    checkpoint: Callable[..., Any] = checkpoint
    # Called on the model after each optimizer step.
    after_step: Callable[[nn.Module], None] = lambda model: None
    # Gives a sharded model storage, before its values are set.
    allocate: Callable[[nn.Module, torch.device], Any] = lambda model, device: model.to_empty(
        device=device
    )
    # Builds AdamW from parameter groups and options.
    adamw: Callable[..., torch.optim.Optimizer] = FUSED_ADAMW
    # Where the optimizer holds the weights: sets one's rows there, exactly, given the whole's amax.
    set_exact: Callable[[torch.optim.Optimizer, Any, torch.Tensor, torch.Tensor], None] | None = (
        None
    )


def apply_fp8(
    model: Transformer,
    args: Args,
    config: ModelConfig,
    device: torch.device,
    batch: Batch,
    shards: int = 1,
) -> Fp8:
    """Convert the blocks of a meta-device model as --use-fp8 asks, in place.

    UsageError where hardware, sizes or an absent library stand against it. Embeddings, norms,
    attention, head and loss stay in high precision.
    """
    if not args.use_fp8:
        return Fp8()
    tokens = batch.micro_batch * batch.seq_len
    if args.fp8_backend == "te":
        library = te.import_te(device)
        return _apply_te(library, model, args, config, tokens, batch.grad_acc_steps > 1, shards)
    return _apply_torchao(model, args, device, tokens, shards)


def _apply_torchao(
    model: Transformer, args: Args, device: torch.device, tokens: int, shards: int
) -> Fp8:
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
    if recipe.startswith("rowwise") and torch.__version__ < "2.13" and args.pt_compile:
        # Recomputed fused norms differ in the last bit and make NaN (pytorch/pytorch#150859).
        torch._inductor.config.emulate_precision_casts = True
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
    needed = (8, 9) if recipe == "tensorwise" else (9, 0)
    if torch.cuda.get_device_capability(device) < needed:
        raise UsageError(
            f"--fp8-recipe {recipe}: {name} is too old, compute capability {needed[0]}.{needed[1]} "
            "is needed; leave out --use-fp8"
        )


def _apply_te(
    library: types.ModuleType,
    model: Transformer,
    args: Args,
    config: ModelConfig,
    tokens: int,
    accumulate: bool,
    shards: int,
) -> Fp8:
    te.reset()
    recipe = te.make_recipe(args.fp8_recipe)
    te.check_sizes(config, tokens, args.fp8_recipe)
    primary = args.fp8_primary_weights
    if primary:
        te.check_primary_weights(library)
        if shards == 1 and args.fp8_recipe == "mxfp8":
            raise UsageError(  # torch's FSDP copies one tensor a weight there, mxfp8's are two
                "--fp8-primary-weights: --fp8-recipe mxfp8 needs two or more ranks; use current"
            )
        _check_rows(model, shards, 32 if args.fp8_recipe == "mxfp8" else 1)
    linear = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    info = Fp8Info(
        backend="te",
        version=getattr(library, "__version__", None) or te.version(),
        recipe=args.fp8_recipe,
        emulated=False,
        all_gather=primary,
        primary_weights=primary,
        n_linear_layers=len(linear),
        n_parameters=sum(module.weight.numel() for module in linear),
        high_precision={"head": "always", "embeddings, attention": "no linear layers"},
    )
    micro_batch = te.convert(
        model, config, library, accumulate and not primary, recipe if primary else None
    )

    def forward(micro: int) -> contextlib.AbstractContextManager:
        micro_batch.first = micro == 0
        return te.autocast(library, recipe)

    fp8 = Fp8(info, forward, checkpoint=te.recompute(library))
    if primary:
        matrices = {n for n, p in model.named_parameters() if p.ndim == 2}
        fp8.gathered = {name for name in matrices if name.startswith("blocks.")}
        fp8.allocate = functools.partial(te.allocate, library, args.fp8_recipe == "mxfp8")
        fp8.adamw = functools.partial(te.fused_adam, library)
        fp8.set_exact = functools.partial(te.set_exact, library)
    return fp8


def _check_rows(model: Transformer, shards: int, multiple: int) -> None:
    """UsageError where a weight in FP8 cannot be cut into equal shards of `multiple` rows."""
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear) and module.out_features % (shards * multiple):
            raise UsageError(
                f"--fp8-primary-weights: {module.out_features} rows of blocks.{name} do not divide "
                f"over {shards} ranks in multiples of {multiple}; leave it out"
            )
