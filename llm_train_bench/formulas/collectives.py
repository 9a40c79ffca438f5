"""Collectives of data parallelism: the bytes they move and the time they take. Needs no torch.

Bytes are counted per rank and optimizer step at the size of the whole tensor: an all-gather's output,
a reduce-scatter's input, an all-reduced tensor. A ring carries (n - 1) / n of it over each link for the
first two, twice that for the third.
"""

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from llm_train_bench.base.hardware import Hardware
from llm_train_bench.base.tables import grouped
from llm_train_bench.formulas.parameters import learnt_weights
from llm_train_bench.formulas.scales import reductions, shared_dimensions
from llm_train_bench.formulas.work import OUR_TRAINER, Parallelism, Work, alike
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.shapes import present
from llm_train_bench.model.weights import Weight, sharded_dimension


class RankWeight(NamedTuple):
    """A rank's part of a parameter in the layout, which FSDP shards over `mesh` ranks."""

    weight: Weight
    shape: tuple[int, ...]
    mesh: int
    padded: int
    """Numbers, with the sharded dimension padded to a multiple of the ranks."""

    @property
    def unit(self) -> int:
        """The number of the block with which FSDP gathers it; -1 for all that is outside of blocks."""
        return -1 if self.weight.layer is None else self.weight.layer


