"""The matmul rate this device really sustains, in bf16 and FP8: the roof of every training run.

    python benchmarks/gemm.py [CONFIG ...] [--tokens N] [--seconds S] [--heat S]

Measures the matmuls of the models' own linear layers (forward and both gradients, in their layouts)
and large squares. They run one after the other on a warm device, on normally distributed data
(zeros draw less power and run faster). On a GPU the rates of the best shapes go into
configs/roofs.json, where runs find them. On a CPU they go into one's own hardware file, with the rates
of attention and of memory, for 1, 2, 4, ... threads: runs there then have an MFU, and estimate.py
--gpu cpu an answer.
"""

import contextlib
import datetime
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import keep_devices, parser_of, save, time_steps
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.hardware import ROOFS_FILE, name_of_part, threads_of
from llm_train_bench.measure.device import device_memory_gib, device_name, memory_gib, pick_device
from llm_train_bench.measure.matmul_rate import heat
from llm_train_bench.measure.power import PowerMeter
from llm_train_bench.model.config import ModelConfig, load_config
from llm_train_bench.results.schema import POWER_CAP, DeviceUse

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


def matmul(
    m: int, n: int, k: int, layout: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Call:
    """A function of the round number that computes one of several products of random matrices."""

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return torch.randn(columns, rows, device=device, dtype=dtype).t()
        return torch.randn(rows, columns, device=device, dtype=dtype)

    # With row-major matrices, forward is x w^T, the input's gradient g w, the weight's g^T x.
    a = [matrix(m, k, layout == "NT") for _ in range(COPIES)]
    b = [matrix(k, n, layout == "TN") for _ in range(COPIES)]
    out = torch.empty(m, n, device=device, dtype=dtype)
    return lambda i: torch.mm(a[i % COPIES], b[i % COPIES], out=out)


def fp8_matmul(m: int, n: int, k: int, _: str, device: torch.device, fast: bool = True) -> Call:
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
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    scaled_mm = torch.ops.aten._scaled_mm
    return lambda i: scaled_mm(a[i % COPIES], b[i % COPIES].t(), one, one, **options)


def rate(run: Call, flops: float, seconds: float, device: torch.device):
    """(best, median) TFLOP/s of batches of calls over some seconds."""
    numbers = itertools.count()

    def mean_of(n: int) -> float:
        return time_steps(lambda: run(next(numbers)), n, device)

    mean_of(COPIES)
    calls, rates = max(1, int(0.02 / max(1e-6, mean_of(1)))), []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not rates:
        rates.append(flops / mean_of(calls) / 1e12)
    return max(rates), statistics.median(rates)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--tokens", type=int, help="rows of the activations")
    parser.add_argument("--seconds", type=float, default=0.5, help="per shape and format")
    parser.add_argument("--heat", type=float, default=20.0, help="seconds of work before, on a GPU")
    parser.add_argument("--replace", action="store_true", help="write a lower roof, too")
    args = parser.parse_args()
    device = pick_device("auto")
    cuda = device.type == "cuda"
    tokens = args.tokens or (16384 if cuda else 256)
    squares = (4096, 8192, 16384) if cuda else (128, 512, 1024)
    shapes = {f"square {n}": (n, n, n, "TN") for n in squares}
    for path in args.configs or (GPU_CONFIGS if cuda else CPU_CONFIGS):
        shapes |= model_shapes(load_config(path), tokens)
    kinds = {"bf16": matmul}
    if not cuda:
        kinds |= {"fp32": functools.partial(matmul, dtype=torch.float32)}
    else:
        with contextlib.suppress(RuntimeError):  # a device without FP8
            fp8_matmul(64, 64, 64, "TN", device)(0)
            exact = functools.partial(fp8_matmul, fast=False)
            kinds |= {"fp8": fp8_matmul, "fp8 exact sums": exact}
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
            best, median = rate(run, 2 * m * n * k, args.seconds, device)
            row = {"shape": name, "mnk": [m, n, k], "layout": layout, "format": kind}
            rows.append(row | {"best_tflops": best, "median_tflops": median})
            print(f"| {name} | {m}, {n}, {k} | {kind} | {best:.4g} | {median:.4g} |", flush=True)
    use = power.end(rank=0)
    rates = roof(rows)
    content = {"roof": rates, "tokens": tokens, "device_use": use.model_dump(), "rows": rows}
    path = save("gemm", content, device)
    if cuda:
        part = name_of_part(device_name(device), device_memory_gib(device))
        keep(part, rates, use, json.loads(path.read_text()), args.replace)
    elif not args.configs:
        keep_cpu(device, args.seconds)


def roof(rows: list[dict]) -> dict[str, float]:
    """The rates of the best shapes, by their medians: a single lucky batch is no roof.

    In FP8 it is that of a training step: one forward matmul with fast sums, two backward without.
    """
    top: dict[str, float] = {}
    for row in rows:
        top[row["format"]] = max(top.get(row["format"], 0.0), row["median_tflops"])
    rates = {"bf16_tflops": top["bf16"]}
    if "fp8" in top:
        rates["fp8_tflops"] = 3 / (1 / top["fp8"] + 2 / top["fp8 exact sums"])
    return rates


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
    cpu, most = device_name(device), torch.get_num_threads()
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < most] + [most]
    entries = []
    for threads in counts:
        torch.set_num_threads(threads)
        e = cpu_entry(threads_of(cpu, threads), device, seconds)
        entries.append(e)
        rates = f"fp32 {e['fp32_tflops']:.3f}, bf16 {e['measured_bf16_tflops']:.3f} TFLOP/s"
        print(f"{e['name']}: {rates}, memory {1e3 * e['memory_tb_per_s']:.0f} GB/s")
    print(f"wrote {keep_devices(entries)}")


