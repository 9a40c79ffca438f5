"""The matmul rate this device really sustains, in bf16 and FP8: the roof of every training run.

    python benchmarks/gemm.py [CONFIG ...] [--tokens N] [--seconds S] [--heat S]

Measures the matmuls of the models' own linear layers (forward and both gradients, in their layouts)
and large squares. They run one after the other on a warm device, on normally distributed data
(zeros draw less power and run faster). On a GPU the rates of the best shapes go into
configs/roofs.json, where runs find them. On a CPU they go into one's own hardware file, with the rates
of attention and of memory, for 1, 2, 4, ... threads: runs there then have an MFU, and estimate.py
--gpu cpu an answer.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import keep_devices, save
from llm_train_bench.base.files import locked, write_whole
from llm_train_bench.base.hardware import ROOFS_FILE, name_of_part
from llm_train_bench.base.tables import grouped
from llm_train_bench.check.rates import best_rates, cpu_entry, formats_of, rate
from llm_train_bench.measure.device import device_memory_gib, device_name, pick_device
from llm_train_bench.measure.matmul_rate import heat
from llm_train_bench.measure.power import PowerMeter
from llm_train_bench.model.config import ModelConfig, load_config
from llm_train_bench.results.remarks import POWER_CAP
from llm_train_bench.results.schema import DeviceUse

GPU_CONFIGS = ["configs/gpt2-1.5b.json", "configs/llama-3.1-8b.json", "configs/llama-3.1-70b.json"]
CPU_CONFIGS = ["configs/gpt2-tiny.json"]


def model_shapes(config: ModelConfig, tokens: int) -> dict[str, tuple[int, int, int, str]]:
    """(M, N, K, layout) of the matmuls of a block's linear layers and of the head, by name.

    The layout says which operands lie transposed in memory, as training has them. Its letters are
    cuBLAS', which name the second operand first: TN forward (x w^T, the weight is stored out x in),
    NN for the gradient of the input (g w), NT for that of the weight (g^T x).
    """
    head = (-(-config.vocab_size // 128) * 128, config.hidden_size)
    sizes = {w.module: w.shape for w in config.linear_layers(0)} | {"head": head}  # out, in
    shapes = {}
    for name, (n, k) in sizes.items():
        shapes[f"{config.name} {name}"] = (tokens, n, k, "TN")
        shapes[f"{config.name} {name}, input gradient"] = (tokens, k, n, "NN")
        shapes[f"{config.name} {name}, weight gradient"] = (n, k, tokens, "NT")
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--tokens", type=int, help="rows of the activations")
    parser.add_argument("--seconds", type=float, default=0.5, help="per shape and format")
    parser.add_argument("--heat", type=float, default=20.0, help="seconds of work before, on a GPU")
    parser.add_argument("--no-keep", action="store_true", help="do not write the file of roofs")
    parser.add_argument("--replace", action="store_true", help="write a lower roof, too")
    args = parser.parse_args()
    device = pick_device("auto")
    cuda = device.type == "cuda"
    tokens = args.tokens or (16384 if cuda else 256)
    squares = (4096, 8192, 16384) if cuda else (128, 512, 1024)
    shapes = {f"square {n}": (n, n, n, "TN") for n in squares}
    for path in args.configs or (GPU_CONFIGS if cuda else CPU_CONFIGS):
        shapes |= model_shapes(load_config(path), tokens)
    kinds = formats_of(device)
    if cuda:
        heat(device, args.heat)
    power = PowerMeter(device)
    power.begin()
    rows = []
    print("| shape | M, N, K | format | best [TFLOP/s] | median |\n|---|---|---|---:|---:|")
    for name, (m, n, k, layout) in shapes.items():
        for kind, make in kinds.items():
            if kind.startswith("fp8") and (n % 16 or k % 16):
                continue
            run = make(m, n, k, layout, device)
            best, median = rate(run, 2 * m * n * k / 1e12, args.seconds, device)
            row = {"shape": name, "mnk": [m, n, k], "layout": layout, "format": kind}
            rows.append(row | {"best_tflops": best, "median_tflops": median})
            print(f"| {name} | {m}, {n}, {k} | {kind} | {best:.4g} | {median:.4g} |", flush=True)
    use = power.end(rank=0)
    rates = roof(rows)
    content = {"roof": rates, "tokens": tokens, "device_use": use.model_dump(), "rows": rows}
    path = save("gemm", content, device)
    if cuda and not args.no_keep:
        part = name_of_part(device_name(device), device_memory_gib(device))
        with locked(ROOFS_FILE):
            keep(part, rates, use, json.loads(path.read_text()), args.replace)
    elif not cuda and not args.configs:
        keep_cpu(device, args.seconds)


def roof(rows: list[dict]) -> dict[str, float]:
    """The rates of the best shapes in the formats that have peaks."""
    kinds = grouped(rows, lambda row: row["format"])
    medians = {kind: [r["median_tflops"] for r in of] for kind, of in kinds.items()}
    rates = best_rates(medians)
    return {name: rate for name, rate in rates.items() if name != "fp32_tflops"}


def keep(part: str, rates: dict[str, float], use: DeviceUse, content: dict, replace: bool) -> None:
    """Write the roof of this GPU into configs/roofs.json, unless something spoilt it."""
    roofs = json.loads(ROOFS_FILE.read_text()) if ROOFS_FILE.exists() else {}
    before = roofs.get(part, {})
    why = None
    if use.other_processes:
        why = f"{use.other_processes} other process(es) used the GPU"
    elif hot := [reason for reason in use.held_down if reason != POWER_CAP]:
        why = f"its clocks were held down: {', '.join(hot)}"
    elif not replace and any(rate < (before.get(name) or 0.0) for name, rate in rates.items()):
        why = "it is lower than the one there (--replace takes it all the same)"
    if why:
        print(f"{ROOFS_FILE.name} stays as it was: {why}", file=sys.stderr)
        return
    about = f"benchmarks/gemm.py, {content['date']}, torch {content['environment']['libraries']['torch']}"
    roofs[part] = {"fp8_tflops": None} | rates | {"source": about}
    write_whole(ROOFS_FILE, json.dumps(roofs, indent=1) + "\n")


def keep_cpu(device: torch.device, seconds: float) -> None:
    """Measure this CPU's rates by numbers of threads, and write them into one's own hardware file."""
    most = torch.get_num_threads()
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < most] + [most]
    entries = []
    for threads in counts:
        torch.set_num_threads(threads)
        e = cpu_entry(device, seconds)
        entries.append(e)
        rates = f"fp32 {e['fp32_tflops']:.3f}, bf16 {e['measured_bf16_tflops']:.3f} TFLOP/s"
        print(f"{e['name']}: {rates}, memory {1e3 * e['memory_tb_per_s']:.0f} GB/s")
    print(f"wrote {keep_devices(entries)}")


if __name__ == "__main__":
    main()
