"""Memory of a training step by formula: what each kind takes on one device. Needs no torch.

The peak is the largest of three moments: in the loss, when all activations are kept; in the backward of
the last block, when it is gathered and recomputed besides; at the backward's end, when all gradients are
there. Tensors are counted as our own model makes them; bench/parallel/memory_trace.py counts the same by
tracing. Memory outside PyTorch (CUDA context, communication buffers) is not counted, nor are the
allocator's gaps.
"""

import dataclasses
import math

from bench.errors import UsageError
from bench.formulas.collectives import fp8_gather_bytes
from bench.formulas.work import Work
from model.chunks import chunk_rows

# Memory on a GPU besides PyTorch's tensors. CUDA context and libraries, and communication buffers:
# by experience, not measured here. The allocator's own code left gaps of 1 to 7 % in steps of 1 to
# 8 billion parameters, and of 12 % where single tensors take gigabytes.
CONTEXT_GIB, COMMUNICATION_GIB, GAPS = 0.8, 1.0, 0.05


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device. `peak` is less than the sum: not all kinds exist at once.

    `apart` is memory that FSDP's collectives hold besides; other tensors cannot use it.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    peak: float
    apart: float

    def on_device(self, world: int) -> float:
        """Bytes taken on each of `world` GPUs, with what is outside PyTorch's tensors."""
        outside = CONTEXT_GIB + COMMUNICATION_GIB * (world > 1)
        return (self.peak + self.apart) * (1 + GAPS) + outside * 2**30


def estimate_memory(work: Work, fused_norm: bool = True) -> MemoryEstimate:
    """The memory of one step of one rank, in bytes.

    DDP's buckets hold the gradients' memory all the time, used or not. --cpu-offload takes parameters,
    gradients and optimizer state off the GPU. `fused_norm` is False for a CPU: its RMS norm keeps fp32
    copies for the backward.
    """
    refuse_unknown(work)
    sizes = _Sizes(work)
    fsdp, fp8, replicated = work.fsdp, work.fp8, work.ddp is not None
    shards = fsdp.shards if fsdp else None
    several = work.batch.grad_acc_steps > 1
    per_rank = (sizes.blocks + sizes.root) / (shards or 1)
    train, step = work.trains, work.pass_type == "step"
    parameters = 4 * per_rank
    if fp8 and fp8.primary_weights:  # the fp32 weights are the optimizer's
        orientations = 2 if fp8.recipe == "mxfp8" else 1
        parameters -= (4 - orientations) * sizes.blocks / (shards or 1)
    state = {"adamw": 8, "sgd": 4}[work.optimizer] if step else 0
    optimizer = state * per_rank
    if fp8 and fp8.primary_weights and step:
        optimizer += 4 * sizes.blocks / (shards or 1)
    gradients = 4 * per_rank if train or replicated else 0.0
    if fsdp and fsdp.cpu_offload:
        parameters = optimizer = gradients = 0.0
    # Freed memory stays with the stream it was for: gathering and reducing have one each.
    passed = sizes.width + (fsdp.reduce_bytes if train else 0) if fsdp else 0
    apart = sizes.root * passed if sizes.root_gathered else 0.0
    lasting = parameters + optimizer + (gradients if several or replicated else 0.0)

    kept = _kept(work, fused_norm)
    width, hidden = sizes.width, work.config.hidden_size
    if not train:
        kept = width * sizes.tokens * hidden
    norm_out = 2 if train else 1
    tail = norm_out * width * sizes.tokens * hidden
    activations = kept + tail + sizes.copies
    logits, head_gradient = _loss(work, sizes)
    in_loss = lasting + sizes.root_gathered + activations + logits + head_gradient
    if fsdp and not fsdp.reshard:
        in_loss += sizes.gathered_blocks
    if not train:
        in_block = lasting + sizes.root_gathered + sizes.block_copies + sizes.gathered_blocks
        in_block += _passing_activations(work)
        return MemoryEstimate(
            parameters, gradients, 0.0, activations, logits, sizes.root_gathered + sizes.gathered_blocks,
            max(in_loss, in_block), apart,
        )  # fmt: skip
    recomputed = block_activations(work, fused_norm) if work.recompute.blocks else 0.0
    reduced = sizes.block * (width + fsdp.reduce_bytes) if fsdp else 4.0 * sizes.block
    in_backward = (
        lasting
        + sizes.root_gathered
        + kept
        + sizes.copies
        + (sizes.vocabulary * width if fsdp else head_gradient)
        + sizes.gathered_blocks
        # Weight gradients are there when most of the block's activations are gone.
        + max(recomputed + _backward_buffers(work), reduced + recomputed / 2)
    )
    at_end = parameters + optimizer + gradients
    if fsdp:
        # Gradients of embedding and head are reduced together, last of all.
        at_end += sizes.root * (width + fsdp.reduce_bytes)
        at_end -= 0.0 if fsdp.cpu_offload else 4 * sizes.root / fsdp.shards
    else:
        at_end += 4 * sizes.vocabulary  # the embedding's gradient before it is added
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits + head_gradient,
        gathered=sizes.root_gathered + sizes.gathered_blocks,
        peak=max(in_loss, in_backward, at_end),
        apart=apart,
    )


