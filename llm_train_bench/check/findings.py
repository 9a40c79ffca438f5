"""What is wrong with a machine, in words with cause and cure. Needs nothing but Python.

`of_machine` looks at what is there. `of_remarks` and `of_rates` judge what check.py measured.
"""

import dataclasses
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_train_bench.results.remarks import Remark

from llm_train_bench.base.errors import printable
from llm_train_bench.base.files import how_to_install
from llm_train_bench.base.machine import (
    SLOW_FORMAT,
    cpu_multiplies,
    detect_platform,
    installed_version,
    n_cores,
    output_of,
)
from llm_train_bench.model.json_files import parse_json


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `ok`, `warn` (something is slower or absent) or `fail`."""

    what: str
    state: str
    found: str
    advice: str = ""

    @property
    def optional(self) -> bool:
        """Whether only a feature is absent: nothing is slower without it."""
        names = [line.split(" | ")[0].removeprefix("*") for line in NEEDED.strip().splitlines()]
        return self.state == "warn" and self.what in ("GPU driver", *names)


def judged(what: str, found: str, wrong: bool, advice: str, state: str = "warn") -> Finding:
    """A finding that is `ok`, or else has this state and advice."""
    return Finding(what, state, found, advice) if wrong else Finding(what, "ok", found)


OLDEST_TORCH = [2, 11]  # as in pyproject.toml
# Distribution, purpose, how to get it; nothing runs without those marked *.
NEEDED = """
*torch | training | pip install -e .
*pydantic | result files | pip install -e .
*numpy | token files and statistics | pip install -e .
*PyYAML | experiment files | pip install -e .
*tensorboard | TensorBoard files | pip install -e .
*safetensors | Hugging Face weights | pip install -e .
tokenizers | prepare_data.py --tokenizer | pip install -e .
torchao | --fp8-backend torchao | pip install -e '.[fp8]'
transformer-engine | --fp8-backend te | NGC's image, or pip install --no-build-isolation -e '.[te]'
nvidia-ml-py | energy and clocks on NVIDIA | pip install -e '.[energy]'
amdsmi | energy and clocks on AMD | pip install ${ROCM_PATH:-/opt/rocm}/share/amd_smi
"""


def of_machine(kind: str) -> Iterator[Finding]:
    """All that can be seen without a measurement, on a platform (base/machine.py)."""
    yield from machine()
    yield from drivers(kind)
    if kind == "cpu":
        yield formats()
    yield from libraries(kind)
    yield compiler()
    yield from torch_sees(kind)
    yield from settings()
    yield from placement()


def show(findings: Sequence[Finding]) -> None:
    """Print a table; the advice on a finding has a separate line."""
    width = max((len(f.what) for f in findings), default=0)
    for f in findings:
        print(printable(f"{f.state:4}  {f.what:{width}}  {f.found}"))
        if f.advice:
            print(printable(f"      {'':{width}}  -> {f.advice}"))


def machine() -> Iterator[Finding]:
    """Python, cores, memory, disk and shared memory."""
    advice, old = "use Python 3.11 or newer", sys.version_info < (3, 11)
    yield judged("Python", platform.python_version(), old, advice, "fail")
    yield Finding("CPU cores", "ok", str(n_cores()))
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # not on macOS
        lines = meminfo.read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in lines}
        free = f"{sizes['MemAvailable']:.0f} of {sizes['MemTotal']:.0f} GiB free"
        yield Finding("memory", "ok", free)
    free = shutil.disk_usage(Path()).free / 2**30
    yield judged(
        "disk here", f"{free:.0f} GiB free", free < 1, "give --output-dir a place with more"
    )
    if Path("/dev/shm").exists():
        shared = shutil.disk_usage("/dev/shm").total / 2**30
        advice = "start the container with --ipc=host or --shm-size=16g"
        yield judged("shared memory", f"{shared:.1f} GiB", shared < 1, advice)


def formats() -> Finding:
    """Whether this CPU has instructions for bf16."""
    if cpu_multiplies("bf16"):
        return Finding("bf16", "ok", "the CPU has instructions for it")
    return Finding(
        "bf16", "warn", SLOW_FORMAT, "nothing to do: --amp auto, the default, takes fp32"
    )


def drivers(kind: str) -> list[Finding]:
    """The driver, its GPUs, and the processes that hold their memory."""
    if kind == "cpu":
        text = "no GPU driver; use small models on the CPU"
        return [Finding("GPU driver", "warn", text, "in a container: docker run --gpus all ...")]
    tool = "nvidia-smi" if kind == "nvidia" else "rocm-smi"
    if kind == "amd" and shutil.which(tool) is None and shutil.which("amd-smi"):
        return [Finding("GPU driver", "ok", "there is one; amd-smi monitor shows its GPUs")]
    if shutil.which(tool) is None:
        advice = f"put {tool} on PATH, or start the container with the GPUs' tools"
        return [Finding("GPU driver", "warn", f"there is one, but no {tool}", advice)]
    return list(nvidia() if kind == "nvidia" else amd())


def nvidia() -> Iterator[Finding]:
    """Findings from nvidia-smi."""
    text = output_of("nvidia-smi", "--query-gpu=index,uuid,name,driver_version,memory.used,memory.total",
                   "--format=csv,noheader,nounits")  # fmt: skip
    if text is None:
        advice = "sudo dmesg | grep -i nvrm; a reboot after a driver update often helps"
        yield Finding("GPU driver", "fail", "nvidia-smi fails", advice)
        return
    holders = output_of("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
                      "--format=csv,noheader,nounits") or ""  # fmt: skip
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 6:
            advice = "nvidia-smi says more; is the GPU visible in this container?"
            yield Finding("GPU driver", "fail", f"nvidia-smi: {line.strip()}", advice)
            return
        index, uuid, name, driver, used, total = parts
        yield Finding(f"GPU {index}", "ok", f"{name}, driver {driver}, {total} MiB")
        in_use, held = f"GPU {index} is in use", f"{used} of {total} MiB held"
        mine = [p for p in holders.splitlines() if p.startswith(uuid) and p.count(",") >= 3]
        if not mine and _mib(used) * 2**20 > 1024:
            advice = "a process that is not visible from here, perhaps of another container"
            yield Finding(in_use, "warn", held, advice)
        for process in mine:
            _, pid, command, memory = (part.strip() for part in process.split(",", 3))
            text = f"{held}, {memory} MiB by process {pid} ({command})"
            yield Finding(in_use, "warn", text, f"if it is yours and not wanted: kill {pid}")
    yield from nvidia_health()


# Queries of nvidia-smi on a GPU's state.
HEALTH = (
    "index power.limit power.default_limit pcie.link.width.current pcie.link.width.max "
    "ecc.errors.uncorrected.volatile.total clocks.applications.graphics clocks.max.graphics"
).split()
REMAPPED = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")
# The oldest drivers for a CUDA version (CUDA Toolkit release notes, minor version compatibility).
OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}


def nvidia_health() -> Iterator[Finding]:
    """Power limits, PCIe links, memory errors and clocks of NVIDIA GPUs that are not right."""
    form = "--format=csv,noheader,nounits"
    for row in _table("nvidia-smi", f"--query-gpu={','.join(HEALTH)}", form, columns=HEALTH):
        gpu, value = f"GPU {row['index']}", {k: _number(v) for k, v in row.items()}
        limit, usual = value["power.limit"], value["power.default_limit"]
        if limit and usual and limit < 0.98 * usual:
            advice = f"sudo nvidia-smi -i {row['index']} -pl {usual:.0f}"
            found = f"{limit:.0f} W, and the default is {usual:.0f} W"
            yield Finding(f"{gpu}: power limit", "warn", found, advice)
        width, widest = value["pcie.link.width.current"], value["pcie.link.width.max"]
        if width and widest and width < widest:
            advice = "reseat the card, or check the slot and riser; copies to the host are slower"
            found = f"{width:.0f} of {widest:.0f} lanes"
            yield Finding(f"{gpu}: PCIe", "warn", found, advice)
        if errors := value["ecc.errors.uncorrected.volatile.total"]:
            advice = "reset the GPU when it is idle; replace it if they come back"
            found = f"{errors:.0f} uncorrected since the driver was loaded"
            yield Finding(f"{gpu}: memory errors", "fail", found, advice)
        clock, highest = value["clocks.applications.graphics"], value["clocks.max.graphics"]
        if clock and highest and clock < 0.8 * highest:
            advice = f"sudo nvidia-smi -i {row['index']} -rac, and -rgc"
            found = f"applications run at {clock:.0f} of {highest:.0f} MHz"
            yield Finding(f"{gpu}: clocks", "warn", found, advice)
    rows = _table(
        "nvidia-smi", f"--query-remapped-rows={','.join(REMAPPED)}", form, columns=REMAPPED
    )
    for number, row in enumerate(rows):
        for kind, advice in (
            ("pending", "reset the GPU when it is idle, so that the remapping takes effect"),
            ("failure", "no spare rows are left: replace the GPU"),
        ):
            if row[f"remapped_rows.{kind}"] not in ("0", "No", "[N/A]", "N/A"):
                state = "fail" if kind == "failure" else "warn"
                yield Finding(f"GPU {number}: remapped memory rows", state, kind, advice)


# GB/s of a lane in one direction, by generation (PCI-SIG's transfer rates and encodings).
LANES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


def pcie_gb_per_s(index: int) -> float | None:
    """The rate of an NVIDIA GPU's PCIe link in one direction; None where nvidia-smi does not tell."""
    columns = ("pcie.link.gen.max", "pcie.link.width.current")
    form = ("-i", str(index), "--format=csv,noheader,nounits")
    for row in _table("nvidia-smi", f"--query-gpu={','.join(columns)}", *form, columns=columns):
        generation, width = (_number(row[name]) for name in columns)
        if generation and width and int(generation) in LANES:
            return LANES[int(generation)] * width
    return None


