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
from llm_train_bench.compare.read_logs import read_automodel, read_metrics_csv, read_trainer_state
from llm_train_bench.compare.records import LogFacts, Record, steady, unfinished_loss
from llm_train_bench.model.json_keys import parse_json
from llm_train_bench.results.result_files import commit_of, parse_result, read_steps, software
from llm_train_bench.settings.flags import (
    LEARNT,
    LENGTH,
    OUTPUT,
    SETTABLE,
    SPEED,
    Args,
    defaults,
    of_kind,
)

GB_TO_GIB = 1e9 / 2**30
PLATFORM_WORDS = """
benchmark bench train training result results output nvidia amd cuda rocm nvd gpu h100 h200 b200 a100
mi300x mi325x mi350x mi355x
""".split()
# Figures with the same name in a results.csv.
FIGURES = ("tokens_per_sec", "tokens_per_sec_per_gpu", "mfu", "tokens_per_joule")
# Hyperparameters of the other suite, and their names here.
HYPERPARAMETERS = {
    "global_batch_size": "global_batch",
    "sequence_length": "seq_len",
    "learning_rate": "lr",
    "warmup_steps": "lr_warmup_steps",
} | {name: name for name in ("weight_decay", "optimizer", "seed")}


def read_json(path: Path, facts: LogFacts) -> list[Record]:
    """A JSON file of ours or of another suite; UsageError for any other."""
    content = parse_json(path.read_text(encoding="utf-8"))
    keys = content.keys() if isinstance(content, dict) else set()
    if {"schema_version", "metrics"} <= keys:
        return [read_ours(content, path)]
    if {"gpu_info", "performance_metrics"} <= keys:
        return [read_suite(content, path, facts)]
    if "log_history" in keys and isinstance(content["log_history"], list):
        return [read_trainer_state(content, path, facts)]
    if {"avg_iter_time_seconds", "world_size"} <= keys:
        return [read_automodel(content, path, facts)]
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
    settings = [str(a["amp"])] if a.get("amp") else []
    if r.fp8:
        settings.append(f"fp8 {r.fp8.backend} {r.fp8.recipe}")
    if r.linear == "te":
        settings.append("Transformer Engine")
    if a.get("pt_compile"):
        mode = a.get("compile_mode", "default")
        settings.append("compile" if mode == "default" else str(mode))
    if a.get("sac_freq"):
        settings.append(f"sac {a['sac_freq']} {a.get('sac_policy', 'block')}")
    settings.append(r.entrypoint.removesuffix(".py"))
    if r.batch.micro_batch:
        settings.append(f"b{r.batch.micro_batch}x{r.batch.grad_acc_steps}")
    if a.get("pass_type", "step") != "step":
        settings.append(str(a["pass_type"]))
    memory_gib, memory_kind = r.peak_memory
    sizes = {"global_batch": r.batch.global_batch, "seq_len": r.batch.seq_len}

    # Of a loop's other settings nobody knows whether they change what is learnt.
    learnt = a.keys() - of_kind(OUTPUT, LENGTH, SPEED) if r.ours else of_kind(LEARNT)
    # A flag that is newer than the result had its default.
    usual = {k: v for k, v in defaults(Args).items() if r.ours and k in of_kind(LEARNT)}

    steps = read_steps(path.parent / "steps.jsonl")
    steps = [step for step in steps if step.get("phase") != "profile"]
    # No host or user, no whole path.
    origin = {"date": r.started_at[:16].replace("T", " "), "commit": commit_of(r)} | software(r)
    if os := r.environment.get("os"):
        origin["os"] = str(os)
    return Record(
        path=str(path),
        suite="llm-train-bench",
        label=r.run_name,
        hardware=r.device.hardware,
        n_gpus=r.device.count,
        model=r.model.name,
        model_hash=r.model.hash,
        **sizes,
        settings=" ".join(settings),
        **{name: getattr(m, name) for name in (*FIGURES, "goodput")},
        step_times_s=r.step_times_s,
        tflops_per_gpu=m.model_tflops_per_gpu,
        flop_convention="palm",
        memory_gib=memory_gib,
        memory_kind=memory_kind,
        usd_per_hour=a.get("usd_per_hour"),
        power_limit_w=r.power_limit_w,
        losses=[(s["step"], s["loss"]) for s in steps if s.get("loss") is not None],
        learning_rates=[(s["step"], s["lr"]) for s in steps if s.get("lr") is not None],
        hyperparameters=usual | {k: v for k, v in a.items() if k in learnt} | sizes,
        marks=r.unfit,
        notes=list(r.notes),
        remarks=list(r.disturbances),
        provenance=origin | {"command": " ".join(shown_command(r.command))},
        software=software(r) | {"commit": commit_of(r)},
        lineage=(r.lineage.id, r.lineage.attempt),
        first_step=r.resumed_from.step if r.resumed_from else 0,
        arguments=r.settings
        | {"global_batch": r.batch.global_batch, "script": r.entrypoint}
        # What `auto` chose: runs with another library are no repeats.
        | ({"linear": r.linear or "plain"} if a.get("linear") == "auto" else {}),
    )