def cpu_entry(name: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """An entry of hardware.json for torch's present threads; `bf16_tflops` is the faster format's."""

    def best(run: Call, work: float) -> float:
        return rate(run, work, seconds, device)[1]

    def square(side: int, dtype: torch.dtype = torch.float32) -> float:
        return best(matmul(side, side, side, "TN", device, dtype), 2 * side**3)

    small, large = square(128), square(1024)
    # efficiency (side / (side + half))^3 of the one and of the other
    r = min(0.999, small / large) ** (1 / 3)
    half = max(0.0, 128 * 1024 * (1 - r) / (1024 * r - 128)) if 1024 * r > 128 else 128.0
    whole = ((1024 + half) / 1024) ** 3
    fp32, bf16 = whole * large, whole * square(1024, torch.bfloat16)
    x, tiny = torch.randn(2**24), torch.randn(8)
    out = torch.empty_like(x)
    bandwidth = best(lambda i: torch.add(x, 1.0, out=out), 8 * x.numel())  # TB/s
    launch = 1 / (1e12 * best(lambda i: tiny + 1.0, 1))
    B, H, T, D = 4, 6, 512, 64
    q, k, v = (torch.randn(B, H, T, D, requires_grad=True) for _ in range(3))
    flops = 4 * B * H * T * D * (T + 1) / 2
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    with torch.no_grad():
        forward = best(lambda i: attend(q, k, v), flops)
    both = best(lambda i: torch.autograd.grad(attend(q, k, v).sum(), (q, k, v)), flops)
    backward = 2 / max(1e-9, 1 / both - 1 / forward)
    fitted = dict.fromkeys(("sustained", "fp32_of_peak", "bandwidth", "serial_host"), 1.0)
    fitted |= {"half_side": half, "half_keys": 0.0, "half_head": 0.0, "launch_s": launch}
    fitted |= {"attention_forward": forward / fp32, "attention_backward": backward / fp32}
    rates = {"bf16_tflops": max(fp32, bf16), "fp32_tflops": fp32, "measured_bf16_tflops": bf16}
    memory = {"memory_gib": memory_gib(device) or 16.0, "memory_tb_per_s": bandwidth}
    links = {"ring_gb_per_s": 2.0, "nic_gb_per_s": 1.0, "fitted": fitted}
    source = f"benchmarks/gemm.py, {datetime.date.today()}, torch {torch.__version__}"
    return {"name": name, **rates, **memory, **links, "source": source}


if __name__ == "__main__":
    main()
