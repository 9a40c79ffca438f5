"""Result files as records: our result.json and files of runs, another suite's JSON. Needs no torch.

That suite's keys (docs/COMPARE.md lists the mapping): platform, gpu_info, training_config,
performance_metrics, memory_metrics, step_times, loss_values.
"""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.redaction import shown_command
from llm_train_bench.base.strict import first_problem
from llm_train_bench.compare.log_formats import UNITS, Log, LoggedStep, hugging_face
from llm_train_bench.compare.read_logs import read_automodel, record_of
from llm_train_bench.compare.records import LogFacts, Record
from llm_train_bench.compare.run_files import read_runs_file
from llm_train_bench.compare.setting import changes_in_words, settings_of
from llm_train_bench.compare.shareable import public_environment, word
from llm_train_bench.model.json_files import parse_json, plain_text
from llm_train_bench.results.metrics import MEANS
from llm_train_bench.results.result_files import commit_of, parse_result, read_steps, software
from llm_train_bench.results.schema import Result
from llm_train_bench.settings.flags import LEARNT, LENGTH, OUTPUT, SPEED, of_kind, present_flags

PLATFORM_WORDS = """
benchmark bench train training result results output nvidia amd cuda rocm nvd gpu h100 h200 b200 a100
mi300x mi325x mi350x mi355x
""".split()
# Hyperparameters of the other suite, and their names here.
HYPERPARAMETERS = {"learning_rate": "lr", "warmup_steps": "lr_warmup_steps"}
HYPERPARAMETERS |= {name: name for name in ("weight_decay", "optimizer", "seed")}


def read_json(path: Path, facts: LogFacts) -> list[Record]:
    """A JSON file of ours or of another suite; UsageError for any other."""
    content = parse_json(plain_text(path, 256))
    keys = content.keys() if isinstance(content, dict) else set()
    if {"schema_version", "metrics"} <= keys:
        return [read_ours(content, path)]
    if {"settings", "schema_version"} <= keys:
        return records_of_file(path)
    if {"gpu_info", "performance_metrics"} <= keys:
        return [read_suite(content, path, facts)]
    if "log_history" in keys and isinstance(content["log_history"], list):
        log = hugging_face(content["log_history"])
        if not log.steps:
            raise UsageError(f"{path}: its log_history has no training step")
        return [record_of(log, path, facts)]
    if {"avg_iter_time_seconds", "world_size"} <= keys:
        return [read_automodel(content, path, facts)]
    raise UsageError(
        f"{path}: is not a result.json of ours, and has no gpu_info and performance_metrics"
    )


def read_ours(content: dict[str, Any], path: Path) -> Record:
    """A result.json; losses from the steps.jsonl beside it."""
    try:
        json.dumps(content, allow_nan=False)
        result = parse_result(content)
    except ValueError as error:
        known = isinstance(error, ValidationError)
        why = first_problem(error) if known else "it has NaN or Infinity"
        raise UsageError(f"{path}: not a result of this version: {why}") from None
    return record_of_result(result, read_steps(path.parent / "steps.jsonl"), str(path))


