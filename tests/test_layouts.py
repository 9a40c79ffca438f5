"""Layouts of several ranks in short: equal to one device, refused where they do not fit."""

import contextlib
from unittest import mock

import pytest
import torch

from llm_train_bench.apply.optimizer import build_optimizer, optimizer_step
from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.work import Parallelism
from llm_train_bench.model import experts
from llm_train_bench.model.experts import (
    MixtureOfExperts,
    imbalance_since,
    rows_so_far,
    update_corrections,
)
from llm_train_bench.model.layout import ALONE
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.parallel.layout import Gradients, RankLayout
from llm_train_bench.settings.flags import OptimizerFlags
from tests import layouts
from tests.helpers import built, config, facts_of, plan_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("layouts")
    layouts.run_cases(list(layouts.SHORT), out)
    return out


@pytest.mark.parametrize("name", layouts.SHORT)
def test_a_layout_is_equal_to_one_device_unless_it_is_broken(name, finished):
    difference = layouts.compare(name, finished)
    if name in layouts.MUTANTS:
        assert not difference.ok and difference.numbers["gradient"] > 1e-4
        return
    assert difference.ok, difference


def beside(run, exchange: str) -> list[int]:
    """Matmuls between each exchange and the next wait, in a trace's order."""
    events, found = facts_of(run)["events"], []
    for i in [i for i, event in enumerate(events) if event == exchange]:
        rest = [e.removeprefix("backward ") for e in events[i + 1 :]]
        if "wait_tensor" in rest:  # else the list has ended
            found.append(sum(e.endswith("mm") for e in rest[: rest.index("wait_tensor")]))
    return found


def test_exchanges_run_beside_products(finished):
    """Backward gathers inputs beside one product, and scatters beside the other."""
    for exchange in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert set(beside(finished / "tp2-biases", exchange)) == {0}  # what comes next needs them
        during = beside(finished / "tp2-biases", f"backward {exchange}")
        assert {0, 1} == set(during) and sum(during) > 12, exchange
    for exchange in ("all_to_all_single", "backward all_to_all_single"):
        # Rows of experts travel beside the shared expert.
        assert max(beside(finished / "ep2-deepseek-bf16", exchange)) >= 2, exchange


def test_the_host_waits_once_for_rows_of_a_layer_and_micro_batch(finished):
    """Recomputation does not ask again: of two layers, one has experts."""
    case, name = layouts.CASES["pp2-cp2-half"], "pp2-cp2-half"
    steps, evaluations = layouts.steps_of(finished / name), 2
    micro = case.size("--grad-acc-steps")
    assert "--sac-freq" in case.flags
    assert facts_of(finished / name)["waits"] <= (len(steps) + evaluations) * micro


def test_balanced_routing_gives_every_expert_as_many_rows():
    shape = config("qwen3_moe", mlp_only_layers=[])
    torch.manual_seed(0)
    for balanced in (True, False):
        model = built(shape, balanced=balanced)
        ids = torch.randint(97, (4, 16))
        model(ids, ids).backward()
        rows = torch.stack([block.mlp.load.total for block in model.blocks.values()])
        assert rows.sum() == 3 * 64 * 3
        assert ((rows.max(1).values / rows.mean(1) == 1).all()) == balanced
        assert all(block.mlp.router.weight.grad.abs().sum() > 0 for block in model.blocks.values())


def test_balanced_routing_is_the_same_on_every_layout():
    """The tokens of a rank have the experts that they have on one device, whatever its share."""
    shape = config("qwen3_moe")
    e, mlp = shape.experts, MixtureOfExperts(shape, balanced=True)
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(3, 12, shape.hidden_size)
    y = mlp(x)
    whole = experts._in_turn(3, 12, e, ALONE, torch.device("cpu")).view(3, 12, -1)
    assert len({tuple(row) for row in whole.flatten(0, 1).tolist()}) > 1
    for tp, cp in ((2, 1), (1, 2), (2, 3)):
        for rank in range(tp * cp):
            part = RankLayout(Parallelism(tp=tp, cp=cp, ulysses=cp == 2), rank)
            at = part.positions(12, torch.device("cpu")).local
            own = experts._in_turn(3, 12, e, part, at.device)
            assert torch.equal(own, whole[:, at].flatten(0, 1))
            mlp.layout = part
            torch.testing.assert_close(mlp(x[:, at]), y[:, at])


