"""Memory of a training step by formula: what each kind takes on one device. Needs no torch.

The peak is the largest of three moments: in the loss, when all activations are kept; in the backward of
the last block, when it is gathered and recomputed besides; at the backward's end, when all gradients are
there. Tensors are counted as our own model makes them; tests/memory_trace.py counts the same by
tracing. Memory outside PyTorch (CUDA context, communication buffers) is not counted, nor are the
allocator's gaps.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable

from llm_train_bench.formulas import collectives
from llm_train_bench.formulas.work import OUR_TRAINER, Work, alike, block_parameters
from llm_train_bench.model.chunks import chunk_rows
from llm_train_bench.model.shapes import present

# Memory on a GPU besides PyTorch's tensors. CUDA context and libraries, and communication buffers:
# by experience, not measured here. The allocator's own code left gaps of 1 to 7 % in steps of 1 to
# 8 billion parameters. They were 12 % where single tensors take gigabytes.
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
    apart: float = 0.0
    host: float = 0.0
    """What --cpu-offload and --offload-activations keep in the host's memory."""

    def on_device(self, world: int) -> float:
        """Bytes taken on each of `world` GPUs, with what is outside PyTorch's tensors."""
        outside = CONTEXT_GIB + COMMUNICATION_GIB * (world > 1)
        return (self.peak + self.apart) * (1 + GAPS) + outside * 2**30


# Verdicts, and the parts of a device's memory up to which they hold: of our own steps, where the formula
# is within a tenth of what a trace counts; and of others. Those are from the first half of
# benchmarks/memory-reports.json and the fitting rows: 2 of 38 reports of OOM needed less than 0.7, and
# 5 of 333 settings that ran more than 1.2.
VERDICTS = ("fits", "may not fit", "does not fit")
OURS, OTHERS = (0.9, 1.1), (0.7, 1.2)


def margins(work: Work) -> tuple[float, float]:
    """The parts of a device's memory up to which a step fits, and may fit."""
    return OURS if work.trainer is OUR_TRAINER else OTHERS


def verdict_of(needed: float, memory: float, work: Work) -> str:
    """Which of the verdicts holds for a step that needs so many bytes of a device's memory."""
    return VERDICTS[sum(needed > part * memory for part in margins(work))]


