"""FP8 by torchao: which linear layers run in it, and on what hardware."""

import dataclasses
import functools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import how_to_install
from llm_train_bench.formulas.scales import PRODUCTS, SCALES, shared_dimensions
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.layout import HasWeights, Layout
from llm_train_bench.model.products import ProductLinear, Products, replace_linear
from llm_train_bench.model.shapes import present

# torchao's kernels of experts take groups of a multiple of this many rows.
GROUP_ROWS = 16


class TorchaoFp8(Fp8):
    """torchao's FP8 matmuls."""

    def __init__(self, version: str, all_gather: bool):
        self.version, self.all_gather = version, all_gather

    def after_step(self, model: nn.Module) -> None:
        """The scales of the weights that the next step gathers in FP8, all at once."""
        if self.all_gather:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)


class ScaledProducts(Products):
    """torchao's FP8 products of a rank's part of a layer; scales are of the whole operands.

    `shared` has the kinds of ranks that divide each dimension: they join the largest magnitudes.
    """

    def __init__(
        self, recipe: str, emulated: bool, layout: Layout, shared: dict[str, tuple[str, ...]]
    ):
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_training_tensor import GemmInputRole as Role
        from torchao.float8.float8_training_tensor import (
            LinearMMConfig,
            ScaledMMConfig,
            hp_tensor_and_scale_to_float8,
        )
        from torchao.float8.float8_utils import amax_to_scale

        self.recipe, self.layout, self.shared = recipe, layout, shared
        c = Float8LinearConfig.from_recipe_name(recipe)
        self.rounds = c.round_scales_to_power_of_2
        self.formats = {
            "output": (c.cast_config_input, c.cast_config_weight),
            "of_input": (c.cast_config_grad_output, c.cast_config_weight_for_grad_input),
            "of_weight": (
                c.cast_config_grad_output_for_grad_weight,
                c.cast_config_input_for_grad_weight,
            ),
        }
        matmuls = (c.gemm_config_output, c.gemm_config_grad_input, c.gemm_config_grad_weight)
        self.matmul = LinearMMConfig(
            *(ScaledMMConfig(emulated, m.use_fast_accum, False, c.pad_inner_dim) for m in matmuls)
        )
        self.roles = {"x": Role.INPUT, "weight": Role.WEIGHT, "grad": Role.GRAD_OUTPUT}
        self.to_scale, self.to_float8 = amax_to_scale, hp_tensor_and_scale_to_float8

    def cast(self, product: str, first: bool, operand: Tensor) -> Tensor:
        """An operand in FP8, or as it is where the recipe leaves it."""
        *operands, over = PRODUCTS[product]
        name, dims = operands[not first]
        scale = SCALES[self.recipe][product][not first]
        if scale is None:
            return operand
        axis, dtype = dims.index(over) - 2, self.formats[product][not first].target_dtype
        rows, magnitude = scale == "rows", operand.abs()
        amax = magnitude.amax(axis, keepdim=True) if rows else magnitude.max()
        kinds = [kind for dim in (over if rows else dims) for kind in self.shared[dim]]
        amax = self.layout.max_over_ranks(amax.float(), *kinds) if kinds else amax
        axis = (0 if axis == -2 else -1) if rows else None
        scales = self.to_scale(amax, dtype, self.rounds)
        return self.to_float8(operand, scales, dtype, self.matmul, self.roles[name], axis)


def apply_torchao(model: HasWeights, work: Work, device: torch.device) -> TorchaoFp8:
    """Convert the blocks' linear layers, in place; UsageError without the hardware or the library."""
    # Its compiled extensions serve other purposes, and warn where they do not fit the machine.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    fp8 = present(work.fp8)
    if not fp8.emulated:
        _check_device(device, fp8.recipe)
    experts = any(w.of_experts and w.module in fp8.layers for w in work.config.weights.values())
    try:
        import torchao
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        if experts and not fp8.emulated:
            from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm  # noqa: F401 (since 0.18)
    except ImportError as error:
        get = how_to_install("pip install -e '.[fp8]'")
        raise UsageError(f"--fp8-backend torchao: {error}; {get}") from None
    # One for all layers: the compiler would compile anew for another.
    product: Any = functools.partial(grouped_product, fp8.emulated)
    product = torch.compiler.disable(product)
    for part in getattr(model, "stages", [model]):
        converted = [w for w, _ in part.weights() if w.is_matrix and w.module in fp8.layers]
        linear = {weight.path for weight in converted if not weight.of_experts}
        for weight in converted:
            if weight.of_experts:
                stacked: Any = part.get_submodule(weight.path)
                stacked.use_product(product)
            elif work.parallelism.divided:
                shared = shared_dimensions(weight)
                products = ScaledProducts(fp8.recipe, fp8.emulated, model.layout, shared)
                replace_linear(part, weight.path, ProductLinear, products=products)
        if not work.parallelism.divided:
            convert_to_float8_training(
                part,
                config=dataclasses.replace(
                    Float8LinearConfig.from_recipe_name(fp8.recipe),
                    emulate=fp8.emulated,
                    enable_fsdp_float8_all_gather=fp8.all_gather,
                ),
                module_filter_fn=lambda module, name: name in linear,  # noqa: B023
            )
    return TorchaoFp8(torchao.__version__, fp8.all_gather)


