"""`estimate.py --calibrate`: one measured run of this machine, and how well others are then predicted.

    python benchmarks/calibration.py [--rounds N]

Settings of llama-tiny run in turn. The first one's median step calibrates the estimate; the others' are
held against it. On a CPU benchmarks/gemm.py must have measured it. The exit code is 1 where a setting of
that model is more than 10 % off.
"""

import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import interleave, median_step, parser_of, save, show, work_of
from llm_train_bench.base.hardware import find_cpu, scaled
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.estimate.predict import speed_factor
from llm_train_bench.formulas.speed_model import estimate_speed

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
    return [CASES[name], *name.partition(" (")[0].split(), "--amp", "off", "--device", "cpu"]


def main() -> int:
    args = parser_of(__doc__, 3).parse_args()
    steps = ["--n-steps", "8", "--warmup-steps", "2"]
    contestants = {name: functools.partial(median_step, *argv_of(name), *steps) for name in CASES}
    times = {n: statistics.median(t) for n, t in interleave(contestants, args.rounds).items()}
    first, *others = CASES
    if first not in times:
        return 1  # its error is on the screen
    cpu, rows, cells = find_cpu(cpu_name(), 1), {}, []
    factor = speed_factor(work_of(argv_of(first)), cpu, times[first])
    late = False
    for name in filter(times.__contains__, others):
        seconds = estimate_speed(work_of(argv_of(name)), scaled(cpu, factor, factor)).step_s
        error = seconds / times[name] - 1
        rows[name] = {"measured_s": times[name], "predicted_s": seconds, "error": error}
        cells.append((name, f"{times[name]:.4f}", f"{seconds:.4f}", f"{error:+.1%}"))
        late |= abs(error) > LIMIT and CASES[name] == TINY
    print(f"factor {factor:.3f}, by {first}")
    show(("setting", "measured [s]", "predicted", "error"), cells)
    content = {"about": "one run calibrates", "by": first, "factor": factor, "rows": rows}
    save("calibration", content, torch.device("cpu"))
    return int(late or len(times) < len(CASES))


if __name__ == "__main__":
    sys.exit(main())
