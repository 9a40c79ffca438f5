"""Other trainers, by name: how they execute a step (configs/trainers.json). Needs no torch."""

import dataclasses
import functools
import json
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.formulas.work import OUR_TRAINER, Fp8Work, Trainer, Work
from llm_train_bench.model.json_files import CONFIGS
from llm_train_bench.settings.flags import Args, Fp8Flags, LoraFlags, Script
from llm_train_bench.settings.plan import Plan, make_plan, refuse_te, resolve_lora
from llm_train_bench.settings.rules import FP8_RECIPES, check

TRAINERS_FILE = CONFIGS / "trainers.json"
# FP8 recipes by library; published runs of torchao have one more than ours.
RECIPES = FP8_RECIPES | {"torchao": (*FP8_RECIPES["torchao"], "mxfp8")}


@functools.cache
def _entries() -> dict[str, Any]:
    return json.loads(TRAINERS_FILE.read_text(encoding="utf-8"))["trainers"]


def find_trainer(name: str) -> Trainer:
    """The trainer of that name; UsageError with the known ones."""
    if name not in _entries():
        raise UsageError(f"--trainer {name}: unknown; known are {', '.join(_entries())}")
    if not (choices := _entries()[name]["choices"]):
        return OUR_TRAINER
    exchanges = tuple(choices.get("exchanges", ()))
    return Trainer(**(choices | {"exchanges": exchanges}))


def executed_by(work: Work, trainer: Trainer, sac_policy: str) -> Work:
    """The same step as the trainer executes it, with its own kind of `--sac-policy op`."""
    own = "cheap" if trainer.modules else trainer.recompute
    policy = own if sac_policy == "op" else sac_policy
    recompute = dataclasses.replace(work.recompute, policy=policy)
    fused = "default" if trainer.modules else None  # its kernels do what a compiler's would
    compiled = work.compile_mode or fused
    return dataclasses.replace(work, trainer=trainer, recompute=recompute, compile_mode=compiled)


def plan_by(name: str, args: Args, script: Script, *others: Any, **more: Any) -> Plan:
    """`make_plan(args, script, ...)` of the trainer of that name; UsageError for what it cannot do.

    Other trainers have FP8 and LoRA in layouts where our scripts refuse them.
    """
    trainer = find_trainer(name)
    if trainer is OUR_TRAINER:
        return make_plan(check(args, script), script, *others, **more)
    for what, given in {
        "--cpu-offload": args.cpu_offload,
        "--bf16-weights": args.bf16_weights,
        "--fp8-all-gather": args.fp8_all_gather,
        "--fp8-emulate": args.fp8_emulate,
        "--amp off": args.amp == "off" and trainer.weights != "fp32",
    }.items():
        if given:
            raise UsageError(
                f"{what} --trainer {name}: is known of our own scripts alone; leave it out"
            )
    taken = [*dataclasses.fields(Fp8Flags), *dataclasses.fields(LoraFlags)]
    plain = dataclasses.replace(args, **{field.name: field.default for field in taken})
    amp = "bf16" if args.amp == "auto" else args.amp  # what they refuse of fp16 is not known
    plain = dataclasses.replace(plain, sac_policy="block", amp=amp)
    plan = make_plan(check(plain, script), script, *others, **more)
    work = executed_by(plan.work, trainer, args.sac_policy)
    if (args.use_fp8 or args.lora_rank) and work.amp != "bf16":
        raise UsageError(f"--trainer {name}: --use-fp8 and --lora-rank need --amp bf16")
    if args.use_fp8:
        if not trainer.modules:
            refuse_te(work.config, f"--use-fp8 --trainer {name}")
        torchao = args.fp8_backend == "torchao" or not (trainer.modules or args.fp8_backend == "te")
        recipe = args.fp8_recipe
        if recipe == "auto":
            recipe = "tensorwise" if torchao else "current"
        known = [name for name, recipes in RECIPES.items() if recipe in recipes]
        backend = next((n for n in known if n == ("torchao" if torchao else "te")), known[0])
        if args.fp8_backend not in ("auto", backend):
            raise UsageError(
                f"--fp8-recipe {recipe} is of {backend}, not --fp8-backend {args.fp8_backend}"
            )
        work = dataclasses.replace(work, fp8=Fp8Work(backend, recipe))
    work = dataclasses.replace(work, lora=resolve_lora(args, work))
    return dataclasses.replace(plan, work=work)