def refuse_unknown(work: Work) -> None:
    """UsageError for models and layouts whose memory and speed are not estimated yet."""
    config, fsdp = work.config, work.fsdp
    reasons = {
        "experts": config.experts is not None,
        "latent attention": config.latent is not None,
        "norms after its layers": config.norm_after,
    }
    for what in (name for name, has in reasons.items() if has):
        raise UsageError(f"{config.path}: models with {what} are not estimated yet; measure a run")
    if fsdp and fsdp.divided:
        raise UsageError("--tp, --cp, --ep: such layouts are not estimated yet; measure a run")


class _Sizes:
    """Numbers of parameters, and bytes that follow from them and the step."""

    def __init__(self, work: Work):
        config, fsdp, fp8 = work.config, work.fsdp, work.fp8
        d, self.tokens, self.width = config.hidden_size, work.batch.micro_tokens, work.matmul_bytes
        self.vocabulary = config.padded_vocab_size * d
        self.block, self.blocks = max(work.block_parameters), sum(work.block_parameters)
        untied = 1 if config.tie_word_embeddings else 2
        positions = config.max_position_embeddings * d if config.learned_positions else 0
        self.root = untied * self.vocabulary + positions
        self.copies = self.block_copies = self.root_gathered = self.gathered_blocks = 0.0
        if fsdp is not None and fsdp.shards > 1:
            self.root_gathered = self.width * self.root
            ahead = self.block * (1 + max(1, fsdp.prefetch)) if fsdp.reshard else self.blocks
            width = fp8_gather_bytes(work) if fp8 and fp8.gathered else self.width
            self.gathered_blocks = width * ahead
        elif work.amp != "off":
            self.block_copies = _low_precision_copies(work)
            self.copies = self.block_copies + 2.0 * self.vocabulary
        self.rows = chunk_rows(self.tokens, config.padded_vocab_size)


def _low_precision_copies(work: Work) -> float:
    """Bytes of the blocks' weights in low precision, which autocast keeps until the forward is over.

    Blocks that make their own copies, in bf16 or twice in FP8, keep them if nothing is recomputed;
    torchao keeps none. Without a backward there is nothing to keep them for.
    """
    own = work.compiled or work.fp8 is not None
    kept = [
        n for i, n in enumerate(work.block_parameters) if not own or i not in work.recompute.blocks
    ]
    if (work.fp8 and work.fp8.backend == "torchao") or (own and not work.trains):
        kept = []
    copies = 2.0 * sum(kept)
    if work.fp8 and work.fp8.backend == "te" and not work.trains:  # for the next micro batch
        copies += (work.batch.grad_acc_steps > 1) * sum(work.block_parameters)
    return copies


def _loss(work: Work, sizes: _Sizes) -> tuple[float, float]:
    """Bytes of the chunked loss: its temporary buffers, and the gradients it leaves behind."""
    w, chunk = sizes.width, sizes.rows * work.config.padded_vocab_size
    # Compiled: logits and their gradient. Eager: fp32 logits; their gradient takes the same memory.
    logits = chunk * (2 * w if work.compiled else 4 if w == 4 else 4 + w)
    if not work.trains:
        return logits, 0.0
    several = sizes.tokens > sizes.rows
    summed = (4 if several or not sizes.root_gathered else w) * sizes.vocabulary
    if several:
        # From the second chunk on, a chunk's product with the hidden states is added to the sum.
        logits = max(logits, w * chunk + (2 * sizes.vocabulary if w == 2 else 0))
    else:
        # When the sum is made, only the gradient of the logits is left.
        logits = max(logits, w * chunk + summed + (2 * sizes.vocabulary if w == 2 else 0)) - summed
    return logits, summed + w * sizes.tokens * work.config.hidden_size


