"""A log of another training suite as a record. Needs no torch.

The suite that wrote most of the lines is the log's suite (compare/log_formats.py). A log without
any such line is refused. If a log holds several runs, the last one is taken.
"""

import contextlib
import csv
import dataclasses
import io
import itertools
import math
import operator
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import device_called, find_hardware
from llm_train_bench.compare.log_formats import (
    SUITES,
    Log,
    LoggedStep,
    as_number,
    log_of,
    logged_step,
    parse,
)
from llm_train_bench.compare.records import FACTS, LogFacts, Record, steady
from llm_train_bench.model.json_files import plain_text
from llm_train_bench.results.remarks import Remark
from llm_train_bench.results.result_files import json_lines

# Groups of --log-pattern, each as a row of a suite's `keys`.
GROUPS = {f.name: f"{f.name}={f.name}" for f in dataclasses.fields(LoggedStep) if f.compare}
GROUPS |= {"time_ms": "time_s ms=time_ms", "mfu_percent": "mfu %=mfu_percent"}
# The column by which a file of JSON lines is known.
SIGN_KEYS = {
    "NeMo Automodel": "tps",
    "torchtune": "tokens_per_second_per_gpu",
    "litgpt": "iter_time",
    "LLaMA-Factory": "current_steps",
}


def read_log(path: Path, facts: LogFacts) -> list[Record]:
    """The run of a log; `facts` add what it does not say. UsageError if no suite wrote it."""
    text = plain_text(path, 1024, errors="replace")
    log = parse_by(facts.pattern, text) if facts.pattern else None
    log = log or parse_log(text)
    if log is None:
        why = "the --log-pattern matches no line" if facts.pattern else "--log-pattern reads any"
        raise UsageError(f"{path}: not a log of a known suite; {why}")
    return [record_of(log, path, facts)]


def log_facts(texts: Sequence[str], pattern: str | None) -> LogFacts:
    """The facts of --log, as KEY=VALUE or LOG:KEY=VALUE; UsageError for what is none."""
    names = {key: (name, kind) for name, (key, kind) in FACTS.items()}
    facts: dict[str, dict[str, Any]] = {}
    for text in texts:
        match = re.fullmatch(rf"(?:(.+):)?({'|'.join(names)})=(.+)", text, re.DOTALL)
        if not match:
            raise UsageError(
                f"--log {text}: must be [LOG:]KEY=VALUE with one of {', '.join(names)}"
            )
        name, kind = names[match[2]]
        try:
            value = kind(match[3])
        except ValueError:
            value = 0
        if kind is not str and not 0 < value < math.inf:
            what = "a whole number" if kind is int else "a number"
            raise UsageError(f"--log {text}: must be {what} above 0")
        facts.setdefault(name, {})[match[1] or ""] = value
    return LogFacts(user_pattern(pattern) if pattern else None, **facts)


def user_pattern(text: str) -> re.Pattern:
    """--log-pattern, whose groups name quantities of a step; UsageError for one that reads nothing."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UsageError(f"--log-pattern {text}: is not a regular expression: {error}") from None
    wrong = [name for name in pattern.groupindex if name not in GROUPS]
    if wrong or not pattern.groupindex.keys() - {"step"}:
        what = f"unknown group {wrong[0]}" if wrong else "names no group, as (?P<time_ms>[0-9.]+)"
        raise UsageError(f"--log-pattern {text}: {what}; groups: {', '.join(GROUPS)}")
    return pattern


def parse_by(pattern: re.Pattern, text: str) -> Log | None:
    """The log whose lines match a user's pattern; None where none does."""
    steps = []
    for match in filter(None, map(pattern.search, text.splitlines())):
        values = {name: as_number(value) for name, value in match.groupdict("").items()}
        number = int(values.get("step") or len(steps))
        steps.append(logged_step(values, number, GROUPS.values()))
    return Log(steps, "--log-pattern") if steps else None


