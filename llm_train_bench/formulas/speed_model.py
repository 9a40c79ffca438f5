"""How long a training step takes, by a model of its parts. Needs no torch.

    matmuls      FLOPs over the highest measured rate, worse for small sides; no faster than memory
    attention    causal FLOPs over what its kernel reaches, less for few keys and small heads
    memory       bytes that norms, activations, casts, loss and optimizer read and write, over bandwidth
    network      latency + bytes over bus bandwidth, a block's hides behind a block's computation
    host         kernels x the time to launch one; a step is no shorter than that
    power        joules of operations and bytes over what the power limit leaves; likewise

Fitted constants and device data are in configs/hardware.json; bytes and kernels counted from the
code are here. benchmarks/estimate_vs_published.py compares the outcome with published figures.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from llm_train_bench.base.hardware import Hardware
from llm_train_bench.formulas import collectives
from llm_train_bench.formulas.flops import (
    attended_keys,
    attention_width,
    matmul_flops,
    muon_flops,
    recurrent_flops_per_token,
)
from llm_train_bench.formulas.memory_model import offloaded_bytes, states_kept
from llm_train_bench.formulas.step_events import Pieces, step_seconds
from llm_train_bench.formulas.work import PASS_FORWARDS, Work, alike, block_parameters
from llm_train_bench.model.weights import Weight, sharded_dimension


@dataclasses.dataclass(frozen=True)
class SpeedEstimate:
    """Seconds of one optimizer step on one device.

    The `parts` add up to the step, except for "hidden communication". "tokens between ranks" is the time
    of tensor, context and expert parallelism. "beside communication" is what computation loses to
    communication that runs beside it.
    """

    step_s: float
    parts: dict[str, float]


def estimate_speed(work: Work, gpu: Hardware) -> SpeedEstimate:
    """The time of a step.

    Each group of a pipeline has the seconds of its pieces; step_events.py lays them out.
    """
    device, gpu = gpu, _by_trainer(work, gpu)
    groups = [group_pieces(work, gpu, group) for group in range(work.parallelism.pp)]
    pieces = [piece for piece, _ in groups]
    merged = () if work.trainer.overlaps else ("network",)
    if gpu.platform == "cpu":  # exchanges take the cores that compute
        merged = "network", "send"
    laid = step_seconds(work, pieces, merged)
    micro_steps, slowest = work.batch.grad_acc_steps, slowest_node(work, gpu)
    pace = max(range(work.parallelism.pp), key=lambda group: pieces[group].computing)
    idle = laid.seconds - micro_steps * pieces[pace].computing - pieces[pace].optimizer
    idle = idle if idle > 1e-12 else 0.0  # below a picosecond it is rounding
    exposed = min(idle, laid.exposed) if work.parallelism.pp > 1 else idle
    hidden = 0.0 if merged or laid.network - exposed < 1e-12 else laid.network - exposed
    beside = hidden * _slowing(work, gpu, pieces[pace].network, pace)
    parts = {name: micro_steps * seconds for name, seconds in groups[pace][1].items()}
    parts["beside communication"] += beside
    parts |= {
        "optimizer": pieces[pace].optimizer,
        "pipeline bubble": idle - exposed,
        "exposed communication": exposed,
        "hidden communication": hidden,
        "slowest node": (laid.seconds + beside) * (slowest - 1),
    }
    optimizer = max(0.0, parts["optimizer"] - _muon_time(work, gpu))
    joules = step_joules(work, device, parts["memory-bound"] + optimizer)
    limited = joules / max(1.0, gpu.tdp_w - gpu.constants.waiting_w)
    step_s = (laid.seconds + beside) * slowest
    parts["power limit"] = max(0.0, limited - step_s)
    return SpeedEstimate(max(step_s, limited), parts)


def _by_trainer(work: Work, gpu: Hardware) -> Hardware:
    """The device with all rates times the level of the work's trainer; its host stays as fast."""
    level, c = work.trainer.level_on(gpu.family or gpu.name), gpu.constants
    if level == 1.0:
        return gpu
    fitted = gpu.fitted | {"level": c.level * level, "bandwidth": c.bandwidth * level}
    links = ("ring_gb_per_s", "peer_gb_per_s", "nic_gb_per_s")
    rates = {name: rate * level for name in links if (rate := getattr(gpu, name))}
    return dataclasses.replace(gpu, fitted=fitted, **rates)


