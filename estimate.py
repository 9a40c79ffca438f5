"""Will it fit, how fast will it be, what will it cost: before a GPU is booked.

    python estimate.py configs/llama-3.1-8b.json --gpu h100 --gpus 64 --bsz 2 --pt-compile --tokens 1e12
    python estimate.py configs/gpt2-1.5b.json --gpu mi300x --bsz 16
    python estimate.py configs/llama-3.1-70b.json --gpu h100,b200 --gpus 64 --plan

Takes the training scripts' flags besides its own. Needs no GPU and no torch.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llm_train_bench.base.start  # noqa: F401

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import device_called
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.estimate import predict
from llm_train_bench.estimate.plans import refuse_beside_plan, show_plans
from llm_train_bench.formulas.memory_model import VERDICTS
from llm_train_bench.model.config import load_config
from llm_train_bench.settings.command_line import make_args, parse_flags
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import Plan
from llm_train_bench.settings.rules import refuse_foreign


@tool("estimate.py")
def main(argv: Sequence[str]) -> int:
    """Estimate and print; returns 0, 4 if it does not fit, or 2 for bad input."""
    values, file = parse_flags(predict.EstimateArgs, argv, "estimate.py")
    if file and file.ranks:
        values.setdefault("gpus", file.ranks)
    if file and file.script not in (None, Script.ONE):
        values.setdefault("parallel", file.script.name.lower())
    args = make_args(predict.EstimateArgs, values)
    if args.config in set(Script):
        raise UsageError(
            f"{args.config}: estimate.py takes no script; use --parallel ddp, fsdp or pp"
        )
    if args.nproc:
        raise UsageError("--nproc: give the number of devices by --gpus")
    if file and file.script not in (None, Script.ONE) and args.gpus == 1:
        raise UsageError(f"--from: is for {file.script}; --gpus says how many run it")
    script = predict.script_of(args.pp, args)
    if not args.plan:
        refuse_foreign(values, script)
    if args.gpu is None:
        raise UsageError("--gpu is missing: h100, h200, b200, mi300x, ..., or cpu")
    if args.plan:
        refuse_beside_plan(values)
        config = load_config(args.config, args.pad_vocab, args.layers)
        return show_plans(args, config)
    if "," in args.gpu and device_called(args.gpu) is None:
        raise UsageError(f"--gpu {args.gpu}: several GPUs go with --plan; name one")
    gpu = predict.device_of(args.gpu, args)

    def planned(flags: dict[str, Any], gpus: int) -> Plan:
        return predict.plan_on(gpu, dataclasses.replace(args, **flags), script, gpus)

    plan = planned({}, args.gpus)
    if args.calibrate:
        gpu, note = predict.calibrated(gpu, Path(args.calibrate), plan.work)
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    estimate = predict.make_estimate(plan, args, gpu)
    if args.json:
        print(json.dumps(dataclasses.asdict(estimate), indent=1))
        return 0 if estimate.fits else 4
    predict.show_estimate(estimate, args, plan.work)
    for note in plan.notes:
        print(note)
    if gpu.native_amp == "fp16" and plan.work.amp == "bf16":
        print(
            f"{gpu.name} has no bf16: the estimate has the peak of fp16; use --amp fp16, or off, there"
        )
    if args.gpus > gpu.per_node and (last := args.gpus % gpu.per_node):
        print(
            f"the last node has {last} of {gpu.per_node} GPUs, and all wait for its network cards"
        )
    if estimate.usd is None and args.tokens:
        print(f"no price of {gpu.name} is known; --usd-per-hour gives one")
    if estimate.verdict == VERDICTS[0]:
        return 0
    for change in predict.nearest_changes(planned, plan.work, gpu):
        print(change)
    return 0 if estimate.fits else 4


if __name__ == "__main__":
    run_tool(main)
