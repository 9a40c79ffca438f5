"""The speed model of estimate.py against what others have published, row by row.

    python benchmarks/estimate_vs_published.py

Wanted: a median error of at most 15 %. Needs no torch and no GPU.
"""

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich import box
from rich.console import Console
from rich.table import Table

from bench.formulas.hardware import find_hardware
from bench.formulas.speed_model import estimate_speed
from bench.results.result_files import read_result
from bench.settings.command_line import parse_args
from bench.settings.flags import Script
from bench.settings.plan import make_plan

ROOT = Path(__file__).parent.parent
PUBLISHED = Path(__file__).parent / "published.json"
LAYOUTS = Path(__file__).parent / "published_layouts.json"
OUTLIER = 0.15


def predicted(row: dict) -> float:
    """Tokens/s per GPU of a published setting, by the model."""
    script = row.get("script") or ("train.py" if row["gpus"] == 1 else "train_fsdp.py")
    flags = shlex.split(row["flags"])
    argv = [str(ROOT / row["config"]), "--bsz", str(row["bsz"]), *flags]
    args = parse_args([*argv, "--seq-len", str(row["seq_len"])], script)
    work = make_plan(args, Script(script), row["gpus"]).work
    gpu = find_hardware(row["gpu"])
    # A part with less power runs its matmuls slower; `note` says if its memory differs.
    slower = {
        name: value and value * row["clock"]
        for name in ("bf16_tflops", "fp8_tflops", "measured_bf16_tflops", "measured_fp8_tflops")
        for value in (getattr(gpu, name),)
    }
    gpu = dataclasses.replace(gpu, **slower)
    return work.batch.tokens_per_step / row["gpus"] / estimate_speed(work, gpu).step_s


def published_rows(path: Path = PUBLISHED) -> list[dict]:
    """The settings and figures of others; those of LAYOUTS have chosen no constant."""
    return json.loads(path.read_text())["rows"]


def errors(rows: list[dict]) -> list[float]:
    """Relative error of the estimate of each row."""
    return [predicted(row) / row["tokens_per_sec_per_gpu"] - 1 for row in rows]


def own_rows() -> list[dict]:
    """The same for our own GPU results in benchmarks/results, at any depth."""
    rows = []
    for path in sorted((Path(__file__).parent / "results").rglob("result.json")):
        r = read_result(path)
        if r.device.type != "cuda" or r.status != "ok" or not r.metrics.tokens_per_sec_per_gpu:
            continue
        flags = [f for f in r.command[2:] if f != "--profile"]
        rows.append(
            {
                "source": "ours", "gpu": r.device.hardware, "gpus": r.device.count,
                "config": r.args["config"], "seq_len": r.batch.seq_len, "bsz": r.batch.micro_batch,
                "flags": shlex.join(flags), "clock": 1.0, "note": r.run_name,
                "tokens_per_sec_per_gpu": r.metrics.tokens_per_sec_per_gpu,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("Constants were fitted to most of these:")
    show(published_rows() + own_rows())
    print("Layouts of several kinds and mixtures of experts, which chose no constant:")
    show(published_rows(LAYOUTS))


def show(rows: list[dict]) -> None:
    """A table of these rows, and the errors' median and largest."""
    found = errors(rows)
    table = Table(box=box.MARKDOWN)
    for name in ("source", "setting", "published", "estimate", "error", "note"):
        table.add_column(name)
    for row, error in zip(rows, found, strict=True):
        published = row["tokens_per_sec_per_gpu"]
        model = Path(row["config"]).stem
        setting = (
            f"{row['gpus']} x {row['gpu']}, {model} T{row['seq_len']} b{row['bsz']} {row['flags']}"
        )
        mark = " *" if abs(error) > OUTLIER else ""
        table.add_row(
            row["source"], setting, f"{published:,.0f}", f"{published * (1 + error):,.0f}",
            f"{error:+.1%}{mark}", row["note"],
        )  # fmt: skip
    Console(width=220, highlight=False).print(table)
    print(
        f"median error {statistics.median(map(abs, found)):.1%}, largest "
        f"{max(map(abs, found)):.1%}, beyond {OUTLIER:.0%}: {sum(abs(e) > OUTLIER for e in found)} "
        f"of {len(found)}"
    )


if __name__ == "__main__":
    main()