def _slowing(work: Work, gpu: Hardware, network_s: float, pp_rank: int) -> float:
    """The part of collectives' time that computation beside them loses, by the bandwidth they take."""
    nic = max(gpu.nic_gb_per_s, gpu.ring_gb_per_s / gpu.constants.network)
    fast = dataclasses.replace(gpu, nic_gb_per_s=nic, peer_gb_per_s=None)
    least_s = Pieces({}, {}, 0.0, 0.0, **_exchanges(work, fast, pp_rank)).network
    traffic = gpu.constants.beside_bytes * gpu.ring_gb_per_s * 1e9 * least_s
    return traffic / (gpu.memory_rate * network_s) if network_s else 0.0


def step_joules(work: Work, gpu: Hardware, memory_s: float) -> float:
    """Energy of a step on a device, beyond that of waiting [J]; 0 where the device's is not known.

    Of operations and of bytes: those of `memory_s` seconds at the trainer's rate, and of matmuls. The
    backward of attention computes its scores again.
    """
    c, config = gpu.constants, work.config
    if work.amp == "off":
        return 0.0
    total, low, moved = matmul_flops(work)
    widths = attention_width(config) / work.parallelism.tp
    for layer in work.layers_of(0):
        if config.layers[layer].attends:
            keys = _keys(work, layer)
            again = layer in work.recompute.blocks and work.recompute.policy == "block"
            passes = (3.5 if work.trains else 1) + again
            total += work.batch.grad_acc_steps * work.gathered_tokens * widths * keys * passes
    joules = c.tflop_joules * (total - low) + c.low_tflop_joules * low
    moved += memory_s * _by_trainer(work, gpu).memory_rate
    return joules / 1e12 + c.gb_joules * moved / 1e9


def least_time(work: Work, gpu: Hardware) -> float:
    """A bound on a step's time without events [s]: the last group's computation and the bubble, less 3 %.

    The bubble of a pipeline is (p - 1) / v micro batches (Narayanan et al. 2021, section 2.2).
    """
    parallel, gpu = work.parallelism, _by_trainer(work, gpu)
    piece, _ = group_pieces(work, gpu, parallel.pp - 1)
    bubble = (parallel.pp - 1) / parallel.virtual * (piece.computing - piece.head)
    computing = work.batch.grad_acc_steps * piece.computing + bubble
    return (0.97 * computing + piece.optimizer) * slowest_node(work, gpu)


def group_pieces(work: Work, gpu: Hardware, pp_rank: int) -> tuple[Pieces, dict[str, float]]:
    """The pieces of a group of ranks, and what a micro batch's computation consists of [s].

    Casts, copies and launches lie on blocks and head alike, what moves tokens on the blocks.
    """
    c, layers = gpu.constants, work.layers_of(pp_rank)
    passes: dict[int, tuple[float, float]] = {}
    times = [0.0, 0.0, 0.0]
    for same in alike(work, layers):
        both = block_time(work, same[0], gpu)
        times = [
            t + len(same) * sum(x) for t, x in zip(times, zip(*both, strict=True), strict=True)
        ]
        passes |= dict.fromkeys(same, (sum(both[0]), sum(both[1])))
    forward, backward = (sum(p[i] for p in passes.values()) for i in (0, 1))
    last = work.config.num_hidden_layers - 1 in layers
    head = head_time(work, gpu) if last else (0.0, 0.0)
    memory, held = _weights_time(work, gpu, pp_rank)
    time = PartTime(times[0] + head[0], times[1], times[2] + head[1] + memory)
    hidden = _hidden_part(work, layers, gpu) if "tp" in work.trainer.hide else 0.0
    moves = _moves(work, time, collectives.token_time(work, gpu, pp_rank), hidden)
    compute = sum(time)
    communicates = work.world > 1 and (work.fsdp or work.trains) and work.trainer.overlaps
    beside = compute * c.beside_communication * bool(communicates)
    # Copies to the host run beside the forward, and those back beside the backward.
    sent = offloaded_bytes(work, layers) / (gpu.host_gb_per_s * c.network * 1e9)
    part = forward / (forward + backward)
    waits = max(0.0, sent - part * compute) + max(0.0, sent - (1 - part) * compute)
    host = _launching(work, layers, gpu)
    computed = compute + beside + moves + waits + host * c.serial_host
    micro = max(computed, host)
    stretch = max(1.0, (micro - moves) / (forward + backward + sum(head)))
    each = stretch + moves / (forward + backward)
    pieces = Pieces(
        {i: t[0] * each for i, t in passes.items()},
        {i: t[1] * each for i, t in passes.items()},
        sum(head) * stretch,
        _optimizer_time(work, held, gpu),
        **_exchanges(work, gpu, pp_rank),
    )
    idle = micro - computed
    return pieces, {
        "matmuls": time.matmuls,
        "attention": time.attention,
        "memory-bound": time.memory,
        "tokens between ranks": moves,
        "waiting for offloaded activations": waits,
        "beside communication": beside,
        "waiting for the host": idle if idle > 1e-12 else 0.0,
    }


