"""The command line of the three training scripts: one dataclass, checked before anything starts."""

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import tyro

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
    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "flex"] = "auto"
    """Attention kernel; auto lets PyTorch choose. flex is for sliding windows."""

    # Compilation
    pt_compile: bool = False
    """Compile each block and the loss with torch.compile."""
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "default"
    """Mode of torch.compile; reduce-overhead and max-autotune use CUDA graphs."""

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

    # What the figures are held against
    peak_tflops: float | None = None
    """Dense BF16 peak of the device [TFLOP/s], where configs/hardware.json does not know it."""
    usd_per_hour: float | None = None
    """Price of one device [US$/h], for usd_per_million_tokens."""


def parse_args(argv: Sequence[str], prog: str) -> Args:
    """Parse and check; UsageError in one line on bad input. `--help` prints and exits with 0."""
    args = parse_dataclass(Args, argv, prog)
    check_args(args)
    return args


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
        if value is not None and not value > 0:
            raise UsageError(f"--{_flag(name)} {value}: must be above 0")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise UsageError(f"--{_flag(name)} {getattr(args, name)}: must be from 0 to below 1")
    if args.min_lr_ratio > 1:
        raise UsageError(f"--min-lr-ratio {args.min_lr_ratio}: must be at most 1")
    if args.compile_mode != "default" and not args.pt_compile:
        raise UsageError(f"--compile-mode {args.compile_mode} needs --pt-compile")
    if args.run_name is not None and (
        args.run_name in ("", ".", "..") or re.search(r"[/\\\0]", args.run_name)
    ):
        raise UsageError(f"--run-name {args.run_name!r}: must be a plain directory name")


def _at_least(args: Args, name: str, minimum: float) -> None:
    value = getattr(args, name)
    if not minimum <= value < float("inf"):
        raise UsageError(f"--{_flag(name)} {value}: must be at least {minimum:g}")


def _flag(name: str) -> str:
    return name.replace("_", "-")
