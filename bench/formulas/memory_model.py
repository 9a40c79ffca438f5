"""Memory of a training step by formula: what each kind takes on one device. Needs no torch.

The peak is the largest of three moments: in the loss, when all activations are kept; in the backward of
the last block, when it is gathered and recomputed besides; at the backward's end, when all gradients are
there. Tensors are counted as our own model makes them; bench/parallel/memory_trace.py counts the same by
tracing. Memory outside PyTorch (CUDA context, communication buffers) is not counted, nor are the allocator's
gaps.
"""

import dataclasses
import math

from bench.formulas.collectives import fp8_gather_bytes, gathers_fp8, matmul_bytes, reduce_bytes
from bench.formulas.flops import chosen_blocks
from bench.settings.flags import Args, parse_sac_freq
from model.chunks import chunk_rows
from model.config import ModelConfig

# What is on a GPU besides PyTorch's tensors: CUDA context and libraries, and communication buffers, by
# experience and not measured here; gaps in the allocator's memory, of which its own code left 1 to 7 % in
# steps of 1 to 8 billion parameters, and 12 % where single tensors take gigabytes.
CONTEXT_GIB, COMMUNICATION_GIB, GAPS = 0.8, 1.0, 0.05


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device. `peak` is less than the sum: not all kinds exist at once.

    `apart` is what FSDP's collectives hold besides in memory that other tensors cannot have.
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


def estimate_memory(
    config: ModelConfig,
    args: Args,
    seq_len: int,
    micro_steps: int,
    shards: int | None,
    fused_norm: bool = True,
    replicated: bool = False,
) -> MemoryEstimate:
    """The memory of a step of `micro_steps` micro batches, in bytes.

    `shards` is the ranks that share a copy under FSDP, None without FSDP.
    `replicated` is DDP, whose buckets hold the gradients' memory all the time, used or not. --cpu-offload
    takes parameters, gradients and optimizer state off the GPU.

    `fused_norm` is False for a CPU, whose RMS norm keeps fp32 copies for the backward.
    """
    sizes = _Sizes(config, args, seq_len, micro_steps, shards)
    per_rank = (sizes.blocks + sizes.root) / (shards or 1)
    train, step = args.pass_type != "forward", args.pass_type == "step"
    parameters = 4 * per_rank
    if args.fp8_primary_weights:  # the fp32 weights are the optimizer's
        orientations = 2 if args.fp8_recipe == "mxfp8" else 1
        parameters -= (4 - orientations) * sizes.blocks / (shards or 1)
    state = {"adamw": 8, "sgd": 4}[args.optimizer] if step else 0
    optimizer = state * per_rank
    if args.fp8_primary_weights and step:
        optimizer += 4 * sizes.blocks / (shards or 1)
    gradients = 4 * per_rank if train or replicated else 0.0
    if args.cpu_offload:
        parameters = optimizer = gradients = 0.0
    # Freed memory stays with the stream it was for: gathering and reducing have one each.
    passed = sizes.width + (sizes.reduce_bytes if train else 0)
    apart = sizes.root * passed if sizes.root_gathered else 0.0
    lasting = parameters + optimizer + (gradients if micro_steps > 1 or replicated else 0.0)

    block = block_activations(config, args, sizes.tokens, fused_norm)
    kept = _kept(config, args, block, sizes.tokens)
    width = sizes.width
    if not train:
        kept = width * sizes.tokens * config.hidden_size
    norm_out = 2 if train else 1
    tail = norm_out * width * sizes.tokens * config.hidden_size
    activations = kept + tail + sizes.copies
    logits, head_gradient = _loss(sizes, train)
    in_loss = lasting + sizes.root_gathered + activations + logits + head_gradient
    if args.reshard_after_forward == "never":
        in_loss += sizes.gathered_blocks
    if not train:
        in_block = lasting + sizes.root_gathered + sizes.block_copies + sizes.gathered_blocks
        in_block += _passing_activations(config, args, sizes)
        return MemoryEstimate(
            parameters, gradients, 0.0, activations, logits, sizes.root_gathered + sizes.gathered_blocks,
            max(in_loss, in_block), apart,
        )  # fmt: skip
    recomputed = block if args.sac_freq else 0.0
    reduced = sizes.block * (width + sizes.reduce_bytes) if shards else 4.0 * sizes.block
    in_backward = (
        lasting
        + sizes.root_gathered
        + kept
        + sizes.copies
        + (sizes.vocabulary * width if shards else head_gradient)
        + sizes.gathered_blocks
        # Weight gradients are there when most of the block's activations are gone.
        + max(recomputed + _backward_buffers(config, sizes), reduced + recomputed / 2)
    )
    at_end = parameters + optimizer + gradients
    if shards:
        # Gradients of embedding and head are reduced together, last of all.
        at_end += sizes.root * (width + sizes.reduce_bytes)
        at_end -= 0.0 if args.cpu_offload else 4 * sizes.root / shards
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


