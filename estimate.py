"""Will it fit, how fast will it be, what will it cost: before a GPU is booked.

    python estimate.py configs/llama-3.1-8b.json --gpu h100 --gpus 64 --bsz 2 --pt-compile --tokens 1e12
    python estimate.py configs/gpt2-1.5b.json --gpu mi300x --bsz 16 --trace
    python estimate.py configs/gpt2-tiny.json --fit

Takes the training scripts' flags besides its own. Needs no torch and no GPU, except for --trace
(memory again, by tracing our own model) and --fit (memory measured here, against the formula).
"""

import contextlib
import dataclasses
import functools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import llm_train_bench.start  # noqa: F401

from rich.console import Console

from llm_train_bench.errors import UsageError
from llm_train_bench.formulas.flops import flops_per_token
from llm_train_bench.formulas.hardware import (
    Hardware,
    accuracy_of,
    device_called,
    find_cpu,
    find_hardware,
    limited,
    scaled,
    threads_of,
)  # fmt: skip
from llm_train_bench.formulas.memory_model import MemoryEstimate, estimate_memory, largest_batch
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.formulas.step_events import simulate_step, write_trace
from llm_train_bench.formulas.work import Theirs, Work
from llm_train_bench.model.config import ModelConfig, load_config
from llm_train_bench.settings.checks import check
from llm_train_bench.settings.command_line import (
    parse_args,
    parse_dataclass,
    refuse_foreign,
    to_argv,
)
from llm_train_bench.settings.flags import (
    Args,
    BatchFlags,
    PeakFlags,
    Script,
    check_bounds,
    declared,
    defaults,
    flag,
    flag_of,  # fmt: skip
)
from llm_train_bench.settings.machine import cpu_name, detect_platform
from llm_train_bench.settings.plan import Plan, make_plan, resolve_seq_len
from llm_train_bench.settings.tool_main import run_tool, tool
from llm_train_bench.sweep.layout_search import TOKENS_PER_STEP, Found, powers, search
from llm_train_bench.tables import markdown_table, number

GIB = 2**30
# Power of a busy GPU against its limit.
BUSY = 0.9


@dataclasses.dataclass(frozen=True)
class EstimateFlags:
    """The hardware, and what to print."""

    gpu: str | None = flag(None, "GPU, as in configs/hardware.json: h100, h200, b200, mi300x, ... "
        "or the start of a name; cpu is this machine's, once benchmarks/gemm.py has measured it.",
        metavar="NAME")  # fmt: skip
    gpus: int = flag(1, "How many of them.", at_least=1, at_most=2**20)
    per_node: int = flag(8, "GPUs of one machine, or of one NVLink domain (GB200: 72).", at_least=1,
        at_most=2**20)  # fmt: skip
    parallel: Literal["fsdp", "ddp", "pp"] = flag("fsdp", "Script for more than one GPU: "
        "train_fsdp.py, train_ddp.py, or train_pp.py (with --pp too).")  # fmt: skip
    tokens: float | None = flag(None, "Tokens of the whole training, to give its days, energy and "
        "cost.", above=0, at_most=1e16)  # fmt: skip
    gpu_memory_gib: float | None = flag(None, "Memory of one GPU [GiB], if it differs from the "
        "listed one.", above=0)  # fmt: skip
    trace: bool = flag(False, "Count memory a second time, by tracing our own model under fake "
        "tensors (takes seconds).")  # fmt: skip
    fit: bool = flag(False, "Run some steps here, and hold the memory they take against the "
        "formula.")  # fmt: skip
    power: float | None = flag(None, "Power limit of one GPU [W].", above=0)
    clock: float | None = flag(None, "Clock to which it is locked [MHz].", above=0)
    nic_gb_per_s: float | None = flag(None, "Network of one GPU [GB/s], one way: 50 is a card of "
        "400 Gbit/s.", above=0)  # fmt: skip
    weights: Literal["fp32", "bf16"] = flag("fp32", "What other trainers do: bf16 keeps weights "
        "and gradients in bf16 alone.")  # fmt: skip
    moments: Literal["fp32", "bf16", "8bit"] = flag("fp32", "What other trainers do: the format of "
        "the optimizer's moments.")  # fmt: skip
    whole_logits: bool = flag(False, "What other trainers do: the loss sees all logits of a micro "
        "batch at once.")  # fmt: skip
    zero2: bool = flag(False, "What other trainers do: ZeRO-2, with --parallel ddp: gradients and "
        "moments are sharded.")  # fmt: skip
    sac_every_other: bool = flag(False, "What torchtitan does in place of --sac-policy op: every "
        "other matmul is recomputed.")  # fmt: skip
    calibrate: str | None = flag(None, "A run's result.json; the estimate is corrected by what was "
        "measured there.", metavar="RESULT")  # fmt: skip
    timeline: str | None = flag(None, "Simulate the step's events, and draw them as a Chrome "
        "trace, which Perfetto opens.", metavar="FILE")  # fmt: skip
    spread: float | None = flag(None, "With --timeline: relative standard deviation of the ranks' "
        "speed, as 0.02; the slowest sets the pace. By default the formulas' 1 % for each doubling "
        "of the nodes.", at_least=0, below=1, needs="timeline")  # fmt: skip
    plan: bool = flag(False, "Search layouts, recomputation, micro batch and FP8 for the fastest; "
        "several GPUs as --gpu h100,mi300x.")  # fmt: skip
    days: float | None = flag(None, "With --plan and --tokens: how many GPUs finish in so many "
        "days.", above=0, needs="plan")  # fmt: skip
    json: bool = flag(False, "Print JSON in place of tables.")


