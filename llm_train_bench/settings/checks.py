"""Refusing flags that no run could use: values, contradictions, other scripts' flags. Needs no torch.

What depends on the model, the world or the device, llm_train_bench/settings/plan.py refuses.
"""

import dataclasses
import re
from pathlib import Path
from typing import TypeVar

from llm_train_bench.errors import UsageError
from llm_train_bench.settings.combinations import combination_of, refusal
from llm_train_bench.settings.flags import (
    GRAPH_MODES,
    Args,
    Fp8Flags,
    Script,
    changed,
    check_bounds,
    declared,
    defaults,
    flag_of,
    parse_sac_freq,
)

Checked = TypeVar("Checked", bound=Args)

FP8_RECIPES = {
    "te": ("current", "delayed", "blockwise", "mxfp8"),
    "torchao": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
}


def check(args: Checked, script: Script) -> Checked:
    """The arguments with `auto` resolved; UsageError in one line where a run could not use them."""
    for name, flag in declared(Args).items():
        if script not in flag.scripts and changed(args, [name]):
            raise UsageError(foreign(name, script))
    check_bounds(args)
    if args.use_fp8:
        backend, recipe = resolve_fp8(args.part(Fp8Flags), args.pt_compile)
        args = dataclasses.replace(args, fp8_backend=backend, fp8_recipe=recipe)
    for rule in contradictions(args, script):
        raise UsageError(rule)
    if broken := refusal(combination_of(args, script)):
        flags = {
            "amp": f"--amp {args.amp}",
            "fp8": f"--use-fp8 --fp8-backend {args.fp8_backend}",
            "compile": f"--pt-compile --compile-mode {args.compile_mode}",
            "sac": f"--sac-freq {args.sac_freq} --sac-policy {args.sac_policy}",
            "layout": " ".join(
                f"--{n} {getattr(args, n)}" for n in ("tp", "cp", "ep") if getattr(args, n) > 1
            ),
        }
        given = " ".join(flags[axis] for axis in broken.when if axis in flags)
        raise UsageError(f"{given}: {broken.reason}; use {broken.instead}")
    return args


def foreign(name: str, script: Script) -> str:
    """What is wrong with a flag of other scripts."""
    scripts = " or ".join(declared(Args)[name].scripts)
    return f"{flag_of(name)} has no meaning for {script}; it is for {scripts}"


def resolve_fp8(args: Fp8Flags, compiled: bool) -> tuple[str, str]:
    """Backend and recipe with `auto` made definite; UsageError where they contradict each other."""
    backend, recipe = args.fp8_backend, args.fp8_recipe
    if backend == "auto":
        by_recipe = next((b for b, recipes in FP8_RECIPES.items() if recipe in recipes), None)
        torchao = compiled or args.fp8_emulate or args.fp8_all_gather
        backend = by_recipe or ("torchao" if torchao else "te")
    if recipe == "auto":
        recipe = FP8_RECIPES[backend][0]
    if recipe not in FP8_RECIPES[backend]:
        raise UsageError(
            f"--fp8-recipe {recipe} is not one of --fp8-backend {backend}: "
            f"{', '.join(FP8_RECIPES[backend])}"
        )
    return backend, recipe


