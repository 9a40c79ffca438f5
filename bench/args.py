"""The command line of the three training scripts: one dataclass, checked before anything starts."""

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypeVar

import tyro

from bench.combinations import ENTRYPOINTS, GRAPH_MODES, combination_of, refusal
from bench.errors import UsageError

Parsed = TypeVar("Parsed")


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
    """FP8 library; auto takes te (Transformer Engine), or torchao with --pt-compile or emulation."""
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
    """Learning rate at the end of the cosine, as a part of the peak."""
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
    """Processes to start when no launcher did; by default one per GPU, two on a CPU."""
    dist_timeout: float = 600.0
    """Seconds after which a rank that waits for another gives up."""
    max_restarts: int = 0
    """How often all ranks are started anew after one failed (from the beginning)."""
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

    # What the figures are held against
    peak_tflops: float | None = None
    """Dense BF16 peak of the device [TFLOP/s], where configs/hardware.json does not know it."""
    usd_per_hour: float | None = None
    """Price of one device [US$/h], for usd_per_million_tokens."""


def parse_args(argv: Sequence[str], prog: str) -> Args:
    """Parse and check; UsageError in one line on bad input. `--help` prints and exits with 0."""
    args = resolve_fp8(parse_dataclass(Args, argv, prog))
    check_args(args)
    check_combination(args, prog)
    return args


FP8_RECIPES = {
    "te": ("current", "delayed", "blockwise", "mxfp8"),
    "torchao": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
}


def resolve_fp8(args: Args) -> Args:
    """`auto` of the FP8 flags made definite; UsageError where they contradict each other."""
    if not args.use_fp8:
        names = ("fp8_backend", "fp8_recipe", "fp8_emulate", "fp8_all_gather")
        if wrong := _changed(args, names):
            raise UsageError(f"--{_flag(wrong)} needs --use-fp8")
        return args
    backend, recipe = args.fp8_backend, args.fp8_recipe
    if backend == "auto":
        by_recipe = next((b for b, recipes in FP8_RECIPES.items() if recipe in recipes), None)
        torchao = args.pt_compile or args.fp8_emulate or args.fp8_all_gather
        backend = by_recipe or ("torchao" if torchao else "te")
    if recipe == "auto":
        recipe = FP8_RECIPES[backend][0]
    if recipe not in FP8_RECIPES[backend]:
        raise UsageError(
            f"--fp8-recipe {recipe} is not one of --fp8-backend {backend}: "
            f"{', '.join(FP8_RECIPES[backend])}"
        )
    if args.fp8_emulate and backend == "te":
        raise UsageError("--fp8-emulate: Transformer Engine cannot; use --fp8-backend torchao")
    if args.fp8_all_gather and recipe != "tensorwise":
        raise UsageError(f"--fp8-all-gather works with --fp8-recipe tensorwise, not {recipe}")
    if args.fp8_all_gather and args.cpu_offload:
        raise UsageError("--fp8-all-gather does not work with --cpu-offload; leave one out")
    return dataclasses.replace(args, fp8_backend=backend, fp8_recipe=recipe)


def check_combination(args: Args, prog: str) -> None:
    """Refuse toggles that do not go together, as bench/combinations.py says."""
    if prog in ENTRYPOINTS and (rule := refusal(combination_of(args, prog))):
        flags = " ".join(flags_of(args, rule.when))
        raise UsageError(f"{flags}: {rule.reason}; use {rule.instead}")


def flags_of(args: Args, axes: Iterable[str]) -> list[str]:
    """The flags that put a run where it is on each axis of the table of combinations."""
    flags = {
        "amp": f"--amp {args.amp}",
        "fp8": f"--use-fp8 --fp8-backend {args.fp8_backend}",
        "compile": f"--pt-compile --compile-mode {args.compile_mode}",
        "sac": f"--sac-freq {args.sac_freq} --sac-policy {args.sac_policy}",
    }
    return [flags[axis] for axis in axes if axis in flags]


