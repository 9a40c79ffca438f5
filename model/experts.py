"""Mixtures of experts: a router chooses some of many gated MLPs for each token.

Shapes in the comments: N tokens of one rank, E experts, k of them for a token, d hidden size, f size of
an expert.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.layers import ACTIVATIONS, MLP, autocast_dtype, no_autocast
from llm_train_bench.model.layout import ALONE, Layout, count_rows
from llm_train_bench.model.shapes import Experts, present


class Router(nn.Linear):
    """Scores experts by a linear layer, and chooses the best for each token."""

    def __init__(self, config: ModelConfig):
        e = present(config.experts)
        super().__init__(config.hidden_size, e.number, bias=e.biases)
        self.options: Experts = e
        # Learned by no gradient, but saved, sharded and loaded like a parameter.
        zeros = torch.zeros(e.number)
        self.correction = nn.Parameter(zeros, requires_grad=False) if e.correction else None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, balanced: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(N, d) tokens to all experts' scores (N, E) in fp32, numbers and weights (N, k) of the chosen.

        Logits have autocast's dtype but for sigmoid scores, which are fp32 throughout, as in the
        families' own code. `balanced` (N, k) is taken for the choice; scores weigh it as ever.
        """
        e = self.options
        if e.exact_router:
            with no_autocast(x.device):
                scores = F.linear(x.float(), self.weight.float()).sigmoid()
        else:
            scores = F.linear(x, self.weight, self.bias).float()
            if e.scores == "softmax":
                scores = scores.softmax(dim=-1)
        index = self.best(scores.detach()) if balanced is None else balanced
        weights = scores.gather(1, index)
        if e.scores == "softmax_chosen":
            weights = weights.softmax(dim=-1)
        if e.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return scores, index, weights * e.scale

    def best(self, scores: Tensor) -> Tensor:
        """(N, E) scores to the numbers of the k experts chosen for each token (N, k)."""
        e = self.options
        if self.correction is not None:
            scores = scores + self.correction
        if e.groups > 1:  # only of the best groups, by the sum of their two best (DeepSeek-V3)
            grouped = scores.unflatten(1, (e.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(e.groups_per_token).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            scores = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
        return scores.topk(e.per_token, dim=-1).indices


def _in_turn(B: int, T: int, e: Experts, layout: Layout, device: torch.device) -> Tensor:
    """(B x t, k) experts of this rank's tokens, dealt out one after the other over all B x T."""
    positions = torch.arange(T, device=device)[layout.positions(T, device).local]
    tokens = (torch.arange(B, device=device)[:, None] * T + positions).flatten()
    return (tokens[:, None] * e.per_token + torch.arange(e.per_token, device=device)) % e.number


class Stacked(nn.Module):
    """The matrices (E, out, in) of one linear layer of each expert, and their biases (E, out)."""

    # Of formats other than bf16, which the compiler does not know (leave_out_of_compilation).
    grouped_mm = staticmethod(F.grouped_mm)

    def __init__(self, number: int, inside: int, outside: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, outside, inside))
        self.bias = nn.Parameter(torch.empty(number, outside)) if bias else None

    def product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Rows (R, in) times the weights (E, in, out) of the experts whose rows end there."""
        function = F.grouped_mm if rows.dtype == torch.bfloat16 else self.grouped_mm
        return function(rows, weight, offs=ends)

    def use_product(self, product: Any) -> None:
        """Multiply by another function than `product`."""
        self.product = product

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows (R, in) sorted by expert, `counts` (E,) of each, to (R, out); one grouped matmul.

        Autocast does not know grouped matmuls, so that its dtype is applied here.
        """
        dtype = autocast_dtype(rows.device) or rows.dtype
        ends = counts.cumsum(0, dtype=torch.int32)
        weight = self.weight.to(dtype).transpose(1, 2)
        out = self.product(rows.to(dtype).contiguous(), weight, ends)
        if self.bias is None:
            return out
        numbers = torch.arange(len(counts), device=counts.device)
        expert = torch.repeat_interleave(numbers, counts, output_size=len(rows))
        return out + self.bias.to(dtype)[expert]


class StackedMLPs(nn.Module):
    """The MLPs of all experts."""

    gate_up: Stacked
    up: Stacked

    def __init__(self, config: ModelConfig, layout: Layout):
        super().__init__()
        e = present(config.experts)
        d = e.latent or config.hidden_size
        self.options, self.activation = e, ACTIVATIONS[config.activation]
        number = e.number // layout.ep
        setattr(self, "gate_up" if e.gated else "up", Stacked(number, d, e.wide * e.size, e.biases))
        self.down = Stacked(number, e.size, d, e.biases)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows (R, d) sorted by expert, `counts` (E,) of each, to (R, d)."""
        if not self.options.gated:
            return self.down(self.activation(self.up(rows, counts)), counts)
        gate, up = self.gate_up(rows, counts).chunk(2, dim=-1)
        limit = self.options.limit
        if limit is None:
            return self.down(self.activation(gate) * up, counts)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.down((up + 1) * gate * torch.sigmoid(self.options.gain * gate), counts)


class RoutingReplay:
    """The choices of a checkpointed block's forward passes, given to their recomputations in order."""

    def __init__(self) -> None:
        self._choices: deque[tuple[Tensor, Any]] = deque()
        self._mode: Literal["record", "replay"] | None = None

    def contexts(self, other: Callable[[], Any] | None) -> tuple[Any, Any]:
        """Contexts of a forward pass and its recomputation, around those that `other` returns."""
        forward, again = other() if other else (contextlib.nullcontext(), contextlib.nullcontext())
        return self._in_mode("record", forward), self._in_mode("replay", again)

    @contextlib.contextmanager
    def _in_mode(self, mode: Literal["record", "replay"], inner: Any) -> Iterator[None]:
        self._mode = mode if torch.is_grad_enabled() else None
        try:
            with inner:
                yield
        finally:
            self._mode = None

    def next(self) -> tuple[Tensor | None, Any]:
        """The choice and the plan of the forward pass that is recomputed; None of each otherwise."""
        return self._choices.popleft() if self._mode == "replay" else (None, None)

    def add(self, index: Tensor, plan: Any) -> None:
        """Keep them for the recomputation, if there will be one."""
        if self._mode == "record":
            self._choices.append((index, plan))


class ExpertLoad:
    """Rows that each expert of a layer has had in training; fp32, on the device."""

    total: Tensor | None = None
    _at_step: Tensor | float = 0.0

    def add(self, counts: Tensor) -> None:
        """Count the rows (E,) of a forward pass."""
        self.total = counts.float() if self.total is None else self.total + counts

    def of_step(self) -> Tensor | None:
        """The rows since the last call; None before the first pass."""
        rows = None if self.total is None else self.total - self._at_step
        self._at_step = 0.0 if self.total is None else self.total
        return rows


class MixtureOfExperts(nn.Module):
    """Router, experts and the shared expert in the place of a block's MLP; no token is dropped."""

    def __init__(self, config: ModelConfig, balanced: bool = False, layout: Layout = ALONE):
        super().__init__()
        e, d = present(config.experts), config.hidden_size
        self.options, self.balanced, self.layout = e, balanced, layout
        self.router = Router(config)
        self.experts = StackedMLPs(config, layout)
        self.latent_down = nn.Linear(d, e.latent, bias=config.mlp_bias) if e.latent else None
        self.latent_up = nn.Linear(e.latent, d, bias=config.mlp_bias) if e.latent else None
        self.shared = MLP(config, layout, e.shared_size) if e.shared_size else None
        self.shared_gate = nn.Linear(d, 1, bias=False) if e.shared_gate else None
        self.replay, self.load = RoutingReplay(), ExpertLoad()
        self._balanced_plans: dict[Any, Any] = {}  # balanced routing is always the same
        self._loss_factor: Tensor | float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to (B, T, d)."""
        tokens = x.flatten(0, 1)
        balanced = None
        if self.balanced:
            whole = x.shape[1] * self.layout.tp * self.layout.cp
            balanced = _in_turn(len(x), whole, self.options, self.layout, x.device)
        index, plan = self.replay.next()
        scores, index, weights = self.router(tokens, balanced if index is None else index)
        counts = count_rows(index, self.options.number)
        rows = tokens if self.latent_down is None else self.latent_down(tokens)
        coming, plan = self.dispatch(rows, index, weights.to(x.dtype), counts, plan)
        shared = None if self.shared is None else self.shared(x)  # while rows travel
        y = self.combine(coming, plan)
        y = y if self.latent_up is None else self.latent_up(y)
        if self.options.aux_loss and torch.is_grad_enabled():
            y = _WithLoss.apply(y, self._loss_factor * self.balance_loss(scores, counts))
        y = y.view_as(x)
        if shared is None:
            return y
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    def dispatch(
        self, tokens: Tensor, index: Tensor, weights: Tensor, counts: Tensor, plan: Any
    ) -> tuple[Any, Any]:
        """(N, d) tokens, the choice and its weights (N, k) on their way to the experts, and a plan.

        `counts` (E,) are the rows of each expert. A recomputation has the plan of its forward pass, and
        so need not ask other ranks, nor wait for the numbers.
        """
        if plan is None:
            key = (index.shape, index.device) if self.balanced and self.layout.ep > 1 else None
            plan = self._balanced_plans.get(key)
            if plan is None:
                plan = self.layout.plan_rows(index, counts)
            if key is not None:
                self._balanced_plans[key] = plan
            if self.training:  # validation moves no correction
                self.load.add(counts)
        self.replay.add(index, plan)
        return self.layout.dispatch(tokens, index, weights, plan), plan

    def combine(self, sent: Any, plan: Any) -> Tensor:
        """What `dispatch` sent to the weighted sums (N, d) of their experts' outputs."""
        return self.layout.run_experts(self.experts, sent, plan)

    def scale_balance_loss(self, factor: Tensor | float) -> None:
        """Set what the backward of the model's own loss is multiplied by."""
        self._loss_factor = factor

    def leave_out_of_compilation(self, disable: Callable[[Any], Any], experts: bool) -> None:
        """Let the compiler not see how rows are put in order; with `experts` nor their outputs."""
        self.dispatch = disable(self.dispatch)
        if experts:
            self.combine = disable(self.combine)
        grouped_mm = disable(F.grouped_mm)
        for stacked in self.experts.children():
            stacked.grouped_mm = grouped_mm

    def balance_loss(self, scores: Tensor, counts: Tensor) -> Tensor:
        """E x sum of experts' shares of the choices times mean scores (Fedus et al. 2021, eq. 4)."""
        e = self.options
        if e.scores == "sigmoid":
            scores = scores / scores.sum(dim=-1, keepdim=True)
        elif e.scores == "softmax_chosen":
            scores = scores.softmax(dim=-1)
        share = self.layout.sum_over_data(counts.float())
        share = share / share.sum()
        return e.aux_loss * e.number * (share * scores.mean(dim=0)).sum()


class _WithLoss(torch.autograd.Function):
    """`y`, whose backward also sends a gradient of 1 into `loss`; the reported loss is without it."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.like = loss
        return y.view_as(y)

    @staticmethod
    def backward(ctx, *grads):
        return *grads, torch.ones_like(ctx.like)


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """The mixtures of all blocks."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def rows_so_far(model: nn.Module) -> list[Tensor | float]:
    """A copy of the rows (E,) that this rank's tokens have sent to each mixture's experts in training."""
    totals = (module.load.total for module in mixtures(model))
    return [0.0 if total is None else total.clone() for total in totals]


def imbalance_since(
    before: Sequence[Tensor | float], model: nn.Module
) -> tuple[float, float] | None:
    """Rows since `before` (`rows_so_far`) over their mean: of the fullest expert and ep rank.

    Those of the worst mixture; None without any. Ranks that hold other tokens call it together.
    """
    found = []
    for module, old in zip(mixtures(model), before, strict=True):
        if module.load.total is not None:
            rows = module.layout.sum_over_data(module.load.total - old)
            of_ranks = rows.view(module.layout.ep, -1).sum(dim=1)
            found.append([(r.max() / r.mean()).item() for r in (rows, of_ranks)])
    return (max(x for x, _ in found), max(x for _, x in found)) if found else None


@torch.no_grad()
def update_corrections(model: nn.Module) -> None:
    """Move the routers' corrections towards equal loads of this step over all ranks.

    Each by the config's rate, up for experts with fewer rows than the mean, down for those with more
    (Wang et al. 2024, algorithm 1; DeepSeek-V3, 2.1.2).
    """
    for module in mixtures(model):
        correction, rate = module.router.correction, module.options.correction_rate
        if rate and correction is not None and (own := module.load.of_step()) is not None:
            rows = module.layout.sum_over_data(own)
            correction.add_((rate * (rows.mean() - rows).sign()).to(correction))
