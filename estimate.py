"""Will it fit, how fast will it be, what will it cost: before a GPU is booked.

    python estimate.py configs/llama-3.1-8b.json --gpu h100 --gpus 64 --bsz 2 --pt-compile --tokens 1e12
    python estimate.py configs/gpt2-1.5b.json --gpu mi300x --bsz 16 --trace
    python estimate.py configs/gpt2-tiny.json --fit

Takes the flags of the training scripts besides its own. Needs no torch and no GPU, but for --trace
(memory a second time, by tracing our own model) and --fit (memory measured here, against the formula).
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from bench.errors import UsageError
from bench.formulas.flops import count_parameters, flops_per_token
from bench.formulas.hardware import Hardware, find_hardware
from bench.formulas.memory_model import MemoryEstimate, estimate_memory, largest_batch
from bench.formulas.speed_model import estimate_speed
from bench.results.result_files import read_result
from bench.settings.checks import above_zero, at_least, check, flag_of
from bench.settings.command_line import parse_dataclass, tool
from bench.settings.flags import Args
from bench.settings.plan import resolve_batch, resolve_recompute, resolve_seq_len, resolve_shards
from bench.settings.tool_main import run_tool
from bench.tables import markdown_table
from model.config import ModelConfig, load_config

GIB = 2**30
# Power of a busy GPU against its limit.
BUSY = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimateArgs(Args):
    """Estimate memory, speed, energy and cost of a training run."""

    gpu: str | None = None
    """GPU, as in configs/hardware.json: h100, h200, b200, mi300x, ... or the start of a name."""
    gpus: int = 1
    """How many of them."""
    per_node: int = 8
    """GPUs of one machine, or of one NVLink domain (GB200: 72)."""
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    """Script for more than one GPU: train_fsdp.py (--dp-replicate for HSDP) or train_ddp.py."""
    tokens: float | None = None
    """Tokens to train on, for days, energy and cost of the whole."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU [2^30 bytes], where it is not the usual."""
    trace: bool = False
    """Count memory a second time, by tracing our own model under fake tensors (takes seconds)."""
    fit: bool = False
    """Run some steps here, and hold the memory they take against the formula."""
    json: bool = False
    """Print JSON in place of tables."""


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
    memory_limit: float
    fits: bool
    largest_bsz: int
    step_s: float
    parts_s: dict[str, float]
    tokens_per_sec: float
    tokens_per_sec_per_gpu: float
    mfu: float
    tokens_per_joule: float
    usd_per_million_tokens: float | None
    days: float | None
    usd: float | None
    kwh: float | None
    traced_peak: float | None = None


@tool("estimate.py")
def main(argv: Sequence[str]) -> int:
    """Estimate, print, and return the exit code: 0; 2 for bad input; with --fit train.py's own, too."""
    args = parse_dataclass(EstimateArgs, argv, "estimate.py")
    for name in ("gpus", "per_node"):
        at_least(args, name, 1)
    above_zero(args, "tokens", "gpu_memory_gib")
    if args.nproc:
        raise UsageError("--nproc: give the number of devices by --gpus")
    script = "train.py" if args.gpus == 1 else f"train_{args.parallel}.py"
    args = check(args, script)
    config = load_config(args.config, args.pad_vocab)
    if args.fit:
        return fit(args, config, list(argv))
    if args.gpu is None:
        raise UsageError("--gpu is missing: h100, h200, b200, mi300x, ... (or --fit)")
    try:
        gpu = find_hardware(args.gpu)
    except UsageError as error:
        raise UsageError(f"--gpu {error}") from None
    estimate = make_estimate(args, config, gpu, script)
    if args.json:
        print(json.dumps(dataclasses.asdict(estimate), indent=1))
    else:
        show(estimate, args)
    return 0