def block_activations(work: Work, fused_norm: bool = True) -> float:
    """Bytes that one block keeps for its backward when nothing of it is recomputed.

    Autograd's hooks showed what our blocks save, with torch 2.11, torchao 0.18 and Transformer
    Engine 2.20: the inputs of norms; q, k, v and their rotated copies; the attention's output and
    log-sum-exp; the MLP's first output. The other inputs of matmuls count too, unless they are
    recomputed or in FP8.
    """
    config, fp8, w = work.config, work.fp8, work.matmul_bytes
    d, f = config.hidden_size, config.intermediate_size
    a, kv = config.query_size, config.kv_size
    statistics = 2 * (1 if config.rms_norm else 2) + config.num_attention_heads
    elements = 2 * d + (a + 2 * kv) + a + (2 * f if config.gated_mlp else f)
    if config.qk_norm or not config.learned_positions:
        elements += a + kv
    if config.qk_norm:
        statistics += config.num_attention_heads + config.num_key_value_heads
    extra = 0
    inputs = 2 * d + f  # norms' outputs, and the activation's
    if fp8 and fp8.backend == "te":
        # A byte each, but two for the norm's output before the MLP: both orientations.
        extra = inputs + a + d + (f if fp8.recipe in ("blockwise", "mxfp8") else 0)
    elif not work.compiled or not fp8 or fp8.recipe == "rowwise_with_gw_hp":
        elements += inputs
        if config.gated_mlp and not work.compiled:
            elements += f  # SiLU's output
    elif fp8.all_gather:
        elements += f
    if config.rms_norm and not fused_norm and not work.compiled:
        extra += 2 * d * (12 - w if w == 2 else 4)
    return work.batch.micro_tokens * (w * elements + extra + 4 * statistics)


def _passing_activations(work: Work) -> float:
    """Most bytes of a block that frees activations as it runs: in the MLP or before it.

    They include the block's input, the MLP's input and the norm's output: their callers hold them.
    """
    config = work.config
    f, a, kv = config.intermediate_size, config.query_size, config.kv_size
    # Compiled, the activation and the product with it are one kernel.
    mlp = (3 if work.compiled else 4) * f if config.gated_mlp else 2 * f
    if work.fp8 and work.fp8.backend == "torchao" and not work.compiled:
        mlp = (3 if config.gated_mlp else 2) * f + 4 * f  # to FP8 by way of two fp32 copies
    attention = (a + 2 * kv) + (0 if config.learned_positions else a + kv) + a
    numbers = 3 * config.hidden_size + max(mlp, attention)
    return work.matmul_bytes * work.batch.micro_tokens * numbers


def _kept(work: Work, fused_norm: bool) -> float:
    """Bytes that all blocks keep between forward and backward."""
    config, w, chosen = work.config, work.matmul_bytes, len(work.recompute.blocks)
    d, f = config.hidden_size, config.intermediate_size
    small = w * work.batch.micro_tokens * d
    if work.recompute.policy == "op":
        a, kv = config.query_size, config.kv_size
        outputs = d if work.compiled else 2 * d  # compiled, the last matmul's is not kept
        elements = d + (a + 2 * kv) + a + outputs + (2 * f if config.gated_mlp else f)
        small = work.batch.micro_tokens * (w * elements + 4 * config.num_attention_heads)
    whole = config.num_hidden_layers - chosen
    return whole * block_activations(work, fused_norm) + chosen * small


def _backward_buffers(work: Work) -> float:
    """Bytes of gradients of the MLP's activations, beyond the activations freed by then."""
    wide = 2 if work.config.gated_mlp else 1
    return work.matmul_bytes * work.batch.micro_tokens * wide * work.config.intermediate_size


def largest_batch(memory_of, limit: float) -> int:
    """The largest micro batch that stays within `limit` bytes at its peak; 0 if not even 1 does.

    `memory_of(bsz)` gives the bytes of a micro batch, which grow with it.
    """
    if memory_of(1) > limit:
        return 0
    high = 1
    while memory_of(2 * high) <= limit and high < 2**20:
        high *= 2
    low, high = high, 2 * high
    while high - low > 1:
        middle = math.floor((low + high) / 2)
        low, high = (middle, high) if memory_of(middle) <= limit else (low, middle)
    return low
