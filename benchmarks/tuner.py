"""`sweep.py --tune` against the whole grid, on the machine at hand.

    python benchmarks/tuner.py [--rounds N]

48 settings of llama-tiny: the tuner's winner, then all of them, then the winner and the grid's best
again, in turn. Wanted: the interval of winner / best includes 0.98 or more; else the exit code is 1.
On a CPU benchmarks/gemm.py must have measured it. About half an hour on two cores.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import sweep
from benchmarks.common import parser_of, save
from llm_train_bench.formulas.time_statistics import bootstrap_mean

WANTED = 0.98
GRID = ["bsz=1,2,4,8", "sac-freq=none,1/2,1/1", "amp=off,bf16", "pt-compile=false,true"]
FIXED = ["seq-len=128", "n-steps=10", "warmup-steps=3"]


def swept(directory: Path, *flags: str) -> list[dict]:
    """Sweep, and return its rows, of full and of short runs, that were ok."""
    argv = ["--models", "configs/llama-tiny.json", "--output-dir", str(directory)]
    assert sweep.main([*argv, "--set", *flags]) == 0
    rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]
    return [row for row in rows if row["status"] == "ok"]


def best_of(rows: list[dict]) -> dict:
    """The axes of the setting with the highest mean rate of its full runs."""
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row["repeat"] != "probe":
            rates.setdefault(json.dumps(row["axes"]), []).append(row["tokens_per_sec"])
    return json.loads(max(rates, key=lambda axes: statistics.fmean(rates[axes])))


def main() -> int:
    args = parser_of(__doc__, 7).parse_args()
    with tempfile.TemporaryDirectory() as top:
        tuned = swept(Path(top) / "tuned", *GRID, *FIXED, "--tune")
        grid = swept(Path(top) / "grid", *GRID, *FIXED)
        winner, best = best_of(tuned), best_of(grid)
        rates: dict[str, list[float]] = {"winner": [], "best": []}
        for i in range(args.rounds):
            for name, axes in (("winner", winner), ("best", best)):
                words = [f"{k}={'none' if v is None else str(v).lower()}" for k, v in axes.items()]
                (row,) = swept(Path(top) / f"round{i}-{name}", *words, *FIXED)
                rates[name].append(row["tokens_per_sec"])
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    low, high = bootstrap_mean(ratios) or (ratios[0], ratios[0])
    in_full = len({json.dumps(row["axes"]) for row in tuned if row["repeat"] != "probe"})
    tried = len({json.dumps(row["axes"]) for row in tuned})
    cells = {"cells": 4 * 3 * 2 * 2, "cells_tuner_ran": tried, "cells_in_full": in_full}
    content = {
        "about": "sweep.py --tune and the whole grid: llama-tiny, T 128, 10 steps a run",
        **cells,
        "winner": winner,
        "grid_best": best,
        "tokens_per_sec": rates,
        "ratio": {"mean": statistics.fmean(ratios), "low": low, "high": high},
        "grid": [{"axes": row["axes"], "tokens_per_sec": row["tokens_per_sec"]} for row in grid],
    }
    print(f"winner {winner}, best of the grid {best}: {low:.3f} to {high:.3f}")
    save("tuner", content)
    return 0 if high >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
