"""estimate.py against what others have published: speed and memory, fitted and held rows apart.

    python benchmarks/estimate_vs_published.py [--rows] [--write]

Each file in benchmarks/published is one source, with the nearest settings of ours. Its `split` was
chosen before anything was fitted: `fit` rows may choose constants (benchmarks/fit_estimate.py), `hold`
rows may not. `added` is the day of sources that came later. `doubt` is what a source leaves open that
can move the speed by 10 %, by a reader who saw no estimate; `why` explains an error. `--write` writes
the held errors of each family of devices into configs/accuracy.json, which estimate.py prints as a
range, and the tables into docs/ESTIMATES.md. Needs no torch and no GPU.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from llm_train_bench.base.files import ROOT, write_whole
from llm_train_bench.base.hardware import ACCURACY_FILE, Hardware, family_of, find_hardware
from llm_train_bench.base.tables import grouped as gathered
from llm_train_bench.base.tables import markdown_cell, markdown_table
from llm_train_bench.estimate.predict import scaled, speed_factor
from llm_train_bench.estimate.trainers import plan_by
from llm_train_bench.formulas.memory_model import VERDICTS, estimate_memory, verdict_of
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import parse_config
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import Args, Script, defaults, present_flags, to_argv
from llm_train_bench.settings.plan import make_plan

PUBLISHED = Path(__file__).parent / "published"
PAGE = ROOT / "docs/ESTIMATES.md"
OUTLIER = 0.2
# What a row may say of its GPU and node besides its name.
OF_NODE = ("memory_gib", "memory_tb_per_s", "nic_gb_per_s", "per_node", "peer_gb_per_s")
# Rows that a range needs.
VALIDATED = 8
GIB = 2**30


@functools.cache
def published_rows(split: str | None = None) -> tuple[dict, ...]:
    """The settings and figures of others, of a split, or of both that concern training of all weights.

    `source` and `split` are in each. Rows of split `lora` had no part in a constant either.
    """
    rows = []
    for path in sorted(PUBLISHED.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["split"] == split or (split is None and content["split"] in ("fit", "hold")):
            about = {key: value for key, value in content.items() if key != "rows"}
            about["file"] = path.stem
            rows += [about | row for row in content["rows"]]
    return tuple(rows)


def trainer_of(row: dict) -> str:
    """A row's trainer as --trainer takes it: with its recipe."""
    recipe = f" recipe={row['recipe']}" if "recipe" in row else ""
    return row["trainer"] + recipe


def step_of(row: dict) -> tuple[Work, Hardware]:
    """A row's step and device.

    A `config` is a path or a config.json's content. `fp8` is a recipe that our own scripts refuse in
    that layout, where the formulas know it. `power_w`, the limit of the GPU's power, and the keys of
    memory and network say how the GPU and its node differ from what configs/hardware.json has.
    """
    return _step_of(json.dumps(row))


@functools.cache
def _step_of(text: str) -> tuple[Work, Hardware]:
    row = json.loads(text)
    gpu, script, model = find_hardware(row["gpu"]), Script(row["script"]), row["config"]
    name = row.get("model", model if isinstance(model, str) else "model")
    if isinstance(model, str):
        model = json.loads((ROOT / model).read_text(encoding="utf-8"))
    positions = "n_positions" if "n_positions" in model else "max_position_embeddings"
    model = model | {positions: max(model.get(positions, 0), row["seq_len"])}
    config = parse_config(model, name)
    argv = ["configs/gpt2-tiny.json", "--bsz", str(row["bsz"]), *shlex.split(row["flags"])]
    args = parse_dataclass(Args, [*argv, "--seq-len", str(row["seq_len"])], script)
    fp8 = {"use_fp8": True, "fp8_recipe": row["fp8"]} if "fp8" in row else {}
    args = dataclasses.replace(args, **fp8, **row.get("lora", {}))
    differs = {key: row[key] for key in row if key in OF_NODE}
    gpu = dataclasses.replace(gpu, **differs, tdp_w=row.get("power_w", gpu.tdp_w))
    memory, trainer = gpu.memory_gib, trainer_of(row)
    work = plan_by(trainer, args, script, row["gpus"], gpu.platform, config, memory).work
    return work, gpu


def predicted(row: dict, work: Work, gpu: Hardware) -> float:
    """Tokens/s per GPU of a published setting, by the model."""
    step_s = estimate_speed(work, gpu).step_s
    return work.batch.tokens_per_step / row["gpus"] / step_s


def errors(rows) -> list[float]:
    """Relative error of the estimated tokens/s of each row."""
    return [_error_of(json.dumps(row)) for row in rows]


@functools.cache
def _error_of(text: str) -> float:
    row = json.loads(text)
    return predicted(row, *step_of(row)) / row["tokens_per_sec_per_gpu"] - 1


def verdicts(steps: Iterable[tuple[Work, Hardware]]) -> collections.Counter[str]:
    """How often the estimate of memory says which of its verdicts."""
    return collections.Counter(
        verdict_of(estimate_memory(work).on_device(work.world), gpu.memory_gib * GIB, work)
        for work, gpu in steps
    )


