"""Choose the constants of the speed model from the fitting rows of benchmarks/published alone.

    python benchmarks/fit_estimate.py [--write]

Each constant below has a range that it can physically lie in. They are moved one after the other along a
grid, as long as the mean |log error| of the rows that the group names falls. Rows with `split: hold` are
never read. `--write` puts the values into configs/hardware.json. Needs no torch and no GPU.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.estimate_vs_published import PLAIN, kind_of, predicted, published_rows, step_of
from llm_train_bench.base import hardware
from llm_train_bench.base.hardware import HARDWARE_FILE, Hardware, constants, family_of
from llm_train_bench.formulas.work import Work


@dataclasses.dataclass(frozen=True)
class Group:
    """Constants that some rows choose: of all devices, or (`devices`) of some.

    `grids` has the values that each may take.
    """

    name: str
    rows: Callable[[dict], bool]
    grids: dict[str, list[float]]
    devices: tuple[str, ...] = ()


def steps(low: float, high: float, by: float) -> list[float]:
    return [round(low + i * by, 4) for i in range(round((high - low) / by) + 1)]


GROUPS = [
    # A matmul's part of the highest rate anybody measured cannot be above 1; half a tile is 64 rows.
    Group(
        "all, from data parallel rows of H100 and H200",
        lambda row: family_of(row["gpu"]) == "H100, H200" and kind_of(row) == PLAIN,
        dict(
            sustained=steps(0.86, 1.0, 0.02),
            half_side=steps(40, 120, 20),
            bandwidth=steps(0.75, 0.95, 0.05),
        ),
    ),
    # GeForce clocks above its listed boost, so that a part of the listed peak may be above 1.
    Group(
        "RTX",
        lambda row: family_of(row["gpu"]) == "RTX",
        {"bf16_of_peak": steps(0.7, 1.15, 0.05), "fp8_of_peak": steps(0.5, 1.0, 0.05)},
        ("RTX 4090", "RTX 5090", "RTX 6000 Ada", "RTX PRO 6000 Workstation", "RTX PRO 6000 Server"),
    ),
    Group(
        "MI300X",
        lambda row: row["gpu"] == "MI300X",
        {
            "sustained": steps(0.5, 0.95, 0.05),
            "fp8_of_peak": steps(0.25, 0.5, 0.05),
            "attention_forward": steps(0.15, 0.35, 0.05),
            "attention_backward": steps(0.1, 0.25, 0.05),
        },
        ("MI300X", "MI325X"),
    ),
]


def error_of(steps: Iterable[tuple[dict, Work, Hardware]], values: dict[str, float]) -> float:
    """Mean |log(estimated / published)| of rows, whose devices have these constants."""
    errors = []
    for row, work, gpu in steps:
        gpu = dataclasses.replace(gpu, fitted=gpu.fitted | values)
        errors.append(abs(math.log(predicted(row, work, gpu) / row["tokens_per_sec_per_gpu"])))
    return sum(errors) / len(errors)


def fit(group: Group) -> dict[str, float]:
    """The values with the least error, one constant moved at a time until none moves."""
    rows = [(row, *step_of(row)) for row in published_rows("fit") if group.rows(row)]
    fitted = hardware.find_hardware(group.devices[0]).fitted if group.devices else {}
    known = dataclasses.asdict(constants()) | fitted
    start: dict[str, float] = {name: known[name] for name in group.grids}
    best, least = dict(start), error_of(rows, start)
    print(f"{group.name}: {len(rows)} rows, mean error before {math.expm1(least):.1%}")
    before = None
    while best != before:
        before = best
        for name, grid in group.grids.items():
            for value in grid:
                tried = best | {name: value}
                if (error := error_of(rows, tried)) < least - 1e-6:
                    best, least = tried, error
    print(f"  after {math.expm1(least):.1%}: {best}")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="Write configs/hardware.json.")
    args = parser.parse_args()
    for group in GROUPS:
        values = fit(group)
        if not args.write:
            continue
        text = HARDWARE_FILE.read_text(encoding="utf-8")
        HARDWARE_FILE.write_text(with_values(text, group, values), encoding="utf-8")
        hardware.devices.cache_clear()
        hardware.constants.cache_clear()


def with_values(text: str, group: Group, values: dict[str, float]) -> str:
    """The file's text with the values in their places, and nothing else changed."""
    content = json.loads(text)
    if not group.devices:
        for name, value in values.items():
            old = json.dumps(content["speed_model"][name])
            text = text.replace(f'"{name}": {old}', f'"{name}": {value:g}', 1)
        return text
    for device in content["devices"]:
        if device["name"] in group.devices:
            begin = text.index(f'"name": {json.dumps(device["name"])}')
            old = f'"fitted": {json.dumps(device["fitted"])}'
            place = text.index(old, begin)
            new = f'"fitted": {json.dumps(device["fitted"] | values)}'
            text = text[:place] + new + text[place + len(old) :]
    return text


if __name__ == "__main__":
    main()