class _Sizes:
    """Numbers of parameters, and bytes that follow from them and the flags."""

    def __init__(
        self, config: ModelConfig, args: Args, seq_len: int, micro_steps: int, shards: int | None
    ):
        d = config.hidden_size
        self.tokens = args.bsz * seq_len
        self.width, self.reduce_bytes = matmul_bytes(args), reduce_bytes(args)
        self.vocabulary = config.padded_vocab_size * d
        self.block = sum(n * k for n, k in config.block_shapes().values())
        self.blocks = self.block * config.num_hidden_layers
        untied = 1 if config.tie_word_embeddings else 2
        positions = config.max_position_embeddings * d if config.learned_positions else 0
        self.root = untied * self.vocabulary + positions
        self.copies = self.block_copies = self.root_gathered = self.gathered_blocks = 0.0
        if shards is not None and shards > 1:
            self.root_gathered = self.width * self.root
            ahead = 1 + max(1, args.prefetch)
            if args.reshard_after_forward == "never":
                ahead = config.num_hidden_layers
            width = fp8_gather_bytes(args) if gathers_fp8(args) else self.width
            self.gathered_blocks = width * self.block * ahead
        elif args.amp != "off":
            # Autocast keeps low-precision copies of all weights until the forward pass is over. Blocks
            # that make their own, in bf16 or twice in FP8, keep them if nothing is recomputed; torchao
            # keeps none.
            n = config.num_hidden_layers
            if args.use_fp8 or args.pt_compile:
                n -= len(chosen_blocks(n, parse_sac_freq(args.sac_freq)))
            if args.use_fp8 and args.fp8_backend == "torchao":
                n = 0
            if (args.pt_compile or args.use_fp8) and args.pass_type == "forward":
                n = 0  # there is no backward to keep them for
            self.block_copies = 2.0 * self.block * n
            if args.use_fp8 and args.fp8_backend == "te" and args.pass_type == "forward":
                self.block_copies += (micro_steps > 1) * self.blocks  # for the next micro batch
            self.copies = self.block_copies + 2.0 * self.vocabulary
        self.rows = chunk_rows(self.tokens, config.padded_vocab_size)
        self.n_vocabulary, self.compiled = config.padded_vocab_size, args.pt_compile
        self.hidden = d


def _loss(sizes: _Sizes, train: bool) -> tuple[float, float]:
    """Bytes of the chunked loss: its passing buffers, and the gradients it leaves behind."""
    w, chunk = sizes.width, sizes.rows * sizes.n_vocabulary
    # Compiled, logits and their gradient; else logits in fp32, in whose memory their gradient is made.
    logits = chunk * (2 * w if sizes.compiled else 4 if w == 4 else 4 + w)
    if not train:
        return logits, 0.0
    several = sizes.tokens > sizes.rows
    summed = (4 if several or not sizes.root_gathered else w) * sizes.vocabulary
    if several:
        # From the second chunk on its product with the hidden states is added to the sum.
        logits = max(logits, w * chunk + (2 * sizes.vocabulary if w == 2 else 0))
    else:
        # The sum is made when the logits are gone but for their gradient.
        logits = max(logits, w * chunk + summed + (2 * sizes.vocabulary if w == 2 else 0)) - summed
    return logits, summed + w * sizes.tokens * sizes.hidden


