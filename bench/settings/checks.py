"""What a run's arguments must be, before anything starts. Needs no torch.

What depends on the model, the device or the number of ranks is checked where these are known.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bench.errors import UsageError
from bench.settings.combinations import GRAPH_MODES, combination_of, refusal
from bench.settings.flags import PROFILER_WARMUP, Args, captured_steps, parse_sac_freq, window_end


def check(args: Args, prog: str) -> Args:
    """The arguments with `auto` made definite; UsageError in one line where a run could not use them."""
    args = resolve_fp8(args)
    check_args(args)
    check_entrypoint(args, prog)
    check_combination(args, prog)
    return args


def check_args(args: Args) -> None:
    """Refuse values that no run can use; what depends on model or device is checked where known."""
    for name in ("bsz", "grad_acc_steps", "n_steps", "pad_vocab", "val_batches"):
        at_least(args, name, 1)
    for name in ("warmup_steps", "n_workers", "seed", "lr_warmup_steps"):
        at_least(args, name, 0)
    for name in ("lr", "min_lr_ratio", "weight_decay", "grad_clip"):
        at_least(args, name, 0.0)
    above_zero(args, "seq_len", "peak_tflops", "peak_fp8_tflops", "usd_per_hour",
               "dist_timeout", "bucket_cap_mb")  # fmt: skip
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise UsageError(f"{flag_of(name)} {getattr(args, name)}: must be from 0 to below 1")
    for name in ("nproc", "global_bsz"):
        if getattr(args, name) is not None:
            at_least(args, name, 1)
    for name in ("max_restarts", "prefetch"):
        at_least(args, name, 0)
    at_least(args, "dp_replicate", 1)
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
    _check_capture(args)
    if args.run_name is not None and (
        args.run_name in ("", ".", "..") or re.search(r"[/\\\0]", args.run_name)
    ):
        raise UsageError(f"--run-name {args.run_name!r}: must be a plain directory name")


def _check_capture(args: Args) -> None:
    if args.memory_snapshot and args.warmup_steps < 2:
        raise UsageError("--memory-snapshot looks at the warm-up; use --warmup-steps 2 or more")
    if not args.profile:
        names = ("profile_start", "profile_steps", "profile_shapes", "profile_stacks")
        if wrong := changed(args, names):
            raise UsageError(f"{flag_of(wrong)} needs --profile")
    at_least(args, "profile_steps", 1)
    for name in ("profile_start", "nsys_start"):
        if getattr(args, name) is not None:
            at_least(args, name, 0)
    if (args.nsys_start is None) != (args.nsys_end is None):
        raise UsageError("--nsys-start and --nsys-end go together: first step, step after the last")
    if args.nsys_start is not None:
        if args.nsys_end <= args.nsys_start:
            raise UsageError(
                f"--nsys-end {args.nsys_end}: must be above --nsys-start {args.nsys_start}"
            )
        if args.profile:
            raise UsageError("--nsys-start: two profilers disturb each other; leave out --profile")
    steps, latest = captured_steps(args), window_end(args) + PROFILER_WARMUP
    if steps and steps.start > latest:
        flag = "profile-start" if args.profile else "nsys-start"
        raise UsageError(
            f"--{flag} {steps.start}: the run's own steps end before {window_end(args)}, and it is "
            f"prolonged for a capture up to step {latest} at the latest"
        )


FP8_RECIPES = {
    "te": ("current", "delayed", "blockwise", "mxfp8"),
    "torchao": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
}


def resolve_fp8(args: Args) -> Args:
    """`auto` of the FP8 flags made definite; UsageError where they contradict each other."""
    if not args.use_fp8:
        names = (
            "fp8_backend",
            "fp8_recipe",
            "fp8_emulate",
            "fp8_all_gather",
            "fp8_primary_weights",
        )
        if wrong := changed(args, names):
            raise UsageError(f"{flag_of(wrong)} needs --use-fp8")
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
    if args.fp8_primary_weights:
        _check_primary_weights(dataclasses.replace(args, fp8_backend=backend, fp8_recipe=recipe))
    return dataclasses.replace(args, fp8_backend=backend, fp8_recipe=recipe)


def _check_primary_weights(args: Args) -> None:
    """UsageError where --fp8-primary-weights meets what Transformer Engine cannot do with them."""
    if args.fp8_backend != "te":
        raise UsageError(
            f"--fp8-primary-weights: --fp8-backend {args.fp8_backend} has none; use --fp8-backend te "
            "without --pt-compile, or --fp8-all-gather"
        )
    against = {
        "--fp8-recipe blockwise": args.fp8_recipe == "blockwise",
        "--sac-freq": args.sac_freq,
        "--optimizer sgd": args.optimizer == "sgd",
        "--cpu-offload": args.cpu_offload,
        "--dp-replicate": args.dp_replicate > 1,
        "--export": args.export,
        # Its LayerNormMLP without FP8 dequantizes weights of the other recipes only.
        "--val-data and --fp8-recipe mxfp8": args.val_data and args.fp8_recipe == "mxfp8",
    }
    if wrong := [flag for flag, given in against.items() if given]:
        raise UsageError(f"--fp8-primary-weights does not work with {wrong[0]}; leave one out")


def check_combination(args: Args, prog: str) -> None:
    """Refuse toggles that do not go together, as bench/settings/combinations.py says."""
    if rule := refusal(combination_of(args, prog)):
        flags = {
            "amp": f"--amp {args.amp}",
            "fp8": f"--use-fp8 --fp8-backend {args.fp8_backend}",
            "compile": f"--pt-compile --compile-mode {args.compile_mode}",
            "sac": f"--sac-freq {args.sac_freq} --sac-policy {args.sac_policy}",
        }
        given = " ".join(flags[axis] for axis in rule.when if axis in flags)
        raise UsageError(f"{given}: {rule.reason}; use {rule.instead}")


DDP_FLAGS = ("bucket_cap_mb", "grad_compression")
FSDP_FLAGS = (
    "reshard_after_forward",
    "reduce_dtype",
    "prefetch",
    "dp_replicate",
    "cpu_offload",
    "fp8_all_gather",
    "fp8_primary_weights",
)
RANK_FLAGS = ("nproc", "dist_timeout", "max_restarts")


def check_entrypoint(args: Args, prog: str) -> None:
    """Refuse flags of the other scripts, and what this one cannot do."""
    if prog != "train_ddp.py":
        _refuse(args, DDP_FLAGS, prog, "train_ddp.py")
    if prog != "train_fsdp.py":
        _refuse(args, FSDP_FLAGS, prog, "train_fsdp.py")
    if prog == "train.py":
        _refuse(args, RANK_FLAGS, prog, "train_ddp.py or train_fsdp.py")
    if args.grad_compression != "off" and args.pass_type != "step":
        raise UsageError("--grad-compression needs --pass-type step")
    if prog == "train_fsdp.py" and args.amp == "fp16" and args.optimizer == "sgd":
        raise UsageError(
            "--amp fp16: PyTorch has no fused SGD for sharded parameters; use --optimizer adamw"
        )
    if args.amp == "fp16" and args.cpu_offload:
        raise UsageError(
            "--amp fp16: its scale is on the GPU and with --cpu-offload the gradients are not; "
            "use --amp bf16"
        )


def _refuse(args: Args, names: Sequence[str], prog: str, where: str) -> None:
    if name := changed(args, names):
        raise UsageError(f"{flag_of(name)} has no meaning for {prog}; it is for {where}")


def changed(args: Any, names: Iterable[str]) -> str | None:
    """The first of these fields of a dataclass that is not at its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    return next((name for name in names if getattr(args, name) != defaults[name]), None)


# A result keeps the time of every step.
MOST = {"n_steps": 10**7, "warmup_steps": 10**7, "profile_steps": 10**5, "seed": 2**63 - 1}


def at_least(args: Any, name: str, minimum: float) -> None:
    """UsageError if a field is below the minimum, or too large for anything."""
    value = getattr(args, name)
    if not minimum <= value < float("inf"):
        raise UsageError(f"{flag_of(name)} {value}: must be at least {minimum:g}")
    most = MOST.get(name, 2**31)
    if isinstance(value, int) and value > most:
        raise UsageError(f"{flag_of(name)} {value}: must be at most {most}")


def above_zero(args: Any, *names: str) -> None:
    """UsageError if one of these fields is given and not above 0 and finite."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{flag_of(name)} {value}: must be above 0 and finite")


def flag_of(name: str) -> str:
    """A field as it is written on the command line."""
    return f"--{name.replace('_', '-')}"