@dataclasses.dataclass(frozen=True)
class EstimateArgs(EstimateFlags, Args):
    """Estimate memory, speed, energy and cost of a training run."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """All that is printed; times in seconds, memory in bytes, rates per GPU."""

    gpu: str
    gpus: int
    script: str
    parameters: int
    flops_per_token: float
    global_batch: int
    memory: MemoryEstimate
    memory_outside: float
    """Context, buffers and gaps; negative only if a calibration says so."""
    memory_limit: float
    fits: bool
    largest_bsz: int
    step_s: float
    parts_s: dict[str, float]
    tokens_per_sec: float
    tokens_per_sec_per_gpu: float
    mfu: float
    tokens_per_joule: float | None
    usd_per_million_tokens: float | None
    days: float | None
    usd: float | None
    kwh: float | None
    traced_peak: float | None = None
    simulated_s: float | None = None
    """The step by its events (--timeline)."""
    accuracy: dict[str, float] | None = None
    """Of tokens/s, against published rows that chose no constant: rows, median, covers_80."""


@tool("estimate.py")
def main(argv: Sequence[str]) -> int:
    """Estimate, print, and return the exit code: 0; 4 if it does not fit; 2 for bad input.

    With --fit it may be train.py's own.
    """
    words, file = with_run_file(argv)
    args = parse_dataclass(EstimateArgs, words, "estimate.py")
    wanted = args.part(EstimateFlags)
    check_bounds(wanted)
    if args.nproc:
        raise UsageError("--nproc: give the number of devices by --gpus")
    several = Script[wanted.parallel.upper()]
    if file and file.script not in (None, Script.ONE) and wanted.gpus == 1:
        raise UsageError(f"--from: is for {file.script}; --gpus says how many run it")
    if args.pp and several is Script.DDP:
        raise UsageError("--parallel ddp: replicas have no stages; leave out --pp, or --parallel")
    several = Script.PP if args.pp else several
    script = Script.ONE if wanted.gpus == 1 else several
    if not wanted.plan:
        refuse_foreign(words, script)
    args = check(args, script)
    if wanted.fit:
        platform = "cpu" if args.device == "cpu" else detect_platform()
        return fit(make_plan(args, script, wanted.gpus, platform).work, list(argv))
    if wanted.gpu is None:
        raise UsageError("--gpu is missing: h100, h200, b200, mi300x, ..., cpu (or --fit)")
    if wanted.zero2 and wanted.parallel != "ddp":
        raise UsageError("--zero2 needs --parallel ddp; train_fsdp.py shards the parameters too")
    if wanted.plan:
        refuse_beside_plan(wanted, vars(args))
    elif "," in wanted.gpu and device_called(wanted.gpu) is None:
        raise UsageError(f"--gpu {wanted.gpu}: several GPUs go with --plan; name one")
    if wanted.plan:
        config = load_config(args.config, args.pad_vocab)
        return show_plans(wanted, functools.partial(dataclasses.replace, args), config)
    gpu = device_of(wanted.gpu, wanted)
    memory = wanted.gpu_memory_gib or gpu.memory_gib
    plan = make_plan(args, script, wanted.gpus, gpu.platform, memory_gib=memory)
    plan = dataclasses.replace(plan, work=with_theirs(plan.work, wanted))
    if wanted.calibrate:
        gpu, told = calibrated(gpu, Path(wanted.calibrate), wanted)
        plan = dataclasses.replace(plan, notes=(*plan.notes, told))
    estimate = make_estimate(plan, wanted, gpu)
    if wanted.timeline:
        estimate = dataclasses.replace(estimate, simulated_s=draw(plan.work, gpu, wanted))
    if wanted.json:
        print(json.dumps(dataclasses.asdict(estimate), indent=1))
    else:
        show(estimate, wanted, plan.work)
        for note in plan.notes:
            print(note)
        if wanted.gpus > wanted.per_node and wanted.gpus % wanted.per_node:
            last = wanted.gpus % wanted.per_node
            print(
                f"the last node has {last} of {wanted.per_node} GPUs, and all wait for its network cards"
            )
        if estimate.usd is None and wanted.tokens:
            print(f"no price of {gpu.name} is known; --usd-per-hour gives one")
        if not estimate.fits:

            def planned(flags: dict[str, Any], gpus: int) -> Plan:
                given = check(dataclasses.replace(args, **flags), script)
                other = make_plan(given, script, gpus, gpu.platform)
                return dataclasses.replace(other, work=with_theirs(other.work, wanted))

            for change in nearest_changes(planned, plan.work, memory * GIB, gpu, wanted.per_node):
                print(f"would fit: {change}")
    return 0 if estimate.fits else 4


def with_run_file(argv: Sequence[str]) -> tuple[list[str], Any]:
    """The command line with what --from FILE holds, its script and ranks too; and the file's facts."""
    if not any(word == "--from" or word.startswith("--from=") for word in argv):
        return list(argv), None
    from llm_train_bench.settings.run_file import with_file  # needs YAML

    words, file = with_file(argv, None)
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    ranks = file.flags.get("nproc") or file.ranks
    if ranks and "--gpus" not in given:
        words += ["--gpus", str(ranks)]
    if file.script not in (None, Script.ONE) and "--parallel" not in given:
        words += ["--parallel", file.script.name.lower()]
    return words, file


