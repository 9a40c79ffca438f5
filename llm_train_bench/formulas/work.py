"""One training step as the formulas see it: what is computed, in which formats, on how many ranks.

Needs no torch. llm_train_bench/settings/plan.py makes a `Work` of the flags, the config and the world.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Literal

from llm_train_bench.base.tables import grouped
from llm_train_bench.model.chunks import CHUNK_ELEMENTS
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.options import USUAL_OPTIONS, AttentionKernel, ModelOptions
from llm_train_bench.model.shapes import present
from llm_train_bench.model.weights import Lora

# The parts of a step, in their order.
STEP_PARTS = ("data", "forward", "backward", "idle", "optimizer")
# Rows of the fullest of 64 ep ranks over the mean, under a learned router. It is the mean of all layers
# in 20 steps after 30 of warm-up (https://github.com/marin-community/marin/issues/7668). After 18 more
# steps it was 1.21. Random choices, which others call forced balance, had 1.01.
LEARNED_IMBALANCE = 1.34
# A backward costs two forwards.
PASS_FORWARDS = {"forward": 1, "forward-backward": 3, "step": 3}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples and tokens of one optimizer step."""

    micro_batch: int
    grad_acc_steps: int
    data_parallel_size: int
    global_batch: int
    seq_len: int
    tokens_per_step: int
    documents: tuple[tuple[int, int], ...] = ()
    """Of packed samples: the lengths of documents, and how many there are of each."""

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Lengths over which attention reaches, and how many there are of each."""
        return self.documents or ((self.seq_len, 1),)

    @property
    def micro_tokens(self) -> int:
        """Tokens of one micro batch on one device."""
        return self.micro_batch * self.seq_len


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Blocks that recompute their activations in backward, and what of them: `block` or `op`.

    `every-other-matmul` is only for estimates of other trainers: `op`, but half of the matmuls again.
    """

    blocks: tuple[int, ...] = ()
    policy: str = "block"


@dataclasses.dataclass(frozen=True)
class Fp8Work:
    """FP8 in a step: the converted modules of blocks; `high_precision` says why others are not."""

    backend: str
    recipe: str
    emulated: bool = False
    all_gather: bool = False
    layers: tuple[str, ...] = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.up", "mlp.down")
    high_precision: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True)
class Ddp:
    """DDP's buckets [MiB], which hold the gradients all the time, and how these are reduced."""

    bucket_cap_mb: float = 25.0
    reduce_dtype: str = "fp32"
    zero1: bool = False
    """Whether each rank has a share of the optimizer's state."""


