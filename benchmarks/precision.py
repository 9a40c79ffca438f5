"""Speed, memory and energy of every number format, with and without compilation, interleaved.

    python benchmarks/precision.py [--rounds N] [--cases NAME,...] [--formats NAME,...] [--output-dir DIR]

Prints tokens/s, TFLOP/s (causal), MFU, peak memory and tokens per joule, and keeps all figures of
each run, after every run. Each round uses another order, so that no format always follows the same
one. Each run warms the device up itself. A format that the device or an absent library refuses is
reported and left out. A disturbed run (throttled, compiling) is marked.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import RESULTS, device_of_runs, run_record, run_train_apart, save

FORMATS = {
    "bf16": [],
    "bf16 compile": ["--pt-compile"],
    "bf16 CUDA graphs": ["--pt-compile", "--compile-mode", "reduce-overhead"],
    "fp8 te current": ["--use-fp8", "--fp8-recipe", "current"],
    "fp8 te delayed": ["--use-fp8", "--fp8-recipe", "delayed"],
    "fp8 te blockwise": ["--use-fp8", "--fp8-recipe", "blockwise"],
    "fp8 te mxfp8": ["--use-fp8", "--fp8-recipe", "mxfp8"],
    "fp8 torchao tensorwise": ["--use-fp8", "--pt-compile", "--fp8-recipe", "tensorwise"],
    "fp8 torchao rowwise": ["--use-fp8", "--pt-compile", "--fp8-recipe", "rowwise"],
    "fp8 torchao gw_hp": ["--use-fp8", "--pt-compile", "--fp8-recipe", "rowwise_with_gw_hp"],
}
# Micro batches large enough to spread the cost of a step's optimizer and casts of weights: in bf16,
# eager, 42 to 123 GiB by estimate.py. A smaller GPU reports what does not fit.
GPU_CASES = {
    "gpt2-125m T1024": ["configs/gpt2-125m.json", "--bsz", 128, "--seq-len", 1024],
    "gpt2-1.5b T1024": ["configs/gpt2-1.5b.json", "--bsz", 32, "--seq-len", 1024],
    "llama-3.1-8b-proxy T4096": ["configs/llama-3.1-8b-proxy.json", "--bsz", 8, "--seq-len", 4096],
    "llama-3.1-8b 16 layers T4096": ["configs/llama-3.1-8b.json", "--bsz", 5, "--seq-len", 4096],
    "llama-70b-proxy T4096": ["configs/llama-70b-proxy.json", "--bsz", 4, "--seq-len", 4096],
}
LAYERS = {"llama-3.1-8b 16 layers T4096": 16}  # of shapes that are cut to fit one GPU
CPU_CASES = {"gpt2-tiny T64": ["configs/gpt2-tiny.json", "--bsz", 4, "--seq-len", 64]}


def main() -> None:
    """Run every case in every format, round after round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--cases", help="only these, separated by commas")
    parser.add_argument("--formats", help="only these, separated by commas")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = device_of_runs()
    cases = GPU_CASES if device.type == "cuda" else CPU_CASES
    wanted = args.cases.split(",") if args.cases else list(cases)
    formats = args.formats.split(",") if args.formats else list(FORMATS)
    for given, known in ((wanted, cases), (formats, FORMATS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"no {unknown[0]!r}; there are {', '.join(known)}")
    for case in wanted:
        measure(case, cases[case], formats, args, device)


def measure(case: str, flags: list, formats: list[str], args: argparse.Namespace, device) -> None:
    """One case in every format, round after round; every run replaces the file."""
    measured: dict[str, list[dict]] = {}
    refused: dict[str, str] = {}
    path, slug = None, "".join(c if c.isalnum() else "-" for c in case)
    for i in range(args.rounds):
        order = [f for f in formats if f not in refused]
        random.Random(i).shuffle(order)
        for name in order:
            config, *more = flags
            more += [*FORMATS[name], "--n-steps", args.steps, "--pad-vocab", 128,
                     "--warmup-steps", args.warmup_steps, "--no-tensorboard"]  # fmt: skip
            try:
                with tempfile.TemporaryDirectory() as out:
                    config = shape(config, LAYERS.get(case), Path(out))
                    result = run_train_apart(config, *more, "--output-dir", out)
            except RuntimeError as error:  # the other formats are still worth having
                refused[name] = str(error)
                print(f"{case}, {name}: {error}", file=sys.stderr, flush=True)
            else:
                measured.setdefault(name, []).append(run_record(result))
            content = {"case": case, "measured": measured, "refused": refused}
            path = save(f"precision-{slug}", content, device, args.output_dir, path)
    print_case(case, measured, args.rounds)


def shape(config: str, layers: int | None, directory: Path) -> Path:
    """The config file, or a copy of it with fewer layers."""
    if layers is None:
        return Path(config)
    values = json.loads(Path(config).read_text()) | {"num_hidden_layers": layers}
    path = directory / f"{Path(config).stem}-{layers}-layers.json"
    path.write_text(json.dumps(values))
    return path


def print_case(case: str, rows: dict[str, list[dict]], rounds: int) -> None:
    """A table of one case: median round of each format, and the median of its ratios to bf16 compiled,
    round by round."""
    print(f"\n{case}\n\n| format | tokens/s: median (range) | / bf16 compile (range) | TFLOP/s causal | "
          "MFU | memory [GiB] | tokens/J | loss |\n|---|---:|---:|---:|---:|---:|---:|---:|")  # fmt: skip
    base = [r["metrics"]["tokens_per_sec"] for r in rows.get("bf16 compile", [])]
    for name, runs in rows.items():
        speeds = [r["metrics"]["tokens_per_sec"] for r in runs]
        middle = runs[speeds.index(statistics.median_low(speeds))]
        m, kind = middle["metrics"], middle["memory_kind"]
        ratios = [a / b for a, b in zip(speeds, base, strict=False)]
        some = f" ({len(runs)} rounds)" if len(runs) < rounds else ""
        marks = sorted({mark for r in runs for mark in r["unfit"]})
        cells = [
            name + some + (f" ({'; '.join(marks)})" if marks else ""),
            _range(speeds, ",.0f"), _range(ratios, ".3f"),
            _number(m["model_tflops_per_gpu_causal"], ".4g"), _number(m["mfu"], ".1%"),
            _number(middle["memory_gib"], ".2f") + ("" if kind == "allocated" else f" {kind}"),
            _number(m["tokens_per_joule"], ".2f"), _number(m["final_loss"], ".4f"),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


def _range(values: list[float], form: str) -> str:
    if not values:
        return "-"
    text = format(statistics.median(values), form)
    return f"{text} ({min(values):{form}} - {max(values):{form}})" if len(values) > 1 else text


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
