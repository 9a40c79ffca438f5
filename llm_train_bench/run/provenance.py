"""A run's result before it starts: model, device, settings, environment and first notes."""

import dataclasses
import datetime
import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llm_train_bench import __version__
from llm_train_bench.base import hardware
from llm_train_bench.base.documents import index_path
from llm_train_bench.base.files import ROOT, checksum
from llm_train_bench.base.machine import cpu_name, installed_version, n_cores, output_of
from llm_train_bench.base.redaction import SECRET, redact, redact_command, redact_text
from llm_train_bench.compare.setting import setting_name
from llm_train_bench.formulas.collectives import traffic
from llm_train_bench.formulas.parameters import count_parameters, linear_parameters
from llm_train_bench.formulas.work import Work
from llm_train_bench.measure.device import device_memory_gib, device_name, nccl_version
from llm_train_bench.model.config import ModelConfig, describe_keys_without_effect
from llm_train_bench.results.remarks import REFERENCE_KERNELS
from llm_train_bench.results.result_files import now, this_process
from llm_train_bench.results.schema import Device, Fp8Info, ModelInfo, Result, StepSize
from llm_train_bench.settings.flags import LEARNT, Args, declared, flag_of, of_kind, usual_values
from llm_train_bench.settings.plan import Plan, Schedule

if TYPE_CHECKING:
    from llm_train_bench.run.checkpoint.attempt import Start


def default_name(model: str, args: dict[str, Any]) -> str:
    """The default --run-name: time, model, changed headline flags, process."""
    headline = [flag for flag, declaration in declared(Args).items() if declaration.headline]
    words = setting_name({flag: args[flag] for flag in headline if flag in args}, usual_values())
    words = re.sub(r"[^\w.,-]", "", words.replace("/", "_")).replace(",", "-")
    now = datetime.datetime.now(datetime.UTC)
    model = re.sub(r"[^\w.+-]", "_", model)
    return f"{now:%Y%m%d-%H%M%S}-{model}{'-' * bool(words)}{words[:100]}-{os.getpid()}"


