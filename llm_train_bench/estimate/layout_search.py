"""estimate.py --plan: the layout of a cluster that trains a model fastest, by the formulas."""

import collections
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import Hardware
from llm_train_bench.formulas.memory_model import estimate_memory
from llm_train_bench.formulas.speed_model import SpeedEstimate, estimate_speed
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.settings.flags import Script, to_argv

# Part of the memory that a plan leaves free: the formula's own error, and imbalance.
FREE = 0.1
TOKENS_PER_STEP = 4 * 2**20
# Tokens of a sample from which on ranks share them.
LONG = 4096
RECOMPUTED = (None, "1/4", "1/2", "1/1")
LOSSES = ("pipeline bubble", "tokens between ranks", "exposed communication", "optimizer")
LOSSES += ("beside communication", "slowest node")
Make = Callable[[dict[str, Any], Script, int], Work]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to train: flags besides --pt-compile, and what the formulas say (bytes, s, tokens/s)."""

    script: Script
    flags: dict[str, Any]
    memory: float
    speed: SpeedEstimate
    tokens_per_sec: float

    def words(self) -> str:
        """The script and its flags as they are typed."""
        return " ".join([self.script, *to_argv(self.flags)])

    def loss(self) -> str:
        """What of the step is not computation, the largest first."""
        parts = self.speed.parts
        name = max(LOSSES, key=parts.__getitem__)
        return f"{name} {parts[name] / self.speed.step_s:.0%}"


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to a limit."""
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def layouts(
    config: ModelConfig, gpus: int, per_node: int, seq_len: int
) -> Iterator[tuple[Script, dict[str, Any]]]:
    """Ways to share a model out among GPUs, by powers of two; experts from eight ranks on."""
    if gpus == 1:
        yield Script.ONE, {}
        return
    yield Script.DDP, {}
    experts = [n for n in powers(config.experts.number) if n >= 8] if config.experts else []
    for tp in powers(min(per_node, 8)):
        for cp in powers(max(1, seq_len // LONG)):
            for ep in (1, *experts):
                if tp * cp > gpus or ep > gpus:
                    continue
                shared = {k: v for k, v in (("tp", tp), ("cp", cp), ("ep", ep)) if v > 1}
                for replicas in {1, max(1, gpus // max(per_node, tp * cp, ep))}:
                    more = {"dp_replicate": replicas} if replicas > 1 else {}
                    yield Script.FSDP, {**shared, **more}
                for pp in powers(min(32, config.num_hidden_layers // 2, gpus // (tp * cp)))[1:]:
                    for virtual in (1, 2, 4):
                        more = {"pp_virtual": virtual} if virtual > 1 else {}
                        yield Script.PP, {"pp": pp, **more, **shared}


def search(
    config: ModelConfig, gpu: Hardware, gpus: int, per_node: int, batch: dict[str, int], make: Make
) -> tuple[list[Layout], int, dict[str, int]]:
    """The ten fastest layouts that fit, best first; how many were tried, and why others fell out.

    Each has the least recomputation and the largest micro batches that fit. `batch` has the flags
    `global_bsz` and `seq_len`. `make(flags, script, gpus)` makes a step of flags, or raises UsageError.
    """
    limit, fitting = (1 - FREE) * gpu.memory_gib * 2**30, []
    lost: collections.Counter[str] = collections.Counter()
    for script, shared in layouts(config, gpus, per_node, batch["seq_len"]):
        flags = {**shared, "global_bsz": batch["global_bsz"]}
        try:
            least = make({**flags, "bsz": 1, "sac_freq": "1/1"}, script, gpus)
        except UsageError as error:  # by its kind: numbers differ
            lost[re.sub(r"(?<![\w-])\d[\d,.]*", "N", re.split(r"[;:] ", str(error))[0])] += 1
            continue
        if estimate_memory(least).on_device(gpus) > limit:
            lost["does not fit with 1/1 recomputed"] += 1
            continue
        formats = ({}, {"use_fp8": True}) if gpu.fp8_tflops else ({},)
        for freq, number_format in itertools.product(RECOMPUTED, formats):
            options = {**flags, **number_format} | ({"sac_freq": freq} if freq else {})
            size = _largest(options, script, gpus, limit, make)
            for bsz in {size, size // 2} - {0}:
                with contextlib.suppress(UsageError):
                    work = make({**options, "bsz": bsz}, script, gpus)
                    memory = estimate_memory(work).on_device(gpus)
                    if memory > limit:
                        continue
                    speed = estimate_speed(work, gpu)
                    rate = work.batch.tokens_per_step / speed.step_s
                    layout = Layout(script, {**options, "bsz": bsz}, memory, speed, rate)
                    fitting.append(layout)
    fitting.sort(key=lambda layout: -layout.tokens_per_sec)
    for layout in fitting[10:]:
        lost[f"slower: {layout.loss().rsplit(' ', 1)[0]}"] += 1
    return fitting[:10], len(fitting), dict(lost)


def _largest(flags: dict[str, Any], script: Script, gpus: int, limit: float, make: Make) -> int:
    """The largest power of two as micro batch that fits; 0 if not even 1."""
    try:
        one = make({**flags, "bsz": 1}, script, gpus)
    except UsageError:
        return 0

    def fits(bsz: int) -> bool:
        return estimate_memory(one.with_micro_batch(bsz)).on_device(gpus) <= limit

    return max(itertools.takewhile(fits, powers(min(32, one.batch.grad_acc_steps))), default=0)
