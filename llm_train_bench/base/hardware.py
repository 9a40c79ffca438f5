"""Known rates of a device: datasheet peaks and measured matmul rates. Needs no torch."""

import dataclasses
import functools
import os
import re
import typing
from pathlib import Path
from typing import Any, Literal

from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.base.machine import MULTIPLY
from llm_train_bench.model.json_files import CONFIGS, parse_json, plain_text

ROOFS_FILE = CONFIGS / "roofs.json"
ACCURACY_FILE = CONFIGS / "accuracy.json"
HARDWARE_FILE = CONFIGS / "hardware.json"

# A whole device has at least this part of its listed memory.
WHOLE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """All that configs/hardware.json has on one device; None where unknown.

    An entry of the user's may leave out what has a default here.
    """

    name: str
    driver_names: tuple[str, ...]
    bf16_tflops: float
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    fp32_tflops: float
    mxfp8: bool = False
    memory_gib: float
    memory_tb_per_s: float
    tdp_w: float = 0.0  # unknown
    per_node: int = 8
    """GPUs that share fast links: of a machine, or of an NVLink domain."""
    ring_gb_per_s: float = 20.0
    nic_gb_per_s: float = 12.5
    peer_gb_per_s: float | None = None
    """One way, of a pair of GPUs whose links to others are no use to it; None: `ring_gb_per_s`."""
    host_gb_per_s: float = 32.0
    """Of the link to the host, one way: PCIe 3, 4 and 5 with 16 lanes have 16, 32 and 64."""
    measured_bf16_tflops: float | None = None
    measured_fp8_tflops: float | None = None
    usd_per_hour: float | None = None
    fitted: dict[str, float] = dataclasses.field(default_factory=dict)
    family: str = ""
    """Devices for which an estimate is as good: of one architecture and use."""
    source: str

    @property
    def platform(self) -> Literal["nvidia", "amd", "cpu"]:
        """`amd`, `nvidia` or `cpu`."""
        if re.search(r", \d+ threads?$", self.name):
            return "cpu"
        return "amd" if self.name.startswith("MI") else "nvidia"

    @property
    def native_amp(self) -> str:
        """The format of `--amp auto`. GPUs before Ampere have fp16; `bf16_tflops` is then its peak."""
        if self.platform == "cpu":  # its name has its instruction sets
            return "bf16" if MULTIPLY["bf16"] & set(re.findall(r"\w+", self.name)) else "off"
        older = re.search(r"\b(P100|V100|T4|RTX 20\d\d|Quadro RTX|TITAN RTX)\b", self.name)
        return "fp16" if older else "bf16"

    @functools.cached_property
    def constants(self) -> "Constants":
        """The speed model's constants for this device."""
        return Constants(constants() | self.fitted)

    @property
    def memory_rate(self) -> float:
        """Bytes per second that elementwise kernels reach."""
        return self.memory_tb_per_s * 1e12 * self.constants.bandwidth


def own_hardware_file() -> Path:
    """The user's own devices: LLM_TRAIN_BENCH_HARDWARE, or hardware.json in the user's configuration."""
    if path := os.environ.get("LLM_TRAIN_BENCH_HARDWARE"):
        return Path(path)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "llm-train-bench" / "hardware.json"


@functools.cache
def devices() -> tuple[Hardware, ...]:
    """All devices that are known, the user's own first; UsageError for an entry that is not right.

    An entry of the user's needs `name`, `bf16_tflops`, `memory_gib` and `memory_tb_per_s` alone.
    """
    path, users = own_hardware_file(), []
    if path.exists() or os.environ.get("LLM_TRAIN_BENCH_HARDWARE"):
        for entry in _entries_of(path):
            name, rate = entry.get("name"), entry.get("bf16_tflops")
            filled = {"driver_names": [name], "source": str(path)} | entry
            if "bf16_tflops" in entry:  # without TF32: of CUDA cores
                number = isinstance(rate, int | float)
                filled.setdefault("fp32_tflops", rate / 16 if number else rate)
            users.append(_hardware(filled, path))
    return (*users, *(_hardware(entry, HARDWARE_FILE) for entry in _entries_of(HARDWARE_FILE)))


