"""Memory and speed by --sac-freq and --sac-policy, interleaved, beside what estimate.py expects.

    python benchmarks/recompute.py [--rounds N] [--output-dir DIR]

Prints a table and keeps all of every run. A setting that does not fit the device is reported.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import RESULTS, device_of_runs, run_record, run_train_apart, save

SETTINGS = {
    "none": [],
    "1/4 block": ["--sac-freq", "1/4"],
    "1/2 block": ["--sac-freq", "1/2"],
    "1/1 block": ["--sac-freq", "1/1"],
    "1/1 op": ["--sac-freq", "1/1", "--sac-policy", "op"],
}
GPU_CASES = {
    "gpt2-1.5b T1024": ["configs/gpt2-1.5b.json", "--bsz", 16, "--seq-len", 1024],
    "llama-70b-proxy T4096": ["configs/llama-70b-proxy.json", "--bsz", 2, "--seq-len", 4096],
}
# A CPU reports memory by kind on request only.
CPU_CASES = {
    "llama-tiny T256": [
        "configs/llama-tiny.json",
        "--bsz",
        4,
        "--seq-len",
        256,
        "--memory-snapshot",
    ]
}


def main() -> None:
    """Run every case with every setting, round after round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = device_of_runs()
    for case, argv in (GPU_CASES if device.type == "cuda" else CPU_CASES).items():
        measured: dict[str, list[dict]] = {}
        failed: dict[str, str] = {}
        path = None
        for _ in range(args.rounds):
            for name in (name for name in SETTINGS if name not in failed):
                flags = [*argv, *SETTINGS[name], "--n-steps", 10, "--warmup-steps", 5]
                try:
                    with tempfile.TemporaryDirectory() as out:
                        result = run_train_apart(*flags, "--no-tensorboard", "--output-dir", out)
                except RuntimeError as error:  # most likely out of memory
                    failed[name] = str(error)
                    continue
                measured.setdefault(name, []).append(run_record(result))
            slug = "".join(c if c.isalnum() else "-" for c in case)
            content = {"case": case, "measured": measured, "failed": failed}
            path = save(f"recompute-{slug}", content, device, args.output_dir, path)
        expected = {}
        if device.type == "cuda":
            expected = {n: estimated_gib(argv, SETTINGS[n], path) for n in SETTINGS}
        show(case, measured, failed, expected)


def estimated_gib(argv: list, flags: list[str], measured: Path) -> float | None:
    """The peak that estimate.py expects on this device; None where it does not know the device."""
    device = json.loads(measured.read_text())["device"]
    command = [sys.executable, "estimate.py", *map(str, argv), *flags, "--gpu", device, "--json"]
    done = subprocess.run(command, cwd=RESULTS.parents[1], capture_output=True, text=True)
    return json.loads(done.stdout)["memory"]["peak"] / 2**30 if done.returncode == 0 else None


def show(
    case: str,
    measured: dict[str, list[dict]],
    failed: dict[str, str],
    expected: dict[str, float | None],
) -> None:
    """A table of one case: medians over its rounds."""
    print(
        f"\n{case}\n\n| --sac-freq | activations [GiB] | peak [GiB] | expected [GiB] | tokens/s |"
    )
    print("|---|---:|---:|---:|---:|")
    for name, runs in measured.items():
        metrics = [run["metrics"] for run in runs]
        memory = runs[0]["memory"] or {}
        cells = [
            memory.get("activations_gib"),
            runs[0]["memory_gib"],
            expected.get(name),
        ]
        speed = statistics.median(m["tokens_per_sec"] for m in metrics)
        shown = " | ".join("-" if c is None else f"{c:.3f}" for c in cells)
        print(f"| {name} | {shown} | {speed:,.0f} |")
    for name, why in failed.items():
        print(f"| {name} | {why} | | | |")


if __name__ == "__main__":
    main()
