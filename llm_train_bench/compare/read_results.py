"""Result files as records: our result.json and CSV, and the JSON of a comparison suite. Needs no torch.

That suite's keys (docs/COMPARE.md lists the mapping): platform, gpu_info, training_config,
performance_metrics, memory_metrics, step_times, loss_values, learning_rates.
"""

import csv
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import shown_command
from llm_train_bench.base.hardware import device_called
from llm_train_bench.base.strict import first_problem
from llm_train_bench.compare.read_logs import (
    read_automodel_benchmark,
    read_metrics_csv,
    read_trainer_state,
)
from llm_train_bench.compare.records import LogFacts, Record, steady, unfinished_loss
from llm_train_bench.model.json_keys import parse_json
from llm_train_bench.results.result_files import commit_of, parse_result, software
from llm_train_bench.results.schema import Result
from llm_train_bench.settings.flags import LEARNT, LENGTH, OUTPUT, SETTABLE, SPEED, of_kind

GB_TO_GIB = 1e9 / 2**30
PLATFORM_WORDS = {"benchmark", "bench", "train", "training", "result", "results", "output", "nvidia",
                  "amd", "cuda", "rocm", "nvd", "gpu", "h100", "h200", "b200", "a100", "mi300x",
                  "mi325x", "mi350x", "mi355x"}  # fmt: skip


