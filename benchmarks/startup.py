"""How long scripts and tools take before they do anything, in turn, as processes of their own.

    python benchmarks/startup.py [--rounds N]

Wanted on two cores: --help of a training script below 0.5 s, of a tool below 0.4 s, the first step of
gpt2-tiny below 6 s from the prompt. The exit code is 1 where a minimum is above that.
"""

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import device_of_runs, interleave, save

ROOT = Path(__file__).parent.parent
SCRIPTS = ("train.py", "train_ddp.py", "train_fsdp.py", "train_pp.py")
TOOLS = ("estimate.py", "sweep.py", "compare.py", "doctor.py", "trace_report.py", "prepare_data.py")
TINY = [
    "configs/gpt2-tiny.json",
    "--bsz",
    "1",
    "--seq-len",
    "64",
    "--n-steps",
    "1",
    "--warmup-steps",
    "0",
]


def whole(*words: str) -> float:
    """Seconds of a process until it has ended."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def first_step() -> float:
    """Seconds until train.py says that its first step is done."""
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        command = [sys.executable, "train.py", *TINY, "--output-dir", out]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout:
                if line.startswith("step 1/"):
                    took = time.perf_counter() - start
        assert process.returncode == 0
    return took


def main() -> int:
    """Measure, print, keep; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    contestants = {f"{name} --help": functools.partial(whole, name, "--help") for name in SCRIPTS}
    limits = dict.fromkeys(contestants, 0.5)
    for name in TOOLS:
        contestants[f"{name} --help"] = functools.partial(whole, name, "--help")
        limits[f"{name} --help"] = 0.4
    contestants["import torch"] = functools.partial(whole, "-c", "import torch")
    contestants["first step of gpt2-tiny"] = first_step
    limits["first step of gpt2-tiny"] = 6.0
    times = interleave(contestants, args.rounds)
    print("| what | min [s] | median [s] | wanted below |\n|---|---:|---:|---:|")
    rows, late = {}, False
    for name, found in times.items():
        best, middle, limit = min(found), sorted(found)[len(found) // 2], limits.get(name)
        rows[name] = {"min_s": best, "median_s": middle, "limit_s": limit, "all_s": found}
        late |= limit is not None and best > limit
        print(f"| {name} | {best:.2f} | {middle:.2f} | {limit or ''} |")
    save("startup", {"about": "seconds from the prompt", "times": rows}, device_of_runs())
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
