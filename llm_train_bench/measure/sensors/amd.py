"""An AMD GPU's readings, through AMD SMI (amdsmi)."""

import importlib
import os

import torch

from llm_train_bench.measure.sensors.sensor import Sample, Sensor
from llm_train_bench.results.remarks import POWER_CAP

# Accumulators in the GPU's metrics. Each grows with `accumulation_counter` while its reason holds
# the clocks down.
SMI_COUNTERS = {
    POWER_CAP: "ppt_residency_acc",
    "thermal (socket)": "socket_thm_residency_acc",
    "thermal (voltage regulator)": "vr_thm_residency_acc",
    "thermal (memory)": "hbm_thm_residency_acc",
    "processor hot": "prochot_residency_acc",
}
# A process that has only opened a GPU holds at most this many bytes on it.
IDLE_BYTES = 64 * 2**20
UNSET = (None, "N/A", 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


class AmdSensor(Sensor):
    """One GPU. Making it raises what AMD SMI raises: no library, no driver, no such GPU."""

    source = "AMD SMI energy counter"

    def __init__(self, device: torch.device):
        # PyTorch has it open already where it found it; a second copy of the library would not do.
        smi = getattr(torch.cuda, "amdsmi", None) or importlib.import_module("amdsmi")
        self.smi = self.library = smi
        self.error = smi.AmdSmiException
        smi.amdsmi_init()
        p = torch.cuda.get_device_properties(device)
        bdf = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        self.handle = smi.amdsmi_get_processor_handle_from_bdf(bdf)

    def joules(self) -> float | None:
        """Energy since the driver was loaded [J]."""
        count = self.ask("amdsmi_get_energy_count") or {}
        ticks, resolution = count.get("energy_accumulator"), count.get("counter_resolution")  # [uJ]
        return None if ticks in UNSET or resolution in UNSET else ticks * resolution / 1e6

    def sample(self) -> Sample:
        power = self.ask("amdsmi_get_power_info") or {}
        names = ("current_socket_power", "average_socket_power", "socket_power")
        # An MI250X's second die reads 0 W: its power counts with the first's.
        watts = [power[name] for name in names if power.get(name) not in (*UNSET, 0)]
        kinds, what = self.smi.AmdSmiTemperatureType, self.smi.AmdSmiTemperatureMetric
        clocks = self.smi.AmdSmiClkType
        return Sample(
            power_w=watts[0] if watts else None,
            sm_clock_mhz=self._clock(clocks.GFX),
            memory_clock_mhz=self._clock(clocks.MEM),
            temperature_c=self.ask("amdsmi_get_temp_metric", kinds.HOTSPOT, what.CURRENT),
            reasons=None,
        )

    def _clock(self, kind, highest: bool = False) -> float | None:
        info = self.ask("amdsmi_get_clock_info", kind) or {}
        value = info.get("max_clk") if highest else info.get("clk")
        return None if value in UNSET else value

    def limits(self) -> tuple[float | None, float | None]:
        """The power limit in force [W] and the highest engine (SM) clock [MHz]."""
        cap = (self.ask("amdsmi_get_power_cap_info") or {}).get("power_cap")
        watts = None if cap in (*UNSET, 0) else cap / 1e6
        return watts, self._clock(self.smi.AmdSmiClkType.GFX, highest=True)

    def throttle_counters(self) -> tuple[float, dict[str, float]]:
        """The GPU's tick count, and the ticks in which each reason held the clocks down."""
        metrics = self.ask("amdsmi_get_gpu_metrics_info") or {}
        ticks = metrics.get("accumulation_counter")
        if ticks in UNSET:
            return 0.0, {}
        known = {name: metrics.get(field) for name, field in SMI_COUNTERS.items()}
        return ticks, {name: value for name, value in known.items() if value not in UNSET}

    def other_processes(self, ours: frozenset[int]) -> int | None:
        """Processes on the GPU that are not ours; None if the driver does not say.

        Each rank opens every GPU it can see, so a run's other ranks are on this GPU's list too.
        """
        processes = self.ask("amdsmi_get_gpu_process_list") or ()
        held = {p["pid"]: p.get("mem") for p in processes if isinstance(p, dict)}
        if os.getpid() not in held:
            return None
        # A process with the driver open is on every GPU's list, even with nothing on this one.
        others = [memory for pid, memory in held.items() if pid not in ours]
        return sum(memory in UNSET or memory > IDLE_BYTES for memory in others)
