"""Bytes that data parallelism hands to collectives in one optimizer step, by formula. Needs no torch.

Counted per rank and at the size of the whole tensor: an all-gather's output, a reduce-scatter's
input, an all-reduced tensor. What a link carries of it depends on the algorithm: a ring moves
(n - 1) / n of it for the first two, twice that for the third.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from bench.args import Args
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
