"""How the speed per device of one setting changes with the number of devices. Needs no torch."""

import json
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from llm_train_bench.base.tables import grouped, markdown_table
from llm_train_bench.compare.ratios import Compared
from llm_train_bench.compare.records import Record
from llm_train_bench.compare.setting import changed_settings, ratio_interval, setting_name
from llm_train_bench.settings.flags import Script

# What follows from the number of devices, where the work of each is the same, or that of all.
FOLLOWS = (("script", "global_batch"), ("script", "grad_acc_steps"))


def scaling(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """A line for each number of devices of the settings that ran on several, the fewest first.

    `efficiency` is the tokens/s per device over that on the fewest devices, with a 95 % interval over
    runs. Runs of train.py are the first line of every script's without one of its own.
    """
    usable = [r for row in rows if not (r := row.record).invalid and r.rates and r.arguments]
    keys = [(_alike(r, follows), r) for follows in FOLLOWS for r in usable]
    lines = []
    for key, pairs in grouped(keys, lambda pair: pair[0]).items():
        scripts = grouped((r for _, r in pairs), lambda r: str((r.arguments or {}).get("script")))
        one = scripts.pop(Script.ONE, [])
        for script, several in scripts.items():
            found = {r.n_gpus or 0: r for r in [*one, *several]}
            if len(found) == 1:
                continue
            base = found[min(found)]
            fewest = statistics.fmean(base.rates)
            words = ", ".join(filter(None, (script, setting_name(json.loads(key)[-1], {}))))
            for n in sorted(found):
                rates, speed = found[n].rates, statistics.fmean(found[n].rates)
                interval = ratio_interval(rates, base.rates) if found[n] is not base else None
                low, high = interval or (None, None)
                line = {"setting": words, "devices": n, "tokens_per_sec_per_device": speed}
                line |= {"efficiency": speed / fewest, "low": low, "high": high}
                lines.append(line | {"fewest": base.n_gpus})
    return lines


def _alike(r: Record, follows: Collection[str]) -> str:
    """Equal for runs that differ in the number of devices only: model, device, conditions, settings."""
    settings = {k: v for k, v in changed_settings(r).items() if k not in follows}
    told = [r.suite, r.model_hash or r.model, r.hardware, r.seq_len, r.conditions, settings]
    return json.dumps(told, sort_keys=True, default=str)


def relative(line: dict[str, Any]) -> str:
    """A line's efficiency, with its interval where there is one."""
    interval = "" if line["low"] is None else f" [{line['low']:.3f}, {line['high']:.3f}]"
    return f"{line['efficiency']:.3f}{interval}"


def show_scaling(lines: Sequence[dict[str, Any]]) -> None:
    """Print the table, if any setting ran on several numbers of devices."""
    if not lines:
        return
    columns = ("scaling", "devices", "tokens/s per device", "relative [95 %]")
    rows = [
        (x["setting"], str(x["devices"]), f"{x['tokens_per_sec_per_device']:,.0f}", relative(x))
        for x in lines
    ]
    print(markdown_table(columns, rows), end="")