def make_estimate(args: EstimateArgs, config: ModelConfig, gpu: Hardware, script: str) -> Estimate:
    """Everything about one setting on one kind of GPU."""
    seq_len = resolve_seq_len(args.seq_len, config)
    batch = resolve_batch(args, seq_len, args.gpus)
    resolve_recompute(args, config)
    shards = resolve_shards(args, args.gpus, "cuda") if script == "train_fsdp.py" else None
    if args.use_fp8 and gpu.fp8_tflops is None:
        raise UsageError(f"--use-fp8: {gpu.name} has no FP8")
    if args.use_fp8 and args.fp8_recipe == "mxfp8" and not gpu.mxfp8:
        raise UsageError(f"--fp8-recipe mxfp8: {gpu.name} has none; use another recipe")

    def memory(bsz: int) -> MemoryEstimate:
        this = dataclasses.replace(args, bsz=bsz)
        return estimate_memory(
            config, this, seq_len, batch.grad_acc_steps, shards,
            replicated=script == "train_ddp.py",
        )  # fmt: skip

    found = memory(args.bsz)
    limit = (args.gpu_memory_gib or gpu.memory_gib) * GIB

    def whole(bsz: int) -> float:
        return memory(bsz).on_device(args.gpus)

    s = estimate_speed(
        config, args, seq_len, batch.grad_acc_steps, gpu, args.gpus, args.per_node, shards
    )
    per_second = batch.tokens_per_step / s.step_s
    flops = flops_per_token(config, seq_len, False, args.pass_type)
    price = args.usd_per_hour or gpu.usd_per_hour
    watts = BUSY * gpu.tdp_w * args.gpus
    seconds = args.tokens / per_second if args.tokens else None
    traced = None
    if args.trace:
        from bench.parallel.memory_trace import traced_memory

        traced = traced_memory(args, config, seq_len, script, args.gpus)
    return Estimate(
        gpu=gpu.name,
        gpus=args.gpus,
        script=script,
        parameters=count_parameters(config),
        flops_per_token=flops,
        global_batch=batch.global_batch,
        memory=found,
        memory_outside=whole(args.bsz) - found.peak,
        memory_limit=limit,
        fits=whole(args.bsz) <= limit,
        largest_bsz=largest_batch(whole, limit),
        step_s=s.step_s,
        parts_s={
            "matmuls": s.matmul_s,
            "attention": s.attention_s,
            "memory-bound": s.memory_s,
            "optimizer": s.optimizer_s,
            "exposed communication": s.exposed_s,
            "hidden communication": s.communication_s - s.exposed_s,
            "host, if it were the limit": s.host_s,
        },
        tokens_per_sec=per_second,
        tokens_per_sec_per_gpu=per_second / args.gpus,
        mfu=per_second / args.gpus * flops / ((args.peak_tflops or gpu.bf16_tflops) * 1e12),
        tokens_per_joule=per_second / watts,
        usd_per_million_tokens=price and price / 3600 * args.gpus / per_second * 1e6,
        days=seconds and seconds / 86400,
        usd=seconds and price and price * args.gpus * seconds / 3600,
        kwh=seconds and watts * seconds / 3.6e6,
        traced_peak=traced,
    )


