"""The errors of the gate's answers, by simulation: how often is a loss passed, or no loss called one?

    python benchmarks/gate.py [--trials N]

Runs of a setting differ by normal noise of a given CV. A baseline of some runs and later runs are
drawn, without a loss and with one of 2 % beyond the tolerance, and judged as compare.py judges them.
The exit code is 1 where an answer is wrong more often than docs/COMPARE.md says.
"""

import collections
import itertools
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import parser_of, save, show
from llm_train_bench.compare.gate import answer
from llm_train_bench.formulas.time_statistics import mean_of

TOLERANCE, BEYOND = 0.05, 0.02
NOISES, RUNS = (0.002, 0.005, 0.01, 0.02, 0.03), (1, 3, 5)
ANSWERS = ("ok", "UNCERTAIN", "SLOWER")


def answers(noise: float, before: int, now: int, loss: float, trials: int) -> dict[str, float]:
    """Share of each answer, for baselines of `before` runs and `now` later ones that lost so much."""
    chance = random.Random(f"0 {noise} {before} {now} {loss}")
    counted = collections.Counter()
    for _ in range(trials):
        later = mean_of([(1 - loss) * chance.gauss(1.0, noise) for _ in range(now)])
        baseline = mean_of([chance.gauss(1.0, noise) for _ in range(before)])
        counted[answer(later, baseline, TOLERANCE)] += 1
    return {name: counted[name] / trials for name in ANSWERS}


def faults(row: dict) -> list[str]:
    """The promises that a row of the table breaks."""
    same, lost, found = row["no loss"], row["loss"], []
    if lost["ok"] > 0.01:
        found.append("a loss passes")
    if same["SLOWER"] > 0.01:
        found.append("no loss is called one")
    if row["before"] == row["now"] == 5 and row["noise"] <= 0.01:
        if lost["SLOWER"] < 0.9 or same["ok"] < 0.9:
            found.append("five runs do not tell")
        if max(lost["UNCERTAIN"], same["UNCERTAIN"]) > 0.1:
            found.append("uncertain too often")
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    rows, cells = [], []
    for noise, before, now in itertools.product(NOISES, RUNS, RUNS):
        row = {"noise": noise, "before": before, "now": now}
        row["no loss"] = answers(noise, before, now, 0.0, trials)
        row["loss"] = answers(noise, before, now, TOLERANCE + BEYOND, trials)
        row["faults"] = faults(row)
        rows.append(row)
        shares = (" / ".join(f"{row[k][a]:.1%}" for a in ANSWERS) for k in ("no loss", "loss"))
        cells.append((f"{noise:.1%}", str(before), str(now), *shares, "; ".join(row["faults"])))
    alike = ("no loss: ok / uncertain / slower", "a loss of 7 %: the same", "faults")
    show(("CV", "baseline", "runs", *alike), cells, left=alike)
    content = {"tolerance": TOLERANCE, "loss": TOLERANCE + BEYOND, "trials": trials, "rows": rows}
    save("gate", content, torch.device("cpu"))
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
