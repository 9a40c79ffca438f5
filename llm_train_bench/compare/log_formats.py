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

# Bounded, or a long run of digits would be tried from each of them on.
N = r"([-+]?(?<![\d,.])(?:\d[\d,]{0,30}(?:\.\d{1,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?)"
LOSS = rf"((?i:nan|[-+]?inf)|{N[1:]}"
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "%": 0.01, "GiB": 1.0, "GB": 1e9 / 2**30, "B": 2**-30}
UNITS |= {"MB": 1e6 / 2**30, "TFLOP/s": 1.0, "FLOP/s": 1e-12}
UNITS |= {"K": 1e3, "M": 1e6, "G": 1e9}  # after a number of tokens
UNITS["%A100"] = 3.12  # of 312 TFLOP/s, whatever the GPU


@dataclasses.dataclass
class LoggedStep:
    """A logged step; memory in GiB, `mean_time_s` and `elapsed_s` since the first step."""

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
    end: int = dataclasses.field(default=0, compare=False)  # of its first line in the text


@dataclasses.dataclass
class Log:
    """All that a log says."""

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
    notes: list[str] = dataclasses.field(default_factory=list)


Quantity = tuple[str, str, re.Pattern]  # quantity, unit, pattern


@dataclasses.dataclass(frozen=True)
class Suite:
    """How a suite writes its log; see log_formats.toml."""

    rows: list[Quantity]  # of a step
    facts: list[Quantity]  # of the run
    step: str = "(?!)"
    line: list[str] = dataclasses.field(default_factory=list)
    never: list[str] = dataclasses.field(default_factory=list)
    block: bool = False
    sign: str = ""
    memory: str | None = None
    note: str = ""
    keys: list[str] = dataclasses.field(default_factory=list)


def _suites() -> dict[str, Suite]:
    """The suites of the table, in its order."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    settings = {f.name for f in dataclasses.fields(Suite)} - {"rows", "facts"}

    def rows(table: dict[str, Any], of_run: bool) -> Iterator[Quantity]:
        for key, texts in table.items():
            if key == "include":
                yield from rows(tables[texts], of_run)
            elif key not in settings:
                name, _, unit = key.partition(" ")
                quantity, _, over = name.partition("@")
                number = LOSS if quantity == "loss" else N
                for text in [texts] if isinstance(texts, str) else texts:
                    if of_run == (over == "run"):
                        yield quantity, unit, re.compile(text.replace("#", number))

    header = list(rows(tables.pop("HEADER"), of_run=True))
    return {
        name: Suite(
            list(rows(table, of_run=False)),
            [*rows(table, of_run=True), *header],
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
    return log_of(list(_steps(text, SUITES[suite])), suite, text)


def _steps(text: str, form: Suite) -> Iterator[LoggedStep]:
    """The steps with figures in a text; those of a suite's blocks are counted if it does not."""
    if not all(part in text for part in form.line) or not re.search(form.sign, text):
        return
    records = list(_records(text, form))
    matches = [re.search(form.step, record) for _, record in records]
    counted = form.block and not any(matches)
    for i, (match, (end, record)) in enumerate(zip(matches, records, strict=True)):
        if match or counted:
            number = int(next(filter(None, match.groups()), "0")) if match else i
            step = LoggedStep(number, end=end)
            for quantity, value in _quantities(record, form.rows):
                whole = quantity in ("global_batch", "seq_len")
                setattr(step, quantity, int(value) if whole else value)
            if step != LoggedStep(number):
                yield step


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


