"""Does a fast setting still learn the same? The losses of runs beside those in fp32, from one seed.

    python prepare_data.py --stdlib --output-dir data/stdlib
    python sweep.py configs/sweeps/numerics.yaml --output-dir sweeps/numerics
    python benchmarks/numerics.py sweeps/numerics/runs

Over the last quarter, the loss in bf16 and fp16 must be within 1 %, in FP8 within 2 %, in FP4 within
5 %. Compiled fp32 must stay within 1e-4 at each of the first 20 steps. If plain attention in fp32
differs by more than a third of that, the limit is three times its difference. The exit code is 1
beyond a limit. A run that failed is named, and not judged.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from benchmarks.common import show
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.compare.gate import own_runs
from llm_train_bench.compare.setting import name_settings
from llm_train_bench.formulas.time_statistics import bootstrap_mean

EARLY_STEPS = 20
EARLY_LIMIT = 1e-4
BF16_LIMIT, FP8_LIMIT, FP4_LIMIT = 0.01, 0.02, 0.05
# What all runs must have alike, so that they learn from the same samples.
SAME = ("config", "data", "seed", "lr", "seq_len", "n_steps", "warmup_steps")


def is_exact(args: Mapping[str, Any]) -> bool:
    """Whether a run with these flags computes in fp32."""
    return args["amp"] == "off" and not (args.get("use_fp8") or args.get("tf32"))


def judge(
    args: Mapping[str, Any], losses: np.ndarray, reference: np.ndarray, noise: float = 0.0
) -> dict[str, Any]:
    """How far the losses of a run with these flags are from the reference, and if within their limit.

    `early`: largest relative distance within the first 20 steps. `final`: mean relative distance
    over the last quarter, with the 95 % bootstrap interval of that mean: over the steps of this one
    run, not over seeds. `noise` is what only rounding makes of `early`.
    """
    distance = losses / reference - 1
    tail = distance[-max(1, len(distance) // 4) :]
    early, final = float(np.abs(distance[:EARLY_STEPS]).max()), float(tail.mean())
    limit = FP8_LIMIT if args.get("use_fp8") else BF16_LIMIT
    limit = FP4_LIMIT if args.get("fp8_recipe") == "nvfp4" else limit
    ok = bool(np.isfinite(losses).all()) and abs(final) <= limit
    if is_exact(args):
        limit = max(EARLY_LIMIT, 3 * noise)
        ok = ok and early <= limit
    interval = bootstrap_mean(tail.tolist()) or ()
    return {"early": early, "final": final, "interval": interval, "limit": limit, "ok": ok}


@tool("numerics.py")
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories of one sweep or several")
    records = own_runs(parser.parse_args(argv).runs, Path())
    flags = [r.result.args if r.result and r.result.ours else {} for r in records]
    unlike = {str([args.get(name) for name in SAME]) for args in flags}
    if not all(flags) or len(unlike) > 1:
        raise UsageError(f"give runs of ours that have the same {', '.join(SAME)}")
    name_settings(records)
    curves = [np.array([step.get("loss") for step in r.steps], dtype=float) for r in records]
    runs = list(zip(records, flags, curves, strict=True))
    length = max(map(len, curves))
    failed = [r for r, _, losses in runs if len(losses) < length]
    runs = [run for run in runs if len(run[2]) == length]
    exact = [run for run in runs if is_exact(run[1]) and not run[1]["pt_compile"]]
    plain = [losses for _, args, losses in exact if args["attention"] == "math"]
    fp32 = [losses for _, args, losses in exact if args["attention"] != "math"]
    if len(fp32) != 1:
        raise UsageError("give one whole eager run with --amp off, which is the reference")
    noise = max((judge({"amp": "off"}, x, fp32[0])["early"] for x in plain), default=0.0)
    verdicts = [judge(args, losses, fp32[0], noise) for _, args, losses in runs]
    rows = []
    for (r, _, losses), v in zip(runs, verdicts, strict=True):
        interval = ", ".join(f"{end:+.2%}" for end in v["interval"])
        cells = f"{losses[-1]:.4f}", f"{v['early']:.1e}", f"{v['final']:+.2%} [{interval}]"
        rows.append((r.setting, *cells, f"{v['limit']:g}", "ok" if v["ok"] else "BEYOND"))
    for r in failed:
        why = (r.result and r.result.error) or "it has fewer steps"
        rows.append((r.setting, *[""] * 4, f"failed: {why}"))
    columns = "setting", "final loss", "largest distance, first 20", "last quarter [95 %]", "limit"
    show((*columns, "verdict"), rows)
    return int(not all(v["ok"] for v in verdicts))


if __name__ == "__main__":
    run_tool(main)
