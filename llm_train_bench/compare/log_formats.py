"""What the logs of other training suites say, by the patterns of log_formats.toml. Needs no torch."""

import ast
import contextlib
import dataclasses
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.results.remarks import Remark, Remarked

# Bounded, or a long run of digits would be tried from each of them on.
N = r"([-+]?(?<![\d,.])(?:\d[\d,]{0,30}(?:\.\d{1,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?)"
LOSS = rf"((?i:nan|[-+]?inf)|{N[1:]}"
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "%": 0.01, "GiB": 1.0, "GB": 1e9 / 2**30, "B": 2**-30}
UNITS["MB"] = 1e6 / 2**30
UNITS |= {"TFLOP/s": 1.0, "FLOP/s": 1e-12}
UNITS |= {"K": 1e3, "M": 1e6, "G": 1e9}  # after a number of tokens
UNITS["%A100"] = 3.12  # of 312 TFLOP/s, whatever the GPU


@dataclasses.dataclass
class LoggedStep:
    """A logged step; memory in GiB.

    `mean_time_s` and `elapsed_s` are since the first step. `tokens_seen` and `clock_s` are counters of
    one kind: a rate follows from two lines.
    """

    step: int
    time_s: float | None = None
    tokens_per_sec_per_gpu: float | None = None
    tokens_per_sec: float | None = None
    samples_per_sec: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    loss: float | None = None
    memory_gib: float | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    mean_time_s: float | None = None
    elapsed_s: float | None = None
    tokens_seen: float | None = None
    clock_s: float | None = None
    end: int = dataclasses.field(default=0, compare=False)  # of its first line in the text


@dataclasses.dataclass
class Log(Remarked):
    """All that a log says; what a `Record` has too becomes the record's."""

    steps: list[LoggedStep]
    suite: str
    n_gpus: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None  # of one GPU
    accumulation: int | None = None
    tokens_per_step: int | None = None
    hardware: str | None = None
    model: str | None = None
    parameters: float | None = None
    attention_flops: float = 0.0  # of a token, for each token of its sample
    memory_kind: str | None = None
    earlier_steps: int = 0
    # Of the whole run, where its steps have none, and by its own counters and clock.
    tokens_per_sec: float | None = None
    counted_tokens_per_sec: float | None = None
    samples_per_sec: float | None = None
    remarks: list[Remark] = dataclasses.field(default_factory=list)


Quantity = tuple[bool, str, str, re.Pattern]  # whether of the run; quantity, unit, pattern


@dataclasses.dataclass(frozen=True)
class Suite:
    """How a suite writes its log; see log_formats.toml."""

    step: re.Pattern
    rows: list[Quantity]
    line: list[str] = dataclasses.field(default_factory=list)
    never: list[str] = dataclasses.field(default_factory=list)
    block: bool = False
    sign: str = ""
    memory: str | None = None
    note: str = ""
    keys: list[str] = dataclasses.field(default_factory=list)
    sign_key: str = ""


