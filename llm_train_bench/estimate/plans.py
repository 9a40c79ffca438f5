"""--plan: the layouts of some GPUs that train a model fastest, by the formulas. Needs no torch."""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import Hardware, device_called
from llm_train_bench.base.tables import markdown_table, number
from llm_train_bench.estimate.predict import (
    BYTES_PER_GIB,
    EstimateArgs,
    EstimateFlags,
    device_of,
    plan_on,
)
from llm_train_bench.estimate.trainers import find_trainer
from llm_train_bench.formulas.memory_model import VERDICTS, estimate_memory, verdict_of
from llm_train_bench.formulas.speed_model import SpeedEstimate, estimate_speed, least_time
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.settings.flags import (
    LEARNT,
    SPEED,
    Args,
    Script,
    defaults,
    flag_of,
    of_kind,
    to_argv,
)
from llm_train_bench.settings.plan import resolve_seq_len

# Part of the memory that a plan leaves free: the formula's own error, and imbalance.
FREE = 0.1
TOKENS_PER_STEP = 4 * 2**20
# Tokens of a sample from which on ranks share them.
LONG = 4096
RECOMPUTED: tuple[dict[str, str], ...] = (
    {},
    {"sac_freq": "1/1", "sac_policy": "op"},
    {"sac_freq": "1/4"},
    {"sac_freq": "1/2"},
    {"sac_freq": "1/1"},
)
# Groups of ranks between which a pipeline may cut the layers.
MOST_STAGES = 64
LOSSES = ("pipeline bubble", "tokens between ranks", "exposed communication", "optimizer")
LOSSES += ("beside communication", "slowest node")
Make = Callable[[dict[str, Any], Script, int], Work]
# What --plan chooses itself.
CHOSEN = """
bsz grad_acc_steps tp cp ep pp pp_virtual dp_replicate sac_freq sac_policy use_fp8 pt_compile
compile_mode zero1
""".split()


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to train: flags besides --pt-compile, and what the formulas say (bytes, s, tokens/s)."""

    script: Script
    flags: dict[str, Any]
    memory: float
    verdict: str
    speed: SpeedEstimate
    tokens_per_sec: float

    def words(self, trainer: str = "ours") -> str:
        """The script and its flags as they are typed; of another trainer, its name and our flags."""
        kind = self.script.name.lower()
        first = self.script if trainer == "ours" else f"{trainer}, {kind}:"
        return " ".join([first, *to_argv(self.flags)])

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
    """Ways to share a model out; experts from eight ranks on, stages by any number that divides."""
    if gpus == 1:
        yield Script.ONE, {}
        return
    yield Script.DDP, {}
    experts = [n for n in powers(config.experts.number) if n >= 8] if config.experts else []
    n_layers = config.num_hidden_layers
    for tp in powers(min(per_node, 8)):
        for cp in powers(max(1, seq_len // LONG)):
            for ep in (1, *experts):
                if gpus % (tp * cp) or gpus % ep:
                    continue
                shared = {k: v for k, v in (("tp", tp), ("cp", cp), ("ep", ep)) if v > 1}
                for replicas in {1, max(1, gpus // max(per_node, tp * cp, ep))}:
                    more = {"dp_replicate": replicas} if replicas > 1 else {}
                    yield Script.FSDP, {**shared, **more}
                each = gpus // (tp * cp)
                for pp in range(2, min(MOST_STAGES, n_layers, each) + 1):
                    chunks = {1, 2, *(v for v in range(3, 17) if n_layers % (pp * v) == 0), 4}
                    for virtual in sorted(chunks) if each % pp == 0 else ():
                        more = {"pp_virtual": virtual} if virtual > 1 else {}
                        if pp * virtual <= n_layers:
                            yield Script.PP, {"pp": pp, **more, **shared}


def search(
    config: ModelConfig, gpu: Hardware, gpus: int, batch: dict[str, int], make: Make, low: bool
) -> tuple[list[Layout], int, dict[str, int]]:
    """The ten fastest layouts that fit, best first; how many were tried, and why others fell out.

    A layout is one of tp, ep, pp and replicas, with the other settings that make it fastest: cp, virtual
    stages, recomputation, micro batch and format (FP8 if `low`). `batch` has the flags `global_bsz` and
    `seq_len`. `make(flags, script, gpus)` makes a step of flags, or raises UsageError. A bound on the
    time sorts out what cannot be among the first. The events of the others are laid out.
    """
    limit, rough = (1 - FREE) * gpu.memory_gib * 2**30, []
    lost: collections.Counter[str] = collections.Counter()
    for script, shared in layouts(config, gpus, gpu.per_node, batch["seq_len"]):
        flags = {**shared, "global_bsz": batch["global_bsz"]}
        try:
            least = make({**flags, "bsz": 1, "sac_freq": "1/1"}, script, gpus)
        except UsageError as error:  # by its kind: numbers differ
            lost[re.sub(r"(?<![\w-])\d[\d,.]*", "N", re.split(r"[;:] ", str(error))[0])] += 1
            continue
        if estimate_memory(least).on_device(gpus) > limit:
            lost["does not fit with 1/1 recomputed"] += 1
            continue
        formats = ({}, {"use_fp8": True}) if gpu.fp8_tflops and low else ({},)
        for recomputed, number_format in itertools.product(RECOMPUTED, formats):
            options = {**flags, **number_format, **recomputed}
            size = _largest(options, script, gpus, limit, make)
            for bsz in {size, size // 2} - {0}:
                with contextlib.suppress(UsageError):
                    work = make({**options, "bsz": bsz}, script, gpus)
                    memory = estimate_memory(work).on_device(gpus)
                    if memory <= limit:
                        rate = work.batch.tokens_per_step / least_time(work, gpu)
                        rough.append((rate, script, {**options, "bsz": bsz}, memory, work))
    rough.sort(key=lambda found: -found[0])
    best: dict[str, Layout] = {}
    for bound, script, flags, memory, work in rough:
        slowest = sorted((x.tokens_per_sec for x in best.values()), reverse=True)[:10]
        if len(slowest) == 10 and bound < slowest[-1]:
            break
        speed = estimate_speed(work, gpu)
        verdict = verdict_of(memory, gpu.memory_gib * 2**30, work)
        layout = Layout(
            script, flags, memory, verdict, speed, work.batch.tokens_per_step / speed.step_s
        )
        key = str([script, *(flags.get(name) for name in ("tp", "ep", "pp", "dp_replicate"))])
        if key not in best or layout.tokens_per_sec > best[key].tokens_per_sec:
            best[key] = layout
    fitting = sorted(best.values(), key=lambda layout: -layout.tokens_per_sec)
    for layout in fitting[10:]:
        lost[f"slower: {layout.loss().rsplit(' ', 1)[0]}"] += 1
    return fitting[:10], len(rough), dict(lost)


def _largest(flags: dict[str, Any], script: Script, gpus: int, limit: float, make: Make) -> int:
    """The largest power of two as micro batch that fits; 0 if not even 1."""
    try:
        one = make({**flags, "bsz": 1}, script, gpus)
    except UsageError:
        return 0

    def fits(bsz: int) -> bool:
        return estimate_memory(one.with_micro_batch(bsz)).on_device(gpus) <= limit

    return max(itertools.takewhile(fits, powers(min(32, one.batch.grad_acc_steps))), default=0)


def refuse_beside_plan(given: Mapping[str, Any]) -> None:
    """UsageError for a flag that --plan ignores, among those on the command line."""
    for name in ("calibrate", "parallel", "imbalance"):
        if name in given:
            raise UsageError(f"{flag_of(name)} is for one estimate; leave out --plan")
    for name in CHOSEN:
        if name in given:
            raise UsageError(f"--plan chooses {flag_of(name)} itself; leave one of the two out")
    if given.get("linear") == "te":
        raise UsageError("--plan is for compiled steps; leave out --linear te")
    if given.get("pass_type", "step") != "step":
        raise UsageError("--plan is for training steps; leave out --pass-type")


def show_plans(wanted: EstimateArgs, config: ModelConfig) -> int:
    """--plan: the ten fastest layouts of each kind of GPU, and why the others lose; 4 if none will do."""
    find_trainer(wanted.trainer_words)
    price, gpus = wanted.usd_per_hour, wanted.gpus
    seq_len = resolve_seq_len(wanted.seq_len, config)
    # About four million tokens, in as many samples for each GPU.
    each = 2 ** max(0, round(math.log2(TOKENS_PER_STEP / seq_len / gpus)))
    sizes = {"global_bsz": wanted.global_bsz or gpus * each, "seq_len": seq_len}
    usual, learnt = defaults(Args), {"layers", *of_kind(LEARNT, SPEED)} - {*CHOSEN, "seq_len"}
    given = {k: v for k, v in vars(wanted).items() if k in learnt and v != usual[k]}
    flags = " ".join([config.path, "--seq-len", str(seq_len), "--pt-compile", *to_argv(given)])
    names = wanted.gpu or ""
    content, enough = {}, False
    names = [names] if device_called(names) else filter(None, map(str.strip, names.split(",")))
    for gpu in [device_of(name, wanted) for name in names]:
        gpu = dataclasses.replace(gpu, usd_per_hour=price or gpu.usd_per_hour)

        def make(flags: dict[str, Any], script: Script, n: int, gpu: Hardware = gpu) -> Work:
            args = dataclasses.replace(wanted, pt_compile=True, **flags)
            return plan_on(gpu, args, script, n, config).work

        best, tried, lost = search(config, gpu, gpus, sizes, make, "amp" not in given)
        enough |= bool(best)
        if wanted.json:
            layouts = [
                dataclasses.asdict(x) | {"words": x.words(wanted.trainer_words)} for x in best
            ]
            plan = {"gpus": gpus, "samples": sizes["global_bsz"], "best": layouts, "lost": lost}
            content[gpu.name] = plan
            continue
        print(
            f"{gpus} x {gpu.name}, {sizes['global_bsz']} samples of {seq_len} tokens a step; {tried} "
            f"settings, each with {flags}:"
        )
        show_layouts(best, lost, gpu, wanted)
    if wanted.json:
        print(json.dumps(content, indent=1))
    return 0 if enough else 4


def show_layouts(
    best: list[Layout], lost: dict[str, int], gpu: Hardware, wanted: EstimateFlags
) -> None:
    """One kind of GPU's ten best, with time, memory and cost."""
    known = {"days": wanted.tokens, "US$": wanted.tokens and gpu.usd_per_hour}
    cost = [name for name, value in known.items() if value]
    rows = []
    for layout in best:
        days = wanted.tokens and wanted.tokens / layout.tokens_per_sec / 86400
        usd = days and gpu.usd_per_hour and days * 24 * gpu.usd_per_hour * wanted.gpus
        rate, memory = layout.tokens_per_sec / wanted.gpus, layout.memory / BYTES_PER_GIB
        need = f"{memory:,.1f}" + ("" if layout.verdict == VERDICTS[0] else ", may not fit")
        costs = (number(days, ",.1f"), number(usd, ",.0f"))[: len(cost)]
        words = layout.words(wanted.trainer_words)
        rows.append((words, f"{rate:,.0f}", need, *costs, layout.loss()))
    columns = ("setting", "tokens/s/GPU", "GiB", *cost, "lost most to")
    print(markdown_table(columns, rows, left=("lost most to",)), end="")
    if not best:
        why = "fits" if any("does not fit" in reason for reason in lost) else "can be run"
        print(f"nothing {why}; use more GPUs, or larger ones")
    others = ", ".join(f"{n} {why}" for why, n in sorted(lost.items(), key=lambda item: -item[1]))
    print(f"the others: {others}" if others else "")