def estimate_memory(
    work: Work, fused_norm: bool = True, pp_rank: int | None = None
) -> MemoryEstimate:
    """The memory of one step of one rank, in bytes.

    DDP's buckets hold the gradients' memory all the time, used or not. --cpu-offload takes parameters,
    gradients and optimizer state off the GPU. `fused_norm` is False for a CPU: its RMS norm keeps fp32
    copies for the backward. In a pipeline it is of the group of ranks that needs most, or of `pp_rank`.
    Experts are thought to get equal numbers of rows.
    """
    fsdp, parallel, train = work.fsdp, work.parallelism, work.trains
    if parallel.pp > 1:
        groups = range(parallel.pp) if pp_rank is None else (pp_rank,)
        estimates = (_of_a_group(work, fused_norm, group) for group in groups)
        return max(estimates, key=lambda estimate: estimate.peak)
    sizes = _Sizes(work)
    parameters, gradients, optimizer = _lasting(work, sizes)
    host = 0.0
    if work.cpu_offload:
        host = parameters + optimizer + gradients
        parameters = optimizer = gradients = 0.0
    # Freed memory stays with the stream it was for: gathering and reducing have one each.
    passed = sizes.width + (work.reduce_bytes if train else 0) if fsdp else 0
    apart = sizes.root * passed if sizes.root_gathered else 0.0
    lasting = parameters + optimizer
    several = work.batch.grad_acc_steps > 1
    whole_weights = bool(fsdp) and work.trainer.zero < 3
    lasting += gradients if several or work.ddp or whole_weights else 0.0
    if several and train and fsdp and fsdp.reduce_last:  # whole gradients take the place of shards
        whole = (work.reduce_bytes if sizes.width == 2 else 4) * (sizes.root + sizes.blocks_here)
        lasting += whole - gradients

    width, stream = sizes.width, work.matmul_bytes * work.config.hidden_size * work.normed_tokens
    kept = _kept(work, work.layers, fused_norm) if train else stream
    if work.offload:
        host += kept
        kept = _kept_here(work, work.layers, fused_norm)
    activations = kept + (2 if train else 1) * stream + sizes.copies  # the last norm's output too
    logits, head_gradient = _loss(work, sizes, fused_norm)
    in_loss = lasting + sizes.root_gathered + activations + logits + head_gradient
    if fsdp and not fsdp.reshard:
        in_loss += sizes.gathered_blocks
    gathered = sizes.root_gathered + sizes.gathered_blocks
    if not train:
        in_block = lasting + gathered + sizes.block_copies
        peak = max(in_loss, in_block + max(_passing_activations(work, i) for i in work.layers))
        return MemoryEstimate(
            parameters, gradients, 0.0, activations, logits, gathered, peak, apart, host
        )
    reduced = sizes.block * (width + work.reduce_bytes) if fsdp else 4.0 * sizes.block
    learns = not work.lora and not whole_weights  # gradients of weights that are not in `lasting`
    reduced *= learns
    in_backward = lasting + gathered + kept + sizes.copies
    in_backward += (sizes.vocabulary * width if fsdp else head_gradient) * learns
    in_backward += _in_backward(work, work.layers, reduced, fused_norm)
    if work.offload and not (several or work.ddp or whole_weights):
        in_backward += gradients  # elsewhere they grow while what is kept shrinks
    at_end = parameters + optimizer + gradients
    if fsdp:
        # Gradients of embedding and head are reduced together, last of all.
        at_end += sizes.root * (width + work.reduce_bytes) * learns
        if not work.cpu_offload:
            at_end -= work.weight_bytes * sizes.root / parallel.shards * learns
        if parallel.dp_replicate > 1 and work.reduce_bytes != work.weight_bytes and learns:
            # What replicas reduce stays in its format until the backward is over.
            at_end += work.reduce_bytes * sizes.held
            in_backward += work.reduce_bytes * sizes.held
    else:
        at_end += 4 * sizes.vocabulary * learns  # the embedding's gradient before it is added
    if work.pass_type == "step" and work.optimizer == "muon":
        # Momenta, and what is sent, comes and is whole, in bf16.
        copies = (4 + 4 * 2) * sizes.held
        at_end = max(at_end, parameters + optimizer + gradients + copies)
    logits, peak = logits + head_gradient, max(in_loss, in_backward, at_end)
    return MemoryEstimate(
        parameters, gradients, optimizer, activations, logits, gathered, peak, apart, host
    )


