"""Choose the constants of the speed model only from the fitting rows of benchmarks/published.

    python benchmarks/fit_estimate.py [--write]

A constant of all devices lies in a physical range. Matmuls and attention have a level: that of their
architecture times that of the device. A trainer has one too, of all rates but the host's: its own, times
its own on the architecture. All are drawn towards 1 as far as rows do not say otherwise (a Gaussian
prior on logarithms). A row counts by the logarithm of Student's t, so that one whose source leaves
something out decides little. Rows with a doubt, and several of one source, count less. Rows with `split:
hold`, and those marked `incomplete`, are never read. `--write` puts the values into
configs/hardware.json and configs/trainers.json. Needs numpy, no torch and no GPU.
"""

import argparse
import collections
import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.estimate_vs_published import predicted, published_rows, step_of
from llm_train_bench.base.hardware import HARDWARE_FILE, Hardware, family_of
from llm_train_bench.estimate.trainers import TRAINERS_FILE
from llm_train_bench.formulas.work import Work

# Where constants start, and their ranges; and the spread of levels, of rows and of sources (of
# logarithms). All were chosen beforehand. `launch_grace_s` is `launch_eager_s` of devices with that CPU.
# Bandwidth: copies reach 79 % on an MI300X (ROCm's acceptance), 92 % on H200 and B200 (NVIDIA/cccl).
# Beside collectives: 19 % slower in the mean, 40 % at most (arXiv 2507.03114); 1.4, 3 bytes on an H100.
RANGES = {
    "bandwidth": (0.85, 0.79, 0.92),
    "kernels_te": (140.0, 40, 400),
    "kernels_te_low": (200.0, 40, 600),
    "kernels_fused": (290.0, 20, 600),
    "kernels_modules": (830.0, 100, 1000),
    "kernels_expert": (20.0, 2, 200),
    "kernels_expert_low": (90.0, 2, 200),
    "launch_grace_s": (3.5e-5, 1.7e-5, 6e-5),
    "all_to_all": (0.7, 0.3, 0.95),
    "network": (0.9, 0.6, 0.95),
    "slowest_node": (0.01, 0.003, 0.02),
    "beside_communication": (0.03, 0.005, 0.05),
    "beside_bytes": (1.4, 0.5, 3.0),
}
# A wide level is that of an architecture on which several trainers ran; elsewhere nobody knows whether
# device or trainer is slow, and it is the trainer's. Leaving out projects of fitting rows chose NARROW
# and DOUBT, what a row with a doubt is worth.
WIDE, NARROW, SEVERAL = 0.3, 0.12, 2
ROW, SOURCE, DOUBT = 0.10, 0.09, 0.3
GRACE = ("GB", "GH")
# Factor that shows a slope. Values are rounded to so many digits, so that another machine finds the same.
STEP, DIGITS = 1.03, 3


@dataclasses.dataclass(frozen=True)
class Step:
    """A row with its step and device, the names of its levels, and what it is worth."""

    row: dict
    work: Work
    gpu: Hardware
    levels: tuple[str, ...]
    """Of the architecture, the device, the trainer, and the trainer on the architecture."""
    weight: float


def fitting_steps() -> list[Step]:
    rows = [row for row in published_rows("fit") if "incomplete" not in row]
    sources = collections.Counter(row["source"] for row in rows)
    steps = []
    for row in rows:
        work, gpu = step_of(row)
        family, trainer = family_of(gpu.name), f"--trainer {row['trainer'].split()[0]}"
        levels = (f"all {family}", gpu.name, trainer, f"{trainer} on {family}")
        weight = DOUBT if row.get("doubt") else 1.0
        weight /= 1 + (sources[row["source"]] - 1) * (SOURCE / ROW) ** 2
        steps.append(Step(row, work, gpu, levels, weight))
    return steps


def error_of(step: Step, values: dict[str, float]) -> float:
    """The logarithm of a row's estimated speed over its published one."""
    common = {name: values[name] for name in RANGES}
    grace = common.pop("launch_grace_s")
    if step.gpu.name.startswith(GRACE):
        common["launch_eager_s"] = grace
    device, trainer = (math.prod(values[x] for x in step.levels[i : i + 2]) for i in (0, 2))
    gpu = dataclasses.replace(step.gpu, fitted=step.gpu.fitted | common | {"level": device})
    by = dataclasses.replace(step.work.trainer, levels=(("", trainer),))
    speed = predicted(step.row, dataclasses.replace(step.work, trainer=by), gpu)
    return math.log(speed / step.row["tokens_per_sec_per_gpu"])


def errors_of(steps: list[Step], values: dict[str, float]) -> np.ndarray:
    return np.array([error_of(step, values) for step in steps])


def slopes_of(steps: list[Step], values: dict[str, float], errors: np.ndarray) -> np.ndarray:
    """How the logarithm of each value moves each error: a row for each step, a column for each value."""
    slopes = {name: np.zeros(len(steps)) for name in values}
    for name in RANGES:
        moved = errors_of(steps, values | {name: values[name] * STEP})
        slopes[name] = (moved - errors) / math.log(STEP)
    for first in (0, 2):  # both levels of a device have one slope, and so have those of a trainer
        faster = {name: values[name] * STEP for name in {step.levels[first] for step in steps}}
        moved = (errors_of(steps, values | faster) - errors) / math.log(STEP)
        for i, step in enumerate(steps):
            for name in step.levels[first : first + 2]:
                slopes[name][i] = moved[i]
    return np.column_stack(list(slopes.values()))


