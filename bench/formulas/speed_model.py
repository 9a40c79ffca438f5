"""How long a training step takes, by a model of its parts. Needs no torch.

    matmuls      FLOPs over the highest measured rate, worse for small sides; no faster than memory
    attention    causal FLOPs over what its kernel reaches, less for few keys and small heads
    memory       bytes that norms, activations, casts, loss and optimizer read and write, over bandwidth
    network      latency + bytes over bus bandwidth, a block's behind the computation of a block
    host         kernels x the time to launch one; a step is no shorter than that

What is fitted, or a device's, is in configs/hardware.json; bytes and kernels that are counted off the
code stand here. benchmarks/estimate_vs_published.py holds the outcome against what others have published.
"""

import dataclasses
import math

from bench.formulas.collectives import communication_time, matmul_bytes, parameter_shapes
from bench.formulas.flops import attended_keys, chosen_blocks
from bench.formulas.hardware import CONSTANTS, Constants, Hardware
from bench.settings.combinations import GRAPH_MODES
from bench.settings.flags import Args, parse_sac_freq
from model.config import ModelConfig


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


def estimate_speed(
    config: ModelConfig,
    args: Args,
    seq_len: int,
    micro_steps: int,
    gpu: Hardware,
    world: int = 1,
    per_node: int = 8,
    shards: int | None = None,
) -> SpeedEstimate:
    """The time of a step; `shards` as in estimate_memory, `per_node` GPUs share a machine."""
    c = dataclasses.replace(CONSTANTS, **gpu.fitted)
    tokens = args.bsz * seq_len
    train = args.pass_type != "forward"
    passes = 3 if train else 1
    layers = config.num_hidden_layers
    again = len(chosen_blocks(layers, parse_sac_freq(args.sac_freq)))
    whole_again = again if args.sac_policy == "block" else 0

    matmul = _block_matmuls(config, args, tokens, gpu, c)
    head = passes * matmul_time(
        tokens, config.padded_vocab_size, config.hidden_size, False, args, gpu, c
    )
    matmuls = layers * passes * matmul + whole_again * matmul + head
    forward, backward = _attention(config, args, tokens, seq_len, gpu, c)
    attention = forward + (backward if train else 0.0) + forward * whole_again / layers
    rate = gpu.memory_tb_per_s * 1e12 * c.bandwidth
    block_bytes = _block_bytes(config, args, tokens)
    memory = (layers * block_bytes * (3 if train else 1) + again * block_bytes) / rate
    memory += _loss_bytes(config, args, tokens) / rate
    n = _parameters(config)
    if shards is None and args.amp != "off":
        memory += 6 * n / rate  # autocast casts every weight in every forward pass
    if train:
        # Gradients are written, and cast to fp32: under FSDP all of them, before they are reduced.
        memory += 6 * n / rate
    compute = matmuls + attention + memory
    optimizer = 0.0
    if args.pass_type == "step":
        # AdamW reads parameter, gradient and two moments and writes three; clipping reads and scales.
        optimizer = (28 + 12) * n / (shards or 1) / rate

    total, exposed = communication_time(config, args, gpu, world, per_node, shards, compute, c)
    compute *= 1 + c.beside_communication * (total > 0)
    kernels = c.kernels_compiled if args.pt_compile else c.kernels_eager
    graphs = args.pt_compile and args.compile_mode in GRAPH_MODES
    kernels = 3 if graphs else kernels * (1 if train else 1 / 3)
    host = c.launch_s * (layers + 2) * (kernels + (20 if shards else 0))
    step = micro_steps * max(compute, host) + optimizer
    # Under DDP gradients travel once a step, under FSDP all does in every micro step.
    travels = micro_steps if shards else 1
    slowest = 1 + c.slowest_node * math.log2(max(1.0, world / per_node))
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
    m: float, n: float, k: float, fp8: bool, args: Args, gpu: Hardware, c: Constants
) -> float:
    """Seconds of one (m, k) x (k, n) matmul, with what casting its inputs to FP8 costs."""
    width = matmul_bytes(args)
    if fp8:
        rate = gpu.measured_fp8_tflops or (gpu.fp8_tflops or gpu.bf16_tflops) * c.fp8_of_peak
    elif args.amp == "off" and not args.tf32:
        rate = gpu.fp32_tflops * c.fp32_of_peak
    else:
        rate = gpu.measured_bf16_tflops or gpu.bf16_tflops * c.bf16_of_peak
        rate /= 2 if args.amp == "off" else 1  # TF32 has half the rate
    efficiency = math.prod(side / (side + c.half_side) for side in (m, n, k))
    bandwidth = gpu.memory_tb_per_s * 1e12 * c.bandwidth
    moved = (m * k + k * n) * (1 if fp8 else width) + m * n * width
    seconds = max(2 * m * n * k / (rate * 1e12 * c.sustained * efficiency), moved / bandwidth)
    if fp8:
        # Both inputs are read for their scale, then read and written in 8 bits; by rows, where the
        # backward needs them scaled along the other side, twice.
        passes = 2 if args.fp8_recipe.startswith("rowwise") else 1
        seconds += passes * (m * k + k * n) * (2 + 2 + 1) / bandwidth
    return seconds


