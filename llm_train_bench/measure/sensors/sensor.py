"""Readings of a device's power and clocks, and the sensor of a CPU."""

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")


@dataclasses.dataclass(frozen=True)
class Sample:
    """A device at one moment; None where it does not say."""

    power_w: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    reasons: set[str] | None = None  # why the clocks are held down


class Sensor:
    """The queries of measure/power.py to a device, answered as by one that says nothing."""

    source = ""
    error: type[Exception] = OSError
    library: Any = None
    handle: Any = None

    def __bool__(self) -> bool:
        return bool(self.source)

    def joules(self) -> float | None:
        """Energy since some moment before, as of a driver's loading [J]."""
        return None

    def sample(self) -> Sample | None:
        return None

    def limits(self) -> tuple[float | None, float | None]:
        """The power limit in force [W] and the highest engine (SM) clock [MHz]."""
        return None, None

    def throttle_counters(self) -> tuple[float, dict[str, float]]:
        return 0.0, {}

    def other_processes(self, ours: frozenset[int]) -> int | None:
        return None

    def ask(self, function: str, *args):
        """The answer of a GPU's library, or None where this GPU or driver has none."""
        with contextlib.suppress(self.error, AttributeError):
            return getattr(self.library, function)(self.handle, *args)
        return None


class RaplSensor(Sensor):
    """The processor packages of the whole machine, by Linux' running average power limit counters.

    Making it raises OSError where they cannot be read, as in most containers and virtual machines.
    """

    source = "RAPL packages, whole machine"

    def __init__(self, directory: Path = RAPL):
        zones = (p for p in directory.glob("*") if re.fullmatch(r"intel-rapl:\d+", p.name))
        # A laptop's `psys` is the whole platform, its packages included.
        packages = sorted(p for p in zones if (p / "name").read_text().startswith("package"))
        if not packages:
            raise FileNotFoundError("this machine shows no RAPL counters")
        self.counters = [p / "energy_uj" for p in packages]
        self.ranges = [int((p / "max_energy_range_uj").read_text()) for p in packages]
        self.last = [int(c.read_text()) for c in self.counters]
        self.total = 0

    def joules(self) -> float:
        """Energy since the sensor was made [J]; must be asked before a counter has wrapped twice."""
        now = [int(c.read_text()) for c in self.counters]
        for value, before, whole in zip(now, self.last, self.ranges, strict=True):
            self.total += value - before if value >= before else value - before + whole
        self.last = now
        return self.total / 1e6

    def sample(self) -> Sample:
        """An empty sample; it reads the counters, so that no wrap is missed."""
        self.joules()
        return Sample()
