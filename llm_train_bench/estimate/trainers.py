"""Other trainers, by name: how they execute a step (configs/trainers.json). Needs no torch."""

import dataclasses
import functools
import json
import typing
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


def find_trainer(words: str, fp8_recipe: str | None = None) -> Trainer:
    """The trainer that words name, as in `megatron recipe=25.11 zero=2`; UsageError for what is unknown.

    Choices of a recipe replace the trainer's. Those of a recipe for FP8 (`with`) replace both, and the
    words replace all.
    """
    name, *more = words.split() or [""]
    if name not in _entries():
        raise UsageError(f"--trainer {name}: unknown; known are {', '.join(_entries())}")
    entry, given = _entries()[name], {}
    if name == "ours" and more:
        raise UsageError(f"--trainer ours {more[0]}: ours is what our flags say; use these")
    for word in more:
        key, equals, value = word.partition("=")
        if key in given:
            raise UsageError(f"--trainer {name}: {key} is given twice; leave one out")
        if not equals or key not in {*_kinds(), "recipe"} - {"levels"}:
            known = ", ".join(sorted({*_kinds(), "recipe"} - {"levels"}))
            raise UsageError(f"--trainer {name} {word}: must be KEY=VALUE; keys are {known}")
        given[key] = value
    recipes = entry.get("recipes", {})
    recipe = given.pop("recipe", None)
    if recipe is not None and recipe not in recipes:
        known = f"are {', '.join(recipes)}" if recipes else "none"
        raise UsageError(f"--trainer {name} recipe={recipe}: unknown; its recipes {known}")
    chosen = recipes.get(recipe, {}) if recipe else entry
    choices = entry["choices"] | (chosen["choices"] if recipe else {})
    choices |= chosen.get("with", {}).get(fp8_recipe, {}) if fp8_recipe else {}
    choices |= {key: _value(name, key, value) for key, value in given.items()}
    if not choices:
        return OUR_TRAINER
    shares = choices.get("sequence_parallel", True)  # without it, tp's exchanges are all-reduces
    choices["hide"] = tuple(x for x in choices.get("hide", ()) if shares or x != "tp")
    return Trainer(**choices, levels=tuple(entry.get("levels", {}).items()))


def _kinds() -> dict[str, Any]:
    return typing.get_type_hints(Trainer)


def _value(name: str, key: str, text: str) -> Any:
    """The value of KEY=VALUE by the type of the trainer's field."""
    kind = _kinds()[key]
    values = {"hide": ("tp", "cp", "ep")}.get(key, (True, False) if kind is bool else kind.__args__)
    by_text = {str(value).lower(): value for value in values}
    parts = list(filter(None, text.split(","))) if key == "hide" else [text]
    if wrong := [part for part in parts if part not in by_text]:
        known = ", ".join(by_text)
        raise UsageError(
            f"--trainer {name} {key}={text}: {wrong[0] or 'nothing'} is none of {known}"
        )
    return tuple(parts) if key == "hide" else by_text[text]


def executed_by(work: Work, trainer: Trainer, sac_policy: str) -> Work:
    """The same step as the trainer executes it, with its own kind of `--sac-policy op`."""
    own = "cheap" if trainer.modules and trainer.recompute == "op" else trainer.recompute
    policy = own if sac_policy == "op" else sac_policy
    recompute = dataclasses.replace(work.recompute, policy=policy)
    fused = "default" if trainer.modules else None  # its kernels do what a compiler's would
    compiled = work.compile_mode or fused
    offload = work.offload or trainer.offload == "activations"
    return dataclasses.replace(
        work, trainer=trainer, recompute=recompute, compile_mode=compiled, offload=offload
    )


def plan_by(words: str, args: Args, script: Script, *others: Any) -> Plan:
    """`make_plan(args, script, ...)` of the trainer that words name; UsageError for what it cannot do.

    Other trainers have FP8 and LoRA in layouts where our scripts refuse them.
    """
    name, _, _ = words.partition(" ")
    trainer = find_trainer(words, args.fp8_recipe if args.use_fp8 else None)
    if trainer is OUR_TRAINER:
        return make_plan(check(args, script), script, *others)
    for what, given in {
        "--cpu-offload": args.cpu_offload,
        "--bf16-weights": args.bf16_weights,
        "--fp8-all-gather": args.fp8_all_gather and name not in ("torchtitan", "hf"),
        "--fp8-emulate": args.fp8_emulate,
        "--amp off": args.amp == "off" and trainer.weights != "fp32",
    }.items():
        if given:
            raise UsageError(
                f"{what} --trainer {name}: is known of our own scripts only; leave it out"
            )
    taken = [*dataclasses.fields(Fp8Flags), *dataclasses.fields(LoraFlags)]
    plain = dataclasses.replace(args, **{field.name: field.default for field in taken})
    amp = "bf16" if args.amp == "auto" else args.amp  # what they refuse of fp16 is not known
    plain = dataclasses.replace(plain, sac_policy="block", amp=amp)
    plan = _staged(plain, trainer, script, *others)
    work = executed_by(plan.work, trainer, args.sac_policy)
    if not trainer.sequence_parallel and (work.config.experts or work.config.latent):
        raise UsageError(
            f"--trainer {name}: sequence_parallel=false is for dense models without latent attention"
        )
    if trainer.graphs == "part" and not trainer.modules:
        raise UsageError(f"--trainer {name}: graphs=part needs layers=te; leave it out")
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
        gathers = args.fp8_all_gather and backend == "torchao" and recipe == "tensorwise"
        work = dataclasses.replace(work, fp8=Fp8Work(backend, recipe, all_gather=gathers))
    work = dataclasses.replace(work, lora=resolve_lora(args, work))
    return dataclasses.replace(plan, work=work)


def _staged(args: Args, trainer: Trainer, script: Script, *others: Any) -> Plan:
    """The plan; of a trainer whose `ends_are_layers`, with stages of one size where that adds up."""
    if args.pp and trainer.ends_are_layers and not args.pp_layers:
        simple = dataclasses.replace(args, pp_virtual=min(2, args.pp_virtual))
        plan = make_plan(check(simple, script), script, *others)
        parallel, n = plan.work.parallelism, plan.work.config.num_hidden_layers
        stages = args.pp * args.pp_virtual
        each, rest = divmod(n + 2, stages)
        if n % stages and not rest:
            sizes = (each - 1, *[each] * (stages - 2), each - 1)
            parallel = dataclasses.replace(parallel, virtual=args.pp_virtual, layers=sizes)
            return dataclasses.replace(
                plan, work=dataclasses.replace(plan.work, parallelism=parallel)
            )
    return make_plan(check(args, script), script, *others)
