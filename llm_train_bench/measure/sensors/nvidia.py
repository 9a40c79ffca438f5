"""An NVIDIA GPU's readings, through NVML (nvidia-ml-py)."""

import contextlib
import os
import time

import torch

from llm_train_bench.measure.sensors.sensor import Sample
from llm_train_bench.results.schema import POWER_CAP

# Bits of the current clock event reasons (nvml.h); those left out do not mean a slower clock.
REASONS = {
    POWER_CAP: 0x4,
    "hardware slowdown": 0x8,
    "sync boost": 0x10,
    "thermal (software)": 0x20,
    "thermal (hardware)": 0x40,
    "power brake": 0x80,
}
# Field values that add up [ns] since the driver was loaded, where the GPU keeps them.
NVML_COUNTERS = {
    POWER_CAP: 74,
    "sync boost": 76,
    "thermal (software)": 269,
    "thermal (hardware)": 270,
    "power brake": 271,
}
INSTANT_POWER = 186  # field [mW]; the older query is an average over a second


class NvidiaSensor:
    """One GPU. Making it raises what NVML raises: no library, no driver, no such GPU."""

    source = "NVML energy counter"

    def __init__(self, device: torch.device):
        import pynvml

        self.nvml = pynvml
        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def joules(self) -> float | None:
        """Energy since the driver was loaded [J]."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def sample(self) -> Sample:
        """The GPU's readings now."""
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        power = self._fields(INSTANT_POWER).get(INSTANT_POWER)
        if power is None:
            power = self._ask("nvmlDeviceGetPowerUsage")
        return Sample(
            power_w=None if power is None else power / 1e3,
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU),
            reasons=None if bits is None else {n for n, bit in REASONS.items() if bits & bit},
        )

    def limits(self) -> tuple[float | None, float | None]:
        """The power limit in force [W] and the highest SM clock [MHz]."""
        power = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        clock = self._ask("nvmlDeviceGetMaxClockInfo", self.nvml.NVML_CLOCK_SM)
        return None if power is None else power / 1e3, clock

    def throttle_counters(self) -> tuple[float, dict[str, float]]:
        """The time [ns], and how long each counted reason has held the clocks down [ns]."""
        values = self._fields(*NVML_COUNTERS.values())
        return time.perf_counter_ns(), {
            n: values[f] for n, f in NVML_COUNTERS.items() if f in values
        }

    def other_processes(self, ours: frozenset[int]) -> int | None:
        """Processes on the GPU that are not ours; None if the driver does not say.

        In a container the driver lists process ids of the host; one of them is this process.
        """
        found = self._ask("nvmlDeviceGetComputeRunningProcesses")
        if not found:
            return None
        pids = {process.pid for process in found}
        return len(pids - ours) if os.getpid() in pids else len(pids) - 1

    def _ask(self, function: str, *args):
        """A query's answer, or None where this GPU or driver has none."""
        with contextlib.suppress(self.nvml.NVMLError, AttributeError):
            return getattr(self.nvml, function)(self.handle, *args)
        return None

    def _fields(self, *ids: int) -> dict[int, float]:
        """Field values that the GPU supports, by id."""
        values = self._ask("nvmlDeviceGetFieldValues", list(ids)) or []
        kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
        return {
            v.fieldId: getattr(v.value, kinds[v.valueType]) for v in values if v.nvmlReturn == 0
        }
