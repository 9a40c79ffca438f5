"""estimate.py against what others have published: speed and memory, fitted and held rows apart.

    python benchmarks/estimate_vs_published.py [--rows] [--write]

Each file in benchmarks/published is one source, with the nearest settings of ours. Its `split` was
chosen before anything was fitted: `fit` rows may choose constants (benchmarks/fit_estimate.py), `hold`
rows may not. `--write` writes the held errors of each family of devices into configs/accuracy.json,
which estimate.py prints as a range, and draws the scatter plot. Needs no torch and no GPU.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from llm_train_bench.base.files import ROOT, write_whole
from llm_train_bench.base.hardware import ACCURACY_FILE, Hardware, family_of, find_hardware
from llm_train_bench.base.tables import markdown_table, show_whole
from llm_train_bench.estimate.plans import search
from llm_train_bench.estimate.trainers import plan_by
from llm_train_bench.formulas.memory_model import VERDICTS, estimate_memory, verdict_of
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.config import ModelConfig, parse_config
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import Args, Script

PUBLISHED = Path(__file__).parent / "published"
OUTLIER = 0.2
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
    """A row's trainer as --trainer takes it: with its recipe, and ZeRO-1 where the flags are FSDP's."""
    recipe = f" recipe={row['recipe']}" if "recipe" in row else ""
    return row["trainer"] + recipe


def step_of(row: dict) -> tuple[Work, Hardware]:
    """A row's step and device.

    A `config` is a path or a config.json's content. `fp8` is a recipe that our own scripts refuse in
    that layout, where the formulas know it. `power_w` is the limit of the GPU's power.
    """
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
    limits = {"memory_gib": row.get("memory_gib"), "tdp_w": row.get("power_w")}
    gpu = dataclasses.replace(gpu, **{name: limit for name, limit in limits.items() if limit})
    memory, trainer = gpu.memory_gib, trainer_of(row)
    work = plan_by(trainer, args, script, row["gpus"], gpu.platform, config, memory).work
    return work, gpu


def predicted(row: dict, work: Work, gpu: Hardware) -> float:
    """Tokens/s per GPU of a published setting, by the model."""
    step_s = estimate_speed(work, gpu).step_s
    return work.batch.tokens_per_step / row["gpus"] / step_s


def errors(rows) -> list[float]:
    """Relative error of the estimated tokens/s of each row."""
    return [predicted(row, *step_of(row)) / row["tokens_per_sec_per_gpu"] - 1 for row in rows]


# How the formats of a report's weights are called by trainers.json.
WEIGHTS = {
    "bf16 with fp32 master copy": "master-bf16",
    "fp16 with fp32 master copy": "master-bf16",
    "bf16 (no fp32 master copy)": "bf16",
}


def reported_step(report: dict) -> tuple[Work, Hardware]:
    """A report's step and device, with what it says of formats and of the loss."""
    flags = report["flags"].split()
    zero = 1 if "--pp" in flags and "master" in WEIGHTS.get(report["weights"], "") else 3
    if "--reshard-after-forward" in flags:  # as near as our flags come to ZeRO-1 and 2
        zero = 1 if "--reduce-last" in flags else 2
    choices = {
        "weights": WEIGHTS.get(report["weights"], "fp32"),
        "moments": report.get("moments", "fp32"),
        "zero": zero,
        "tp_shards": report["trainer"] in ("megatron", "other"),
        "loss": report.get("loss") or {"chunked": "chunks"}.get(report["logits"], "whole"),
    }
    work, gpu = step_of(report | {"trainer": "ours"})
    work = dataclasses.replace(work, trainer=dataclasses.replace(work.trainer, **choices))
    return work, gpu


def verdicts(steps: Iterable[tuple[Work, Hardware]]) -> collections.Counter[str]:
    """How often the estimate of memory says which of its verdicts."""
    return collections.Counter(
        verdict_of(estimate_memory(work).on_device(work.world), gpu.memory_gib * GIB, work)
        for work, gpu in steps
    )


def memory_errors(rows) -> dict[str, list[float]]:
    """Relative errors of the estimated memory, against figures of tensors and of what is reserved."""
    errors = {"allocated": [], "reserved": []}
    for row in rows:
        published = {kind: row.get(f"memory_{kind}_gib") for kind in errors}
        if any(published.values()) and not row.get("no_memory"):
            peak = estimate_memory(step_of(row)[0]).peak
            for kind, gib in published.items():
                errors[kind] += [peak / GIB / gib - 1] if gib else []
    return errors


