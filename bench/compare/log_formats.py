"""Parses the log lines of other training suites. Needs no torch.

Megatron-LM and Primus (which prints Megatron's line with more in it), NeMo, Megatron-Bridge, NeMo
Automodel, torchtitan, llm-foundry (Composer). A parser finds nothing in a log of another suite.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable

GIB, GB = 2**30, 1e9
# Bounded, or a long run of digits would be tried from each of them on.
NUMBER = r"([-+]?(?<![\d,.])(?:\d[\d,]{0,30}(?:\.\d{1,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?)"
LOSS = rf"(?i:(nan|[-+]?inf)|{NUMBER})"


@dataclasses.dataclass
class LoggedStep:
    """One logged step: rates per GPU, memory in GiB."""

    step: int
    time_s: float | None = None
    tokens_per_sec_per_gpu: float | None = None
    tokens_per_sec: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    loss: float | None = None
    lr: float | None = None
    memory_gib: float | None = None
    global_batch: int | None = None


@dataclasses.dataclass
class Log:
    """All that a log says."""

    steps: list[LoggedStep]
    suite: str
    n_gpus: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    hardware: str | None = None
    model: str | None = None
    memory_kind: str | None = None
    earlier_steps: int = 0


def _number(text: str, pattern: str) -> float | None:
    match = re.search(pattern, text)
    return float(next(filter(None, match.groups())).replace(",", "")) if match else None


def _whole(text: str, pattern: str) -> int | None:
    value = _number(text, pattern)
    return None if value is None else int(value)


def _lines(text: str, *needed: str) -> Iterable[str]:
    return (line for line in text.splitlines() if all(part in line for part in needed))


def parse_megatron(text: str) -> Log:
    """Megatron-LM's `iteration ... | elapsed time per iteration (ms): ...`, and Primus' form of it.

    In a pair `a/b`, `a` is this interval's value and `b` the mean; rates are per GPU.
    """
    steps = []
    for line in _lines(text, "iteration", "elapsed time per iteration (ms):"):
        match = re.search(r"iteration\s+(\d+)/\s*\d+", line)
        if not match:
            continue
        milliseconds = _number(line, rf"elapsed time per iteration \(ms\): {NUMBER}")
        tps = _number(line, rf"tokens per GPU \(tokens/s/GPU\): {NUMBER}")
        tps = tps or _number(line, rf"tokens/s/GPU inst/harmonic mean: {NUMBER}")
        tps = tps or _number(line, rf"tokens/sec/gpu: {NUMBER}")
        steps.append(
            LoggedStep(
                step=int(match[1]),
                time_s=milliseconds and milliseconds / 1e3,
                tokens_per_sec_per_gpu=tps,
                tflops=_number(line, rf"(?:throughput|compute) per GPU \(TFLOP/s/GPU\): {NUMBER}"),
                loss=_number(line, rf"lm loss: {LOSS}"),
                lr=_number(line, rf"learning rate: {NUMBER}"),
                memory_gib=_number(line, rf"hip mem usage/[\w/]+: {NUMBER}GB"),
                global_batch=_whole(line, rf"global batch size:\s*{NUMBER}"),
            )
        )
    primus = "hip mem usage" in text or "[Primus" in text or "tokens/s/GPU inst" in text
    n = _whole(text, r"\[rank-\d+/(\d+)\]") or _whole(text, r"using world size: (\d+)")
    n = n or _whole(text, r"(?m)^[ \t]*world_size \.+ (\d+)") or _whole(text, r"world_size=(\d+)")
    seq_len = _whole(text, r"(?m)(?:^|\s)seq_length \.+ (\d+)") or _whole(
        text, r"(?m)^[ \t]*seq_length: (\d+)"
    )
    seq_len = seq_len or _whole(text, r"initialized with seq_len: (\d+)")
    return Log(
        steps, "Primus" if primus else "Megatron-LM", n, seq_len,
        memory_kind="of the whole device" if primus else None,
    )  # fmt: skip


def parse_nemo(text: str) -> Log:
    """NeMo's `Training epoch E, iteration i/N | key: value | ...`; Megatron-Bridge's `Step Time`."""
    steps = []
    for line in _lines(text, "Training epoch", "iteration", "train_step_timing in s:"):
        memory = _number(line, rf"(?:max_memory_allocated|peak_memory_usage): {NUMBER}")
        steps.append(
            LoggedStep(
                step=_whole(line, rf"global_step: {NUMBER}")
                or _whole(line, r"iteration (\d+)/")
                or 0,
                time_s=_number(line, rf"train_step_timing in s: {NUMBER}"),
                tokens_per_sec_per_gpu=_number(line, rf"tokens_per_sec_per_gpu: {NUMBER}"),
                tflops=_number(line, rf"TFLOPS_per_GPU: {NUMBER}"),
                loss=_number(line, rf"reduced_train_loss: {LOSS}"),
                lr=_number(line, rf"\blr: {NUMBER}"),
                memory_gib=memory and memory / GIB,
                global_batch=_whole(line, rf"global_batch_size: {NUMBER}"),
            )
        )
    return Log(
        steps, "NeMo", n_gpus=_whole(text, r"Starting with (\d+) processes"),
        seq_len=_whole(text, r"seq_length\W+(\d+)"), memory_kind="allocated",
    )  # fmt: skip


def parse_bridge(text: str) -> Log:
    """Megatron-Bridge, `Step Time : 2.22s GPU utilization: 1177.2MODEL_TFLOP/s/GPU`, steps unnumbered."""
    steps = [
        LoggedStep(
            step=i,
            time_s=_number(line, rf"Step Time : {NUMBER}s"),
            tflops=_number(line, rf"GPU utilization: {NUMBER}\s*MODEL_TFLOP") or None,
        )
        for i, line in enumerate(_lines(text, "Step Time :", "MODEL_TFLOP/s/GPU"))
    ]
    return Log(
        steps, "Megatron-Bridge", global_batch=_whole(text, r"global[_ ]batch[_ ]size:\s*(\d+)")
    )


def parse_automodel(text: str) -> Log:
    """NeMo Automodel's `step N | epoch E | loss ... | mem ... GiB | tps TOTAL(x/gpu)`."""
    steps, n = [], None
    for line in _lines(text, "step ", "| epoch ", "| loss ", "tps "):
        if "[val]" in line:
            continue
        total = _number(line, rf"\btps {NUMBER}")
        each = _number(line, rf"\({NUMBER}/gpu\)")
        if total and each:
            n = round(total / each)
        steps.append(
            LoggedStep(
                step=_whole(line, r"\bstep (\d+)") or 0,
                tokens_per_sec=total,
                tokens_per_sec_per_gpu=each,
                loss=_number(line, rf"\bloss {LOSS}"),
                lr=_number(line, rf"\blr {NUMBER}"),
                memory_gib=_number(line, rf"\bmem:? {NUMBER} GiB"),
            )
        )
    return Log(steps, "NeMo Automodel", n, memory_kind="allocated")