def log_of(steps: list[LoggedStep], suite: str, text: str) -> Log:
    """A log of these steps, with the facts that its text tells."""
    log = Log(steps, suite, memory_kind=SUITES[suite].memory)
    if not steps:
        return log
    log.notes += filter(None, [SUITES[suite].note])
    for quantity, value in _quantities(text, SUITES[suite].facts):
        if quantity == "memory_gib":
            steps[-1].memory_gib = steps[-1].memory_gib or value
        else:
            setattr(log, quantity, value if isinstance(value, str) else int(value))
    if suite == "torchtitan":
        log.n_gpus = _mesh(text)
    if log.n_gpus is None:
        totals = [s.tokens_per_sec or (s.samples_per_sec or 0) * (s.seq_len or 0) for s in steps]
        rates = zip(totals, (s.tokens_per_sec_per_gpu for s in steps), strict=True)
        ratio = next((total / per_gpu for total, per_gpu in rates if total and per_gpu), 0.0)
        log.n_gpus = round(ratio) if 0.5 < ratio < 1e6 else None
    if log.n_gpus is None and log.global_batch and log.micro_batch and log.accumulation:
        log.n_gpus = log.global_batch // (log.micro_batch * log.accumulation) or None
    return log


def _quantities(text: str, rows: list[Quantity]) -> Iterator[tuple[str, Any]]:
    """Quantities in a text, each by its first row that matches, in the units of `LoggedStep`."""
    done = set()
    for name, unit, pattern in rows:
        if name in done or not (match := pattern.search(text)):
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


def logged_step(entry: Mapping[str, Any], number: int, keys: Iterable[str]) -> LoggedStep:
    """A step of an entry's keys; without figures if it has none of them, as one of validation."""
    step = LoggedStep(number)
    for row in keys:
        quantity, _, key = row.partition("=")
        name, _, unit = quantity.partition(" ")
        value = entry.get(key)
        good = isinstance(value, float | int) and (name == "loss" or value > 0)
        if good and getattr(step, name) is None:
            setattr(step, name, value * UNITS[unit])
    return step


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

    If they were printed in a text, each has its `end` in it.
    Its final `train_tokens_per_second` is of one rank in some releases, so nothing is read from it.
    """
    entries = [{k: as_number(v) for k, v in entry.items()} for entry in entries]
    axolotl = "axolotl" in text or any(k.startswith("memory/max") for e in entries for k in e)
    steps: list[LoggedStep] = []
    counters: tuple[float, float] = 0.0, 0.0  # tokens seen, and seconds
    whole: dict[str, Any] = {}
    for entry in entries:
        if "train_loss" in entry or "train_samples_per_second" in entry:
            whole = entry
        elif entry.get("loss") is not None:
            number = int(entry.get("step") or len(steps) + 1)
            step = logged_step(entry, number, SUITES[TRAINER].keys)
            step.end = entry.get("end") or 0
            tokens, seconds = entry.get("num_input_tokens_seen"), entry.get("train_runtime")
            if tokens and seconds:
                if 0 < counters[0] < tokens and counters[1] < seconds:
                    step.tokens_per_sec = (tokens - counters[0]) / (seconds - counters[1])
                counters = tokens, seconds
            steps.append(step)
    if whole and not steps:
        steps = [LoggedStep(int(whole.get("step") or 0))]
    log = log_of(steps, TRAINER, text)
    if axolotl:
        log.suite, log.memory_kind = "axolotl", "allocated"
        if any(s.tokens_per_sec_per_gpu for s in steps):
            log.notes.append("axolotl counts trainable tokens, without prompts and padding")
    trained = max((entry.get("tokens/trainable") or 0.0 for entry in entries), default=0.0)
    tokens, seconds = whole.get("num_input_tokens_seen"), whole.get("train_runtime")
    log.counted_tokens_per_sec = trained / seconds if trained and seconds else None
    tokens, seconds = (tokens, seconds) if tokens and seconds else counters
    if tokens:
        log.tokens_per_sec = tokens / seconds
        if not any(s.tokens_per_sec for s in steps):
            log.notes.append("tokens/s of the whole run, with its start, evaluations and saves")
    elif whole.get("train_samples_per_second"):
        log.samples_per_sec = whole["train_samples_per_second"]
        log.notes.append("samples/s of the whole run, taken as full: an upper bound of tokens/s")
    return log


def as_number(value: Any) -> Any:
    """A number that is written as text."""
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else value
    except ValueError:
        return value
