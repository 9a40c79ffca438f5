"""Choose the constants of the speed model only from the fitting rows of benchmarks/published.

    python benchmarks/fit_estimate.py [--write]

A constant of all devices lies in a physical range. Matmuls and attention have a level: that of their
architecture, times that of the device, of the trainer, and of the trainer on the architecture. All are
drawn towards 1 as far as rows do not say otherwise (a Gaussian prior on logarithms). A row counts by the
logarithm of Student's t, so that one whose source leaves something out decides little; rows of one source
are worth less together. Rows with `split: hold` are never read, nor those marked `incomplete`. `--write`
puts the values into configs/hardware.json and configs/trainers.json. Needs no torch and no GPU.
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
# device or trainer is slow, and it is the trainer's. Leaving out sources of fitting rows chose NARROW.
WIDE, NARROW, SEVERAL = 0.3, 0.05, 2
ROW, SOURCE = 0.10, 0.09
GRACE = ("GB", "GH")
# Values are rounded to so many digits, so that another machine finds the same.
DIGITS = 3


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
        levels = (family, gpu.name, trainer, f"{trainer} on {family}")
        weight = 1 / (1 + (sources[row["source"]] - 1) * (SOURCE / ROW) ** 2)
        steps.append(Step(row, work, gpu, levels, weight))
    return steps


def loss_of(step: Step, values: dict[str, float]) -> float:
    """Student's logarithm of a row's error [standard deviations], times what the row is worth."""
    common = {name: values[name] for name in RANGES}
    grace = common.pop("launch_grace_s")
    if step.gpu.name.startswith(GRACE):
        common["launch_eager_s"] = grace
    device, trainer = (math.prod(values[x] for x in step.levels[i : i + 2]) for i in (0, 2))
    gpu = dataclasses.replace(step.gpu, fitted=step.gpu.fitted | common | {"level": device})
    by = dataclasses.replace(step.work.trainer, levels=(("", trainer),))
    work = dataclasses.replace(step.work, trainer=by)
    error = predicted(step.row, work, gpu) / step.row["tokens_per_sec_per_gpu"]
    return step.weight * math.log1p((math.log(error) / ROW) ** 2 / 2)


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


def prior_of(name: str, value: float, spreads: dict[str, float]) -> float:
    """What a level costs by its distance from 1; constants have only their range."""
    if name in RANGES:
        _, low, high = RANGES[name]
        return 0.0 if low <= value <= high else math.inf
    return (math.log(value) / spreads[name]) ** 2 / 2


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def fit(
    steps: list[Step], values: dict[str, float], names: Iterable[str] | None = None, sweeps: int = 8
) -> dict[str, float]:
    """The values with the least loss: one of `names` after the other is moved as long as that helps.

    The factor by which it moves gets smaller with each sweep.
    """
    values, losses = dict(values), [loss_of(step, values) for step in steps]
    spreads = spreads_of(steps)
    for sweep in range(sweeps):
        factor = 1 + 0.1 / 1.8**sweep
        for name, move in itertools.product(names or list(values), (factor, 1 / factor)):
            touched = [i for i, s in enumerate(steps) if name in (*RANGES, *s.levels)]
            while True:
                now = sum(losses[i] for i in touched) + prior_of(name, values[name], spreads)
                tried = values | {name: rounded(values[name] * move)}
                if (prior := prior_of(name, tried[name], spreads)) == math.inf:
                    break
                new = {i: loss_of(steps[i], tried) for i in touched}
                if sum(new.values()) + prior >= now - 1e-4:
                    break
                values = tried
                for i, loss in new.items():
                    losses[i] = loss
    return values


def start_of(steps: list[Step]) -> dict[str, float]:
    names = [name for step in steps for name in step.levels]
    return {name: start for name, (start, *_) in RANGES.items()} | dict.fromkeys(names, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="Write configs/hardware.json.")
    args = parser.parse_args()
    steps = fitting_steps()
    values = start_of(steps)
    before = sum(loss_of(step, values) for step in steps)
    values = fit(steps, values)
    after = sum(loss_of(step, values) for step in steps)
    print(f"{len(steps)} rows, loss {before:.1f} to {after:.1f}: {json.dumps(values, indent=1)}")
    if args.write:
        for path, changed in ((HARDWARE_FILE, of_devices), (TRAINERS_FILE, of_trainers)):
            path.write_text(changed(path.read_text(encoding="utf-8"), values), encoding="utf-8")
        hardware.devices.cache_clear()
        hardware.our_hardware.cache_clear()


def of_devices(text: str, values: dict[str, float]) -> str:
    """hardware.json with the values in their places, and nothing else changed."""
    for name in RANGES.keys() - {"launch_grace_s"}:
        text, n = re.subn(rf'("{name}"): [\d.e-]+', rf"\1: {values[name]:g}", text, count=1)
        assert n == 1, name
    for device in json.loads(text)["devices"]:
        name = device["name"]
        level = values.get(family_of(name), 1.0) * values.get(name, 1.0)
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
