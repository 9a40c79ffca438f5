"""The speed model's constants: what is no property of a device's datasheet. Needs no torch."""

import dataclasses
import json

from bench.hardware import HARDWARE_FILE


@dataclasses.dataclass(frozen=True)
class Constants:
    """What is no property of a device; the values are data, in configs/hardware.json (`speed_model`).

    Chosen so that the published figures come out, then rounded, but for attention's on A100 and Hopper.
    A device's `fitted` go before them.
    """

    # Of the highest matmul rate anybody measured, what a training step keeps up: clocks fall under load.
    sustained: float
    # A matmul's side that halves its efficiency: its last tiles are partly empty.
    half_side: float
    # Where a device's own highest rate was never measured, that part of its datasheet peak.
    bf16_of_peak: float
    fp8_of_peak: float
    fp32_of_peak: float
    # Attention kernels, of the BF16 peak, with many keys and heads of 128.
    attention_forward: float
    attention_backward: float
    # The same of cuDNN's, on devices where PyTorch prefers it; 0 elsewhere.
    cudnn_forward: float
    cudnn_backward: float
    # Keys a query (in the mean), and size of a head, that halve their efficiency.
    half_keys: float
    half_head: float
    # Part of the memory bandwidth that elementwise kernels reach.
    bandwidth: float
    # Time to launch a kernel [s], and kernels of a block's forward and backward.
    launch_s: float
    kernels_eager: int
    kernels_compiled: int
    # Latency of a ring collective: once, per GPU in a node, per node [s] (NCCL's own tables).
    latency_s: float
    latency_gpu_s: float
    latency_node_s: float
    # The same of an all-reduce's tree: its depth grows with the logarithm of the nodes.
    tree_gpu_s: float
    tree_node_s: float
    # Part of the network cards' rate that a ring over all of them reaches.
    network: float
    # Computation slows down beside communication: it loses multiprocessors and bandwidth.
    beside_communication: float
    # All wait for the slowest: what a step loses with each doubling of the nodes (torchtitan 8 to 128
    # GPUs 0.6 %, llm-foundry 8 to 512 1.6 %).
    slowest_node: float


CONSTANTS = Constants(**json.loads(HARDWARE_FILE.read_text(encoding="utf-8"))["speed_model"])
