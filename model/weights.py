"""The parameters of a model, each one row: all that other parts ask about one. Needs no torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llm_train_bench.model.hf_names import HfTensor, hf_tensors
from llm_train_bench.model.shapes import present

if TYPE_CHECKING:
    from llm_train_bench.model.config import ModelConfig
    from llm_train_bench.model.shapes import LayerSpec


class Shard(NamedTuple):
    """A box of a tensor: in each dimension where it begins, and how long it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes it from the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


class Split(NamedTuple):
    """Ranks that share a batch divide a parameter: those of `tp` or of `ep`, along a dimension."""

    ranks: Literal["tp", "ep"]
    dimension: int


ROWS, COLUMNS, EXPERTS = Split("tp", 0), Split("tp", 1), Split("ep", 0)


class Normal(NamedTuple):
    """Initial values: normal numbers."""

    std: float


class Ramp(NamedTuple):
    """Initial values: evenly spaced from the first to the last number."""

    first: float
    last: float


ZEROS, ONES = Ramp(0.0, 0.0), Ramp(1.0, 1.0)
# Of recurrent layers, from the first to the last head. The state's rates are 1 to 16, and steps about
# 0.001 to 0.1, as in Mamba2: the logarithms, and the inverse of softplus.
DECAYS, STEPS = Ramp(0.0, math.log(16.0)), Ramp(-6.9, -2.25)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter of a model."""

    layer: int | None
    """The number of its block; None outside of blocks."""
    module: str
    """Path of its module in the block or the model, such as `attn.qkv`."""
    kind: str
    """Its name in that module: `weight`, `bias` or a name of its own."""
    shape: tuple[int, ...]
    init: Normal | Ramp
    hf: tuple[HfTensor, ...]
    """The tensors of Hugging Face files that make it up."""
    split: Split | None = None
    """None for one that every rank has whole."""
    segments: tuple[int, ...] = ()
    """Rows of the layers that are fused in it, such as queries, keys and values."""
    groups: int = 1
    """Its rows are in so many groups, each with an equal part of every segment: of 2 groups q0 q1 k0 v0,
    then q2 q3 k1 v1. So the share of a rank is one range of rows."""
    padding: int = 0
    """Rows at the end that stand for no token; they are zero, and in no file."""

    @functools.cached_property
    def path(self) -> str:
        """The dotted name of its module in the plain model."""
        return self.module if self.layer is None else f"blocks.{self.layer}.{self.module}"

    @functools.cached_property
    def name(self) -> str:
        """Its own dotted name."""
        return f"{self.path}.{self.kind}"

    @property
    def group_sizes(self) -> list[int]:
        """Rows of each segment in a group."""
        return [rows // self.groups for rows in self.segments]

    @property
    def of_adapter(self) -> bool:
        """Whether it belongs to an adapter (LoRA)."""
        return self.kind in ("lora_a", "lora_b")

    @property
    def is_matrix(self) -> bool:
        """Whether it is a linear layer's weight in a block, or one for each expert; no convolution."""
        inside = self.layer is not None and self.kind == "weight" and len(self.shape) > 1
        return inside and self.module != "attn.conv"

    @property
    def of_experts(self) -> bool:
        """Whether it has one entry for each expert."""
        return self.split == EXPERTS

    @property
    def stays_exact(self) -> bool:
        """Whether it weighs experts, and so is never in FP8."""
        return self.module in ("mlp.router", "mlp.shared_gate")

    @property
    def learns(self) -> bool:
        """Whether training it needs a gradient: a router's correction has none. (LoRA freezes others.)"""
        return self.kind != "correction"

    def shard(self, ranks: Any) -> Shard:
        """The part of a rank, before FSDP divides it further.

        `ranks` has the sizes `tp` and `ep`, and the places `tp_rank` and `ep_rank` if not of rank 0. The
        modules of model/ make their parameters of that size by themselves; a test compares both.
        """
        offsets, sizes = [0] * len(self.shape), [*self.shape]
        if self.split is not None:
            kind, dimension = self.split
            part = getattr(ranks, f"{kind}_rank", 0)
            begin, end = part_of(sizes[dimension], getattr(ranks, kind), part)
            offsets[dimension], sizes[dimension] = begin, end - begin
        return Shard(tuple(offsets), tuple(sizes))


