"""A log of another training suite as a record. Needs no torch.

The suite that wrote most of the lines is the log's suite (compare/log_formats.py). A log without
any such line is refused. If a log holds several runs, the last one is taken.
"""

import contextlib
import dataclasses
import math
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
    fill_between_lines,
    hugging_face,
    log_of,
    parse,
    steps_of_entries,
)
from llm_train_bench.compare.records import FACTS, LogFacts, Record, steady
from llm_train_bench.model.json_files import plain_text
from llm_train_bench.results.result_files import json_lines

USERS = "--log-pattern"
GROUPS = ["step", *(row.partition("=")[2] for row in SUITES[USERS].keys)]


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
    matches = filter(None, map(pattern.search, text.splitlines()))
    entries = (match.groupdict() for match in matches)
    steps = steps_of_entries(entries, SUITES[USERS].keys, first=0)
    return Log(steps, USERS) if steps else None


def parse_log(text: str) -> Log | None:
    """A log as one of the first suite that explains half of all steps found; None without any."""
    text = re.sub(r"\x1b?\[[\d;]*m", "", text).replace("\r", "\n")  # colours, progress bars
    logs = {suite: parse(text, suite) for suite in SUITES}
    most = max(len(log.steps) for log in logs.values())
    if not most:
        return None
    suite = next(suite for suite, log in logs.items() if 2 * len(log.steps) >= most)
    log = logs[suite]
    if begin := last_start(log.steps):
        rest = parse(text[log.steps[begin - 1].end :], suite)
        facts = {k: v for k, v in vars(rest).items() if v is not None}
        facts |= {"steps": log.steps[begin:], "earlier_steps": begin}
        log = dataclasses.replace(log, **facts)
    fill_between_lines(log.steps)
    log.steps = each_once(log.steps)
    return log


