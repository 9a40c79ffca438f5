"""Energy, clocks and temperature of this rank's device over the measured window.

Energy is from the hardware's own counter, never TDP x time.
"""

import contextlib
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Collection

import torch

from llm_train_bench.base.files import how_to_install
from llm_train_bench.measure.device import memory_now
from llm_train_bench.measure.sensors.amd import AmdSensor
from llm_train_bench.measure.sensors.nvidia import NvidiaSensor
from llm_train_bench.measure.sensors.sensor import Sample
from llm_train_bench.results.schema import DeviceUse

GpuSensor = AmdSensor | NvidiaSensor
# A counter at rest is not believed if this part of the samples shows its reason.
OFTEN = 0.1


class PowerMeter:
    """Observes a device between begin() and end(); unreadable values are None, `source` says why.

    A thread takes samples; its queries are C calls that let the training thread run.
    """

    INTERVAL_S = 0.2
    # The counters are not used in shorter windows: they advance every 0.1 s (H200).
    SHORTEST_S = 2.0
    PROCESS_INTERVAL = 5  # samples between queries of other processes

    def __init__(self, device: torch.device, family: Collection[int] = ()):
        """`family`: ids of this run's processes on this machine, not counted as others."""
        self.family = frozenset({os.getpid(), *family})
        self.source = "none"
        self.device = device
        self.sensor = None
        try:
            self.sensor = find_sensor(device)
            self.source = self.sensor.source
        except ImportError as error:
            where = (
                "${ROCM_PATH:-/opt/rocm}/share/amd_smi" if torch.version.hip else "-e '.[energy]'"
            )
            get = how_to_install(f"pip install {where}")
            self.source = f"none: {error.name} is not installed ({get})"
        except Exception as error:  # a driver without the counter must not end the run
            self.source = f"none: {type(error).__name__}: {error}".splitlines()[0]
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        self.memory = [memory_now(self.device)]
        self.samples: list[Sample] = []
        self.others = [self._ask("other_processes", self.family)]
        self.counters = self._ask("throttle_counters") or (0.0, {})
        if self.sensor:
            self.stop = threading.Event()
            self.thread = threading.Thread(target=self._take_samples, daemon=True)
            self.thread.start()
        self.start_s = time.perf_counter()
        self.joules = self._ask("joules")

    def _take_samples(self) -> None:
        while not self.stop.wait(self.INTERVAL_S):
            self.memory.append(memory_now(self.device))
            self._take_sample()
            if len(self.samples) % self.PROCESS_INTERVAL == 0:
                self.others.append(self._ask("other_processes", self.family))

    def _take_sample(self) -> None:
        if (sample := self._ask("sample")) is not None:
            self.samples.append(sample)

    def _ask(self, query: str, *args):
        """The sensor's answer; None without one, and whatever goes wrong must not end the run."""
        with contextlib.suppress(Exception):
            return getattr(self.sensor, query)(*args)
        return None

    def end(self, rank: int) -> DeviceUse:
        """The readings since begin()."""
        self.memory.append(memory_now(self.device))
        now = self._ask("joules")
        seconds = time.perf_counter() - self.start_s
        if not self.samples:
            self._take_sample()  # the window was shorter than the interval
        self.close()
        joules = None  # also where the counter did not move
        if self.sensor and seconds < self.SHORTEST_S:
            self.source = f"none: the window is shorter than {self.SHORTEST_S:g} s"
            self.counters = (0.0, {})
        elif now is not None and self.joules is not None and now > self.joules:
            joules = now - self.joules
        self.others.append(self._ask("other_processes", self.family))
        others = [n for n in self.others if n is not None]
        power_limit, clock_limit = self._ask("limits") or (None, None)

        def sampled(field: str) -> list[float]:
            values = (getattr(sample, field) for sample in self.samples)
            return [value for value in values if value is not None]

        clocks, watts = sampled("sm_clock_mhz"), sampled("power_w")
        return DeviceUse(
            rank=rank,
            energy_j=joules,
            average_power_w=joules and joules / seconds,
            sampled_power_mean_w=_mean(watts),
            peak_power_w=max(watts, default=None),
            power_limit_w=power_limit,
            sm_clock_mean_mhz=_mean(clocks),
            sm_clock_min_mhz=min(clocks, default=None),
            sm_clock_limit_mhz=clock_limit,
            memory_clock_mean_mhz=_mean(sampled("memory_clock_mhz")),
            temperature_max_c=max(sampled("temperature_c"), default=None),
            memory_mean_gib=_mean([gib for gib in self.memory if gib is not None]),
            n_samples=len(self.samples),
            throttled=self._throttled(),
            other_processes=max(others, default=None),
        )

    def _throttled(self) -> dict[str, float] | None:
        """Fraction of the window for which each reason held the clocks down; None if unknown."""
        sampled = [s.reasons for s in self.samples if s.reasons is not None]
        counted = Counter(reason for reasons in sampled for reason in reasons)
        parts = {reason: n / len(sampled) for reason, n in counted.items()}
        begin, before = self.counters
        end, after = self._ask("throttle_counters") or (0.0, {})
        usable = {r for r in before if r in after and end > begin}
        for reason in usable:
            part = (after[reason] - before[reason]) / (end - begin)
            if 0 < part <= 1.05 or (part == 0 and counted[reason] < max(2, OFTEN * len(sampled))):
                parts[reason] = min(1.0, part)
        if not sampled and not usable:
            return None
        return {reason: part for reason, part in sorted(parts.items()) if part > 0}

    def close(self) -> None:
        if self.thread is not None:
            self.stop.set()
            self.thread.join()
            self.thread = None


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def find_sensor(device: torch.device) -> GpuSensor:
    """The sensor of a GPU; the exception says why there is none."""
    if device.type == "cpu":
        raise LookupError("a CPU's energy is not measured")
    return AmdSensor(device) if torch.version.hip else NvidiaSensor(device)