def format_of(row: dict) -> str:
    """Whether a row is in FP8 (or FP4), or in bf16 (or fp16)."""
    return "FP8" if "fp8" in row or "--use-fp8" in row["flags"].split() else "bf16"


def range_group(row: dict) -> tuple[str, str]:
    """Rows by which the range of an estimate is told: the family of devices, dense or with experts."""
    work, _ = step_of(row)
    return family_of(row["gpu"]), "experts" if work.config.experts else "dense"


def grouped(rows, key: Callable[[dict], Any]) -> dict[Any, list[float]]:
    """Errors of the rows of each group."""
    groups = collections.defaultdict(list)
    for row, error in zip(rows, errors(rows), strict=True):
        groups[key(row)].append(error)
    return dict(sorted(groups.items()))


def covering(values: list[float], share: float = 0.8) -> float:
    """The range, up and down, that so much of the next error's probability lies in (split conformal)."""
    ordered = sorted(map(abs, values))
    return ordered[min(len(ordered), math.ceil(share * (len(ordered) + 1))) - 1]


def coverage(rows) -> tuple[int, int]:
    """Rows within the range that the other sources' rows of their group give; and how many have one.

    A group is a family of devices, dense or with experts, and a format.
    """
    groups = [(*range_group(row), format_of(row)) for row in rows]
    every = list(zip(rows, errors(rows), groups, strict=True))
    inside = number = 0
    for row, error, group in every:
        others = [e for r, e, g in every if g == group and r["file"] != row["file"]]
        if len(others) >= VALIDATED:
            number += 1
            inside += abs(error) <= covering(others)
    return inside, number


def held_rows() -> list[dict]:
    """Rows that had no part in any choice: held, and not seen before the split."""
    return [row for row in published_rows("hold") if not row.get("seen")]


def calibrated_pairs(rows) -> list[tuple[float, float]]:
    """Errors on many nodes of settings that a source has on one too: without, and with `--calibrate`."""

    def alike(row: dict) -> str:
        layout = {x for x in row["flags"].split() if x.startswith("--")} - {"--dp-replicate"}
        same = [str(row.get(key)) for key in "file gpu model config seq_len fp8 power_w".split()]
        return str([*same, trainer_of(row), sorted(layout)])

    found = []
    for members in gathered(rows, alike).values():
        node = find_hardware(members[0]["gpu"]).per_node
        ones = [row for row in members if row["gpus"] <= node]
        for row in members if ones else ():
            if row["gpus"] > node:
                one = max(ones, key=lambda x: (x["gpus"], -abs(x["bsz"] - row["bsz"])))
                work, gpu = step_of(one)
                tokens = work.batch.tokens_per_step / one["gpus"]
                factor = speed_factor(work, gpu, tokens / one["tokens_per_sec_per_gpu"])
                work, gpu = step_of(row)
                rates = [predicted(row, work, each) for each in (gpu, scaled(gpu, factor))]
                found.append(tuple(rate / row["tokens_per_sec_per_gpu"] - 1 for rate in rates))
    return found


def line_of(sample: list[float]) -> list[str]:
    """How the errors of a sample stand in a table."""
    median, beyond = statistics.median(map(abs, sample)), sum(abs(x) > OUTLIER for x in sample)
    return [str(len(sample)), f"{median:.1%}", f"{covering(sample):.0%}", str(beyond)]