def _table(*command: str, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Rows of a tool's CSV by their columns; none where it has not all of them."""
    for line in (output_of(*command) or "").splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(columns):
            yield dict(zip(columns, values, strict=True))


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text) else None


def amd() -> Iterator[Finding]:
    """Findings from rocm-smi."""
    options = "--showproductname --showdriverversion --showmeminfo vram --json"
    text = output_of("rocm-smi", *options.split()) or ""
    try:
        cards = parse_json(text[text.index("{") :])  # warnings may come before it
        cards = {card: values for card, values in cards.items() if isinstance(values, dict)}
    except ValueError:
        advice = "sudo dmesg | grep -i amdgpu; is the user in the groups video and render?"
        yield Finding("GPU driver", "fail", "rocm-smi fails", advice)
        return
    driver = next((c.get("Driver version") for c in cards.values() if "Driver version" in c), "?")
    for card, values in cards.items():
        if not card.startswith("card"):
            continue
        name = values.get("Card Series") or values.get("Card series") or "AMD GPU"
        total, used = (_mib(values.get(f"VRAM Total {of} (B)")) for of in ("Memory", "Used Memory"))
        yield Finding(card, "ok", f"{name}, driver {driver}, {total:.0f} MiB")
        if used > 1024:
            advice = "rocm-smi --showpids names who holds it"
            yield Finding(f"{card} is in use", "warn", f"{used:.0f} MiB held", advice)


