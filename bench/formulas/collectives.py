"""How long collectives take between GPUs, and what of it a step has to wait for. Needs no torch."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from bench.formulas.hardware import CONSTANTS, Constants, Hardware
from bench.settings.flags import Args
from model.config import ModelConfig

Shapes = Mapping[str, Sequence[int]]


def matmul_bytes(args: Args) -> int:
    """Bytes of a number on its way into a matmul (FP8 apart), and of a gathered weight's."""
    return 4 if args.amp == "off" else 2


def reduce_bytes(args: Args) -> int:
    """Bytes of a gradient's number that FSDP reduces."""
    return 2 if args.reduce_dtype == "bf16" else 4


def gathers_fp8(args: Args) -> bool:
    """Whether FSDP gathers the blocks' matrices in FP8."""
    return args.fp8_all_gather or args.fp8_primary_weights


def ddp_bytes(shapes: Shapes, world: int, args: Args) -> dict[str, int]:
    """DDP reduces each gradient once per step, in fp32 or bf16; without gradients nothing."""
    if world == 1 or args.pass_type == "forward":
        return {}
    total = sum(math.prod(shape) for shape in shapes.values())
    return {"all_reduce": total * (2 if args.grad_compression == "bf16" else 4)}


def fp8_gather_bytes(args: Args) -> float:
    """Bytes that a gather in FP8 moves a parameter.

    A scale of the whole tensor, an all-reduce of a few numbers, is left out. MXFP8's, a byte for every
    32 numbers, travel with them; and what backward is not gathered for is gathered in both orientations
    (`fsdp_pre_all_gather` in Transformer Engine's mxfp8_tensor.py).
    """
    if args.fp8_recipe != "mxfp8":
        return 1.0
    return (1 + 1 / 32) * (2 if args.reshard_after_forward == "never" else 1)


def fsdp_bytes(
    shapes: Shapes,
    shards: int,
    micro_steps: int,
    args: Args,
    in_fp8: Collection[str] = (),
) -> dict[str, int]:
    """FSDP2 gathers every group in forward, blocks again in backward, and reduces every gradient.

    All of it in every micro step. A parameter's rows are padded to a multiple of the shards. Weights
    named in `in_fp8` are gathered in FP8.
    """
    backward = args.pass_type != "forward"
    rows = {n: -(-s[0] // shards) * shards * math.prod(s[1:]) for n, s in shapes.items()}
    everything = sum(rows.values())
    widths = {n: fp8_gather_bytes(args) if n in in_fp8 else matmul_bytes(args) for n in shapes}
    gathered = {n: round(size * widths[n]) for n, size in rows.items()}
    blocks = sum(size for name, size in gathered.items() if name.startswith("blocks."))
    moved = {}
    if shards > 1:
        again = blocks if backward and args.reshard_after_forward == "always" else 0
        moved["all_gather"] = micro_steps * (sum(gathered.values()) + again)
        if backward:
            moved["reduce_scatter"] = micro_steps * everything * reduce_bytes(args)
    if args.dp_replicate > 1 and backward:
        moved["all_reduce"] = micro_steps * everything // shards * reduce_bytes(args)
    return moved


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The large parameters by name, as (rows, columns); vectors are left out."""
    d = config.hidden_size
    shapes = {"embed": (config.padded_vocab_size, d)}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.padded_vocab_size, d)
    if config.learned_positions:
        shapes["positions"] = (config.max_position_embeddings, d)
    for i in range(config.num_hidden_layers):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in config.block_shapes().items()}
    return shapes


def collective_time(
    kind: str, size: float, ranks: int, per_node: int, gpu: Hardware, c: Constants = CONSTANTS
) -> float:
    """Seconds of a ring collective of `size` bytes (the whole tensor) over neighbouring ranks.

    time = latency + size x (n - 1) / n / bus bandwidth, an all-reduce twice that; over several nodes
    the bus is no faster than the network cards of a node together.
    """
    if ranks == 1 or not size:
        return 0.0
    inside = min(ranks, per_node)
    nodes = math.ceil(ranks / per_node)
    bus = gpu.ring_gb_per_s
    if nodes > 1:
        bus = min(bus, c.network * gpu.nic_gb_per_s * inside)
    latency = c.latency_s + nodes * (inside - 1) * c.latency_gpu_s + (nodes - 1) * c.latency_node_s
    twice = 2 if kind == "all_reduce" else 1
    if kind == "all_reduce":  # there NCCL has trees too
        hops = (inside - 1) * c.tree_gpu_s + math.log2(nodes) * c.tree_node_s
        latency = min(latency, c.latency_s + hops)
    return twice * (latency + size * (ranks - 1) / ranks / (bus * 1e9))


def communication_time(
    config: ModelConfig,
    args: Args,
    gpu: Hardware,
    world: int,
    per_node: int,
    shards: int | None,
    compute: float,
    c: Constants,
) -> tuple[float, float]:
    """Seconds of communication of one micro step (under DDP of one step), and of it the exposed part.

    FSDP: a block's gather hides behind the computation of the block before, its reduction behind that of
    the next; the first gather and the last reduction of embedding and head hide behind nothing.
    """
    shapes = parameter_shapes(config)
    layers = config.num_hidden_layers
    if world == 1:
        return 0.0, 0.0
    if shards is None:
        if args.pass_type == "forward":
            return 0.0, 0.0
        size = ddp_bytes(shapes, world, args)["all_reduce"]
        total = collective_time("all_reduce", size, world, per_node, gpu, c)
        last = min(1.0, args.bucket_cap_mb * 2**20 / size)
        return total, max(total * last, total - 0.6 * compute)
    replicas = world // shards
    block = {n: s for n, s in shapes.items() if n.startswith("blocks.0.")}
    root = {n: s for n, s in shapes.items() if not n.startswith("blocks.")}
    whole = dataclasses.replace(args, reshard_after_forward="always")
    in_fp8 = {name for name, shape in block.items() if gathers_fp8(args) and len(shape) == 2}

    def seconds(part: dict, gathers: int) -> tuple[float, float]:
        moved = fsdp_bytes(part, shards, 1, whole, in_fp8)
        size = moved.get("all_gather", 0) / gathers  # of one of them
        gather = collective_time("all_gather", size, shards, per_node, gpu, c)
        reduce = collective_time(
            "reduce_scatter", moved.get("reduce_scatter", 0), shards, per_node, gpu, c
        )
        # Replicas of one shard are as far apart as a copy of the model is long.
        apart = max(1, per_node // shards)
        reduce += collective_time("all_reduce", moved.get("all_reduce", 0), replicas, apart, gpu, c)
        return gather, reduce

    train = args.pass_type != "forward"
    gather, reduce = seconds(block, 2 if train else 1)
    root_gather, root_reduce = seconds(root, 1)
    again = train and args.reshard_after_forward == "always"
    total = layers * (gather * (2 if again else 1) + reduce) + root_gather + root_reduce
    forward = compute / layers * (1 / 3 if train else 1)
    backward = compute / layers * 2 / 3
    exposed = root_gather + root_reduce + gather + layers * max(0.0, gather - forward)
    if train:
        exposed += reduce + layers * max(0.0, (gather if again else 0.0) + reduce - backward)
    return total, min(exposed, total)
