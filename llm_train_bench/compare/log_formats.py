"""What the logs of other training suites say, as one table of patterns. Needs no torch.

`SUITES` says which lines are a suite's steps, `TABLE` what a pattern in such a line, or in the whole log,
means: its quantity and unit, of one GPU or of all, and over which time. docs/COMPARE.md shows the table.
"""

import ast
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Bounded, or a long run of digits would be tried from each of them on.
N = r"([-+]?(?<![\d,.])(?:\d[\d,]{0,30}(?:\.\d{1,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?)"
LOSS = rf"((?i:nan|[-+]?inf)|{N[1:]}"
UNITS = {
    "": 1.0, "s": 1.0, "ms": 1e-3, "%": 0.01, "GiB": 1.0, "GB": 1e9 / 2**30, "B": 2**-30,
    "TFLOP/s": 1.0, "GFLOP/s": 1e-3, "PFLOP/s": 1e3, "FLOP/s": 1e-12,
    "% of an A100": 3.12,  # 312 TFLOP/s, whatever the GPU
}  # fmt: skip


@dataclasses.dataclass
class LoggedStep:
    """One logged step: rates per GPU or in total, memory in GiB."""

    step: int
    time_s: float | None = None
    tokens_per_sec_per_gpu: float | None = None
    tokens_per_sec: float | None = None
    samples_per_sec: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    loss: float | None = None
    lr: float | None = None
    memory_gib: float | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    mean_time_s: float | None = None  # since the first


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
    memory_kind: str | None = None
    earlier_steps: int = 0
    # Of the whole run, where its steps have none.
    tokens_per_sec: float | None = None
    samples_per_sec: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Suite:
    """How the steps of a suite's log are found.

    A step's line has all texts of `needs` and not that of `never`; with `block` a step is all lines up
    to the next such line, and counted if no line has a number. `step` is the pattern of that. `sign` is
    a pattern somewhere in the log, without which it is not this suite's. `memory` is the kind of its
    memory figures, `note` what a reader of its rates has to know.
    """

    needs: tuple[str, ...]
    step: str
    sign: str | None = None
    never: str | None = None
    block: bool = False
    memory: str | None = None
    note: str | None = None


# The first that explains at least half of the steps that any finds is a log's suite.
SUITES = {
    "Megatron-Bridge": Suite(("Step Time :", "GPU utilization:"), r"iteration\s+(\d+)/", block=True),
    "Primus": Suite(
        ("iteration", "elapsed time per iteration (ms):"), r"iteration\s+(\d+)/\s*\d+",
        r"hip mem usage|\[Primus|tokens/s/GPU inst", memory="of the whole device",
    ),
    "GPT-NeoX": Suite(("samples/sec:", "approx flops per GPU:"), r"iteration\s+(\d+)/"),
    "Megatron-DeepSpeed": Suite(
        ("iteration", "elapsed", "TFLOPs"), r"iteration[= ]\s*(\d+)/", r"samples[ _]per[ _]second"
    ),
    "Megatron-LM": Suite(
        ("iteration", "elapsed time per iteration (ms):"), r"iteration\s+(\d+)/\s*\d+"
    ),
    "NeMo": Suite(
        ("Training epoch", "iteration", "train_step_timing in s:"),
        r"global_step: (\d+)|iteration (\d+)/", memory="allocated",
    ),
    "NeMo Automodel": Suite(
        ("step ", "| epoch ", "| loss ", "tps "), r"\bstep\s+(\d+)", never="[val]",
        memory="allocated",
    ),
    "NeMo Automodel benchmark": Suite(
        ("| Iteration ", "| num_label_tokens="), r"\| Iteration (\d+) \|", block=True,
        memory="allocated",
    ),
    "torchtitan": Suite(
        ("step:", "loss:", "memory:"), r"step:\s*(\d+)", r"\b(?:tps|wps): ", "validate",
        memory="reserved",
    ),
    "llm-foundry": Suite(
        ("[batch=",), r"\[batch=(\d+)/\d+\]:", "Train ", block=True, memory="allocated"
    ),
    "MaxText": Suite(("completed step:", "seconds:"), r"completed step: (\d+)"),
    "torchtune": Suite(
        ("Step ", "loss:", "tokens_per_second_per_gpu:"), r"\bStep (\d+) \|", memory="allocated",
        note="torchtune counts the tokens that have a loss, without prompts and padding",
    ),
    "nanochat": Suite(("dt:", "tok/sec:"), r"step (\d+)"),
    "nanoGPT": Suite(("iter ", "loss ", "time "), r"\biter (\d+):"),
    "litgpt": Suite(
        ("iter ", "iter time:", "loss train:"), r"\biter (\d+) step",
        note="litgpt times micro batches, and not those between its lines; samples count as full",
    ),
    "DeepSpeed": Suite(
        ("SamplesPerSec=",), r"global_step=(\d+)|\b\d+/(\d+), (?:Running|Samples)",
        note="DeepSpeed's samples/s leave out what happens between steps", memory="allocated",
    ),
    "Lightning": Suite(
        ("Epoch ", "/", "[", "it"), r"\| *(\d+)/\d+ \[", r"Epoch \d+: +\d+%\|.*(?:it/s|s/it)", "?it/s"
    ),
}  # fmt: skip

