"""Narrow formats and their products: against torchao, explicit loops, and what a format promises."""

import dataclasses
import types

import pytest
import torch
from torch import nn

from llm_train_bench.apply.fp8 import torchao
from llm_train_bench.apply.fp8.torchao import ScaledProducts, grouped_product
from llm_train_bench.formulas.scales import reductions
from llm_train_bench.model.experts import Stacked
from llm_train_bench.model.layout import ALONE, Layout
from llm_train_bench.model.products import LinearProduct, ProductLinear

WHOLE = {"N": (), "K": (), "M": ()}
COUNTS = torch.tensor([21, 0, 40, 3])


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_a_whole_layer_are_torchaos(recipe, dtype):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    products = ScaledProducts(recipe, True, ALONE, WHOLE)
    ours = ProductLinear(64, 48, True, products=products).to(dtype)
    theirs = Float8Linear.from_float(nn.Linear(64, 48).to(dtype), config)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layer in (theirs, ours):
        torch.manual_seed(1)
        x = torch.randn(4, 16, 64, dtype=dtype, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn_like(y))
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Half(Layout):
    """One of two ranks; the other's largest magnitudes are what `others` say, in turn."""

    def __init__(self, others: list[float]):
        self.tp, self.others, self.asked = 2, others, []

    def max_over_ranks(self, numbers, *kinds):
        self.asked.append((numbers.numel(), *kinds))
        return numbers.clamp(min=self.others.pop(0)) if self.others else numbers


def test_a_parts_scale_is_of_the_whole_tensor():
    """A rank's part of an output is that of one device, if it hears the other's magnitudes."""
    x, weight = torch.randn(32, 64), torch.randn(96, 64)
    weight[70] *= 30  # in the other half
    expected = ScaledProducts("tensorwise", True, ALONE, WHOLE).output(x, weight)
    shared = {"N": (), "K": (), "M": ("tp",)}
    hears = Half([weight.abs().max().item()])
    made = ScaledProducts("tensorwise", True, hears, shared).output(x, weight[:48])
    torch.testing.assert_close(made, expected[:, :48], rtol=1e-6, atol=1e-6)
    deaf = ScaledProducts("tensorwise", True, Half([]), shared).output(x, weight[:48])
    assert (deaf - expected[:, :48]).norm() > 0.01 * expected.norm()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(
    "shared",
    [{"N": ("cp",), "K": (), "M": ("tp",)}, {"N": ("cp",), "K": ("tp",), "M": ()},
     {"N": ("tp", "cp"), "K": (), "M": ()}],
)  # fmt: skip
def test_magnitudes_are_reduced_as_the_formula_counts(recipe, shared):
    layout = Half([])
    layout.cp = 2
    products = ScaledProducts(recipe, True, layout, shared)
    x, weight, grad = torch.randn(16, 64), torch.randn(32, 64), torch.randn(16, 32)
    products.output(x, weight)
    forward = len(layout.asked)
    products.of_input(grad, weight)
    products.of_weight(grad, x)
    expected = [*reductions(recipe, shared, {"N": 16, "K": 64, "M": 32})]
    for back in (False, True):
        asked = layout.asked[forward:] if back else layout.asked[:forward]
        made = sorted((number, kind) for number, *kinds in asked for kind in kinds)
        assert made == sorted((n, kind) for later, n, kind in expected if later == back)


class OneExpert(torch.autograd.Function):
    """FP8 of one expert, by the definition: scales by rows of what each product sums over."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        low = [torchao.rounded(t, t.abs().amax(1, keepdim=True)) for t in (x, w)]
        return low[0] @ low[1].t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if not len(x):
            return x, torch.zeros_like(w)
        rows = torchao.rounded(grad, grad.abs().amax(1, keepdim=True))
        columns = torchao.rounded(w, w.abs().amax(0, keepdim=True))
        of_x = rows @ columns
        left, right = (torchao.rounded(t, t.abs().amax(0, keepdim=True)) for t in (grad, x))
        return of_x, left.t() @ right


def by_each_expert(rows, weight):
    """Each expert's rows by themselves."""
    parts = zip(rows.split(COUNTS.tolist()), weight, strict=True)
    return torch.cat([OneExpert.apply(x, w) for x, w in parts])


def experts_in_one_call(rows, weight):
    return grouped_product(True, rows, weight.transpose(1, 2), COUNTS.cumsum(0, dtype=torch.int32))


def test_experts_in_fp8_are_each_scaled_by_themselves():
    rows, weight = torch.randn(64, 32), torch.randn(4, 48, 32)
    rows[21:61] *= 1000  # one expert's rows hide no other's
    results = []
    for multiply in (experts_in_one_call, by_each_expert):
        x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        y = multiply(x, w)
        torch.manual_seed(2)
        y.backward(torch.randn_like(y))
        results.append([y, x.grad, w.grad])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)


def test_groups_are_filled_up_without_a_wait():
    rows = torch.randn(64, 8)
    filled, ends, places = torchao.fill_groups(rows, COUNTS.cumsum(0, dtype=torch.int32))
    assert all(int(end) % 16 == 0 for end in ends) and len(filled) % 16 == 0
    begins = [0, *ends[:-1].tolist()]
    for begin, end, own in zip(begins, ends.tolist(), rows.split(COUNTS.tolist()), strict=True):
        assert torch.equal(filled[begin : begin + len(own)], own)
        assert not filled[begin + len(own) : end].any()
    assert torch.equal(filled[places], rows) and len(filled) >= ends[-1]


def test_a_layer_of_experts_takes_its_product():
    layer = Stacked(4, 32, 48, bias=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    rows = torch.randn(64, 32)
    exact = layer(rows, COUNTS)
    layer.product = lambda *operands: grouped_product(True, *operands)
    low = layer(rows, COUNTS)
    assert 1e-3 < (low - exact).norm() / exact.norm() < 0.1


def test_a_gathered_input_is_gathered_beside_a_product():
    """In backward the gather begins before the input's gradient, and its scatter before the weight's."""
    events = []

    def say(name, function):
        def run(*operands):
            events.append(name)
            return function(*operands)

        return run

    def move(name, change):
        return say(f"{name} begins", lambda x: say(f"{name} ends", lambda: change(x)))

    products = types.SimpleNamespace(
        output=say("output", lambda x, weight: x @ weight.t()),
        of_input=say("of input", torch.matmul),
        of_weight=say("of weight", lambda grad, x: grad.t() @ x),
    )
    gather = move("gather", lambda x: torch.cat((x, 2 * x), dim=1))
    scatter = move("scatter", lambda x: x[:, :3] + x[:, 3:])
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    y = LinearProduct.apply(x, weight, products, gather, scatter)
    assert events == ["gather begins", "gather ends", "output"]
    events.clear()
    y.sum().backward()
    assert events == [
        "gather begins", "of input", "gather ends", "scatter begins", "of weight", "scatter ends",
    ]  # fmt: skip
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), id):
        LinearProduct.apply(x, weight, products, gather, scatter)
    assert kept == [x.numel(), weight.numel()]
