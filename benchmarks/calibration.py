"""`estimate.py --calibrate`: one measured run of this machine, and how well others are then predicted.

    python benchmarks/calibration.py [--rounds N]

Settings of llama-tiny run in turn. The first one's median step calibrates the estimate; the others' are
held against it. On a CPU benchmarks/gemm.py must have measured it. The exit code is 1 where a setting of
that model is more than 10 % off.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import device_of_runs, interleave, run_train_apart, save
from estimate import speed_factor
from llm_train_bench.formulas.hardware import find_cpu, scaled
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.machine import cpu_name
from llm_train_bench.settings.plan import make_plan

LIMIT = 0.1
TINY = "configs/llama-tiny.json"
CASES = {
    "--bsz 8 --seq-len 256": TINY,
    "--bsz 2 --seq-len 256": TINY,
    "--bsz 16 --seq-len 256": TINY,
    "--bsz 8 --seq-len 512": TINY,
    "--bsz 8 --seq-len 128": TINY,
    "--bsz 8 --seq-len 256 --sac-freq 1/1": TINY,
    "--bsz 4 --seq-len 256 --grad-acc-steps 2": TINY,
    "--bsz 8 --seq-len 256 --pass-type forward": TINY,
    "--bsz 4 --seq-len 256 --optimizer sgd": TINY,
    "--bsz 16 --seq-len 256 (gpt2-tiny)": "configs/gpt2-tiny.json",
}


def argv_of(name: str) -> list[str]:
    """A case's command line."""
    return [CASES[name], *name.partition(" (")[0].split(), "--amp", "off", "--device", "cpu"]


def measured(name: str) -> float:
    """Median seconds of a step of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        argv = [*argv_of(name), "--n-steps", "8", "--warmup-steps", "2", "--output-dir", out]
        return run_train_apart(*argv).metrics.step_time_median_s


def main() -> int:
    """Measure, calibrate, compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    contestants = {name: (lambda name=name: measured(name)) for name in CASES}
    times = {n: statistics.median(t) for n, t in interleave(contestants, args.rounds).items()}
    cpu = find_cpu(cpu_name(), 1)

    def estimated(name: str, factor: float) -> float:
        work = make_plan(parse_args(argv_of(name), "train.py"), Script.ONE, 1, "cpu").work
        return estimate_speed(work, scaled(cpu, factor, factor)).step_s

    first, *others = CASES
    work = make_plan(parse_args(argv_of(first), "train.py"), Script.ONE, 1, "cpu").work
    factor = speed_factor(work, cpu, 8, times[first])
    print(
        f"| setting | measured [s] | predicted | error |\n|---|---:|---:|---:|\nfactor {factor:.3f}"
    )
    rows, late = {}, False
    for name in others:
        seconds = estimated(name, factor)
        error = seconds / times[name] - 1
        rows[name] = {"measured_s": times[name], "predicted_s": seconds, "error": error}
        late |= abs(error) > LIMIT and CASES[name] == TINY
        print(f"| {name} | {times[name]:.4f} | {seconds:.4f} | {error:+.1%} |")
    content = {"about": "one run calibrates", "by": first, "factor": factor, "rows": rows}
    save("calibration", json.loads(json.dumps(content)), device_of_runs())
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
