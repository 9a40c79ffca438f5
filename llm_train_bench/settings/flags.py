"""The flags of the training scripts, each declared once with bounds, scripts and kind. Needs no torch.

A class is a group of flags in --help: its docstring holds the title and the help of each flag. Checks,
help, compare.py and the gate read what a flag declares here.
"""

import dataclasses
import enum
import functools
import inspect
import math
import re
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.number_text import parse_number


class Script(enum.StrEnum):
    """The training scripts, by the names of their files."""

    ONE = "train.py"
    DDP = "train_ddp.py"
    FSDP = "train_fsdp.py"
    PP = "train_pp.py"


# The effect of a flag: on what is learnt, the speed, the length, or only on what is written.
Kind = Literal["hyperparameter", "speed", "length", "output"]
LEARNT, SPEED, LENGTH, OUTPUT = get_args(Kind)
EVERYWHERE, SEVERAL = tuple(Script), (Script.DDP, Script.FSDP, Script.PP)
SHARDED = (Script.FSDP, Script.PP)
# --pp of train_pp.py without the flag.
USUAL_STAGES = 2
LARGEST = 2**31
# Words of YAML.
SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Compile modes that record CUDA graphs.
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag's declaration, besides name and default.

    Values outside the bounds are refused; `needs` names the flag without which this one has no meaning.
    """

    kind: Kind | None = None
    scripts: tuple[Script, ...] = EVERYWHERE
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    needs: str | None = None
    headline: bool = False  # shown beside a run even at its default
    usual: Any = None  # in results, in place of a default that each run resolves
    metavar: str | None = None
    positional: bool = False  # stands on the command line without a flag
    common: bool = False  # shown by --help, and in the README
    thousand: int = 1000  # what k stands for
    annotation: Any = None  # the field's, which `declared` enters

    @property
    def many(self) -> bool:
        """Whether the flag takes several values."""
        return get_origin(self.annotation) is tuple

    @property
    def optional(self) -> bool:
        """Whether the flag may have no value."""
        return NoneType in get_args(self.annotation)

    @property
    def options(self) -> list[Any]:
        """The words and the types of a value."""
        hint = get_args(self.annotation)[0] if self.many else self.annotation
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        options = [option for part in parts for option in get_args(part) or (part,)]
        return [option for option in options if option is not NoneType]

    def read(self, value: Any) -> Any:
        """The flag's value of a text, or of a value in JSON; ValueError if it is none."""
        if self.many:
            several = value if isinstance(value, list | tuple) else [value]
            return tuple(map(self._read_one, several))
        return self._read_one(value)

    def _read_one(self, value: Any) -> Any:
        options, text = self.options, str(value)
        if bool in options and text.lower() in SWITCH:
            return SWITCH[text.lower()]
        is_text = not isinstance(value, bool | list | tuple | dict)
        if is_text and (text in options or str in options):
            return text
        if not is_text or (int not in options and float not in options):
            raise ValueError(f"{value!r} is none of {options}")
        number = int if int in options else float
        return parse_number(text, number, self.thousand, self.metavar == "PERCENT")


