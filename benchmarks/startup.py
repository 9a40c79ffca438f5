"""How long scripts and tools take before they do anything, in turn, as processes of their own.

    python benchmarks/startup.py [--rounds N]

Limits on two cores: --help of a training script below 0.5 s, of a tool below 0.4 s where `import torch`
takes 2.3 s, and in proportion elsewhere; the first step of gpt2-tiny below 6 s from the prompt. The exit
code is 1 where a minimum is above that.
"""

import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import ROOT, interleave, parser_of, report

SCRIPTS = ("train.py", "train_ddp.py", "train_fsdp.py", "train_pp.py")
TOOLS = (
    "estimate.py",
    "sweep.py",
    "compare.py",
    "check.py",
    "doctor.py",
    "trace_report.py",
    "prepare_data.py",
)
TINY = "configs/gpt2-tiny.json --bsz 1 --seq-len 64 --n-steps 1 --warmup-steps 0".split()


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
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
            lines = process.stdout or ()
            ends = [time.perf_counter() for line in lines if line.startswith("step 1/")]
        assert process.returncode == 0
    return ends[0] - start


def main() -> int:
    args = parser_of(__doc__, 5).parse_args()
    helps = {f"{name} --help": functools.partial(whole, name, "--help") for name in SCRIPTS + TOOLS}
    torch_alone = functools.partial(whole, "-c", "import torch")
    first = "first step of gpt2-tiny"
    times = interleave(helps | {"import torch": torch_alone, first: first_step}, args.rounds)
    report("startup", times, {}, "from the prompt")
    tools = 0.4 * min(times["import torch"]) / 2.3
    limits = {name: 0.5 if name.split()[0] in SCRIPTS else tools for name in helps} | {first: 6.0}
    late = [n for n, seconds in times.items() if n in limits and min(seconds) > limits[n]]
    for name in late:
        print(f"{name}: above the limit of {limits[name]:.2f} s")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