def _launching(work: Work, layers: Sequence[int], gpu: Hardware) -> float:
    """Seconds in which the host launches a micro batch's kernels."""
    c, config, trainer = gpu.constants, work.config, work.trainer
    kernels = c.kernels_compiled if work.compiled else c.kernels_eager
    routing, each = c.kernels_routing, c.launch_s
    if not c.serial_host and (trainer.modules or not work.compiled):
        each = c.launch_eager_s
    if trainer.modules:
        kernels = c.kernels_te_low if work.fp8 else c.kernels_te
        routing = c.kernels_fused if trainer.fused_routing else c.kernels_modules
        if trainer.graphs != "none":
            kernels = routing = 0.0
        if config.experts:  # a loop in C++ launches those of experts
            number = config.experts.number / work.parallelism.ep * c.launch_s / c.launch_eager_s
            routing += number * (c.kernels_expert_low if work.fp8 else c.kernels_expert)
    if work.cuda_graphs or trainer.graphs == "full":
        kernels, routing = 3.0, 0.0
    again = len(work.recompute.blocks) / len(work.layers) * (work.recompute.policy == "block")
    passes = (3 + again) / 3 if work.trains else 1 / 3
    blocks = (len(layers) + 2) * (kernels * passes + (20 if work.fsdp else 0))
    routers = sum(config.layers[i].mlp == "experts" for i in layers)
    return each * (blocks + routers * routing * passes)


def _exchanges(work: Work, gpu: Hardware, pp_rank: int) -> dict[str, Any]:
    """The fields of a group's Pieces that say what its weights and gradients take on the network."""
    if work.fsdp:
        send_s = collectives.send_time(work, gpu) if work.parallelism.pp > 1 else 0.0
        return {"units": collectives.unit_times(work, gpu, pp_rank), "send_s": send_s}
    every = work.lora.weights if work.lora else work.config.weights.values()
    sizes = collectives.ddp_bytes([weight for weight in every if len(weight.shape) > 1], work)
    if work.ddp is None or not sizes:
        return {}
    bucket = min(sizes["all_reduce"], work.ddp.bucket_cap_mb * 2**20)
    buckets, numbers = sizes["all_reduce"] / bucket, block_parameters(work.config)
    whole = sum(numbers) + work.config.padded_vocab_size * work.config.hidden_size
    ring = (work.world, gpu.per_node, gpu)
    return {
        "filled": {layer: buckets * numbers[layer] / whole for layer in work.layers},
        "buckets": buckets,
        "bucket_s": collectives.collective_time("all_reduce", bucket, *ring),
        "after": collectives.collective_time("all_gather", sizes.get("all_gather", 0), *ring),
    }