def device_of(name: str, wanted: EstimateFlags) -> Hardware:
    """The device of that name under the limits that the flags give; UsageError for an unknown one."""
    try:
        cpu = name.lower() == "cpu"
        gpu = find_cpu(cpu_name(), wanted.gpus) if cpu else find_hardware(name)
    except UsageError as error:
        raise UsageError(f"--gpu {error}") from None
    return limited(gpu, wanted.power, wanted.clock, wanted.nic_gb_per_s)


def with_theirs(work: Work, wanted: EstimateFlags) -> Work:
    """The step with what other trainers do."""
    theirs = Theirs(
        weight_bytes={"fp32": 4, "bf16": 2}[wanted.weights],
        moment_bytes={"fp32": 4, "bf16": 2, "8bit": 1}[wanted.moments],
        whole_logits=wanted.whole_logits,
        zero2=wanted.zero2,
    )
    if wanted.sac_every_other and not work.recompute.blocks:
        raise UsageError("--sac-every-other says what of the blocks of --sac-freq; give that too")
    if wanted.sac_every_other:
        recompute = dataclasses.replace(work.recompute, policy="every-other-matmul")
        work = dataclasses.replace(work, recompute=recompute)
    return dataclasses.replace(work, theirs=theirs)


def calibrated(gpu: Hardware, path: Path, wanted: EstimateFlags) -> tuple[Hardware, str]:
    """The device as one measured run found it, and a line on that; UsageError if it was another's.

    All rates of the device are multiplied by the one factor that makes the run's own estimate right.
    """
    from llm_train_bench.results.result_files import (
        read_result,  # needs pydantic, which takes a while
    )

    if path.is_dir():
        path = path / "result.json"
    try:
        result = read_result(path)
    except OSError as error:
        raise UsageError(f"--calibrate {path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"--calibrate {path}: is no result.json of a run") from None
    # One slow step says nothing of the device: the median, as in benchmarks/calibration.py.
    measured, script = result.metrics.step_time_median_s, Script(result.entrypoint)
    if not measured:
        raise UsageError(f"--calibrate {path}: has no measured step; use a run that was completed")
    # Of a peak the list itself may be wrong.
    if wrong := [mark for mark in result.unfit if mark != "faster than its peak"]:
        raise UsageError(f"--calibrate {path}: is unfit for comparison: {'; '.join(wrong)}")
    threads = result.environment.get("torch_threads")
    if gpu.platform == "cpu" and gpu.name != threads_of(result.device.hardware, threads):
        raise UsageError(
            f"--calibrate {path}: was measured on {result.device.hardware} with {threads} threads, and "
            f"--gpu is {gpu.name}"
        )
    hardware = result.device.hardware
    if hardware not in (gpu.name, *gpu.driver_names) and not gpu.name.startswith(f"{hardware}, "):
        raise UsageError(f"--calibrate {path}: was measured on {hardware}, and --gpu is {gpu.name}")
    given = parse_args(["--from", str(path)], script)
    work = make_plan(given, script, result.device.count, gpu.platform).work
    factor = speed_factor(work, gpu, wanted.per_node, measured)
    told = f"calibrated: by {result.run_name} this device is {factor:.2f} times as fast as it is listed"
    return scaled(gpu, factor, factor), told


def speed_factor(work: Work, gpu: Hardware, per_node: int, measured: float) -> float:
    """The factor on all rates of a device by which a step takes the `measured` seconds."""

    def estimated(factor: float) -> float:
        return estimate_speed(work, scaled(gpu, factor, factor), per_node).step_s

    low, high = 1e-4, 1e4
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if estimated(middle) > measured else (low, middle)
    return low


# What --plan chooses itself.
CHOSEN = ("bsz", "grad_acc_steps", "tp", "cp", "ep", "pp", "pp_virtual", "dp_replicate", "sac_freq",
          "sac_policy", "use_fp8", "pt_compile", "compile_mode", "ddp_mode", "zero1")  # fmt: skip


def refuse_beside_plan(wanted: EstimateFlags, given: Mapping[str, Any]) -> None:
    """UsageError for a flag that --plan would not heed."""
    usual = defaults(EstimateArgs)
    for name in ("calibrate", "timeline", "trace", "parallel", "sac_every_other", "zero2"):
        if getattr(wanted, name) != usual[name]:
            raise UsageError(f"{flag_of(name)} is for one estimate; leave out --plan")
    for name in CHOSEN:
        if given[name] != usual[name]:
            raise UsageError(f"--plan chooses {flag_of(name)} itself; leave one of the two out")
    if given["pass_type"] != "step":
        raise UsageError("--plan is for training steps; leave out --pass-type")
    if wanted.days and wanted.gpus != usual["gpus"]:
        raise UsageError("--days finds how many GPUs it takes; leave out --gpus")
    if wanted.days and not wanted.tokens:
        raise UsageError("--days needs --tokens: the days of how long a training?")


def show_plans(wanted: EstimateFlags, changed: Callable[..., Args], config: ModelConfig) -> int:
    """--plan: the ten fastest layouts of each kind of GPU, and why the others lose; 4 if none will do.

    `changed(flag=value, ...)` are the arguments with other flags.
    """
    plain = changed()
    batch, price = plain.part(BatchFlags), plain.part(PeakFlags).usd_per_hour
    seq_len = resolve_seq_len(batch.seq_len, config)
    names = [wanted.gpu] if device_called(wanted.gpu) else wanted.gpu.split(",")
    all_found, enough = {}, False
    for name in names:
        gpu = device_of(name.strip(), wanted)
        gpu = dataclasses.replace(gpu, usd_per_hour=price or gpu.usd_per_hour)

        def make(flags: dict[str, Any], script: Script, n: int, gpu: Hardware = gpu) -> Work:
            given = changed(pt_compile=True, **flags)
            work = make_plan(check(given, script), script, n, gpu.platform, config).work
            return with_theirs(work, wanted)

        memory = wanted.gpu_memory_gib or gpu.memory_gib
        counts = [wanted.gpus]
        if wanted.days:
            counts = [n * wanted.per_node for n in powers(2**20 // wanted.per_node)]
        for gpus in counts:
            # About four million tokens, in as many samples for each GPU.
            each = 2 ** max(0, round(math.log2(TOKENS_PER_STEP / seq_len / gpus)))
            samples = batch.global_bsz or gpus * each
            fp8 = gpu.fp8_tflops is not None
            found = search(config, gpu, gpus, wanted.per_node, memory, samples, seq_len, make, fp8)
            days = None
            if found.best and wanted.tokens:
                days = wanted.tokens / found.best[0].tokens_per_sec / 86400
            if not wanted.days or (days and days <= wanted.days):
                break
        enough |= bool(found.best) and not (wanted.days and days > wanted.days)
        if wanted.json:
            ways = [dataclasses.asdict(layout) | {"words": layout.words()} for layout in found.best]
            part = {"gpus": gpus, "samples": samples, "best": ways, "lost": found.lost}
            all_found[gpu.name] = part
            continue
        show_plan(found, gpu, gpus, samples, (config.path, seq_len), wanted)
        if wanted.days and days and days > wanted.days:
            print(f"even {gpus:,} GPUs take longer than {wanted.days:g} days: {days:,.1f}")
    if wanted.json:
        print(json.dumps(all_found, indent=1))
    return 0 if enough else 4


def show_plan(
    found: Found, gpu: Hardware, gpus: int, samples: int, of: tuple[str, int], wanted: EstimateFlags
) -> None:
    """One kind of GPU's ten best, with time, memory and cost."""
    path, seq_len = of
    print(
        f"{gpus} x {gpu.name}, {samples} samples of {seq_len} tokens a step; {found.tried} settings, "
        f"each with {path} --seq-len {seq_len} --pt-compile:"
    )
    table = markdown_table("setting", "tokens/s/GPU", "GiB", "days", "US$", "largest loss")
    for layout in found.best:
        days = wanted.tokens and wanted.tokens / layout.tokens_per_sec / 86400
        usd = days and gpu.usd_per_hour and days * 24 * gpu.usd_per_hour * gpus
        table.add_row(
            layout.words(), f"{layout.tokens_per_sec / gpus:,.0f}", f"{layout.memory / GIB:,.1f}",
            number(days, ",.1f"), number(usd, ",.0f"), layout.loss())  # fmt: skip
    Console(width=150, highlight=False, markup=False).print(table)
    if not found.best:
        why = "fits" if any("does not fit" in reason for reason in found.lost) else "can be run"
        print(f"nothing {why}; use more GPUs, or larger ones")
    others = ", ".join(f"{n} {why}" for why, n in sorted(found.lost.items(), key=lambda x: -x[1]))
    print(f"the others: {others}" if others else "")


def nearest_changes(
    planned: Callable[[dict[str, Any], int], Plan],
    work: Work,
    limit: float,
    gpu: Hardware,
    per_node: int,
) -> list[str]:
    """The three of some near changes that fit and are fastest, each with its memory and speed.

    `planned(flags, gpus)` makes a plan with other flags; `limit` is in bytes.
    """
    gpus, found, seen = work.world, [], {work}
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if n < work.batch.micro_batch]
    tries: list[tuple[dict[str, Any], int]] = [({"bsz": n}, gpus) for n in sizes]
    if not work.recompute.blocks:
        tries += [({"sac_freq": freq}, gpus) for freq in ("1/4", "1/2", "1/1")]
    tries += [({"bsz": 1, "sac_freq": "1/1"}, gpus)]
    if work.fsdp:
        tries += [({}, gpus * more) for more in (2, 4, 8)]
        tries += [({"tp": 2 * work.fsdp.tp}, gpus), ({"cp": 2 * work.fsdp.cp}, gpus)]
    for flags, n in tries:
        with contextlib.suppress(UsageError):
            other = planned(flags, n)
            if other.work in seen or (need := other.needs(other.work)) > limit:
                continue
            seen.add(other.work)
            step_s = estimate_speed(other.work, gpu, per_node).step_s
            rate = other.work.batch.tokens_per_step / step_s / n
            words = " ".join(to_argv(flags | ({"gpus": n} if n != gpus else {})))
            found.append((rate, f"{words}: {need / GIB:,.1f} GiB, {rate:,.0f} tokens/s per GPU"))
    texts = [text for _, text in sorted(found, reverse=True)[:3]]
    return texts or ["none of the changes tried; use more GPUs, or larger ones"]


def make_estimate(plan: Plan, wanted: EstimateFlags, gpu: Hardware) -> Estimate:
    """Everything about one setting on one kind of GPU."""
    work, batch, world = plan.work, plan.work.batch, plan.work.world
    if work.fp8 and gpu.fp8_tflops is None:
        raise UsageError(f"--use-fp8: {gpu.name} has no FP8")
    if work.fp8 and work.fp8.recipe == "mxfp8" and not gpu.mxfp8:
        raise UsageError(f"--fp8-recipe mxfp8: {gpu.name} has none; use another recipe")

    def whole(bsz: int) -> float:
        return estimate_memory(work.with_micro_batch(bsz)).on_device(world)

    found, needed = estimate_memory(work), whole(batch.micro_batch)
    limit = (wanted.gpu_memory_gib or gpu.memory_gib) * GIB
    s = estimate_speed(work, gpu, wanted.per_node)
    per_second = batch.tokens_per_step / s.step_s
    flops = flops_per_token(work.config, batch.seq_len, False, work.pass_type)
    price = plan.peaks.usd_per_hour or gpu.usd_per_hour
    watts = BUSY * gpu.tdp_w * world
    seconds = wanted.tokens / per_second if wanted.tokens else None
    traced = None
    if wanted.trace:
        from llm_train_bench.parallel.memory_trace import traced_memory

        traced = traced_memory(work, plan.optimizer)
    peak = (plan.peaks.peak_tflops or gpu.bf16_tflops) * 1e12
    return Estimate(
        gpu=gpu.name, gpus=world, script=plan.script, parameters=count_parameters(work.config),
        flops_per_token=flops, global_batch=batch.global_batch,
        memory=found, memory_outside=needed - found.peak, memory_limit=limit, fits=needed <= limit,
        largest_bsz=largest_batch(whole, limit), traced_peak=traced,
        step_s=s.step_s, parts_s=s.parts,
        tokens_per_sec=per_second, tokens_per_sec_per_gpu=per_second / world,
        mfu=per_second / world * flops / peak, tokens_per_joule=per_second / watts if watts else None,
        usd_per_million_tokens=price and price / 3600 * world / per_second * 1e6,
        days=seconds and seconds / 86400, usd=seconds and price and price * world * seconds / 3600,
        kwh=seconds and watts and watts * seconds / 3.6e6,
        accuracy=accuracy_of(gpu.name, work.fsdp is not None and work.fsdp.divided))  # fmt: skip


def draw(work: Work, gpu: Hardware, wanted: EstimateFlags) -> float:
    """--timeline: simulate the step and write its trace; returns its seconds."""
    events, seconds = simulate_step(work, gpu, wanted.per_node, wanted.spread)
    groups = work.fsdp.pp if work.fsdp else 1
    each = work.world // groups
    names = {g: f"{each} ranks, stages {g}, {g + groups}, ..." for g in range(groups)}
    if groups == 1:
        names = {0: f"{each} ranks, all alike"}
    try:
        write_trace(events, Path(wanted.timeline), names)
    except OSError as error:
        raise UsageError(f"--timeline {wanted.timeline}: {error.strerror}") from None
    return seconds


def show(e: Estimate, wanted: EstimateFlags, work: Work) -> None:
    """The estimate as a table."""
    m = e.memory
    table = markdown_table("estimate", "value")
    row = table.add_row
    row("parameters", f"{e.parameters / 1e9:,.3f} G")
    row("FLOPs per token (palm)", f"{e.flops_per_token / 1e9:,.2f} G")
    row("on", f"{e.gpus} x {e.gpu}, {e.script}, {e.global_batch} samples a step")
    for name in ("parameters", "gradients", "optimizer", "activations"):
        row(f"memory: {name}", _gib(getattr(m, name)))
    row("memory: logits and gradients of the head", _gib(m.logits))
    row("memory: gathered weights", _gib(m.gathered))
    row("memory: peak of tensors (not all at once)", _gib(m.peak))
    if traced := e.traced_peak:
        row("memory: the same by tracing", f"{_gib(traced)} ({m.peak / traced - 1:+.1%})")
    row("memory: context, buffers, gaps (assumed)", _gib(e.memory_outside))
    verdict = "fits" if e.fits else "DOES NOT FIT"
    row(f"memory: all, of {_gib(e.memory_limit)}", f"{_gib(m.peak + e.memory_outside)}: {verdict}")
    row("largest --bsz that fits", f"{e.largest_bsz:,}")
    row("step", f"{e.step_s:.4g} s")
    if simulated := e.simulated_s:
        row("step, simulated", f"{simulated:.4g} s ({simulated / e.step_s - 1:+.1%})")
    for name, seconds in e.parts_s.items():
        if seconds > 1e-6 * e.step_s:
            row(f"  {name}", f"{seconds:.4g} s")
    if work.fsdp and work.fsdp.cpu_offload:
        row("  --cpu-offload", "its transfers are not counted")
        row("memory of the host, for each", _gib(e.memory.host))
    row("tokens/s, per GPU", f"{e.tokens_per_sec:,.0f}, {e.tokens_per_sec_per_gpu:,.0f}")
    by_run = "calibrated by one run; not validated"
    row("how far that may be off", by_run if wanted.calibrate else accuracy_text(e))
    row("MFU (palm)", f"{e.mfu:.1%}")
    row(f"tokens/J (at {BUSY:.0%} of the power limit)", number(e.tokens_per_joule, ".2f"))
    if e.usd_per_million_tokens is not None:
        row("US$ per million tokens", f"{e.usd_per_million_tokens:.4f}")
    if e.days is not None:
        row(f"for {wanted.tokens:.3g} tokens", f"{e.days:,.1f} days, {e.kwh:,.0f} kWh")
        if e.usd is not None:
            row(f"for {wanted.tokens:.3g} tokens", f"US$ {e.usd:,.0f}")
    Console(width=140, highlight=False, markup=False).print(table)


def accuracy_text(e: Estimate) -> str:
    """The range of tokens/s in words."""
    if e.accuracy is None:
        return "unvalidated: no published row of such a device and layout"
    n, part = e.accuracy["rows"], e.accuracy["covers_80"]
    few = ", too few to say much" if n < 5 else ""
    return f"± {part:.0%}: 80 % of {n} published rows not used in fitting{few}"


def fit(work: Work, argv: list[str]) -> int:
    """Run the same flags here for a moment, and print measured against estimated memory by kind."""
    from llm_train_bench.results.result_files import read_result

    if work.world != 1:
        raise UsageError("--fit runs train.py on one device; leave out --gpus")
    own = {flag_of(name) for name in declared(EstimateFlags)}
    given = {word.partition("=")[0].replace("_", "-") for word in argv} - {"--fit"}
    if wrong := sorted(own & given):
        raise UsageError(f"{wrong[0]} has no meaning with --fit, which measures on this machine")
    flags = [a for a in argv if a != "--fit"]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(Path(__file__).parent / "train.py"), *flags]
        command += [*"--n-steps 1 --warmup-steps 2 --memory-snapshot --output-dir".split(), out]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print((done.stderr.strip() or "train.py ended without a word").splitlines()[-1],
                  file=sys.stderr)  # fmt: skip
            return done.returncode
        (path,) = Path(out).glob("*/result.json")
        result = read_result(path)
    seen, batch = result.memory, result.batch
    e = estimate_memory(work, fused_norm=result.device.type == "cuda")
    table = markdown_table("memory", "measured", "estimate", "error")
    # The gradients of the head are made with the loss and kept like activations.
    for name in ("parameters", "gradients", "optimizer", "peak"):
        measured, estimated = getattr(seen, f"{name}_gib"), getattr(e, name) / GIB
        error = f"{estimated / measured - 1:+.1%}" if measured else ""
        table.add_row(name, f"{measured:.3f} GiB", f"{estimated:.3f} GiB", error)
    size = f"micro batch {batch.micro_batch} x {batch.seq_len}"
    print(f"{result.model.name} on {result.device.name}: {size}")
    Console(width=120, highlight=False, markup=False).print(table)
    return 0


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


if __name__ == "__main__":
    run_tool(main)