def digest_of(text: str) -> str:
    """A model's hash where there is no config: the first 16 hex digits of a SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def begin_result(
    entrypoint: str,
    args: dict[str, Any],
    model: ModelInfo,
    start: "Start",
    device: torch.device,
    ranks: int,
    peak_tflops: float | None = None,
    **fields: Any,
) -> Result:
    """The result of a run that begins now in this process; `fields` are the other ones of Result.

    `peak_tflops` is a user's figure of the device, for dense BF16.
    """
    return Result(
        version=__version__,
        entrypoint=entrypoint,
        command=[entrypoint.split()[-1], *redact_command(sys.argv[1:])],
        started_at=now(),
        args=redact(args),
        model=model,
        writer=this_process(),
        environment=describe_environment(device),
        run_name=start.directory.name,
        run_id=start.run_id,
        attempts=start.attempts,
        device=describe_device(device, ranks, peak_tflops),
        **fields,
    )


def open_result(
    plan: Plan,
    schedule: Schedule,
    device: torch.device,
    fp8: Fp8Info | None,
    attention_kernel: str | None,
    start: "Start",
) -> Result:
    """The result of a planned run: nothing is measured yet."""
    work, config = plan.work, plan.work.config
    resolved = {"seq_len": work.batch.seq_len, "grad_acc_steps": work.batch.grad_acc_steps}
    result = begin_result(
        plan.script,
        dataclasses.asdict(plan.args) | resolved,
        describe_model(config),
        start,
        device,
        work.world,
        plan.args.peak_tflops,
        batch=StepSize(**{name: getattr(work.batch, name) for name in StepSize.model_fields}),
        fp8=fp8,
        attention_kernel=attention_kernel,
        linear=work.linear,
    )
    for note in (*plan.notes, *_notes(work, schedule)):
        result.remark(note)
    m, parallel = result.metrics, work.parallelism
    moved = traffic(work)
    if work.ddp or work.fsdp:
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            setattr(m, f"{kind}_bytes", moved.get(kind, 0))
    if parallel.pp > 1:
        m.send_bytes = moved.get("send", 0)
        m.pipeline_bubble_ideal = (parallel.pp - 1) / (parallel.virtual * work.batch.grad_acc_steps)
    return result


def describe_model(config: ModelConfig) -> ModelInfo:
    """A model of a config in a result."""
    return ModelInfo(
        name=config.name,
        path=config.path,
        hash=config.hash,
        n_parameters=count_parameters(config),
        n_matmul_parameters=sum(linear_parameters(config).values()),
        shape=config.shape(),
        config=config.raw,
        ignored_keys=list(config.unknown_keys),
    )


def describe_training(plan: Plan) -> dict[str, str]:
    """What must stay the same where a run goes on, by its name in messages."""
    values, work = vars(plan.args), plan.work
    # What is learnt, for how long, and number formats besides --amp.
    names = of_kind(LEARNT) - {"init_from"} | {"n_steps", "warmup_steps", "pad_vocab"}
    names = sorted(names | {"use_fp8", "fp8_recipe", "tf32"})
    training = {"the model": work.config.hash} | {flag_of(n): str(values[n]) for n in names}
    training |= {"--seq-len": str(work.batch.seq_len), "--amp": work.amp}
    training["--global-bsz"] = str(work.batch.global_batch)
    files = {flag_of(name): values[name] for name in ("data", "val_data", "pack_lengths")}
    files = {name: Path(path) for name, path in files.items() if path}
    if values["pack"] and values["pack_separator"] is None:
        files |= {f"the index of {name}": index_path(path) for name, path in files.items()}
    for name, path in files.items():
        if path.is_file():
            training[name] = f"{path.stat().st_size} bytes with CRC-32 {checksum(path):08x}"
    return training


def describe_device(device: torch.device, ranks: int, peak_tflops: float | None) -> Device:
    """The device of each rank with its peaks; `peak_tflops` is a user's for dense BF16."""
    memory = device_memory_gib(device)
    part = hardware.name_of_part(device_name(device), memory)
    threads = hardware.threads_of(part, torch.get_num_threads())
    known = device.type == "cpu" and hardware.device_called(threads)
    peaks = hardware.find_peaks(threads if known else part, peak_tflops)
    roof = hardware.find_roof(part)
    return Device(
        type="cuda" if device.type == "cuda" else "cpu",
        name=device_name(device),
        memory_gib=memory,
        count=ranks,
        hardware=part if device.type == "cpu" else peaks.name,
        **{f"peak_{key}": value for key, value in vars(peaks).items() if key != "name"},
        **{f"roof_{key}": getattr(roof, key) for key in ("bf16_tflops", "fp8_tflops", "source")},
    )


def _notes(work: Work, schedule: Schedule) -> Iterator[str]:
    """Notes that a reader of the figures should know from the start, one line each."""
    if work.cuda_graphs:
        yield "peak_allocated_gib leaves out what lives in CUDA graphs; peak_reserved_gib has it"
    if work.fp8 and work.fp8.emulated:
        yield "FP8 was emulated: the figures say nothing of FP8's speed"
    if work.trains and work.config.experts and work.config.experts.aux_loss:
        yield "the balance loss is of each layer, summed; transformers pools them (docs/MODELS.md)"
    if work.lora:
        base = "bf16" if work.lora.base_bytes == 2 else "fp32"
        yield f"LoRA: {work.lora.numbers():,} parameters trained in fp32, all others frozen in {base}"
    if work.bf16_weights:
        what = "weights, gradients and moments" if work.trains else "weights"
        yield f"--bf16-weights: {what} in bf16, without exact copies"
    if work.linear == "te":
        yield "linear layers and norms of the blocks by Transformer Engine, without FP8"
    if n := work.config.mtp_layers:
        yield f"modules of multi-token prediction: {n} left out"
    if "recurrent" in work.config.parts:
        others = "not flash-linear-attention or mamba-ssm"
        yield f"{REFERENCE_KERNELS}: layers with states by PyTorch's operators, {others}"
    if schedule.captured:
        window = range(schedule.window_begin, schedule.window_end)
        where = "inside" if any(step in window for step in schedule.profiled) else "after"
        yield f"a profiler looked at steps {where} the measured window"
    if (keys := describe_keys_without_effect(work.config)) is not None:
        yield keys