def read_json(path: Path, facts: LogFacts) -> list[Record]:
    """A JSON file of ours or of another suite; UsageError for any other."""
    content = parse_json(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "schema_version" in content and "metrics" in content:
        return [read_ours(content, path)]
    if isinstance(content, dict) and {"gpu_info", "performance_metrics"} <= set(content):
        return [read_suite(content, path, facts)]
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        return [read_trainer_state(content, path, facts)]
    if isinstance(content, dict) and {"avg_iter_time_seconds", "world_size"} <= set(content):
        return [read_automodel_benchmark(content, path)]
    raise UsageError(
        f"{path}: is no result.json of ours, and has no gpu_info and performance_metrics"
    )


def read_ours(content: dict[str, Any], path: Path) -> Record:
    """A result.json; losses and learning rates from the steps.jsonl beside it."""
    try:
        r = parse_result(content)
    except ValidationError as error:
        why = first_problem(error)
        raise UsageError(f"{path}: not a result of this version: {why}") from None
    m, a = r.metrics, r.args
    settings = [a["amp"]]
    if r.fp8:
        settings.append(f"fp8 {r.fp8.backend} {r.fp8.recipe}")
    if a["pt_compile"]:
        settings.append("compile" if a["compile_mode"] == "default" else a["compile_mode"])
    if a["sac_freq"]:
        settings.append(f"sac {a['sac_freq']} {a['sac_policy']}")
    settings += [
        r.entrypoint.removesuffix(".py"),
        f"b{r.batch.micro_batch}x{r.batch.grad_acc_steps}",
    ]
    if a["pass_type"] != "step":
        settings.append(a["pass_type"])
    memory_gib, memory_kind = r.peak_memory
    losses, rates = [], []
    steps = path.parent / "steps.jsonl"
    if steps.exists():
        for line in steps.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                step = parse_json(line)
                if step["phase"] != "profile":
                    losses.append((step["step"], step["loss"]))
                    rates.append((step["step"], step["lr"]))
            except (ValueError, LookupError, TypeError):
                break  # cut off: the run was killed while writing
    return Record(
        path=str(path),
        suite="llm-train-bench",
        label=r.run_name,
        hardware=r.device.hardware,
        n_gpus=r.device.count,
        model=r.model.name,
        model_hash=r.model.hash,
        seq_len=r.batch.seq_len,
        global_batch=r.batch.global_batch,
        settings=" ".join(settings),
        tokens_per_sec=m.tokens_per_sec,
        tokens_per_sec_per_gpu=m.tokens_per_sec_per_gpu,
        step_times_s=r.step_times_s,
        mfu=m.mfu,
        tflops_per_gpu=m.model_tflops_per_gpu,
        flop_convention="palm",
        memory_gib=memory_gib,
        memory_kind=memory_kind,
        tokens_per_joule=m.tokens_per_joule,
        usd_per_hour=a.get("usd_per_hour"),
        power_limit_w=r.power_limit_w,
        losses=[(i, x) for i, x in losses if x is not None],
        learning_rates=rates,
        hyperparameters={k: v for k, v in a.items() if k not in of_kind(OUTPUT, LENGTH, SPEED)}
        | {"global_batch": r.batch.global_batch, "seq_len": r.batch.seq_len},
        marks=r.unfit,
        notes=list(r.notes),
        remarks=list(r.disturbances),
        provenance=provenance_of(r),
        software=software(r) | {"commit": commit_of(r)},
        lineage=(r.lineage.id, r.lineage.attempt),
        first_step=r.resumed_from.step if r.resumed_from else 0,
        goodput=m.goodput,
        arguments={k: v for k, v in a.items() if k not in of_kind(OUTPUT, LENGTH)}
        | {"global_batch": r.batch.global_batch, "script": r.entrypoint},
    )


def provenance_of(r: Result) -> dict[str, str]:
    """Where a result comes from: date, commit, versions and command; no host or user, no whole path."""
    found = {"date": r.started_at[:16].replace("T", " "), "commit": commit_of(r)} | software(r)
    if os := r.environment.get("os"):
        found["os"] = str(os)
    return found | {"command": " ".join(shown_command(r.command))}


def read_suite(content: dict[str, Any], path: Path, facts: LogFacts) -> Record:
    """The other suite's benchmark JSON."""
    gpu, config = content["gpu_info"], content.get("training_config") or {}
    speed, memory = content["performance_metrics"], content.get("memory_metrics") or {}
    n = config.get("num_gpus") or gpu.get("device_count")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise UsageError(f"{path}: num_gpus is {n!r}, which is no number of GPUs")

    def series(name: str) -> list[Any]:
        return content.get(name) or content.get(f"raw_{name}") or []

    batch = facts.of(path, "global_batch", config.get("global_batch_size"))
    seq_len = facts.of(path, "seq_len", config.get("sequence_length"))
    hardware = facts.of(path, "hardware", gpu.get("device_name"))
    times = steady(series("step_times"))
    total = speed.get("tokens_per_second") or None  # 0: not measured
    notes = []
    if times and batch and seq_len:
        total = 1.0 * batch * seq_len * len(times) / sum(times)  # a list would be repeated
        notes.append(f"tokens/s from {len(times)} steady step times")
    per_gpu = total / n if total and n else speed.get("tokens_per_second_per_gpu")
    peak = memory.get("peak_memory_allocated_gb") or max(series("memory_values"), default=None)
    model = config.get("model") or config.get("model_name") or model_of_file(path)
    known = {
        "global_batch_size": "global_batch", "sequence_length": "seq_len", "learning_rate": "lr",
        "weight_decay": "weight_decay", "optimizer": "optimizer", "seed": "seed",
        "warmup_steps": "lr_warmup_steps",
    }  # fmt: skip
    given = {
        ours: config[theirs] for theirs, ours in known.items() if config.get(theirs) is not None
    }
    if isinstance(given.get("optimizer"), str):
        given["optimizer"] = given["optimizer"].lower()
    losses = list(enumerate(series("loss_values")))
    device = device_called(hardware)
    parameters = facts.of(path, "parameters", config.get("num_parameters"))
    flops = 6.0 * parameters if parameters else None
    shape = [config.get(key) for key in ("num_layers", "hidden_size")]
    if flops and seq_len and all(shape):
        flops += 12.0 * shape[0] * shape[1] * seq_len
    tflops = flops * per_gpu / 1e12 if flops and per_gpu else None
    return Record(
        path=str(path),
        suite=f"JSON ({gpu.get('software_stack') or content.get('platform')})",
        label=path.stem,
        hardware=hardware,
        n_gpus=n,
        model=str(facts.of(path, "model", None) or model),
        seq_len=seq_len,
        global_batch=batch,
        settings=(content.get("parallelism_config") or {}).get("strategy_name", ""),
        tokens_per_sec=total,
        tokens_per_sec_per_gpu=per_gpu,
        step_times_s=times,
        tflops_per_gpu=tflops,
        mfu=tflops / device.bf16_tflops if tflops and device else None,
        flop_convention="palm" if all(shape) else "6 N",
        memory_gib=peak * GB_TO_GIB if peak else None,
        memory_kind="allocated",
        losses=losses,
        marks=unfinished_loss(losses),
        learning_rates=list(enumerate(series("learning_rates"))),
        hyperparameters=given,
        notes=notes,
    )


def model_of_file(path: Path) -> str:
    """The model in a file's name, without the words for platforms: benchmark_cuda_llama is llama."""
    words = re.split(r"[_.\s-]+", path.stem.lower())
    return "-".join(word for word in words if word not in PLATFORM_WORDS) or path.stem


def read_csv(path: Path, facts: LogFacts) -> list[Record]:
    """A results.csv of sweep.py, one record a row; or a metrics.csv of Lightning or litgpt."""
    with path.open(newline="", encoding="utf-8-sig") as f:
        rows = list(csv.DictReader(f))
    if rows and "step" in rows[0] and "key" not in rows[0]:
        return read_metrics_csv(path, facts)
    if not rows or not {"key", "status", "model"} <= set(rows[0]):
        raise UsageError(
            f"{path}: is no results.csv of sweep.py (key, status, model, ...), no metrics.csv (step, ...)"
        )

    def number(row: dict[str, str], name: str) -> float | None:
        return (float(row[name]) or None) if row.get(name) else None

    def whole(row: dict[str, str], name: str) -> int | None:
        return int(float(row[name])) if row.get(name) else None

    def flags(row: dict[str, str]) -> dict[str, Any]:
        """The sweep's axes, which stand before the figures."""
        given = {name: text for name, text in row.items() if name in SETTABLE and text}
        return {n: _value(text) for n, text in given.items() if n not in of_kind(OUTPUT)}

    return [
        Record(
            path=str(path),
            suite="llm-train-bench",
            label=row["key"],
            settings=" ".join(f"{name}={value}" for name, value in flags(row).items()),
            hyperparameters={k: v for k, v in flags(row).items() if k in of_kind(LEARNT)},
            arguments={k: v for k, v in flags(row).items() if k not in of_kind(LENGTH)},
            repeat_of=row["key"].rsplit("-", 1)[0],
            model=row["model"],
            hardware=row.get("hardware") or None,
            n_gpus=whole(row, "n_gpus"),
            seq_len=whole(row, "seq_len"),
            global_batch=whole(row, "global_batch"),
            result=row.get("result") or None,
            tokens_per_sec=number(row, "tokens_per_sec"),
            tokens_per_sec_per_gpu=number(row, "tokens_per_sec_per_gpu"),
            mfu=number(row, "mfu"),
            tflops_per_gpu=number(row, "model_tflops_per_gpu"),
            flop_convention="palm",
            memory_gib=number(row, "memory_gib")
            or number(row, "peak_allocated_gib")
            or number(row, "peak_rss_gib"),
            memory_kind=row.get("memory_kind") or None,
            tokens_per_joule=number(row, "tokens_per_joule"),
            marks=list(
                filter(
                    None,
                    (
                        row["status"] != "ok" and f"status {row['status']}",
                        row.get("unfit"),
                    ),
                )
            ),
        )
        for row in rows
    ]


def _value(text: str) -> Any:
    """The value of a cell of a CSV: a number, a truth value, or text."""
    try:
        return parse_json(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
