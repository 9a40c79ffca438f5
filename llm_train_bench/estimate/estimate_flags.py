"""The flags of estimate.py, and the device and the trainer that they describe. Needs no torch."""

import dataclasses
from typing import Literal, get_args

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import Hardware, find_cpu, find_hardware, limited
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.formulas.work import Fp8Work, Theirs, Work
from llm_train_bench.settings.flags import Args, LoraFlags, TeRecipe, flag, key_values
from llm_train_bench.settings.plan import refuse_te, resolve_lora


@dataclasses.dataclass(frozen=True)
class EstimateFlags:
    """The hardware, and what to print.

    gpu: GPU in configs/hardware.json, or the start of its name: h100, b200, mi300x, ... cpu is this
        machine; run benchmarks/gemm.py first to measure it.
    gpus: Number of GPUs.
    per_node: GPUs of one machine, or of one NVLink domain (GB200: 72).
    parallel: Script for several GPUs: train_fsdp.py, train_ddp.py, or train_pp.py (also set by --pp).
    tokens: Tokens of the training run; also prints its days, energy and cost.
    limit: Limits of one GPU: power=W, clock=MHZ, memory=GIB, or nic=GB/s of its network, one way.
    trainer: How another trainer differs: weights=bf16 (no fp32 copies), moments=bf16 or 8bit,
        logits=whole (no chunked loss), zero=2 (with --parallel ddp), sac=every-other-matmul
        (torchtitan's op policy), fp8=RECIPE or lora=RANK in any layout.
    trace: Also count memory by tracing our model under fake tensors (takes seconds).
    fit: Run a few steps on this machine, and compare their memory with the estimate.
    calibrate: Correct the estimate by the measurements in a run's result.json.
    timeline: Simulate the events of a step, and write them as a Chrome trace for Perfetto.
    plan: Find the fastest layout, recomputation, micro batch and FP8 setting, for one or several kinds
        of GPU, as in --gpu h100,mi300x.
    days: With --plan and --tokens: find the number of GPUs that finish in this many days.
    json: Print JSON instead of tables.
    """

    gpu: str | None = flag(None, metavar="NAME")
    gpus: int = flag(1, at_least=1, at_most=2**20)
    per_node: int = flag(8, at_least=1, at_most=2**20)
    parallel: Literal["fsdp", "ddp", "pp"] = flag("fsdp")
    tokens: float | None = flag(None, above=0, at_most=1e16)
    limit: tuple[str, ...] = flag((), metavar="KEY=VALUE ...")
    trainer: tuple[str, ...] = flag((), metavar="KEY=VALUE ...")
    trace: bool = flag(False)
    fit: bool = flag(False)
    calibrate: str | None = flag(None, metavar="RESULT")
    timeline: str | None = flag(None, metavar="FILE")
    plan: bool = flag(False)
    days: float | None = flag(None, above=0, needs="plan")
    json: bool = flag(False)


@dataclasses.dataclass(frozen=True)
class EstimateArgs(EstimateFlags, Args):
    """Estimate memory, speed, energy and cost of a training run. Takes the training scripts' flags."""


LIMITS = ("power", "clock", "memory", "nic")
# Keys of --trainer, their values, and what each means for a step.
TRAINERS: dict[str, dict[str, tuple[str, object]]] = {
    "weights": {"bf16": ("weight_bytes", 2), "fp32": ("weight_bytes", 4)},
    "moments": {k: ("moment_bytes", n) for k, n in (("fp32", 4), ("bf16", 2), ("8bit", 1))},
    "logits": {"whole": ("whole_logits", True)},
    "zero": {"2": ("zero2", True)},
    "sac": {"every-other-matmul": ("", None)},
    # In layouts where our own scripts refuse them.
    "fp8": {recipe: ("fp8", Fp8Work("te", recipe)) for recipe in get_args(TeRecipe)},
    "lora": {str(2**i): ("lora", 2**i) for i in range(9)},
}


def device_of(name: str, wanted: EstimateFlags) -> Hardware:
    """The device of that name under the limits that the flags give; UsageError for an unknown one."""
    try:
        cpu = name.lower() == "cpu"
        gpu = find_cpu(cpu_name(), wanted.gpus) if cpu else find_hardware(name)
    except UsageError as error:
        raise UsageError(f"--gpu {error}") from None
    limits = dict.fromkeys(LIMITS)
    limits |= key_values("--limit", wanted.limit, dict.fromkeys(LIMITS, float))
    gpu = limited(gpu, limits["power"], limits["clock"], limits["nic"])
    return dataclasses.replace(gpu, memory_gib=limits["memory"] or gpu.memory_gib)


def adapted(work: Work, wanted: EstimateFlags) -> Work:
    """The step adapted to another trainer; UsageError for a difference that is not known."""
    fields, recompute, others = {}, work.recompute, {}
    for key, value in key_values("--trainer", wanted.trainer, dict.fromkeys(TRAINERS, str)).items():
        if value not in TRAINERS[key]:
            raise UsageError(f"--trainer {key}={value}: must be {' or '.join(TRAINERS[key])}")
        if key == "zero" and wanted.parallel != "ddp":
            raise UsageError("--trainer zero=2 needs --parallel ddp; train_fsdp.py is ZeRO-3")
        if key in ("fp8", "lora"):
            flags = work.fp8 or work.lora or work.config.mtp or work.bf16_weights != "off"
            if flags or (key == "fp8" and work.amp != "bf16"):
                raise UsageError(
                    f"--trainer {key}={value} needs --amp bf16, without --use-fp8, --lora-rank, --mtp "
                    "and --bf16-weights"
                )
        if key == "fp8":
            refuse_te(work.config, f"--trainer fp8={value}")
            others[key] = TRAINERS[key][value][1]
        elif key == "lora":
            others[key] = resolve_lora(LoraFlags(lora_rank=int(value)), work)
        elif key == "sac":
            if not recompute.blocks:
                raise UsageError("--trainer sac=every-other-matmul needs --sac-freq")
            recompute = dataclasses.replace(recompute, policy=value)
        else:
            name, meaning = TRAINERS[key][value]
            fields[name] = meaning
    return dataclasses.replace(work, recompute=recompute, theirs=Theirs(**fields), **others)