def parse_log(text: str) -> Log | None:
    """A log as one of the first suite that explains half of all steps found; None without any."""
    text = re.sub(r"\x1b?\[[\d;]*m", "", text).replace("\r", "\n")  # colours, progress bars
    logs = {suite: parse(text, suite) for suite in SUITES}
    most = max(len(log.steps) for log in logs.values())
    if not most:
        return None
    suite, log = next(pair for pair in logs.items() if 2 * len(pair[1].steps) >= most)
    if begin := last_start(log.steps):
        rest = parse(text[log.steps[begin - 1].end :], suite)
        facts = {k: v for k, v in vars(rest).items() if v is not None}
        facts |= {"steps": log.steps[begin:], "earlier_steps": begin}
        log = dataclasses.replace(log, **facts)
    # Several ranks may print the same step, and one step may take several lines.
    by_step: dict[int, LoggedStep] = {}
    for step in log.steps:
        figures = {k: v for k, v in vars(step).items() if v is not None}
        by_step[step.step] = dataclasses.replace(by_step.get(step.step, step), **figures)
    log.steps = [by_step[number] for number in sorted(by_step)]
    # A time or a mean since the first step: the time of what lies between two lines.
    for before, step in itertools.pairwise(log.steps):
        ends = [s.elapsed_s or s.step * (s.mean_time_s or 0.0) for s in (before, step)]
        if all(ends):
            step.time_s = max((ends[1] - ends[0]) / (step.step - before.step), 0.0) or None
    return log


def read_lines(path: Path, facts: LogFacts) -> list[Record]:
    """A log of one JSON object a line."""
    entries = [{"step": e.get("current_steps")} | e for e in json_lines(path)]
    entries = [e for e in entries if isinstance(e["step"], int)]
    suite = next((s for s, key in SIGN_KEYS.items() if any(key in e for e in entries)), None)
    if suite is None:
        *names, last = SIGN_KEYS
        suites = f"{', '.join(names)} or {last}"
        raise UsageError(f"{path}: no lines of {suites} in it; --log-pattern reads any")
    return [_of_entries(entries, suite, path, facts)]


