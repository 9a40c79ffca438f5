"""Weak scaling: DDP, FSDP and HSDP on 1, 2 and 4 ranks, each with the same work, beside the estimate.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py [--rounds N]

On a CPU a rank has one thread; benchmarks/gemm.py must have measured it, and benchmarks/collectives.py
--nproc 2 --hardware "NAME, 1 thread" its exchanges. The machine needs as many free cores as ranks.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import device_of_runs, interleave, save
from llm_train_bench.formulas.hardware import find_hardware, threads_of
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.results.result_files import read_result
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.machine import cpu_name
from llm_train_bench.settings.plan import make_plan

ROOT = Path(__file__).parent.parent
CONFIG = [
    "configs/llama-tiny.json",
    "--bsz",
    "4",
    "--seq-len",
    "128",
    "--amp",
    "off",
    "--device",
    "cpu",
]
CASES = {
    "one rank": (Script.ONE, 1, []), "DDP 2": (Script.DDP, 2, []), "DDP 4": (Script.DDP, 4, []),
    "FSDP 2": (Script.FSDP, 2, []), "FSDP 4": (Script.FSDP, 4, []),
    "HSDP 2 x 2": (Script.FSDP, 4, ["--dp-replicate", "2"]),
}  # fmt: skip


def measured(name: str) -> float:
    """Median seconds of a step."""
    script, ranks, flags = CASES[name]
    with tempfile.TemporaryDirectory() as out:
        words = [*CONFIG, *flags, "--n-steps", "15", "--warmup-steps", "3", "--output-dir", out]
        words += ["--nproc", str(ranks)] if ranks > 1 else []
        subprocess.run([sys.executable, script, *words], cwd=ROOT, check=True, capture_output=True)
        (path,) = Path(out).glob("*/result.json")
        return read_result(path).metrics.step_time_median_s


def main() -> None:
    """Measure in turn, estimate, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    times = interleave({name: functools.partial(measured, name) for name in CASES}, args.rounds)
    cpu, rows = find_hardware(threads_of(cpu_name(), 1)), {}
    print(
        "| ranks | step [s]: min, median | of one rank's speed | estimated |\n|---|---:|---:|---:|"
    )
    for name, (script, ranks, flags) in CASES.items():
        work = make_plan(parse_args([*CONFIG, *flags], script), script, ranks, "cpu").work
        estimated = estimate_speed(work, cpu).step_s
        one = rows.get("one rank", {"estimated_s": estimated})["estimated_s"]
        part = statistics.median(a / b for a, b in zip(times["one rank"], times[name], strict=True))
        rows[name] = {"all_s": times[name], "efficiency": part, "estimated_s": estimated,
                      "estimated_efficiency": one / estimated}  # fmt: skip
        print(f"| {name} | {min(times[name]):.3f}, {statistics.median(times[name]):.3f} | {part:.0%} | "
              f"{one / estimated:.0%} |")  # fmt: skip
    save(
        "scaling",
        {"about": "weak scaling, llama-tiny, a thread a rank", "rows": rows},
        device_of_runs(),
    )


if __name__ == "__main__":
    main()