# Of one GPU or of all; over one step, the steps since the line before, all until now, or the whole run.
GPU, ALL = "GPU", "all"
STEP, WINDOW, START, RUN = "step", "window", "since the first step", "run"
Row = tuple[str, str, str, str, str]
MEGATRON = (
    ("time_s", rf"elapsed time per iteration \(ms\): {N}", "ms", ALL, WINDOW),
    ("tflops", rf"(?:throughput|compute) per GPU \(TFLOP/s/GPU\): {N}", "TFLOP/s", GPU, WINDOW),
    ("tokens_per_sec", rf"tokens per GPU \(tokens/s/GPU\): {N}", "", GPU, WINDOW),
    ("tokens_per_sec", rf"tokens/s/GPU inst/harmonic mean: {N}", "", GPU, WINDOW),
    ("tokens_per_sec", rf"tokens/sec/gpu: {N}", "", GPU, WINDOW),
    ("loss", rf"lm loss: {LOSS}", "", ALL, WINDOW),
    ("lr", rf"learning rate: {N}", "", ALL, STEP),
    ("memory_gib", rf"hip mem usage/[\w/]+: {N}GB", "GiB", GPU, STEP),
    ("global_batch", rf"global batch size:\s*{N}", "", ALL, STEP),
)
HEADER = tuple(
    (quantity, pattern, "", ALL, RUN)
    for quantity, pattern in (
        ("n_gpus", r"\[rank-\d+/(\d+)\]"),
        ("n_gpus", r"using world size: (\d+)"),
        ("n_gpus", r"\bworld_size \.+ (\d+)"),
        ("n_gpus", r"world_size=(\d+)"),
        ("seq_len", r"(?m)(?:^|\s)seq_length \.+ (\d+)"),
        ("seq_len", r"(?m)^[ \t]*seq_length: (\d+)"),
        ("seq_len", r"initialized with seq_len: (\d+)"),
        ("global_batch", r"global[_ ]batch[_ ]size:\s*(\d+)"),
        ("global_batch", r"\btrain_batch_size \.+ (\d+)"),
    )
)
# By suite: quantity, pattern, unit, of, over. The first row of a quantity that matches counts.
TABLE: dict[str, tuple[Row, ...]] = {
    "Megatron-Bridge": (
        ("tflops", rf"GPU utilization: {N}\s*(?:MODEL_)?TFLOP/s/GPU", "TFLOP/s", GPU, WINDOW),
        *MEGATRON,
        ("time_s", rf"Step Time : {N}s", "s", ALL, WINDOW),
        *HEADER,
    ),
    "Primus": (*MEGATRON, *HEADER),
    "GPT-NeoX": (
        ("time_s", rf"elapsed time per iteration \(ms\): {N}", "ms", ALL, WINDOW),
        ("samples_per_sec", rf"samples/sec: {N}", "", ALL, WINDOW),
        ("tflops", rf"approx flops per GPU: {N}GFLOPS", "GFLOP/s", GPU, WINDOW),
        ("tflops", rf"approx flops per GPU: {N}TFLOPS", "TFLOP/s", GPU, WINDOW),
        ("tflops", rf"approx flops per GPU: {N}PFLOPS", "PFLOP/s", GPU, WINDOW),
        ("mfu", rf"MFU: {N}%", "%", GPU, WINDOW),
        ("loss", rf"lm_loss: {LOSS}", "", ALL, WINDOW),
        ("lr", rf"learning rate: {N}", "", ALL, STEP),
        *HEADER,
    ),
    "Megatron-DeepSpeed": (
        ("time_s", rf"elapsed[_ ]time[_ ]per[_ ]iteration[_ ]\(?ms\)?[:=]\s*{N}", "ms", ALL, WINDOW),
        ("time_s", rf"elapsed time per iteration \(s\): {N}", "s", ALL, WINDOW),
        ("tokens_per_sec", rf"per[_ ]gpu[_ ]per[_ ]second[_ ]\(?tgs\)?[:=]\s*{N}", "", GPU, WINDOW),
        ("samples_per_sec", rf"samples[_ ]per[_ ]second[:=]\s*{N}", "", ALL, WINDOW),
        ("tflops", rf"TFLOPs[:=]\s*{N}", "TFLOP/s", GPU, WINDOW),
        ("loss", rf"lm loss[:=]\s*{LOSS}", "", ALL, WINDOW),
        ("lr", rf"learning[_ ]rate[:=]\s*{N}", "", ALL, STEP),
        ("global_batch", rf"global[_ ]batch[_ ]size[:=]\s*{N}", "", ALL, STEP),
        ("seq_len", rf"actual[_ ]seqlen[:=]\s*{N}", "", ALL, STEP),
        *HEADER,
    ),
    "Megatron-LM": (*MEGATRON, *HEADER),
    "NeMo": (
        ("time_s", rf"train_step_timing in s: {N}", "s", ALL, STEP),
        ("tokens_per_sec", rf"tokens_per_sec_per_gpu: {N}", "", GPU, STEP),
        ("tflops", rf"TFLOPS_per_GPU: {N}", "TFLOP/s", GPU, STEP),
        ("loss", rf"reduced_train_loss: {LOSS}", "", ALL, STEP),
        ("lr", rf"\blr: {N}", "", ALL, STEP),
        ("memory_gib", rf"(?:max_memory_allocated|peak_memory_usage): {N}", "B", GPU, STEP),
        ("global_batch", rf"global_batch_size: {N}", "", ALL, STEP),
        ("n_gpus", r"Starting with (\d+) processes", "", ALL, RUN),
        ("seq_len", r"seq_length\W+(\d+)", "", ALL, RUN),
    ),
    "NeMo Automodel": (
        ("tokens_per_sec", rf"(?:\(|\btps ){N}/gpu", "", GPU, STEP),
        ("tokens_per_sec", rf"\btps {N}(?![\d.]*/gpu)", "", ALL, STEP),
        ("loss", rf"\bloss {LOSS}", "", ALL, STEP),
        ("lr", rf"\blr {N}", "", ALL, STEP),
        ("memory_gib", rf"\bmem:? {N} GiB", "GiB", GPU, STEP),
    ),
    "NeMo Automodel benchmark": (
        ("time_s", rf"Max iter time: {N} seconds", "s", ALL, STEP),
        ("mfu", rf"(?<!Average )MFU: {N}%", "%", GPU, STEP),
        ("loss", rf"\bloss={LOSS}", "", ALL, STEP),
        ("memory_gib", rf"Max Memory Allocated: {N} GB", "GiB", GPU, START),
        ("n_gpus", r"World size: (\d+)", "", ALL, RUN),
        ("seq_len", r"(?m)^\s*seq_len: (\d+)", "", ALL, RUN),
        ("global_batch", r"Global batch size: (\d+)", "", ALL, RUN),
    ),
    "torchtitan": (
        ("tokens_per_sec", rf"\b(?:tps|wps): {N}", "", GPU, WINDOW),
        ("tflops", rf"tflops: {N}", "TFLOP/s", GPU, WINDOW),
        ("mfu", rf"mfu: {N}%", "%", GPU, WINDOW),
        ("loss", rf"loss:\s*{LOSS}", "", ALL, STEP),
        ("memory_gib", rf"memory:\s*{N}GiB", "GiB", GPU, WINDOW),
        ("seq_len", r"sequence length (\d+)", "", ALL, RUN),
        ("global_batch", r"global batch size (\d+)", "", ALL, RUN),
        ("hardware", r"(?:CUDA|GPU) capacity: (.+?) with", "", ALL, RUN),
        ("model", r"Model (\S+ \S+) size: [\d,]+", "", ALL, RUN),
    ),
    "llm-foundry": (
        ("tokens_per_sec", rf"Train throughput/device/tokens_per_sec: {N}", "", GPU, WINDOW),
        ("tokens_per_sec", rf"Train throughput/tokens_per_sec: {N}", "", ALL, WINDOW),
        ("tflops", rf"Train throughput/device/flops_per_sec: {N}", "FLOP/s", GPU, WINDOW),
        ("mfu", rf"Train throughput/device/mfu: {N}", "", GPU, WINDOW),
        ("loss", rf"Train loss/train/total: {LOSS}", "", ALL, STEP),
        ("lr", rf"Train lr-[\w./-]+: {N}", "", ALL, STEP),
        ("memory_gib", rf"Train memory/peak_allocated_mem: {N}", "GB", GPU, START),
        ("memory_gib", rf"Train memory/peak_active_mem: {N}", "GB", GPU, START),
        ("n_gpus", r"\bn_gpus: (\d+)", "", ALL, RUN),
        ("seq_len", r"max_seq_len: (\d+)", "", ALL, RUN),
        ("global_batch", r"global_train_batch_size: (\d+)", "", ALL, RUN),
    ),
    "MaxText": (
        ("time_s", rf"seconds: {N}", "s", ALL, STEP),
        ("tflops", rf"TFLOP/s(?:/device)?: {N}", "TFLOP/s", GPU, STEP),
        ("tokens_per_sec", rf"Tokens/s/device: {N}", "", GPU, STEP),
        ("loss", rf"\bloss: {LOSS}", "", ALL, STEP),
        ("n_gpus", r"Num_devices: (\d+)", "", ALL, RUN),
    ),
    "torchtune": (
        ("tokens_per_sec", rf"tokens_per_second_per_gpu:{N}", "", GPU, STEP),
        ("loss", rf"loss:{LOSS}", "", ALL, STEP),
        ("lr", rf"\blr:{N}", "", ALL, STEP),
        ("memory_gib", rf"peak_memory_alloc:{N}", "GiB", GPU, STEP),
    ),
    "nanochat": (
        ("time_s", rf"dt: {N}ms", "ms", ALL, STEP),
        ("tokens_per_sec", rf"tok/sec: {N}", "", ALL, STEP),
        ("mfu", rf"mfu: {N}", "%", GPU, STEP),
        ("loss", rf"loss: {LOSS}", "", ALL, STEP),
        ("n_gpus", r"Distributed world size: (\d+)", "", ALL, RUN),
        ("hardware", r"(?m)^GPU: (.+?) \| Peak FLOPS", "", ALL, RUN),
        ("seq_len", r'"sequence_len": (\d+)', "", ALL, RUN),
        ("tokens_per_step", rf"Total batch size {N} =>", "", ALL, RUN),
    ),
    "nanoGPT": (
        ("time_s", rf"time {N}ms", "ms", ALL, STEP),
        ("tflops", rf"mfu {N}%", "% of an A100", GPU, START),
        ("loss", rf"loss {LOSS}", "", ALL, STEP),
        ("tokens_per_step", rf"tokens per iteration will be: {N}", "", ALL, RUN),
    ),
    "litgpt": (
        ("time_s", rf"iter time: {N} ms", "ms", ALL, STEP),
        ("loss", rf"loss train: {LOSS}", "", ALL, STEP),
        ("micro_batch", r"micro_batch_size=(\d+)", "", GPU, RUN),
        ("seq_len", r"max_seq_length=(\d+)", "", ALL, RUN),
        ("memory_gib", rf"Memory used: {N} GB", "GB", GPU, RUN),
    ),
    "DeepSpeed": (
        ("samples_per_sec", rf"CurrSamplesPerSec={N}", "", ALL, STEP),
        ("samples_per_sec", rf"\bSamplesPerSec={N}", "", ALL, WINDOW),
        ("memory_gib", rf"MaxMemAllocated={N}GB", "GiB", GPU, START),
        *HEADER,
    ),
    "Lightning": (
        ("mean_time_s", rf"{N}s/it", "s", ALL, START),
        ("mean_time_s", rf"{N}it/s", "1/s", ALL, START),
        ("loss", rf"\bloss={LOSS}", "", ALL, WINDOW),
    ),
    "Hugging Face Trainer": (
        ("micro_batch", rf"batch size per device = {N}", "", GPU, RUN),
        ("global_batch", rf"Total train batch size .* = {N}", "", ALL, RUN),
        ("accumulation", rf"(?i)gradient accumulation steps = {N}", "", ALL, RUN),
        ("n_gpus", r'"world_size": (\d+)', "", ALL, RUN),
    ),
}  # fmt: skip