def parse_torchtitan(text: str) -> Log:
    """torchtitan's `step: N  loss: ...  memory: ...GiB  tps: ...  tflops: ...  mfu: ...%`; per device."""
    steps = []
    for line in _lines(text, "step:", "loss:", "memory:"):
        tps = _number(line, rf"\b(?:tps|wps): {NUMBER}")
        if tps is None or "validate" in line:
            continue
        mfu = _number(line, rf"mfu: {NUMBER}%")
        steps.append(
            LoggedStep(
                step=_whole(line, r"step:\s*(\d+)") or 0,
                tokens_per_sec_per_gpu=tps,
                tflops=_number(line, rf"tflops: {NUMBER}"),
                mfu=mfu and mfu / 100,
                loss=_number(line, rf"loss:\s*{LOSS}"),
                memory_gib=_number(line, rf"memory:\s*{NUMBER}GiB"),
            )
        )
    n = None
    if mesh := re.search(r"device mesh with \[?\(?.*?\]?\)?, \[([\d, ]+)\]", text):
        n = _product(re.findall(r"\d+", mesh[1]))
    elif mesh := re.search(r"device mesh with parallelism: (.*)", text):
        sizes = dict(re.findall(r"(\w+)=(\d+)", mesh[1]))
        n = _product(v for k, v in sizes.items() if k not in ("ep", "etp"))
    gpu = re.search(r"(?:CUDA|GPU) capacity: (.+?) with", text)
    model = re.search(r"Model (\S+ \S+) size: [\d,]+", text)
    return Log(
        steps, "torchtitan", n, _whole(text, r"sequence length (\d+)"),
        _whole(text, r"global batch size (\d+)"), gpu and gpu[1], model and model[1], "reserved",
    )  # fmt: skip


def _product(values: Iterable[str]) -> int:
    result = 1
    for value in values:
        result *= int(value)
    return result


def parse_composer(text: str) -> Log:
    """llm-foundry's (Composer's) `[batch=i/N]:` and the `Train name: value` lines below it."""
    steps: list[LoggedStep] = []
    n = None
    for block in re.split(r"(?m)^.*?(?=\[batch=\d+/\d+\]:)", text)[1:]:
        head = re.match(r"\[batch=(\d+)/", block)
        values = dict(re.findall(rf"(?m)^[ \t]*Train ([\w./-]+): {NUMBER}\s*$", block))
        if not values:
            continue
        value = {name: float(number.replace(",", "")) for name, number in values.items()}
        total = value.get("throughput/tokens_per_sec")
        each = value.get("throughput/device/tokens_per_sec")
        if total and each:
            n = round(total / each)
        memory = value.get("memory/peak_allocated_mem") or value.get("memory/peak_active_mem")
        flops = value.get("throughput/device/flops_per_sec")
        steps.append(
            LoggedStep(
                step=int(head[1]),
                tokens_per_sec_per_gpu=each,
                tokens_per_sec=total,
                tflops=flops and flops / 1e12,
                mfu=value.get("throughput/device/mfu"),
                loss=value.get("loss/train/total"),
                lr=next((v for k, v in value.items() if k.startswith("lr-")), None),
                memory_gib=memory and memory * GB / GIB,
            )
        )
    nodes = _whole(text, r"num_nodes: (\d+)"), _whole(text, r"num_gpus_per_node: (\d+)")
    if n is None and all(nodes):
        n = nodes[0] * nodes[1]
    return Log(
        steps, "llm-foundry", n or _whole(text, r"\bn_gpus: (\d+)"),
        _whole(text, r"max_seq_len: (\d+)"), _whole(text, r"global_train_batch_size: (\d+)"),
        memory_kind="allocated",
    )  # fmt: skip


PARSERS: tuple[Callable[[str], Log], ...] = (
    parse_megatron,
    parse_nemo,
    parse_bridge,
    parse_automodel,
    parse_torchtitan,
    parse_composer,
)