def block_activations(
    config: ModelConfig, args: Args, tokens: int, fused_norm: bool = True
) -> float:
    """Bytes that one block keeps for its backward when nothing of it is recomputed.

    By what autograd saves of our blocks, as its hooks showed with torch 2.11, torchao 0.18 and
    Transformer Engine 2.20: the inputs of norms, q, k, v and their rotated copies, the attention's output
    and its log-sum-exp, the MLP's first output; besides, unless they are recomputed or in FP8, the other
    inputs of matmuls.
    """
    d, f = config.hidden_size, config.intermediate_size
    a, kv = config.query_size, config.kv_size
    w = matmul_bytes(args)
    statistics = 2 * (1 if config.rms_norm else 2) + config.num_attention_heads
    elements = 2 * d + (a + 2 * kv) + a + (2 * f if config.gated_mlp else f)
    if config.qk_norm or not config.learned_positions:
        elements += a + kv
    if config.qk_norm:
        statistics += config.num_attention_heads + config.num_key_value_heads
    extra = 0
    inputs = 2 * d + f  # norms' outputs, and the activation's
    if args.use_fp8 and args.fp8_backend == "te":
        # A byte each; of the norm before the MLP in both orientations.
        extra = inputs + a + d + (f if args.fp8_recipe in ("blockwise", "mxfp8") else 0)
    elif not args.pt_compile or not args.use_fp8 or args.fp8_recipe == "rowwise_with_gw_hp":
        elements += inputs
        if config.gated_mlp and not args.pt_compile:
            elements += f  # SiLU's output
    elif args.fp8_all_gather:
        elements += f
    if config.rms_norm and not fused_norm and not args.pt_compile:
        extra += 2 * d * (12 - w if w == 2 else 4)
    return tokens * (w * elements + extra + 4 * statistics)


def _passing_activations(config: ModelConfig, args: Args, sizes: _Sizes) -> float:
    """Bytes of a block whose activations are let go as it runs, at their most: in the MLP or before it.

    Besides the block's input, the MLP's, and the norm's output, which their callers hold.
    """
    f, a, kv = config.intermediate_size, config.query_size, config.kv_size
    # Compiled, the activation and the product with it are one kernel.
    mlp = (3 if args.pt_compile else 4) * f if config.gated_mlp else 2 * f
    if args.use_fp8 and args.fp8_backend == "torchao" and not args.pt_compile:
        mlp = (3 if config.gated_mlp else 2) * f + 4 * f  # to FP8 by way of two fp32 copies
    attention = (a + 2 * kv) + (0 if config.learned_positions else a + kv) + a
    return sizes.width * sizes.tokens * (3 * config.hidden_size + max(mlp, attention))


def _kept(config: ModelConfig, args: Args, block: float, tokens: int) -> float:
    """Bytes that all blocks keep between forward and backward."""
    n, d, f = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    chosen = len(chosen_blocks(n, parse_sac_freq(args.sac_freq)))
    w = matmul_bytes(args)
    small = w * tokens * d
    if args.sac_policy == "op":
        a, kv = config.query_size, config.kv_size
        outputs = d if args.pt_compile else 2 * d  # compiled, the last matmul's is not kept
        elements = d + (a + 2 * kv) + a + outputs + (2 * f if config.gated_mlp else f)
        small = tokens * (w * elements + 4 * config.num_attention_heads)
    return (n - chosen) * block + chosen * small


def _backward_buffers(config: ModelConfig, sizes: _Sizes) -> float:
    """What gradients of the MLP's activations take beyond the activations freed by then."""
    wide = 2 if config.gated_mlp else 1
    return sizes.width * sizes.tokens * wide * config.intermediate_size


def largest_batch(memory_of, limit: float) -> int:
    """The largest micro batch whose peak stays within `limit` bytes; 0 if not even one does.

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