def parse(text: str, suite: str) -> Log:
    """A log taken for one of a suite; without steps if it is not."""
    if suite == "Hugging Face Trainer":
        return hugging_face(printed_entries(text), text)
    form, steps = SUITES[suite], []
    if form.sign is None or re.search(form.sign, text):
        records = list(_records(text, form))
        numbered = [record for record in records if re.search(form.step, record)]
        records = numbered if numbered or not form.block else records
        steps = [_step(record, i, suite, form) for i, record in enumerate(records)]
    return log_of([step for step in steps if step], suite, text)


def log_of(steps: list[LoggedStep], suite: str, text: str) -> Log:
    """A log of these steps, with the facts that its text tells."""
    form = SUITES.get(suite)
    log = Log(steps, suite, memory_kind=form and form.memory)
    if not steps:
        return log
    if form and form.note:
        log.notes.append(form.note)
    for quantity, value in _found(text, suite, run=True):
        if quantity == "memory_gib":
            steps[-1].memory_gib = steps[-1].memory_gib or value
        else:
            setattr(log, quantity, value if isinstance(value, str) else int(value))
    if suite == "torchtitan":
        log.n_gpus = _mesh(text)
    if log.n_gpus is None:
        pairs = [(s.tokens_per_sec, s.tokens_per_sec_per_gpu) for s in steps]
        pairs += [
            (
                s.samples_per_sec and s.seq_len and s.samples_per_sec * s.seq_len,
                s.tokens_per_sec_per_gpu,
            )
            for s in steps
        ]
        ratio = next((total / each for total, each in pairs if total and each), 0.0)
        log.n_gpus = round(ratio) if 0.5 < ratio < 1e6 else None
    if log.n_gpus is None and log.global_batch and log.micro_batch and log.accumulation:
        log.n_gpus = log.global_batch // (log.micro_batch * log.accumulation) or None
    return log