LIBRARIES = ("torch", "triton", "numpy", "transformer-engine", "torchao", "liger-kernel")
# Libraries with training loops of their own, which a Meter's result names if they are loaded.
LOOPS = ("transformers", "accelerate", "lightning", "peft", "deepspeed", "trl")
# Settings of the environment that change speed or numerics; others, which may be private, stay out.
SETTINGS = tuple(
    "CUDA_ HIP_ ROCR_ NCCL_ RCCL_ GLOO_ TORCH_ TORCHINDUCTOR_ PYTORCH_ NVTE_ OMP_ MKL_ KMP_ CUBLAS "
    "ROCBLAS_ HIPBLASLT_ DISABLE_ADDMM_ HSA_ CK_ TRITON_ GPU_MAX_HW_QUEUES FI_ OFI_NCCL_ UCX_ RDMAV_ "
    "ONEDNN_ SLURM_JOB_ID".split()
)
# What launchers set for ranks on one machine; it says nothing of a run.
LAUNCHED = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Plain JSON data on host, software and revision; what cannot be read is None."""
    libraries = *LIBRARIES, *(name for name in LOOPS if name in sys.modules)
    # As docker/launch.sh, or a manifest, sets it.
    image = {key: os.environ.get(f"BENCH_IMAGE_{key.upper()}") for key in ("name", "digest")}
    home = os.environ.get("HOME", "").rstrip("/")
    return {
        "hostname": platform.node(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_count": n_cores(),
        "torch_threads": torch.get_num_threads(),
        "libraries": {name: installed_version(name) for name in libraries},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "nccl": nccl_version() if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "image": image if any(image.values()) else None,
        "settings": {
            # A path of one machine says nothing.
            k: redact_text(v.replace(home, "~") if home else v)
            for k, v in sorted(os.environ.items() - LAUNCHED.items())
            if k.startswith(SETTINGS) and not SECRET.search(k)
        },
        **source_revision(),
    }


@functools.cache
def source_revision() -> dict[str, str | bool | None]:
    """Git revision of this source tree, and whether it holds uncommitted changes."""
    # In a container the tree often belongs to another user, which git refuses to read unasked.
    git = ("git", "--no-optional-locks", "-c", f"safe.directory={ROOT}", "-C", str(ROOT))
    # An image has the tree without its history; it knows the revision it was built from. An installed
    # package has neither, though it may lie inside a user's repository.
    sha = output_of(*git, "rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if not sha:
        built_from = os.environ.get("BENCH_GIT_SHA")
        built_from = None if built_from == "unknown" else built_from or None
        return {"git_sha": built_from, "git_dirty": None}
    program = "--", "*.py", "model", "llm_train_bench"
    changes = output_of(*git, "status", "--porcelain", *program, "configs", ":!configs/roofs.json")
    revision = {"git_sha": sha, "git_dirty": bool(changes)}
    if changes:  # two edits of one commit are two programs
        edit = output_of(*git, "diff", "HEAD", *program) or ""
        revision["git_diff"] = hashlib.sha256((changes + edit).encode()).hexdigest()[:10]
    return revision


@functools.cache
def _driver() -> str | None:
    if torch.version.hip:
        return output_of("cat", "/sys/module/amdgpu/version") or None
    text = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else None
