"""FP8 by Transformer Engine (2.2 to 2.20): recipes, weights, optimizer, checkpoint; by its sources."""

import contextlib
import functools
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.apply.fp8.base import Fp8
from bench.errors import UsageError
from bench.results.schema import Batch, Fp8Info
from bench.settings.flags import Args
from model import te as te_blocks
from model.config import ModelConfig
from model.transformer import Transformer

RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
SUPPORT = {"mxfp8": "is_mxfp8_available", "blockwise": "is_fp8_block_scaling_available"}


def apply_te(
    model: Transformer,
    args: Args,
    device: torch.device,
    batch: Batch,
    shards: int,
) -> Fp8:
    """Convert the blocks' linear layers and norms, in place.

    UsageError where hardware, sizes or an absent library stand against it.
    """
    library, config = import_te(device), model.config
    _quantization_state().reset()  # delayed scaling goes on updating the modules of earlier models
    kind, primary = args.fp8_recipe, args.fp8_primary_weights
    recipe = make_recipe(kind)
    multiple = 16
    if kind == "mxfp8":  # scales of 32; hipBLASLt's matmuls sum over multiples of 128
        multiple = 128 if torch.version.hip else 32
    tokens = batch.micro_batch * batch.seq_len
    if tokens % multiple:
        raise UsageError(
            f"--fp8-recipe {kind}: --bsz x --seq-len = {tokens} tokens is not a multiple of "
            f"{multiple}; change either"
        )
    kept = layers_to_keep(config, multiple)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and te_blocks.layer_of(name) in LAYERS - kept.keys()
    }
    if primary:
        check_primary_weights(library)
        if shards == 1 and kind == "mxfp8":
            raise UsageError(  # torch's FSDP copies one tensor a weight there, mxfp8's are two
                "--fp8-primary-weights: --fp8-recipe mxfp8 needs two or more ranks; use current"
            )
        _check_rows(linear, shards, 32 if kind == "mxfp8" else 1)
    info = Fp8Info(
        backend="te",
        version=version(),
        recipe=kind,
        emulated=False,
        all_gather=primary,
        primary_weights=primary,
        n_linear_layers=len(linear),
        n_parameters=sum(module.weight.numel() for module in linear.values()),
        high_precision={"head": "always", "embeddings, attention": "no linear layers"}
        | {f"blocks.*.{name}": why for name, why in kept.items()},
    )
    # What was cast for one micro batch serves the next ones of its step, where no weight is sharded.
    cached = batch.grad_acc_steps > 1 and not primary
    micro_batch = te_blocks.convert(model, library, cached, recipe if primary else None, kept)

    def forward(micro: int) -> contextlib.AbstractContextManager:
        micro_batch.first = micro == 0
        return autocast(library, recipe)

    fp8 = Fp8(info, forward, checkpoint=recompute(library))
    if primary:
        sharded = {te_blocks.native_name(n, config): n for n, _ in model.named_parameters()}
        fp8.gathered = {sharded[f"{name}.weight"] for name in linear}
        fp8.allocate = functools.partial(allocate, library, kind == "mxfp8")
        fp8.adamw = functools.partial(fused_adam, library)
        fp8.set_exact = functools.partial(set_exact, library)
    return fp8


LAYERS = {"attn.qkv", "attn.out", "mlp"}


def layers_to_keep(config: ModelConfig, multiple: int) -> dict[str, str]:
    """Layers of a block whose matmuls cannot run in FP8, and why; UsageError where all cannot."""
    shapes = config.block_shapes()
    layers = {"attn.qkv": shapes["qkv"], "attn.out": shapes["out"], "mlp": shapes["down"][::-1]}
    kept = {
        name: f"{k} x {n} is not in multiples of {multiple}"
        for name, (n, k) in layers.items()
        if n % multiple or k % multiple
    }
    if config.activation not in te_blocks.activations(config):
        kept["mlp"] = f"Transformer Engine has no {config.activation}"
    if kept.keys() == LAYERS:
        raise UsageError(
            f"--use-fp8: no layer of {config.path} can run in FP8 by Transformer Engine: "
            f"{'; '.join(f'{name}: {why}' for name, why in kept.items())}; leave it out"
        )
    return kept


def _check_rows(linear: dict[str, nn.Linear], shards: int, multiple: int) -> None:
    """UsageError where a weight in FP8 cannot be cut into equal shards of `multiple` rows."""
    for name, module in linear.items():
        if module.out_features % (shards * multiple):
            raise UsageError(
                f"--fp8-primary-weights: {module.out_features} rows of {name} do not divide over "
                f"{shards} ranks in multiples of {multiple}; leave it out"
            )