def _suites() -> dict[str, Suite]:
    """The suites of the table, in its order."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    settings = {f.name for f in dataclasses.fields(Suite)} - {"rows", "step"}

    def rows(table: dict[str, Any]) -> Iterator[Quantity]:
        for key, texts in table.items():
            if key == "include":
                yield from rows(tables[texts])
            elif key not in settings | {"step"}:
                name, _, unit = key.partition(" ")
                quantity, _, over = name.partition("@")
                number = LOSS if quantity == "loss" else N
                for text in [texts] if isinstance(texts, str) else texts:
                    yield over == "run", quantity, unit, re.compile(text.replace("#", number))

    header = list(rows(tables.pop("HEADER")))
    return {
        name: Suite(
            re.compile(table.get("step", "(?!)")),
            [*rows(table), *header],
            **{key: table[key] for key in settings & table.keys()},
        )
        for name, table in tables.items()
        if name != "MEGATRON"
    }


SUITES = _suites()
TRAINER = "Hugging Face Trainer"
PRINTED = re.compile(r"\{'(?:loss|train_runtime)':[^{}]{0,4000}\}")


def parse(text: str, suite: str) -> Log:
    """A log taken for one of a suite; without steps if it is not."""
    if suite == TRAINER:
        return printed_log(text)
    form, steps = SUITES[suite], []
    if all(part in text for part in form.line) and re.search(form.sign, text):
        records = list(_records(text, form))
        numbers = [form.step.search(record) for _, record in records]
        counted = form.block and not any(numbers)
        for i, (end, record) in enumerate(records):
            match = numbers[i]
            if counted or match:
                number = int(next(filter(None, match.groups()), "0")) if match else i
                step = LoggedStep(number, end=end)
                for quantity, value in _quantities(record, form, of_run=False):
                    whole = quantity in ("global_batch", "seq_len")
                    setattr(step, quantity, int(value) if whole else value)
                steps.append(step)
    return log_of(steps, suite, text)


def _records(text: str, form: Suite) -> Iterator[tuple[int, str]]:
    """The text of each step, and where its first line ends."""
    block: list[str] = []
    end = begun = 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        begins = all(t in line for t in form.line) and not any(t in line for t in form.never)
        if block and (begins or not form.block):
            yield begun, "".join(block)
            block = []
        if begins or (block and len(block) < 200):
            begun = begun if block else end
            block.append(line)
    if block:
        yield begun, "".join(block)


def log_of(steps: Iterable[LoggedStep], suite: str, text: str = "") -> Log:
    """A log of those steps that have figures, with the facts that its text tells."""
    form, known = SUITES[suite], [step for step in steps if step != LoggedStep(step.step)]
    log = Log(known, suite, memory_kind=form.memory)
    if not known:
        return log
    if form.note:
        log.remark(form.note)
    for quantity, value in _quantities(text, form, of_run=True):
        if quantity == "memory_gib":
            log.steps[-1].memory_gib = log.steps[-1].memory_gib or value
        else:
            setattr(log, quantity, value if isinstance(value, str) else int(value))
    if suite == "torchtitan":
        log.n_gpus = _mesh(text)
    if log.n_gpus is None:
        totals = [(s, s.tokens_per_sec) for s in log.steps]
        totals += [(s, (s.samples_per_sec or 0) * (s.seq_len or 0)) for s in log.steps]
        each = "tokens_per_sec_per_gpu"
        ratio = next((t / getattr(s, each) for s, t in totals if t and getattr(s, each)), 0.0)
        log.n_gpus = round(ratio) if 0.5 < ratio < 1e6 else None
    if log.n_gpus is None and log.global_batch and log.micro_batch and log.accumulation:
        log.n_gpus = log.global_batch // (log.micro_batch * log.accumulation) or None
    return log


def _quantities(text: str, form: Suite, of_run: bool) -> Iterator[tuple[str, Any]]:
    """Quantities in a text, each by its first row that matches, in the units of `LoggedStep`."""
    done = set()
    for over_run, name, unit, pattern in form.rows:
        if over_run != of_run or name in done or not (match := pattern.search(text)):
            continue
        value: Any = next(filter(None, match.groups()))
        if name not in ("hardware", "model"):
            if unit == "*":
                unit, value = sorted(match.groups(), key=lambda g: g[-1:].isdigit())
                unit += "/s" * unit.endswith("P")
            value = float(value.replace(",", ""))
            value = (1 / value if value else 0.0) if unit == "1/s" else value * UNITS[unit]
            if name != "loss" and not 0 < value < math.inf:  # what suites print for one not known
                continue
        done.add(name)
        yield name, value


def _mesh(text: str) -> int | None:
    """GPUs of torchtitan's device mesh; expert parallel ranks are others' ranks again."""
    if mesh := re.search(r"device mesh with \[?\(?.*?\]?\)?, \[([\d, ]+)\]", text):
        return math.prod(map(int, re.findall(r"\d+", mesh[1])))
    if mesh := re.search(r"device mesh with parallelism: (.*)", text):
        sizes = dict(re.findall(r"(\w+)=(\d+)", mesh[1]))
        return math.prod(int(v) for k, v in sizes.items() if k not in ("ep", "etp"))
    return None


def fill_between_lines(steps: Sequence[LoggedStep]) -> None:
    """Give steps the time and rates of what lies between their line and the one before, in place.

    That needs counters in both. The line before may be one of evaluation.
    """
    before = LoggedStep(0)
    for step in steps:
        step.elapsed_s = step.elapsed_s or step.step * (step.mean_time_s or 0.0) or None
        n = step.step - before.step
        if n < 0:  # a late line of another rank
            continue
        if n and step.elapsed_s and before.elapsed_s:
            step.time_s = max((step.elapsed_s - before.elapsed_s) / n, 0.0) or None
        seconds = (step.clock_s or 0.0) - (before.clock_s or math.inf)
        last, now = (each.tokens_seen or 0.0 for each in (before, step))
        if n and seconds > 0 and now > last > 0:
            step.tokens_per_sec = (now - last) / seconds
        before = step


def steps_of_entries(
    entries: Iterable[Mapping[str, Any]], keys: Sequence[str], first: int = 1
) -> list[LoggedStep]:
    """A step of each entry by the `keys` of a suite; `first` is the number of one that has none.

    Of several keys of a quantity the first counts. Entries of validation have none of them.
    """
    steps = []
    for i, entry in enumerate(entries, first):
        number = as_number(entry.get("step"))
        step = LoggedStep(i if number is None else int(number), end=entry.get("end", 0))
        for row in keys:
            quantity, _, key = row.partition("=")
            name, _, unit = quantity.partition(" ")
            value = as_number(entry.get(key))
            good = isinstance(value, float | int) and (name == "loss" or value > 0)
            if good and getattr(step, name) is None:
                setattr(step, name, value * UNITS[unit])
        steps.append(step)
    return steps


def printed_log(text: str) -> Log:
    """The log of the dictionaries that the Trainer prints, {'loss': ...} and {'train_runtime': ...}."""
    entries = []
    for match in PRINTED.finditer(text):
        with contextlib.suppress(ValueError, SyntaxError):
            entry = ast.literal_eval(re.sub(r": (nan|-?inf)\b", r": '\1'", match[0]))
            entries.append(entry | {"end": match.end()})
    return hugging_face(entries, text)


def hugging_face(entries: Sequence[Mapping[str, Any]], text: str = "") -> Log:
    """The Trainer's log entries; rates are those of tokens seen, or samples/s of the whole run.

    If they were printed in a text, `end` of an entry is where it ends there.
    Its final `train_tokens_per_second` is of one rank in some releases, so nothing is read from it.
    """
    entries = [{k: as_number(v) for k, v in entry.items()} for entry in entries]
    axolotl = "axolotl" in text or any(k.startswith("memory/max") for e in entries for k in e)
    final = {"train_loss", "train_samples_per_second"}
    whole = next((e for e in reversed(entries) if final & e.keys()), {})
    losses = [e for e in entries if e.get("loss") is not None and not final & e.keys()]
    steps = steps_of_entries(losses, SUITES[TRAINER].keys)
    fill_between_lines(steps)
    log = log_of(steps, "axolotl" if axolotl else TRAINER, text)
    if whole and not losses:
        log.steps = [LoggedStep(int(whole.get("step") or 0))]
    trained = max((entry.get("tokens/trainable") or 0.0 for entry in entries), default=0.0)
    seconds = whole.get("train_runtime")
    log.counted_tokens_per_sec = trained / seconds if trained and seconds else None
    for entry in (whole, *reversed(losses)):
        tokens, seconds = entry.get("num_input_tokens_seen"), entry.get("train_runtime")
        if tokens and seconds:
            log.tokens_per_sec = tokens / seconds
            break
    if log.tokens_per_sec:
        if not any(s.tokens_per_sec for s in log.steps):
            log.remark("tokens/s of the whole run, with its start, evaluations and saves")
    elif whole.get("train_samples_per_second"):
        log.samples_per_sec = whole["train_samples_per_second"]
        log.remark("samples/s of the whole run, taken as full: an upper bound of tokens/s")
    return log


def as_number(value: Any) -> Any:
    """A number that is written as text."""
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else value
    except ValueError:
        return value