def kind_of(row: dict) -> str:
    """Which layout a row has, and whether in FP8."""
    flags = row["flags"].split()
    divided = {"--tp", "--cp", "--ep", "--pp"} & set(flags)
    fp8 = "fp8" in row or "--use-fp8" in flags
    return ("tp, cp, ep, pp" if divided else "data parallel") + ", FP8" * fp8


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
    """Rows within the range that the other sources' rows of their group give; and how many have one."""
    every = list(zip(rows, errors(rows), map(range_group, rows), strict=True))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", action="store_true", help="Print each row too.")
    parser.add_argument(
        "--plans", action="store_true", help="Hold --plan against published layouts."
    )
    parser.add_argument("--write", action="store_true", help="Write accuracy.json and the plot.")
    args = parser.parse_args()
    for by, key in (
        ("layout and family", lambda row: f"{kind_of(row)}: {family_of(row['gpu'])}"),
        ("trainer", lambda row: row["trainer"]),
    ):
        figures = ("n", "median error", "80 % within", "lowest", "highest", "beyond 20 %")
        table = markdown_table("rows", by, *figures, left=(by,))
        for name, rows in (("fitted", published_rows("fit")), ("held", held_rows())):
            groups = grouped(rows, key)
            for group, sample in (groups | {"all": errors(rows)}).items():
                beyond = sum(abs(error) > OUTLIER for error in sample)
                median, ends = statistics.median(map(abs, sample)), (min(sample), max(sample))
                shown = f"{median:.1%}", f"{covering(sample):.0%}", *(f"{end:+.0%}" for end in ends)
                table.add_row(name, group, str(len(sample)), *shown, str(beyond))
        show_whole(table)
    inside, number = coverage(held_rows())
    print(f"ranges of 80 %: {inside} of {number} held rows within ({inside / number:.0%})")
    show_memory()
    for split in ("lora", "bug reports"):
        sample = errors(published_rows(split))
        median = statistics.median(map(abs, sample))
        between = f"from {min(sample):+.0%} to {max(sample):+.0%}"
        print(f"{split}: {len(sample)} rows, median error {median:.1%}, {between}")
    if args.plans:
        show_plans()
    if args.rows:
        for split in ("fit", "hold", "lora"):
            show(published_rows(split))
    if args.write:
        families = collections.defaultdict(dict)
        for (family, experts), sample in grouped(held_rows(), range_group).items():
            median, covers = statistics.median(map(abs, sample)), covering(sample)
            figures = {
                "rows": len(sample),
                "median": round(median, 3),
                "covers_80": round(covers, 3),
            }
            families[family][experts] = figures
        about = (
            "Errors of estimated tokens/s against held-out published rows; written by "
            "benchmarks/estimate_vs_published.py --write. covers_80: the range of 80 % of the errors."
        )
        content = {"about": about, "families": families}
        write_whole(ACCURACY_FILE, json.dumps(content, indent=1) + "\n")
        draw(Path(__file__).parent / "results/estimate-vs-published.png")


# Published layouts that --plan is held against: file, GPUs, sequence length, whether in FP8.
PLANS = (
    ("dgxc-v25.02-llama3.1", 576, 8192, True),
    ("llama-3-paper", 16384, 8192, False),
    ("llama-3-paper", 16384, 131072, False),
    ("dgxc-v25.02-llama3.1", 64, 8192, True),
    ("llm-foundry-70b", 512, 2048, False),
    ("megatron-bridge-25.09-25.11", 1024, 4096, True),
    ("dgxc-v25.05", 512, 4096, False),
    ("megatron-bridge-25.09-25.11", 256, 4096, True),
    ("nemo-automodel-summary", 64, 4096, False),
    ("megatron-bridge-archive-25.09", 8, 8192, True),
)


def planned_by(
    trainer: str, args: Args, gpu: Hardware, config: ModelConfig, compiled: bool,
    flags: dict[str, Any], script: Script, gpus: int,
) -> Work:  # fmt: skip
    """A step of the trainer with these flags, as plans.py asks for it."""
    args = dataclasses.replace(args, pt_compile=compiled, **flags)
    return plan_by(trainer, args, script, gpus, gpu.platform, config, gpu.memory_gib).work