def part_of(size: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of one of several parts: the first ones have one more where they are not equal."""
    each, more = divmod(size, parts)
    return part * each + min(part, more), (part + 1) * each + min(part + 1, more)


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """The dimension along which FSDP shards a parameter over `ranks`: 0, or 1 for some experts.

    FSDP2 pads dimension 0 to a multiple of the ranks: 8 stacked experts on 64 ranks would be eight times
    the bytes. Fewer experts than ranks are sharded by their rows, which it does not pad: they divide.
    """
    stacked = len(shape) == 3
    return 1 if stacked and shape[0] < ranks and shape[1] % ranks == 0 else 0


def list_weights(config: ModelConfig) -> list[Weight]:
    """All parameters of the plain model, in its order; a tied head is none."""
    rows, d = config.padded_vocab_size, config.hidden_size
    words: dict[str, Any] = dict(split=ROWS, padding=rows - config.vocab_size)
    table = _Table(config)
    table.add("embed", rows, d, **words)
    if config.learned_positions:
        table.add("positions", config.max_position_embeddings, d)
    for layer, spec in enumerate(config.layers):
        table.layer = layer
        if spec.mixer is not None:
            table.add_norms("attn", spec)
            {"attention": _attention, "latent": _latent, "recurrent": _recurrent}[spec.mixer](table)
        if spec.mlp is not None:
            table.add_norms("mlp", spec)
            {"dense": _mlp, "experts": _experts}[spec.mlp](table)
    table.layer = None
    table.add_norm("norm", d)
    if not config.tie_word_embeddings:
        table.add("lm_head", rows, d, **words)
    return table.rows


class _Table:
    """The rows so far, and the block to which more are added; None outside of blocks."""

    def __init__(self, config: ModelConfig):
        self.config, self.rows = config, list[Weight]()
        self.layer: int | None = None

    def add(self, module: str, *shape: int, kind: str = "weight", **row: Any) -> None:
        """Add a parameter with these fields of its `row`.

        Its initial values are normal numbers by default, smaller ones where a residual is added to.
        """
        if "init" not in row:
            writes_residual = module.split(".")[-1] in ("out", "down")
            scale = math.sqrt(2 * self.config.num_hidden_layers) if writes_residual else 1.0
            row["init"] = Normal(self.config.initializer_range / scale)
        if "segments" not in row:
            rows = shape[1] if row.get("split") == EXPERTS else shape[0]
            row["segments"] = (rows - row.get("padding", 0),)
        hf = hf_tensors(self.config, self.layer, module, kind, len(row["segments"]))
        self.rows.append(Weight(self.layer, module, kind, shape, hf=hf, **row))

    def add_linear(self, module: str, *shape: int, bias: bool = False, **row: Any) -> None:
        """Add a linear layer (out, in), or one for each expert, and perhaps its biases."""
        self.add(module, *shape, **row)
        if bias:
            divided = {} if row.get("split") == COLUMNS else row
            self.add(module, *shape[:-1], kind="bias", **divided | dict(init=ZEROS))

    def add_norm(self, module: str, size: int, **row: Any) -> None:
        """Add a norm, with a bias if the family's norms have one."""
        self.add(module, size, init=ZEROS if self.config.norm_offset else ONES, **row)
        if not self.config.rms_norm:
            self.add(module, size, kind="bias", init=ZEROS)

    def add_norms(self, part: str, spec: LayerSpec) -> None:
        """Add the norms before and after a part of a block."""
        for name, has_norm in (("norm", spec.pre_norm), ("post_norm", spec.post_norm)):
            if has_norm:
                self.add_norm(f"{part}_{name}", self.config.hidden_size)


def _attention(table: _Table) -> None:
    config, d = table.config, table.config.hidden_size
    q, kv = config.query_size, config.kv_size
    sizes = (q, kv, kv, q) if config.output_gate else (q, kv, kv)
    if config.sinks:
        table.add("attn", config.num_attention_heads, kind="sinks", init=ZEROS, split=ROWS)
    fused: dict[str, Any] = dict(split=ROWS, segments=sizes, groups=config.num_key_value_heads)
    table.add_linear("attn.qkv", sum(sizes), d, bias=config.qkv_bias, **fused)
    table.add_linear("attn.out", d, q, bias=config.attention_out_bias, split=COLUMNS)
    if config.qk_norm:
        whole: dict[str, Any] = dict(split=ROWS) if config.whole_qk_norm else {}
        table.add_norm("attn.q_norm", q if whole else config.head_dim, **whole)
        table.add_norm("attn.k_norm", kv if whole else config.head_dim, **whole)


def _latent(table: _Table) -> None:
    config, d = table.config, table.config.hidden_size
    m, heads = present(config.latent), config.num_attention_heads
    if m.q_rank is None:
        table.add_linear("attn.q", config.query_size, d, split=ROWS)
    else:
        table.add_linear("attn.q_down", m.q_rank, d)
        table.add_norm("attn.q_down_norm", m.q_rank)
        table.add_linear("attn.q_up", config.query_size, m.q_rank, split=ROWS)
    table.add_linear("attn.kv_down", m.kv_rank + m.rope_dim, d)
    table.add_norm("attn.kv_down_norm", m.kv_rank)
    table.add_linear("attn.kv_up", heads * (m.nope_dim + m.value_dim), m.kv_rank, split=ROWS)
    table.add_linear("attn.out", d, heads * m.value_dim, split=COLUMNS)


def _recurrent(table: _Table) -> None:
    config, r = table.config, present(table.config.recurrent)
    value = r.heads * r.head_dim
    project: dict[str, Any] = dict(split=ROWS, segments=r.segments, groups=r.groups)
    table.add_linear("attn.project", sum(r.segments), config.hidden_size, bias=r.bias, **project)
    channels = r.segments[:3]
    conv: dict[str, Any] = project | dict(segments=channels, init=Normal(r.kernel**-0.5))
    table.add_linear("attn.conv", sum(channels), r.kernel, bias=r.conv_bias, **conv)
    table.add("attn", r.heads, kind="decay", init=DECAYS, split=ROWS)
    table.add("attn", r.heads, kind="step_bias", init=STEPS, split=ROWS)
    if not r.delta:
        table.add("attn", r.heads, kind="skip", init=ONES, split=ROWS)
    norm: dict[str, Any] = dict(init=ONES) if r.delta else dict(init=ONES, split=ROWS)
    table.add("attn.gated_norm", r.head_dim if r.delta else value, **norm)
    table.add_linear("attn.out", config.hidden_size, value, bias=r.bias, split=COLUMNS)


def _mlp(table: _Table, module: str = "mlp", size: int | None = None) -> None:
    """An MLP with `size` elements of its activation, by default the config's."""
    config, d, f = table.config, table.config.hidden_size, size or table.config.intermediate_size
    if config.gated_mlp:
        fused: dict[str, Any] = dict(segments=(f, f), groups=config.mlp_groups(f))
        table.add_linear(f"{module}.gate_up", 2 * f, d, bias=config.mlp_bias, split=ROWS, **fused)
    else:
        table.add_linear(f"{module}.up", f, d, bias=config.mlp_bias, split=ROWS)
    table.add_linear(f"{module}.down", d, f, bias=config.mlp_bias, split=COLUMNS)


def _experts(table: _Table) -> None:
    config, e = table.config, present(table.config.experts)
    d = e.latent or config.hidden_size
    table.add_linear("mlp.router", e.number, config.hidden_size, bias=e.biases)
    if e.correction:
        table.add("mlp.router", e.number, kind="correction", init=ZEROS)
    if e.latent:
        table.add_linear("mlp.latent_down", e.latent, config.hidden_size, bias=config.mlp_bias)
        table.add_linear("mlp.latent_up", config.hidden_size, e.latent, bias=config.mlp_bias)
    if e.shared_gate:
        table.add_linear("mlp.shared_gate", 1, config.hidden_size)
    if e.shared_size:
        _mlp(table, "mlp.shared", e.shared_size)
    wide, sizes = ("gate_up", (e.size, e.size)) if e.gated else ("up", (e.size,))
    stacked: dict[str, Any] = dict(bias=e.biases, split=EXPERTS)
    table.add_linear(f"mlp.experts.{wide}", e.number, sum(sizes), d, segments=sizes, **stacked)
    table.add_linear("mlp.experts.down", e.number, d, e.size, **stacked)


def adaptable(config: ModelConfig) -> list[Weight]:
    """The linear layers that may have adapters: in models with experts only those of attention.

    peft takes the names of MLPs there for experts.
    """
    prefix = "attn." if config.experts is not None else ""
    every: Any = config.weights.values()
    return [w for w in every if w.is_matrix and not w.of_experts and w.module.startswith(prefix)]


class Adapter(NamedTuple):
    """The adapters of a frozen linear layer (LoRA), or of some of the layers that it fuses."""

    frozen: Weight
    segments: tuple[tuple[int, ...], ...]
    """The segments of its rows that each adapter has."""
    down: Weight
    """(n r, in): maps down to rank r, for each of n adapters."""
    up: Weight
    """(rows, r): maps up to the rows of each."""


def adapters(config: ModelConfig, targets: frozenset[str], rank: int) -> list[Adapter]:
    """The adapters of all linear layers that are targets.

    A target is the last part of a layer's name in Hugging Face files, such as q_proj; `all` are all. The
    names of the adapters' own tensors are peft's.
    """
    found = []
    for frozen in adaptable(config):
        chosen = [hf for hf in frozen.hf if targets & {"all", hf.linear}]
        if not chosen:
            continue
        segments, inputs = tuple(hf.segments for hf in chosen), frozen.shape[1]
        rows = tuple(sum(frozen.segments[i] for i in each) for each in segments)
        first = Normal((3 * inputs) ** -0.5)  # as torch.nn.Linear's, and peft's
        down, up = ((rank,) * len(chosen), inputs, first), (rows, rank, ZEROS)
        pair = []
        for letter, (sizes, width, init) in (("a", down), ("b", up)):
            place = (frozen.layer, frozen.module, f"lora_{letter}", (sum(sizes), width))
            prefixes = (f"base_model.model.{hf.name.removesuffix('weight')}" for hf in chosen)
            names = (f"{prefix}lora_{letter.upper()}.weight" for prefix in prefixes)
            files = tuple(HfTensor(name, (i,)) for i, name in enumerate(names))
            pair.append(Weight(*place, init, files, segments=sizes))
        found.append(Adapter(frozen, segments, *pair))
    return found


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a frozen model."""

    rank: int
    alpha: float
    base_bytes: int
    """Bytes of a frozen number."""
    adapters: tuple[Adapter, ...]

    @property
    def weights(self) -> list[Weight]:
        """The parameters of all adapters."""
        return [weight for adapter in self.adapters for weight in (adapter.down, adapter.up)]

    def numbers(self, layers: Container[int | None] | None = None) -> int:
        """How many numbers they have, of all blocks or of some."""
        own = (w for w in self.weights if layers is None or w.layer in layers)
        return sum(math.prod(weight.shape) for weight in own)
