"""The flags of the three training scripts: one dataclass. Needs no torch."""

import dataclasses
import re
from typing import Annotated, Literal

import tyro

from bench.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Args:
    """Train a GPT-2 or Llama-family model for some steps and say exactly how fast that was."""

    config: Annotated[str, tyro.conf.arg(metavar="CONFIG"), tyro.conf.Positional]
    """Model: a Hugging Face config.json, or a directory that holds one."""

    # Batch and length of the run
    bsz: int = 8
    """Micro batch [samples per device]."""
    seq_len: int | None = None
    """Sequence length [tokens]; by default the model's own maximum, at most 4096."""
    grad_acc_steps: int = 1
    """Micro batches accumulated into one optimizer step."""
    global_bsz: int | None = None
    """Samples of one optimizer step over all ranks; sets --grad-acc-steps, and must divide evenly."""
    n_steps: int = 50
    """Measured steps."""
    warmup_steps: int = 10
    """Steps before the measured ones: compilation, autotuning, allocator; timed apart."""
    pass_type: Literal["forward", "forward-backward", "step"] = "step"
    """What a step is: forward alone (no gradients), with backward, or the full training step."""

    # Where and in which precision
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto takes a GPU (NVIDIA or AMD, both called cuda) if there is one."""
    amp: Literal["bf16", "fp16", "off"] = "bf16"
    """Mixed precision of the matmuls; parameters stay fp32. off is true fp32."""
    tf32: bool = False
    """Let fp32 matmuls use TF32 tensor cores (NVIDIA)."""
    use_fp8: bool = False
    """Run the linear layers of the blocks in FP8."""
    fp8_backend: Literal["auto", "te", "torchao"] = "auto"
    """FP8 library; auto takes what has the recipe, else te, or torchao with --pt-compile or emulation."""
    fp8_recipe: Literal[
        "auto",
        "delayed",
        "current",
        "blockwise",
        "mxfp8",
        "tensorwise",
        "rowwise",
        "rowwise_with_gw_hp",
    ] = "auto"
    """How tensors are scaled to FP8; te: current (default), delayed, blockwise, mxfp8; torchao:
    tensorwise (default), rowwise, rowwise_with_gw_hp (weight gradients in bf16)."""
    fp8_emulate: bool = False
    """Compute what FP8 would, in higher precision, on any device (torchao); says nothing of speed."""
    fp8_all_gather: bool = False
    """FSDP: gather the blocks' weights in FP8 (torchao, tensorwise)."""
    fp8_primary_weights: bool = False
    """FSDP: keep and gather the blocks' weights in FP8, in fp32 in the optimizer alone (te)."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "flex"] = "auto"
    """Attention kernel; auto lets PyTorch choose. flex is for sliding windows."""

    # Compilation
    pt_compile: bool = False
    """Compile each block and the loss with torch.compile."""
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "default"
    """Mode of torch.compile; reduce-overhead and max-autotune use CUDA graphs."""

    # Activation checkpointing
    sac_freq: str | None = None
    """Recompute activations of q of every p blocks in backward: 1/1 all, 1/4 every fourth."""
    sac_policy: Literal["block", "op"] = "block"
    """What a chosen block recomputes: block all of it, op all but matmuls, attention, collectives."""

    # Model and data
    init_from: str | None = None
    """Directory of Hugging Face safetensors to start from, instead of random values."""
    pad_vocab: int = 1
    """Pad embedding and head to a multiple of this many rows (128 helps); the loss is unchanged."""
    data: str = "synthetic"
    """Training tokens: synthetic (random, made on the device) or a .bin file (prepare_data.py)."""
    val_data: str | None = None
    """A .bin file to report a validation loss on, before and after training."""
    val_batches: int = 8
    """Micro batches of the validation loss."""
    n_workers: int = 0
    """Data loading processes; 0 reads in the training process."""
    seed: int = 0
    """Seed of parameters, data order, synthetic tokens and dropout."""

    # Optimizer
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer (fused); sgd has momentum 0.9."""
    lr: float = 6e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the cosine, the last measured step, as a part of the peak."""
    lr_warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors have none."""
    beta1: float = 0.9
    """AdamW's beta 1."""
    beta2: float = 0.95
    """AdamW's beta 2."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""

    # Output
    output_dir: str = "runs"
    """Where the run's directory is made."""
    run_name: str | None = None
    """Name of the run's directory; by default date, time, model and process id."""
    export: bool = False
    """At the end, write the model as Hugging Face safetensors into the run's directory."""
    no_tensorboard: bool = False
    """Do not write TensorBoard scalars."""

    # Several devices: train_ddp.py and train_fsdp.py
    nproc: int | None = None
    """DDP, FSDP: processes to start when no launcher did; by default one per GPU, two on a CPU."""
    dist_timeout: float = 600.0
    """DDP, FSDP: seconds after which a rank gives up waiting for another; NCCL a quarter later."""
    max_restarts: int = 0
    """DDP, FSDP: how often all ranks start anew, from the beginning, after one failed."""
    bucket_cap_mb: float = 25.0
    """DDP: gradients are reduced in buckets of this size [MiB]."""
    grad_compression: Literal["off", "bf16"] = "off"
    """DDP: reduce gradients in bf16, halving the traffic."""
    reshard_after_forward: Literal["always", "never"] = "always"
    """FSDP: free gathered blocks after forward, and gather them again in backward; or keep them."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """FSDP: what gradients are reduced in."""
    prefetch: int = 1
    """FSDP: blocks gathered ahead of the one that runs; 0 leaves it to PyTorch."""
    dp_replicate: int = 1
    """FSDP: replicas of the sharded model (HSDP); must divide the number of ranks."""
    cpu_offload: bool = False
    """FSDP: keep sharded parameters, gradients and optimizer state in host memory."""

    # Where the time and the memory go
    profile: bool = False
    """Capture some steps with torch.profiler: traces per rank, and a breakdown in result.json."""
    profile_start: int | None = None
    """First captured step, from 0; by default two extra steps after the measured ones."""
    profile_steps: int = 3
    """Captured steps."""
    profile_shapes: bool = False
    """Record the shapes and dtypes of each operator's inputs as well."""
    profile_stacks: bool = False
    """Record Python stacks and module names as well, and write them as stacks (flame graphs)."""
    nsys_start: int | None = None
    """First step, from 0, between cudaProfilerStart and -Stop (nsys profile -c cudaProfilerApi)."""
    nsys_end: int | None = None
    """Step after the last of these."""
    memory_snapshot: bool = False
    """Keep the allocator's history of the warm-up as memory.pickle, for PyTorch's memory viewer."""

    # What the figures are held against
    peak_tflops: float | None = None
    """Dense BF16 peak of the device [TFLOP/s], where configs/hardware.json does not know it."""
    peak_fp8_tflops: float | None = None
    """Dense FP8 peak, likewise."""
    usd_per_hour: float | None = None
    """Price of one device [US$/h], for usd_per_million_tokens."""