def grouped_product(emulated: bool, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """A grouped matmul of rows (R, K) and weights (E, K, M) in FP8, each expert scaled by itself.

    FP8 is scaled by rows under every recipe, as torchao's kernels have it.
    """
    if emulated:
        return GroupedProduct.apply(rows, weight.transpose(1, 2), ends)
    from torchao.prototype import moe_training

    filled, ends, places = fill_groups(rows, ends)
    out = moe_training._to_fp8_rowwise_then_scaled_grouped_mm(
        filled, weight, ends, out_dtype=torch.bfloat16, pad_token_groups_for_grouped_mm=False
    )
    return out[places].to(rows.dtype)


def rounded(x: Tensor, amax: Tensor) -> Tensor:
    """Numbers after E4M3 with scales that are powers of two, by the largest magnitudes; in fp32."""
    scale = torch.exp2(torch.floor(torch.log2(448 / amax.float().clamp(min=1e-12))))
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


class GroupedProduct(torch.autograd.Function):
    """Rows (R, K) and weights (E, M, K) to (R, M), rounded to FP8 along what each product sums over.

    It stands for kernels that a CPU lacks, and these are judged by it. As in torchao's
    `_to_fp8_rowwise_then_scaled_grouped_mm` a row has a scale, and in the gradient of a weight so has
    each column of an expert's rows.
    """

    @staticmethod
    def forward(ctx, rows, weight, ends):
        ctx.save_for_backward(rows, weight, ends)
        low = rounded(weight, weight.abs().amax(2, keepdim=True))
        out = F.grouped_mm(_by_row(rows), low.transpose(1, 2), offs=ends)
        return out.to(rows.dtype)

    @staticmethod
    def backward(ctx, *grads):
        rows, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        low = rounded(weight, weight.abs().amax(1, keepdim=True))
        of_rows = F.grouped_mm(_by_row(grad), low, offs=ends)
        columns = _by_column(grad, ends), _by_column(rows, ends)
        of_weight = F.grouped_mm(columns[0].t(), columns[1], offs=ends)
        return of_rows.to(rows.dtype), of_weight.to(weight.dtype), None


def _by_row(x: Tensor) -> Tensor:
    return rounded(x, x.abs().amax(1, keepdim=True))


def _by_column(x: Tensor, ends: Tensor) -> Tensor:
    """Rounded with a scale for each column of each group of rows."""
    number = torch.arange(len(x), device=x.device)
    group = torch.bucketize(number, ends.to(number.dtype), right=True)
    index = group[:, None].expand_as(x)
    amax = x.new_zeros(len(ends), x.shape[1]).scatter_reduce(0, index, x.abs(), "amax")
    return rounded(x, amax[group])


def fill_groups(rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (R, K) with zeros after each group, up to what kernels take; where groups end; rows' places.

    The size is the most that there can be, so that the host need not wait for the numbers.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    filled = -(-counts // GROUP_ROWS) * GROUP_ROWS
    new_ends = filled.cumsum(0, dtype=torch.int32)
    added = (new_ends - filled) - (ends - counts)  # rows that come before a group besides
    number = torch.arange(len(rows), device=rows.device)
    group = torch.bucketize(number, ends.to(number.dtype), right=True)
    places = number + added[group]
    most = len(rows) + len(ends) * (GROUP_ROWS - 1)
    size = -(-most // GROUP_ROWS) * GROUP_ROWS
    whole = rows.new_zeros(size, rows.shape[1]).index_copy(0, places, rows)
    return whole, new_ends, places


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
            raise UsageError(
                f"--fp8-recipe {recipe}: {name} ({architecture}) has no such matmuls; MI300 has"
            )
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
