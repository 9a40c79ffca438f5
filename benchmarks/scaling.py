"""Weak scaling: DDP, FSDP and HSDP on 1, 2 and 4 ranks, each with the same work, beside the estimate.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py [--rounds N]

On a CPU a rank has one thread; benchmarks/gemm.py must have measured it, and benchmarks/collectives.py
--nproc 2 --hardware "NAME, 1 thread" its exchanges. The machine needs as many free cores as ranks.
"""

import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import interleave, median_step, parser_of, save, show, work_of
from llm_train_bench.base.hardware import find_hardware, threads_of
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.settings.flags import Script

CONFIG = ["configs/llama-tiny.json", *"--bsz 4 --seq-len 128 --amp off --device cpu".split()]
CASES = {"one rank": (Script.ONE, 1, []), "HSDP 2 x 2": (Script.FSDP, 4, ["--dp-replicate", "2"])}
for ranks in (2, 4):
    CASES |= {f"DDP {ranks}": (Script.DDP, ranks, []), f"FSDP {ranks}": (Script.FSDP, ranks, [])}


def measured(name: str) -> float:
    script, ranks, flags = CASES[name]
    words = [*CONFIG, *flags, "--n-steps", 15, "--warmup-steps", 3]
    return median_step(*words, *["--nproc", ranks] * (ranks > 1), script=script)


def main() -> int:
    args = parser_of(__doc__, 3).parse_args()
    times = interleave({name: functools.partial(measured, name) for name in CASES}, args.rounds)
    if "one rank" not in times:
        return 1  # its error is on the screen
    cpu, rows, shown = find_hardware(threads_of(cpu_name(), 1)), {}, []
    expected = {
        name: estimate_speed(work_of([*CONFIG, *flags], script, ranks), cpu).step_s
        for name, (script, ranks, flags) in CASES.items()
    }
    for name, all_s in times.items():
        part = statistics.median(a / b for a, b in zip(times["one rank"], all_s, strict=True))
        estimated = expected["one rank"] / expected[name]
        rows[name] = {"all_s": all_s, "efficiency": part}
        rows[name] |= {"estimated_s": expected[name], "estimated_efficiency": estimated}
        middle = f"{min(all_s):.3f}, {statistics.median(all_s):.3f}"
        shown.append((name, middle, f"{part:.0%}", f"{estimated:.0%}"))
    show(("ranks", "step [s]: min, median", "of one rank's speed", "estimated"), shown)
    about = "weak scaling, llama-tiny, a thread a rank"
    save("scaling", {"about": about, "rows": rows}, torch.device("cpu"))
    return int(len(times) < len(CASES))


if __name__ == "__main__":
    sys.exit(main())
