"""Layers with a state for each head in place of attention: Gated DeltaNet and Mamba2.

Both are linear attention whose state decays: S = exp(g) S + k v^T, y = S^T q. The delta rule first takes
from v what the state has for k (Yang et al. 2024, "Gated Delta Networks"; Dao & Gu 2024, section 6, for
Mamba2). A chunk of positions is computed by matmuls, and a state passes from chunk to chunk. These are
PyTorch's operators in fp32, not the kernels of flash-linear-attention or mamba-ssm.

Shapes in the comments: B samples, T positions, n chunks of C, G groups of N elements (keys and queries,
or B and C of Mamba2), H heads of P elements (values).
"""

# pyright: reportIncompatibleMethodOverride=false

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.layers import ACTIVATIONS, Mask, Rope, no_autocast
from llm_train_bench.model.layout import ALONE, Layout
from llm_train_bench.model.operators import OwnFunction, operator
from llm_train_bench.model.piece_attention import Seen
from llm_train_bench.model.shapes import present


def _outputs(k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor]:
    return v.new_empty(*k.shape[:2], k.shape[3], v.shape[3]), torch.empty_like(v)


@operator("cpu", "cuda", fake=_outputs)
def chunk_states(k: Tensor, v: Tensor, w: Tensor | None, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk (R, n, N, P), and the values (R, n, C, P) that were added to it.

    Keys k (R, n, C, N), values v (R, n, C, P), factors of the state `decay` (R, n). With the delta rule
    w (R, n, C, N) times the state is taken from the values.
    """
    states, added = _outputs(k, v)
    state = torch.zeros_like(states[:, 0])
    for i in range(k.shape[1]):
        states[:, i] = state
        new = v[:, i] if w is None else torch.baddbmm(v[:, i], w[:, i], state, alpha=-1)
        added[:, i] = new
        state = torch.baddbmm(state * decay[:, i, None, None], k[:, i].mT, new)
    return states, added


@operator("cpu", "cuda", fake=lambda s, v, *_: (torch.empty_like(s), torch.empty_like(v)))
def chunk_states_backward(
    of_states: Tensor, of_added: Tensor, k: Tensor, w: Tensor | None, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the state after each chunk (R, n, N, P), and of the values (R, n, C, P)."""
    after, of_v = torch.empty_like(of_states), torch.empty_like(of_added)
    grad = torch.zeros_like(of_states[:, 0])
    for i in reversed(range(k.shape[1])):
        after[:, i] = grad
        new = torch.baddbmm(of_added[:, i], k[:, i], grad)
        of_v[:, i] = new
        grad = grad * decay[:, i, None, None] + of_states[:, i]
        if w is not None:
            grad = torch.baddbmm(grad, w[:, i].mT, new, alpha=-1)
    return after, of_v


class _States(OwnFunction):
    @staticmethod
    def forward(ctx, k, v, w, decay):
        states, added = chunk_states(k, v, w, decay)
        ctx.save_for_backward(k, w, decay, states, added)
        return states, added

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        k, w, decay, states, added = ctx.saved_tensors
        of_states, of_added = (g.contiguous() for g in grads)
        after, of_v = chunk_states_backward(of_states, of_added, k, w, decay)
        of_w = None if w is None else -(of_v @ states.mT)
        return added @ after.mT, of_v, of_w, (after * states).sum((-2, -1))


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, C: int, starts: Tensor | None
) -> Tensor:
    """Queries and keys (B, T, G, N), values (B, T, H, P), logarithms of decays (B, T, H) to (B, T, H, P).

    In fp32; with `beta` (B, T, H) by the delta rule. States begin anew with documents: `starts` (B, T).
    """
    (B, T, G, _), H = q.shape, v.shape[2]
    C = min(C, T)
    n, pad = -(-T // C), -T % C

    def chunks(x: Tensor) -> Tensor:
        """(B, T, heads, size) to (B, heads, n, C, size), dense."""
        x = F.pad(x.float(), (0, 0, 0, 0, 0, pad)).unflatten(1, (n, C))
        return x.permute(0, 3, 1, 2, 4).contiguous()

    q, k, v = chunks(q), chunks(k), chunks(v)
    total = chunks(g.unsqueeze(-1)).squeeze(-1).cumsum(-1)  # (B, H, n, C)
    hidden = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    pairs = total.unsqueeze(-1) - total.unsqueeze(-2)
    pairs = pairs.masked_fill(hidden, float("-inf")).exp()
    reads, writes = total.exp(), (total[..., -1:] - total).exp()
    if starts is not None:
        begins = F.pad(starts, (0, pad), value=T).unflatten(1, (n, C))
        first = torch.arange(n, device=q.device)[:, None] * C
        # Pairs are of one document; it reads the state if it began before the chunk, and writes it if it
        # is the last one there.
        pairs = pairs * (begins[..., :, None] == begins[..., None, :]).unsqueeze(1)
        reads = reads * (begins < first).unsqueeze(1)
        writes = writes * (begins == begins[..., -1:]).unsqueeze(1)
    scores = (q @ k.mT).repeat_interleave(H // G, 1) * pairs  # one product for the heads of a group
    k_all = k.repeat_interleave(H // G, 1)
    w = None
    if beta is not None:
        beta = chunks(beta.unsqueeze(-1))
        system = (k @ k.mT).repeat_interleave(H // G, 1) * pairs * beta
        both = torch.cat((v * beta, k_all * (beta * reads.unsqueeze(-1))), dim=-1)
        both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        v, w = both.split((v.shape[-1], k.shape[-1]), dim=-1)
    keys = k_all * writes.unsqueeze(-1)
    rows = [None if x is None else x.flatten(0, 1).contiguous() for x in (keys, v, w)]
    states, added = _States.apply(*rows, reads[..., -1].flatten(0, 1).contiguous())
    states, added = (x.unflatten(0, (B, H)) for x in (states, added))
    q_all = q.repeat_interleave(H // G, 1) * reads.unsqueeze(-1)
    y = q_all @ states + scores @ added
    return y.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T]


class CausalConv(nn.Module):
    """A convolution of each channel over the last positions of its document.

    Channels are in groups; `sizes` are each segment's channels in a group.
    """

    def __init__(self, groups: int, sizes: list[int], kernel: int, bias: bool):
        super().__init__()
        self.groups, self.sizes = groups, sizes
        self.weight = nn.Parameter(torch.empty(groups * sum(sizes), kernel))
        self.bias = nn.Parameter(torch.empty(groups * sum(sizes))) if bias else None

    def forward(self, x: Tensor, segment: int, begin: int, starts: Tensor | None) -> Tensor:
        """(B, T, c) of a segment's channels from `begin` on."""

        def own(table: Tensor) -> Tensor:
            rows = table.unflatten(0, (self.groups, -1)).split(self.sizes, dim=1)[segment]
            return rows.flatten(0, 1)[begin : begin + x.shape[2]].to(x.dtype)

        weight = own(self.weight)
        y, T, K = x * weight[:, -1], x.shape[1], weight.shape[1]
        for back in range(1, min(K, T)):
            earlier = F.pad(x[:, : T - back], (0, 0, back, 0))
            if starts is not None:
                inside = torch.arange(T, device=x.device) - back >= starts
                earlier = earlier * inside.unsqueeze(-1)
            y = y + earlier * weight[:, -1 - back]
        return y if self.bias is None else y + own(self.bias)


class GatedNorm(nn.Module):
    """RMS norm of groups of values, before (Qwen) or after (Mamba2) these meet their gates."""

    def __init__(self, size: int, group: int, eps: float, gate_first: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.group, self.eps, self.gate_first = group, eps, gate_first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(B, T, groups x size of a group) each."""
        wide, gate = x.float(), F.silu(gate.float())
        wide = wide * gate if self.gate_first else wide
        groups = wide.unflatten(-1, (-1, self.group))
        y = F.rms_norm(groups, (self.group,), None, self.eps).to(x.dtype)
        y = y.flatten(-2).unflatten(-1, (-1, len(self.weight))) * self.weight.to(x.dtype)
        y = y.flatten(-2)
        return y if self.gate_first else (y * gate).to(x.dtype)


class RecurrentMixer(nn.Module):
    """Gated DeltaNet or Mamba2 in the place of attention; a layout's ranks share the heads."""

    def __init__(self, config: ModelConfig, layout: Layout = ALONE):
        super().__init__()
        r, d, tp = present(config.recurrent), config.hidden_size, layout.tp
        self.options, self.layout = r, layout
        self.groups, self.heads = r.groups // tp, r.heads // tp
        value = self.heads * r.head_dim
        # Rows of a group: of queries, keys, values, gates of values, and of steps.
        self.sizes = [rows // r.groups for rows in r.segments]
        self.project = nn.Linear(d, self.groups * sum(self.sizes), bias=r.bias)
        self.conv = CausalConv(self.groups, self.sizes[:3], r.kernel, r.conv_bias)
        self.decay = nn.Parameter(torch.empty(self.heads))
        self.step_bias = nn.Parameter(torch.empty(self.heads))
        self.skip = None if r.delta else nn.Parameter(torch.empty(self.heads))
        group = r.head_dim if r.delta else r.heads * r.head_dim // r.norm_groups
        size = r.head_dim if r.delta else value
        self.gated_norm = GatedNorm(size, group, config.norm_eps, gate_first=not r.delta)
        self.out = nn.Linear(value, d, bias=r.bias)
        self.activation = ACTIVATIONS[r.activation]

    def forward(self, x: Tensor, rope: Rope | None = None, mask: Mask = None) -> Tensor:
        """(B, T, d) to (B, T, d); a `mask` has the starts of documents on x's device."""
        r = self.options
        rows = self.layout.column_parallel(self.project, x).unflatten(-1, (self.groups, -1))
        q, k, v, z, *gates = rows.split(self.sizes, dim=-1)  # (B, T, G, rows of a group)
        if (repeats := self.layout.cp // self.groups) > 1:  # so that each cp rank has a group
            q, k = (each.repeat_interleave(repeats, 2) for each in (q, k))
        v = torch.cat((v.unflatten(-1, (-1, r.head_dim)), torch.stack(gates, dim=-1)), dim=-1)
        y = self.layout.attend(self.mix, q, k, v.flatten(2, 3), mask)
        y = self.gated_norm(y.flatten(2), z.flatten(2))
        return self.layout.row_parallel(self.out, y)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, first: int) -> Tensor:
        """(B, T, G, N) queries and keys, (B, T, H, P + gates) values to (B, T, H, P).

        Of several cp ranks each has some heads; `first` is the first group's number.
        """
        r = self.options
        starts = mask.starts if isinstance(mask, Seen) else None
        (G, H), repeats = (q.shape[2], v.shape[2]), max(1, self.layout.cp // self.groups)
        v, gates = v.split((r.head_dim, v.shape[3] - r.head_dim), dim=-1)
        group, head = first // repeats * r.state, first // G * H
        heads = slice(head, head + H)
        parts = enumerate(((q, group), (k, group), (v, head * r.head_dim)))
        q, k, v = (
            self.activation(self.conv(x.flatten(2), segment, begin, starts)).view(x.shape)
            for segment, (x, begin) in parts
        )
        with no_autocast(q.device):
            rate = -self.decay[heads].float().exp()
            step = F.softplus(gates[..., -1].float() + self.step_bias[heads].float())
            if r.delta:
                q, k = (_unit(x) for x in (q, k))
                beta = gates[..., 0].float().sigmoid()
                y = scan(q * r.state**-0.5, k, v, rate * step, beta, r.chunk, starts)
                return y.to(v.dtype)
            step = step.clamp(r.least_step, r.most_step)
            y = scan(q, k, v.float() * step.unsqueeze(-1), rate * step, None, r.chunk, starts)
            assert self.skip is not None
            return (y + self.skip[heads].float().unsqueeze(-1) * v.float()).to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in fp32, as flash-linear-attention makes them."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