def parse_dataclass(kind: type[Parsed], argv: Sequence[str], prog: str) -> Parsed:
    """A command line as a dataclass of that kind; what cannot be parsed is a UsageError."""
    messages = io.StringIO()
    wide = contextlib.nullcontext() if {"-h", "--help"} & set(argv) else _columns("500")
    try:
        with contextlib.redirect_stderr(messages), wide:
            return tyro.cli(
                kind, prog=prog, args=list(argv), config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(f"{_first_message(messages.getvalue())}; see {prog} --help") from None


@contextlib.contextmanager
def _columns(width: str):
    """A terminal so wide that no message is broken into lines."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = width
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _first_message(panel: str) -> str:
    """The message of the parser's boxed error text (drawn in ASCII or not), on one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in panel.splitlines()][1:]  # the first is the title
    message: list[str] = []
    for line in lines:
        if set(line) <= {"─", "-"}:  # a rule stands below the title or ends the message
            if message:
                break
        else:
            message.append(line)
    return re.sub(r"\s+", " ", " ".join(message)) or "bad arguments"


def check_args(args: Args) -> None:
    """Refuse values that no run can use; what depends on model or device is checked where known."""
    for name in ("bsz", "grad_acc_steps", "n_steps", "pad_vocab", "val_batches"):
        _at_least(args, name, 1)
    for name in ("warmup_steps", "n_workers", "seed", "lr_warmup_steps"):
        _at_least(args, name, 0)
    for name in ("lr", "min_lr_ratio", "weight_decay", "grad_clip"):
        _at_least(args, name, 0.0)
    for name in ("seq_len", "peak_tflops", "usd_per_hour"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{_flag(name)} {value}: must be above 0 and finite")
    if args.seed >= 2**63:
        raise UsageError(f"--seed {args.seed}: must be below 2^63")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise UsageError(f"--{_flag(name)} {getattr(args, name)}: must be from 0 to below 1")
    for name in ("nproc", "global_bsz"):
        if getattr(args, name) is not None:
            _at_least(args, name, 1)
    for name in ("max_restarts", "prefetch"):
        _at_least(args, name, 0)
    _at_least(args, "dp_replicate", 1)
    for name in ("dist_timeout", "bucket_cap_mb"):
        if not 0 < getattr(args, name) < float("inf"):
            raise UsageError(f"--{_flag(name)} {getattr(args, name)}: must be above 0")
    parse_sac_freq(args.sac_freq)
    if args.sac_policy == "op" and args.sac_freq is None:
        raise UsageError("--sac-policy op needs --sac-freq, for example 1/1")
    if args.sac_freq and args.pass_type == "forward":
        raise UsageError("--sac-freq needs a backward; use --pass-type forward-backward or step")
    if args.global_bsz is not None and args.grad_acc_steps != 1:
        raise UsageError("--global-bsz sets --grad-acc-steps; give one of the two")
    if args.min_lr_ratio > 1:
        raise UsageError(f"--min-lr-ratio {args.min_lr_ratio}: must be at most 1")
    if args.compile_mode in GRAPH_MODES and args.warmup_steps < 3:
        raise UsageError(
            f"--warmup-steps {args.warmup_steps}: CUDA graphs are recorded in the first three steps; "
            "use at least 3"
        )
    if args.compile_mode != "default" and not args.pt_compile:
        raise UsageError(f"--compile-mode {args.compile_mode} needs --pt-compile")
    if args.run_name is not None and (
        args.run_name in ("", ".", "..") or re.search(r"[/\\\0]", args.run_name)
    ):
        raise UsageError(f"--run-name {args.run_name!r}: must be a plain directory name")


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


DDP_FLAGS = ("bucket_cap_mb", "grad_compression")
FSDP_FLAGS = (
    "reshard_after_forward",
    "reduce_dtype",
    "prefetch",
    "dp_replicate",
    "cpu_offload",
    "fp8_all_gather",
)
RANK_FLAGS = ("nproc", "dist_timeout", "max_restarts")


def check_single_args(args: Args) -> None:
    """Refuse flags of the distributed scripts in train.py."""
    _refuse(args, RANK_FLAGS, "train.py", "train_ddp.py or train_fsdp.py")
    _refuse(args, DDP_FLAGS, "train.py", "train_ddp.py")
    _refuse(args, FSDP_FLAGS, "train.py", "train_fsdp.py")


def check_distributed_args(args: Args, prog: str) -> None:
    """Refuse what one of the distributed scripts does not know, or cannot do."""
    if prog == "train_ddp.py":
        _refuse(args, FSDP_FLAGS, prog, "train_fsdp.py")
        if args.pass_type != "step" and args.grad_compression != "off":
            raise UsageError("--grad-compression needs --pass-type step")
    else:
        _refuse(args, DDP_FLAGS, prog, "train_ddp.py")
        if args.amp == "fp16" and args.optimizer == "sgd":
            raise UsageError(
                "--amp fp16: PyTorch has no fused SGD for sharded parameters; use --optimizer adamw"
            )


def _refuse(args: Args, names: Sequence[str], prog: str, where: str) -> None:
    if name := _changed(args, names):
        raise UsageError(f"--{_flag(name)} has no meaning for {prog}; it is for {where}")


def _changed(args: Args, names: Sequence[str]) -> str | None:
    """The first of these flags that is not at its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(Args)}
    return next((name for name in names if getattr(args, name) != defaults[name]), None)


def _at_least(args: Args, name: str, minimum: float) -> None:
    value = getattr(args, name)
    if not minimum <= value < float("inf"):
        raise UsageError(f"--{_flag(name)} {value}: must be at least {minimum:g}")


def _flag(name: str) -> str:
    return name.replace("_", "-")
