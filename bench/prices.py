"""Prices and power limits for a comparison, from an experiment file and from flags. Needs no torch."""

import contextlib
import math
from collections.abc import Sequence

from bench.comparison import Prices
from bench.errors import UsageError
from bench.experiment import read_experiment
from bench.hardware import device_called, find_hardware
from bench.records import Record


def prices_of(experiment: str | None, usd_per_hour: Sequence[str], tdp_w: Sequence[str]) -> Prices:
    """Prices and power from the experiment file and the flags, which go before it."""
    usd, watts = {}, {}
    from_file: set[str] = set()
    if experiment:
        for machine in read_experiment(experiment).hardware.values():
            if machine.gpu is None:
                continue
            try:
                name = find_hardware(machine.gpu).name
            except UsageError as error:
                raise UsageError(f"{experiment}: gpu {error}") from None
            from_file.add(name)
            if machine.usd_per_hour:
                usd[name] = machine.usd_per_hour
            if machine.tdp_w:
                watts[name] = machine.tdp_w
    for flag, given, into in (
        ("usd-per-hour", usd_per_hour, usd),
        ("tdp-w", tdp_w, watts),
    ):
        for text in given:
            name, equals, value = text.rpartition("=")
            try:
                number = float(value)
            except ValueError:
                number = 0.0
            if not equals or not 0 < number < math.inf:
                raise UsageError(f"--{flag} {text}: must be HARDWARE=NUMBER above 0")
            with contextlib.suppress(UsageError):  # else a machine of one's own
                name = find_hardware(name).name
            into[name] = number
    return Prices(usd, watts, from_file)


def check_prices(prices: Prices, records: list[Record]) -> None:
    """A price for hardware that no run has is a slip of the pen."""
    names = {r.hardware for r in records if r.hardware}
    names |= {h.name for r in records if (h := device_called(r.hardware))}
    for name in (*prices.usd_per_hour, *prices.tdp_w):
        if name not in names and name not in prices.from_file:
            have = ", ".join(sorted(names)) or "none that is known"
            raise UsageError(f"a price or power for {name!r}, but the runs' hardware is {have}")