@dataclasses.dataclass(frozen=True)
class FsdpOptions:
    """How FSDP gathers weights and reduces gradients."""

    reshard: bool = True
    """Whether gathered blocks are freed after forward, and gathered again in backward."""
    reduce_dtype: str = "fp32"
    cpu_offload: bool = False
    reduce_last: bool = False
    """Whether gradients are reduced only after the last micro batch, and are whole until then."""


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """How many ranks share out what, in torchtitan's words; all are 1 on one device.

    World = dp_replicate x dp_shard x cp x tp x pp. DDP only replicates. FSDP shards over dp_shard x cp
    ranks. ep ranks, of the dp_shard x cp x tp of a replica, share the experts, and pp groups the layers.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    virtual: int = 1
    """Stages of the pipeline that each of its groups has."""
    layers: tuple[int, ...] = ()
    """Blocks of each stage; empty for as equal numbers as can be."""
    ulysses: bool = True
    """Whether cp ranks exchange heads for tokens; otherwise they gather keys and values."""

    @property
    def shards(self) -> int:
        """Ranks of one replica, in one group of a pipeline."""
        return self.dp_shard * self.cp * self.tp

    @property
    def ranks(self) -> int:
        """Ranks that have the same layers: all, without a pipeline."""
        return self.dp_replicate * self.shards

    @property
    def divided(self) -> bool:
        """Whether ranks share a batch, the experts or the layers."""
        return self.tp * self.cp * self.ep * self.pp > 1

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.virtual

    def stages_of(self, pp_rank: int) -> range:
        """The stages of a group of ranks: every pp-th."""
        return range(pp_rank, self.stages, self.pp)

    def stage_layers(self, n: int, stage: int) -> range:
        """The blocks, of `n`, of a pipeline's stage."""
        if self.layers:
            begin = sum(self.layers[:stage])
            return range(begin, begin + self.layers[stage])
        return range(n * stage // self.stages, n * (stage + 1) // self.stages)


@functools.lru_cache(maxsize=64)
def _layer_kinds(config: ModelConfig) -> list[tuple[Any, ...]]:
    """What of a block decides its time and memory; cached, since a search asks for it again and again."""
    blocks = range(config.num_hidden_layers)
    modules = [tuple(weight.module for weight in config.linear_layers(i)) for i in blocks]
    return [(modules[i], config.layers[i].window) for i in blocks]


@functools.lru_cache(maxsize=64)
def block_parameters(config: ModelConfig) -> list[int]:
    """Numbers in the matrices of each block."""
    layers = range(config.num_hidden_layers)
    return [sum(math.prod(weight.shape) for weight in config.matrices[i]) for i in layers]


def alike(work: "Work", layers: Iterable[int]) -> list[list[int]]:
    """These blocks, those of a kind together: of the same parts and window, recomputed or not."""
    again, kinds = set(work.recompute.blocks), _layer_kinds(work.config)
    return list(grouped(layers, lambda layer: (kinds[layer], layer in again)).values())


@dataclasses.dataclass(frozen=True)
class Trainer:
    """How a trainer executes a step, for estimates; the default is ours (configs/trainers.json)."""

    weights: Literal["fp32", "bf16", "master", "master-bf16"] = "fp32"
    """`fp32`, computed with in bf16; `bf16`, and so are gradients; `master`: bf16, with gradients and
    copies for the optimizer in fp32; `master-bf16`: the same with gradients in bf16."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Format of the optimizer's moments."""
    zero: Literal[0, 1, 2, 3] = 3
    """What the ranks of data parallelism share under FSDP and in a pipeline (ZeRO's stages).

    0: nothing; 1: the optimizer's state; 2: gradients too; 3: parameters too. Below 3, weights are
    gathered once a step.
    """
    prefetch: bool = True
    """Whether backward gathers a block's weights while the block before computes."""
    overlaps: bool = True
    """Whether collectives of weights and gradients run beside computation."""
    hide: tuple[str, ...] = ()
    """`tp`, `cp`, `ep`: whose exchanges run beside computation."""
    rows_once: bool = False
    """Whether a token that several experts of a node want is sent there once (DeepEP, HybridEP)."""
    tp_copies: bool = False
    """Whether what tp ranks gather along the sequence is put in order by copies (DTensor)."""
    tp_shards: bool = False
    """Whether tp ranks keep shards of what they gather; ours do."""
    sequence_parallel: bool = True
    """Whether tp ranks share the tokens of norms and residuals (Korthikanti et al. 2022)."""
    layers: Literal["ours", "te"] = "ours"
    """`te`: modules that write what the next one reads in FP8, have experts and all linear layers in FP8,
    cast weights once a step, and launch each kernel from Python."""
    graphs: Literal["none", "part", "full"] = "none"
    """CUDA graphs: of all but experts, or of a whole step."""
    fused_routing: bool = False
    """Whether a router's choice, and putting rows in order, are a kernel each."""
    fused_experts: bool = False
    """Whether experts' activations, and their casts, are part of the grouped matmuls' kernels."""
    norms: Literal["fused", "plain"] = "fused"
    """Whether eager norms are one kernel, or one for each operation, in fp32."""
    elementwise: Literal["bf16", "fp32"] = "bf16"
    """Format of what modules compute between matmuls. Autocast leaves it in fp32 where a module uses its
    weights. Estimates of memory do not count it."""
    attention: Literal["auto", "flash", "flash1"] = "auto"
    """FlashAttention 2, or 1, where the device would have a faster one."""
    recompute: Literal["op", "every-other-matmul", "cheap", "mlp"] = "op"
    """What `--sac-policy op` keeps: results of all matmuls (`op`), or `every-other-matmul`; all but an
    MLP's, or experts', inputs and results (`mlp`). With layers of `te` it is all but results of norms,
    activations and latent attention's last layers before attention (`cheap`).
    """
    ends_are_layers: bool = False
    """Whether embedding and loss take the place of a layer in the first and last stage of a pipeline."""
    loss: Literal["chunks", "whole", "fused"] = "chunks"
    """Whether the loss sees logits in `chunks`, a micro batch's `whole`, or these `fused`: in place."""
    offload: Literal["none", "states", "activations"] = "none"
    """What is in the host's memory: the optimizer's state, whose transfers are not counted, or all that
    blocks keep for the backward."""
    levels: tuple[tuple[str, float], ...] = ()
    """The rates that it reaches over those of others, by families of devices; of others by the name "".

    benchmarks/fit_estimate.py chooses them.
    """

    @property
    def modules(self) -> bool:
        """Whether layers are Transformer Engine's modules."""
        return self.layers == "te"

    def level_on(self, family: str) -> float:
        """The rates that it reaches over those of others on devices of that family."""
        levels = dict(self.levels)
        return levels.get(family, levels.get("", 1.0))


OUR_TRAINER = Trainer()


@dataclasses.dataclass(frozen=True)
class Work:
    """One optimizer step. At most one of `ddp` and `fsdp` is used; without both one device works."""

    config: ModelConfig
    batch: Batch
    parallelism: Parallelism
    pass_type: str
    amp: str
    tf32: bool
    compile_mode: str | None  # None: eager
    cuda_graphs: bool
    recompute: Recompute
    optimizer: str
    balanced: bool
    """Whether experts are dealt out in turn in place of chosen."""
    rows_over_mean: float | None = None
    """Rows of the fullest ep rank over the mean; None where that is not known."""
    chunk_elements: int = CHUNK_ELEMENTS
    """The most logits that the loss makes at a time (model/chunks.py)."""
    attention: AttentionKernel = USUAL_OPTIONS.attention
    linear: str | None = None
    """Of linear layers: te, plain, onednn, auto where the run is to choose, None without a choice."""
    offload: bool = False
    """Whether what blocks keep for backward goes to the host."""
    lora: Lora | None = None
    bf16_weights: bool = False
    """Whether weights, gradients and the optimizer's moments are in bf16."""
    fp8: Fp8Work | None = None
    ddp: Ddp | None = None
    fsdp: FsdpOptions | None = None
    trainer: Trainer = OUR_TRAINER

    @property
    def model_options(self) -> ModelOptions:
        """What the model is built with."""
        onednn = self.linear == "onednn"
        return ModelOptions(self.attention, self.balanced, onednn, self.chunk_elements)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.parallelism.ranks * self.parallelism.pp

    @property
    def keeps_shards(self) -> bool:
        """Whether tp ranks keep shards of what they gather, and gather it again in backward."""
        return self.trainer is OUR_TRAINER or self.trainer.tp_shards

    @property
    def state_bytes(self) -> float:
        """Bytes of the optimizer's moments of a parameter: 0 where a step has none.

        Muon has one of its matrices, and two as AdamW of the rest.
        """
        if self.pass_type != "step":
            return 0.0
        moments = {"adamw": 2.0, "sgd": 1.0}.get(self.optimizer)
        if moments is None:
            tables = (2 - self.config.tie_word_embeddings) * self.config.padded_vocab_size
            rest = tables * self.config.hidden_size
            moments = 1 + rest / (rest + sum(block_parameters(self.config)))
        kind = "bf16" if self.bf16_weights else self.trainer.moments
        return moments * {"fp32": 4, "bf16": 2, "8bit": 1}[kind]

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.pass_type != "forward"

    @property
    def compiled(self) -> bool:
        """Whether blocks and loss go through torch.compile."""
        return self.compile_mode is not None

    @property
    def exact_casts(self) -> bool:
        """Whether compiled kernels must round as eager ones do: FP8 scaled by rows needs it."""
        return self.fp8 is not None and self.fp8.recipe.startswith("rowwise")

    @property
    def fp8_backend(self) -> str | None:
        """The library of FP8; None without FP8."""
        return self.fp8.backend if self.fp8 else None

    @property
    def casts_weights(self) -> bool:
        """Whether autocast copies weights to a low precision: whole ones, which are in fp32."""
        base_bytes = self.lora.base_bytes if self.lora else 4
        return self.amp != "off" and self.weight_bytes == 4 and base_bytes == 4

    @property
    def cpu_offload(self) -> bool:
        """Whether FSDP keeps parameters, gradients and the optimizer's state in the host's memory."""
        return self.fsdp is not None and self.fsdp.cpu_offload

    @property
    def shares_states(self) -> bool:
        """Whether DDP's ranks share the optimizer's state: by --zero1, or as the trainer does."""
        return self.ddp is not None and (self.ddp.zero1 or self.trainer.zero in (1, 2))

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a reduced gradient's number."""
        options = self.fsdp or self.ddp
        low = self.trainer.weights == "master-bf16"  # Megatron and DeepSpeed reduce what they keep
        return 2 if low or (options and options.reduce_dtype == "bf16") else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is trained."""
        return 4 if self.trainer.weights == "fp32" and not self.bf16_weights else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that is kept between micro batches."""
        exact = self.trainer.weights in ("fp32", "master")
        return 4 if exact and not self.bf16_weights else 2

    @property
    def matmul_bytes(self) -> int:
        """Bytes per number of a matmul's inputs (except FP8) and of gathered weights."""
        return 4 if self.amp == "off" else 2

    @property
    def windowed(self) -> bool:
        """Whether a layer has a sliding window shorter than the sequence."""
        windows = [layer.window for layer in self.config.layers if layer.window is not None]
        return any(window < self.batch.seq_len for window in windows)

    @property
    def by_tokens(self) -> bool:
        """Whether cp ranks gather keys and values."""
        return self.parallelism.cp > 1 and not self.parallelism.ulysses

    @property
    def masked(self) -> bool:
        """Whether attention is other than causal over the whole sequence."""
        return bool(self.windowed or self.config.sinks or self.by_tokens or self.batch.documents)

    @property
    def layers(self) -> range:
        """The numbers of the blocks."""
        return range(self.config.num_hidden_layers)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a rank."""
        return self.config.num_key_value_heads // self.parallelism.tp

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys on a rank."""
        return self.kv_heads * self.config.head_dim

    @property
    def own_tokens(self) -> int:
        """Tokens of a micro batch in this rank's part of the residual stream."""
        return self.gathered_tokens // self.parallelism.tp

    @property
    def normed_tokens(self) -> int:
        """Tokens of a micro batch whose norms and residuals this rank computes, and keeps."""
        return self.own_tokens if self.trainer.sequence_parallel else self.gathered_tokens

    @property
    def expert_rows(self) -> int:
        """Rows that a rank's experts compute of a micro batch in the mean."""
        return self.own_tokens * present(self.config.experts).per_token

    @property
    def imbalance(self) -> float:
        """Rows of the fullest ep rank over the mean, for which all wait."""
        if self.parallelism.ep == 1 or self.balanced:
            return 1.0
        return self.rows_over_mean or LEARNED_IMBALANCE

    @property
    def gathered_tokens(self) -> int:
        """Those of all tp ranks: what attention's and the MLP's first layers see."""
        return self.batch.micro_tokens // self.parallelism.cp

    def stage_layers(self, stage: int) -> range:
        """The blocks of a pipeline's stage."""
        return self.parallelism.stage_layers(self.config.num_hidden_layers, stage)

    def layers_of(self, pp_rank: int) -> list[int]:
        """The blocks of one pp rank: a pipeline cuts the layers between groups of ranks."""
        return [
            i for stage in self.parallelism.stages_of(pp_rank) for i in self.stage_layers(stage)
        ]

    def with_micro_batch(self, bsz: int) -> "Work":
        """The same step with another micro batch; only memory formulas may ask, totals stay."""
        return dataclasses.replace(self, batch=dataclasses.replace(self.batch, micro_batch=bsz))