def libraries(kind: str) -> Iterator[Finding]:
    """Installed libraries, and the purpose of each missing one."""
    for line in NEEDED.strip().splitlines():
        name, purpose, advice = how_to_install(line.removeprefix("*")).split(" | ")
        if (name == "amdsmi" and kind != "amd") or (name == "nvidia-ml-py" and kind != "nvidia"):
            continue
        if name == "transformer-engine" and kind == "amd":
            advice = "ROCm's image (rocm/primus), or github.com/ROCm/TransformerEngine"
        version = installed_version(name)
        text = version or f"not installed; needed for {purpose}"
        wrong, state = version is None, "fail" if line.startswith("*") else "warn"
        numbers = [int(n) for n in re.findall(r"\d+", version or "")[:2]]
        if name == "torch" and version and numbers < OLDEST_TORCH:
            text, wrong = f"{version}, older than {'.'.join(map(str, OLDEST_TORCH))}", True
        yield judged(name, text, wrong, advice, state)


def _mib(size: object) -> float:
    """Bytes as text in MiB; 0 for what is not a number."""
    return int(size) / 2**20 if isinstance(size, str) and re.fullmatch(r"\d{1,19}", size) else 0.0


def compiler() -> Finding:
    """Compilers for --pt-compile: C++ on a CPU; C, with Python's headers, on a GPU."""
    # On Linux Inductor takes only g++, and Triton gcc or clang, unless CXX or CC names another.
    cxx = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    name = cxx if shutil.which(cxx) else None
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    plain = next((n for n in names if shutil.which(n)), None)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    lacking = [] if name and plain else ["a C and C++ compiler"]
    lacking += [] if headers.exists() else [f"Python's headers ({headers})"]
    text = f"{name}, {plain}, Python's headers"
    if lacking:
        text = f"no {' and no '.join(lacking)}; needed for --pt-compile"
    return judged("compiler", text, bool(lacking), "apt install build-essential python3-dev")