def ddp_bytes(weights: Sequence[Weight], work: Work) -> dict[str, int]:
    """DDP reduces each gradient once per step; without gradients, or without DDP, nothing."""
    if work.ddp is None or work.world == 1 or not work.trains:
        return {}
    numbers = sum(math.prod(weight.shape) for weight in weights)
    moved = {"all_reduce": numbers * work.reduce_bytes}
    if work.shares_states and work.pass_type == "step":  # the updated shares, rows padded
        shapes = (weight.shape for weight in weights)
        padded = (-(-rows // work.world) * work.world * math.prod(rest) for rows, *rest in shapes)
        moved["all_gather"] = work.weight_bytes * sum(padded)
    return moved


def padded_size(work: Work, part: RankWeight) -> int:
    """Numbers of a parameter as they are gathered: padded by our scripts, in flat buffers by others."""
    return part.padded if work.trainer is OUR_TRAINER else math.prod(part.shape)


def muon_numbers(work: Work, pp_rank: int) -> float:
    """Numbers of matrices that Muon has of a rank, in the mean; each tp rank's copy counts."""
    parallel, numbers = work.parallelism, 0.0
    layers = set(work.layers_of(pp_rank))
    for weight in work.config.weights.values():
        if weight.is_matrix and weight.layer in layers:
            copies = parallel.tp if weight.split is None else 1
            numbers += copies * math.prod(weight.shape) / parallel.shards
    return numbers


def _fsdp_bytes_of(work: Work, part: RankWeight) -> tuple[int, int, int]:
    """Bytes of a parameter in one all-gather, reduce-scatter and all-reduce of FSDP.

    The scales of weights that are gathered in FP8, an all-reduce of a few numbers, are left out.
    """
    size, weight = padded_size(work, part), part.weight
    is_router = weight.module == "mlp.router" and weight.is_matrix
    exact = is_router and present(work.config.experts).exact_router
    width = 4 if exact and not work.bf16_weights else work.matmul_bytes
    fp8 = work.fp8
    if fp8 and fp8.all_gather and weight.is_matrix and weight.module in fp8.layers:
        width = 1
    learns = not work.lora or weight.of_adapter
    reduced = size * work.reduce_bytes * (work.trains and learns)
    replicated = reduced // part.mesh * (work.parallelism.dp_replicate > 1)
    return (size * width, reduced, replicated) if part.mesh > 1 else (0, 0, replicated)


def traffic(work: Work, pp_rank: int = 0) -> dict[str, int]:
    """Bytes that a rank hands to collectives in a step, by kind; `pp_rank`: its pipeline group.

    FSDP2 gathers every group in forward, blocks again in backward, and reduces every gradient. All of it
    in every micro step (with `reduce_last` gradients only in the last), over up to three
    meshes, besides what tokens move. In a pipeline the bytes are of one of its groups of ranks, which
    gathers and reduces its stages once a step.
    """
    parallel, config, n_micro = work.parallelism, work.config, work.batch.grad_acc_steps
    adapters = work.lora.weights if work.lora else []
    if work.fsdp is None:
        return ddp_bytes(adapters or learnt_weights(config), work)
    if work.world == 1:
        return {}
    micro_steps = 1 if parallel.pp > 1 else n_micro
    reductions = 1 if work.fsdp.reduce_last else micro_steps
    moved: Counter[str] = Counter()
    partial, layers = 0, work.layers_of(pp_rank)
    weights = [*learnt_weights(config), *adapters]
    for part in rank_weights(weights, config, parallel, pp_rank):
        block = part.weight.layer is not None
        gathered, reduced, replicated = _fsdp_bytes_of(work, part)
        gathers = 2 if block and work.trains and work.fsdp.reshard else 1
        moved["all_gather"] += micro_steps * gathers * gathered
        moved["reduce_scatter"] += reductions * reduced
        moved["all_reduce"] += reductions * replicated
        if parallel.tp > 1 and part.weight.split is None:
            rows, *rest = part.shape
            partial += min(-(-rows // part.mesh), rows) * math.prod(rest)
    if work.pass_type == "step":  # gradients of what tp ranks have whole are completed together
        moved["all_reduce"] += 4 * partial
        if config.experts and config.experts.correction_rate:
            routers = sum(config.layers[i].mlp == "experts" for i in layers)
            moved["all_reduce"] += 4 * config.experts.number * routers
        if work.optimizer == "muon" and parallel.shards > 1:  # to the owners of matrices, and back
            moved["all_to_all"] += round(2 * 2 * muon_numbers(work, pp_rank))
    for move in (*chain(*(token_moves(work, layer) for layer in layers)), *end_moves(work, layers)):
        moved[move.kind] += n_micro * move.calls * move.size
    moved["send"] = _sent_bytes(work, pp_rank)
    return {kind: size for kind, size in moved.items() if size}


def rank_weights(
    weights: Iterable[Weight], config: ModelConfig, parallel: Parallelism, pp_rank: int
) -> Iterator[RankWeight]:
    """The parts of the parameters that a rank has; in a pipeline, a rank in group `pp_rank`."""
    n, last = config.num_hidden_layers, config.num_hidden_layers - 1
    layers = {i for stage in parallel.stages_of(pp_rank) for i in parallel.stage_layers(n, stage)}
    roots = {"embed", "positions"} if 0 in layers else set()
    if last in layers:
        roots |= {"norm", "lm_head"} | ({"embed"} if config.tie_word_embeddings else set())
    for weight in weights:
        if not (weight.layer in layers or (weight.layer is None and weight.module in roots)):
            continue
        mesh = parallel.shards // (parallel.ep if weight.of_experts else parallel.tp)
        shape = weight.shard(parallel).sizes
        rows = shape[sharded_dimension(shape, mesh)]
        yield RankWeight(weight, shape, mesh, -(-rows // mesh) * mesh * math.prod(shape) // rows)


@functools.lru_cache(maxsize=4096)
def rank_matrices(
    config: ModelConfig, parallel: Parallelism, pp_rank: int
) -> tuple[RankWeight, ...]:
    """The same of those with two dimensions or more; cached, since a search asks for them again."""
    large = (weight for weight in config.weights.values() if len(weight.shape) > 1)
    return tuple(rank_weights(large, config, parallel, pp_rank))


def _sent_bytes(work: Work, pp_rank: int) -> int:
    """Bytes that a rank sends to other groups of a pipeline in a step (Narayanan et al. 2021, 4.1).

    The residual stream goes to the next stage, its gradient to the one before; the gradients of a tied
    head go to the other end.
    """
    parallel, batch = work.parallelism, work.batch
    if parallel.pp == 1:
        return 0
    stages = parallel.stages_of(pp_rank)
    times = len(stages) - (parallel.stages - 1 in stages)
    times += work.trains * (len(stages) - (0 in stages))
    sent = (
        times * batch.grad_acc_steps * work.own_tokens * work.config.hidden_size * work.matmul_bytes
    )
    at_end = pp_rank in (0, parallel.pp - 1)
    if work.config.tie_word_embeddings and work.pass_type == "step" and at_end:
        rows, width = work.config.padded_vocab_size, work.config.hidden_size
        part = math.ceil(rows / parallel.tp)
        sent += 4 * math.ceil(part / (parallel.shards // parallel.tp)) * width
    return sent


class TokenMoves(NamedTuple):
    """Collectives of `size` bytes for a micro batch's tokens, among `ranks` that lie `apart`."""

    of: str
    """The dimension of the layout that needs them: tp, cp or ep."""

    kind: str
    calls: int
    size: int
    ranks: int
    apart: int
    beside: bool = False
    """Whether a product of the same layer is computed meanwhile."""


def end_moves(work: Work, layers: Collection[int]) -> Iterator[TokenMoves]:
    """What tokens of a micro batch move for embedding and loss, of which each tp rank has some rows.

    Embeddings are added up for own tokens, and the last hidden states gathered. In the loss a maximum and
    two sums of each token pass, in fp32.
    """
    parallel, config, back = work.parallelism, work.config, int(work.trains)
    first, last = 0 in layers, config.num_hidden_layers - 1 in layers
    if parallel.tp == 1:
        return
    size = work.gathered_tokens * config.hidden_size * work.matmul_bytes
    move = functools.partial(TokenMoves, "tp", ranks=parallel.tp, apart=1)
    yield move("all_gather", last + first * back, size)
    yield move("reduce_scatter", first + last * back, size)
    yield move("all_reduce", int(last), 12 * work.gathered_tokens)


def token_moves(work: Work, layer: int) -> Iterator[TokenMoves]:
    """What tokens of one micro batch move in a layer, forward and backward.

    Tensor parallelism: Korthikanti et al. 2022, section 4.2.2. Ulysses: Jacobs et al. 2023, section 3.2;
    gathered keys and values: Llama 3, section 3.3.2. A checkpointed block moves them in its recomputation
    too, up to the input of its last linear layer; the `op` policy keeps what came. Tokens sent to experts
    are the mean over ranks (`tokens_sent`): a rank sends back what it got.
    """
    parallel, config, w, own = work.parallelism, work.config, work.matmul_bytes, work.own_tokens
    checkpointed = layer in work.recompute.blocks and work.trains
    again = checkpointed and work.recompute.policy == "block"
    back = int(work.trains)
    passes = 1 + back + again
    repeats = int(checkpointed and work.recompute.policy != "cheap")  # what no policy keeps
    shares = work.trainer.sequence_parallel
    repeats *= shares or again  # without shares, what came is kept whole
    spec, experts = config.layers[layer], config.experts_of(layer)
    mixes, follows = spec.mixer is not None, spec.mlp is not None
    if experts is not None:  # of what follows, tp divides only the shared expert
        follows = experts.shared_size > 0
    if parallel.tp > 1:
        move = functools.partial(TokenMoves, "tp", ranks=parallel.tp, apart=1)
        gathered = own * parallel.tp * config.hidden_size * w
        places = mixes + follows
        # Each place gathers and reduces forward, and the other way round backward. What ranks keep is
        # their shards: backward gathers it again, beside the gradient of the input.
        inputs = [config.hidden_size] * places
        if spec.mixer == "latent":
            m = present(config.latent)
            inputs = [m.q_rank or config.hidden_size, m.kv_rank] + [config.hidden_size] * follows
            yield move("all_gather", 1 + repeats, own * parallel.tp * m.rope_dim * w)
            yield move("reduce_scatter", back, own * parallel.tp * m.rope_dim * w)
        yield move("all_gather", places * back, gathered, beside=work.keeps_shards and not shares)
        for width in inputs:
            size = own * parallel.tp * width * w
            yield move("all_gather", 1 + repeats, size)
            if work.keeps_shards and shares:
                yield move("all_gather", back, size, beside=True)
            yield move("reduce_scatter", back, size, beside=work.keeps_shards)
        if mixes and config.whole_qk_norm:  # mean squares of queries and keys, in fp32
            yield move("all_reduce", passes, 8 * work.gathered_tokens)
        # A recomputation stops before the last reduction, unless a norm or experts come after it.
        repeated = (mixes and (spec.post_norm or spec.mlp is not None)) + (
            follows and (spec.post_norm or experts is not None)
        )
        yield move("reduce_scatter", places + again * repeated, gathered)
    if parallel.cp > 1:
        move = functools.partial(TokenMoves, "cp", ranks=parallel.cp, apart=parallel.tp)
        tokens, heads = own * parallel.tp, config.num_attention_heads // parallel.tp
        kv_heads = heads if config.latent else work.kv_heads
        kv = kv_heads * (config.head_dim + config.value_dim)
        widths = heads * config.head_dim + kv, heads * config.value_dim
        if spec.mixer == "recurrent":
            r = present(config.recurrent)
            key, heads = max(r.groups // parallel.tp, parallel.cp) * r.state, r.heads // parallel.tp
            widths = 2 * key + heads * (r.head_dim + 1 + r.delta), heads * r.head_dim
        if not mixes:
            widths, kv = (), 0
        if parallel.ulysses:
            for width in widths:
                yield move("all_to_all", passes, tokens * width * w)
        elif kv:
            size = tokens * parallel.cp * kv * w
            yield move("all_gather", 1 + again, size)
            yield move("reduce_scatter", back, size)
    for back_pass, number, kind in _scales_reduced(work, layer):
        calls = back if back_pass else 1 + again
        ranks, apart = (parallel.tp, 1) if kind == "tp" else (parallel.cp, parallel.tp)
        yield TokenMoves(kind, "all_reduce", calls, 4 * number, ranks, apart)
    if experts and parallel.ep > 1:
        move = functools.partial(TokenMoves, "ep", "all_to_all", ranks=parallel.ep, apart=1)
        sent = own * tokens_sent(work)
        yield move(2 * passes, round(sent * (experts.latent or config.hidden_size) * w))
        # Choices of experts and their weights.
        yield move(passes, round(sent * 2 * experts.per_token * 4))
        if not work.balanced:  # or it is always the same
            yield move(1 + again * work.compiled, 16 * parallel.ep)
    if experts and experts.aux_loss and work.trains:
        yield TokenMoves("ep", "all_reduce", 1 + repeats, 4 * experts.number, parallel.ranks, 1)


def tokens_sent(work: Work) -> float:
    """To how many ep ranks a token goes, in the mean.

    Of a token's k experts those of one rank get it once. Balanced ones are k neighbours of all, dealt out
    in turn; learned ones are thought to be chosen alike.
    """
    e, ep = present(work.config.experts), work.parallelism.ep
    k, each = e.per_token, e.number // ep
    if work.trainer is not OUR_TRAINER:
        return k
    if not work.balanced:
        return ep * (1 - math.comb(e.number - each, k) / math.comb(e.number, k))
    firsts = range(0, math.lcm(e.number, k), k)
    places = [len({(first + j) % e.number // each for j in range(k)}) for first in firsts]
    return sum(places) / len(places)


def _scales_reduced(work: Work, layer: int) -> Iterator[tuple[bool, int, str]]:
    """The largest magnitudes that ranks of a layer's parts join for FP8 (formulas/scales.py)."""
    parallel = work.parallelism
    if parallel.tp * parallel.cp == 1 or work.fp8 is None or work.fp8.backend != "torchao":
        return
    for weight in work.config.linear_layers(layer):
        if weight.module not in work.fp8.layers:
            continue
        m, k = weight.shard(parallel).sizes
        shared = shared_dimensions(weight)
        tokens = work.own_tokens if "tp" in shared["N"] else work.gathered_tokens
        for each in reductions(work.fp8.recipe, shared, {"N": tokens, "M": m, "K": k}):
            if getattr(parallel, each[2]) > 1:
                yield each


# Part of their links' rate that collectives of GPUs reach (stas00/ml-engineering network, 2026-08).
OF_LINKS = 0.8


def collective_time(kind: str, size: float, ranks: int, per_node: int, gpu: Hardware) -> float:
    """Seconds of a collective of `size` bytes (the whole tensor) over neighbouring ranks.

    A ring: time = latency + size x (n - 1) / n / bus bandwidth, an all-reduce twice that. Over several
    nodes the bus is no faster than the network cards of the node with the fewest ranks. In an all-to-all
    each rank sends to all others at once: what leaves the node goes through its own card.
    """
    if ranks == 1 or not size:
        return 0.0
    c, inside, nodes = gpu.constants, min(ranks, per_node), math.ceil(ranks / per_node)
    bus = gpu.ring_gb_per_s
    if gpu.peer_gb_per_s and inside > 1:  # links to the others of the node are idle
        bus = min(bus, OF_LINKS * (inside - 1) * gpu.peer_gb_per_s)
    if kind == "all_to_all":
        away = size * (ranks - inside) / ranks / (c.all_to_all * gpu.nic_gb_per_s * 1e9)
        near = size * (inside - 1) / ranks / (bus * 1e9)
        return c.latency_s + (nodes > 1) * c.latency_node_s + max(away, near)
    if nodes > 1:
        bus = min(bus, c.network * gpu.nic_gb_per_s * (ranks % per_node or per_node))
    latency = c.latency_s + nodes * (inside - 1) * c.latency_gpu_s + (nodes - 1) * c.latency_node_s
    twice = 2 if kind == "all_reduce" else 1
    if kind == "all_reduce":  # NCCL has trees for it too
        hops = (inside - 1) * c.tree_gpu_s + math.log2(nodes) * c.tree_node_s
        latency = min(latency, c.latency_s + hops)
    return twice * (latency + size * (ranks - 1) / ranks / (bus * 1e9))


def unit_times(work: Work, gpu: Hardware, pp_rank: int) -> dict[int, tuple[float, float]]:
    """Seconds to gather and to reduce each unit of FSDP: blocks by number, and -1 for all the rest."""
    parallel = work.parallelism
    times = dict.fromkeys((-1, *work.layers_of(pp_rank)), (0.0, 0.0))
    parts = rank_matrices(work.config, parallel, pp_rank)
    # A copy of the model spans `shards` ranks: replicas of one shard are that far apart.
    apart = max(1, gpu.per_node // parallel.shards)
    for (layer, mesh), alike_parts in grouped(parts, lambda p: (p.unit, p.mesh)).items():
        sizes = zip(*(_fsdp_bytes_of(work, part) for part in alike_parts), strict=True)
        gathered, reduced, replicated = map(sum, sizes)
        gather, reduce = times[layer]
        near = max(1, gpu.per_node * mesh // parallel.shards)  # ranks of the mesh in a node
        gather += collective_time("all_gather", gathered, mesh, near, gpu)
        reduce += collective_time("reduce_scatter", reduced, mesh, near, gpu)
        reduce += collective_time("all_reduce", replicated, parallel.dp_replicate, apart, gpu)
        times[layer] = gather, reduce
    return times


def token_time(work: Work, gpu: Hardware, pp_rank: int) -> dict[str, float]:
    """Seconds in which tokens of a micro batch move between ranks, by dimension: tp, cp and ep.

    `beside` are those of tp beside which the same layer computes.
    """
    seconds = {"tp": 0.0, "cp": 0.0, "ep": 0.0, "beside": 0.0}
    if not work.parallelism.divided:
        return seconds
    layers = work.layers_of(pp_rank)
    for same, moves in (
        *((same, token_moves(work, same[0])) for same in alike(work, layers)),
        ([0], end_moves(work, layers)),
    ):
        for move in moves:
            near = max(1, gpu.per_node // move.apart)
            taken = collective_time(move.kind, move.size, move.ranks, near, gpu)
            if move.of == "ep" and work.trainer.rows_once and move.ranks > 1:
                better = (
                    gpu.constants.all_to_all / gpu.constants.network if near < move.ranks else 1
                )
                taken *= _rows_once(work, min(near, move.ranks)) * better
            if move.of == "tp" and work.trainer.tp_copies and work.trainer.sequence_parallel:
                taken += 2 * move.size / gpu.memory_rate
            taken *= work.imbalance if move.of == "ep" else 1.0
            seconds["beside" if move.beside else move.of] += len(same) * move.calls * taken
    return seconds


def _rows_once(work: Work, near: int) -> float:
    """Part of the rows that travels if a token goes to each node, or to each rank of one, once.

    Of k experts chosen alike, n places see n (1 - (1 - 1/n)^k) tokens of k.
    """
    k = present(work.config.experts).per_token
    places = work.parallelism.ep // near if work.parallelism.ep > near else work.parallelism.ep
    return places * (1 - (1 - 1 / places) ** k) / k


def send_time(work: Work, gpu: Hardware) -> float:
    """Seconds to hand the residual stream of a micro batch to the next stage of a pipeline."""
    c, near = gpu.constants, work.world <= gpu.per_node
    size = work.own_tokens * work.config.hidden_size * work.matmul_bytes
    pair = gpu.peer_gb_per_s or gpu.ring_gb_per_s
    rate = min(pair, gpu.ring_gb_per_s) if near else c.network * gpu.nic_gb_per_s
    return c.latency_s + (0 if near else c.latency_node_s) + size / (rate * 1e9)
