"""--plan: the fastest layouts on some GPUs. Needs no torch."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import Hardware, device_called
from llm_train_bench.base.tables import markdown_table, number
from llm_train_bench.estimate.estimate_flags import (
    EstimateArgs,
    EstimateFlags,
    as_trained_by,
    device_of,
)
from llm_train_bench.estimate.layout_search import TOKENS_PER_STEP, Found, powers, search
from llm_train_bench.estimate.predict import BYTES_PER_GIB
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.settings.flags import Args, BatchFlags, PeakFlags, Script, defaults, flag_of
from llm_train_bench.settings.plan import make_plan, resolve_seq_len
from llm_train_bench.settings.rules import check

# What --plan chooses itself.
CHOSEN = ("bsz", "grad_acc_steps", "tp", "cp", "ep", "pp", "pp_virtual", "dp_replicate", "sac_freq",
          "sac_policy", "use_fp8", "pt_compile", "compile_mode", "ddp_mode", "zero1")  # fmt: skip


def refuse_beside_plan(wanted: EstimateFlags, given: Mapping[str, Any]) -> None:
    """UsageError for a flag that --plan ignores."""
    usual = defaults(EstimateArgs)
    for name in ("calibrate", "timeline", "trace", "parallel"):
        if getattr(wanted, name) != usual[name]:
            raise UsageError(f"{flag_of(name)} is for one estimate; leave out --plan")
    for name in CHOSEN:
        if given[name] != usual[name]:
            raise UsageError(f"--plan chooses {flag_of(name)} itself; leave one of the two out")
    if given["pass_type"] != "step":
        raise UsageError("--plan is for training steps; leave out --pass-type")
    if wanted.days and wanted.gpus != usual["gpus"]:
        raise UsageError("--days finds how many GPUs it takes; leave out --gpus")
    if wanted.days and not wanted.tokens:
        raise UsageError("--days needs --tokens: the days of how long a training?")


def show_plans(wanted: EstimateFlags, changed: Callable[..., Args], config: ModelConfig) -> int:
    """--plan: the ten fastest layouts of each kind of GPU, and why the others lose; 4 if none will do.

    `changed(flag=value, ...)` are the arguments with other flags.
    """
    plain = changed()
    batch, price = plain.part(BatchFlags), plain.part(PeakFlags).usd_per_hour
    seq_len = resolve_seq_len(batch.seq_len, config)
    given = wanted.gpu or ""
    names = [given] if device_called(given) else given.split(",")
    all_found, enough = {}, False
    for name in names:
        gpu = device_of(name.strip(), wanted)
        gpu = dataclasses.replace(gpu, usd_per_hour=price or gpu.usd_per_hour)

        def make(flags: dict[str, Any], script: Script, n: int, gpu: Hardware = gpu) -> Work:
            given = changed(pt_compile=True, **flags)
            work = make_plan(check(given, script), script, n, gpu.platform, config).work
            return as_trained_by(work, wanted)

        counts = [wanted.gpus]
        if wanted.days:
            counts = [n * wanted.per_node for n in powers(2**20 // wanted.per_node)]
        for gpus in counts:
            # About four million tokens, in as many samples for each GPU.
            each = 2 ** max(0, round(math.log2(TOKENS_PER_STEP / seq_len / gpus)))
            samples = batch.global_bsz or gpus * each
            found = search(config, gpu, gpus, wanted.per_node, samples, seq_len, make)
            days = None
            if found.best and wanted.tokens:
                days = wanted.tokens / found.best[0].tokens_per_sec / 86400
            if not wanted.days or (days and days <= wanted.days):
                break
        enough |= bool(found.best) and not (wanted.days and days > wanted.days)
        if wanted.json:
            ways = [dataclasses.asdict(layout) | {"words": layout.words()} for layout in found.best]
            part = {"gpus": gpus, "samples": samples, "best": ways, "lost": found.lost}
            all_found[gpu.name] = part
            continue
        show_plan(found, gpu, gpus, samples, (config.path, seq_len), wanted)
        if wanted.days and days and days > wanted.days:
            print(f"even {gpus:,} GPUs take longer than {wanted.days:g} days: {days:,.1f}")
    if wanted.json:
        print(json.dumps(all_found, indent=1))
    return 0 if enough else 4


def show_plan(
    found: Found, gpu: Hardware, gpus: int, samples: int, of: tuple[str, int], wanted: EstimateFlags
) -> None:
    """One kind of GPU's ten best, with time, memory and cost."""
    path, seq_len = of
    print(
        f"{gpus} x {gpu.name}, {samples} samples of {seq_len} tokens a step; {found.tried} settings, "
        f"each with {path} --seq-len {seq_len} --pt-compile:"
    )
    table = markdown_table("setting", "tokens/s/GPU", "GiB", "days", "US$", "largest loss")
    for layout in found.best:
        days = wanted.tokens and wanted.tokens / layout.tokens_per_sec / 86400
        usd = days and gpu.usd_per_hour and days * 24 * gpu.usd_per_hour * gpus
        table.add_row(
            layout.words(), f"{layout.tokens_per_sec / gpus:,.0f}",
            f"{layout.memory / BYTES_PER_GIB:,.1f}", number(days, ",.1f"), number(usd, ",.0f"),
            layout.loss(),
        )  # fmt: skip
    Console(width=150, highlight=False, markup=False).print(table)
    if not found.best:
        why = "fits" if any("does not fit" in reason for reason in found.lost) else "can be run"
        print(f"nothing {why}; use more GPUs, or larger ones")
    others = ", ".join(f"{n} {why}" for why, n in sorted(found.lost.items(), key=lambda x: -x[1]))
    print(f"the others: {others}" if others else "")
