"""The highest matmul rate this device really reaches, in bf16 and FP8: the roof of every training run.

    python benchmarks/gemm.py [CONFIG ...] [--tokens N] [--seconds S]

Measures the matmuls of the models' own linear layers, forward and both gradients, and large squares,
on normally distributed data (zeros draw less power and run faster). On a GPU the best rates go into
configs/roofs.json, where every run finds them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from bench.device import device_name, pick_device, synchronize
from bench.hardware import ROOFS_FILE
from benchmarks.common import save
from model.config import ModelConfig, load_config

GPU_CONFIGS = ["configs/gpt2-1.5b.json", "configs/llama-3.1-8b.json", "configs/llama-3.1-70b.json"]
CPU_CONFIGS = ["configs/gpt2-tiny.json"]
COPIES = 4  # operands taken in turn, so that they do not stay in the cache


def model_shapes(config: ModelConfig, tokens: int) -> dict[str, tuple[int, int, int]]:
    """(M, N, K) of the matmuls of a block's linear layers and of the head, by name."""
    d, f = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    sizes = {  # out, in
        "qkv": (heads + 2 * kv, d),
        "attention out": (d, heads),
        "mlp up": (f * (2 if config.gated_mlp else 1), d),
        "mlp down": (d, f),
        "head": (-(-config.vocab_size // 128) * 128, d),
    }
    shapes = {}
    for name, (n, k) in sizes.items():
        shapes[f"{config.name} {name}"] = (tokens, n, k)
        shapes[f"{config.name} {name}, input gradient"] = (tokens, k, n)
        shapes[f"{config.name} {name}, weight gradient"] = (n, k, tokens)
    return shapes


def bf16_matmul(m: int, n: int, k: int, device: torch.device) -> Callable[[int], object]:
    """A function of the round number: one of several products of random matrices."""
    a = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(COPIES)]
    b = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(COPIES)]
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return lambda i: torch.mm(a[i % COPIES], b[i % COPIES].t(), out=out)


def fp8_matmul(m: int, n: int, k: int, device: torch.device) -> Callable[[int], object]:
    """The same with e4m3 operands and one scale each, to a bf16 result."""
    # MI300 has its own e4m3, whose range is half.
    fnuz = torch.version.hip and "gfx94" in torch.cuda.get_device_properties(device).gcnArchName
    e4m3 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    a = [torch.randn(m, k, device=device).to(e4m3) for _ in range(COPIES)]
    b = [torch.randn(n, k, device=device).to(e4m3) for _ in range(COPIES)]
    one = torch.ones((), device=device)

    def run(i: int):
        return torch._scaled_mm(
            a[i % COPIES], b[i % COPIES].t(), one, one, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    return run


def rate(run: Callable[[int], object], flops: float, seconds: float, device: torch.device):
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


def main() -> None:
    """Measure all shapes, print them, keep them, and write the roof of a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--tokens", type=int, help="rows of the activations")
    parser.add_argument("--seconds", type=float, default=0.5, help="per shape and format")
    args = parser.parse_args()
    device = pick_device("auto")
    cuda = device.type == "cuda"
    tokens = args.tokens or (16384 if cuda else 256)
    squares = (4096, 8192, 16384) if cuda else (512,)
    shapes = {f"square {n}": (n, n, n) for n in squares}
    for path in args.configs or (GPU_CONFIGS if cuda else CPU_CONFIGS):
        shapes |= model_shapes(load_config(path), tokens)
    kinds = {"bf16": bf16_matmul} | ({"fp8": fp8_matmul} if _has_fp8(device) else {})
    rows = []
    print("| shape | M, N, K | format | best [TFLOP/s] | median |\n|---|---|---|---:|---:|")
    for name, (m, n, k) in shapes.items():
        for kind, make in kinds.items():
            if kind == "fp8" and (n % 16 or k % 16):
                continue
            best, median = rate(make(m, n, k, device), 2 * m * n * k, args.seconds, device)
            rows.append({"shape": name, "mnk": [m, n, k], "format": kind,
                         "best_tflops": best, "median_tflops": median})  # fmt: skip
            print(f"| {name} | {m}, {n}, {k} | {kind} | {best:.4g} | {median:.4g} |", flush=True)
    # The median of the best shape: a single lucky batch is no roof.
    roof = {
        f"{kind}_tflops": max(r["median_tflops"] for r in rows if r["format"] == kind)
        for kind in kinds
    }
    path = save("gemm", {"roof": roof, "tokens": tokens, "rows": rows}, device)
    if cuda:
        roofs = json.loads(ROOFS_FILE.read_text()) if ROOFS_FILE.exists() else {}
        content = json.loads(path.read_text())
        libraries = content["environment"]["libraries"]
        about = f"benchmarks/gemm.py, {content['date']}, torch {libraries['torch']}"
        roofs[device_name(device)] = {"fp8_tflops": None} | roof | {"source": about}
        ROOFS_FILE.write_text(json.dumps(roofs, indent=1) + "\n")


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        fp8_matmul(64, 64, 64, device)(0)
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