def record_of_result(r: Result, steps: Sequence[dict[str, Any]] = (), path: str = "") -> Record:
    """A run of ours as a record; `steps` as steps.jsonl has them."""
    m, a = r.metrics, r.args
    memory_gib, memory_kind = r.peak_memory
    sizes = {"global_batch": r.batch.global_batch, "seq_len": r.batch.seq_len}
    # Of a loop's other settings nobody knows whether they change what is learnt.
    flags = present_flags(a) if r.ours else a
    learnt = flags.keys() - of_kind(OUTPUT, LENGTH, SPEED) if r.ours else of_kind(LEARNT)
    steps = [step for step in steps if step.get("phase") != "profile"]
    # No host or user, no whole path; of the conditions what files of runs have, so that a run and its
    # copy there are under the same.
    on_cpu, public = r.device.type == "cpu", public_environment(r.environment)
    origin = {"date": r.started_at[:16].replace("T", " "), "commit": commit_of(public)}
    origin |= software(r.environment, on_cpu)
    if os := public["os"]:
        origin["os"] = os
    conditions = {"commit": commit_of(public)} | software(public, on_cpu)
    if r.power_limit_w:
        conditions["power limit"] = f"{round(r.power_limit_w, -1):.0f} W"
    if a.get("linear") == "auto":  # what that chose
        conditions["linear"] = word(r.linear) or "plain"
    record = Record(
        path=path,
        suite="llm-train-bench",
        label=r.run_name,
        hardware=r.device.hardware,
        n_gpus=r.device.count,
        model=r.model.name,
        model_hash=r.model.hash,
        **sizes,
        **{name: getattr(m, name) for name in MEANS},
        step_times_s=r.step_times_s,
        flop_convention="palm",
        memory_gib=memory_gib,
        memory_kind=memory_kind,
        usd_per_hour=a.get("usd_per_hour"),
        power_limit_w=r.power_limit_w,
        losses=[(s["step"], s["loss"]) for s in steps if s.get("loss") is not None],
        hyperparameters={k: v for k, v in flags.items() if k in learnt} | sizes,
        remarks=list(r.remarks),
        provenance=origin | {"command": " ".join(shown_command(r.command))},
        conditions=conditions,
        arguments=settings_of(r),
        result=r,
        steps=steps,
    )
    record.settings = changes_in_words(record)
    return record


def records_of_file(path: Path) -> list[Record]:
    """The runs of a file that --save wrote; UsageError if it is none."""
    records = []
    for entry in read_runs_file(path).settings:
        for run in entry.runs:
            record = record_of_result(run.result, [vars(step) for step in run.steps], str(path))
            record.tolerance = entry.tolerance
            records.append(record)
    return records


def read_suite(content: dict[str, Any], path: Path, facts: LogFacts) -> Record:
    """The other suite's benchmark JSON: a log of its steps, with hyperparameters."""
    gpu, speed = content["gpu_info"], content["performance_metrics"]
    config: dict[str, Any] = content.get("training_config") or {}
    memory: dict[str, Any] = content.get("memory_metrics") or {}

    def series(name: str) -> list[Any]:
        return content.get(name) or content.get(f"raw_{name}") or []

    curves = itertools.zip_longest(series("step_times"), series("loss_values"))
    steps = [LoggedStep(i, time_s=time, loss=loss) for i, (time, loss) in enumerate(curves)]
    steps = steps or [LoggedStep(0)]
    peak = memory.get("peak_memory_allocated_gb") or max(series("memory_values"), default=None)
    steps[-1].memory_gib = peak and peak * UNITS["GB"]
    total = speed.get("tokens_per_second") or None  # 0: not measured
    if not (total or series("step_times")):
        steps[-1].tokens_per_sec_per_gpu = speed.get("tokens_per_second_per_gpu")
    # A file's name without the words for platforms: benchmark_cuda_llama is llama.
    words = [w for w in re.split(r"[_.\s-]+", path.stem.lower()) if w not in PLATFORM_WORDS]
    log = Log(
        steps,
        f"JSON ({gpu.get('software_stack') or content.get('platform')})",
        n_gpus=config.get("num_gpus") or gpu.get("device_count"),
        seq_len=config.get("sequence_length"),
        global_batch=config.get("global_batch_size"),
        hardware=gpu.get("device_name"),
        model=config.get("model") or config.get("model_name") or "-".join(words) or path.stem,
        parameters=config.get("num_parameters"),
        # Of queries with keys and weights with values, forward and backward.
        attention_flops=12.0 * (config.get("num_layers") or 0) * (config.get("hidden_size") or 0),
        memory_kind="allocated",
        tokens_per_sec=total,
    )
    record = record_of(log, path, facts)
    record.settings = (content.get("parallelism_config") or {}).get("strategy_name", "")
    values = {ours: config.get(theirs) for theirs, ours in HYPERPARAMETERS.items()}
    if isinstance(optimizer := values["optimizer"], str):
        values["optimizer"] = optimizer.lower()
    known = {name: value for name, value in values.items() if value is not None}
    record.hyperparameters = known | (record.hyperparameters or {})
    return record
