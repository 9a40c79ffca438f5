"""--plan: the fastest layouts on some GPUs. Needs no torch."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import Hardware, device_called
from llm_train_bench.base.tables import markdown_table, number, show_whole
from llm_train_bench.estimate.estimate_flags import EstimateFlags, device_of
from llm_train_bench.estimate.layout_search import TOKENS_PER_STEP, Layout, search
from llm_train_bench.estimate.predict import BYTES_PER_GIB
from llm_train_bench.estimate.trainers import find_trainer, plan_by
from llm_train_bench.formulas.memory_model import VERDICTS
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.settings.flags import (
    LEARNT,
    SPEED,
    Args,
    BatchFlags,
    PeakFlags,
    Script,
    defaults,
    flag_of,
    of_kind,
    to_argv,
)
from llm_train_bench.settings.plan import resolve_seq_len

# What --plan chooses itself.
CHOSEN = """
bsz grad_acc_steps tp cp ep pp pp_virtual pp_schedule dp_replicate sac_freq sac_policy use_fp8 pt_compile
compile_mode ddp_mode zero1
""".split()


def refuse_beside_plan(given: Mapping[str, Any]) -> None:
    """UsageError for a flag that --plan ignores, among those on the command line."""
    for name in ("calibrate", "parallel"):
        if name in given:
            raise UsageError(f"{flag_of(name)} is for one estimate; leave out --plan")
    for name in CHOSEN:
        if name in given:
            raise UsageError(f"--plan chooses {flag_of(name)} itself; leave one of the two out")
    if given.get("linear") == "te":
        raise UsageError("--plan is for compiled steps; leave out --linear te")
    if given.get("pass_type", "step") != "step":
        raise UsageError("--plan is for training steps; leave out --pass-type")


def show_plans(wanted: EstimateFlags, changed: Callable[..., Args], config: ModelConfig) -> int:
    """--plan: the ten fastest layouts of each kind of GPU, and why the others lose; 4 if none will do.

    `changed(flag=value, ...)` are the arguments with other flags.
    """
    find_trainer(wanted.trainer)
    plain = changed()
    batch, price = plain.part(BatchFlags), plain.part(PeakFlags).usd_per_hour
    seq_len, gpus = resolve_seq_len(batch.seq_len, config), wanted.gpus
    # About four million tokens, in as many samples for each GPU.
    each = 2 ** max(0, round(math.log2(TOKENS_PER_STEP / seq_len / gpus)))
    sizes = {"global_bsz": batch.global_bsz or gpus * each, "seq_len": seq_len}
    usual, learnt = defaults(Args), of_kind(LEARNT, SPEED) - {*CHOSEN, "seq_len"}
    given = {k: v for k, v in vars(plain).items() if k in learnt and v != usual[k]}
    flags = " ".join([config.path, "--seq-len", str(seq_len), "--pt-compile", *to_argv(given)])
    names = wanted.gpu or ""
    content, enough = {}, False
    names = [names] if device_called(names) else filter(None, map(str.strip, names.split(",")))
    for gpu in [device_of(name, wanted) for name in names]:
        gpu = dataclasses.replace(gpu, usd_per_hour=price or gpu.usd_per_hour)

        def make(flags: dict[str, Any], script: Script, n: int, gpu: Hardware = gpu) -> Work:
            args, has = changed(pt_compile=True, **flags), (gpu.memory_gib, gpu.native_amp)
            return plan_by(wanted.trainer, args, script, n, gpu.platform, config, *has).work

        best, tried, lost = search(config, gpu, gpus, sizes, make)
        enough |= bool(best)
        if wanted.json:
            layouts = [dataclasses.asdict(x) | {"words": x.words(wanted.trainer)} for x in best]
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
    table = markdown_table("setting", "tokens/s/GPU", "GiB", "days", "US$", "largest loss")
    for layout in best:
        days = wanted.tokens and wanted.tokens / layout.tokens_per_sec / 86400
        usd = days and gpu.usd_per_hour and days * 24 * gpu.usd_per_hour * wanted.gpus
        rate, memory = layout.tokens_per_sec / wanted.gpus, layout.memory / BYTES_PER_GIB
        need = f"{memory:,.1f}" + ("" if layout.verdict == VERDICTS[0] else ", may not fit")
        cells = (f"{rate:,.0f}", need, number(days, ",.1f"), number(usd, ",.0f"))
        table.add_row(layout.words(wanted.trainer), *cells, layout.loss())
    show_whole(table)
    if not best:
        why = "fits" if any("does not fit" in reason for reason in lost) else "can be run"
        print(f"nothing {why}; use more GPUs, or larger ones")
    others = ", ".join(f"{n} {why}" for why, n in sorted(lost.items(), key=lambda item: -item[1]))
    print(f"the others: {others}" if others else "")
