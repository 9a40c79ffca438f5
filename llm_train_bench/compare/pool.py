"""Repeats of one setting as one row, and names of settings by what differs. Needs no torch."""

import collections
import dataclasses
import json
import statistics
from collections.abc import Iterable
from typing import Any

from llm_train_bench.base.files import shown_word
from llm_train_bench.compare.records import Record, grouped
from llm_train_bench.settings.flags import Args, defaults

# What may differ between repeats of one setting.
NOT_THE_SETTING = {"seed"}
# Figures of a setting that are means over its runs.
MEANS = "tokens_per_sec tokens_per_sec_per_gpu mfu tflops_per_gpu tokens_per_joule goodput".split()


def pool(records: Iterable[Record]) -> list[Record]:
    """One record a setting, in order: means over its runs, the most memory of any, all step times.

    Runs are repeats if hardware, model, software and all flags are the same. A run that cannot be
    compared is left out where others of its setting can, and named in the notes. A file that does not
    tell its flags is a setting by itself.
    """
    return [_pooled(runs) for runs in grouped(records, _key).values()]


def _key(r: Record) -> str:
    if r.arguments is None:
        return f"{r.path} {r.label}"
    facts = {k: v for k, v in r.arguments.items() if k not in NOT_THE_SETTING}
    limit = r.power_limit_w and round(r.power_limit_w, -1)
    who = [r.suite, r.model, r.model_hash, r.seq_len, r.hardware, r.n_gpus, r.software, limit]
    who.append(r.repeat_of)
    return json.dumps([who, sorted(facts.items(), key=str)], default=str)


def _pooled(runs: list[Record]) -> Record:
    usable = [r for r in runs if not r.marks and r.tokens_per_sec_per_gpu]
    left_out = [f"left out {r.label}: {'; '.join(r.marks)}" for r in runs if usable and r.marks]
    chosen = usable or runs[:1]
    most = max(chosen, key=lambda r: r.memory_gib or 0.0)
    means = {}
    for name in MEANS:
        values = [value for r in chosen if (value := getattr(r, name)) is not None]
        means[name] = statistics.fmean(values) if values else None
    return dataclasses.replace(
        chosen[0],
        **means,
        memory_gib=most.memory_gib,
        memory_kind=most.memory_kind,
        step_times_s=[t for r in chosen for t in r.step_times_s],
        notes=[note for r in runs for note in r.notes] + left_out,
        # One of a kind: drift, busy CPU, stolen CPU.
        remarks=list({x.rpartition(" ")[0]: x for r in chosen for x in r.remarks}.values()),
        runs=runs,
        rates=[r.tokens_per_sec_per_gpu for r in usable],
    )


def name_settings(members: list[Record]) -> None:
    """Give each setting of a group a name of what differs among them, in place.

    A file that does not tell its flags is called as the file is.
    """
    facts = [_facts(r) for r in members]
    known = [f for f in facts if f is not None]
    keys = dict.fromkeys(key for f in known for key in f)
    differ = [k for k in keys if len({str(f.get(k)) for f in known}) > 1]
    for record, values in zip(members, facts, strict=True):
        words = [_word(key, values.get(key)) for key in differ] if values else []
        record.setting = ", ".join(words) or (record.settings if values else "") or record.label
    times = collections.Counter(record.setting for record in members)
    for record in members:
        if times[record.setting] > 1:  # differences that no flag tells
            record.setting = f"{record.setting} ({record.label})"


def _facts(r: Record) -> dict[str, Any] | None:
    """What a setting is made of; the flags last, since machines differ more visibly."""
    if r.arguments is None:
        return None
    flags = {k: v for k, v in r.arguments.items() if k not in NOT_THE_SETTING}
    if flags.get("grad_acc_steps") is not None and flags.get("bsz") is not None:
        flags.pop("global_batch", None)  # follows from these and the GPUs
    limit = r.power_limit_w and f"{r.power_limit_w:.0f} W"
    machine = {"": r.hardware, "GPUs": r.n_gpus, "power limit": limit}
    return machine | (r.software or {}) | flags


def _word(key: str, value: Any) -> str:
    names = {"sac_freq": "sac", "pt_compile": "compiled", "use_fp8": "FP8", "script": ""}
    name = names.get(key, key.replace("_", "-"))
    if isinstance(value, bool) or value is None:
        return name if value else f"no {name}"
    text = shown_word(str(value)).removesuffix(".py")
    return f"{name} {text}".strip()


def plainest(members: list[Record]) -> Record:
    """The setting with the fewest flags that are not at their defaults; the first of those."""
    default = defaults(Args)

    def changed(r: Record) -> int:
        return sum(k in default and v != default[k] for k, v in (r.arguments or {}).items())

    return min(members, key=changed)
