"""Does a fast setting still learn the same? The losses of runs beside those in fp32, from one seed.

    python prepare_data.py --stdlib --output-dir data/stdlib
    python sweep.py configs/sweeps/numerics.yaml --output-dir sweeps/numerics
    python benchmarks/numerics.py sweeps/numerics/runs

Limits: over the last quarter, bf16 and fp16 within 1 %, FP8 within 2 %, FP4 within 5 % of the loss.
Compiled fp32 at each of the first 20 steps within three times the distance that another exact way to
compute attention makes on this device, and 1e-4 at least. The exit code is 1 beyond a limit.
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
    if args["amp"] == "off":
        limit = max(EARLY_LIMIT, 3 * noise)
        ok = ok and early <= limit
    interval = bootstrap_mean(tail.tolist()) or ()
    return {"early": early, "final": final, "interval": interval, "limit": limit, "ok": ok}


@tool("numerics.py")
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories of one sweep or several")
    records = [r for r in own_runs(parser.parse_args(argv).runs, Path()) if r.losses and r.result]
    name_settings(records)
    curves = [np.array([loss for _, loss in r.losses]) for r in records]
    flags = [r.result.args for r in records if r.result]
    if len({len(curve) for curve in curves}) > 1:
        raise UsageError("runs differ in the number of steps that they have")
    exact = [i for i, args in enumerate(flags) if args["amp"] == "off" and not args["pt_compile"]]
    other = [i for i in exact if flags[i]["attention"] == "math"]
    plain = [i for i in exact if i not in other]
    if not plain:
        raise UsageError("no run is the reference: eager, with --amp off")
    reference, noise = curves[plain[0]], 0.0
    if other:
        noise = judge(flags[other[0]], curves[other[0]], reference)["early"]
    verdicts = [
        judge(args, curve, reference, noise) for args, curve in zip(flags, curves, strict=True)
    ]
    rows = []
    for r, v in zip(records, verdicts, strict=True):
        interval = ", ".join(f"{end:+.2%}" for end in v["interval"])
        cells = f"{r.losses[-1][1]:.4f}", f"{v['early']:.1e}", f"{v['final']:+.2%} [{interval}]"
        rows.append((r.setting, *cells, f"{v['limit']:g}", "ok" if v["ok"] else "BEYOND"))
    columns = "setting", "final loss", "largest distance, first 20", "last quarter [95 %]", "limit"
    show((*columns, "verdict"), rows)
    return int(not all(v["ok"] for v in verdicts))


if __name__ == "__main__":
    run_tool(main)