def read_suite(content: dict[str, Any], path: Path, facts: LogFacts) -> Record:
    """The other suite's benchmark JSON."""
    gpu, speed = content["gpu_info"], content["performance_metrics"]
    config: dict[str, Any] = content.get("training_config") or {}
    memory: dict[str, Any] = content.get("memory_metrics") or {}
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
    # A file's name without the words for platforms: benchmark_cuda_llama is llama.
    words = [w for w in re.split(r"[_.\s-]+", path.stem.lower()) if w not in PLATFORM_WORDS]
    model = config.get("model") or config.get("model_name") or "-".join(words) or path.stem
    values = ((ours, config.get(theirs)) for theirs, ours in HYPERPARAMETERS.items())
    hyperparameters = {name: value for name, value in values if value is not None}
    if isinstance(optimizer := hyperparameters.get("optimizer"), str):
        hyperparameters["optimizer"] = optimizer.lower()
    losses = list(enumerate(series("loss_values")))
    device = device_called(hardware)
    parameters = facts.of(path, "parameters", config.get("num_parameters"))
    flops = 6.0 * parameters if parameters else None
    n_layers, width = config.get("num_layers"), config.get("hidden_size")
    if flops and seq_len and n_layers and width:
        flops += 12.0 * n_layers * width * seq_len
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
        flop_convention="palm" if n_layers and width else "6 N",
        memory_gib=peak * GB_TO_GIB if peak else None,
        memory_kind="allocated",
        losses=losses,
        marks=unfinished_loss(losses),
        learning_rates=list(enumerate(series("learning_rates"))),
        hyperparameters=hyperparameters,
        notes=notes,
    )


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

    return [_of_row(row, path) for row in rows]


def _of_row(row: dict[str, str], path: Path) -> Record:
    def number(*names: str) -> float | None:
        texts = filter(None, map(row.get, names))
        return next((value for text in texts if (value := float(text))), None)

    def whole(name: str) -> int | None:
        return int(float(row[name])) if row.get(name) else None

    figures: dict[str, Any] = {name: number(name) for name in FIGURES}
    figures |= {name: whole(name) for name in ("n_gpus", "seq_len", "global_batch")}
    # The sweep's axes.
    names = SETTABLE - of_kind(OUTPUT)
    flags = {name: _value(text) for name, text in row.items() if text and name in names}
    marks = {f"status {row['status']}": row["status"] != "ok", row.get("unfit"): True}
    return Record(
        path=str(path),
        suite="llm-train-bench",
        label=row["key"],
        settings=" ".join(f"{name}={value}" for name, value in flags.items()),
        hyperparameters={k: v for k, v in flags.items() if k in of_kind(LEARNT)},
        arguments={k: v for k, v in flags.items() if k not in of_kind(LENGTH)},
        repeat_of=row["key"].rsplit("-", 1)[0],
        model=row["model"],
        hardware=row.get("hardware") or None,
        result=row.get("result") or None,
        **figures,
        tflops_per_gpu=number("model_tflops_per_gpu"),
        flop_convention="palm",
        memory_gib=number("memory_gib", "peak_allocated_gib", "peak_rss_gib"),
        memory_kind=row.get("memory_kind") or None,
        marks=[mark for mark, applies in marks.items() if mark and applies],
    )


def _value(text: str) -> Any:
    """The value of a cell of a CSV: a number, a truth value, or text."""
    try:
        return parse_json(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
