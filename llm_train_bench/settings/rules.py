"""Flags that do not work together: one table, for the refusals, docs/tables.py and the tests.

Sizes that do not divide are refused in settings/plan.py. Needs no torch.
"""

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import get_args

from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.work import Work
from llm_train_bench.settings.flags import (
    GRAPH_MODES,
    SHARDED,
    Args,
    Fp8Flags,
    ParallelFlags,
    Script,
    TeRecipe,
    TorchaoRecipe,
    changed,
    declared,
    flag_of,
)

FP8_RECIPES = {"te": get_args(TeRecipe), "torchao": get_args(TorchaoRecipe)}


def _divided(a: ParallelFlags, s: Script) -> bool:
    """Whether ranks share a batch, the experts or the layers."""
    return a.tp * a.cp * a.ep > 1 or s is Script.PP


# fmt: off
# Precision, compilation, checkpointing and layouts: the message, and when it applies to (args, script).
TOGGLES = (
    ("--use-fp8 with --amp off or fp16: FP8 matmuls take and return bf16; use --amp bf16 (or --amp off "
     "with --fp8-emulate)",
     lambda a, s: a.use_fp8 and (a.amp == "fp16" or (a.amp == "off" and not a.fp8_emulate))),
    ("--fp8-backend te with --pt-compile: torch.compile cannot trace Transformer Engine's modules; use "
     "--fp8-backend torchao, or leave out --pt-compile",
     lambda a, s: a.use_fp8 and a.fp8_backend == "te" and a.pt_compile),
    ("--fp8-backend te with --sac-policy op: the policy cannot see Transformer Engine's matmuls; use "
     "--sac-policy block, or --fp8-backend torchao",
     lambda a, s: a.use_fp8 and a.fp8_backend == "te" and a.sac_freq and a.sac_policy == "op"),
    ("--compile-mode reduce-overhead or max-autotune with sharded parameters: CUDA graphs need fixed "
     "addresses, and FSDP gathers parameters anew; use --compile-mode default, or "
     "max-autotune-no-cudagraphs",
     lambda a, s: s in SHARDED and a.pt_compile and a.compile_mode in GRAPH_MODES),
    ("--tp, --cp or --ep with train.py or train_ddp.py: these layouts need a sharded model; use "
     "train_fsdp.py or train_pp.py",
     lambda a, s: s not in SHARDED and _divided(a, s)),
    ("--tp, --cp, --ep or train_pp.py with --amp fp16: ranks would not share one loss scale; use --amp "
     "bf16",
     lambda a, s: _divided(a, s) and a.amp == "fp16"),
    ("--tp, --cp, --ep or train_pp.py with --fp8-backend te: its modules are for whole layers here; use "
     "--fp8-backend torchao",
     lambda a, s: _divided(a, s) and a.use_fp8 and a.fp8_backend == "te"),
)
# All other flags that contradict each other.
CONTRADICTIONS = (
    ("--linear te with --use-fp8, --pt-compile, --sac-policy op, --tp, --lora-rank, --bf16-weights, "
     "train_pp.py or --amp fp16: these modules are for autocast to bf16 here; leave it out",
     lambda a, s: a.linear == "te" and (a.use_fp8 or a.pt_compile or a.sac_policy == "op" or a.tp > 1
                                        or a.lora_rank or a.bf16_weights or s is Script.PP
                                        or a.amp == "fp16")),
    ("--sac-freq, --offload-activations and --reduce-last: each needs a backward; use --pass-type "
     "forward-backward or step",
     lambda a, s: (a.sac_freq or a.offload_activations or a.reduce_last) and a.pass_type == "forward"),
    ("--offload-activations does not work with CUDA graphs, which replay without its hooks; use "
     "--compile-mode default",
     lambda a, s: a.offload_activations and a.compile_mode in GRAPH_MODES),
    ("--global-bsz sets --grad-acc-steps; give one of the two",
     lambda a, s: a.global_bsz is not None and a.grad_acc_steps != 1),
    ("--compile-mode with CUDA graphs: they are recorded in the first three steps; use --warmup-steps 3 "
     "or more",
     lambda a, s: a.compile_mode in GRAPH_MODES and a.warmup_steps < 3),
    ("--run-name must be a plain directory name of at most 200 bytes",
     lambda a, s: a.run_name is not None
     and (a.run_name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f\ud800-\udfff]", a.run_name)
          or len(os.fsencode(a.run_name)) > 200)),
    ("--cpu-offload with --tp, --cp, --ep, --amp fp16 or --fp8-all-gather: these need gradients or "
     "weights on the GPU; leave it out",
     lambda a, s: a.cpu_offload and (_divided(a, s) or a.amp == "fp16" or a.fp8_all_gather)),
    ("--save-every, --resume, --zero1 and --reduce-dtype bf16 of train_ddp.py need --pass-type step",
     lambda a, s: a.pass_type != "step"
     and (a.save_every or a.resume or a.zero1 or (s is Script.DDP and a.reduce_dtype == "bf16"))),
    ("--save-every and --resume with --fp8-recipe delayed: no checkpoint holds its scales; use current",
     lambda a, s: (a.save_every or a.resume) and a.use_fp8 and a.fp8_recipe == "delayed"),
    ("--resume auto needs --run-name, the run to continue",
     lambda a, s: a.resume == "auto" and a.run_name is None),
    ("--memory-snapshot records the warm-up; use --warmup-steps 2 or more",
     lambda a, s: a.memory_snapshot and a.warmup_steps < 2),
    ("--nsys-start and --nsys-end: give both, the end above the start",
     lambda a, s: (a.nsys_start is None) != (a.nsys_end is None)
     or (a.nsys_start is not None and a.nsys_end <= a.nsys_start)),
    ("--nsys-start with --profile: two profilers disturb each other; leave out --profile",
     lambda a, s: a.nsys_start is not None and a.profile),
    ("--reduce-dtype bf16 with --reduce-last or train_pp.py sums micro batches in bf16; leave it out",
     lambda a, s: (a.reduce_last or s is Script.PP) and a.reduce_dtype != "fp32"),
    ("--pack-lengths with --data FILE: the file has documents of its own; leave it out",
     lambda a, s: a.pack_lengths is not None and a.data != "synthetic"),
    ("--pack-separator is for token files; give --data FILE, or use --pack-lengths",
     lambda a, s: a.pack_separator is not None and a.data == "synthetic"),
    ("--lora-rank with --tp, --use-fp8, --zero1, --amp fp16 or train_pp.py is not implemented; leave one "
     "out",
     lambda a, s: a.lora_rank and (a.tp > 1 or a.use_fp8 or a.zero1 or a.amp == "fp16"
                                   or s is Script.PP)),
    ("--optimizer muon with --lora-rank, --zero1, --cpu-offload or --amp fp16 is not implemented; use "
     "adamw",
     lambda a, s: a.optimizer == "muon" and (a.lora_rank or a.zero1 or a.cpu_offload or a.amp == "fp16")),
    ("--bf16-weights needs --amp bf16 and --optimizer adamw",
     lambda a, s: a.bf16_weights and (a.amp in ("off", "fp16") or a.optimizer != "adamw")),
    ("--bf16-weights with --tp, --cp, --ep, train_pp.py, --use-fp8, --lora-rank, --zero1 or "
     "--cpu-offload is not implemented; leave it out",
     lambda a, s: a.bf16_weights and (_divided(a, s) or a.use_fp8 or a.lora_rank or a.zero1
                                      or a.cpu_offload)),
    ("--zero1 does not work with --amp fp16 or --use-fp8; use train_fsdp.py",
     lambda a, s: a.zero1 and (a.amp == "fp16" or a.use_fp8)),
    ("train_fsdp.py with --amp fp16 and --optimizer sgd: PyTorch has no fused SGD for sharded "
     "parameters; use adamw",
     lambda a, s: s is Script.FSDP and a.amp == "fp16" and a.optimizer == "sgd"),
    ("--fp8-emulate: Transformer Engine cannot emulate; use --fp8-backend torchao",
     lambda a, s: a.fp8_emulate and a.fp8_backend == "te"),
    ("--fp8-all-gather needs --fp8-backend torchao and --fp8-recipe tensorwise, and no --tp, --cp, --ep",
     lambda a, s: a.fp8_all_gather and (a.fp8_recipe != "tensorwise" or _divided(a, s))),
)
# What depends on the model's sizes or the number of ranks: of the arguments and the work of a step.
SIZES = (
    ("--route balanced: {w.config.path} has no experts; leave it out",
     lambda a, w: w.balanced and "experts" not in w.config.parts),
    ("--route balanced with --pack: cp ranks that gather keys have other tokens of each sample; use "
     "--route learned, or a --cp that divides the key/value heads",
     lambda a, w: w.balanced and w.batch.documents and w.by_tokens),
    ("--reduce-last: a step has one micro batch; raise --grad-acc-steps, or leave it out",
     lambda a, w: a.reduce_last and w.batch.grad_acc_steps == 1),
    ("--pp {p.pp} x --pp-virtual {p.virtual} = {p.stages} stages: {w.config.path} has only "
     "{w.config.num_hidden_layers} blocks; use no more stages",
     lambda a, w: w.config.num_hidden_layers < w.parallelism.stages),
    ("--pp-layers: give {p.stages} numbers of 1 or more that add up to the {w.config.num_hidden_layers} "
     "blocks of {w.config.path}",
     lambda a, w: a.pp_layers and (len(a.pp_layers) != w.parallelism.stages or min(a.pp_layers) < 1
                                   or sum(a.pp_layers) != w.config.num_hidden_layers)),
    ("--pp {p.pp}: the schedule needs a multiple of it in micro batches, not {w.batch.grad_acc_steps}; "
     "change --grad-acc-steps, or --global-bsz and --bsz",
     lambda a, w: w.batch.grad_acc_steps % w.parallelism.pp and w.parallelism.virtual > 1),
    ("--pp {p.pp}: the schedule needs as many micro batches or more, not {w.batch.grad_acc_steps}; "
     "raise --grad-acc-steps, or use a larger --global-bsz or a smaller --bsz",
     lambda a, w: w.batch.grad_acc_steps < w.parallelism.pp),
)
# fmt: on