def _records(text: str, form: Suite) -> Iterator[str]:
    """The text of each step."""
    block: list[str] = []
    for line in text.splitlines():
        begins = all(part in line for part in form.needs)
        begins = begins and not (form.never and form.never in line)
        if not form.block:
            if begins:
                yield line
            continue
        if begins and block:
            yield "\n".join(block)
            block = []
        if begins or (block and len(block) < 200):
            block.append(line)
    if block:
        yield "\n".join(block)


def _step(record: str, i: int, suite: str, form: Suite) -> LoggedStep | None:
    match = re.search(form.step, record)
    step = LoggedStep(int(next(filter(None, match.groups()), "0")) if match else i)
    for quantity, value in _found(record, suite, run=False):
        whole = quantity in ("global_batch", "seq_len")
        setattr(step, quantity, int(value) if whole else value)
    return step if step != LoggedStep(step.step) else None


def _found(text: str, suite: str, run: bool) -> Iterator[tuple[str, Any]]:
    """Quantities in a text, each by its first row that matches, in the units of `LoggedStep`."""
    done = set()
    for quantity, pattern, unit, of, over in TABLE[suite]:
        name = "tokens_per_sec_per_gpu" if (quantity, of) == ("tokens_per_sec", GPU) else quantity
        if run != (over == RUN) or name in done or not (match := re.search(pattern, text)):
            continue
        if quantity in ("hardware", "model"):
            value: Any = match[1]
        else:
            value = float(match[1].replace(",", ""))
            value = (1 / value if value else 0.0) if unit == "1/s" else value * UNITS[unit]
            # 0 or below is what suites print for a figure that they do not know.
            if quantity != "loss" and not 0 < value < math.inf:
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