def import_te(device: torch.device) -> types.ModuleType:
    """`transformer_engine.pytorch`; UsageError in one line where it or its GPU is missing."""
    if device.type != "cuda":
        raise UsageError(
            "--fp8-backend te: Transformer Engine needs a GPU; --fp8-backend torchao --fp8-emulate "
            "computes FP8 on a CPU"
        )
    try:
        import transformer_engine.pytorch as te
    except Exception as error:  # besides ImportError, whatever its search for cuDNN raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        get = "pip install --no-build-isolation -e '.[te]'"
        if torch.version.hip:
            get = "take an image with ROCm's build of it (rocm/primus)"
        raise UsageError(
            f"--fp8-backend te: Transformer Engine cannot be imported: {reason}; "
            f"{get}, or use --fp8-backend torchao"
        ) from None
    return te


def version() -> str:
    """The installed Transformer Engine's; AMD's distribution has another name, so ask the module."""
    import transformer_engine

    return transformer_engine.__version__


def make_recipe(kind: str):
    """A recipe object; UsageError where the hardware or the installed version has no such one."""
    from transformer_engine.common import recipe

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
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    return FP8GlobalStateManager


def autocast(te: types.ModuleType, recipe) -> contextlib.AbstractContextManager:
    """The FP8 context of one forward pass of the whole model; amax is reduced over all ranks."""
    if hasattr(te, "autocast"):  # 2.9 and newer
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def check_primary_weights(te: types.ModuleType) -> None:
    """UsageError where the installed version has no FP8 weights that FSDP2 can shard."""
    if not (hasattr(te, "quantized_model_init") and hasattr(te, "QuantizedTensor")):
        raise UsageError(
            f"--fp8-primary-weights: Transformer Engine {version()} has none that FSDP2 shards; update it"
        )


def allocate(te: types.ModuleType, both: bool, model: Transformer, device: torch.device) -> None:
    """Give a sharded meta-device model storage, in place: weights made under a recipe in FP8.

    One module at a time, since its rows are in fp32 for a moment; values are set afterwards. With
    `both` a shard holds both orientations of its rows, which MXFP8 gathers; of the others' FP8 the
    transpose is made of what was gathered.
    """
    ours = (te.Linear, te.LayerNormLinear, te.LayerNormMLP)
    for module in model.modules():
        if isinstance(module, ours):
            with torch.set_grad_enabled(both):  # by this it decides on the orientations
                module.reset_parameters()
            for parameter in module.parameters(recurse=False):
                local = parameter.to_local()
                if isinstance(local, te.QuantizedTensor):
                    # All shards of a weight have one scale, also when values are copied into them.
                    local.amax_reduction_group = parameter.device_mesh.get_group()
        else:
            module.to_empty(device=device, recurse=False)


def fused_adam(te: types.ModuleType, groups: list[dict], **options) -> torch.optim.Optimizer:
    """AdamW whose state holds the fp32 weights of which the model has an FP8 copy."""
    return te.optimizers.FusedAdam(groups, master_weights=True, **options)


@torch.no_grad()
def set_exact(
    te: types.ModuleType,
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    rows: Tensor,
    amax: Tensor,
) -> None:
    """Make a shard's fp32 rows what the optimizer starts from, rather than their FP8 rounding.

    `amax` is the largest magnitude in the whole parameter. Delayed scaling would round the first
    weights with scale 1, by which small ones lose a tenth and more of their norm.
    """
    optimizer.initialize_state(parameter, store_param_remainders=False)
    local = parameter.to_local()
    if isinstance(local, te.QuantizedTensor):
        optimizer.set_scaled_state(parameter, "master_param", rows.float())
        if isinstance(local._quantizer, te.Float8Quantizer) and amax > 0:
            # Of the two E4M3 formats AMD's has half the range; for the other a bit is lost.
            e4m3 = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
            local._quantizer.amax.copy_(amax)
            local._quantizer.scale.copy_(torch.finfo(e4m3).max / amax)
            local.quantize_(rows)
    else:  # it is in fp32 itself, and a copy of an embedding is no small thing
        del optimizer.state[parameter]["master_param"]


def recompute(te: types.ModuleType) -> Callable[..., Tensor]:
    """Transformer Engine's checkpoint, which recomputes under the FP8 context of the forward."""

    def checkpoint(forward: Callable, *args) -> Tensor:
        if not torch.is_grad_enabled():  # before 2.20 it does not look
            return forward(*args)
        return te.checkpoint(forward, *args, use_reentrant=False)

    return checkpoint