def flag(default: Any, kind: Kind | None = None, **declared: Any) -> Any:
    """A field of a dataclass of flags; `declared` are the fields of `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(kind, **declared)})


Attention = Literal["auto", "flash", "cudnn", "efficient", "math", "flex", "blocks"]
Amp = Literal["auto", "bf16", "fp16", "off"]
TeRecipe = Literal["current", "delayed", "blockwise", "mxfp8", "nvfp4"]
TorchaoRecipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    """Model.

    config: Model: a Hugging Face config.json, or a directory with one. Or use --from FILE, the
        config and flags of a result.json or YAML file; later flags override the file.
    layers: Train the first N layers of the config.
    route: How experts are chosen for a token: by the learned router, or round-robin (balanced).
    """

    config: str = flag(dataclasses.MISSING, LENGTH, metavar="CONFIG", positional=True, common=True)
    layers: int | None = flag(None, LENGTH, at_least=1, common=True)
    route: Literal["learned", "balanced"] = flag("learned", LEARNT, headline=True)


@dataclasses.dataclass(frozen=True)
class BatchFlags:
    """Batch and length of the run.

    bsz: Micro batch [samples per device]. auto: the largest that leaves a tenth of the device's
        memory free, according to the estimate.
    seq_len: Sequence length [tokens]; 4k is 4096. By default the model's maximum, at most 4096.
    grad_acc_steps: Micro batches accumulated into one optimizer step. train_pp.py uses 2 x --pp
        instead of 1.
    global_bsz: Samples of one optimizer step over all ranks. Sets --grad-acc-steps; must be a
        multiple of --bsz x ranks with different data.
    n_steps: Measured steps.
    warmup_steps: Steps before the measured ones (compilation, autotuning, allocator), timed
        separately.
    warmup_seconds: Minimum duration of the warm-up, so that a GPU reaches the clocks of a long
        run. If the steps take less, matmuls fill the rest. By default 10 on a GPU, 0 on a CPU.
    pass_type: Work of a step: the forward pass, forward and backward, or the full training step.
    """

    bsz: int | Literal["auto"] = flag(
        4, SPEED, at_least=1, headline=True, metavar="N|auto", common=True
    )
    seq_len: int | None = flag(None, LEARNT, above=0, headline=True, common=True, thousand=1024)
    grad_acc_steps: int = flag(1, SPEED, at_least=1, headline=True, common=True)
    global_bsz: int | None = flag(None, LENGTH, at_least=1)
    n_steps: int = flag(50, LENGTH, at_least=1, at_most=10**7, common=True)
    warmup_steps: int = flag(10, LENGTH, at_least=0, at_most=10**7)
    warmup_seconds: float | None = flag(None, LENGTH, at_least=0, at_most=3600)
    pass_type: Literal["forward", "forward-backward", "step"] = flag("step", LEARNT)


@dataclasses.dataclass(frozen=True)
class PrecisionFlags:
    """Device and number formats.

    device: auto uses a GPU (NVIDIA or AMD, both named cuda) if there is one.
    amp: Mixed precision of matmuls; parameters stay in fp32. off is plain fp32. auto: bf16 where the
        device has instructions for it; otherwise fp16 on a GPU, off on a CPU.
    tf32: Allow TF32 tensor cores in fp32 matmuls (NVIDIA).
    attention: Attention kernel. auto: blocks for short sequences on a CPU; otherwise PyTorch chooses.
        flex is for sliding windows. blocks is for a CPU, and keeps the probabilities for backward.
    linear: Library of the linear layers. In fp32 on a CPU: PyTorch's choice (plain) or oneDNN; auto
        is oneDNN for long steps on AMD's CPUs. te: Transformer Engine without FP8, to compare its
        FP8 with.
    """

    device: Literal["auto", "cuda", "cpu"] = flag("auto", OUTPUT)
    amp: Amp = flag("auto", SPEED, headline=True, usual="bf16", common=True)
    tf32: bool = flag(False, SPEED)
    attention: Attention = flag("auto", SPEED)
    linear: Literal["auto", "plain", "onednn", "te"] = flag("auto", SPEED)


@dataclasses.dataclass(frozen=True)
class Fp8Flags:
    """FP8.

    use_fp8: Run the linear layers of the blocks in FP8.
    fp8_backend: FP8 library. auto: the one that has --fp8-recipe. Without a recipe: te, or torchao
        with --pt-compile, --fp8-emulate or --fp8-all-gather.
    fp8_recipe: Scaling of tensors to FP8. te: current (default), delayed, blockwise, mxfp8, nvfp4
        (4 bits). torchao: tensorwise (default), rowwise, rowwise_with_gw_hp (weight gradients in bf16).
    fp8_emulate: Compute the FP8 results in higher precision, on any device (torchao). Not a
        measure of speed.
    fp8_all_gather: Gather the weights of the blocks in FP8 (torchao's tensorwise recipe).
    """

    use_fp8: bool = flag(False, SPEED, headline=True, common=True)
    fp8_backend: Literal["auto", "te", "torchao"] = flag("auto", SPEED, needs="use_fp8")
    fp8_recipe: Literal["auto", TeRecipe, TorchaoRecipe] = flag("auto", SPEED, needs="use_fp8")
    fp8_emulate: bool = flag(False, SPEED, needs="use_fp8")
    fp8_all_gather: bool = flag(False, SPEED, needs="use_fp8", scripts=(Script.FSDP,))


@dataclasses.dataclass(frozen=True)
class CompileFlags:
    """Compilation and activation checkpointing.

    pt_compile: Compile each block and the loss with torch.compile.
    compile_mode: Mode of torch.compile. reduce-overhead and max-autotune use CUDA graphs.
    sac_freq: Recompute the activations of Q out of every P blocks in backward: 1/1 for all blocks,
        1/4 for every fourth.
    sac_policy: What a chosen block recomputes. block: everything. op: everything except matmuls,
        attention (without dropout) and collectives.
    offload_activations: Keep what blocks save for backward in host memory. Copies run beside the
        computation. With --sac-freq 1/1 these are only the inputs of blocks.
    """

    pt_compile: bool = flag(False, SPEED, headline=True, common=True)
    compile_mode: CompileMode = flag("default", SPEED, needs="pt_compile")
    sac_freq: str | None = flag(None, SPEED, metavar="Q/P", headline=True, common=True)
    sac_policy: Literal["block", "op"] = flag("block", SPEED, needs="sac_freq")
    offload_activations: bool = flag(False, SPEED)


@dataclasses.dataclass(frozen=True)
class DataFlags:
    """Weights and data.

    init_from: Directory of Hugging Face safetensors to start from, instead of random values.
    pad_vocab: Pad embedding and head to a multiple of this many rows (128 is faster). The loss is
        unchanged.
    data: Training tokens: synthetic (random), or a .bin file of prepare_data.py, llm.c or nanoGPT.
    data_dtype: Format of token files without a header, such as nanoGPT's. auto refuses them.
    pack: Samples are packed documents: positions begin anew with each, attention stays inside, and no
        label crosses. Documents of a token file end where its index (prepare_data.py) says.
    pack_lengths: Lengths of synthetic documents: a file with a JSON list to draw from, or mean [tokens]
        and sigma of a lognormal distribution, such as 800,1.2.
    pack_separator: Id of the token that ends each document of a token file, instead of an index.
    val_data: A .bin file for a validation loss before and after training.
    eval_every: Also evaluate the validation loss every N steps; 0 never.
    seed: Seed of parameters, data order, synthetic tokens and dropout.
    """

    init_from: str | None = flag(None, LEARNT, metavar="DIR")
    pad_vocab: int = flag(1, SPEED, at_least=1)
    data: str = flag("synthetic", LEARNT, metavar="FILE", common=True)
    data_dtype: Literal["auto", "uint16", "uint32"] = flag("auto", LEARNT)
    pack: bool = flag(False, LEARNT, headline=True)
    pack_lengths: str | None = flag(None, LEARNT, needs="pack", metavar="FILE|MEAN,SIGMA")
    pack_separator: int | None = flag(None, LEARNT, needs="pack", at_least=0)
    val_data: str | None = flag(None, LENGTH, metavar="FILE")
    eval_every: int = flag(0, LENGTH, needs="val_data", at_least=0)
    seed: int = flag(0, LEARNT, at_least=0, at_most=2**63 - 1)


@dataclasses.dataclass(frozen=True)
class LoraFlags:
    """Low-rank adapters.

    lora_rank: Freeze the model and train adapters of this rank beside its linear layers (LoRA).
        --export writes them for peft.
    lora_alpha: Scale of the adapters, divided by the rank. By default twice the rank.
    lora_targets: Linear layers that have adapters, by their names in Hugging Face's files, such as
        q_proj,v_proj. all: all of the blocks; in models with experts, those of attention.
    """

    lora_rank: int | None = flag(None, LEARNT, at_least=1, at_most=4096, headline=True)
    lora_alpha: float | None = flag(None, LEARNT, above=0, needs="lora_rank")
    lora_targets: str = flag("all", LEARNT, needs="lora_rank", metavar="NAMES")


@dataclasses.dataclass(frozen=True)
class OptimizerFlags:
    """Optimizer.

    optimizer: Fused optimizer; adamw has betas 0.9 and 0.95, sgd a momentum of 0.9. muon
        orthogonalizes the momentum of the blocks' matrices, and leaves the rest to adamw.
    lr: Peak learning rate.
    min_lr_ratio: Final learning rate of the cosine schedule, as a fraction of the peak.
    lr_warmup_steps: Steps of linear warm-up of the learning rate.
    weight_decay: Weight decay of matrices; vectors have none.
    grad_clip: Largest gradient norm; 0 turns clipping off.
    bf16_weights: Keep weights, gradients and the optimizer's moments in bf16, without exact copies.
    """

    optimizer: Literal["adamw", "sgd", "muon"] = flag("adamw", LEARNT)
    lr: float = flag(6e-4, LEARNT, at_least=0)
    min_lr_ratio: float = flag(0.1, LEARNT, at_least=0, at_most=1)
    lr_warmup_steps: int = flag(10, LEARNT, at_least=0)
    weight_decay: float = flag(0.1, LEARNT, at_least=0)
    grad_clip: float = flag(1.0, LEARNT, at_least=0)
    bf16_weights: bool = flag(False, LEARNT, headline=True)


@dataclasses.dataclass(frozen=True)
class OutputFlags:
    """Output.

    output_dir: Parent directory of the run's directory.
    run_name: Name of the run's directory. By default date, time, model and process id.
    no_tensorboard: Do not write TensorBoard scalars.
    track: Send the run to Weights & Biases while it goes on; offline if nobody is logged in.
    quiet: Print only the final table, and errors.
    """

    output_dir: str = flag("runs", OUTPUT, metavar="DIR", common=True)
    run_name: str | None = flag(None, OUTPUT, metavar="NAME")
    no_tensorboard: bool = flag(False, OUTPUT)
    track: tuple[Literal["wandb"], ...] = flag((), OUTPUT)
    quiet: bool = flag(False, OUTPUT)


@dataclasses.dataclass(frozen=True)
class SaveFlags:
    """Checkpoints, resuming and export.

    save_every: Save the training state every N steps, at the end, and on SIGTERM, SIGINT or
        SIGUSR1; 0 never.
    resume: Resume from a checkpoint. auto: continue the run --run-name, or start it. PATH: start a
        new run from the checkpoint of that path, or from the newest one of the run there.
    export: At the end, export the model as Hugging Face safetensors.
    """

    save_every: int = flag(0, OUTPUT, at_least=0)
    resume: str | None = flag(None, OUTPUT, metavar="auto|PATH")
    export: bool = flag(False, OUTPUT)


@dataclasses.dataclass(frozen=True)
class ParallelFlags:
    """Several devices (processes, DDP, FSDP, pipelines).

    nproc: Processes to start without a launcher. By default one per GPU, two on a CPU.
    dist_timeout: Seconds after which a rank stops waiting for another (NCCL: a quarter more).
    bucket_cap_mb: Size of DDP's buckets, in which gradients are reduced [MiB].
    zero1: Shard the optimizer state over the ranks (ZeRO stage 1).
    reshard_after_forward: always: free gathered blocks after forward and gather them again in
        backward. never: keep them.
    reduce_dtype: Format in which gradients are reduced; bf16 halves the traffic (DDP too).
    dp_replicate: Replicas of the sharded model (HSDP); must divide the number of ranks.
    tp: Split heads and MLP of every block over N ranks (tensor and sequence parallelism).
    cp: Split the tokens of every sample over N ranks (context parallelism).
    ep: Split the experts of every layer over N ranks (expert parallelism).
    cpu_offload: Keep sharded parameters, gradients and optimizer state in host memory.
    reduce_last: Reduce gradients only after the last micro batch. Until then each rank keeps all
        gradients whole.
    pp: Split the layers over N groups of neighbouring ranks. train_pp.py uses 2 by default.
    pp_virtual: Stages per rank. 1 uses the schedule 1F1B, more use Interleaved1F1B.
    pp_layers: Blocks of each stage, such as 16 16 15 with --pp 3. By default as equal as can be.
    """

    nproc: int | None = flag(None, OUTPUT, scripts=SEVERAL, at_least=1)
    dist_timeout: float = flag(600.0, OUTPUT, scripts=SEVERAL, above=0)
    bucket_cap_mb: float = flag(25.0, SPEED, scripts=(Script.DDP,), above=0)
    zero1: bool = flag(False, SPEED, scripts=(Script.DDP,))
    reshard_after_forward: Literal["always", "never"] = flag(
        "always", SPEED, scripts=(Script.FSDP,)
    )
    reduce_dtype: Literal["fp32", "bf16"] = flag("fp32", SPEED, scripts=SEVERAL)
    dp_replicate: int = flag(1, SPEED, scripts=SHARDED, at_least=1)
    tp: int = flag(1, SPEED, scripts=SHARDED, at_least=1, headline=True, common=True)
    cp: int = flag(1, SPEED, scripts=SHARDED, at_least=1, headline=True, common=True)
    ep: int = flag(1, SPEED, scripts=SHARDED, at_least=1, headline=True, common=True)
    cpu_offload: bool = flag(False, SPEED, scripts=(Script.FSDP,))
    reduce_last: bool = flag(False, SPEED, scripts=(Script.FSDP,))
    pp: int | None = flag(None, SPEED, scripts=(Script.PP,), at_least=2, common=True)
    pp_virtual: int = flag(1, SPEED, scripts=(Script.PP,), at_least=1)
    pp_layers: tuple[int, ...] = flag((), SPEED, scripts=(Script.PP,))


@dataclasses.dataclass(frozen=True)
class ProfileFlags:
    """Profiles, peak and price.

    profile: Capture some steps with torch.profiler: traces per rank, and a breakdown in
        result.json.
    profile_steps: Captured steps.
    nsys_start: First captured step, from 0: cudaProfilerStart runs before it (nsys profile -c
        cudaProfilerApi).
    nsys_end: First step after the captured ones.
    no_observe: Do not trace an extra step at the end to observe which kernels ran.
    memory_snapshot: Print the memory of a step by kind. On a GPU also record the allocator's history
        of the warm-up in memory.pickle, for PyTorch's memory viewer.
    peak_tflops: Dense BF16 peak of a device that configs/hardware.json does not list [TFLOP/s].
    usd_per_hour: Price of one device [US$/h], for usd_per_million_tokens.
    """

    profile: bool = flag(False, OUTPUT, common=True)
    profile_steps: int = flag(3, OUTPUT, needs="profile", at_least=1, at_most=10**5)
    nsys_start: int | None = flag(None, OUTPUT, at_least=0, at_most=10**7)
    nsys_end: int | None = flag(None, OUTPUT, at_most=10**7)
    no_observe: bool = flag(False, OUTPUT)
    memory_snapshot: bool = flag(False, OUTPUT)
    peak_tflops: float | None = flag(None, OUTPUT, above=0)
    usd_per_hour: float | None = flag(None, OUTPUT, above=0)


@dataclasses.dataclass(frozen=True)
class Args(  # dataclasses take fields from the last base first
    ProfileFlags, ParallelFlags, SaveFlags, OutputFlags, OptimizerFlags, LoraFlags, DataFlags,
    CompileFlags, Fp8Flags, PrecisionFlags, BatchFlags, ModelFlags,
):  # fmt: skip
    """Train a language model for some steps and report its speed."""


@functools.cache
def declared(kind: type) -> dict[str, Flag]:
    """The declarations of a dataclass's flags by name."""
    fields = dataclasses.fields(kind)
    return {f.name: dataclasses.replace(f.metadata["flag"], annotation=f.type) for f in fields}


def help_texts(kind: type) -> dict[str, str]:
    """The help of a dataclass's flags by name, from the docstrings of the classes that declare them."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        paragraphs = re.findall(
            r"^(\w+): (.+(?:\n    .+)*)", inspect.getdoc(base) or "", re.MULTILINE
        )
        texts |= {name: " ".join(text.split()) for name, text in paragraphs}
    return texts


def defaults(kind: Any) -> dict[str, Any]:
    """The flags' defaults."""
    return {f.name: f.default for f in dataclasses.fields(kind)}


def usual_values() -> dict[str, Any]:
    """What results hold of the training scripts' flags that were not given."""
    flags = declared(Args)
    return {k: v if flags[k].usual is None else flags[k].usual for k, v in defaults(Args).items()}


# Flags that are gone, with their last defaults. A result that has one at its default is like any other;
# at another value it is a setting that nobody can repeat. `...`: the flag was of kind OUTPUT.
REMOVED: dict[str, Any] = {}


def present_flags(args: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a result of any version, as this version has them.

    Flags that are newer than the result are at their defaults. Flags that are gone are left out at their
    last defaults, and stay otherwise. JSON's lists are tuples, as in the defaults.
    """
    flags = {k: v for k, v in usual_values().items() if v is not dataclasses.MISSING}
    for name, value in args.items():
        value = tuple(value) if isinstance(value, list) else value
        if name not in REMOVED or REMOVED[name] not in (..., value):
            flags[name] = value
    return flags


def without_meaning(flags: Mapping[str, Any]) -> set[str]:
    """Names of the flags that depend on one that is off."""
    needed = {name: flag.needs for name, flag in declared(Args).items() if flag.needs}
    return {name for name, other in needed.items() if not flags.get(other)}


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


def changed(args: Any) -> list[str]:
    """The flags that are not at their defaults."""
    return [n for n, default in defaults(type(args)).items() if getattr(args, n) != default]


def flag_of(name: str) -> str:
    """A field as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def field_of(arg: str) -> str:
    """A word of the command line as a field: seq_len for --seq-len=4096."""
    return arg.partition("=")[0].lstrip("-").replace("-", "_")


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """Flags as a command line: true is the bare flag, false and null leave it out."""
    arguments = []
    for name, value in flags.items():
        flag = flag_of(name)
        if value is True:
            arguments.append(flag)
        elif isinstance(value, list | tuple):
            arguments += [flag, *map(str, value)] if value else []
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    return arguments


def check_bounds(args: Any, given: Collection[str] = ()) -> None:
    """UsageError for a flag outside its declared bounds, or without the flag that it needs.

    A flag in `given` needs that other flag also at its default.
    """
    asked = {*changed(args), *given}
    for name, flag in declared(type(args)).items():
        if flag.needs and not getattr(args, flag.needs) and name in asked:
            raise UsageError(f"{flag_of(name)} needs {flag_of(flag.needs)}")
        value = getattr(args, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and (why := _outside(flag, value)):
            percent = "; write per cent as 5% or 0.05" if flag.metavar == "PERCENT" else ""
            raise UsageError(f"{flag_of(name)} {value}: must be {why}{percent}")


def _outside(flag: Flag, value: float) -> str | None:
    """The bound that a value breaks, in words; None where it breaks none."""
    if not math.isfinite(value):
        return "finite"
    if flag.above is not None and value <= flag.above:
        return f"above {flag.above:g}"
    if flag.at_least is not None and value < flag.at_least:
        return f"at least {flag.at_least:g}"
    most = LARGEST if flag.at_most is None and isinstance(value, int) else flag.at_most
    return f"at most {most}" if most is not None and value > most else None
