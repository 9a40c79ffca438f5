"""The matmul rate this device really sustains, in bf16 and FP8: the roof of every training run.

    python benchmarks/gemm.py [CONFIG ...] [--tokens N] [--seconds S] [--heat S]

Measures the matmuls of the models' own linear layers (forward and both gradients, in their layouts)
and large squares. They run one after the other on a warm device, on normally distributed data
(zeros draw less power and run faster). On a GPU the rates of the best shapes go into
configs/roofs.json, where runs find them.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from bench.files import write_whole
from bench.formulas.hardware import ROOFS_FILE, name_of_part
from bench.measure.device import device_memory_gib, device_name, pick_device, synchronize
from bench.measure.power import PowerMeter
from bench.results.schema import POWER_CAP, DeviceUse
from benchmarks.common import save
from model.config import ModelConfig, load_config

GPU_CONFIGS = ["configs/gpt2-1.5b.json", "configs/llama-3.1-8b.json", "configs/llama-3.1-70b.json"]
CPU_CONFIGS = ["configs/gpt2-tiny.json"]
Call = Callable[[int], object]
COPIES = 4  # operands taken in turn, so that they do not stay in the cache


def model_shapes(config: ModelConfig, tokens: int) -> dict[str, tuple[int, int, int, str]]:
    """(M, N, K, layout) of the matmuls of a block's linear layers and of the head, by name.

    The layout says which operands lie transposed in memory, as training has them. Its letters are
    cuBLAS', which name the second operand first: TN forward (x w^T, the weight is stored out x in),
    NN for the gradient of the input (g w), NT for that of the weight (g^T x).
    """
    head = (-(-config.vocab_size // 128) * 128, config.hidden_size)
    sizes = config.block_shapes() | {"head": head}  # out, in
    shapes = {}
    for name, (n, k) in sizes.items():
        shapes[f"{config.name} {name}"] = (tokens, n, k, "TN")
        shapes[f"{config.name} {name}, input gradient"] = (tokens, k, n, "NN")
        shapes[f"{config.name} {name}, weight gradient"] = (n, k, tokens, "NT")
    return shapes


def bf16_matmul(m: int, n: int, k: int, layout: str, device: torch.device) -> Call:
    """A function of the round number that computes one of several products of random matrices."""

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return torch.randn(columns, rows, device=device, dtype=torch.bfloat16).t()
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

    # With row-major matrices, forward is x w^T, the input's gradient g w, the weight's g^T x.
    a = [matrix(m, k, layout == "NT") for _ in range(COPIES)]
    b = [matrix(k, n, layout == "TN") for _ in range(COPIES)]
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return lambda i: torch.mm(a[i % COPIES], b[i % COPIES], out=out)


def fp8_matmul(
    m: int, n: int, k: int, layout: str, device: torch.device, fast: bool = True
) -> Call:
    """The same with e4m3 operands and one scale each, to a bf16 result.

    Always in the one layout that Hopper has FP8 matmuls for; libraries transpose where needed. `fast`
    adds up with fewer bits, as libraries do in the forward pass only.
    """
    # MI300 has its own e4m3, with half the range.
    fnuz = torch.version.hip and "gfx94" in torch.cuda.get_device_properties(device).gcnArchName
    e4m3 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    a = [torch.randn(m, k, device=device).to(e4m3) for _ in range(COPIES)]
    b = [torch.randn(n, k, device=device).to(e4m3) for _ in range(COPIES)]
    one = torch.ones((), device=device)

    def run(i: int):
        return torch._scaled_mm(
            a[i % COPIES], b[i % COPIES].t(), one, one, out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )  # fmt: skip

    return run


def rate(run: Call, flops: float, seconds: float, device: torch.device):
    """(best, median) TFLOP/s of batches of calls over some seconds."""
    for i in range(COPIES):
        run(i)
    synchronize(device)
    start = time.perf_counter()
    run(0)
    synchronize(device)
    calls = max(1, int(0.02 / max(1e-6, time.perf_counter() - start)))
    rates = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not rates:
        start = time.perf_counter()
        for i in range(calls):
            run(i)
        synchronize(device)
        rates.append(calls * flops / (time.perf_counter() - start) / 1e12)
    return max(rates), statistics.median(rates)


def heat(device: torch.device, seconds: float) -> None:
    """Work until clocks and temperature are those of a long run: a cool GPU is a few percent faster."""
    run = bf16_matmul(8192, 8192, 8192, "TN", device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i in range(20):
            run(i)
        synchronize(device)


def main() -> None:
    """Measure all shapes, print them, keep them, and write the roof of a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--tokens", type=int, help="rows of the activations")
    parser.add_argument("--seconds", type=float, default=0.5, help="per shape and format")
    parser.add_argument("--heat", type=float, default=20.0, help="seconds of work before, on a GPU")
    parser.add_argument("--replace", action="store_true", help="write a lower roof, too")
    args = parser.parse_args()
    device = pick_device("auto")
    cuda = device.type == "cuda"
    tokens = args.tokens or (16384 if cuda else 256)
    squares = (4096, 8192, 16384) if cuda else (512,)
    shapes = {f"square {n}": (n, n, n, "TN") for n in squares}
    for path in args.configs or (GPU_CONFIGS if cuda else CPU_CONFIGS):
        shapes |= model_shapes(load_config(path), tokens)
    kinds = {"bf16": bf16_matmul}
    if _has_fp8(device):
        kinds |= {"fp8": fp8_matmul, "fp8 exact sums": functools.partial(fp8_matmul, fast=False)}
    if cuda:
        heat(device, args.heat)
    power = PowerMeter(device)
    power.begin()
    rows = []
    print("| shape | M, N, K | format | best [TFLOP/s] | median |\n|---|---|---|---:|---:|")
    for name, (m, n, k, layout) in shapes.items():
        for kind, make in kinds.items():
            if kind != "bf16" and (n % 16 or k % 16):
                continue
            run = make(m, n, k, layout, device)
            best, median = rate(run, 2 * m * n * k, args.seconds, device)
            rows.append({"shape": name, "mnk": [m, n, k], "layout": layout, "format": kind,
                         "best_tflops": best, "median_tflops": median})  # fmt: skip
            print(f"| {name} | {m}, {n}, {k} | {kind} | {best:.4g} | {median:.4g} |", flush=True)
    use = power.end(rank=0)
    found = roof(rows)
    content = {"roof": found, "tokens": tokens, "device_use": use.model_dump(), "rows": rows}
    path = save("gemm", content, device)
    if cuda:
        part = name_of_part(device_name(device), device_memory_gib(device))
        keep(part, found, use, json.loads(path.read_text()), args.replace)