def torch_sees(kind: str) -> Iterator[Finding]:
    """Whether PyTorch sees the GPUs that the driver has; asked in another process."""
    if importlib.util.find_spec("torch") is None:
        return
    code = (
        "import torch, json; print(json.dumps([torch.__version__, torch.version.cuda, torch.version.hip,"
        " torch.cuda.device_count(), torch.distributed.is_nccl_available()]))"
    )
    text = output_of(sys.executable, "-c", code)
    if text is None:
        advice = "python -c 'import torch' shows why"
        yield Finding("PyTorch", "fail", "import torch fails", advice)
        return
    version, cuda, hip, n, nccl = json.loads(text.splitlines()[-1])
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    yield Finding("PyTorch", "ok", f"{version}, {built}, sees {n} GPUs")
    if kind != "cpu" and not n:
        advice = "install the build for this GPU (pytorch.org), or check CUDA_VISIBLE_DEVICES"
        yield Finding("PyTorch and the driver", "fail", f"{kind} driver, but {built}", advice)
    number = re.match(
        r"\d+", output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
    )
    oldest = OLDEST_DRIVERS.get(str(cuda).partition(".")[0], 0) if kind == "nvidia" else 0
    if number and int(number[0]) < oldest:
        advice = f"update the driver to {oldest} or newer, or install PyTorch for an older CUDA"
        yield Finding("old driver", "fail", f"{number[0]}; PyTorch has CUDA {cuda}", advice)
    if n and not nccl:
        yield Finding("NCCL / RCCL", "fail", "not in this PyTorch", "install the full build")


# Values of variables that hide GPUs or slow a run down.
SLOW = "CUDA_LAUNCH_BLOCKING NCCL_P2P_DISABLE NCCL_IB_DISABLE TORCHDYNAMO_DISABLE"
BAD_VALUES = dict.fromkeys(SLOW.split(), "1") | {"CUDA_VISIBLE_DEVICES": ""}


def settings() -> Iterator[Finding]:
    """Such variables, and AMD's NUMA balancing."""
    for name, bad in BAD_VALUES.items():
        if os.environ.get(name) == bad:
            advice = f"unset {name}, unless you mean it"
            yield Finding(name, "warn", f"is {bad or 'empty'}", advice)
    balancing = Path("/proc/sys/kernel/numa_balancing")
    if detect_platform() == "amd" and balancing.exists() and balancing.read_text().strip() != "0":
        advice = "sudo sysctl kernel.numa_balancing=0"
        yield Finding("NUMA balancing", "warn", "is on, which stalls AMD GPUs", advice)


NODES = Path("/sys/devices/system/node")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def placement(nodes: Path = NODES, cpu_max: Path = CPU_MAX) -> Iterator[Finding]:
    """Cores of several NUMA nodes, and a container's quota of CPU time."""
    mine, across = _own_cores(), 0
    for file in sorted(nodes.glob("node[0-9]*/cpulist")):
        across += bool(mine & _numbers(file.read_text(encoding="ascii")))
    if across > 1:
        advice = "bind each rank to one node: torchrun --numa-binding node, or numactl -N 0 -m 0"
        yield Finding("NUMA nodes", "warn", f"this process may run on {across}", advice)
    quota = cpu_max.read_text(encoding="ascii").split() if cpu_max.exists() else ["max"]
    if quota[0] != "max" and (cores := int(quota[0]) / int(quota[1])) < n_cores():
        found = f"{cores:.1f} cores' time for {n_cores()} cores"
        yield Finding(
            "CPU quota", "warn", found, "raise the container's --cpus, or bind it to cores"
        )


def _own_cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


# Parts of a window or of a rate from which check.py reports them.
THROTTLED_CPU, SLOW_COPY = 0.02, 0.6


def of_remarks(remarks: Iterable["Remark"], where: str) -> Iterator[Finding]:
    """What held a measured run back, or a device in other work: information with an advice too."""
    for remark in remarks:
        if remark.kind != "information" or remark.advice:
            yield Finding(f"{where}: {remark.kind}", "warn", remark.text, remark.advice)


def of_rates(rates: Mapping[str, float]) -> Iterator[Finding]:
    """What the rates of check/probe.py show besides their sizes."""
    if (part := rates.get("throttled_cpu", 0.0)) > THROTTLED_CPU:
        advice = "raise the container's --cpus, or its CPU limit in Kubernetes"
        found = f"the container's quota stopped this process for {part:.0%} of the time"
        yield Finding("throttled CPU", "warn", found, advice)
    link = rates.get("link_gb_per_s")
    for name in ("host to device", "device to host"):
        rate = rates.get(name)
        if rate and link and rate < SLOW_COPY * link:
            advice = (
                "check the slot, the NUMA node of this process, and the virtual machine's IOMMU"
            )
            found = f"{rate:.1f} GB/s; its PCIe link has {link:.1f}"
            yield Finding(f"copies {name}", "warn", found, advice)
