"""Blocks whose linear layers and norms are Transformer Engine's, computing what the plain ones do.

The modules inside a block are replaced and its forward stays: rotary embedding, attention, windows
and dropout are ours. Weight names are those of the plain block (`Transformer.weights`), so that
first values and Hugging Face files are too. Written for Transformer Engine 2.2 and newer.
"""

import contextlib
import importlib.metadata
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.config import ConfigError, ModelConfig
from model.transformer import Block, Transformer

# Its gelu is the tanh approximation; of a gated MLP's rows the first half is the activated one.
ACTIVATIONS = {"gelu_tanh": "gelu", "relu": "relu", "silu": "silu"}
GATED_ACTIVATIONS = {"gelu_tanh": "geglu", "relu": "reglu", "silu": "swiglu"}
RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
SUPPORT = {"mxfp8": "is_mxfp8_available", "blockwise": "is_fp8_block_scaling_available"}


def import_te(device: torch.device) -> types.ModuleType:
    """`transformer_engine.pytorch`; ConfigError in one line where it or its GPU is missing."""
    if device.type != "cuda":
        raise ConfigError(
            "--fp8-backend te: Transformer Engine needs a GPU; --fp8-backend torchao --fp8-emulate "
            "computes FP8 on a CPU"
        )
    try:
        import transformer_engine.pytorch as te
    except Exception as error:  # besides ImportError, whatever its search for cuDNN raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--fp8-backend te: Transformer Engine cannot be imported: {reason}; "
            "pip install --no-build-isolation -e '.[te]', or use --fp8-backend torchao"
        ) from None
    return te


def version() -> str:
    """The installed Transformer Engine's."""
    return importlib.metadata.version("transformer_engine")


def make_recipe(kind: str):
    """A recipe object; ConfigError where the hardware or the installed version has no such one."""
    from transformer_engine.common import recipe

    check = getattr(_quantization_state(), SUPPORT.get(kind, "is_fp8_available"), None)
    if check is None or not hasattr(recipe, RECIPES[kind]):
        raise ConfigError(
            f"--fp8-recipe {kind}: Transformer Engine {version()} has none; update it"
        )
    usable, reason = check()
    if not usable:
        raise ConfigError(f"--fp8-recipe {kind}: {reason}")
    return getattr(recipe, RECIPES[kind])()


def _quantization_state():
    """Transformer Engine's FP8 state of the process."""
    try:  # 2.9 and newer
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    return FP8GlobalStateManager


def reset() -> None:
    """Forget the modules of earlier models: delayed scaling goes on updating them all."""
    _quantization_state().reset()


def check_sizes(config: ModelConfig, tokens: int, kind: str) -> None:
    """ConfigError where a matmul of a block cannot run in FP8; `tokens` are those of a micro batch."""
    multiple = 32 if kind == "mxfp8" else 16
    heads = config.num_attention_heads * config.head_dim
    sizes = {
        "--bsz x --seq-len": tokens,
        "hidden_size": config.hidden_size,
        "heads x head_dim": heads,
        "rows of q, k and v": heads + 2 * config.num_key_value_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % multiple:
            raise ConfigError(
                f"--fp8-recipe {kind}: {name} is {size}, not a multiple of {multiple}; use "
                "--fp8-backend torchao, which leaves such a layer in bf16"
            )
    if config.activation not in (GATED_ACTIVATIONS if config.gated_mlp else ACTIVATIONS):
        raise ConfigError(
            f"{config.path}: Transformer Engine has no {config.activation} activation; use "
            "--fp8-backend torchao"
        )


def convert(
    model: Transformer,
    config: ModelConfig,
    te: types.ModuleType,
    cache_weights: bool,
    primary_recipe=None,
) -> types.SimpleNamespace:
    """Replace the linear layers and norms of all blocks, on the meta device, in place.

    Returns a namespace whose `first` says whether the micro batch about to run is its step's first;
    with `cache_weights` the others take their FP8 weights from it. (Sharded modules ignore that.)
    With a `primary_recipe` the matmuls' weights will be in FP8 by it once `allocate` was called.
    """
    micro_batch = types.SimpleNamespace(first=True)
    with (
        te.quantized_model_init(enabled=True, recipe=primary_recipe)
        if primary_recipe is not None
        else contextlib.nullcontext()
    ):
        for block in model.blocks:
            _convert_block(block, config, te)
    for block in model.blocks:
        if cache_weights:
            for module in (block.attn.qkv, block.attn.out, block.mlp):
                module.forward = _cached(module.forward, micro_batch)
    model.native_name = lambda name: native_name(name, config)
    return micro_batch


def _convert_block(block: Block, config: ModelConfig, te: types.ModuleType) -> None:
    # A string: TE compares it with "meta", which a torch.device does not equal.
    common = {"params_dtype": torch.float32, "device": "meta"}
    norm = {"normalization": "RMSNorm" if config.rms_norm else "LayerNorm", "eps": config.norm_eps}
    names = GATED_ACTIVATIONS if config.gated_mlp else ACTIVATIONS
    d, qkv, out = config.hidden_size, block.attn.qkv, block.attn.out
    block.attn.qkv = te.LayerNormLinear(
        d, qkv.out_features, bias=qkv.bias is not None, **norm, **common
    )
    block.attn.out = te.Linear(out.in_features, d, bias=out.bias is not None, **common)
    block.mlp = te.LayerNormMLP(
        d,
        config.intermediate_size,
        bias=config.mlp_bias,
        activation=names[config.activation],
        **norm,
        **common,
    )
    block.attn_norm, block.mlp_norm = nn.Identity(), nn.Identity()


def _cached(forward: Callable, micro_batch: types.SimpleNamespace) -> Callable:
    return lambda x: forward(x, is_first_microbatch=micro_batch.first)


def native_name(name: str, config: ModelConfig) -> str:
    """The plain block's name of a converted block's parameter."""
    first = "mlp.gate_up." if config.gated_mlp else "mlp.up."
    for old, new in (
        ("attn.qkv.layer_norm_", "attn_norm."),
        ("mlp.layer_norm_", "mlp_norm."),
        ("mlp.fc1_", first),
        ("mlp.fc2_", "mlp.down."),
    ):
        name = name.replace(old, new)
    return name


def autocast(te: types.ModuleType, recipe) -> contextlib.AbstractContextManager:
    """The FP8 context of one forward pass of the whole model; amax is reduced over all ranks."""
    if hasattr(te, "autocast"):  # 2.9 and newer
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def check_primary_weights(te: types.ModuleType) -> None:
    """ConfigError where the installed version has no FP8 weights that FSDP2 can shard."""
    if not (hasattr(te, "quantized_model_init") and hasattr(te, "QuantizedTensor")):
        raise ConfigError(
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