def _of_a_group(work: Work, fused_norm: bool, pp_rank: int) -> MemoryEstimate:
    """The same of a rank in a pipeline, whose stages stay gathered, and their gradients whole.

    Before its first backward a group has the activations of several micro batches: 1F1B has p - s of
    them, Interleaved1F1B as many stages of them as its warm-up takes (Narayanan et al. 2021, 2.2).
    """
    parallel, batch, config, w = work.parallelism, work.batch, work.config, work.matmul_bytes
    layers, sizes = work.layers_of(pp_rank), _Sizes(work, pp_rank)
    parameters, gradients, optimizer = _lasting(work, sizes)
    stages = parallel.stages_of(pp_rank)
    stream = w * config.hidden_size * work.normed_tokens
    ends = len({0, parallel.stages - 1} & {*stages})
    # Streams that come from other groups, and their gradients, each micro batch in a buffer of its own.
    boundaries = batch.grad_acc_steps * stream * (2 * len(stages) - ends) * work.trains
    ours = work.trainer.zero == 3  # others free what they sent, and add gradients up in one buffer
    boundaries *= ours
    if parallel.virtual == 1:
        flying = min(batch.grad_acc_steps, parallel.pp - pp_rank)
    else:
        warm_up = (parallel.virtual - 1) * parallel.pp + 2 * (parallel.pp - 1 - pp_rank) + 1
        flying = min(parallel.virtual * batch.grad_acc_steps, warm_up) / parallel.virtual
    # What each stage returns is kept too.
    kept, host = flying * (_kept(work, layers, fused_norm) + stream * len(stages)), 0.0
    if work.offload:
        host, kept = kept, _kept_here(work, layers, fused_norm) + flying * stream * len(stages)
    last = config.num_hidden_layers - 1 in layers
    logits, head_gradient = _loss(work, sizes, fused_norm) if last else (0.0, 0.0)
    gathered = sizes.root_gathered + sizes.gathered_blocks
    whole = (work.reduce_bytes if w == 2 else 4) * (sizes.root + sizes.blocks_here)
    whole *= work.trains and not work.lora and ours
    lasting = parameters + optimizer + gathered + boundaries
    if not work.trains:
        passing = max(_passing_activations(work, layer) for layer in layers)
        peak = lasting + max(passing, logits + stream)
        return MemoryEstimate(parameters, 0.0, 0.0, stream, logits, lasting - parameters, peak)
    # The last group has the loss of the first micro batch before it has gradients, the others' after.
    if not ours:
        lasting, whole, gradients = lasting + gradients, gradients, 0.0
    again = whole if batch.grad_acc_steps > 1 and ours else 0.0
    in_loss = lasting + again + kept + stream + logits + head_gradient
    in_backward = lasting + whole * ours + kept + _in_backward(work, layers, 0.0, fused_norm)
    # Of the first unit that is reduced: a copy for the collective beside all the others' gradients.
    unit = work.reduce_bytes * max(sizes.block, sizes.root) * ours
    at_end = parameters + optimizer + sizes.root_gathered + whole + boundaries + gradients + unit
    gradients, activations, logits = gradients + whole, kept + boundaries, logits + head_gradient
    peak = max(in_loss, in_backward, at_end)
    return MemoryEstimate(
        parameters, gradients, optimizer, activations, logits, gathered, peak, host=host
    )


def _lasting(work: Work, sizes: "_Sizes") -> tuple[float, float, float]:
    """Bytes of this rank's parameters, gradients and optimizer state."""
    trainer, each, lora = work.trainer, work.weight_bytes, work.lora
    copies = trainer.weights.startswith("master")
    state = work.state_bytes + 4 * (work.state_bytes > 0 and copies)
    state *= trainer.offload != "states"
    if lora:  # adapters, in fp32, are all that is learnt
        learnt = lora.numbers(sizes.layers) / work.parallelism.shards
        share = 1 / work.world if work.shares_states else 1
        base = sizes.whole if work.fsdp and trainer.zero < 3 else sizes.held
        gradients = 4.0 * learnt * work.trains
        return lora.base_bytes * base + 4 * learnt, gradients, state * learnt * share
    gradients = work.gradient_bytes * sizes.held if work.trains or work.ddp else 0.0
    if work.ddp and trainer.zero == 2:
        gradients /= work.world
    if work.fsdp and trainer.zero < 3:
        if trainer.zero < 2:
            gradients = work.gradient_bytes * sizes.whole * work.trains
        own = sizes.held / work.parallelism.dp_replicate if trainer.zero else sizes.whole
        return each * sizes.whole, gradients, state * own
    # ZeRO-1's optimizer works on copies of this rank's shares of parameters and gradients.
    share = 1 / work.world if work.shares_states else 1
    copies = 4 * sizes.held * share if work.ddp and work.ddp.zero1 and state else 0.0
    return each * sizes.held + copies, gradients, state * sizes.held * share


