"""What is wrong with a machine, in words with cause and cure. Needs nothing but Python.

`of_machine` looks at what is there. `of_remarks` and `of_rates` judge what check.py measured.
"""

import dataclasses
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
from llm_train_bench.base.machine import detect_platform, installed_version, n_cores, output_of


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `ok`, `warn` (something is slower or absent) or `fail`."""

    what: str
    state: str
    found: str
    advice: str = ""
    optional: bool = False
    """Whether only a feature is absent: nothing is slower without it."""


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
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield Finding("memory", "ok", f"{memory:.0f} GiB")
    free = shutil.disk_usage(Path()).free / 2**30
    advice = "give --output-dir a place with more"
    yield judged("disk here", f"{free:.0f} GiB free", free < 1, advice)
    if Path("/dev/shm").exists():
        shared = shutil.disk_usage("/dev/shm").total / 2**30
        advice = "start the container with --ipc=host or --shm-size=16g"
        yield judged("shared memory", f"{shared:.1f} GiB", shared < 1, advice)


def drivers(kind: str) -> Iterator[Finding]:
    """The driver, its GPUs, and the processes that hold their memory."""
    if kind == "cpu":
        text = "no GPU driver; use small models on the CPU"
        advice = "in a container: docker run --gpus all ..."
        yield Finding("GPU driver", "warn", text, advice, optional=True)
    elif kind == "amd":
        advice = "amd-smi monitor shows its GPUs, and rocm-smi --showpids who uses them"
        yield Finding("GPU driver", "ok", "there is one of AMD", advice)
    elif shutil.which("nvidia-smi"):
        yield from nvidia()
    else:
        advice = "put it on PATH, or start the container with the GPUs' tools"
        yield Finding(
            "GPU driver", "warn", "there is one, but no nvidia-smi", advice, optional=True
        )


def nvidia() -> Iterator[Finding]:
    """GPUs by nvidia-smi, and the processes that hold their memory."""
    cards = _smi("gpu", "index uuid name driver_version memory.used memory.total")
    if not cards:
        advice = "sudo dmesg | grep -i nvrm; a reboot after a driver update often helps"
        yield Finding("GPU driver", "fail", "nvidia-smi lists no GPU", advice)
    processes = _smi("compute-apps", "gpu_uuid pid used_memory process_name")
    for card in cards:
        gpu, used, total = f"GPU {card['index']}", card["memory.used"], card["memory.total"]
        found = f"{card['name']}, driver {card['driver_version']}, {total} MiB"
        yield Finding(gpu, "ok", found)
        held = f"{used} of {total} MiB held"
        holders = [p for p in processes if p["gpu_uuid"] == card["uuid"]]
        if not holders and (_number(used) or 0.0) > 1024:
            advice = "a process that is not visible from here, perhaps of another container"
            yield Finding(f"{gpu} is in use", "warn", held, advice)
        for p in holders:
            by = f"{p['used_memory']} MiB by process {p['pid']} ({p['process_name']})"
            advice = f"if it is yours and not wanted: kill {p['pid']}"
            yield Finding(f"{gpu} is in use", "warn", f"{held}, {by}", advice)
    yield from nvidia_health()


# Queries of nvidia-smi on a GPU's state.
HEALTH = (
    "index power.limit power.default_limit pcie.link.width.current pcie.link.width.max "
    "ecc.errors.uncorrected.volatile.total clocks.applications.graphics clocks.max.graphics"
)
# The oldest drivers for a CUDA version (CUDA Toolkit release notes, minor version compatibility).
OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}


def nvidia_health() -> Iterator[Finding]:
    """Power limits, PCIe links, memory errors and clocks of NVIDIA GPUs that are not right."""
    for row in _smi("gpu", HEALTH):
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
    rows = _smi("remapped-rows", "remapped_rows.pending remapped_rows.failure")
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
    for row in _smi("gpu", "pcie.link.gen.max pcie.link.width.current", "-i", str(index)):
        generation, width = map(_number, row.values())
        if generation and width and generation in LANES:
            return LANES[int(generation)] * width
    return None


def _smi(query: str, columns: str, *options: str) -> list[dict[str, str]]:
    """Rows of a query of nvidia-smi by their columns; none where it fails or has not all of them."""
    names = columns.split()
    which = f"--query-{query}={','.join(names)}"
    text = output_of("nvidia-smi", *options, which, "--format=csv,noheader,nounits") or ""
    # The last value may have commas: a process's name.
    rows = (line.split(", ", len(names) - 1) for line in text.splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text) else None


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
        finding = judged(name, text, wrong, advice, state)
        yield dataclasses.replace(finding, optional=finding.state == "warn")


def compiler() -> Finding:
    """Compilers for --pt-compile: C++ on a CPU; C, with Python's headers, on a GPU."""
    # On Linux Inductor takes only g++, and Triton gcc or clang, unless CXX or CC names another.
    cxx = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    cc = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if cxx and cc and headers.exists():
        return Finding("compiler", "ok", f"{cxx}, {cc}, Python's headers")
    text = f"--pt-compile needs C++ ({cxx or 'none'}), C ({cc or 'none'}) and {headers}"
    return Finding("compiler", "warn", text, "apt install build-essential python3-dev")


def torch_sees(kind: str) -> Iterator[Finding]:
    """Whether PyTorch sees the GPUs that the driver has; asked in another process."""
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
        advice = "install the build for this GPU (pytorch.org); check CUDA_VISIBLE_DEVICES"
        if kind == "amd":
            advice += ", and that the user is in the groups video and render"
        yield Finding("PyTorch and the driver", "fail", f"{kind} driver, but {built}", advice)
    oldest = OLDEST_DRIVERS.get(str(cuda).partition(".")[0], 0)
    drivers = [row["driver_version"] for row in _smi("gpu", "driver_version")]
    number = re.match(r"\d+", drivers[0]) if drivers else None
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
    cores = nodes.glob("node[0-9]*/cpu[0-9]*")  # there are none but on Linux
    own = [core for core in cores if int(core.name[3:]) in os.sched_getaffinity(0)]
    across = len({core.parent for core in own})
    if across > 1:
        advice = "bind each rank to one node: torchrun --numa-binding node, or numactl -N 0 -m 0"
        yield Finding("NUMA nodes", "warn", f"this process may run on {across}", advice)
    quota = cpu_max.read_text(encoding="ascii").split() if cpu_max.exists() else ["max"]
    if quota[0] != "max" and (cores := int(quota[0]) / int(quota[1])) < n_cores():
        found = f"{cores:.1f} cores' time for {n_cores()} cores"
        advice = "raise the container's --cpus or its CPU limit, or bind it to cores"
        yield Finding("CPU quota", "warn", found, advice)


# Copies below this part of their link's rate are reported.
SLOW_COPY = 0.6


def of_remarks(remarks: Iterable["Remark"], where: str) -> Iterator[Finding]:
    """What held a measured run back, or a device in other work: information with an advice too."""
    for remark in remarks:
        if remark.kind != "information" or remark.advice:
            yield Finding(f"{where}: {remark.kind}", "warn", remark.text, remark.advice)


def of_rates(rates: Mapping[str, float]) -> Iterator[Finding]:
    """What the rates of check/probe.py show besides their sizes."""
    link = rates.get("link_gb_per_s")
    for name in ("host to device", "device to host"):
        rate = rates.get(name)
        if rate and link and rate < SLOW_COPY * link:
            advice = "check the slot, this process's NUMA node, and a virtual machine's IOMMU"
            found = f"{rate:.1f} GB/s; its PCIe link has {link:.1f}"
            yield Finding(f"copies {name}", "warn", found, advice)
