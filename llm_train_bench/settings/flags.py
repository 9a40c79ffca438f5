"""The flags of the training scripts, each declared once with bounds, scripts and kind. Needs no torch.

The class that declares a flag is its group in --help, headed by the docstring. Checks, help, compare.py,
the gate and TensorBoard read what a flag declares here.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from llm_train_bench.errors import UsageError

Group = TypeVar("Group")


class Script(enum.StrEnum):
    """The training scripts, by the names of their files."""

    ONE = "train.py"
    DDP = "train_ddp.py"
    FSDP = "train_fsdp.py"
    PP = "train_pp.py"


class Kind(enum.Enum):
    """The effect of a flag: on what is learnt, the speed, the length, or only on what is written."""

    HYPERPARAMETER = "hyperparameter"
    SPEED = "speed"
    LENGTH = "length"
    OUTPUT = "output"


LEARNT, SPEED, LENGTH, OUTPUT = Kind.HYPERPARAMETER, Kind.SPEED, Kind.LENGTH, Kind.OUTPUT
EVERYWHERE, SEVERAL = tuple(Script), (Script.DDP, Script.FSDP, Script.PP)
SHARDED = (Script.FSDP, Script.PP)
LARGEST = 2**31
# Compile modes that record CUDA graphs.
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag's declaration, besides name, type and default.

    Values outside the bounds are refused; `needs` names the flag without which this one has no meaning.
    """

    help: str
    kind: Kind | None = None
    scripts: tuple[Script, ...] = EVERYWHERE
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    needs: str | None = None
    headline: bool = False  # shown beside a run even at its default
    metavar: str | None = None
    positional: bool = False


def flag(default: Any, help: str, kind: Kind | None = None, **declared: Any) -> Any:
    """A field of a dataclass of flags; `declared` are the fields of `Flag`."""
    content = {"flag": Flag(help, kind, **declared)}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=content)
    return dataclasses.field(default=default, metadata=content)


def positional(metavar: str, help: str, default: Any = dataclasses.MISSING, kind=None) -> Any:
    """A field that stands on the command line without a flag."""
    return flag(default, help, kind, metavar=metavar, positional=True)


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    """Model."""

    config: str = positional(
        "CONFIG", "Model: a Hugging Face config.json, or a directory that holds one. Or --from FILE: the "
        "config and flags of a result.json, or of YAML; flags after it go before the file's.",
        kind=LENGTH,
    )  # fmt: skip
    route: Literal["learned", "balanced"] = flag(
        "learned", "Experts of a token: those its router chooses, or in turn, as in published tables.",
        LEARNT, headline=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BatchFlags:
    """Batch and length of the run."""

    bsz: int | Literal["auto"] = flag(
        4, "Micro batch [samples per device]; auto is the largest that leaves a tenth of the device's "
        "memory, by the estimate.", SPEED, at_least=1, headline=True, metavar="N|auto",
    )  # fmt: skip
    seq_len: int | None = flag(
        None, "Sequence length [tokens]; by default the model's own maximum, at most 4096.", LEARNT,
        above=0, headline=True,
    )  # fmt: skip
    grad_acc_steps: int = flag(
        1, "Micro batches accumulated into one optimizer step; train_pp.py takes 2 x --pp in place of 1.",
        SPEED, at_least=1, headline=True,
    )  # fmt: skip
    global_bsz: int | None = flag(
        None,
        "Samples of one optimizer step over all ranks; sets --grad-acc-steps, and must divide evenly.",
        LENGTH, at_least=1,
    )  # fmt: skip
    n_steps: int = flag(50, "Measured steps.", LENGTH, at_least=1, at_most=10**7)
    warmup_steps: int = flag(
        10, "Steps before the measured ones: compilation, autotuning, allocator; timed apart.", LENGTH,
        at_least=0, at_most=10**7,
    )  # fmt: skip
    warmup_seconds: float | None = flag(
        None, "Seconds of work before the measured steps, so that a GPU's clocks are those of a long "
        "run; matmuls fill up what warm-up steps leave. By default 10 on a GPU, none on a CPU.", LENGTH,
        at_least=0, at_most=3600,
    )  # fmt: skip
    pass_type: Literal["forward", "forward-backward", "step"] = flag(
        "step", "What a step is: forward alone (no gradients), with backward, or the full training step.",
        LEARNT,
    )  # fmt: skip
    no_fit_check: bool = flag(
        False, "Start on a GPU even where the estimate says that its memory cannot suffice.", OUTPUT
    )


@dataclasses.dataclass(frozen=True)
class PrecisionFlags:
    """Device and number formats."""

    device: Literal["auto", "cuda", "cpu"] = flag(
        "auto",
        "Device; auto takes a GPU (NVIDIA or AMD, both called cuda) if there is one.",
        OUTPUT,
    )
    amp: Literal["bf16", "fp16", "off"] = flag(
        "bf16", "Mixed precision of the matmuls; parameters stay fp32. off is true fp32.", SPEED,
        headline=True,
    )  # fmt: skip
    tf32: bool = flag(False, "Let fp32 matmuls use TF32 tensor cores (NVIDIA).", SPEED)
    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "flex"] = flag(
        "auto", "Attention kernel; auto lets PyTorch choose. flex is for sliding windows.", SPEED
    )