def _cheap(work: Work, layer: int) -> float:
    """Numbers that a block need not keep: what norms, activations and latent queries and keys made."""
    config, tp = work.config, work.parallelism.tp
    d, tokens = config.hidden_size / _input_shards(work), work.gathered_tokens
    spec, e = config.layers[layer], config.experts_of(layer)
    numbers = 0.0 if spec.mixer is None else d * tokens
    if m := config.latent:
        a, heads = config.query_size / tp, config.num_attention_heads / tp
        numbers += (2 * a + heads * (m.nope_dim + m.value_dim)) * tokens
    if spec.mlp is None:
        return numbers
    if e is None:
        return numbers + (d + config.intermediate_size / tp) * tokens
    return numbers + work.expert_rows * e.size * (1 + bool(e.limit))


def _in_backward(work: Work, layers: Iterable[int], reduced: float, fused_norm: bool) -> float:
    """Most bytes of a block in its backward, beyond what it kept: recomputed, and gradients."""
    most = 0.0
    for layer, *_ in alike(work, layers):
        again = block_activations(work, fused_norm, layer) if work.recompute.blocks else 0.0
        if again and work.recompute.policy == "op":  # these are kept, not recomputed
            again -= work.matmul_bytes * work.gathered_tokens * _blocks_kept(work)
        # Weight gradients are there when most of the block's activations are gone.
        most = max(most, again + _backward_buffers(work, layer), reduced + again / 2)
    return most