def _hidden_part(work: Work, layers: Sequence[int], gpu: Hardware) -> float:
    """The part of tp's exchanges that fits beside the matmuls that need, or make, what they move."""
    tokens, tp, hidden, whole = work.gathered_tokens, work.parallelism.tp, 0.0, 0.0
    for same in alike(work, layers):
        for weight in work.config.matrices[same[0]]:
            if weight.split is not None and not weight.of_experts:
                n, k = weight.shard(work.parallelism).sizes
                size = tokens * (k if n < weight.shape[0] else n) * work.matmul_bytes
                moved = collectives.collective_time("all_gather", size, tp, gpu.per_node, gpu)
                beside = matmul_time(work, tokens, n, k, _converted(work, weight), gpu)
                hidden += len(same) * min(moved, beside)
                whole += len(same) * moved
    return hidden / whole if whole else 0.0


def _moves(work: Work, time: "PartTime", moves: dict[str, float], hidden: float) -> float:
    """Seconds of exchanges of tokens that are not hidden behind computation.

    Hidden tp goes in as many parts as there are ranks, of which the first waits (Wang et al. 2023,
    Overlap communication with dependent computation via decomposition); cp behind attention, as a ring.
    """
    kinds = ("beside", *work.trainer.hide)
    behind = {"cp": time.attention, "ep": sum(time), "beside": time.matmuls / 3}
    behind["tp"] = moves["tp"] * (1 - 1 / work.parallelism.tp) * hidden
    return sum(max(0.0, s - behind[k]) if k in kinds else s for k, s in moves.items())


def _optimizer_time(work: Work, numbers: float, gpu: Hardware) -> float:
    """Seconds in which the optimizer and clipping read and write what belongs to so many parameters.

    AdamW reads parameter, gradient and two moments and writes three, SGD with momentum 3 and 2; clipping
    reads, and scales.
    """
    if work.pass_type != "step":
        return 0.0
    weight = work.weight_bytes
    each = 3 * weight + 2 * work.state_bytes
    each += 8 * (work.trainer.weights == "master")
    share = 1 / work.world if work.shares_states else 1
    moved = (each * share + 3 * weight) * numbers
    return moved / (gpu.memory_rate * gpu.constants.optimizers) + _muon_time(work, gpu)


def _muon_time(work: Work, gpu: Hardware) -> float:
    """Seconds of Muon's iterations on matrices that ranks share out, and of sending these to and fro."""
    if work.optimizer != "muon":
        return 0.0
    c, config, flops = gpu.constants, work.config, 0
    for same in alike(work, work.layers_of(0)):
        for weight in config.matrices[same[0]]:
            number = weight.shape[0] if weight.of_experts else 1
            flops += len(same) * number * muon_flops(weight)
    rate = _bf16_tflops(gpu) * 1e12 * c.level * c.sustained
    ranks = work.parallelism.shards if work.fsdp else 1
    size = 2 * collectives.muon_numbers(work, 0) if ranks > 1 else 0.0
    moving = 2 * collectives.collective_time("all_to_all", size, ranks, gpu.per_node, gpu)
    return flops / ranks / rate + moving


def _bf16_tflops(gpu: Hardware) -> float:
    """The rate of large matmuls in bf16, measured or by the usual part of the peak."""
    return gpu.measured_bf16_tflops or gpu.bf16_tflops * gpu.constants.bf16_of_peak


def slowest_node(work: Work, gpu: Hardware) -> float:
    """The factor on a step's time by which all wait for the slowest of several nodes."""
    nodes = max(1.0, work.world / gpu.per_node)
    return 1 + gpu.constants.slowest_node * math.log2(nodes)


class PartTime(NamedTuple):
    """Seconds of matmuls, attention, and what memory bounds."""

    matmuls: float
    attention: float
    memory: float


def block_time(work: Work, layer: int, gpu: Hardware) -> tuple[PartTime, PartTime]:
    """Forward and backward of a block for one micro batch, with what the backward recomputes."""
    again, policy = layer in work.recompute.blocks, work.recompute.policy
    block, mlp, last = _block_matmuls(work, layer, gpu)
    forward, backward = _attention(work, layer, gpu)
    moved = block_bytes(work, layer, gpu.constants.layer_norms) / gpu.memory_rate
    if not work.trains:
        return PartTime(block, forward, moved), PartTime(0.0, 0.0, 0.0)
    # Recomputing stops before the last matmul, whose output no gradient needs.
    repeated = {"block": block - last, "every-other-matmul": (block - last) / 2, "mlp": mlp - last}
    own = [weight for weight in work.lora.weights if weight.layer == layer] if work.lora else ()
    adapters = sum(
        matmul_time(work, work.gathered_tokens, rows, width, False, gpu)
        for rows, width in (weight.shape for weight in own)
    )
    gradients = 1 if work.lora else 2  # of inputs, and of weights
    return PartTime(block + adapters, forward, moved), PartTime(
        gradients * block + 2 * adapters + again * repeated.get(policy, 0.0),
        backward + forward * (again and policy == "block"),
        moved * (PASS_FORWARDS[work.pass_type] - 1 + again),
    )


