"""The flags of estimate.py, and the estimate of one setting on one kind of GPU. Needs no torch."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import (
    Hardware,
    accuracy_of,
    device_called,
    find_cpu,
    find_hardware,
    threads_of,
)
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.base.number_text import parse_number
from llm_train_bench.base.tables import markdown_table, number
from llm_train_bench.estimate.trainers import plan_by
from llm_train_bench.formulas import memory_model
from llm_train_bench.formulas.flops import step_flops_per_token
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.formulas.speed_model import estimate_speed, step_joules
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.settings.command_line import make_args, parse_args, parse_flags
from llm_train_bench.settings.flags import Args, Script, flag, to_argv
from llm_train_bench.settings.plan import Plan, make_plan
from llm_train_bench.settings.rules import refuse_foreign

BYTES_PER_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class EstimateFlags:
    """The hardware, and what to print.

    gpu: GPU in configs/hardware.json, or the start of its name: h100, b200, mi300x, ... cpu is this
        machine; run benchmarks/gemm.py first to measure it.
    gpus: Number of GPUs.
    per_node: GPUs that share fast links: of a machine, or of an NVLink domain. By default as many as
        the device has: 72 for GB200 and GB300, 8 for most.
    parallel: Script: train_fsdp.py, train_ddp.py, or train_pp.py (also set by --pp). By default train.py
        for one GPU, and train_fsdp.py for several.
    tokens: Tokens of the training run; also prints its days, energy and cost.
    limit: Limits of one GPU: memory=GIB, power=W, or nic=GB/s of its network, one way.
    trainer: Trainer that executes the step: ours, torchtitan, megatron, ... (configs/trainers.json). Then
        what it does otherwise: recipe=NAME weights=bf16 moments=bf16 zero=2 hide=tp,ep recompute=mlp
        offload=states ... Other trainers may have FP8 and LoRA in layouts where our scripts refuse them.
    imbalance: With a learned router and --ep: rows of the fullest rank's experts / the mean. Runs print
        it. By default 1.34.
    calibrate: Correct the estimate by the measurements in a run's result.json.
    plan: Find the fastest layout, recomputation, micro batch and FP8 setting, for one or several kinds
        of GPU, as in --gpu h100,mi300x.
    json: Print JSON instead of tables.
    """

    gpu: str | None = flag(None, metavar="NAME")
    gpus: int = flag(1, at_least=1, at_most=2**20)
    per_node: int | None = flag(None, at_least=1, at_most=2**20)
    parallel: Literal["fsdp", "ddp", "pp"] | None = flag(None)
    tokens: float | None = flag(None, above=0, at_most=1e16)
    limit: tuple[str, ...] = flag((), metavar="KEY=VALUE ...")
    trainer: tuple[str, ...] = flag(("ours",), metavar="NAME KEY=VALUE ...")
    imbalance: float | None = flag(None, at_least=1, at_most=1e4)
    calibrate: str | None = flag(None, metavar="RESULT")
    plan: bool = flag(False)
    json: bool = flag(False)

    @property
    def trainer_words(self) -> str:
        """The trainer as it is typed."""
        return " ".join(self.trainer)


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
    limits = limits_of(wanted.limit)
    if "power" in limits and not gpu.constants.tflop_joules:
        raise UsageError(
            f"--limit power: the energy of {gpu.name}'s operations was never measured; leave it out, or "
            "--calibrate a run under this limit"
        )
    low, high = gpu.constants.waiting_w, gpu.tdp_w
    if "power" in limits and not low < limits["power"] <= high:
        raise UsageError(
            f"--limit power: must be above {low:g} and at most {high:g} W, as of {gpu.name}"
        )
    return dataclasses.replace(
        gpu,
        memory_gib=limits.get("memory", gpu.memory_gib),
        nic_gb_per_s=limits.get("nic", gpu.nic_gb_per_s),
        tdp_w=limits.get("power", gpu.tdp_w),
        per_node=wanted.per_node or gpu.per_node,
    )


def limits_of(texts: Iterable[str]) -> dict[str, float]:
    """--limit by its keys; UsageError for an unknown one, or what is not a number above 0."""
    limits = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in ("memory", "nic", "power") or not value:
            raise UsageError(f"--limit {text}: must be memory=GIB, power=W or nic=GB/s")
        try:
            limits[key] = parse_number(value, float)
        except ValueError:
            raise UsageError(f"--limit {text}: {value} is not a number") from None
        if not 0 < limits[key] < math.inf:
            raise UsageError(f"--limit {text}: must be above 0")
    return limits


@dataclasses.dataclass(frozen=True)
class Estimate:
    """All that is printed; times in seconds, memory in bytes, rates per GPU."""

    gpu: str
    gpus: int
    script: str
    parameters: int
    flops_per_token: float
    global_batch: int
    memory: memory_model.MemoryEstimate
    memory_outside: float
    """Context, buffers and gaps; negative only if a calibration says so."""
    memory_limit: float
    fits: bool
    """Whether the verdict is other than `does not fit`."""
    verdict: str
    """`fits`, `may not fit` or `does not fit`."""
    largest_bsz: int
    step_s: float
    parts_s: dict[str, float]
    tokens_per_sec: float
    tokens_per_sec_per_gpu: float
    mfu: float
    watts: float | None
    """Of a GPU: by its energy where that was measured, or its limit."""
    tokens_per_joule: float | None
    usd_per_million_tokens: float | None
    days: float | None
    usd: float | None
    kwh: float | None
    accuracy: dict[str, float] | None = None
    """Of tokens/s, against published rows that chose no constant: rows, median, covers_80."""


def make_estimate(plan: Plan, wanted: EstimateFlags, gpu: Hardware) -> Estimate:
    """Everything about one setting on one kind of GPU."""
    work, batch, world = plan.work, plan.work.batch, plan.work.world
    if work.fp8 and gpu.fp8_tflops is None:
        raise UsageError(f"--use-fp8: {gpu.name} has no FP8")
    if work.fp8 and work.fp8.recipe == "mxfp8" and not gpu.mxfp8:
        raise UsageError(f"--fp8-recipe mxfp8: {gpu.name} has none; use another recipe")
    if work.fp8 and work.fp8.recipe == "nvfp4" and not gpu.fp4_tflops:
        raise UsageError(f"--fp8-recipe nvfp4: {gpu.name} has no FP4; use another recipe")

    on_gpu = gpu.platform != "cpu"

    def whole(bsz: int) -> float:
        return memory_model.estimate_memory(work.with_micro_batch(bsz), on_gpu).on_device(world)

    memory, limit = memory_model.estimate_memory(work, on_gpu), gpu.memory_gib * BYTES_PER_GIB
    needed = memory.on_device(world)
    verdict = memory_model.verdict_of(needed, limit, work)
    speed = estimate_speed(work, gpu)
    per_second = batch.tokens_per_step / speed.step_s
    flops = step_flops_per_token(work, causal=False)
    price = plan.args.usd_per_hour or gpu.usd_per_hour
    watts = gpu.tdp_w
    if joules := step_joules(work, gpu, speed.parts["memory-bound"] + speed.parts["optimizer"]):
        watts = min(watts, gpu.constants.waiting_w + joules / speed.step_s)
    all_watts = watts * world
    seconds = wanted.tokens / per_second if wanted.tokens else None
    peak = (plan.args.peak_tflops or gpu.bf16_tflops) * 1e12
    return Estimate(
        gpu=gpu.name,
        gpus=world,
        script=plan.script,
        parameters=count_parameters(work.config),
        flops_per_token=flops,
        global_batch=batch.global_batch,
        memory=memory,
        memory_outside=needed - memory.peak,
        memory_limit=limit,
        fits=verdict != memory_model.VERDICTS[2],
        verdict=verdict,
        largest_bsz=memory_model.largest_batch(whole, memory_model.margins(work)[0] * limit),
        step_s=speed.step_s,
        parts_s=speed.parts,
        tokens_per_sec=per_second,
        tokens_per_sec_per_gpu=per_second / world,
        mfu=per_second / world * flops / peak,
        watts=watts or None,
        tokens_per_joule=per_second / all_watts if watts else None,
        usd_per_million_tokens=price and price / 3600 * world / per_second * 1e6,
        days=seconds and seconds / 86400,
        usd=seconds and price and price * world * seconds / 3600,
        kwh=seconds and all_watts and all_watts * seconds / 3.6e6,
        accuracy=accuracy_of(gpu.name, bool(work.config.experts), bool(work.fp8)),
    )


def estimate_step(config: str | os.PathLike[str], *, gpu: str, **flags: Any) -> Estimate:
    """Memory, speed and cost of a training step by formula: what estimate.py prints.

    `flags` are those of estimate.py, as in `gpus=64, bsz=8, pt_compile=True`. UsageError or ConfigError
    for what cannot be.
    """
    if not isinstance(config, str | os.PathLike) or not isinstance(gpu, str):
        raise UsageError("estimate_step: config must be a path, and gpu a str")
    asked = {"gpu": gpu} | flags
    for name in ("plan", "calibrate", "json"):
        if name in asked:
            raise UsageError(f"estimate_step: {name} is only for estimate.py")
    words = [os.fspath(config), *to_argv(asked)]
    values, _ = parse_flags(EstimateArgs, words, "estimate_step")
    args = make_args(EstimateArgs, values)
    script = script_of(args.pp, args)
    refuse_foreign(values, script)
    device = device_of(gpu, args)
    return make_estimate(plan_on(device, args, script, args.gpus), args, device)


def plan_on(
    gpu: Hardware, args: EstimateArgs, script: Script, gpus: int, config: ModelConfig | None = None
) -> Plan:
    """The plan of a script on so many GPUs, with --trainer and --imbalance.

    `config` is the model's, where it is read already. UsageError or ConfigError for what cannot be.
    """
    has = gpu.platform, config, gpu.memory_gib, gpu.native_amp
    plan, rows = plan_by(args.trainer_words, args, script, gpus, *has), args.imbalance
    if rows is None:
        return plan
    if not plan.work.config.experts or plan.work.balanced or plan.work.parallelism.ep == 1:
        raise UsageError("--imbalance: is for a learned router with --ep; leave it out")
    if rows > plan.work.parallelism.ep:
        raise UsageError(f"--imbalance {rows:g}: is no more than --ep, where one rank has all rows")
    return dataclasses.replace(plan, work=dataclasses.replace(plan.work, rows_over_mean=rows))


def script_of(pp: int | None, wanted: EstimateFlags) -> Script:
    """The script that the flags mean; UsageError for replicas with stages."""
    several = Script[(wanted.parallel or "fsdp").upper()]
    if pp and several is Script.DDP:
        raise UsageError("--parallel ddp: replicas have no stages; leave out --pp, or --parallel")
    several = Script.PP if pp else several
    return Script.ONE if wanted.gpus == 1 and not wanted.parallel else several


def calibrated(gpu: Hardware, path: Path, planned: Work) -> tuple[Hardware, str]:
    """The device as one measured run found it, and a line on that; UsageError if it was another's.

    All rates of the device are multiplied by the one factor that makes the run's own estimate right.
    The line says whether the `planned` step differs in what one factor cannot carry.
    """
    # Needs pydantic, which takes a while.
    from llm_train_bench.results.result_files import read_result

    if path.is_dir():
        path = path / "result.json"
    where = f"--calibrate {path}:"
    try:
        result = read_result(path)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{where} is not a result.json of a run") from None
    if not result.ours:
        raise UsageError(f"{where} is of another loop; use a run of {' or '.join(Script)}")
    # The median: one slow step says nothing of the device.
    measured, script = result.metrics.step_time_median_s, Script(result.entrypoint)
    if not measured:
        raise UsageError(f"{where} has no measured step; use a run that was completed")
    # Of a peak the list itself may be wrong.
    if wrong := [text for text in result.invalid if text != "faster than its peak"]:
        raise UsageError(f"{where} is invalid: {'; '.join(wrong)}")
    hardware, threads = result.device.hardware, int(result.environment.get("torch_threads") or 1)
    known = hardware in (gpu.name, *gpu.driver_names) or gpu.name.startswith(f"{hardware}, ")
    if gpu.platform == "cpu":
        known = gpu.name == threads_of(hardware, threads)
        hardware = f"{hardware} with {threads} threads"
    if not known:
        raise UsageError(f"{where} was measured on {hardware}, and --gpu is {gpu.name}")
    args = parse_args(["--from", str(path)], script)
    memory = gpu.memory_gib
    work = make_plan(args, script, result.device.count, gpu.platform, memory_gib=memory).work
    # As fast as it is listed under the limits of that run, not of the one that is planned.
    limit = next((each.power_limit_w for each in result.devices), None)
    listed = device_called(gpu.name) or gpu
    factor = speed_factor(work, dataclasses.replace(listed, tdp_w=limit or listed.tdp_w), measured)
    by = f"calibrated: by {result.run_name} this device is {factor:.2f} times as fast as it is listed"
    traits = (
        ("kind of model", bool(work.config.experts), bool(planned.config.experts)),
        ("format", (work.amp, bool(work.fp8)), (planned.amp, bool(planned.fp8))),
        ("choice of --pt-compile", work.compiled, planned.compiled),
    )
    if other := [name for name, here, there in traits if here != there]:
        by += f"; that run had another {' and another '.join(other)}, which one factor cannot carry"
    return scaled(gpu, factor), by


def scaled(gpu: Hardware, factor: float) -> Hardware:
    """The same device with the rates of matmuls, attention, memory and launches times a factor.

    Under a power limit it needs so much less energy.
    """
    now = gpu.constants
    rates = {"level": now.level * factor, "bandwidth": now.bandwidth * factor}
    less = ("launch_s", "launch_eager_s", "tflop_joules", "low_tflop_joules", "gb_joules")
    rates |= {name: getattr(now, name) / factor for name in less}
    return dataclasses.replace(gpu, fitted=gpu.fitted | rates)


def speed_factor(work: Work, gpu: Hardware, measured: float) -> float:
    """The factor on all rates of a device by which a step takes the `measured` seconds."""
    low, high = 1e-4, 1e4
    for _ in range(40):
        middle = math.sqrt(low * high)
        slow = estimate_speed(work, scaled(gpu, middle)).step_s > measured
        low, high = (middle, high) if slow else (low, middle)
    return low


def nearest_changes(
    planned: Callable[[dict[str, Any], int], Plan], work: Work, gpu: Hardware
) -> list[str]:
    """Lines on the three fastest near changes that fit, or may; `planned(flags, gpus)` plans them."""
    gpus, fitting, seen = work.world, [], {work}
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if n < work.batch.micro_batch]
    tries: list[tuple[dict[str, Any], int]] = [({"bsz": n}, gpus) for n in sizes]
    if not work.recompute.blocks:
        tries += [({"sac_freq": freq}, gpus) for freq in ("1/4", "1/2", "1/1")]
    tries += [({"bsz": 1, "sac_freq": "1/1"}, gpus)]
    if work.fsdp:
        tries += [({}, gpus * more) for more in (2, 4, 8)]
        tries += [({"tp": 2 * work.parallelism.tp}, gpus), ({"cp": 2 * work.parallelism.cp}, gpus)]
    for flags, n in tries:
        with contextlib.suppress(UsageError):
            other = planned(flags, n)
            need = other.needs(other.work) / BYTES_PER_GIB
            if other.work in seen or need > gpu.memory_gib:
                continue
            seen.add(other.work)
            step_s = estimate_speed(other.work, gpu).step_s
            rate = other.work.batch.tokens_per_step / step_s / n
            words = " ".join(to_argv(flags | ({"gpus": n} if n != gpus else {})))
            verdict = memory_model.verdict_of(need, gpu.memory_gib, other.work)
            sure = verdict == memory_model.VERDICTS[0]
            fits = "would fit" if sure else "may fit"
            text = f"{fits}: {words}: {need:,.1f} GiB, {rate:,.0f} tokens/s per GPU"
            fitting.append((sure, rate, text))
    texts = [text for *_, text in sorted(fitting, reverse=True)[:3]]
    return texts or ["none of the changes tried would fit; use more GPUs, or larger ones"]


def show_estimate(e: Estimate, wanted: EstimateFlags, work: Work) -> None:
    """The estimate as a table."""
    m = e.memory
    who = e.script if wanted.trainer_words == "ours" else wanted.trainer_words
    need, limit = (x / BYTES_PER_GIB for x in (m.peak + e.memory_outside, e.memory_limit))
    verdict = e.verdict.replace("does not fit", "DOES NOT FIT")
    kinds = ("parameters", "gradients", "optimizer", "activations")
    rows = [
        ("parameters", f"{e.parameters / 1e9:,.3f} G"),
        ("FLOPs per token (palm)", f"{e.flops_per_token / 1e9:,.2f} G"),
        ("on", f"{e.gpus} x {e.gpu}, {who}, {e.global_batch} samples a step"),
        *((f"memory: {name}", _gib(getattr(m, name))) for name in kinds),
        ("memory: logits and gradients of the head", _gib(m.logits)),
        ("memory: gathered weights", _gib(m.gathered)),
        ("memory: peak of tensors (not all at once)", _gib(m.peak)),
        ("memory: context, buffers, gaps (assumed)", _gib(e.memory_outside)),
        ("memory needed", f"{need:,.1f} of {limit:,.1f} GiB, {verdict}"),
        ("largest --bsz that fits", f"{e.largest_bsz:,}"),
        ("step", f"{e.step_s:.4g} s"),
    ]
    shown = {name: s for name, s in e.parts_s.items() if s > 1e-6 * e.step_s}
    rows += [(f"  {name}", f"{seconds:.4g} s") for name, seconds in shown.items()]
    if work.cpu_offload:
        rows.append(("  --cpu-offload", "its transfers are not counted"))
    if sent := memory_model.offloaded_bytes(work, work.layers_of(0)):
        rows.append(("  --offload-activations", f"{_gib(sent)} each way in a micro batch"))
    if e.memory.host:
        rows.append(("memory of the host, for each", _gib(e.memory.host)))
    rows.append(("tokens/s, per GPU", f"{e.tokens_per_sec:,.0f}, {e.tokens_per_sec_per_gpu:,.0f}"))
    if work.imbalance > 1:
        known = "" if work.rows_over_mean else " (assumed; --imbalance changes it)"
        rows.append(("rows of the fullest ep rank / the mean", f"{work.imbalance:g}{known}"))
    accuracy = "unvalidated: fewer than 8 published rows of such a device, model and format"
    if wanted.calibrate:
        accuracy = "calibrated by one run; not validated"
    elif e.accuracy:
        n, part = e.accuracy["rows"], e.accuracy["covers_80"]
        accuracy = f"within ±{part:.0%} for 80 % of {n} held-out results"
    rows.append(("error", accuracy))
    rows.append(("MFU (palm)", f"{e.mfu:.1%}"))
    rows.append((f"tokens/J (at {number(e.watts, '.0f')} W)", number(e.tokens_per_joule, ".2f")))
    if e.usd_per_million_tokens is not None:
        rows.append(("US$ per million tokens", f"{e.usd_per_million_tokens:.4f}"))
    if e.days is not None:
        rows.append((f"for {wanted.tokens:.3g} tokens", f"{e.days:,.1f} days, {e.kwh:,.0f} kWh"))
        if e.usd is not None:
            rows.append((f"for {wanted.tokens:.3g} tokens", f"US$ {e.usd:,.0f}"))
    print(markdown_table(("estimate", "value"), rows), end="")


def _gib(size: float) -> str:
    return f"{size / BYTES_PER_GIB:,.2f} GiB"
