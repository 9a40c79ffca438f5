"""What is known of a device: datasheet peaks and measured matmul rates. Needs no torch."""

import dataclasses
import json
from pathlib import Path

ROOFS_FILE = Path(__file__).parent.parent / "configs" / "roofs.json"
HARDWARE_FILE = Path(__file__).parent.parent / "configs" / "hardware.json"


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Dense datasheet peaks of one device, in TFLOP/s; None where unknown."""

    name: str
    bf16_tflops: float | None
    fp8_tflops: float | None
    source: str


@dataclasses.dataclass(frozen=True)
class Roof:
    """The highest matmul rates measured on a device (benchmarks/gemm.py), in TFLOP/s."""

    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    source: str = "unknown"


def find_roof(device_name: str) -> Roof:
    """The measured roof of the device of that name, from configs/roofs.json."""
    if not ROOFS_FILE.exists():
        return Roof()
    entry = json.loads(ROOFS_FILE.read_text(encoding="utf-8")).get(device_name)
    return Roof(**entry) if entry else Roof()


def find_peaks(device_name: str, user_bf16: float | None = None) -> Peaks:
    """The peaks of the device of that name, as the driver gives it.

    Names are matched whole: a near miss may be a part with another peak, so it counts as unknown.
    `user_bf16` (--peak-tflops) goes before the file.
    """
    if user_bf16 is not None:
        return Peaks(device_name, user_bf16, None, "--peak-tflops")
    for entry in json.loads(HARDWARE_FILE.read_text(encoding="utf-8"))["devices"]:
        if device_name in entry["driver_names"]:
            return Peaks(entry["name"], entry["bf16_tflops"], entry["fp8_tflops"], entry["source"])
    return Peaks(device_name, None, None, "unknown")