def head_time(work: Work, gpu: Hardware) -> tuple[float, float]:
    """Seconds of the head's matmuls, and of the loss over its logits, both passes of a micro batch."""
    rows = work.config.padded_vocab_size
    one = matmul_time(work, work.own_tokens, rows, work.config.hidden_size, False, gpu)
    eager = 26 if work.matmul_bytes == 2 else 32  # bytes a logit of the loss and its gradient
    loss = work.own_tokens * rows * (8 if work.compiled else eager)
    passes = PASS_FORWARDS[work.pass_type] - bool(work.lora and work.trains)
    return passes * one, loss / (gpu.memory_rate * gpu.constants.losses)


def _weights_time(work: Work, gpu: Hardware, pp_rank: int) -> tuple[float, float]:
    """Seconds of casts and copies of weights and gradients in a micro batch; parameters learnt here."""
    fsdp, parallel, moved = work.fsdp, work.parallelism, 0.0
    parts = collectives.rank_matrices(work.config, parallel, pp_rank)
    n = sum(math.prod(part.shape) for part in parts)
    if not fsdp and work.casts_weights:
        moved += 6 * n  # autocast casts every weight in every forward pass
    if parallel.shards > 1 or fsdp:  # FSDP copies on one rank too
        # What a gather brought is copied to where the block's weights lie: read and written.
        # What is not sharded by its first dimension is put in order besides, and its gradient too.
        once = parallel.pp > 1 or work.trainer.zero < 3
        gathers = 2 if work.trains and fsdp and fsdp.reshard and not once else 1
        twice = sum(math.prod(p.shape) for p in parts if sharded_dimension(p.shape, p.mesh))
        copied = gathers * n + (gathers + work.trains) * twice
        moved += 2 * work.matmul_bytes * copied / (work.batch.grad_acc_steps if once else 1)
    if work.trains and not work.lora:
        # Gradients are written, and cast to fp32: under FSDP all of them, before they are reduced.
        moved += 6 * n
    held = sum(math.prod(part.shape) / part.mesh for part in parts)
    if work.trainer.zero == 0:
        held = n
    elif work.trainer.zero < 3:
        held /= parallel.dp_replicate
    if work.lora:  # adapters are learnt
        held = work.lora.numbers(work.layers_of(pp_rank)) / parallel.shards
    return moved / gpu.memory_rate, held


def matmul_time(work: Work, m: float, n: float, k: float, fp8: bool, gpu: Hardware) -> float:
    """Seconds of one (m, k) x (k, n) matmul, and of casting its inputs to FP8."""
    c, width = gpu.constants, work.matmul_bytes
    recipe = work.fp8.recipe if work.fp8 else ""
    if fp8:
        peak = gpu.fp4_tflops if recipe == "nvfp4" else gpu.fp8_tflops
        measured = gpu.measured_fp8_tflops if recipe != "nvfp4" else None
        rate = measured or (peak or gpu.bf16_tflops) * c.fp8_of_peak
    elif work.amp == "off" and not work.tf32:
        rate = gpu.fp32_tflops * c.fp32_of_peak
    else:
        rate = _bf16_tflops(gpu)
        rate /= 2 if work.amp == "off" else 1  # TF32 has half the rate
    efficiency = math.prod(side / (side + c.half_side) for side in (m, n, k))
    moved = (m * k + k * n) * (1 if fp8 else width) + m * n * width
    rate *= 1e12 * c.level * c.sustained * efficiency
    seconds = max(2 * m * n * k / rate, moved / gpu.memory_rate)
    scale = 0 if recipe == "delayed" else 2  # whose scales are of steps before
    if fp8 and work.trainer.modules:
        # Other kernels write inputs in 8 bits. Of the three matmuls, gradients are read once and written
        # in both orientations; weights are read for their scale, read and written, once a step.
        cast = (m * n * (2 + 2) + k * n * (scale + 2 + 1) / work.batch.grad_acc_steps) / 3
        seconds += cast / gpu.memory_rate
    elif fp8:
        # Both inputs are read for their scale, then read and written in 8 bits. Rowwise scaling
        # does so twice: the backward needs them scaled along the other side.
        passes = 2 if recipe.startswith("rowwise") else 1
        seconds += passes * (m * k + k * n) * (scale + 2 + 1) / gpu.memory_rate
    return seconds


