"""A log of another training suite as a record. Needs no torch.

The suite that wrote most of the lines is the log's suite (bench/compare/log_formats.py). A log without
any such line is refused. If a log holds several runs, the last one is taken.
"""

import dataclasses
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from bench.compare.log_formats import PARSERS, Log, LoggedStep
from bench.compare.records import LogFacts, Record, steady, unfinished_loss
from bench.errors import UsageError


def read_log(path: Path, facts: LogFacts) -> list[Record]:
    """The run of a log; `facts` add what it does not say. UsageError if no suite wrote it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    log = parse_log(text)
    if log is None:
        raise UsageError(
            f"{path}: no line of Megatron-LM, Primus, NeMo, Automodel, torchtitan or llm-foundry in it"
        )
    return [_record(log, path, facts)]


def parse_log(text: str) -> Log | None:
    """Parse a log with the parser that finds most steps in it; None if none finds a step."""
    text = re.sub(r"\x1b?\[[\d;]*m", "", text)  # colours, with or without their escape character
    found = [(parser(text), parser) for parser in PARSERS]
    log, parser = max(found, key=lambda pair: len(pair[0].steps))
    if not log.steps:
        return None
    if begin := last_start(log.steps):
        last = parser(_after(text, begin, parser))
        names = [
            f.name for f in dataclasses.fields(Log) if f.name not in ("steps", "earlier_steps")
        ]
        said = {n: value for n in names if (value := getattr(last, n)) is not None}
        log = dataclasses.replace(log, **said, steps=log.steps[begin:], earlier_steps=begin)
    by_step = {step.step: step for step in log.steps}  # several ranks may print the same
    log.steps = [by_step[number] for number in sorted(by_step)]
    return log


def last_start(steps: list[LoggedStep]) -> int:
    """Where the last of several runs in one log begins: there the steps count anew.

    A late line from another rank is no new run. It goes back a little, or later steps follow at
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


def _after(text: str, n: int, parser: Callable[[str], Log]) -> str:
    """The text after the n-th step of a log."""
    lines = text.splitlines(keepends=True)
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high) // 2
        if len(parser("".join(lines[:middle])).steps) < n:
            low = middle + 1
        else:
            high = middle
    return "".join(lines[low:])


def _record(log: Log, path: Path, facts: LogFacts) -> Record:
    steps = log.steps
    n = facts.of(path, "n_gpus", log.n_gpus)
    hardware = facts.of(path, "hardware", log.hardware)
    length, batch = (
        facts.of(path, "seq_len", log.seq_len),
        log.global_batch or steps[-1].global_batch,
    )
    notes = []
    if log.earlier_steps:
        notes.append(
            f"several runs in this log: {log.earlier_steps} lines of earlier ones left out"
        )
    # Compilation and caches spoil the first logged step; the second is left out too if many follow.
    body = steps[2:] if len(steps) > 5 else steps[1:] or steps
    timed = [s for s in body if s.time_s]
    times = steady([s.time_s for s in timed])
    late = {id(s) for s in timed[: len(timed) - len(times)]}
    body = [s for s in body if id(s) not in late]  # the same lines for every figure
    total, per_gpu = None, None
    rates = [s.tokens_per_sec_per_gpu for s in body if s.tokens_per_sec_per_gpu]
    totals = [s.tokens_per_sec for s in body if s.tokens_per_sec]
    if rates:
        per_gpu = len(rates) / sum(1 / r for r in rates)
        total = per_gpu * n if n else None
    elif totals:
        total = len(totals) / sum(1 / r for r in totals)
        per_gpu = total / n if n else None
    elif times and batch and length:
        # Each step with its own batch: it may still be growing.
        samples = [s.global_batch or batch for s in body if s.time_s][-len(times) :]
        total = sum(samples) * length / sum(times)
        per_gpu = total / n if n else None
    if total is None and per_gpu is None:
        missing = [w for w, v in (("--log-seq-len", length), ("a global batch", batch)) if not v]
        notes.append(f"no tokens/s: the log does not tell {' and '.join(missing) or 'step times'}")
    elif per_gpu is None:
        notes.append("no tokens/s per GPU: the log does not tell how many; --log-gpus does")
    tflops = [s.tflops for s in body if s.tflops]
    mfu = [s.mfu for s in body if s.mfu]
    losses = [(s.step, s.loss) for s in steps if s.loss is not None]
    return Record(
        path=str(path),
        suite=log.suite,
        label=path.stem,
        hardware=hardware,
        n_gpus=n,
        model=log.model or path.stem,
        seq_len=length,
        global_batch=batch,
        tokens_per_sec=total,
        tokens_per_sec_per_gpu=per_gpu,
        step_times_s=times,
        # Rates of equal work: their harmonic mean is that of the whole.
        mfu=statistics.harmonic_mean(mfu) if mfu else None,
        tflops_per_gpu=statistics.harmonic_mean(tflops) if tflops else None,
        flop_convention=log.suite,
        memory_gib=max((s.memory_gib for s in steps if s.memory_gib), default=None),
        memory_kind=log.memory_kind,
        losses=losses,
        marks=unfinished_loss(losses),
        learning_rates=[(s.step, s.lr) for s in steps if s.lr is not None],
        hyperparameters={k: v for k, v in (("seq_len", length), ("global_batch", batch)) if v},
        notes=notes,
    )