def show(e: Estimate, args: EstimateArgs) -> None:
    """The estimate as a table."""
    m = e.memory
    rows = [
        ("parameters", f"{e.parameters / 1e9:,.3f} G"),
        ("FLOPs per token (palm)", f"{e.flops_per_token / 1e9:,.2f} G"),
        ("on", f"{e.gpus} x {e.gpu}, {e.script}, {e.global_batch} samples a step"),
        ("memory: parameters", _gib(m.parameters)),
        ("memory: gradients", _gib(m.gradients)),
        ("memory: optimizer", _gib(m.optimizer)),
        ("memory: activations", _gib(m.activations)),
        ("memory: logits and gradients of the head", _gib(m.logits)),
        ("memory: gathered weights", _gib(m.gathered)),
        ("memory: peak of tensors (not all at once)", _gib(m.peak)),
    ]
    if e.traced_peak is not None:
        rows.append(
            (
                "memory: the same by tracing",
                f"{_gib(e.traced_peak)} ({m.peak / e.traced_peak - 1:+.1%})",
            )
        )
    verdict = "fits" if e.fits else "DOES NOT FIT"
    rows += [
        ("memory: context, buffers, gaps (assumed)", _gib(e.memory_outside)),
        (
            f"memory: all, of {_gib(e.memory_limit)}",
            f"{_gib(m.peak + e.memory_outside)}: {verdict}",
        ),
        ("largest --bsz that fits", f"{e.largest_bsz:,}"),
        ("step", f"{e.step_s:.4g} s"),
        *((f"  {name}", f"{seconds:.4g} s") for name, seconds in e.parts_s.items() if seconds),
        *([("  --cpu-offload", "its transfers are not counted")] if args.cpu_offload else []),
        ("tokens/s, per GPU", f"{e.tokens_per_sec:,.0f}, {e.tokens_per_sec_per_gpu:,.0f}"),
        ("MFU (palm)", f"{e.mfu:.1%}"),
        (f"tokens/J (at {BUSY:.0%} of the power limit)", f"{e.tokens_per_joule:.2f}"),
    ]
    if e.usd_per_million_tokens is not None:
        rows.append(("US$ per million tokens", f"{e.usd_per_million_tokens:.4f}"))
    if e.days is not None:
        rows.append((f"for {args.tokens:.3g} tokens", f"{e.days:,.1f} days, {e.kwh:,.0f} kWh"))
        if e.usd is not None:
            rows.append((f"for {args.tokens:.3g} tokens", f"US$ {e.usd:,.0f}"))
    table = markdown_table("estimate", "value")
    for name, value in rows:
        table.add_row(name, value)
    Console(width=140, highlight=False).print(table)


def fit(args: EstimateArgs, config: ModelConfig, argv: list[str]) -> int:
    """Run the same flags here for a moment, and print measured against estimated memory by kind."""
    if args.gpus != 1:
        raise UsageError("--fit runs train.py on one device; leave out --gpus")
    own = {flag_of(name) for name in EstimateArgs.__annotations__}
    given = {word.partition("=")[0].replace("_", "-") for word in argv} - {"--fit"}
    if wrong := sorted(own & given):
        raise UsageError(f"{wrong[0]} has no meaning with --fit, which measures on this machine")
    flags = [a for a in argv if a != "--fit"]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(Path(__file__).parent / "train.py"), *flags]
        command += [
            "--n-steps",
            "1",
            "--warmup-steps",
            "2",
            "--memory-snapshot",
            "--output-dir",
            out,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print((done.stderr.strip() or "train.py ended without a word").splitlines()[-1],
                  file=sys.stderr)  # fmt: skip
            return done.returncode
        (path,) = Path(out).glob("*/result.json")
        result = read_result(path)
    seen, batch = result.memory, result.batch
    cuda = result.device.type == "cuda"
    e = estimate_memory(config, args, batch.seq_len, batch.grad_acc_steps, None, fused_norm=cuda)
    table = markdown_table("memory", "measured", "estimate", "error")
    # The gradients of the head are made with the loss and kept like activations.
    pairs = {
        "parameters": (seen.parameters_gib, e.parameters),
        "gradients": (seen.gradients_gib, e.gradients),
        "optimizer": (seen.optimizer_gib, e.optimizer),
        "peak": (seen.peak_gib, e.peak),
    }
    for name, (measured, estimated) in pairs.items():
        error = f"{estimated / GIB / measured - 1:+.1%}" if measured else ""
        table.add_row(name, f"{measured:.3f} GiB", f"{estimated / GIB:.3f} GiB", error)
    print(
        f"{config.name} on {result.device.name}: micro batch {batch.micro_batch} x {batch.seq_len}"
    )
    Console(width=120, highlight=False).print(table)
    return 0


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


if __name__ == "__main__":
    run_tool(main)
