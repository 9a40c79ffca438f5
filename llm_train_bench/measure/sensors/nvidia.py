"""An NVIDIA GPU's readings, through NVML (nvidia-ml-py)."""

import os
import time

import torch

from llm_train_bench.measure.sensors.sensor import Sample, Sensor
from llm_train_bench.results.remarks import POWER_CAP

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


class NvidiaSensor(Sensor):
    """One GPU. Making it raises what NVML raises: no library, no driver, no such GPU."""

    source = "NVML energy counter"

    def __init__(self, device: torch.device):
        import pynvml

        self.nvml = self.library = pynvml
        self.error = pynvml.NVMLError
        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def joules(self) -> float | None:
        """Energy since the driver was loaded [J]."""
        millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def sample(self) -> Sample:
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        power = self._fields(INSTANT_POWER).get(INSTANT_POWER)
        if power is None:
            power = self.ask("nvmlDeviceGetPowerUsage")
        return Sample(
            power_w=None if power is None else power / 1e3,
            sm_clock_mhz=self.ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self.ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_MEM),
            temperature_c=self.ask("nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU),
            reasons=None if bits is None else {n for n, bit in REASONS.items() if bits & bit},
        )

    def limits(self) -> tuple[float | None, float | None]:
        """The power limit in force [W] and the highest engine (SM) clock [MHz]."""
        power = self.ask("nvmlDeviceGetEnforcedPowerLimit")
        clock = self.ask("nvmlDeviceGetMaxClockInfo", self.nvml.NVML_CLOCK_SM)
        return None if power is None else power / 1e3, clock

    def throttle_counters(self) -> tuple[float, dict[str, float]]:
        """The time [ns], and how long each counted reason has held the clocks down [ns]."""
        values = self._fields(*NVML_COUNTERS.values())
        known = {name: values[field] for name, field in NVML_COUNTERS.items() if field in values}
        return time.perf_counter_ns(), known

    def other_processes(self, ours: frozenset[int]) -> int | None:
        """Processes on the GPU that are not ours; None if the driver does not say.

        In a container the driver lists process ids of the host; one of them is this process.
        """
        pids = {p.pid for p in self.ask("nvmlDeviceGetComputeRunningProcesses") or ()}
        if not pids:
            return None
        return len(pids - ours) if os.getpid() in pids else len(pids) - 1

    def _fields(self, *ids: int) -> dict[int, float]:
        """Field values that the GPU supports, by id."""
        values = self.ask("nvmlDeviceGetFieldValues", list(ids)) or []
        kinds = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
        return {
            v.fieldId: getattr(v.value, kinds[v.valueType]) for v in values if v.nvmlReturn == 0
        }