def read_metrics_csv(path: Path, facts: LogFacts) -> list[Record]:
    """A metrics.csv of PyTorch Lightning's CSVLogger, or litgpt's."""
    lines = io.StringIO(plain_text(path, 1024, errors="replace"), newline="")
    rows = [{k: as_number(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
    suite = "litgpt" if rows and any("iter_time" in row for row in rows) else "Lightning"
    rows = [row for row in rows if isinstance(row.get("step"), float)]
    return [_of_entries(rows, suite, path, facts)]


def _of_entries(entries: list[dict[str, Any]], suite: str, path: Path, facts: LogFacts) -> Record:
    """Steps of entries by key; entries of validation have none of the keys."""
    steps, tokens = [], []
    if suite == "LLaMA-Factory":
        steps, entries = _between_lines(entries), []
    for entry in entries:
        step = logged_step(entry, int(entry["step"]), SUITES[suite].keys)
        if step != LoggedStep(step.step):
            steps.append(step)
            tokens.append((entry.get("tokens"), entry.get("time")))
    if not steps:
        keys = ", ".join(row.partition("=")[2] for row in SUITES[suite].keys)
        raise UsageError(f"{path}: no steps of {suite} in it: {keys}")
    if suite == "litgpt":  # printed rates are too high by the micro batch, counters are right
        for step, before, now in zip(steps[1:], tokens, tokens[1:], strict=False):
            if all((*before, *now)) and now[1] > before[1]:
                step.tokens_per_sec_per_gpu = (now[0] - before[0]) / (now[1] - before[1]) or None
    log = log_of(steps, suite, "")
    if suite == "Lightning" and not any(s.samples_per_sec for s in steps):
        log.notes.append("a metrics.csv tells no times")
    return record_of(log, path, facts)


def _between_lines(entries: list[dict[str, Any]]) -> list[LoggedStep]:
    """LLaMA-Factory's steps, with time and tokens since the line before, which may be an evaluation's."""
    steps: dict[int, LoggedStep] = {}
    before = 0, 0.0, 0.0
    for entry in entries:
        number, tokens = entry["step"], as_number(entry.get("total_tokens")) or 0.0
        clock = re.fullmatch(r"(?:(\d+) days?, )?(\d+):(\d+):(\d+)", str(entry.get("elapsed_time")))
        parts = map(int, clock.groups("0") if clock else ())
        seconds = sum(map(operator.mul, parts, (86400, 3600, 60, 1)))
        # Both since the start; the clock shows whole seconds.
        rate = as_number(entry.get("throughput")) or 0.0
        now = number, tokens / rate if rate else seconds, tokens
        if now[1] < before[1]:  # another run
            steps.clear()
            before = now
        if entry.get("loss") is not None and number not in steps:  # or another rank's line
            step = steps[number] = logged_step(entry, number, SUITES["LLaMA-Factory"].keys)
            if before[0] < number and before[1] < now[1]:
                step.time_s = (now[1] - before[1]) / (number - before[0])
                step.tokens_per_sec = (tokens - before[2]) / (now[1] - before[1]) or None
        before = now
    return [*steps.values()]


def read_automodel(content: dict[str, Any], path: Path, facts: LogFacts) -> Record:
    """The JSON of NeMo Automodel's benchmark recipe; its `tflops_per_gpu` is of a step, not a second."""
    batch, length = content["global_batch_size"], content["seq_len"]
    mfu = (content.get("avg_mfu_percent") or 0.0) / 100
    tflops = mfu * (content.get("peak_tflops") or 0.0)
    # A float: a list would be repeated.
    rate = 1.0 * batch * length / content["avg_iter_time_seconds"]
    step = LoggedStep(0, tokens_per_sec=rate, tflops=tflops or None, mfu=mfu or None)
    sizes = {"n_gpus": content["world_size"], "seq_len": length, "global_batch": batch}
    return record_of(Log([step], "NeMo Automodel", **sizes, model=path.stem), path, facts)


def last_start(steps: list[LoggedStep]) -> int:
    """Where the last of several runs in one log begins: there the steps count anew.

    A late line from another rank is not a new run. It goes back a little, or later steps follow at
    once, and it does not go back to the very first of many.
    """
    start, seen, lowest = 0, [], 0
    for i, step in enumerate(steps):
        if not seen:
            lowest = step.step
        elif step.step < max(seen):
            distinct = set(seen)
            later = [s.step > max(seen) for s in steps[i + 1 : i + 4]]
            resumed = sum(n >= step.step for n in distinct) > 3 and not any(later)
            anew = step.step <= lowest and (len(distinct) > 3 or not any(later[:1]))
            if resumed or (anew and len(distinct) > 1):
                start, seen, lowest = i, [], step.step
        lowest = min(lowest, step.step)
        seen.append(step.step)
        del seen[:-64]
    return start


def record_of(log: Log, path: Path, facts: LogFacts) -> Record:
    """A log as a record: rates over its steady steps, all figures of the same steps."""
    steps = log.steps
    log.seq_len = log.seq_len or steps[-1].seq_len
    log.global_batch = steps[-1].global_batch or log.global_batch
    for name in FACTS:
        setattr(log, name, facts.of(path, name, getattr(log, name)))
    n, length, batch, hardware = log.n_gpus, log.seq_len, log.global_batch, log.hardware
    with contextlib.suppress(UsageError):  # another machine
        hardware = hardware and find_hardware(hardware).name
    notes, doubts = list(log.notes), []
    if earlier := log.earlier_steps:
        notes.append(f"several runs in this log: {earlier} lines of earlier ones left out")
    # Compilation and caches spoil the first logged step; the second is left out too if many follow.
    body = steps[2:] if len(steps) > 5 else steps[1:] or steps
    timed = [s for s in body if s.time_s]
    times = steady([s.time_s for s in timed if s.time_s])
    late = {id(s) for s in timed[: len(timed) - len(times)]}
    body = [s for s in body if id(s) not in late]  # the same lines for every figure
    # Rates of equal work: their harmonic mean is that of the whole.
    means = {}
    for name in ("tokens_per_sec_per_gpu", "tokens_per_sec", "samples_per_sec", "tflops", "mfu"):
        values = [x for s in body if (x := getattr(s, name))]
        means[name] = statistics.harmonic_mean(values) if values else None
    per_gpu = means["tokens_per_sec_per_gpu"]
    total = means["tokens_per_sec"]
    samples = means["samples_per_sec"] or log.samples_per_sec
    counted = log.counted_tokens_per_sec
    if times and batch and length:
        # Each step with its own batch and length: they may still be growing.
        sizes = [(s.global_batch or batch) * (s.seq_len or length) for s in body if s.time_s]
        counted = sum(sizes) / sum(times)
    if times and log.tokens_per_step:
        total = log.tokens_per_step * len(times) / sum(times)
    elif per_gpu is None and total is None:
        if times and log.micro_batch and length and log.suite == "litgpt":
            per_gpu = log.micro_batch * length * len(times) / sum(times)
        else:
            total = counted or log.tokens_per_sec or (samples or 0.0) * (length or 0) or None
    if per_gpu is None and total and n:
        per_gpu = total / n
    elif total is None and per_gpu and n:
        total = per_gpu * n
    # Counters of a whole run have its start in them.
    most = 0.25 if counted == log.counted_tokens_per_sec else 0.1
    if log.suite == "LLaMA-Factory":
        counted = None  # samples are padded to the longest of their batch
    if counted and (printed := total or per_gpu) and abs(counted / printed - 1) > most:
        what = "" if total else " per GPU, whose number --log gpus=N supplies"
        own = f"its counters and times give {counted:,.0f} in all"
        gpus = max(1, round(counted / printed))
        fits = total is None and abs(counted / printed / gpus - 1) < most
        (notes if fits else doubts).append(f"the log prints {printed:,.0f} tokens/s{what}; {own}")
    if total is None and per_gpu is None:
        supply = {"seq-len": length, "global-batch": batch or samples}
        missing = [flag for flag, value in supply.items() if not value]
        lacks = " and ".join(missing if times or samples else ["any time"])
        notes.append(f"no tokens/s: the log lacks {lacks}; --log KEY=VALUE supplies them")
    elif per_gpu is None:
        notes.append("no tokens/s per GPU: the log lacks their number; --log gpus=N supplies it")
    convention = log.suite
    if log.parameters and per_gpu and not means["tflops"] and not means["mfu"]:
        attention = log.attention_flops * (length or 0)
        means["tflops"] = (6 * log.parameters + attention) * per_gpu / 1e12
        convention = "palm" if attention else "6 N"
        device = device_called(hardware)
        means["mfu"] = means["tflops"] / device.bf16_tflops if device else None
    return Record(
        path=str(path),
        suite=log.suite,
        label=path.stem,
        hardware=hardware,
        n_gpus=n,
        model=log.model or path.stem,
        model_told=log.model is not None,
        provenance={"suite": log.suite},
        seq_len=length,
        global_batch=batch,
        tokens_per_sec=total,
        tokens_per_sec_per_gpu=per_gpu,
        step_times_s=times,
        mfu=means["mfu"],
        model_tflops_per_gpu=means["tflops"],
        flop_convention=convention,
        memory_gib=max((s.memory_gib for s in steps if s.memory_gib), default=None),
        memory_kind=log.memory_kind,
        losses=[(s.step, s.loss) for s in steps if s.loss is not None],
        hyperparameters={k: v for k, v in (("seq_len", length), ("global_batch", batch)) if v},
        remarks=[Remark(kind="information", text=note) for note in notes]
        + [Remark(kind="disturbed", text=doubt) for doubt in doubts],
    )
