"""How long a training step takes, by a model of its parts. Needs no torch.

    matmuls      FLOPs over the highest measured rate, worse for small sides; no faster than memory
    attention    causal FLOPs over what its kernel reaches, less for few keys and small heads
    memory       bytes that norms, activations, casts, loss and optimizer read and write, over bandwidth
    network      latency + bytes over bus bandwidth, a block's hides behind a block's computation
    host         kernels x the time to launch one; a step is no shorter than that

Fitted constants and device data are in configs/hardware.json; bytes and kernels counted from the
code are here. benchmarks/estimate_vs_published.py compares the outcome with published figures.
"""

import dataclasses
import math

from bench.formulas.collectives import communication_time
from bench.formulas.flops import attended_keys
from bench.formulas.hardware import Constants, Hardware, constants
from bench.formulas.parameters import matrices, n_numbers, parameter_shapes
from bench.formulas.work import PASS_FORWARDS, Work


@dataclasses.dataclass(frozen=True)
class SpeedEstimate:
    """Seconds of one optimizer step on one device."""

    step_s: float
    matmul_s: float
    attention_s: float
    memory_s: float
    optimizer_s: float
    communication_s: float
    exposed_s: float
    host_s: float


def estimate_speed(work: Work, gpu: Hardware, per_node: int = 8) -> SpeedEstimate:
    """The time of a step; `per_node` GPUs share a machine."""
    c = dataclasses.replace(constants(), **gpu.fitted)
    config, train, passes = work.config, work.trains, PASS_FORWARDS[work.pass_type]
    layers, micro_steps = config.num_hidden_layers, work.batch.grad_acc_steps
    again = work.recompute.blocks
    whole_again = again if work.recompute.policy == "block" else ()
    shards = work.fsdp.shards if work.fsdp else None

    blocks = [_block_matmuls(work, i, gpu, c) for i in work.layers]
    head = passes * matmul_time(
        work, work.batch.micro_tokens, config.padded_vocab_size, config.hidden_size, False, gpu, c
    )
    matmuls = passes * sum(blocks) + sum(blocks[i] for i in whole_again) + head
    forward, backward = _attention(work, gpu, c)
    attention = forward + (backward if train else 0.0) + forward * len(whole_again) / layers
    rate = gpu.memory_tb_per_s * 1e12 * c.bandwidth
    moved = block_bytes(work)
    memory = (layers * moved * passes + len(again) * moved) / rate
    memory += _loss_bytes(work) / rate
    n = n_numbers(matrices(parameter_shapes(config)))
    if shards is None and work.amp != "off":
        memory += 6 * n / rate  # autocast casts every weight in every forward pass
    if train:
        # Gradients are written, and cast to fp32: under FSDP all of them, before they are reduced.
        memory += 6 * n / rate
    compute = matmuls + attention + memory
    optimizer = 0.0
    if work.pass_type == "step":
        # AdamW reads parameter, gradient and two moments and writes three; clipping reads and scales.
        optimizer = (28 + 12) * n / (shards or 1) / rate

    total, exposed = communication_time(work, gpu, per_node, compute, c)
    compute *= 1 + c.beside_communication * (total > 0)
    kernels = c.kernels_compiled if work.compiled else c.kernels_eager
    kernels = 3 if work.cuda_graphs else kernels * (1 if train else 1 / 3)
    host = c.launch_s * (layers + 2) * (kernels + (20 if shards else 0))
    step = micro_steps * max(compute, host) + optimizer
    # Under DDP gradients travel once a step; under FSDP everything travels in every micro step.
    travels = micro_steps if shards else 1
    slowest = 1 + c.slowest_node * math.log2(max(1.0, work.world / per_node))
    return SpeedEstimate(
        step_s=(step + travels * exposed) * slowest,
        matmul_s=micro_steps * matmuls,
        attention_s=micro_steps * attention,
        memory_s=micro_steps * memory,
        optimizer_s=optimizer,
        communication_s=travels * total,
        exposed_s=travels * exposed,
        host_s=micro_steps * host,
    )


