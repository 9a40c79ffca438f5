"""Energy over the measured window, from the hardware's own counters; never TDP x time."""

import contextlib
from pathlib import Path

import torch

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules between begin() and end(), or None with the reason in `source`."""

    def __init__(self, device: torch.device):
        self.source = "none"
        self.read = None
        try:
            if device.type == "cpu":
                self.read, self.source = _rapl()
            elif torch.version.hip:
                self.read, self.source = _amd(device)
            else:
                self.read, self.source = _nvml(device)
        except ImportError as error:
            self.source = f"none: {error.name} is not installed "
        except Exception as error:  # a driver without the counter must not end the run
            self.source = f"none: {type(error).__name__}: {error}".splitlines()[0]

    def begin(self) -> None:
        self.start = None
        with contextlib.suppress(Exception):
            self.start = self.read() if self.read else None

    def end(self) -> float | None:
        """Joules since begin()."""
        if self.start is None:
            return None
        with contextlib.suppress(Exception):
            joules = self.read() - self.start
            return joules if joules > 0 else None  # the counter wrapped, or did not move
        return None


def _nvml(device: torch.device):
    import pynvml

    pynvml.nvmlInit()
    # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, "NVML energy counter"


def _amd(device: torch.device):
    import amdsmi

    amdsmi.amdsmi_init()
    properties = torch.cuda.get_device_properties(device)
    bdf = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    handle = amdsmi.amdsmi_get_processor_handle_from_bdf(bdf)

    def joules() -> float:
        count = amdsmi.amdsmi_get_energy_count(handle)
        return count["energy_accumulator"] * count["counter_resolution"] / 1e6

    joules()
    return joules, "AMD SMI energy counter"


def _rapl():
    counters = [p / "energy_uj" for p in sorted(RAPL.glob("intel-rapl:?"))]
    if not counters:
        return None, "none: this machine shows no RAPL counters"
    for counter in counters:
        counter.read_text()
    return lambda: sum(int(c.read_text()) for c in counters) / 1e6, "RAPL packages, whole machine"