# Rows of an expert that a kernel of a grouped matmul takes at a time.
GROUPED_ROWS = 128


def _converted(work: Work, weight: Weight) -> bool:
    """Whether a weight's matmuls are in FP8."""
    every = work.trainer.modules and not weight.stays_exact
    return work.fp8 is not None and (every or weight.module in work.fp8.layers)


def _block_matmuls(work: Work, layer: int, gpu: Hardware) -> tuple[float, float, float]:
    """Forward seconds of a block's matmuls, of its MLP's, and of the last; a backward takes two."""
    seconds = mlp = last = 0.0
    for weight in work.config.matrices[layer]:
        converted = _converted(work, weight)
        if not weight.of_experts:
            n, k = weight.shard(work.parallelism).sizes
            # What every tp rank has whole sees its own tokens.
            tokens = work.own_tokens if weight.split is None else work.gathered_tokens
            one = matmul_time(work, tokens, n, k, converted, gpu)
            seconds, last = seconds + one, one if weight.module == "mlp.down" else last
            mlp += one if weight.module.startswith("mlp.") else 0.0
            continue
        # Each rank gets as many rows as it sends, in the mean; an expert's last tile is filled up.
        rows = work.expert_rows * work.imbalance
        number, n, k = weight.shard(work.parallelism).sizes
        filled = max(1.0, GROUPED_ROWS * math.ceil(rows / number / GROUPED_ROWS) * number / rows)
        whole = matmul_time(work, rows * filled, n, k, converted, gpu)
        whole /= 1.0 if work.amp == "off" else gpu.constants.grouped
        weights = number * n * k * (1 if converted else work.matmul_bytes) / gpu.memory_rate
        seconds, mlp = seconds + max(whole, weights), mlp + max(whole, weights)
    return seconds, mlp, last


# FlashAttention 1's rate over FlashAttention 2's (Dao 2023, arXiv 2307.08691, figures 4 to 6).
FLASH1 = 0.55


def _keys(work: Work, layer: int) -> float:
    """Keys that a query is multiplied with, in the mean: all by plain attention, with a mask."""
    if work.attention.causal == "math":
        return work.batch.seq_len
    return attended_keys(work.batch.lengths, work.config.layers[layer].window, causal=True)


def _attention(work: Work, layer: int, gpu: Hardware) -> tuple[float, float]:
    """Seconds of a layer's attention, or of its states in fp32; forward and backward."""
    config, amp, c, tp = work.config, work.amp, gpu.constants, work.parallelism.tp
    spec = config.layers[layer]
    if spec.mixer is None:
        return 0.0, 0.0
    if spec.mixer == "recurrent":
        each = recurrent_flops_per_token(config, work.batch.lengths, causal=False) / tp
        seconds = work.gathered_tokens * each / (gpu.fp32_tflops * 1e12 * c.fp32_of_peak)
        return seconds, 2 * seconds
    kernel = work.trainer.attention
    cudnn = c.cudnn_forward and amp != "off" and work.attention.causal in ("auto", "cudnn")
    cudnn = cudnn and kernel == "auto"
    window, keys = spec.window, _keys(work, layer)
    flops = work.gathered_tokens * attention_width(config) * keys / tp
    if cudnn and not work.batch.documents and (window is None or window >= work.batch.seq_len):
        parts = c.cudnn_forward, c.cudnn_backward
        half_keys, half_head = c.cudnn_half_keys, c.cudnn_half_head
    else:
        parts = c.attention_forward, c.attention_backward
        half_keys, half_head = c.half_keys, c.half_head
    head = min(1.0, config.head_dim / (config.head_dim + half_head) * (1 + half_head / 128))
    peak = gpu.bf16_tflops
    if amp == "off" and work.tf32:
        peak /= 2
    elif amp == "off":  # without tensor cores the rate does not depend on the keys
        peak, half_keys = gpu.fp32_tflops, 0.0
    rate = peak * 1e12 * c.level
    rate *= head * keys / (keys + half_keys) * (FLASH1 if kernel == "flash1" else 1.0)
    return flops / (rate * parts[0]), 2 * flops / (rate * parts[1])