@dataclasses.dataclass(frozen=True)
class Fp8Flags:
    """FP8."""

    use_fp8: bool = flag(False, "Run the linear layers of the blocks in FP8.", SPEED, headline=True)
    fp8_backend: Literal["auto", "te", "torchao"] = flag(
        "auto",
        "FP8 library; auto takes the one that has the recipe. Without a recipe it takes te, or torchao "
        "with --pt-compile or emulation.",
        SPEED, needs="use_fp8",
    )  # fmt: skip
    fp8_recipe: Literal[
        "auto", "delayed", "current", "blockwise", "mxfp8", "tensorwise", "rowwise", "rowwise_with_gw_hp"
    ] = flag(
        "auto",
        "How tensors are scaled to FP8; te: current (default), delayed, blockwise, mxfp8; torchao: "
        "tensorwise (default), rowwise, rowwise_with_gw_hp (weight gradients in bf16).",
        SPEED, needs="use_fp8",
    )  # fmt: skip
    fp8_emulate: bool = flag(
        False,
        "Compute what FP8 would, in higher precision, on any device (torchao); says nothing of speed.",
        SPEED, needs="use_fp8",
    )  # fmt: skip
    fp8_all_gather: bool = flag(
        False, "Gather the blocks' weights in FP8 (torchao, tensorwise).", SPEED, needs="use_fp8",
        scripts=(Script.FSDP,),
    )  # fmt: skip
    fp8_primary_weights: bool = flag(
        False, "Keep and gather the blocks' weights in FP8; the optimizer has fp32 ones (te).", SPEED,
        needs="use_fp8", scripts=(Script.FSDP,),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CompileFlags:
    """Compilation."""

    pt_compile: bool = flag(
        False, "Compile each block and the loss with torch.compile.", SPEED, headline=True
    )
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = flag(
        "default", "Mode of torch.compile; reduce-overhead and max-autotune use CUDA graphs.", SPEED
    )


@dataclasses.dataclass(frozen=True)
class RecomputeFlags:
    """Activation checkpointing."""

    sac_freq: str | None = flag(
        None, "In backward, recompute activations of q out of every p blocks: 1/1 all, 1/4 every fourth.",
        SPEED, metavar="Q/P", headline=True,
    )  # fmt: skip
    sac_policy: Literal["block", "op"] = flag(
        "block",
        "What a chosen block recomputes: block all of it, op all but matmuls, attention, collectives.",
        SPEED,
    )


@dataclasses.dataclass(frozen=True)
class DataFlags:
    """Weights and data."""

    init_from: str | None = flag(
        None, "Directory of Hugging Face safetensors to start from, instead of random values.", LEARNT,
        metavar="DIR",
    )  # fmt: skip
    pad_vocab: int = flag(
        1, "Pad embedding and head to a multiple of this many rows (128 helps); the loss is unchanged.",
        SPEED, at_least=1,
    )  # fmt: skip
    data: str = flag(
        "synthetic",
        "Training tokens: synthetic (random, made on the device) or a .bin file (prepare_data.py).",
        LEARNT, metavar="FILE",
    )  # fmt: skip
    data_dtype: Literal["auto", "uint16", "uint32"] = flag(
        "auto",
        "Format of token files that have no header, as nanoGPT's; auto refuses them.",
        LEARNT,
    )
    val_data: str | None = flag(
        None, "A .bin file to report a validation loss on, before and after training.", LENGTH,
        metavar="FILE",
    )  # fmt: skip
    val_batches: int = flag(8, "Micro batches of the validation loss.", LENGTH, at_least=1)
    eval_every: int = flag(
        0, "Report the validation loss every so many steps, too; 0 never.", LENGTH, needs="val_data",
        at_least=0, metavar="N",
    )  # fmt: skip
    n_workers: int = flag(
        0, "Data loading processes; 0 reads in the training process.", OUTPUT, at_least=0
    )
    seed: int = flag(
        0, "Seed of parameters, data order, synthetic tokens and dropout.", LEARNT, at_least=0,
        at_most=2**63 - 1,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OptimizerFlags:
    """Optimizer."""

    optimizer: Literal["adamw", "sgd"] = flag(
        "adamw", "Optimizer (fused); sgd has momentum 0.9.", LEARNT
    )
    lr: float = flag(6e-4, "Peak learning rate.", LEARNT, at_least=0)
    min_lr_ratio: float = flag(
        0.1,
        "Learning rate at the cosine's end (the last measured step), as a fraction of the peak.",
        LEARNT, at_least=0, at_most=1,
    )  # fmt: skip
    lr_warmup_steps: int = flag(
        10, "Steps before the peak learning rate; it rises linearly to it.", LEARNT, at_least=0
    )
    weight_decay: float = flag(
        0.1, "Weight decay of matrices; vectors have none.", LEARNT, at_least=0
    )
    beta1: float = flag(0.9, "AdamW's beta 1.", LEARNT, at_least=0, below=1)
    beta2: float = flag(0.95, "AdamW's beta 2.", LEARNT, at_least=0, below=1)
    grad_clip: float = flag(1.0, "Largest gradient norm; 0 turns clipping off.", LEARNT, at_least=0)


@dataclasses.dataclass(frozen=True)
class OutputFlags:
    """Output."""

    output_dir: str = flag("runs", "Where the run's directory is made.", OUTPUT, metavar="DIR")
    run_name: str | None = flag(
        None, "Name of the run's directory; by default date, time, model and process id.", OUTPUT,
        metavar="NAME",
    )  # fmt: skip
    export: bool = flag(
        False, "At the end, write the model as Hugging Face safetensors into the run's directory.",
        OUTPUT,
    )  # fmt: skip
    sample: int = flag(
        0, "At the end, print so many tokens of text that the model writes.", OUTPUT,
        scripts=(Script.ONE,), at_least=0,
    )  # fmt: skip
    no_tensorboard: bool = flag(False, "Do not write TensorBoard scalars.", OUTPUT)
    hparams: tuple[str, ...] = flag(
        (), "Flags that TensorBoard's HPARAMS tab lists; by default those that differ from their own "
        "default.", OUTPUT,
    )  # fmt: skip
    track: tuple[Literal["wandb", "mlflow", "openmetrics", "mllog", "csv"], ...] = flag(
        (), "Hand on the run at its end: to W&B (offline where nobody is logged in), MLflow, or as "
        "OpenMetrics, MLPerf's log or one row of a CSV in its directory.", OUTPUT,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SaveFlags:
    """Saving and going on."""

    save_every: int = flag(
        0, "Save the training state every so many steps, and at the end; 0 never.", OUTPUT, at_least=0,
        metavar="N",
    )  # fmt: skip
    save_keep: int = flag(
        2, "Checkpoints that are kept, the newest ones.", OUTPUT, needs="save_every", at_least=2
    )
    save_dir: str | None = flag(
        None, "Where checkpoints go, below the run's name; by default into the run's directory.", OUTPUT,
        metavar="DIR",
    )  # fmt: skip
    save_timeout: float = flag(
        600.0, "Seconds after which a save is given up.", OUTPUT, needs="save_every", above=0
    )
    no_save_on_signal: bool = flag(
        False, "End at once on SIGTERM, SIGINT or SIGUSR1, without saving first.", OUTPUT,
        needs="save_every",
    )  # fmt: skip
    no_save_async: bool = flag(
        False, "Wait for each save to be on disk before the next step.", OUTPUT, needs="save_every"
    )
    resume: str | None = flag(
        None,
        "Go on from a checkpoint: auto, the newest of --run-name and its restarts; or a run's or "
        "checkpoint's directory.",
        OUTPUT, metavar="auto|PATH",
    )  # fmt: skip
    resume_anyway: bool = flag(
        False, "Resume although hyperparameters, batch or data differ.", OUTPUT, needs="resume"
    )
    on_nan: Literal["stop", "continue"] = flag(
        "stop", "If the state is not finite when it would be saved: end the run, or go on unsaved.",
        OUTPUT, needs="save_every",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RankFlags:
    """Several devices."""

    nproc: int | None = flag(
        None, "Processes to start when no launcher did; by default one per GPU, two on a CPU.", OUTPUT,
        scripts=SEVERAL, at_least=1,
    )  # fmt: skip
    dist_timeout: float = flag(
        600.0, "Seconds after which a rank gives up waiting for another; NCCL a quarter later.", OUTPUT,
        scripts=SEVERAL, above=0,
    )  # fmt: skip
    max_restarts: int = flag(
        0, "How often all ranks start again after one failed, from the last checkpoint.", OUTPUT,
        scripts=SEVERAL, at_least=0,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DdpFlags:
    """DDP."""

    bucket_cap_mb: float = flag(
        25.0, "Gradients are reduced in buckets of this size [MiB].", SPEED, scripts=(Script.DDP,),
        above=0,
    )  # fmt: skip
    grad_compression: Literal["off", "bf16"] = flag(
        "off", "Reduce gradients in bf16, halving the traffic.", SPEED, scripts=(Script.DDP,)
    )
    ddp_mode: Literal["bucketed", "flat", "parameter"] = flag(
        "bucketed", "What an all-reduce takes: a bucket of gradients (DistributedDataParallel), all of "
        "them at once after backward, or each parameter's.", SPEED, scripts=(Script.DDP,),
    )  # fmt: skip
    no_ddp_overlap: bool = flag(
        False, "Reduce gradients after backward, not beside it.", SPEED, scripts=(Script.DDP,)
    )
    zero1: bool = flag(
        False, "Each rank keeps and updates a share of the optimizer's state (ZeRO stage 1).", SPEED,
        scripts=(Script.DDP,),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FsdpFlags:
    """FSDP."""

    reshard_after_forward: Literal["always", "never"] = flag(
        "always", "Free gathered blocks after forward, and gather them again in backward; or keep them.",
        SPEED, scripts=(Script.FSDP,),
    )  # fmt: skip
    reduce_dtype: Literal["fp32", "bf16"] = flag(
        "fp32", "Format in which gradients are reduced.", SPEED, scripts=SHARDED
    )
    prefetch: int = flag(
        1, "Blocks gathered ahead of the one that runs; 0 leaves it to PyTorch.", SPEED,
        scripts=(Script.FSDP,), at_least=0,
    )  # fmt: skip
    dp_replicate: int = flag(
        1, "Replicas of the sharded model (HSDP); must divide the number of ranks.", SPEED,
        scripts=SHARDED, at_least=1,
    )  # fmt: skip
    tp: int = flag(
        1, "Ranks that share the heads and the MLP of every block (tensor and sequence parallelism).",
        SPEED, scripts=SHARDED, at_least=1, headline=True,
    )  # fmt: skip
    cp: int = flag(
        1, "Ranks that share the tokens of every sample (context parallelism).", SPEED,
        scripts=SHARDED, at_least=1, headline=True,
    )  # fmt: skip
    ep: int = flag(
        1, "Ranks that share the experts of every layer (expert parallelism).", SPEED,
        scripts=SHARDED, at_least=1, headline=True,
    )  # fmt: skip
    cpu_offload: bool = flag(
        False, "Keep sharded parameters, gradients and optimizer state in host memory.", SPEED,
        scripts=(Script.FSDP,),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PipelineFlags:
    """Pipeline."""

    pp: int | None = flag(
        None, "Groups of neighbouring ranks between which the layers are cut into stages; by default 2.",
        SPEED, scripts=(Script.PP,), at_least=2,
    )  # fmt: skip
    pp_virtual: int = flag(
        1, "Stages of each rank: 1 runs the schedule 1F1B, more run Interleaved1F1B.", SPEED,
        scripts=(Script.PP,), at_least=1,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ProfileFlags:
    """Where the time and the memory go."""

    profile: bool = flag(
        False, "Capture some steps with torch.profiler: traces per rank, and a breakdown in result.json.",
        OUTPUT,
    )  # fmt: skip
    profile_start: int | None = flag(
        None, "First captured step, from 0; by default two extra steps after the measured ones.", OUTPUT,
        needs="profile", at_least=0,
    )  # fmt: skip
    profile_steps: int = flag(
        3, "Captured steps.", OUTPUT, needs="profile", at_least=1, at_most=10**5
    )
    profile_shapes: bool = flag(
        False,
        "Record the shapes and dtypes of each operator's inputs as well.",
        OUTPUT,
        needs="profile",
    )
    profile_stacks: bool = flag(
        False,
        "Record Python stacks and module names as well, and write them as stacks (flame graphs).",
        OUTPUT, needs="profile",
    )  # fmt: skip
    nsys_start: int | None = flag(
        None,
        "First step, from 0, between cudaProfilerStart and -Stop (nsys profile -c cudaProfilerApi).",
        OUTPUT, at_least=0,
    )  # fmt: skip
    nsys_end: int | None = flag(None, "Step after the last of these.", OUTPUT)
    nsys_ranks: tuple[int, ...] = flag(
        (), "Ranks that do so; by default all.", OUTPUT, needs="nsys_end"
    )
    profile_attention: bool = flag(
        False, "In captured steps compute attention in parts, a range each: scores, softmax, values.",
        OUTPUT,
    )  # fmt: skip
    no_observe: bool = flag(
        False, "Do not trace one more step at the end, which shows the kernels that ran.", OUTPUT
    )
    memory_snapshot: bool = flag(
        False,
        "Keep the allocator's history of the warm-up as memory.pickle, for PyTorch's memory viewer.",
        OUTPUT,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PeakFlags:
    """Peaks and price, for the figures."""

    peak_tflops: float | None = flag(
        None, "Dense BF16 peak of the device [TFLOP/s], where configs/hardware.json does not know it.",
        OUTPUT, above=0,
    )  # fmt: skip
    peak_fp8_tflops: float | None = flag(None, "Dense FP8 peak, likewise.", OUTPUT, above=0)
    usd_per_hour: float | None = flag(
        None, "Price of one device [US$/h], for usd_per_million_tokens.", OUTPUT, above=0
    )


@dataclasses.dataclass(frozen=True)
class Args(  # dataclasses take fields from the last base first
    PeakFlags, ProfileFlags, PipelineFlags, FsdpFlags, DdpFlags, RankFlags, SaveFlags, OutputFlags,
    OptimizerFlags, DataFlags, RecomputeFlags, CompileFlags, Fp8Flags, PrecisionFlags, BatchFlags,
    ModelFlags,
):  # fmt: skip
    """Train a GPT-2 or Llama-family model for some steps and say exactly how fast that was."""

    def part(self, group: type[Group]) -> Group:
        """One group of the flags."""
        return group(**{f.name: getattr(self, f.name) for f in dataclasses.fields(group)})


def declared(kind: Any) -> dict[str, Flag]:
    """The declarations of a dataclass's flags (or of an object's) by name."""
    return {f.name: f.metadata["flag"] for f in dataclasses.fields(kind)}


def defaults(kind: Any) -> dict[str, Any]:
    """The flags' defaults."""
    return {f.name: f.default for f in dataclasses.fields(kind)}


# Flags that a sweep may set: it chooses model and place itself.
SETTABLE = declared(Args).keys() - {"config", "output_dir", "run_name"}


@functools.cache
def of_kind(*kinds: Kind) -> frozenset[str]:
    """Names of the training scripts' flags of these kinds."""
    return frozenset(name for name, flag in declared(Args).items() if flag.kind in kinds)


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of the arguments that both sides have with different values, output flags apart."""
    names = [n for n in left if n in right and n not in of_kind(OUTPUT)]
    return [n for n in names if left[n] != right[n]]


def changed(args: Any, names: Iterable[str]) -> str | None:
    """The first of these flags that is not at its default."""
    default = defaults(args)
    return next((name for name in names if getattr(args, name) != default[name]), None)


def flag_of(name: str) -> str:
    """A field as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def check_bounds(args: Any) -> None:
    """UsageError for a flag outside its declared bounds, or without the flag that it needs."""
    for name, flag in declared(args).items():
        if flag.needs and not getattr(args, flag.needs) and changed(args, [name]):
            raise UsageError(f"{flag_of(name)} needs {flag_of(flag.needs)}")
        value = getattr(args, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if why := _outside(flag, value):
            raise UsageError(f"{flag_of(name)} {value}: must be {why}")


def _outside(flag: Flag, value: float) -> str | None:
    """The bound that a value breaks, in words; None where it breaks none."""
    if flag.below is not None and not flag.at_least <= value < flag.below:
        return f"from {flag.at_least:g} to below {flag.below:g}"
    if flag.above is not None and not flag.above < value < float("inf"):
        return f"above {flag.above:g} and finite"
    if flag.at_least is not None and not flag.at_least <= value < float("inf"):
        return f"at least {flag.at_least:g}"
    most = LARGEST if flag.at_most is None and isinstance(value, int) else flag.at_most
    return f"at most {most}" if most is not None and value > most else None


def parse_sac_freq(text: str) -> tuple[int, int]:
    """ "q/p" as two whole numbers, 0 < q <= p; UsageError with the reason."""
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