def roof(rows: list[dict]) -> dict[str, float]:
    """The rates of the best shapes, by their medians: a single lucky batch is no roof.

    In FP8 it is that of a training step: one forward matmul with fast sums, two backward without.
    """
    top = {
        kind: max(row["median_tflops"] for row in rows if row["format"] == kind)
        for kind in dict.fromkeys(row["format"] for row in rows)
    }
    found = {"bf16_tflops": top["bf16"]}
    if "fp8" in top:
        found["fp8_tflops"] = 3 / (1 / top["fp8"] + 2 / top["fp8 exact sums"])
    return found


def keep(part: str, found: dict[str, float], use: DeviceUse, content: dict, replace: bool) -> None:
    """Write the roof of this GPU into configs/roofs.json, unless something spoilt it."""
    roofs = json.loads(ROOFS_FILE.read_text()) if ROOFS_FILE.exists() else {}
    before = roofs.get(part, {})
    hot = [why for why in use.held_down if why != POWER_CAP]
    why = None
    if use.other_processes:
        why = f"{use.other_processes} other process(es) used the GPU"
    elif hot:
        why = f"its clocks were held down: {', '.join(hot)}"
    elif not replace and any(found[k] < (before.get(k) or 0.0) for k in found):
        why = "it is lower than the one there (--replace takes it all the same)"
    if why:
        print(f"{ROOFS_FILE.name} stays as it was: {why}", file=sys.stderr)
        return
    about = f"benchmarks/gemm.py, {content['date']}, torch {content['environment']['libraries']['torch']}"
    roofs[part] = {"fp8_tflops": None} | found | {"source": about}
    write_whole(ROOFS_FILE, json.dumps(roofs, indent=1) + "\n")


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        fp8_matmul(64, 64, 64, "TN", device)(0)
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
