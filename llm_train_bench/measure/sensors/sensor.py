"""Readings of a GPU's power and clocks."""

import contextlib
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sample:
    """A GPU at one moment; None where it does not say."""

    power_w: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    reasons: set[str] | None = None  # why the clocks are held down


class Sensor:
    """A GPU in its vendor's library."""

    error: type[Exception]
    library: Any
    handle: Any

    def ask(self, function: str, *args):
        """The answer of the library, or None where this GPU or driver has none."""
        with contextlib.suppress(self.error, AttributeError):
            return getattr(self.library, function)(self.handle, *args)
        return None