def our_runs() -> list[list[str]]:
    """Our own runs on a GPU that took a step: estimated, measured, error of the speed."""
    lines = []
    for path in sorted((Path(__file__).parent / "results").glob("h200-*/**/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        steps = content.get("metrics", {}).get("step_time_median_s") if "model" in content else None
        if not steps or content["args"].get("fused_backward"):  # its kernels are gone
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(content["model"]["config"]), encoding="utf-8")
            script, usual = Script(content["entrypoint"]), defaults(Args)
            known = present_flags(content["args"]).items()
            flags = {k: v for k, v in known if k in usual and v != usual[k] and k != "config"}
            args = parse_dataclass(Args, [str(config), *to_argv(flags)], script)
            work = make_plan(args, script, 1, "nvidia", memory_gib=139.72).work
        estimated = estimate_speed(work, find_hardware("h200")).step_s
        day, name = path.parts[-3:-1] if path.name == "result.json" else (path.parts[-2], path.stem)
        shown = f"{estimated:.4f}, {steps:.4f}", f"{steps / estimated - 1:+.0%}"
        lines.append([day.removeprefix("h200-"), name, *shown])
    return lines


def tables() -> dict[str, str]:
    """The tables of docs/ESTIMATES.md as Markdown, by their names."""
    held = held_rows()
    figures = "rows|median error|80 % within|beyond 20 %"
    samples = {"fitted": published_rows("fit"), "held": held}
    day = lambda row: row.get("added", "before")  # noqa: E731
    doubt = lambda row: "with a doubt" if row.get("doubt") else "without a doubt"  # noqa: E731
    for key in (format_of, day, doubt):
        samples |= {f"held, {kind}": rows for kind, rows in gathered(held, key).items()}
    samples["LoRA"] = published_rows("lora")
    sums = [[name, *line_of(errors(rows))] for name, rows in samples.items()]
    groups = grouped(held, lambda row: (*range_group(row), format_of(row)))
    ranges = [[", ".join(key), *line_of(v)] for key, v in groups.items() if len(v) >= VALIDATED]
    worst = sorted(zip(errors(held), held, strict=True), key=lambda x: -abs(math.log(1 + x[0])))
    why = lambda row: row.get("why") or row.get("doubt", "unknown")  # noqa: E731
    ten = [[f"{e:+.0%}", setting_of(r).partition(", T ")[0], why(r)] for e, r in worst[:10]]
    pairs = {name: calibrated_pairs(rows) for name, rows in list(samples.items())[:2]}
    both = {name: list(zip(*found, strict=True)) for name, found in pairs.items()}
    medians = [[name, str(len(pairs[name])), *(f"{statistics.median(map(abs, e)):.1%}" for e in x)]
               for name, x in both.items()]  # fmt: skip
    inside, number = coverage(held)
    covered = [[f"{inside} of {number}", f"{inside / number:.0%}"]]
    made = {
        "sums": (f"published rows|{figures}", sums),
        "ranges": (f"devices, model, format|{figures}", ranges),
        "covered": ("rows within a range made without their source|part", covered),
        "worst": ("error|setting|why", ten),
        "calibrated": ("pairs|n|median error|with --calibrate", medians),
        "memory": ("|".join(["memory", "n", *VERDICTS]), memory_lines()),
        "ours": ("day|run|step: estimated, measured [s]|error of speed", our_runs()),
    }
    return {
        name: markdown_table(
            head.split("|"), [map(markdown_cell, map(str, line)) for line in lines]
        )
        for name, (head, lines) in made.items()
    }


def written(page: str, made: dict[str, str]) -> str:
    """The page with each table in its place, between <!-- NAME --> and <!-- end -->."""
    for name, table in made.items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, n = re.subn(place, lambda m, t=table: f"{m[1]}{t}{m[2]}", page, flags=re.DOTALL)
        assert n == 1, name
    return page


def accuracy() -> dict[str, Any]:
    """What configs/accuracy.json has: errors by family, dense or experts, and format."""
    families = collections.defaultdict(dict)
    kinds = {"all": held_rows()} | gathered(held_rows(), format_of)
    for kind, rows in kinds.items():
        for (family, experts), sample in grouped(rows, range_group).items():
            figures = statistics.median(map(abs, sample)), covering(sample)
            figures = zip(("median", "covers_80"), (round(x, 3) for x in figures), strict=True)
            families[family].setdefault(experts, {})[kind] = {"rows": len(sample)} | dict(figures)
    about = (
        "Errors of estimated tokens/s against held-out published rows; written by "
        "benchmarks/estimate_vs_published.py --write. covers_80: the range of 80 % of the errors."
    )
    return {"about": about, "families": families}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", action="store_true", help="Print each row instead.")
    parser.add_argument("--write", action="store_true", help="Write accuracy.json and the page.")
    args = parser.parse_args()
    if args.rows:
        rows = [row for split in ("fit", "hold", "lora") for row in published_rows(split)]
        for row, error in zip(rows, errors(rows), strict=True):
            print(f"{error:+.1%} {row['split']} {row['file']}: {setting_of(row)}")
        return
    made = tables()
    for table in made.values():
        print(table)
    if args.write:
        write_whole(ACCURACY_FILE, json.dumps(accuracy(), indent=1) + "\n")
        write_whole(PAGE, written(PAGE.read_text(encoding="utf-8"), made))


def memory_lines() -> list[list[str]]:
    """Verdicts on rows that ran and on reports; the first half of reports chose the margins."""
    path = Path(__file__).parent / "memory-reports.json"
    reports = json.loads(path.read_text(encoding="utf-8"))["reports"]
    lines = []
    for split, name in (("fit", "fitted"), ("hold", "held")):
        ran = [row for row in published_rows(split) if not row.get("no_memory")]
        kinds = {f"{name}: published rows, which ran": map(step_of, ran)}
        for oom, what in ((False, "reports of runs that ran"), (True, "reports of OOM")):
            found = [r for r in reports if r["split"] == split and r["oom"] == oom]
            kinds[f"{name}: {what}"] = map(step_of, found)
        for kind, steps in kinds.items():
            says = verdicts(steps)
            lines.append([kind, str(says.total()), *(str(says[v]) for v in VERDICTS)])
    return lines


def setting_of(row: dict) -> str:
    """A row in words."""
    model = row.get("model") or Path(row["config"]).stem
    words = [f"{trainer_of(row)}: {row['gpus']} x {row['gpu']}, {model}, T {row['seq_len']},"]
    words += [f"--bsz {row['bsz']}", row["flags"].strip(), *([row["fp8"]] if "fp8" in row else [])]
    return f"{' '.join(words)}: {row['tokens_per_sec_per_gpu']:,.0f} tokens/s"


if __name__ == "__main__":
    main()