def matmul_time(
    work: Work, m: float, n: float, k: float, fp8: bool, gpu: Hardware, c: Constants
) -> float:
    """Seconds of one (m, k) x (k, n) matmul, and of casting its inputs to FP8."""
    width = work.matmul_bytes
    if fp8:
        rate = gpu.measured_fp8_tflops or (gpu.fp8_tflops or gpu.bf16_tflops) * c.fp8_of_peak
    elif work.amp == "off" and not work.tf32:
        rate = gpu.fp32_tflops * c.fp32_of_peak
    else:
        rate = gpu.measured_bf16_tflops or gpu.bf16_tflops * c.bf16_of_peak
        rate /= 2 if work.amp == "off" else 1  # TF32 has half the rate
    efficiency = math.prod(side / (side + c.half_side) for side in (m, n, k))
    bandwidth = gpu.memory_tb_per_s * 1e12 * c.bandwidth
    moved = (m * k + k * n) * (1 if fp8 else width) + m * n * width
    seconds = max(2 * m * n * k / (rate * 1e12 * c.sustained * efficiency), moved / bandwidth)
    if fp8:
        # Both inputs are read for their scale, then read and written in 8 bits. Rowwise scaling
        # does so twice: the backward needs them scaled along the other side.
        passes = 2 if work.fp8.recipe.startswith("rowwise") else 1
        seconds += passes * (m * k + k * n) * (2 + 2 + 1) / bandwidth
    return seconds


def _block_matmuls(work: Work, layer: int, gpu: Hardware, c: Constants) -> float:
    """Forward seconds of a block's matmuls; each backward matmul takes as long again."""
    tokens, shapes = work.batch.micro_tokens, work.config.block_shapes(layer)
    low = work.fp8.layers if work.fp8 else ()
    return sum(
        matmul_time(work, tokens, n, k, kind in low, gpu, c) for kind, (n, k) in shapes.items()
    )


def _attention(work: Work, gpu: Hardware, c: Constants) -> tuple[float, float]:
    """Seconds of all layers' attention, forward and backward."""
    config, seq_len, amp = work.config, work.batch.seq_len, work.amp
    cudnn = c.cudnn_forward and amp != "off" and work.attention in ("auto", "cudnn")
    head = min(1.0, config.head_dim / (config.head_dim + c.half_head) * (1 + c.half_head / 128))
    seconds = [0.0, 0.0]
    for window in config.windows:
        keys = attended_keys(seq_len, window, causal=True)
        flops = work.batch.micro_tokens * 4 * config.query_size * keys
        if cudnn and (window is None or window >= seq_len):
            parts = c.cudnn_forward, c.cudnn_backward
        else:
            parts = c.attention_forward, c.attention_backward
        rate = gpu.bf16_tflops * 1e12 * head * keys / (keys + c.half_keys)
        seconds[0] += flops / (rate * parts[0])
        seconds[1] += 2 * flops / (rate * parts[1])
    slower = 1.0
    if amp == "off":  # kernels without tensor cores, unless TF32 is allowed
        slower = gpu.bf16_tflops / (gpu.bf16_tflops / 2 if work.tf32 else gpu.fp32_tflops)
    return slower * seconds[0], slower * seconds[1]


def block_bytes(work: Work) -> float:
    """Bytes that a block's forward moves outside of matmuls and attention."""
    config, w = work.config, work.matmul_bytes
    d, f = config.hidden_size, config.intermediate_size
    a, kv = config.query_size, config.kv_size
    if work.compiled:  # norm with the residual before it, rotary embedding, activation: once each
        elements = 2 * 4 * d + (0 if config.learned_positions else 2 * (a + kv))
        elements += 3 * f if config.gated_mlp else 2 * f
    else:
        rope = 7 if w == 2 else 5  # a product in fp32 between its two kernels
        elements = 2 * (2 * d + 3 * d) + (0 if config.learned_positions else rope * (a + kv))
        elements += 5 * f if config.gated_mlp else 2 * f
    return work.batch.micro_tokens * w * elements


def _loss_bytes(work: Work) -> float:
    """Bytes of the loss and its gradient over the logits, outside of the matmuls."""
    eager = 26 if work.matmul_bytes == 2 else 32
    each = 8 if work.compiled else eager
    return work.batch.micro_tokens * work.config.padded_vocab_size * each
