"""How ranks that share a batch divide the parameters of a model. Needs no torch."""

from collections.abc import Sequence

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.shapes import present


def cuts(config: ModelConfig, name: str, ranks: int, rank: int) -> list[range]:
    """A rank's part of each segment of a divided parameter: places along the dimension that is cut."""
    how, begin, found = divided(config, name), 0, []
    assert how is not None
    for size in how[2]:
        first, last = part_of(size, ranks, rank)
        found.append(range(begin + first, begin + last))
        begin += size
    return found


def part_of(size: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of one of several parts: the first ones have one more where they are not equal."""
    each, more = divmod(size, parts)
    return part * each + min(part, more), (part + 1) * each + min(part + 1, more)


def divided(config: ModelConfig, name: str) -> tuple[str, int, tuple[int, ...]] | None:
    """How a layout divides a parameter: `tp` or `ep`, the dimension, and its segments' lengths.

    Each rank has its share of every segment (queries, keys and values; gate and up). None for one that
    every rank has whole.
    """
    if name in ("embed.weight", "lm_head.weight"):
        return "tp", 0, (config.padded_vocab_size,)
    if not name.startswith("blocks."):
        return None
    module, kind = name.rsplit(".", 1)
    _, layer, part = module.split(".", 2)
    if part.startswith("mlp.experts."):
        return "ep", 0, (present(config.experts).number,)
    if part in ("attn.out", "mlp.down", "mlp.shared.down"):
        return ("tp", 1, (linear_shape(config, module)[1],)) if kind == "weight" else None
    r = config.recurrent if config.layers[int(layer)].mixer == "recurrent" else None
    if part == "attn":  # a number for each head
        return "tp", 0, (r.heads if r else config.num_attention_heads,)
    if part in ("attn.q", "attn.q_up", "attn.kv_up", "mlp.up", "mlp.shared.up"):
        return "tp", 0, (linear_shape(config, module)[0],)
    if part in ("mlp.gate_up", "mlp.shared.gate_up"):
        return "tp", 0, (linear_shape(config, module)[0] // 2,) * 2
    rows = {"attn.qkv": config.qkv_sizes}
    if config.whole_qk_norm:  # or else of each head alone
        rows |= {"attn.q_norm": (config.query_size,), "attn.k_norm": (config.kv_size,)}
    if r:
        rows |= {"attn.project": r.segments, "attn.conv": r.channels}
        rows |= {} if r.delta else {"attn.gated_norm": (r.heads * r.head_dim,)}
    return ("tp", 0, rows[part]) if part in rows else None


def is_matrix(name: str, dimensions: int) -> bool:
    """Whether a parameter is a matrix of a block, or one for each expert: no table, vector or filter."""
    inside = name.startswith("blocks.") and dimensions >= 2
    return inside and name.endswith(".weight") and not name.endswith(".conv.weight")


def linear_shape(config: ModelConfig, name: str) -> tuple[int, int]:
    """(out, in) of a linear layer of a block by its module's name; for stacked ones, of one expert."""
    _, layer, _, *path = name.split(".")
    kind = "_".join(path).replace("gate_up", "up")
    return (config.block_shapes(int(layer)) | config.expert_shapes(int(layer)))[kind]


def matrix_rows(config: ModelConfig, name: str) -> list[tuple[int, int]]:
    """Sizes of the matrices that are fused in a parameter of blocks, of each expert alike."""
    module, how = name.removesuffix(".weight"), divided(config, name)
    rows, columns = linear_shape(config, module)
    if module.endswith(".gate_up"):
        return [(rows // 2, columns)] * 2
    if how is None or how[0] == "ep" or how[1] == 1:
        return [(rows, columns)]
    return [(segment, columns) for segment in how[2]]


def whole_shape(config: ModelConfig, name: str, part: Sequence[int]) -> tuple[int, ...]:
    """The shape of a parameter of which a layout's rank has a part of that shape."""
    how = divided(config, name)
    if how is None:
        return tuple(part)
    _, dim, segments = how
    return (*part[:dim], sum(segments), *part[dim + 1 :])


def part_shape(
    config: ModelConfig, name: str, whole: Sequence[int], ranks: dict[str, int]
) -> tuple[int, ...]:
    """The shape of the first rank's part of a parameter, of `ranks` by kind: tp, ep."""
    how = divided(config, name)
    if how is None or ranks[how[0]] == 1:
        return tuple(whole)
    kind, dim, _ = how
    rows = sum(map(len, cuts(config, name, ranks[kind], 0)))
    return (*whole[:dim], rows, *whole[dim + 1 :])


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """The dimension that FSDP shards of a parameter, or a layout's part of it, over `ranks`.

    It pads the first to a multiple of the ranks: of 8 stacked experts on 64 ranks it would gather eight
    times the bytes. Stacked matrices fewer than the ranks are sharded by their rows, if these divide:
    FSDP2 pads no other dimension.
    """
    return int(len(shape) == 3 and shape[0] < ranks and shape[1] % ranks == 0)