class _Sizes:
    """Numbers of parameters of a rank, and bytes that follow from them and the step."""

    def __init__(self, work: Work, pp_rank: int = 0):
        config, parallel = work.config, work.parallelism
        self.width, self.layers = work.matmul_bytes, work.layers_of(pp_rank)
        self.vocabulary = config.padded_vocab_size * config.hidden_size
        self.held = 0.0
        numbers = dict.fromkeys((-1, *self.layers), 0.0)
        whole = 1 if work.keeps_shards else parallel.tp  # others have embedding and head whole
        self.vocabulary *= whole / parallel.tp
        # Shards and gathers come padded to a multiple of the ranks.
        for part in collectives.rank_matrices(config, parallel, pp_rank):
            size = collectives.padded_size(work, part)
            self.held += size / part.mesh
            numbers[part.unit] += size * (whole if part.unit < 0 else 1)
        self.whole = sum(numbers.values())
        self.root = numbers.pop(-1)
        self.block, self.blocks_here = max(numbers.values()), sum(numbers.values())
        self.copies = self.block_copies = self.root_gathered = self.gathered_blocks = 0.0
        kept = work.fsdp and work.trainer.zero < 3  # weights, as they are computed with
        if not kept and (parallel.shards > 1 or parallel.divided):
            self.root_gathered = self.width * self.root
            ahead = 2 * self.block if work.fsdp and work.fsdp.reshard else self.blocks_here
            width = 1 if work.fp8 and work.fp8.all_gather else self.width
            self.gathered_blocks = width * ahead
        elif not kept and work.casts_weights:
            self.block_copies = _low_precision_copies(work)
            self.copies = self.block_copies + 2.0 * self.vocabulary
        width = config.hidden_size if work.trains and not work.lora else 0
        words, tokens = -(-config.padded_vocab_size // parallel.tp), work.gathered_tokens
        rows = chunk_rows(tokens, words, width, work.chunk_elements)
        self.rows = tokens if work.trainer.loss != "chunks" else rows


def _low_precision_copies(work: Work) -> float:
    """Bytes of the blocks' weights in low precision, which autocast keeps until the forward is over.

    Blocks that make their own copies, in bf16 or twice in FP8, keep them if nothing is recomputed;
    torchao keeps none. Without a backward there is nothing to keep them for.
    """
    own = work.compiled or bool(work.fp8) or work.linear == "te"
    blocks, copies = enumerate(block_parameters(work.config)), 0.0
    if work.fp8_backend != "torchao" and (work.trains or not own):
        copies = 2.0 * sum(n for i, n in blocks if not own or i not in work.recompute.blocks)
    if work.fp8_backend == "te" and not work.trains:  # for the next micro batch
        copies += (work.batch.grad_acc_steps > 1) * sum(block_parameters(work.config))
    return copies


def _loss(work: Work, sizes: _Sizes, gpu: bool) -> tuple[float, float]:
    """Bytes of the chunked loss: its temporary buffers, and the gradients it leaves behind."""
    w, V = sizes.width, -(-work.config.padded_vocab_size // work.parallelism.tp)
    chunk = sizes.rows * V
    # Compiled: logits and their gradient. Eager: fp32 logits; their gradient takes the same memory.
    logits = chunk * (2 * w if work.compiled else 4 if w == 4 else 4 + w)
    if work.trainer.loss == "fused":  # the gradient in place
        logits = chunk * w
    elif work.trainer.loss == "whole" and not work.compiled:
        logits = chunk * (w + 8)  # an fp32 copy, and its log-softmax
    # A GPU gets a copy of the weight with rows to a multiple of 16 bytes, unless autocast has made one.
    padded = gpu and V % (16 // w) and not (sizes.copies or work.trainer.loss != "chunks")
    copy = w * sizes.vocabulary if padded else 0
    if not work.trains:
        return logits + copy, 0.0
    hidden = w * work.gathered_tokens * work.config.hidden_size
    if work.normed_tokens < work.gathered_tokens:  # the hidden states of all tokens
        logits += hidden
    if work.lora:
        return logits + copy, hidden
    several = work.gathered_tokens > sizes.rows
    summed = (4 if several or not sizes.root_gathered else w) * sizes.vocabulary
    if several:
        # From the second chunk on, a chunk's product with the hidden states is added to the sum.
        product = 2 if w == 2 else 4 * (work.linear == "onednn")
        logits = max(logits, w * chunk + product * sizes.vocabulary)
    else:
        # When the sum is made, only the gradient of the logits is left.
        logits = max(logits, w * chunk + summed + (2 * sizes.vocabulary if w == 2 else 0)) - summed
    return logits + copy, summed + hidden


def block_activations(work: Work, fused_norm: bool, layer: int) -> float:
    """Bytes that a block keeps for its backward when nothing of it is recomputed.

    Autograd's hooks showed what our blocks save, with torch 2.11, torchao 0.18 and Transformer
    Engine 2.20: the inputs of norms, attention, the MLP. The other inputs of matmuls count too, unless
    they are recomputed or in FP8.
    """
    config, w, d = work.config, work.matmul_bytes, work.config.hidden_size
    norms = config.layers[layer].norms
    kept = norms * (w * d + 4 * (1 if config.rms_norm else 2)) * work.normed_tokens
    if config.rms_norm and not fused_norm and not work.compiled:
        kept += norms * d * (8 - w) * work.normed_tokens  # input and product in fp32
    kept += _attention_kept(work, layer) + _mlp_kept(work, layer)
    if work.lora:  # only adapters need their inputs; they keep what they map down to
        own = [adapter for adapter in work.lora.adapters if adapter.frozen.layer == layer]
        kept += w * sum(adapter.down.shape[0] for adapter in own) * work.gathered_tokens
        adapted = {adapter.frozen for adapter in own}
        modules = ("attn.qkv", "mlp.gate_up", "mlp.up", "mlp.down")
        layers = (x for x in config.linear_layers(layer) if x.module in modules)
        frozen = (x for x in layers if x not in adapted)
        kept -= w * sum(weight.shape[1] for weight in frozen) * work.gathered_tokens
    return kept


def _input_shards(work: Work) -> int:
    """How many ranks share the kept input of a layer that tp divides."""
    shared = work.keeps_shards and work.trainer.sequence_parallel
    return work.parallelism.tp if shared else 1


def _keeps_inputs(work: Work) -> bool:
    """Whether matmuls keep what kernels before them made: a compiler recomputes it for FP8."""
    return not work.compiled or not work.fp8 or work.fp8.recipe == "rowwise_with_gw_hp"


def states_kept(work: Work) -> float:
    """Bytes that a layer with states keeps for its backward; its chunks are in fp32.

    C positions a chunk, N x P numbers of a state, for each of H heads: copies of the convolution's input
    and its sum; matrices of C x C pairs; queries and keys for every head; what enters and leaves norms.
    """
    config, tp, w = work.config, work.parallelism.tp, work.matmul_bytes
    r = present(config.recurrent)
    key, value = r.groups * r.state / tp, r.heads * r.head_dim / tp
    heads, chunk = r.heads / tp, min(r.chunk, work.batch.seq_len)
    channels, gates = 2 * key + value, heads * (1 + r.delta)
    numbers = (
        config.hidden_size + sum(r.segments) / tp + value + gates + r.kernel * channels + 2 * value
    )
    if work.trainer.modules:  # one kernel, which recomputes what passes within it
        numbers = config.hidden_size + sum(r.segments) / tp + channels + 2 * value
        return w * numbers * work.gathered_tokens
    every, state = heads * r.state, r.state * value / chunk
    if r.delta:
        wide = 4 * key + 5 * every + value + (every + value) + value + state
        wide += 6 * chunk * heads + 3 * value + 10 * heads
    else:
        wide = 2 * key + 4 * every + 3 * value + state + 3 * chunk * heads + 4 * value + 7 * heads
    return (w * (numbers + r.delta * value) + 4 * wide) * work.gathered_tokens


def _attention_kept(work: Work, layer: int) -> float:
    """Bytes that attention keeps for its backward.

    The input of its first layer, as all tp ranks have it; q, k, v and their rotated copies; output and
    log-sum-exp. Exchanges between cp ranks leave what came, not what was sent.
    """
    config, parallel, te = work.config, work.parallelism, work.fp8_backend == "te"
    mixer = config.layers[layer].mixer
    if mixer is None:
        return 0.0
    if mixer == "recurrent":
        return states_kept(work)
    tp, cp, d = parallel.tp, parallel.cp, config.hidden_size
    heads, a, kv = config.num_attention_heads / tp, config.query_size / tp, work.kv_size
    values = heads * config.value_dim
    # Log-sum-exp; inputs of one byte each in FP8.
    other = 4 * heads + (d / _input_shards(work) if te else 0)
    numbers = d / _input_shards(work) if _keeps_inputs(work) and not te else 0
    other += _pairs_kept(work) / work.gathered_tokens
    in_blocks = _blocks_kept(work)  # in the place of q, k and v
    if in_blocks:
        other -= 4 * heads
    if m := config.latent:
        # Narrow layers and norms around them are for own tokens; all have the rotated part of keys.
        low = (2 * (m.q_rank or 0) + 2 * m.kv_rank + m.rope_dim) / _input_shards(work)
        heads_kept = in_blocks or a + heads * (m.nope_dim + m.value_dim) + a
        numbers += low + m.rope_dim * (tp > 1) + heads_kept + values
        other += 4 * 2
        if cp > 1 and not in_blocks:  # what was exchanged in place of what was sent
            numbers += values - heads * m.nope_dim
        if work.masked:  # values and outputs as wide as queries
            numbers += 2 * (a - values)
        return (work.matmul_bytes * numbers + other) * work.gathered_tokens
    fused, rotated = a + 2 * kv, config.qk_norm or config.layers[layer].rope is not None
    if config.qk_norm:
        other += 4 * (heads + work.kv_heads)
    if config.whole_qk_norm:
        numbers += a + kv  # made contiguous for the norms
    if in_blocks:
        numbers += (fused if config.qk_norm else 0) + in_blocks + a
    elif cp == 1:
        numbers += fused + (a + kv if rotated and not work.trainer.modules else 0) + a
    else:
        numbers += (fused if config.qk_norm else 0) + a + a
        numbers += fused if parallel.ulysses else 2 * kv * cp
    if te:
        other += a
    if config.output_gate:  # gates, their sigmoids, and the product
        numbers += 3 * a
    return (work.matmul_bytes * numbers + other) * work.gathered_tokens


def _blocks_kept(work: Work) -> float:
    """Numbers a token that attention in blocks makes for its backward (model/block_attention.py).

    Probabilities, and copies of q, k and v, the latter two once for each head.
    """
    if work.attention.causal != "blocks":
        return 0.0
    config, T = work.config, work.batch.seq_len
    n = math.ceil(T / max(256 // work.matmul_bytes, T // 8))
    sizes = 2 * config.query_size + config.num_attention_heads * config.value_dim
    return (config.num_attention_heads * T * (n + 1) / (2 * n) + sizes) / work.parallelism.tp


def _pairs_kept(work: Work) -> float:
    """Bytes of probabilities in fp32 that PyTorch's attention without a fused kernel keeps."""
    if work.attention.causal != "math":
        return 0.0
    heads = work.config.num_attention_heads
    return 4 * heads / work.parallelism.tp * work.batch.seq_len * work.gathered_tokens


def _mlp_kept(work: Work, layer: int) -> float:
    """The same of a block's MLP, or of its experts: their rows come from any rank."""
    config, fp8, tp = work.config, work.fp8, work.parallelism.tp
    d, e = config.hidden_size, config.experts_of(layer)
    if config.layers[layer].mlp is None:
        return 0.0
    if e is None:
        f = config.intermediate_size / tp
        numbers, other = (2 * f if config.gated_mlp else f), 0.0
        if fp8 and fp8.backend == "te":
            inputs = d / _input_shards(work)
            twice = fp8.recipe in ("blockwise", "mxfp8") and not work.trainer.modules
            other += inputs + inputs + f * (1 + twice)
        elif _keeps_inputs(work):
            numbers += d / _input_shards(work) + f
            if config.gated_mlp and not work.compiled and work.linear != "te":
                numbers += f  # the activation's output before the product
        elif fp8 and fp8.all_gather:
            numbers += f
        return (work.matmul_bytes * numbers + other) * work.gathered_tokens
    f, rows = e.size, work.expert_rows
    # Rows, both halves, activation, product, and the output before it is weighed; gpt-oss clamps.
    seen = e.latent or d
    numbers = rows * (2 * seen + 2 * e.wide * f + (3 * f if e.limit else 0))
    numbers += 2 * work.own_tokens * seen if e.latent else 0
    if work.fp8 and work.trainer.modules:  # inputs of matmuls, a byte each
        numbers -= rows * (seen + f) / 2
    other = rows * 8 * 3  # which row is whose
    numbers += d * work.own_tokens  # what the router sees
    other += work.own_tokens * e.number * 4 * 2
    if e.scores == "sigmoid":
        other += 4 * d * work.own_tokens
    if e.shared_size:
        s = e.shared_size / tp
        gathered = d * (tp > 1) * (not work.keeps_shards)
        numbers += (gathered + 2 * e.wide * s) * work.gathered_tokens
        numbers += (d + 2) * work.own_tokens * e.shared_gate
    return work.matmul_bytes * numbers + other


def _passing_activations(work: Work, layer: int) -> float:
    """Most bytes of a block that frees activations as it runs: in the MLP or before it.

    They include the block's input, the MLP's input and the norm's output: their callers hold them.
    """
    config, tp = work.config, work.parallelism.tp
    f, a, kv = config.intermediate_size / tp, config.query_size / tp, work.kv_size
    tokens, experts = work.gathered_tokens, config.experts_of(layer)
    if experts is not None:
        tokens, f = work.expert_rows, experts.size
    # Compiled, the activation and the product with it are one kernel.
    mlp = (3 if work.compiled else 4) * f if config.gated_mlp else 2 * f
    if work.fp8_backend == "torchao" and not work.compiled:
        mlp = (3 if config.gated_mlp else 2) * f + 4 * f  # to FP8 by way of two fp32 copies
    more = 0.0
    if experts is not None:
        mlp += 2 * config.hidden_size
        more = _sums_passing(work)
    rotated = 0 if config.layers[layer].rope is None else a + kv
    attention = (a + 2 * kv) + rotated + a + _blocks_kept(work)
    passing = max(mlp * tokens, attention * work.gathered_tokens)
    return work.matmul_bytes * (3 * config.hidden_size * work.normed_tokens + passing) + more


def _sums_passing(work: Work) -> float:
    """Bytes of tokens that came from other ranks for experts, and of their sums in fp32."""
    if work.parallelism.ep == 1 or work.trainer is not OUR_TRAINER:
        return 0.0
    size = present(work.config.experts).latent or work.config.hidden_size
    return work.own_tokens * collectives.tokens_sent(work) * size * (work.matmul_bytes + 4)


def _kept(work: Work, layers: Iterable[int], fused_norm: bool) -> float:
    """Bytes that these blocks keep between forward and backward."""
    kinds = alike(work, layers)
    return sum((len(same) * _block_kept(work, same[0], fused_norm) for same in kinds), 0.0)


def _block_kept(work: Work, layer: int, fused_norm: bool) -> float:
    """The same of one block."""
    config, w, tp = work.config, work.matmul_bytes, work.parallelism.tp
    d, f, policy = config.hidden_size, config.intermediate_size, work.recompute.policy
    if layer not in work.recompute.blocks:
        return block_activations(work, fused_norm, layer)
    if policy == "block":
        return w * work.normed_tokens * d
    if policy == "cheap":
        return block_activations(work, fused_norm, layer) - w * _cheap(work, layer)
    if policy == "mlp":
        return block_activations(work, fused_norm, layer) - _mlp_kept(work, layer)
    a, kv = config.query_size / tp, work.kv_size
    part = 1.0 if policy == "op" else 0.5
    outputs = part * (1 if work.compiled else 2) * d  # compiled, not the last matmul's
    elements = part * (a + 2 * kv) + a + part * (2 * f if config.gated_mlp else f) / tp
    elements += _blocks_kept(work)
    other = 4 * config.num_attention_heads / tp
    kept = work.gathered_tokens * (w * elements + other) + w * work.normed_tokens * (d + outputs)
    if tp > 1 and not work.trainer.tp_shards:  # sums of which each rank has a part
        kept += w * work.gathered_tokens * 2 * d
    return kept


def offloaded_bytes(work: Work, layers: Iterable[int]) -> float:
    """Bytes that --offload-activations sends to the host in the forward of a micro batch, and back."""
    return _kept(work, layers, fused_norm=True) if work.offload else 0.0


def _kept_here(work: Work, layers: Iterable[int], fused_norm: bool) -> float:
    """Bytes of them that are on the device at a time: of a block in backward, and of the one before."""
    block = max(_block_kept(work, layer, fused_norm) for layer in layers)
    return min(2 * block, _kept(work, layers, fused_norm))


def _backward_buffers(work: Work, layer: int) -> float:
    """Bytes of gradients of the MLP's activations, beyond the activations freed by then.

    Of experts also those of rows: weighed and not weighed, and under --ep those that came.
    """
    config, wide = work.config, 2 if work.config.gated_mlp else 1
    experts = config.experts_of(layer)
    if experts is not None:
        rows = work.expert_rows
        passing = (2 + (work.parallelism.ep > 1)) * (experts.latent or config.hidden_size)
        numbers = rows * (wide * experts.size + passing)
        return work.matmul_bytes * numbers + _sums_passing(work)
    tp = work.parallelism.tp
    again = config.hidden_size * (_input_shards(work) > 1)  # inputs, gathered again
    mlp = work.gathered_tokens * (wide * config.intermediate_size / tp + again)
    return max(work.matmul_bytes * mlp, _pairs_kept(work))


def largest_batch(memory_of: Callable[[int], float], limit: float) -> int:
    """The largest micro batch that stays within `limit` bytes at its peak; 0 if not even 1 does.

    `memory_of(bsz)` gives the bytes of a micro batch, which grow with it.
    """
    return bisect.bisect_right(range(1, 2**21), limit, key=memory_of)
