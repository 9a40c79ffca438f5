"""Is this machine ready? Drivers, GPUs, processes that use them, libraries, and commands to fix it.

    python doctor.py

It changes nothing, and ends no process. The exit code is 1 if something required is missing.
It needs no library, because it must report missing ones.
"""

import dataclasses
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import llm_train_bench.base.start  # noqa: F401

from llm_train_bench.base.errors import printable
from llm_train_bench.base.files import how_to_install
from llm_train_bench.base.machine import detect_platform, installed_version, n_cores
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.model.json_keys import parse_json
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import flag


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing looked at: `ok`, `missing` (a feature is not there) or `bad` (nothing will run)."""

    what: str
    state: str
    found: str
    advice: str = ""


def judged(what: str, found: str, wrong: bool, advice: str, state: str = "missing") -> Finding:
    """A finding that is `ok`, or else has this state and advice."""
    return Finding(what, state, found, advice) if wrong else Finding(what, "ok", found)


OLDEST_TORCH = [2, 11]  # as in pyproject.toml
# Distribution, purpose, how to get it; nothing runs without those marked *.
LIBRARIES = """
*torch | training | pip install -e .
*pydantic | result files | pip install -e .
*numpy | token files and statistics | pip install -e .
*rich | tables and progress | pip install -e .
*PyYAML | experiment files | pip install -e .
*tensorboard | TensorBoard files | pip install -e .
*safetensors | Hugging Face weights | pip install -e .
tokenizers | prepare_data.py --tokenizer | pip install -e .
torchao | --fp8-backend torchao | pip install -e '.[fp8]'
transformer-engine | --fp8-backend te | NGC's image, or pip install --no-build-isolation -e '.[te]'
nvidia-ml-py | energy and clocks on NVIDIA | pip install -e '.[energy]'
amdsmi | energy and clocks on AMD | pip install ${ROCM_PATH:-/opt/rocm}/share/amd_smi
"""


@dataclasses.dataclass(frozen=True)
class DoctorArgs:
    """Report what this machine has, what each feature still needs, and how to install it.

    json: Print JSON instead of a table.
    """

    json: bool = flag(False)


@tool("doctor.py")
def main(argv: Sequence[str]) -> int:
    """Look at everything, print it, and return the exit code."""
    args = parse_dataclass(DoctorArgs, argv, "doctor.py")
    kind = detect_platform()
    parts = machine(), drivers(kind), libraries(kind), [compiler()], torch_sees(kind), settings()
    findings = list(itertools.chain(*parts))
    if args.json:
        print(json.dumps([dataclasses.asdict(f) for f in findings], indent=1))
    else:
        show(findings)
    return 1 if any(f.state == "bad" for f in findings) else 0


def show(findings: list[Finding]) -> None:
    """Print a table; the advice on a finding has a separate line."""
    signs = {"ok": "ok", "missing": "--", "bad": "!!"}
    width = max(len(f.what) for f in findings)
    for f in findings:
        print(printable(f"{signs[f.state]}  {f.what:{width}}  {f.found}"))
        if f.advice:
            print(printable(f"    {'':{width}}  -> {f.advice}"))


def machine() -> Iterator[Finding]:
    """Python, cores, memory, disk and shared memory."""
    advice, old = "use Python 3.11 or newer", sys.version_info < (3, 11)
    yield judged("Python", platform.python_version(), old, advice, "bad")
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


def drivers(kind: str) -> list[Finding]:
    """The driver, its GPUs, and the processes that hold their memory."""
    if kind == "cpu":
        text = "no driver of NVIDIA or AMD: everything runs on the CPU, smaller"
        return [Finding("GPU driver", "missing", text, "in a container: docker run --gpus all ...")]
    tool = "nvidia-smi" if kind == "nvidia" else "rocm-smi"
    if kind == "amd" and shutil.which(tool) is None and shutil.which("amd-smi"):
        return [Finding("GPU driver", "ok", "there is one; amd-smi monitor shows its GPUs")]
    if shutil.which(tool) is None:
        advice = f"put {tool} on PATH, or start the container with the GPUs' tools"
        return [Finding("GPU driver", "missing", f"there is one, but no {tool}", advice)]
    return list(nvidia() if kind == "nvidia" else amd())


def nvidia() -> Iterator[Finding]:
    """Findings from nvidia-smi."""
    text = _output("nvidia-smi", "--query-gpu=index,uuid,name,driver_version,memory.used,memory.total",
                   "--format=csv,noheader,nounits")  # fmt: skip
    if text is None:
        advice = "sudo dmesg | grep -i nvrm; a reboot after a driver update often helps"
        yield Finding("GPU driver", "bad", "nvidia-smi fails", advice)
        return
    holders = _output("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
                      "--format=csv,noheader,nounits") or ""  # fmt: skip
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 6:
            advice = "nvidia-smi says more; is the GPU visible in this container?"
            yield Finding("GPU driver", "bad", f"nvidia-smi: {line.strip()}", advice)
            return
        index, uuid, name, driver, used, total = parts
        yield Finding(f"GPU {index}", "ok", f"{name}, driver {driver}, {total} MiB")
        in_use, held = f"GPU {index} is in use", f"{used} of {total} MiB held"
        mine = [p for p in holders.splitlines() if p.startswith(uuid) and p.count(",") >= 3]
        if not mine and _mib(used) * 2**20 > 1024:
            advice = "a process that is not visible from here, perhaps of another container"
            yield Finding(in_use, "missing", held, advice)
        for process in mine:
            _, pid, command, memory = (part.strip() for part in process.split(",", 3))
            text = f"{held}, {memory} MiB by process {pid} ({command})"
            yield Finding(in_use, "missing", text, f"if it is yours and not wanted: kill {pid}")


def amd() -> Iterator[Finding]:
    """Findings from rocm-smi."""
    options = "--showproductname --showdriverversion --showmeminfo vram --json"
    text = _output("rocm-smi", *options.split()) or ""
    try:
        cards = parse_json(text[text.index("{") :])  # warnings may come before it
        cards = {card: values for card, values in cards.items() if isinstance(values, dict)}
    except ValueError:
        advice = "sudo dmesg | grep -i amdgpu; is the user in the groups video and render?"
        yield Finding("GPU driver", "bad", "rocm-smi fails", advice)
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
            yield Finding(f"{card} is in use", "missing", f"{used:.0f} MiB held", advice)


def libraries(kind: str) -> Iterator[Finding]:
    """Installed libraries, and the purpose of each missing one."""
    for line in LIBRARIES.strip().splitlines():
        name, purpose, advice = how_to_install(line.removeprefix("*")).split(" | ")
        if (name == "amdsmi" and kind != "amd") or (name == "nvidia-ml-py" and kind != "nvidia"):
            continue
        if name == "transformer-engine" and kind == "amd":
            advice = "ROCm's image (rocm/primus), or github.com/ROCm/TransformerEngine"
        version = installed_version(name)
        text = version or f"not installed; needed for {purpose}"
        wrong, state = version is None, "bad" if line.startswith("*") else "missing"
        numbers = [int(n) for n in re.findall(r"\d+", version or "")[:2]]
        if name == "torch" and version and numbers < OLDEST_TORCH:
            text, wrong = f"{version}, older than {'.'.join(map(str, OLDEST_TORCH))}", True
        yield judged(name, text, wrong, advice, state)


def _mib(size: object) -> float:
    """Bytes as text in MiB; 0 for what is no number."""
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
    text = _output(sys.executable, "-c", code)
    if text is None:
        advice = "python -c 'import torch' shows why"
        yield Finding("PyTorch", "bad", "import torch fails", advice)
        return
    version, cuda, hip, n, nccl = json.loads(text.splitlines()[-1])
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    yield Finding("PyTorch", "ok", f"{version}, {built}, sees {n} GPUs")
    if kind != "cpu" and not n:
        advice = "install the build for this GPU (pytorch.org), or check CUDA_VISIBLE_DEVICES"
        yield Finding("PyTorch and the driver", "bad", f"{kind} driver, but {built}", advice)
    if n and not nccl:
        yield Finding("NCCL / RCCL", "bad", "not in this PyTorch", "install the full build")


# Values of variables that hide GPUs or slow a run down.
SLOW = "CUDA_LAUNCH_BLOCKING NCCL_P2P_DISABLE NCCL_IB_DISABLE TORCHDYNAMO_DISABLE"
BAD_VALUES = dict.fromkeys(SLOW.split(), "1") | {"CUDA_VISIBLE_DEVICES": ""}


def settings() -> Iterator[Finding]:
    """Such variables, and AMD's NUMA balancing."""
    for name, bad in BAD_VALUES.items():
        if os.environ.get(name) == bad:
            advice = f"unset {name}, unless you mean it"
            yield Finding(name, "missing", f"is {bad or 'empty'}", advice)
    balancing = Path("/proc/sys/kernel/numa_balancing")
    if detect_platform() == "amd" and balancing.exists() and balancing.read_text().strip() != "0":
        advice = "sudo sysctl kernel.numa_balancing=0"
        yield Finding("NUMA balancing", "missing", "is on, which stalls AMD GPUs", advice)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    run_tool(main)