def contradictions(args: Args, script: Script):
    """Every message on flags that do not go together; the table of toggles is in combinations.py."""
    if args.sac_freq is not None:
        parse_sac_freq(args.sac_freq)
        if args.pass_type == "forward":
            yield "--sac-freq needs a backward; use --pass-type forward-backward or step"
    elif args.sac_policy == "op":
        yield "--sac-policy op needs --sac-freq, for example 1/1"
    if args.global_bsz is not None and args.grad_acc_steps != 1:
        yield "--global-bsz sets --grad-acc-steps; give one of the two"
    if args.compile_mode in GRAPH_MODES and args.warmup_steps < 3:
        yield (
            f"--warmup-steps {args.warmup_steps}: CUDA graphs are recorded in the first three steps; "
            "use at least 3"
        )
    if args.compile_mode != "default" and not args.pt_compile:
        yield f"--compile-mode {args.compile_mode} needs --pt-compile"
    for name in args.hparams:
        if name.replace("-", "_") not in declared(args):
            yield f"--hparams {name}: no such flag; --help lists them"
    if args.run_name is not None and (
        args.run_name in ("", ".", "..") or re.search(r"[/\\\0\ud800-\udfff]", args.run_name)
    ):
        yield f"--run-name {args.run_name!r}: must be a plain directory name"
    if args.cpu_offload and args.tp * args.cp * args.ep > 1:
        given = " ".join(f"--{n}" for n in ("tp", "cp", "ep") if getattr(args, n) > 1)
        yield f"{given} with --cpu-offload: gradients are completed on the device; leave one out"
    if args.save_every or args.resume:
        flag = "--save-every" if args.save_every else "--resume"
        if args.pass_type != "step":
            yield f"{flag} needs --pass-type step: nothing else changes the weights"
        if args.fp8_primary_weights or (args.use_fp8 and args.fp8_recipe == "delayed"):
            what = "--fp8-primary-weights" if args.fp8_primary_weights else "--fp8-recipe delayed"
            yield f"{flag} does not work with {what}, whose state is Transformer Engine's; leave one out"
    if args.resume == "auto" and args.run_name is None:
        yield "--resume auto needs --run-name, by which it finds the run's earlier attempts"
    if args.save_dir and Path(args.save_dir).resolve() == Path(args.output_dir).resolve():
        yield f"--save-dir {args.save_dir}: is the --output-dir, where runs go; choose another"
    if args.save_dir and not (args.save_every or args.resume):
        yield "--save-dir needs --save-every or --resume"
    if args.memory_snapshot and args.warmup_steps < 2:
        yield "--memory-snapshot looks at the warm-up; use --warmup-steps 2 or more"
    if (args.nsys_start is None) != (args.nsys_end is None):
        yield "--nsys-start and --nsys-end go together: first step, step after the last"
    if args.nsys_start is not None:
        if args.nsys_end <= args.nsys_start:
            yield f"--nsys-end {args.nsys_end}: must be above --nsys-start {args.nsys_start}"
        if args.profile:
            yield "--nsys-start: two profilers disturb each other; leave out --profile"
    if args.ddp_mode != "bucketed" or args.no_ddp_overlap:
        mode = "--no-ddp-overlap" if args.no_ddp_overlap else f"--ddp-mode {args.ddp_mode}"
        if args.grad_compression != "off":
            yield f"--grad-compression: is a hook of DistributedDataParallel; leave out {mode}"
        if args.compile_mode in GRAPH_MODES:
            yield f"{mode} does not work with CUDA graphs; use --compile-mode default"
    if args.zero1:
        if args.pass_type != "step":
            yield "--zero1 needs --pass-type step: nothing else has an optimizer"
        if args.amp == "fp16" or args.use_fp8:
            yield "--zero1 works with --amp bf16 or off, and without --use-fp8; or use train_fsdp.py"
    if args.profile_attention:
        if not args.profile and args.nsys_start is None:
            yield "--profile-attention needs --profile or --nsys-start: it is for captured steps"
        if args.pt_compile:
            yield "--profile-attention: a compiled block has no such parts; leave out --pt-compile"
    if args.nsys_ranks and min(args.nsys_ranks) < 0:
        yield f"--nsys-ranks {min(args.nsys_ranks)}: ranks are numbered from 0"
    if args.grad_compression != "off" and args.pass_type != "step":
        yield "--grad-compression needs --pass-type step"
    if args.ddp_mode != "bucketed" and args.bucket_cap_mb != defaults(Args)["bucket_cap_mb"]:
        yield f"--bucket-cap-mb: --ddp-mode {args.ddp_mode} has no buckets; leave one out"
    if args.amp == "fp16" and args.optimizer == "sgd" and script is Script.FSDP:
        yield "--amp fp16: PyTorch has no fused SGD for sharded parameters; use --optimizer adamw"
    if args.amp == "fp16" and args.cpu_offload:
        yield (
            "--amp fp16: its scale is on the GPU and with --cpu-offload the gradients are not; "
            "use --amp bf16"
        )
    if args.fp8_emulate and args.fp8_backend == "te":
        yield "--fp8-emulate: Transformer Engine cannot; use --fp8-backend torchao"
    if args.fp8_all_gather and args.fp8_recipe != "tensorwise":
        yield f"--fp8-all-gather works with --fp8-recipe tensorwise, not {args.fp8_recipe}"
    if args.fp8_all_gather and args.cpu_offload:
        yield "--fp8-all-gather does not work with --cpu-offload; leave one out"
    if not args.fp8_primary_weights:
        return
    if args.fp8_backend != "te":
        yield (
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
        # Without FP8 its LayerNormMLP dequantizes only weights of the other recipes.
        "--val-data and --fp8-recipe mxfp8": args.val_data and args.fp8_recipe == "mxfp8",
    }
    for flag, given in against.items():
        if given:
            yield f"--fp8-primary-weights does not work with {flag}; leave one out"
