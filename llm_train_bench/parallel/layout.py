"""Tensor, context and expert parallelism: the layout of a rank among those that share its batch.

Tensor parallelism with sequence parallelism follows Korthikanti et al. 2022; context parallelism is
Ulysses (Jacobs et al. 2023), or gathers keys and values (Llama 3, 3.3.2) where heads do not divide.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llm_train_bench.apply.optimizer import gradient_norm, local_gradients
from llm_train_bench.formulas.work import Parallelism
from llm_train_bench.model.layout import Attend, Documents, HasWeights, Positions, Row, count_rows
from llm_train_bench.model.products import ProductLinear, add_bias, product_of
from llm_train_bench.model.weights import Weight, part_of
from llm_train_bench.parallel.ddp import ReplicaLayout
from llm_train_bench.parallel.fsdp import unshard
from llm_train_bench.parallel.ranks import collective_timeout

_c10d = torch.ops._c10d_functional
_GATHER, _SCATTER = _c10d.all_gather_into_tensor, _c10d.reduce_scatter_tensor


def set_timeouts(mesh: DeviceMesh, device: torch.device, timeout_s: float) -> None:
    """Give the groups of a mesh the timeout of collectives, which new groups do not inherit."""
    # Private: a mesh takes no timeout for its groups in torch 2.11 to 2.13. `new_group` does, but would
    # wait for all ranks once for each group.
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(collective_timeout(device, timeout_s), group)


class _Collective(torch.autograd.Function):
    """A collective by its operator and arguments, along dimension 0; the gradient takes `back`."""

    @staticmethod
    def forward(ctx, x, op, args, back, back_args):
        ctx.back, ctx.args = back, back_args
        return _c10d.wait_tensor(op(x.contiguous(), *args))

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad = ctx.back(grad_outputs[0].contiguous(), *ctx.args)
        return _c10d.wait_tensor(grad), None, None, None, None


def _all_gather(x: Tensor, n: int, group: str) -> Tensor:
    return _Collective.apply(x, _GATHER, (n, group), _SCATTER, ("sum", n, group))


class _AllToAllStart(torch.autograd.Function):
    """Begin to send rows to other ranks; what runs before `_AllToAllWait` runs beside it."""

    @staticmethod
    def forward(ctx, rows, received, sent, group, pending_gradients):
        ctx.pending_gradients = pending_gradients
        return _c10d.all_to_all_single(rows.contiguous(), received, sent, group)

    @staticmethod
    def backward(ctx, *grads):
        return _c10d.wait_tensor(ctx.pending_gradients.pop()), None, None, None, None


class _AllToAllWait(torch.autograd.Function):
    """Rows that arrived; their gradients are `pending_gradients` until _AllToAllStart's backward."""

    @staticmethod
    def forward(ctx, rows, received, sent, group, pending_gradients):
        ctx.args, ctx.pending_gradients = (sent, received, group), pending_gradients
        return _c10d.wait_tensor(rows).view_as(rows)

    @staticmethod
    def backward(ctx, *grads):
        ctx.pending_gradients.append(_c10d.all_to_all_single(grads[0].contiguous(), *ctx.args))
        return grads[0], None, None, None, None


class _ScatterAdd(torch.autograd.Function):
    """Rows (R, d) added up in fp32 where `index` (R,) says, to (number, d); it keeps only the index."""

    @staticmethod
    def forward(ctx, rows, index, number):
        ctx.save_for_backward(index)
        zeros = torch.zeros(number, rows.shape[1], device=rows.device)
        return zeros.index_add_(0, index, rows.float()).to(rows.dtype)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0][ctx.saved_tensors[0]], None, None