# --- the Hugging Face Trainer and axolotl: dictionaries, in a log or in trainer_state.json ----------

# Quantity and key; the first that is there.
ENTRY_KEYS = (
    ("loss", "loss"),
    ("lr", "learning_rate"),
    ("tokens_per_sec_per_gpu", "tokens/train_per_sec_per_gpu"),
    ("memory_gib", "memory/max_allocated (GiB)"),
    ("memory_gib", "memory/max_mem_allocated(gib)"),
)


def printed_entries(text: str) -> list[dict[str, Any]]:
    """The dictionaries that the Trainer prints, {'loss': ...} and {'train_runtime': ...}."""
    found = []
    for match in re.finditer(r"\{'(?:loss|train_runtime)':[^{}]{0,4000}\}", text):
        try:
            found.append(ast.literal_eval(re.sub(r": (nan|-?inf)\b", r": '\1'", match[0])))
        except (ValueError, SyntaxError):
            continue
    return found


def hugging_face(entries: Iterable[Mapping[str, Any]], text: str = "") -> Log:
    """The Trainer's log entries; rates are those of tokens seen, or samples/s of the whole run.

    Its final `train_tokens_per_second` is of one rank in some releases, so nothing is read from it.
    """
    entries = [{k: _number(v) for k, v in entry.items()} for entry in entries]
    axolotl = "axolotl" in text or any(k.startswith("memory/max") for e in entries for k in e)
    steps: list[LoggedStep] = []
    seen, whole = (0.0, 0.0), {}
    for entry in entries:
        if "train_loss" in entry or "train_samples_per_second" in entry:
            whole = entry
            continue
        if entry.get("loss") is None:
            continue
        step = LoggedStep(int(entry.get("step") or len(steps) + 1))
        for quantity, key in ENTRY_KEYS:
            value = entry.get(key)
            if value is None or getattr(step, quantity) is not None:
                continue
            if quantity == "loss" or value > 0:
                setattr(step, quantity, value)
        now = entry.get("num_input_tokens_seen"), entry.get("train_runtime")
        if all(now):
            if seen[0] and now[0] > seen[0] and now[1] > seen[1]:
                step.tokens_per_sec = (now[0] - seen[0]) / (now[1] - seen[1])
            seen = now
        steps.append(step)
    if whole and not steps:
        steps = [LoggedStep(int(whole.get("step") or 0))]
    log = log_of(steps, "Hugging Face Trainer", text)
    log.suite = "axolotl" if axolotl else log.suite
    log.memory_kind = "allocated" if axolotl else None
    tokens, seconds = whole.get("num_input_tokens_seen"), whole.get("train_runtime")
    tokens, seconds = (tokens, seconds) if tokens and seconds else seen
    if tokens:
        log.tokens_per_sec = tokens / seconds
        if not any(s.tokens_per_sec for s in steps):
            log.notes.append("tokens/s of the whole run, with its start, evaluations and saves")
    elif whole.get("train_samples_per_second"):
        log.samples_per_sec = whole["train_samples_per_second"]
        log.notes.append("samples/s of the whole run, taken as full: an upper bound of tokens/s")
    return log


def _number(value: Any) -> Any:
    """A number that newer releases print as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