# Bytes that adding biases to experts' results moves of a number, in all passes: a product in fp32 with
# the router's weight, its sum, torch.cat, a cast, and gradients (Megatron-LM's experts.py, _apply_bias).
BIASED = 64


def block_bytes(work: Work, layer: int, layer_norms: float) -> float:
    """Bytes that a block's forward moves outside of matmuls and attention.

    Those of layer norms count as 1 / `layer_norms` times as many, since they are so much slower.
    """
    config, w = work.config, 4 if work.trainer.elementwise == "fp32" else work.matmul_bytes
    spec, e, tp = config.layers[layer], config.experts_of(layer), work.parallelism.tp
    d, f = config.hidden_size, config.intermediate_size / tp
    a, kv = config.query_size / tp, work.kv_size
    # Compiled: norm with the residual before it, rotary embedding, activation: once each.
    # Plain: to fp32, square, mean, scale, back, weigh: 34 bytes of a number in bf16, 28 in fp32.
    alone = 2 if work.trainer.norms == "fused" else 17 if w == 2 else 7
    norms = spec.norms * (4 if work.compiled else 3 + alone) * d
    norms /= 1.0 if config.rms_norm else layer_norms
    rope = 2 if work.compiled else 7 if w == 2 else 5  # a product in fp32 between its two kernels
    gated = 3 if work.compiled else 5
    heads = 0 if spec.rope is None else rope * (a + kv)
    if config.qk_norm and (work.trainer.modules or not work.compiled):  # else one with rotating
        heads += alone * (a + kv)
    heads += 3 * a * config.output_gate
    if m := config.latent:  # a share of each head turns; queries and keys are put together
        size = config.num_attention_heads / tp
        heads = rope * (size + 1) * m.rope_dim + 2 * 2 * a + 5 * ((m.q_rank or 0) + m.kv_rank)
    if spec.mixer is None:
        heads = 0
    if work.attention.causal == "math" and spec.attends:  # scores and softmax are read and written
        pairs = config.num_attention_heads / tp * work.batch.seq_len
        heads += (6 if work.compiled else 12) * pairs  # eager: scaled, masked and cast apart
    elements = norms * work.normed_tokens + heads * work.gathered_tokens
    if spec.mixer == "recurrent":  # what is kept is written, and read by what comes next
        elements = norms * work.normed_tokens + 2 * states_kept(work) / w
    if spec.mlp is None:
        return w * elements
    if e is None:
        elements += (gated * f if config.gated_mlp else 2 * f) * work.gathered_tokens
        return w * elements
    rows = work.expert_rows * work.imbalance
    # Rows are put in order and back, sent and received likewise, weighed and added up. DeepEP and
    # HybridEP receive them, put them in order and back, and send: no kernel weighs or adds up apart.
    moves = 4 + 3 + (4 if work.parallelism.ep > 1 else 0)
    if work.trainer.rows_once and work.parallelism.ep > 1:
        moves = 6
    if e.biases and work.trainer.modules and not work.trainer.fused_experts:
        moves += BIASED / w / PASS_FORWARDS["step"]
    activation = (gated if e.gated else 2) * (not work.trainer.fused_experts)
    elements += rows * (activation * e.size + moves * (e.latent or d))
    elements += (gated if e.gated else 2) * e.shared_size / tp * work.gathered_tokens
    return w * elements + work.own_tokens * e.number * 4 * 6  # scores, in fp32