def parse_sac_freq(text: str | None) -> tuple[int, int] | None:
    """ "q/p" as two whole numbers, 0 < q <= p; None for None; UsageError with the reason."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match:
        raise UsageError(
            f"--sac-freq {text}: must be two whole numbers q/p, as in 1/4: q of every p blocks"
        )
    q, p = int(match[1]), int(match[2])
    if p == 0:
        raise UsageError(f"--sac-freq {text}: cannot choose among 0 blocks; p must be at least 1")
    if not 0 < q <= p:
        raise UsageError(
            f"--sac-freq {text}: q must be from 1 to p = {p}; leave the flag out for none"
        )
    return q, p


# Steps before the first captured one in which tracing is on already: what it costs at first is over.
PROFILER_WARMUP = 2


def window_end(args: Args) -> int:
    """Steps until the measured window closes: warm-up and measured ones."""
    return args.warmup_steps + args.n_steps


def captured_steps(args: Args) -> range:
    """The steps that --profile or --nsys-start captures, counted from 0; empty without."""
    if args.profile:
        start = args.profile_start
        start = window_end(args) + PROFILER_WARMUP if start is None else start
        return range(start, start + args.profile_steps)
    if args.nsys_start is not None and args.nsys_end is not None:
        return range(args.nsys_start, args.nsys_end)
    return range(0)


def profiled_steps(args: Args) -> range:
    """The steps in which a profiler is on, warming up or capturing."""
    steps = captured_steps(args)
    first = max(0, steps.start - PROFILER_WARMUP) if args.profile else steps.start
    return range(first, steps.stop)


def in_window(args: Args) -> bool:
    """Whether a profiler is on in some of the measured steps."""
    steps = profiled_steps(args)
    return bool(steps) and steps.start < window_end(args) and steps.stop > args.warmup_steps


def total_steps(args: Args) -> int:
    """All steps of a run: until the window has closed and the capture has ended."""
    return max(window_end(args), captured_steps(args).stop)


def phase_of(step: int, args: Args) -> str:
    """`warmup`, `measure`, or `profile` for a step that is run only to be captured."""
    if step < args.warmup_steps:
        return "warmup"
    return "measure" if step < window_end(args) else "profile"
