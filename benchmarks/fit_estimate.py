"""Choose the constants of the speed model from the fitting rows of benchmarks/published alone.

    python benchmarks/fit_estimate.py [--write]

A constant of all devices lies in a physical range. A device's matmuls and attention have a level: that of
its architecture times its own, both drawn towards 1 as far as rows do not say otherwise (a Gaussian
prior on logarithms). Errors count by Huber's function, so that single rows do not decide; rows of one
source are worth less together, since they share its trainer. Rows with `split: hold` are never read.
`--write` puts the values into configs/hardware.json. Needs no torch and no GPU.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.estimate_vs_published import predicted, published_rows, step_of
from llm_train_bench.base import hardware
from llm_train_bench.base.hardware import HARDWARE_FILE, Hardware, family_of
from llm_train_bench.formulas.work import Work

# Where constants start, and their ranges; and the spread of levels, of rows and of sources (of
# logarithms). All were chosen beforehand.
RANGES = {
    "bandwidth": (0.75, 0.5, 0.95),
    "kernels_modules": (500.0, 100, 1000),
    "kernels_expert": (30.0, 6, 60),
}
ARCHITECTURE, DEVICE, ROW, SOURCE = 0.3, 0.1, 0.10, 0.09
# Values are rounded to so many digits, so that another machine finds the same.
DIGITS = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """A row with its step and device, its architecture, and what it is worth."""

    row: dict
    work: Work
    gpu: Hardware
    family: str
    weight: float


def fitting_steps() -> list[Step]:
    rows = published_rows("fit")
    sources = collections.Counter(row["source"] for row in rows)
    steps = []
    for row in rows:
        work, gpu = step_of(row)
        weight = 1 / (1 + (sources[row["source"]] - 1) * (SOURCE / ROW) ** 2)
        steps.append(Step(row, work, gpu, family_of(gpu.name), weight))
    return steps


def loss_of(step: Step, values: dict[str, float]) -> float:
    """Huber's function of a row's error [standard deviations], times what the row is worth."""
    common = {name: values[name] for name in RANGES}
    level = values[step.family] * values[step.gpu.name]
    gpu = dataclasses.replace(step.gpu, fitted=step.gpu.fitted | common | {"level": level})
    error = predicted(step.row, step.work, gpu) / step.row["tokens_per_sec_per_gpu"]
    size = abs(math.log(error)) / ROW
    return step.weight * (size**2 / 2 if size < 1 else size - 0.5)


def prior_of(name: str, value: float, steps: list[Step]) -> float:
    """What a level costs by its distance from 1; constants have their range alone."""
    if name in RANGES:
        _, low, high = RANGES[name]
        return 0.0 if low <= value <= high else math.inf
    spread = ARCHITECTURE if any(step.family == name for step in steps) else DEVICE
    return (math.log(value) / spread) ** 2 / 2


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def fit(
    steps: list[Step], values: dict[str, float], names: Iterable[str] | None = None, sweeps: int = 8
) -> dict[str, float]:
    """The values with the least loss: one of `names` after the other is moved as long as that helps.

    The factor by which it moves gets smaller with each sweep.
    """
    values, losses = dict(values), [loss_of(step, values) for step in steps]
    for sweep in range(sweeps):
        factor = 1 + 0.1 / 1.8**sweep
        for name, move in itertools.product(names or list(values), (factor, 1 / factor)):
            touched = [i for i, s in enumerate(steps) if name in (*RANGES, s.family, s.gpu.name)]
            while True:
                now = sum(losses[i] for i in touched) + prior_of(name, values[name], steps)
                tried = values | {name: rounded(values[name] * move)}
                if (prior := prior_of(name, tried[name], steps)) == math.inf:
                    break
                new = {i: loss_of(steps[i], tried) for i in touched}
                if sum(new.values()) + prior >= now - 1e-4:
                    break
                values = tried
                for i, loss in new.items():
                    losses[i] = loss
    return values


def start_of(steps: list[Step]) -> dict[str, float]:
    names = [name for step in steps for name in (step.family, step.gpu.name)]
    return {name: start for name, (start, *_) in RANGES.items()} | dict.fromkeys(names, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="Write configs/hardware.json.")
    args = parser.parse_args()
    steps = fitting_steps()
    values = start_of(steps)
    before = sum(loss_of(step, values) for step in steps)
    values = fit(steps, fit(steps, values))
    after = sum(loss_of(step, values) for step in steps)
    print(f"{len(steps)} rows, loss {before:.1f} to {after:.1f}: {json.dumps(values, indent=1)}")
    if args.write:
        text = with_values(HARDWARE_FILE.read_text(encoding="utf-8"), values)
        HARDWARE_FILE.write_text(text, encoding="utf-8")
        hardware.devices.cache_clear()
        hardware.constants.cache_clear()


def with_values(text: str, values: dict[str, float]) -> str:
    """The file's text with the values in their places, and nothing else changed."""
    for name in RANGES:
        text, n = re.subn(rf'("{name}"): [\d.e-]+', rf"\1: {values[name]:g}", text, count=1)
        assert n == 1, name
    for device in json.loads(text)["devices"]:
        name = device["name"]
        level = values.get(family_of(name), 1.0) * values.get(name, 1.0)
        fitted = device["fitted"] | {"level": rounded(level)}
        start = text.index(f'"name": "{name}"')
        a = text.index('"fitted": ', start)
        text = text[:a] + f'"fitted": {json.dumps(fitted)}' + text[text.index("}", a) + 1 :]
    return text


if __name__ == "__main__":
    main()