def _entries_of(path: Path) -> list[dict[str, Any]]:
    entries = _read_json(path).get("devices")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UsageError(f"{path}: devices must be a list of objects")
    return entries


def _hardware(entry: dict[str, Any], path: Path) -> Hardware:
    """An entry of a file, checked."""
    hints, fields = typing.get_type_hints(Hardware), dataclasses.fields(Hardware)
    optional = {f.name for f in fields if f.default is not f.default_factory}
    needed = hints.keys() - (optional if path != HARDWARE_FILE else {"peer_gb_per_s", "family"})
    if wrong := sorted((needed - entry.keys()) | (entry.keys() - hints.keys())):
        what = f"lacks {wrong[0]}" if wrong[0] in needed else f"has {wrong[0]}, which no entry has"
        raise UsageError(f"{path}: the entry {entry.get('name', '?')} {what}")
    for key, value in entry.items():
        kinds = typing.get_args(hints[key]) or (hints[key],)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        least = 0 if key == "tdp_w" else 1e-9
        right = (
            (float in kinds and number and least <= value < 1e15)
            or (value is None and type(None) in kinds)
            or (key == "driver_names" and isinstance(value, list) and {*map(type, value)} <= {str})
            or (key == "fitted" and isinstance(value, dict) and value.keys() <= constants().keys())
            or type(value) in kinds
        )
        if not right:
            raise UsageError(f"{path}: {entry.get('name')!r}: {key} is {repr(value)[:40]}")
    entry["driver_names"] = tuple(entry["driver_names"])
    return Hardware(**entry)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object of configs/; UsageError if the file was spoilt."""
    try:
        content = parse_json(plain_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object")
    return content


def device_called(name: str | None) -> Hardware | None:
    """The device with exactly that name, its own or one of the drivers'."""
    return next((d for d in devices() if name in (d.name, *d.driver_names)), None)


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Matmul rates of one device, in TFLOP/s; None where unknown.

    Dense datasheet peaks, or the roof: the rates of the best shapes, sustained (benchmarks/gemm.py).
    """

    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    source: str = "unknown"
    name: str = ""
    fp4_tflops: float | None = None


def find_roof(device_name: str) -> Peaks:
    """The measured roof of the device of that name (`name_of_part`), from configs/roofs.json."""
    entry = _read_json(ROOFS_FILE).get(device_name) if ROOFS_FILE.exists() else None
    try:
        return Peaks(**entry) if entry else Peaks()
    except TypeError:
        raise UsageError(f"{ROOFS_FILE}: {device_name!r} is {str(entry)[:80]!r}, no roof") from None


def threads_of(cpu: str, threads: int) -> str:
    """The name under which some threads of a CPU are a device, in one's own hardware file."""
    return f"{cpu}, {threads} thread{'s' * (threads > 1)}"