def each_once(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    """Steps in order; several ranks may print the same one, and one may take several lines."""
    by_step: dict[int, LoggedStep] = {}
    for step in steps:
        figures = {k: v for k, v in vars(step).items() if v is not None}
        by_step[step.step] = dataclasses.replace(by_step.get(step.step, step), **figures)
    return [by_step[number] for number in sorted(by_step)]


def read_lines(path: Path, facts: LogFacts) -> list[Record]:
    """A log of one JSON object a line."""
    entries = [{"step": e.get("current_steps"), "clock": _clock(e)} | e for e in json_lines(path)]
    entries = [e for e in entries if isinstance(e["step"], int)]
    signs = {suite: form.sign_key for suite, form in SUITES.items() if form.sign_key}
    suite = next((s for s, key in signs.items() if any(key in e for e in entries)), None)
    if suite is None:
        raise UsageError(f"{path}: no lines of {', '.join(signs)} in it; --log-pattern reads any")
    return [_of_entries(entries, suite, path, facts)]


def _clock(entry: dict[str, Any]) -> float | None:
    """Seconds since LLaMA-Factory's start; tokens and their mean rate tell more than whole seconds."""
    tokens, rate = as_number(entry.get("total_tokens")), as_number(entry.get("throughput"))
    if tokens and rate:
        return tokens / rate
    clock = re.fullmatch(r"(?:(\d+) days?, )?(\d+):(\d+):(\d+)", str(entry.get("elapsed_time")))
    if not clock:
        return None
    days, hours, minutes, seconds = (int(n or 0) for n in clock.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + seconds


def _of_entries(entries: list[dict[str, Any]], suite: str, path: Path, facts: LogFacts) -> Record:
    """The last run of entries by key."""
    steps = steps_of_entries(entries, SUITES[suite].keys)
    begin = last_start(steps)
    steps = steps[begin:]
    fill_between_lines(steps)
    if suite == "LLaMA-Factory":  # without lines of evaluations
        steps = [step for step in steps if step.loss is not None]
    log = log_of(each_once(steps), suite)
    if not log.steps:
        keys = ", ".join(row.partition("=")[2] for row in SUITES[suite].keys)
        raise UsageError(f"{path}: no steps of {suite} in it: {keys}")
    log.earlier_steps = begin
    return record_of(log, path, facts)


def read_trainer_state(content: dict[str, Any], path: Path, facts: LogFacts) -> Record:
    """A trainer_state.json of the Hugging Face Trainer; UsageError without any step."""
    log = hugging_face(content["log_history"])
    if not log.steps:
        raise UsageError(f"{path}: its log_history has no training step")
    return record_of(log, path, facts)


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
    log.seq_len = log.seq_len or log.steps[-1].seq_len
    log.global_batch = log.steps[-1].global_batch or log.global_batch
    for name in FACTS:
        setattr(log, name, facts.of(path, name, getattr(log, name)))
    with contextlib.suppress(UsageError):  # another machine
        log.hardware = log.hardware and find_hardware(log.hardware).name
    # Compilation and caches spoil the first logged step; the second is left out too if many follow.
    body = log.steps[2:] if len(log.steps) > 5 else log.steps[1:] or log.steps
    timed = [s for s in body if s.time_s]
    times = steady([s.time_s for s in timed if s.time_s])
    late = {id(s) for s in timed[: len(timed) - len(times)]}
    body = [s for s in body if id(s) not in late]  # the same lines for every figure
    both = {field.name for field in dataclasses.fields(Record)} & vars(log).keys() - {"steps"}
    record = Record(
        path=str(path),
        label=path.stem,
        **{name: getattr(log, name) for name in both},
        model_told=log.model is not None,
        provenance={"suite": log.suite},
        step_times_s=times,
        flop_convention=log.suite,
        memory_gib=max((s.memory_gib for s in log.steps if s.memory_gib), default=None),
        losses=[(s.step, s.loss) for s in log.steps if s.loss is not None],
    )
    record.model = record.model or record.label
    sizes = {"seq_len": log.seq_len, "global_batch": log.global_batch}
    record.hyperparameters = {name: size for name, size in sizes.items() if size}
    if earlier := log.earlier_steps:
        record.remark(f"several runs in this log: {earlier} lines of earlier ones left out")
    _fill_rates(record, log, body)
    return record


def _fill_rates(r: Record, log: Log, body: list[LoggedStep]) -> None:
    """Give a record its tokens/s, TFLOP/s and MFU by the steady steps of its log, and remarks on them."""
    # Rates of equal work: their harmonic mean is that of the whole.
    means = {}
    for name in ("tokens_per_sec_per_gpu", "tokens_per_sec", "samples_per_sec", "tflops", "mfu"):
        values = [x for s in body if (x := getattr(s, name))]
        means[name] = statistics.harmonic_mean(values) if values else None
    length, batch, seconds = r.seq_len, r.global_batch, sum(r.step_times_s)
    total, per_gpu = means["tokens_per_sec"], means["tokens_per_sec_per_gpu"]
    samples, counted = means["samples_per_sec"] or log.samples_per_sec, log.counted_tokens_per_sec
    if seconds and batch and length:
        # Each step with its own batch and length: they may still be growing.
        tokens = [(s.global_batch or batch) * (s.seq_len or length) for s in body if s.time_s]
        counted = sum(tokens) / seconds
    if seconds and log.tokens_per_step:
        total = log.tokens_per_step * len(r.step_times_s) / seconds
    elif per_gpu is None and total is None:
        if seconds and log.micro_batch and length and log.suite == "litgpt":
            per_gpu = log.micro_batch * length * len(r.step_times_s) / seconds
        else:
            total = counted or log.tokens_per_sec or (samples or 0.0) * (length or 0.0) or None
    if r.n_gpus and per_gpu is None:
        per_gpu = total and total / r.n_gpus
    elif r.n_gpus and total is None:
        total = per_gpu and per_gpu * r.n_gpus
    # Counters of a whole run have its start in them.
    most = 0.25 if counted == log.counted_tokens_per_sec else 0.1
    # LLaMA-Factory's samples are padded to the longest of their batch.
    printed = None if log.suite == "LLaMA-Factory" else total or per_gpu
    if counted and printed and abs(counted / printed - 1) > most:
        what = "" if total else " per GPU, whose number --log gpus=N supplies"
        gpus = max(1, round(counted / printed))
        fits = total is None and abs(counted / printed / gpus - 1) < most
        text = f"the log prints {printed:,.0f} tokens/s{what}"
        text += f"; its counters and times give {counted:,.0f} in all"
        r.remark(text, "information" if fits else "disturbed")
    if total is None and per_gpu is None:
        supply = {"seq-len": length, "global-batch": batch or samples}
        missing = [flag for flag, value in supply.items() if not value]
        lacks = " and ".join(missing if seconds or samples else ["any time"])
        r.remark(f"no tokens/s: the log lacks {lacks}; --log KEY=VALUE supplies them")
    elif per_gpu is None:
        r.remark("no tokens/s per GPU: the log lacks their number; --log gpus=N supplies it")
    r.tokens_per_sec, r.tokens_per_sec_per_gpu = total, per_gpu
    r.model_tflops_per_gpu, r.mfu = means["tflops"], means["mfu"]
    if log.parameters and per_gpu and not r.model_tflops_per_gpu and not r.mfu:
        attention, device = log.attention_flops * (length or 0), device_called(r.hardware)
        r.model_tflops_per_gpu = (6 * log.parameters + attention) * per_gpu / 1e12
        r.flop_convention = "palm" if attention else "6 N"
        r.mfu = r.model_tflops_per_gpu / device.bf16_tflops if device else None
