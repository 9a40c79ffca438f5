"""Does a fast setting still learn the same? Loss curves of every setting against fp32, from one seed.

    python benchmarks/numerics.py [--steps N] [--settings NAME,...]

Trains a small model on real text (Python's standard library), once per setting, and reports how far
each curve runs from the fp32 one. Limits: compiled fp32 at each of the first 20 steps within three
times the distance that another exact way to compute attention makes on this device, and 1e-4 at least;
over the last quarter, bf16 and fp16 within 1 %, FP8 within 2 %, FP4 within 5 % of the loss. The exit
code is 1 beyond a limit, or if a setting of --settings could not run. FP8 is emulated on a CPU.
Settings of layouts run on several ranks.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

import prepare_data
from benchmarks.common import RESULTS, device_of_runs, run_train_apart, save, show
from llm_train_bench.formulas.time_statistics import bootstrap_mean
from llm_train_bench.results.result_files import read_steps

REFERENCE, ALSO_EXACT = "fp32", "fp32 math attention"
EARLY_STEPS = 20
EARLY_LIMIT = 1e-4
BF16_LIMIT, FP8_LIMIT, FP4_LIMIT = 0.01, 0.02, 0.05
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TE = ("current", "delayed", "blockwise", "mxfp8", "nvfp4")
# Layouts by their names, with the flags of two ranks that share a batch.
LAYOUTS = {"tp2": "--tp 2", "cp2": "--cp 2", "pp2": "--pp 2"}


def settings(cuda: bool) -> dict[str, list[str]]:
    """Name and flags of every setting that this kind of device can run."""
    text = {
        REFERENCE: "--amp off",
        ALSO_EXACT: "--amp off --attention math",
        "fp32 compile": "--amp off --pt-compile",
        "bf16": "--amp bf16",
        "bf16 compile": "--amp bf16 --pt-compile",
        "bf16 weights": "--amp bf16 --bf16-weights",
    }
    fp8 = "--use-fp8" if cuda else "--use-fp8 --fp8-emulate"
    torchao = {r: f"{fp8} --fp8-backend torchao --fp8-recipe {r}" for r in TORCHAO}
    text |= {f"fp8 {recipe}": flags for recipe, flags in torchao.items()}
    for recipe, (layout, flags) in itertools.product(TORCHAO[:2], LAYOUTS.items()):
        text[f"fp8 {recipe} {layout}"] = f"{torchao[recipe]} {flags} --nproc 2"
    text["fp8 tensorwise compile"] = f"{text['fp8 tensorwise']} --pt-compile"
    if cuda:  # fp16 matmuls are emulated on most CPUs, at a crawl
        text["fp16"] = "--amp fp16"
        text["bf16 CUDA graphs"] = "--amp bf16 --pt-compile --compile-mode reduce-overhead"
        text |= {f"te {recipe}": f"{fp8} --fp8-backend te --fp8-recipe {recipe}" for recipe in TE}
    return {name: flags.split() for name, flags in text.items()}


def judge(name: str, losses: np.ndarray, reference: np.ndarray, noise: float = 0.0) -> dict:
    """How far a curve is from the reference, and whether that is within its limit.

    `early`: largest relative distance within the first 20 steps. `final`: mean relative distance
    over the last quarter, with the 95 % bootstrap interval of that mean: over the steps of this one
    run, not over seeds. `noise` is what only rounding makes of `early`.
    """
    distance = losses / reference - 1
    tail = distance[-max(1, len(distance) // 4) :]
    interval = bootstrap_mean(tail.tolist())
    early = float(np.abs(distance[:EARLY_STEPS]).max())
    final = float(tail.mean())
    low = FP8_LIMIT if name.startswith(("fp8", "te")) else BF16_LIMIT
    limit = FP4_LIMIT if name.endswith("nvfp4") else low
    ok = bool(np.isfinite(losses).all()) and abs(final) <= limit
    if name.startswith("fp32"):
        limit = max(EARLY_LIMIT, 3 * noise)
        ok = ok and early <= limit
    distances = {"early": early, "final": final, "interval": interval and list(interval)}
    return distances | {"limit": limit, "ok": ok}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--settings", help="only these, separated by commas; fp32 always runs")
    parser.add_argument("--config", default="configs/gpt2-tiny.json")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    device = device_of_runs()
    known = settings(device.type == "cuda")
    names = args.settings.split(",") if args.settings else list(known)
    if not set(names) <= set(known):
        parser.error(f"--settings: there are {', '.join(known)}")
    common = "--bsz 8 --seq-len 128 --lr 2e-3 --warmup-steps 3 --no-tensorboard --n-steps".split()
    common = [args.config, *common, args.steps - 3, "--data"]
    curves: dict[str, np.ndarray] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "text"
        if prepare_data.main(["--stdlib", "--output-dir", str(text)]):
            return 1
        needs_noise = [ALSO_EXACT] if "fp32 compile" in names else []
        for name in dict.fromkeys([REFERENCE, *needs_noise, *names]):
            out = Path(directory) / name.replace(" ", "-")
            try:
                words = known[name]
                script = "train_pp.py" if "--pp" in words else "train_fsdp.py"
                script = script if "--nproc" in words else "train.py"
                # A step has the same samples: a pipeline's are four micro batches.
                micro = ["--bsz", 2, "--grad-acc-steps", 4] if "--pp" in words else []
                run_train_apart(*common, text / "train.bin", *words, *micro, script=script, out=out)
            except RuntimeError as error:  # an absent library, or a failure of only this setting
                failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            (steps,) = out.glob("*/steps.jsonl")
            curves[name] = np.array([s["loss"] for s in read_steps(steps)], dtype=float)
    verdicts, noise, reference = {}, 0.0, curves.get(REFERENCE)
    if reference is not None:
        if ALSO_EXACT in curves:
            noise = judge(ALSO_EXACT, curves[ALSO_EXACT], reference)["early"]
        verdicts = {n: judge(n, curve, reference, noise) for n, curve in curves.items()}
    show_verdicts(verdicts, curves)
    losses = {name: curve.tolist() for name, curve in curves.items()}
    content = {"config": args.config, "steps": args.steps, "verdicts": verdicts}
    content |= {"failed": failed, "losses": losses}
    save("numerics", content, device, args.output_dir)
    beyond = [name for name, verdict in verdicts.items() if not verdict["ok"]]
    missing = {*(names if args.settings else [REFERENCE])} - verdicts.keys()
    return int(bool(beyond or missing))


def show_verdicts(verdicts: dict[str, dict], curves: dict[str, np.ndarray]) -> None:
    rows = []
    for name, v in verdicts.items():
        interval = ", ".join(f"{end:+.2%}" for end in v["interval"] or ())
        cells = f"{curves[name][-1]:.4f}", f"{v['early']:.1e}", f"{v['final']:+.2%} [{interval}]"
        rows.append((name, *cells, f"{v['limit']:g}", "ok" if v["ok"] else "BEYOND"))
    columns = "setting", "final loss", "largest distance, first 20", "last quarter [95 %]", "limit"
    show((*columns, "verdict"), rows)


if __name__ == "__main__":
    sys.exit(main())