def _block_matmuls(
    config: ModelConfig, args: Args, tokens: int, gpu: Hardware, c: Constants
) -> float:
    """Forward seconds of a block's matmuls; each backward matmul takes as long again."""
    shapes = config.block_shapes().values()
    return sum(matmul_time(tokens, n, k, args.use_fp8, args, gpu, c) for n, k in shapes)


def _attention(
    config: ModelConfig, args: Args, tokens: int, seq_len: int, gpu: Hardware, c: Constants
) -> tuple[float, float]:
    """Seconds of all layers' attention, forward and backward."""
    cudnn = c.cudnn_forward and args.amp != "off" and args.attention in ("auto", "cudnn")
    head = min(1.0, config.head_dim / (config.head_dim + c.half_head) * (1 + c.half_head / 128))
    seconds = [0.0, 0.0]
    for window in config.windows:
        keys = attended_keys(seq_len, window, causal=True)
        flops = tokens * 4 * config.query_size * keys
        if cudnn and (window is None or window >= seq_len):
            parts = c.cudnn_forward, c.cudnn_backward
        else:
            parts = c.attention_forward, c.attention_backward
        rate = gpu.bf16_tflops * 1e12 * head * keys / (keys + c.half_keys)
        seconds[0] += flops / (rate * parts[0])
        seconds[1] += 2 * flops / (rate * parts[1])
    slower = 1.0
    if args.amp == "off":  # kernels without tensor cores, unless TF32 is allowed
        slower = gpu.bf16_tflops / (gpu.bf16_tflops / 2 if args.tf32 else gpu.fp32_tflops)
    return slower * seconds[0], slower * seconds[1]


def _block_bytes(config: ModelConfig, args: Args, tokens: int) -> float:
    """Bytes that a block's forward moves outside of matmuls and attention."""
    d, f = config.hidden_size, config.intermediate_size
    a, kv = config.query_size, config.kv_size
    w = matmul_bytes(args)
    if args.pt_compile:  # norm with the residual before it, rotary embedding, activation: once each
        elements = 2 * 4 * d + (0 if config.learned_positions else 2 * (a + kv))
        elements += 3 * f if config.gated_mlp else 2 * f
    else:
        rope = 7 if w == 2 else 5  # a product in fp32 between its two kernels
        elements = 2 * (2 * d + 3 * d) + (0 if config.learned_positions else rope * (a + kv))
        elements += 5 * f if config.gated_mlp else 2 * f
    return tokens * w * elements


def _loss_bytes(config: ModelConfig, args: Args, tokens: int) -> float:
    """Bytes of the loss and its gradient over the logits, outside of the matmuls."""
    eager = 26 if matmul_bytes(args) == 2 else 32
    return tokens * config.padded_vocab_size * (8 if args.pt_compile else eager)


def _parameters(config: ModelConfig) -> float:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())