def spreads_of(steps: list[Step]) -> dict[str, float]:
    """How far each level may lie from 1 [standard deviations of its logarithm]."""
    found = {}
    for family in {step.levels[0] for step in steps}:
        here = [step for step in steps if step.levels[0] == family]
        several = len({step.levels[2] for step in here}) >= SEVERAL
        of_family, of_trainer = (WIDE, NARROW) if several else (NARROW, WIDE)
        for step in here:
            found |= dict(zip(step.levels, (of_family, NARROW, NARROW, of_trainer), strict=True))
    return found


def loss_of(errors: np.ndarray, logs: np.ndarray, weights: np.ndarray, pull: np.ndarray) -> float:
    """Student's logarithm of each error, times what its row is worth, and what levels cost."""
    return float(weights @ np.log1p((errors / ROW) ** 2 / 2) + pull @ logs**2 / 2)


def least(curve: np.ndarray, slope: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where x curve x / 2 + slope x is least within bounds: one coordinate after the other."""
    x = np.zeros(len(slope))
    for _ in range(200):
        for i in range(len(x)):
            x[i] = min(max(x[i] - (slope[i] + curve[i] @ x) / curve[i, i], low[i]), high[i])
    return x


def fit(steps: list[Step], values: dict[str, float], rounds: int = 6) -> dict[str, float]:
    """The values with the least loss, by slopes (Gauss-Newton) and reweighted least squares."""
    names, spreads = list(values), spreads_of(steps)
    weights = np.array([step.weight for step in steps])
    pull = np.array([0.0 if name in RANGES else spreads[name] ** -2 for name in names])
    ends = [RANGES.get(name, (1, 1e-9, 1e9))[1:] for name in names]
    low, high = np.log(ends).T
    logs = np.log([values[name] for name in names])
    at = lambda x: dict(zip(names, np.exp(x), strict=True))  # noqa: E731
    for _ in range(rounds):
        errors = errors_of(steps, at(logs))
        slopes = slopes_of(steps, at(logs), errors)
        move = np.zeros(len(names))
        for _ in range(10):
            worth = weights / (ROW**2 + (errors + slopes @ move) ** 2 / 2)
            curve = slopes.T @ (worth[:, None] * slopes) + np.diag(pull + 1e-6)
            move = least(curve, slopes.T @ (worth * errors) + pull * logs, low - logs, high - logs)
        tries = [logs + part * move for part in (1, 1 / 2, 1 / 4, 1 / 8, 0)]
        logs = min(tries, key=lambda x: loss_of(errors_of(steps, at(x)), x, weights, pull))
    return {name: rounded(value) for name, value in at(logs).items()}


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="Write the values into configs/.")
    args = parser.parse_args()
    steps = fitting_steps()
    starts = {name: start for name, (start, *_) in RANGES.items()}
    values = fit(steps, starts | {name: 1.0 for step in steps for name in step.levels})
    error = np.median(abs(np.expm1(errors_of(steps, values))))
    print(f"{len(steps)} rows, median error {error:.1%}: {json.dumps(values, indent=1)}")
    if args.write:
        for path, changed in ((HARDWARE_FILE, of_devices), (TRAINERS_FILE, of_trainers)):
            path.write_text(changed(path.read_text(encoding="utf-8"), values), encoding="utf-8")


def of_devices(text: str, values: dict[str, float]) -> str:
    """hardware.json with the values in their places, and nothing else changed."""
    for name in RANGES.keys() - {"launch_grace_s"}:
        text, n = re.subn(rf'("{name}"): [\d.e-]+', rf"\1: {values[name]:g}", text, count=1)
        assert n == 1, name
    for device in json.loads(text)["devices"]:
        name = device["name"]
        level = values.get(f"all {family_of(name)}", 1.0) * values.get(name, 1.0)
        fitted = device["fitted"] | {"level": rounded(level)}
        if name.startswith(GRACE):
            fitted["launch_eager_s"] = values["launch_grace_s"]
        start = text.index(f'"name": "{name}"')
        a = text.index('"fitted": ', start)
        text = text[:a] + f'"fitted": {json.dumps(fitted)}' + text[text.index("}", a) + 1 :]
    return text


def of_trainers(text: str, values: dict[str, float]) -> str:
    """trainers.json with the levels of trainers, and nothing else changed."""
    text = re.sub(r'"levels": \{[^}]*\}, ', "", text)
    for name in values:
        if name.startswith("--trainer") and " on " not in name:
            level, who = values[name], name.removeprefix("--trainer ")
            on = {x.split(" on ")[1]: v for x, v in values.items() if x.startswith(f"{name} on ")}
            levels = {"": level} | {family: rounded(level * v) for family, v in on.items()}
            text = text.replace(f'"{who}": {{', f'"{who}": {{"levels": {json.dumps(levels)}, ', 1)
    return text


if __name__ == "__main__":
    main()