def test_a_correction_follows_the_loads_of_its_step_alone():
    mlp = MixtureOfExperts(config("deepseek_v3", router_bias_update_rate=0.01))
    for rows, first in ((9.0, -0.01), (0.0, 0.0)):  # the first expert has had the most in both
        mlp.load.add(torch.tensor([rows] + 7 * [1.0]))
        update_corrections(mlp)
        assert torch.equal(mlp.router.correction, torch.tensor([first] + 7 * [-first]))


def test_biases_of_stacked_experts_do_not_decay():
    """They are the only matrices that are biases."""
    model = Transformer(config("gpt_oss"), 16)
    plain = build_optimizer(model, OptimizerFlags(weight_decay=0.5)).param_groups[-1]
    assert plain["weight_decay"] == 0.0
    left = {id(p) for p in plain["params"]}
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert max(p.ndim for p in biases) == 2 and all(id(p) in left for p in biases)


def test_a_clip_of_zero_leaves_the_gradients_of_a_layout():
    gradients = mock.Mock(spec=Gradients, complete_and_norm=lambda: torch.tensor(2.0))
    for limit, left in ((0.0, 1.0), (1.0, 0.5)):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        optimizer_step([parameter], torch.optim.SGD([parameter]), 0.1, limit, None, gradients)
        assert parameter.grad.tolist() == pytest.approx([left] * 2, rel=1e-5)


def test_validation_moves_no_correction():
    """Rows of evaluation count nowhere: the same training with and without it.

    Those before a window do not count in it.
    """
    shape = config("deepseek_v3", router_bias_update_rate=0.01)
    ends = []
    for validated in (False, True):
        torch.manual_seed(0)
        model, before = built(shape), []
        for step in range(3):
            before = rows_so_far(model) if step == 1 else before
            ids = torch.randint(97, (4, 16))
            model(ids, ids).backward()
            if validated:
                model.eval()
                model(ids.new_ones(4, 16), ids)
                model.train()
            update_corrections(model)
        routers = [b.mlp.router for b in model.blocks.values() if hasattr(b.mlp, "router")]
        rows = imbalance_since(before, model)
        ends.append((rows, torch.stack([r.correction.data for r in routers])))
        mixtures = [b.mlp for b in model.blocks.values() if hasattr(b.mlp, "load")]
        late = [m.load.total - b for m, b in zip(mixtures, before, strict=True)]
        assert rows == (max((x.max() / x.mean()).item() for x in late), 1.0)
    assert ends[0][0] == ends[1][0] and torch.equal(ends[0][1], ends[1][1])
    assert ends[0][1].abs().sum() > 0


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize(("hidden", "size"), [(48, 24), (48, 20), (48, 18), (44, 24), (42, 24)])
def test_experts_that_grouped_matmuls_cannot_load_are_refused(hidden, size, amp):
    """The plan refuses exactly the sizes on which PyTorch fails, forward or backward."""
    shape = config("qwen3_moe", hidden_size=hidden, moe_intermediate_size=size, head_dim=8)
    model = built(shape, seq_len=24)
    tokens = torch.arange(24)[None]
    refused = contextlib.nullcontext()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp == "bf16"):
            loss = model(tokens, tokens)
        loss.backward()
    except RuntimeError:
        refused = pytest.raises(UsageError, match=rf"multiples of \d .*--amp {amp}")
    with refused:
        plan_of(["x.json", "--amp", amp, "--seq-len", "32", "--device", "cpu"], config=shape)