def check_sizes(args: Args, work: Work) -> None:
    """UsageError for the first of SIZES that refuses."""
    if text := next((text for text, applies in SIZES if applies(args, work)), None):
        raise UsageError(text.format(w=work, p=work.parallelism))


def check(args: Args, script: Script) -> Args:
    """The arguments with `auto` resolved; UsageError in one line where a run could not use them."""
    refuse_foreign(changed(args), script)
    if args.use_fp8:
        backend, recipe = resolve_fp8(args, args.pt_compile or _divided(args, script))
        args = dataclasses.replace(args, fp8_backend=backend, fp8_recipe=recipe)
    if message := broken_rule(args, script):
        raise UsageError(message)
    return args


def broken_rule(args: Args, script: Script) -> str | None:
    """The message of the first rule that refuses these arguments; None if none does."""
    rules = (*CONTRADICTIONS, *TOGGLES)
    return next((message for message, applies in rules if applies(args, script)), None)


def refuse_foreign(names: Iterable[str], script: Script) -> None:
    """UsageError if one of these fields is a flag of other scripts."""
    flags = declared(Args)
    for name in names:
        if name in flags and script not in flags[name].scripts:
            scripts = " or ".join(flags[name].scripts)
            raise UsageError(f"{flag_of(name)} does not apply to {script}; it is for {scripts}")


def resolve_fp8(args: Fp8Flags, needs_torchao: bool) -> tuple[str, str]:
    """Backend and recipe with `auto` resolved; UsageError where they contradict each other."""
    backend, recipe = args.fp8_backend, args.fp8_recipe
    if backend == "auto":
        torchao = needs_torchao or args.fp8_emulate or args.fp8_all_gather
        backends = ("torchao", "te") if torchao else ("te", "torchao")
        backend = next(b for b in backends if recipe in ("auto", *FP8_RECIPES[b]))
    if recipe == "auto":
        recipe = FP8_RECIPES[backend][0]
    if recipe not in FP8_RECIPES[backend]:
        known = ", ".join(FP8_RECIPES[backend])
        raise UsageError(f"--fp8-recipe {recipe}: --fp8-backend {backend} supports {known}")
    return backend, recipe