def show_plans() -> None:
    """What --plan finds in the trainer's preset, for the GPUs, length and batch of published layouts."""
    columns = "published, tokens/s/GPU, estimated, best plan, estimated, theirs is, seconds".split(
        ", "
    )
    table = markdown_table(*columns, left=("published", "best plan"))
    for file, gpus, seq_len, fp8 in PLANS:
        low = lambda r: "fp8" in r or "--use-fp8" in r["flags"]  # noqa: E731
        about = (file, gpus, seq_len, fp8)
        row = next(
            r for r in published_rows()
            if (r["file"], r["gpus"], r["seq_len"], low(r)) == about and "GB300" not in r["gpu"]
        )  # fmt: skip
        work, gpu = step_of(row)
        gpu = gpu if fp8 else dataclasses.replace(gpu, fp8_tflops=None)
        compiled = "--pt-compile" in row["flags"]
        routed = ["--route", "balanced"] if work.config.experts else []
        argv = ["configs/gpt2-tiny.json", "--seq-len", str(seq_len), *routed]
        args = parse_dataclass(Args, argv, "")

        config, trainer = work.config, trainer_of(row)
        make = functools.partial(planned_by, trainer, args, gpu, config, compiled)

        batch = {"global_bsz": work.batch.global_batch, "seq_len": seq_len}
        began = time.perf_counter()
        best, _, _ = search(config, gpu, gpus, batch, make)
        seconds = time.perf_counter() - began
        theirs = (
            work.parallelism.tp,
            work.parallelism.cp,
            work.parallelism.ep,
            work.parallelism.pp,
        )
        found = [tuple(x.flags.get(k, 1) for k in ("tp", "cp", "ep", "pp")) for x in best]
        place = f"number {found.index(theirs) + 1}" if theirs in found else "not among ten"
        words = best[0].words().replace(f" --global-bsz {batch['global_bsz']}", "")
        rates = predicted(row, work, gpu), best[0].tokens_per_sec / gpus
        name = f"{row['trainer']}: {gpus} x {row['gpu']}, {row.get('model', '')} T{seq_len} "
        name += row["flags"]
        shown = f"{row['tokens_per_sec_per_gpu']:,.0f}", f"{rates[0]:,.0f}"
        table.add_row(name, *shown, words, f"{rates[1]:,.0f}", place, f"{seconds:.0f}")
    show_whole(table)


def show_memory() -> None:
    """Verdicts on rows that ran and on reports; the first half of reports chose the margins."""
    table = markdown_table("memory", "n", *VERDICTS, left=("memory",))
    reports = json.loads(
        (Path(__file__).parent / "memory-reports.json").read_text(encoding="utf-8")
    )
    for split, name in (("fit", "fitted"), ("hold", "held")):
        ran = [row for row in published_rows(split) if not row.get("no_memory")]
        kinds = {f"{name}: published rows, which ran": map(step_of, ran)}
        for oom, what in ((False, "reports of runs that ran"), (True, "reports of OOM")):
            found = [r for r in reports["reports"] if r["split"] == split and r["oom"] == oom]
            kinds[f"{name}: {what}"] = map(reported_step, found)
        for kind, steps in kinds.items():
            says = verdicts(steps)
            table.add_row(kind, str(says.total()), *(str(says[v]) for v in VERDICTS))
    show_whole(table)
    for kind, sample in memory_errors(published_rows()).items():
        between = f"from {min(sample):+.0%} to {max(sample):+.0%}"
        median = f"median error {statistics.median(sample):+.0%}"
        print(
            f"peak of tensors, estimated, against {kind}: {len(sample)} figures, {median}, {between}"
        )


def show(rows) -> None:
    columns = ("source", "setting", "published", "estimate", "error", "note")
    table = markdown_table(*columns, left=("setting", "note"))
    for row, error in zip(rows, errors(rows), strict=True):
        published = row["tokens_per_sec_per_gpu"]
        model = Path(row["config"]).stem if isinstance(row["config"], str) else row.get("model", "")
        setting = f"{row['gpus']} x {row['gpu']}, {model} T{row['seq_len']} b{row['bsz']} "
        setting += row["flags"] + (f" fp8 {row['fp8']}" if "fp8" in row else "")
        figures = f"{published:,.0f}", f"{published * (1 + error):,.0f}"
        mark = f"{error:+.1%}{' *' if abs(error) > OUTLIER else ''}"
        table.add_row(row["file"], setting, *figures, mark, row.get("note", ""))
    show_whole(table)


def draw(path: Path) -> None:
    """Estimated against published tokens/s per GPU, fitted rows hollow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 6))
    families = sorted({family_of(row["gpu"]) for row in published_rows()})
    colors = dict(zip(families, plt.get_cmap("tab10")(range(10)), strict=False))
    for row in published_rows():
        color, held = colors[family_of(row["gpu"])], row["split"] == "hold"
        point = row["tokens_per_sec_per_gpu"], predicted(row, *step_of(row))
        face = color if held else "none"
        axes.plot(*point, "o", markersize=5, color=color, markerfacecolor=face)
    high = 2e5
    for factor, style in ((1, "-"), (1.15, ":"), (1 / 1.15, ":")):
        axes.plot([50, high], [50 * factor, high * factor], style, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="published tokens/s per GPU", ylabel="estimated")
    for family in families:
        axes.plot([], [], "o", color=colors[family], label=family)
    axes.legend(frameon=False, title="filled: held", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
