"""A run's result before it starts: what will run, on what, with what, and what to know of it."""

import dataclasses
import datetime
import os
import sys
from collections.abc import Iterator

import torch

from bench.args import Args, captured_steps, in_window
from bench.attention import attention_kernel
from bench.combinations import GRAPH_MODES
from bench.compiling import uses_cuda_graphs
from bench.device import device_memory_gib, device_name
from bench.environment import describe_environment
from bench.flops import count_parameters, linear_parameters
from bench.hardware import find_peaks, find_roof, name_of_part
from bench.results import Batch, Device, Fp8Info, ModelInfo, Result
from model.config import ModelConfig


def open_result(
    entrypoint: str,
    args: Args,
    config: ModelConfig,
    device: torch.device,
    batch: Batch,
    ranks: int,
    fp8: Fp8Info | None,
) -> Result:
    """The result of a run that begins now, named for it, without anything measured."""
    now = datetime.datetime.now(datetime.UTC)
    name = args.run_name or f"{now:%Y%m%d-%H%M%S}-{config.name}-{os.getpid()}"
    if args.run_name and (attempt := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))):
        name += f"-restart{attempt}"  # the attempt before has a result, too
    resolved = {"seq_len": batch.seq_len, "grad_acc_steps": batch.grad_acc_steps}
    return Result(
        run_name=name,
        entrypoint=entrypoint,
        command=[entrypoint, *sys.argv[1:]],
        started_at=now.isoformat(timespec="seconds"),
        args=dataclasses.asdict(args) | resolved,
        model=ModelInfo(
            name=config.name,
            path=config.path,
            hash=config.hash,
            n_parameters=count_parameters(config),
            n_matmul_parameters=sum(linear_parameters(config).values()),
            shape=config.shape(),
            config=config.raw,
            ignored_keys=list(config.unknown_keys),
        ),
        device=_device(args, device, ranks),
        batch=batch,
        fp8=fp8,
        attention_kernel=attention_kernel(args, config, batch.seq_len, device),
        environment=describe_environment(device),
        notes=list(_notes(args, config, device, fp8)),
    )


def _device(args: Args, device: torch.device, ranks: int) -> Device:
    memory = device_memory_gib(device)
    part = name_of_part(device_name(device), memory)
    peaks = find_peaks(part, args.peak_tflops, args.peak_fp8_tflops)
    roof = find_roof(part)
    return Device(
        type=device.type,
        name=device_name(device),
        memory_gib=memory,
        count=ranks,
        hardware=peaks.name,
        peak_bf16_tflops=peaks.bf16_tflops,
        peak_fp8_tflops=peaks.fp8_tflops,
        peak_source=peaks.source,
        roof_bf16_tflops=roof.bf16_tflops,
        roof_fp8_tflops=roof.fp8_tflops,
        roof_source=roof.source,
    )


def _notes(
    args: Args, config: ModelConfig, device: torch.device, fp8: Fp8Info | None
) -> Iterator[str]:
    """What a reader of the figures should know from the start, a line each."""
    if uses_cuda_graphs(args, device):
        yield "peak_allocated_gib leaves out what lives in CUDA graphs; peak_reserved_gib has it"
    elif args.pt_compile and args.compile_mode in GRAPH_MODES:
        yield f"--compile-mode {args.compile_mode}: a CPU has no CUDA graphs"
    if fp8 and fp8.emulated:
        yield "FP8 was emulated: the figures say nothing of FP8's speed"
    if args.memory_snapshot and device.type == "cpu":
        yield "--memory-snapshot: a CPU keeps no allocator history; here it gives memory by kind"
    if captured_steps(args):
        where = "inside" if in_window(args) else "after"
        yield f"a profiler looked at steps {where} the measured window"
    if config.unknown_keys:
        keys = ", ".join(config.unknown_keys)
        yield f"{config.path}: keys nobody here knows are ignored: {keys}"
