"""Speed, memory and energy of every number format, with and without compilation, interleaved.

    python benchmarks/precision.py [--rounds N] [--cases NAME,...] [--formats NAME,...]

Prints and keeps tokens/s, TFLOP/s (causal), MFU, peak memory and joules a step. Every round has
another order, so that no format has always the same one before it; each warms the device up itself. A
format that the device or an absent library refuses is reported as such and left out.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.device import pick_device
from benchmarks.common import run_train_apart, save

FORMATS = {
    "bf16": [],
    "bf16 compile": ["--pt-compile"],
    "bf16 CUDA graphs": ["--pt-compile", "--compile-mode", "reduce-overhead"],
    "fp8 te current": ["--use-fp8", "--fp8-recipe", "current"],
    "fp8 te delayed": ["--use-fp8", "--fp8-recipe", "delayed"],
    "fp8 te blockwise": ["--use-fp8", "--fp8-recipe", "blockwise"],
    "fp8 torchao tensorwise": ["--use-fp8", "--pt-compile", "--fp8-recipe", "tensorwise"],
    "fp8 torchao rowwise": ["--use-fp8", "--pt-compile", "--fp8-recipe", "rowwise"],
    "fp8 torchao gw_hp": ["--use-fp8", "--pt-compile", "--fp8-recipe", "rowwise_with_gw_hp"],
}
GPU_CASES = {
    "gpt2-125m T1024": ["configs/gpt2-125m.json", "--bsz", 64, "--seq-len", 1024],
    "gpt2-1.5b T1024": ["configs/gpt2-1.5b.json", "--bsz", 16, "--seq-len", 1024],
    "llama-3.1-8b-proxy T4096": ["configs/llama-3.1-8b-proxy.json", "--bsz", 4, "--seq-len", 4096],
    "llama-3.1-8b 16 layers T4096": ["configs/llama-3.1-8b.json", "--bsz", 2, "--seq-len", 4096],
    "llama-70b-proxy T4096": ["configs/llama-70b-proxy.json", "--bsz", 2, "--seq-len", 4096],
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
    args = parser.parse_args()
    device = pick_device("auto")
    cases = GPU_CASES if device.type == "cuda" else CPU_CASES
    wanted = args.cases.split(",") if args.cases else list(cases)
    formats = args.formats.split(",") if args.formats else list(FORMATS)
    measured: dict[str, dict[str, list[dict]]] = {case: {} for case in wanted}
    refused: dict[str, dict[str, str]] = {case: {} for case in wanted}
    for case in wanted:
        for i in range(args.rounds):
            order = [f for f in formats if f not in refused[case]]
            random.Random(i).shuffle(order)
            for name in order:
                config, *flags = cases[case]
                flags += [*FORMATS[name], "--n-steps", args.steps, "--pad-vocab", 128,
                          "--warmup-steps", args.warmup_steps, "--no-tensorboard"]  # fmt: skip
                try:
                    with tempfile.TemporaryDirectory() as out:
                        config = shape(config, LAYERS.get(case), Path(out))
                        result = run_train_apart(config, *flags, "--output-dir", out)
                except RuntimeError as error:  # the other formats are still worth having
                    refused[case][name] = str(error)
                    print(f"{case}, {name}: {error}", file=sys.stderr, flush=True)
                    continue
                measured[case].setdefault(name, []).append(figures(result))
        # A file a case, so that a session cut short has what was measured.
        slug = "".join(c if c.isalnum() else "-" for c in case)
        content = {"case": case, "measured": measured[case], "refused": refused[case]}
        save(f"precision-{slug}", content, device)
        print_case(case, measured[case], args.rounds)


def shape(config: str, layers: int | None, directory: Path) -> Path:
    """The config file, or a copy of it with fewer layers."""
    if layers is None:
        return Path(config)
    values = json.loads(Path(config).read_text()) | {"num_hidden_layers": layers}
    path = directory / f"{Path(config).stem}-{layers}-layers.json"
    path.write_text(json.dumps(values))
    return path


def figures(result) -> dict[str, float | None]:
    """What the table shows of one run, and all its step times."""
    m = result.metrics
    names = ("tokens_per_sec", "model_tflops_per_gpu_causal", "mfu", "ideal_time_fraction",
             "roof_time_fraction", "step_time_drift", "peak_allocated_gib", "peak_reserved_gib",
             "peak_rss_gib", "average_power_w", "tokens_per_joule", "final_loss",
             "compile_s")  # fmt: skip
    return {name: getattr(m, name) for name in names} | {"step_times_s": result.step_times_s}


def print_case(case: str, rows: dict[str, list[dict]], rounds: int) -> None:
    """A table of one case: median round of each format, and the median of its ratios to bf16 compiled,
    round by round."""
    print(f"\n{case}\n\n| format | tokens/s: median (range) | / bf16 compile (range) | TFLOP/s causal | "
          "MFU | memory [GiB] | tokens/J | loss |\n|---|---:|---:|---:|---:|---:|---:|---:|")  # fmt: skip
    base = [r["tokens_per_sec"] for r in rows.get("bf16 compile", [])]
    for name, runs in rows.items():
        speeds = [r["tokens_per_sec"] for r in runs]
        middle = runs[speeds.index(statistics.median_low(speeds))]
        ratios = [a / b for a, b in zip(speeds, base, strict=False)]
        memory = middle["peak_allocated_gib"] or middle["peak_rss_gib"]
        some = f" ({len(runs)} rounds)" if len(runs) < rounds else ""
        cells = [
            name + some, _range(speeds, ",.0f"), _range(ratios, ".3f"),
            _number(middle["model_tflops_per_gpu_causal"], ".4g"), _number(middle["mfu"], ".1%"),
            f"{memory:.2f}", _number(middle["tokens_per_joule"], ".2f"),
            _number(middle["final_loss"], ".4f"),
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
