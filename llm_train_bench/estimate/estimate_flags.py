"""The flags of estimate.py, and the device that they describe. Needs no torch."""

import dataclasses
from typing import Literal

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import Hardware, find_cpu, find_hardware
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.settings.flags import Args, flag, key_values


@dataclasses.dataclass(frozen=True)
class EstimateFlags:
    """The hardware, and what to print.

    gpu: GPU in configs/hardware.json, or the start of its name: h100, b200, mi300x, ... cpu is this
        machine; run benchmarks/gemm.py first to measure it.
    gpus: Number of GPUs.
    per_node: GPUs that share fast links: of a machine, or of an NVLink domain. By default as many as
        the device has: 72 for GB200 and GB300, 8 for most.
    parallel: Script for several GPUs: train_fsdp.py, train_ddp.py, or train_pp.py (also set by --pp).
    tokens: Tokens of the training run; also prints its days, energy and cost.
    limit: Limits of one GPU: memory=GIB, or nic=GB/s of its network, one way.
    trainer: Trainer that executes the step: ours, torchtitan, megatron, ... (configs/trainers.json).
        Other trainers may have FP8 and LoRA in layouts where our scripts refuse them.
    calibrate: Correct the estimate by the measurements in a run's result.json.
    plan: Find the fastest layout, recomputation, micro batch and FP8 setting, for one or several kinds
        of GPU, as in --gpu h100,mi300x.
    json: Print JSON instead of tables.
    """

    gpu: str | None = flag(None, metavar="NAME")
    gpus: int = flag(1, at_least=1, at_most=2**20)
    per_node: int | None = flag(None, at_least=1, at_most=2**20)
    parallel: Literal["fsdp", "ddp", "pp"] = flag("fsdp")
    tokens: float | None = flag(None, above=0, at_most=1e16)
    limit: tuple[str, ...] = flag((), metavar="KEY=VALUE ...")
    trainer: str = flag("ours", metavar="NAME")
    calibrate: str | None = flag(None, metavar="RESULT")
    plan: bool = flag(False)
    json: bool = flag(False)


@dataclasses.dataclass(frozen=True)
class EstimateArgs(EstimateFlags, Args):
    """Estimate memory, speed, energy and cost of a training run. Takes the training scripts' flags."""


def device_of(name: str, wanted: EstimateFlags) -> Hardware:
    """The device of that name under the limits that the flags give; UsageError for an unknown one."""
    try:
        cpu = name.lower() == "cpu"
        gpu = find_cpu(cpu_name(), wanted.gpus) if cpu else find_hardware(name)
    except UsageError as error:
        raise UsageError(f"--gpu {error}") from None
    limits = key_values("--limit", wanted.limit, {"memory": float, "nic": float})
    return dataclasses.replace(
        gpu,
        memory_gib=limits.get("memory", gpu.memory_gib),
        nic_gb_per_s=limits.get("nic", gpu.nic_gb_per_s),
        per_node=wanted.per_node or gpu.per_node,
    )