def find_cpu(cpu: str, ranks: int) -> Hardware:
    """The threads that one of `ranks` has of this CPU; UsageError if they were never measured.

    OMP_NUM_THREADS says how many, as it does to a run; else all that were measured, shared by the ranks.
    """
    measured = [d for d in devices() if d.platform == "cpu" and d.name.startswith(f"{cpu}, ")]
    most = max((int(d.name.split()[-2]) for d in measured), default=0)
    variable = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(variable) if variable.isdecimal() and int(variable) else max(1, most // ranks)
    name = threads_of(cpu, threads)
    if device := next((d for d in measured if d.name == name), None):
        return device
    command = f"OMP_NUM_THREADS={threads} " * bool(most) + "python benchmarks/gemm.py"
    raise UsageError(
        f"cpu: no peak of {name if most else cpu} in {own_hardware_file()}; {command} measures it"
    )


def name_of_part(device_name: str, memory_gib: float | None) -> str:
    """A device's name as the driver gives it; a partition's with its memory.

    A partition of an AMD GPU keeps the whole GPU's name, and has much less memory.
    """
    whole = device_called(device_name)
    if whole and memory_gib is not None and memory_gib < WHOLE * whole.memory_gib:
        return f"{device_name}, {memory_gib:.0f} GiB of it"
    return device_name


def find_peaks(device_name: str, user_bf16: float | None = None) -> Peaks:
    """The peaks of the device of that name (`name_of_part`).

    Names are matched whole: a near miss may be a part with another peak, so it counts as unknown.
    `user_bf16` (--peak-tflops) overrides the file.
    """
    peaks, listed = Peaks(name=device_name), device_called(device_name)
    if listed:
        formats = listed.bf16_tflops, listed.fp8_tflops, listed.source, listed.name
        peaks = Peaks(*formats, fp4_tflops=listed.fp4_tflops)
    if user_bf16 is None:
        return peaks
    source = "--peak-tflops" + (f"; else {listed.source}" if listed else "")
    return dataclasses.replace(peaks, bf16_tflops=user_bf16, source=source)


def find_hardware(name: str) -> Hardware:
    """A device by its name or the start of it, in any case: `h100`; UsageError with the known ones.

    The message begins with the name, so that the caller may prefix where it stood.
    """
    low = name.lower()
    exact = [d for d in devices() if low in map(str.lower, (d.name, *d.driver_names))]
    # To the end of a word, or A10 would be an A100; MI300 is MI300X.
    start = re.compile(re.escape(low) + r"x?(?!\w)")
    bare = re.sub(r"[\s-]", "", low)  # rtx4090, or 4090 alone
    near = exact or [d for d in devices() if start.match(d.name.lower())]
    near = near or [
        d for d in devices() if bare in (d.name.lower().replace(" ", ""), *d.name.lower().split())
    ]
    if not exact and (len({d.name.split()[0] for d in near}) != 1 or not re.search(r"\d", name)):
        known = ", ".join(d.name for d in devices())
        raise UsageError(
            f"{name}: no such device; configs/hardware.json has: {known}; add yours in "
            f"{own_hardware_file()}"
        )
    return near[0]


def accuracy_of(name: str, experts: bool, low: bool | None = None) -> dict[str, Any] | None:
    """How far estimates of such a device were from published rows that chose no constant.

    `rows`, `median` and `covers_80` of relative errors of tokens/s, of dense models or of those with
    experts: of rows in FP8 or FP4 (`low`), of the others, or of all (None). None where fewer than eight
    rows are known.
    """
    kinds = _read_json(ACCURACY_FILE)["families"].get(family_of(name), {})
    formats = kinds.get("experts" if experts else "dense", {})
    found = formats.get({None: "all", False: "bf16", True: "FP8"}[low])
    return found if found and found["rows"] >= 8 else None


def family_of(name: str) -> str:
    """The family of a device, by which the accuracy of estimates is told; its name where it has none."""
    device = device_called(name)
    return (device.family if device else "") or name


class Constants(dict[str, float]):
    """Constants of the speed model, as attributes; configs/hardware.json says what each is.

    benchmarks/fit_estimate.py computes bandwidth, all_to_all, most numbers of kernels and each device's
    level from published rows. The others are measured, from papers, or assumed. A device's `fitted`
    override them.
    """

    def __getattr__(self, name: str) -> float:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@functools.cache
def constants() -> Constants:
    """The values for all devices; UsageError if the file was spoilt."""
    values = _read_json(HARDWARE_FILE).get("speed_model")
    if not isinstance(values, dict):
        raise UsageError(f"{HARDWARE_FILE}: lacks speed_model")
    return Constants(values)