class RankLayout(ReplicaLayout):
    """One rank among tp x cp ranks that share a batch, ep that share the experts, pp the layers.

    tp is innermost, so that its ranks are neighbours; then cp, data, replicas; the groups of a pipeline
    are outermost. ep spans neighbours too, over tp, cp and data.
    """

    def __init__(self, parallelism: Parallelism, rank: int):
        self.parallelism, self.ulysses = parallelism, parallelism.ulysses
        self.tp, self.cp = parallelism.tp, parallelism.cp
        self.ep, self.pp = parallelism.ep, parallelism.pp
        self.pp_rank, stage_rank = divmod(rank, parallelism.ranks)
        self.tp_rank, self.cp_rank = rank % self.tp, rank // self.tp % self.cp
        self.ep_rank = stage_rank % self.ep
        self.data_rank = stage_rank // (self.tp * self.cp)
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.names: dict[str, Any] = {}  # of the groups
        self.owners: dist.ProcessGroup | None = None  # all that share one copy of the same layers

    def connect(self, device: torch.device, timeout_s: float) -> dict[str, DeviceMesh]:
        """Make the groups of ranks; all ranks call this. Returns the meshes over which FSDP divides.

        `dense` has the ranks of one tp part, `experts` those of the same experts; with replicas each has
        them as its first dimension.
        """
        replicas, pp = self.parallelism.dp_replicate, self.pp
        dims = ("replicate", "shard") if replicas > 1 else ("shard",)
        if not self.parallelism.divided:
            sizes = (replicas, self.parallelism.shards)[-len(dims) :]
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=dims)
            set_timeouts(mesh, device, timeout_s)
            self.owners = mesh.get_group(mesh.ndim - 1)
            return {"dense": mesh, "experts": mesh}
        ranks = torch.arange(pp * self.parallelism.ranks)

        def by(n: int) -> torch.Tensor:  # of n neighbours each has another part
            return ranks.view(pp, replicas, -1, n).permute(0, 3, 1, 2)

        # By the dimension that is a group of its own.
        grids = {
            "tp": (("stage", "tp", "replicate", "shard"), by(self.tp)),
            "ep": (("stage", "ep", "replicate", "shard"), by(self.ep)),
            "cp": (("tp", "cp"), ranks.view(-1, self.cp, self.tp).mT.reshape(-1, self.cp)),
            "same": (("pp", "same"), ranks.view(pp, -1)),
            "pp": (("same", "pp"), ranks.view(pp, -1).T),
            "owners": (("replicate", "owners"), ranks.view(-1, self.parallelism.shards)),
        }
        meshes = {}
        for kind, (names, grid) in grids.items():
            meshes[kind] = DeviceMesh(device.type, grid, mesh_dim_names=names)
            set_timeouts(meshes[kind], device, timeout_s)
            self.groups[kind] = meshes[kind].get_group(kind)
            self.names[kind] = self.groups[kind].group_name
        self.stage, self.owners = self.groups["same"] if pp > 1 else None, self.groups["owners"]
        return {"dense": meshes["tp"][dims], "experts": meshes["ep"][dims]}

    def gather_parameter(self, weight: Weight, tensor: Tensor) -> Tensor:
        """A parameter, or its gradient, whole: a collective that all ranks must join."""
        value, split = unshard(tensor), weight.split
        if split is None or (n := getattr(self, split.ranks)) == 1:
            return value
        rows = weight.shape[split.dimension]
        sizes = [end - begin for begin, end in (part_of(rows, n, rank) for rank in range(n))]
        if missing := max(sizes) - value.shape[split.dimension]:  # all gather parts of one size
            value = torch.cat((value, value.narrow(split.dimension, 0, missing)), split.dimension)
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(n)]
        dist.all_gather(parts, value.contiguous(), group=self.groups[split.ranks])
        unpadded = (
            part.narrow(split.dimension, 0, n) for part, n in zip(parts, sizes, strict=True)
        )
        return torch.cat([*unpadded], split.dimension)

    def gather_parameters(self, parts: Iterable[Row]) -> Iterator[Row]:
        if self.pp == 1:
            yield from super().gather_parameters(parts)
            return
        group, mine = self.groups["pp"], dict(parts)
        kinds = {weight: (tensor.dtype, tensor.device) for weight, tensor in mine.items()}
        by_stage = [kinds] * self.pp
        dist.all_gather_object(by_stage, kinds, group=group)
        owners: dict[Weight, int] = {}
        for owner, kinds in enumerate(by_stage):
            for weight, (dtype, device) in kinds.items():
                if owners.setdefault(weight, owner) != owner:  # the weight of a tied head
                    continue
                if owner == self.pp_rank:
                    value = self.gather_parameter(weight, mine[weight]).contiguous()
                else:
                    value = torch.empty(weight.shape, dtype=dtype, device=device)
                dist.broadcast(value, group=group, group_src=owner)
                yield weight, value

    def swap_with_stage(self, numbers: Tensor, pp_rank: int) -> Tensor:
        """Swap numbers with the rank that has the same parts in another group of a pipeline."""
        group, theirs = self.groups["pp"], torch.empty_like(numbers)
        send = dist.P2POp(dist.isend, numbers.contiguous(), group=group, group_peer=pp_rank)
        receive = dist.P2POp(dist.irecv, theirs, group=group, group_peer=pp_rank)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return theirs

    def gradients(self, model: HasWeights) -> "Gradients | None":
        return Gradients(model, self) if self.parallelism.divided else None

    def positions(
        self, T: int, device: torch.device, documents: Documents | None = None
    ) -> Positions:
        if documents is None or self.cp == 1 or self.ulysses:
            return self._fixed_positions(T, device)
        return self._positions_of(shared_by_work(documents.starts, self.cp), device)

    @functools.cache  # noqa: B019 (a layout lives as long as its run)
    def _fixed_positions(self, T: int, device: torch.device) -> Positions:
        if self.tp * self.cp == 1:
            return super().positions(T, device)
        held = torch.arange(T, device="cpu").view(self.cp, -1)
        if not self.ulysses:  # a chunk from the head and one from the tail: equal work
            head, tail = held.view(2 * self.cp, -1).split(self.cp)
            held = torch.cat((head, tail.flip(0)), dim=1)
        return self._positions_of(held, device)

    def _positions_of(self, held: Tensor, device: torch.device) -> Positions:
        """The places of this rank, if the cp ranks hold these positions (cp, T / cp) on the host."""
        mine = held[self.cp_rank]
        own, gathered = mine.chunk(self.tp)[self.tp_rank].to(device), mine.to(device)
        if self.cp == 1 or self.ulysses:
            return Positions(own, slice(len(mine)) if self.cp == 1 else gathered)
        return Positions(own, gathered, mine, held.flatten().argsort().to(device))

    def gather(self, x: Tensor) -> Tensor:
        if self.tp == 1:
            return x
        return _all_gather(x.transpose(0, 1), self.tp, self.names["tp"]).transpose(0, 1)

    def scatter(self, x: Tensor) -> Tensor:
        if self.tp == 1:
            return x
        n, name = self.tp, self.names["tp"]
        moves = _SCATTER, ("sum", n, name), _GATHER, (n, name)
        return _Collective.apply(x.transpose(0, 1), *moves).transpose(0, 1)

    def sum_over_tp(self, numbers: Tensor) -> Tensor:
        if self.tp == 1:
            return numbers
        sums = _c10d.all_reduce, ("sum", self.names["tp"])
        return _Collective.apply(numbers, *sums, *sums)

    def max_over_ranks(self, numbers: Tensor, *kinds: str) -> Tensor:
        for kind in kinds or ("tp",):
            if getattr(self, kind) > 1:
                numbers = _c10d.wait_tensor(_c10d.all_reduce(numbers, "max", self.names[kind]))
        return numbers

    def column_parallel(self, linear: nn.Linear, x: Tensor) -> Tensor:
        if self.tp == 1:
            return linear(x)
        return add_bias(product_of(linear, x, self._gathering, self._scattering), linear)

    def _gathering(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to gather own tokens (B, t, d) of the tp ranks."""
        x = x.transpose(0, 1).contiguous()
        coming = _GATHER(x, self.tp, self.names["tp"])
        return lambda: _c10d.wait_tensor(coming).transpose(0, 1)

    def _scattering(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to add up the tp ranks' (B, T, d), for the sums of own tokens."""
        x = x.transpose(0, 1).contiguous()
        coming = _SCATTER(x, "sum", self.tp, self.names["tp"])
        return lambda: _c10d.wait_tensor(coming).transpose(0, 1)

    def row_parallel(self, linear: nn.Linear, x: Tensor) -> Tensor:
        if self.tp == 1:
            return linear(x)
        fp8 = isinstance(linear, ProductLinear)
        y = product_of(linear, x) if fp8 else F.linear(x, linear.weight)
        return add_bias(self.scatter(y), linear)

    def attend(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
        if self.cp == 1:
            return attend(q, k, v, mask, 0)
        if self.ulysses:
            return self._attend_by_heads(attend, q, k, v, mask)
        return self._attend_by_tokens(attend, q, k, v, mask)

    def _attend_by_heads(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
        """All tokens of some heads, by one exchange of queries, keys and values before, one after."""
        n, (B, t, H, _) = self.cp, q.shape
        heads = [x.shape[2] // n for x in (q, k, v)]
        widths = [h * x.shape[3] for h, x in zip(heads, (q, k, v), strict=True)]
        exchange = funcol.all_to_all_single_autograd
        ones, name = [1] * n, self.names["cp"]  # the i-th part goes to rank i, and comes from it
        sent = torch.cat([x.reshape(B, t, n, -1) for x in (q, k, v)], dim=-1).permute(2, 1, 0, 3)
        here = exchange(sent.contiguous(), ones, ones, name).flatten(0, 1)  # (T, B, widths)
        parts = here.transpose(0, 1).split(widths, dim=-1)
        q, k, v = (p.unflatten(-1, (h, -1)) for p, h in zip(parts, heads, strict=True))
        y = attend(q, k, v, mask, self.cp_rank * heads[0])  # (B, T, H / n, D of values)
        back = y.flatten(2).transpose(0, 1).unflatten(0, (n, t))
        # (n, t, B, H / n x D): the part of the heads that each rank had.
        back = exchange(back.contiguous(), ones, ones, name)
        return back.permute(2, 1, 0, 3).reshape(B, t, H, -1)

    def _attend_by_tokens(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
        """Own queries over all keys and values, which are gathered, and put in their order."""
        both = torch.cat((k.flatten(2), v.flatten(2)), dim=-1).transpose(0, 1)
        both = _all_gather(both, self.cp, self.names["cp"])[mask.key_order]
        parts = both.transpose(0, 1).tensor_split([k.shape[2] * k.shape[3]], dim=-1)
        k, v = (p.unflatten(-1, x.shape[2:]) for p, x in zip(parts, (k, v), strict=True))
        return attend(q, k, v, mask, 0)

    def plan_rows(self, index: Tensor, counts: Tensor) -> Any:
        """Tokens to each of the ep ranks and from it, and choices of experts here.

        A token that several experts of a rank want goes there once.
        """
        if self.ep == 1:
            return super().plan_rows(index, counts)
        each = len(counts) // self.ep
        expert_rank = index // each
        tokens = self.rank_needs_token(expert_rank).sum(1)
        numbers = torch.stack((tokens, counts.view(self.ep, each).sum(1)), dim=1)
        # By an operator that selective checkpointing does not keep: a recomputation has the plan.
        theirs = torch.empty_like(numbers)
        dist.all_to_all_single(theirs, numbers, group=self.groups["ep"])
        return self.rows_to_send(torch.cat((numbers[:, 0], theirs.T.flatten()))), each

    def rank_needs_token(self, expert_rank: Tensor) -> Tensor:
        """(N, k) ranks of a token's experts to whether each rank wants the token (ep, N), as 0 and 1."""
        return expert_rank.new_zeros(len(expert_rank), self.ep).scatter_(1, expert_rank, 1).T

    def rows_to_send(self, numbers: Tensor) -> tuple[list[int], list[int], int]:
        """Tokens to and from each of the ep ranks, and choices: a layer's one wait for the device.

        It is in the forward of a micro batch: a recomputation and balanced routing know the numbers.
        """
        there, here, choices = numbers.view(3, -1).tolist()
        return there, here, sum(choices)

    def dispatch(self, tokens: Tensor, index: Tensor, weights: Tensor, plan: Any) -> Any:
        if self.ep == 1:
            return super().dispatch(tokens, index, weights, plan)
        ((there, here, _), each), N = plan, len(tokens)
        rank_needs_token = self.rank_needs_token(index // each).flatten()
        order = rank_needs_token.argsort(descending=True, stable=True)[: sum(there)]
        token, expert_rank = order % N, order // N  # by rank, then by token
        local = index[token] - each * expert_rank[:, None]
        inside = (local >= 0) & (local < each)
        choice = torch.where(inside, local, each).float()
        with_weights = torch.cat((torch.where(inside, weights[token].float(), 0.0), choice), dim=1)
        in_flight = []
        for rows in (tokens[token], with_weights):
            pending_gradients: list[Tensor] = []
            args = here, there, self.names["ep"], pending_gradients
            in_flight.append((_AllToAllStart.apply(rows, *args), *args))
        return in_flight, token, N

    def run_experts(self, experts: nn.Module, sent: Any, plan: Any) -> Tensor:
        """Tokens that come from all ranks go through the experts, and their sums back."""
        if self.ep == 1:
            return super().run_experts(experts, sent, plan)
        (in_flight, token, N), ((there, here, choices), each) = sent, plan
        tokens, with_weights = (_AllToAllWait.apply(*args) for args in in_flight)
        k = with_weights.shape[1] // 2
        choice = with_weights[:, k:].detach().long().flatten()
        order = choice.argsort(stable=True)[:choices]  # by expert; those of other ranks come last
        counts = count_rows(choice, each + 1)[:each]
        rows = tokens[order // k]
        if not len(rows):  # the experts' gradients are zeros, not absent
            counts = F.pad(torch.ones_like(counts[:1]), (0, each - 1))
            y = experts(F.pad(rows, (0, 0, 0, 1)), counts)[:0]
        else:
            y = experts(rows, counts)
        y = y * with_weights[:, :k].flatten()[order, None].to(y.dtype)
        sums = _ScatterAdd.apply(y, order // k, len(tokens))
        back = funcol.all_to_all_single_autograd(sums, there, here, self.names["ep"])
        return _ScatterAdd.apply(back, token, N)


# Chunks of a sample for each cp rank, of which documents give unequal work.
CHUNKS = 16


def shared_by_work(starts: Tensor, cp: int) -> Tensor:
    """(cp, T / cp) positions for cp ranks, in chunks, with about equal numbers of keys to meet.

    `starts` (B, T): where each position's document begins. The chunk with the most work goes to the rank
    with the least, of those that have room.
    """
    T = starts.shape[1]
    each = next(n for n in (CHUNKS, CHUNKS // 2, CHUNKS // 4, 2) if T % (n * cp) == 0)
    keys = (torch.arange(1, T + 1) - starts).sum(0).view(cp * each, -1).sum(1).tolist()
    work, chunks = [0] * cp, [[] for _ in range(cp)]
    for chunk in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
        rank = min((r for r in range(cp) if len(chunks[r]) < each), key=work.__getitem__)
        work[rank] += keys[chunk]
        chunks[rank].append(chunk)
    positions = torch.arange(T).view(cp * each, -1)
    return torch.stack([positions[sorted(mine)].flatten() for mine in chunks])


class Gradients:
    """The gradients of a model in a layout: completing them, and their norm.

    FSDP has summed each over the ranks of its mesh. Those that every tp rank has whole are of the rank's
    own tokens or heads.
    """

    def __init__(self, model: HasWeights, layout: RankLayout):
        self.layout = layout
        self.parameters: list[nn.Parameter] = []
        self.partial: list[nn.Parameter] = []  # norms and routers, whole on every tp rank
        self.tied: nn.Parameter | None = None  # a tied embedding, at both ends of a pipeline
        ranks_with_same_shard = []
        for weight, parameter in model.weights():
            if not parameter.requires_grad:
                continue
            ranks = layout.parallelism.dp_replicate
            if layout.tp > 1 and weight.split is None:
                self.partial.append(parameter)
                ranks *= layout.tp
            if layout.pp > 1 and weight.module == "embed" and model.config.tie_word_embeddings:
                self.tied = parameter
                ranks *= 2
            self.parameters.append(parameter)
            ranks_with_same_shard.append(ranks)
        device = self.parameters[0].device
        self.weights = torch.tensor([1 / n for n in ranks_with_same_shard], device=device)

    @torch.no_grad()
    def complete_and_norm(self) -> Tensor:
        """Add up in place what FSDP did not, and return the norm over all ranks.

        A tied embedding is at both ends of a pipeline. Norms and routers are whole on every tp rank.
        """
        if self.tied is not None:
            (grad,) = local_gradients([self.tied])
            grad += self.layout.swap_with_stage(grad, self.layout.pp - 1 - self.layout.pp_rank)
        if self.partial:
            parts = local_gradients(self.partial)
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=self.layout.groups["tp"])
            for part, values in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(values.view_as(part))
        return gradient_norm(self.parameters, self.weights)
