"""Known rates of a device: datasheet peaks and measured matmul rates. Needs no torch."""

import dataclasses
import functools
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field, TypeAdapter, ValidationError

from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.base.machine import MULTIPLY
from llm_train_bench.base.strict import first_problem
from llm_train_bench.model.json_files import CONFIGS, parse_json, plain_text

ROOFS_FILE = CONFIGS / "roofs.json"
ACCURACY_FILE = CONFIGS / "accuracy.json"
HARDWARE_FILE = CONFIGS / "hardware.json"

Schema = TypeVar("Schema")
Rate = Annotated[float, Field(strict=True, gt=0, lt=1e15)]
# A whole device has at least this part of its listed memory.
WHOLE = 0.8


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class Hardware:
    """All that configs/hardware.json has on one device; None where unknown.

    An entry of the user's may leave out what has a default here.
    """

    name: str
    driver_names: tuple[str, ...] = ()
    bf16_tflops: Rate
    fp8_tflops: Rate | None = None
    fp4_tflops: Rate | None = None
    fp32_tflops: Annotated[float, Field(strict=True, ge=0, lt=1e15)] = 0.0
    """Without TF32, of CUDA cores; by default a sixteenth of `bf16_tflops`."""
    mxfp8: bool = False
    memory_gib: Rate
    memory_tb_per_s: Rate
    tdp_w: Annotated[float, Field(strict=True, ge=0)] = 0.0  # 0: unknown
    per_node: int = 8
    """GPUs that share fast links: of a machine, or of an NVLink domain."""
    ring_gb_per_s: Rate = 20.0
    nic_gb_per_s: Rate = 12.5
    peer_gb_per_s: Rate | None = None
    """One way, of a pair of GPUs whose links to others are no use to it; None: a switch joins all."""
    host_gb_per_s: Rate = 32.0
    """Of the link to the host, one way: PCIe 3, 4 and 5 with 16 lanes have 16, 32 and 64."""
    measured_bf16_tflops: Rate | None = None
    measured_fp8_tflops: Rate | None = None
    usd_per_hour: Rate | None = None
    fitted: dict[str, float] = Field(default_factory=dict)
    family: str = ""
    """Devices for which an estimate is as good: of one architecture and use."""
    source: str = "your own hardware.json"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp32_tflops", self.fp32_tflops or self.bf16_tflops / 16)

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
    def constants(self) -> SimpleNamespace:
        """The speed model's constants for this device, as attributes.

        configs/hardware.json says what each is; the device's `fitted` override those of all devices.
        """
        return SimpleNamespace(**our_hardware().speed_model | self.fitted)

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


class HardwareFile(pydantic.BaseModel):
    """The devices of a file, and in ours the speed model's constants for all of them."""

    devices: list[Hardware]
    speed_model: dict[str, float] = Field(default_factory=dict)


@functools.cache
def our_hardware() -> HardwareFile:
    """The content of configs/hardware.json; UsageError if it was spoilt."""
    return _read(HARDWARE_FILE, HardwareFile)


@functools.cache
def devices() -> tuple[Hardware, ...]:
    """All devices that are known, the user's own first; UsageError for an entry that is not right.

    An entry of the user's needs only `name`, `bf16_tflops`, `memory_gib` and `memory_tb_per_s`.
    """
    path = own_hardware_file()
    has_own = path.exists() or os.environ.get("LLM_TRAIN_BENCH_HARDWARE")
    own = _read(path, HardwareFile).devices if has_own else []
    return (*own, *our_hardware().devices)


def _read(path: Path, schema: type[Schema]) -> Schema:
    """The content of a file of configs/, or of the user's; UsageError if it was spoilt."""
    try:
        return TypeAdapter(schema).validate_python(parse_json(plain_text(path)))
    except ValidationError as error:
        raise UsageError(f"{path}: {first_problem(error)}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {one_line(error)}") from None


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
    roofs = _read(ROOFS_FILE, dict[str, Peaks]) if ROOFS_FILE.exists() else {}
    return roofs.get(device_name, Peaks())


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
    listed = device_called(device_name)
    peaks = Peaks(name=device_name)
    if listed:
        rates = listed.bf16_tflops, listed.fp8_tflops, listed.source, listed.name
        peaks = Peaks(*rates, fp4_tflops=listed.fp4_tflops)
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
    # Whole words, or A10 would be an A100; MI300 is MI300X. Also rtx4090, or only 4090.
    bare = re.sub(r"[\s-]", "", low)
    words = re.compile(rf"(?<!\S){re.escape(low)}x?(?!\w)")
    near = exact or [
        d
        for d in devices()
        if words.search(d.name.lower()) or bare == d.name.lower().replace(" ", "")
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
    kinds = _read(ACCURACY_FILE, dict[str, Any])["families"].get(family_of(name), {})
    formats = kinds.get("experts" if experts else "dense", {})
    found = formats.get({None: "all", False: "bf16", True: "FP8"}[low])
    return found if found and found["rows"] >= 8 else None


def family_of(name: str) -> str:
    """The family of a device, by which the accuracy of estimates is told; its name where it has none."""
    device = device_called(name)
    return (device.family if device else "") or name
