"""Head and loss: ours, the plain way, and torch's own linear_cross_entropy where it exists.

    python benchmarks/loss.py [--rounds N]

Times forward and backward, interleaved, and measures the peak memory at vocabulary 128256 and
sequence 8192 (on a CPU by resident size, each in a separate process).
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F

from benchmarks.common import interleave, number_apart, parser_of, report, save
from llm_train_bench.measure.device import GIB, peak_resident_bytes, pick_device
from llm_train_bench.measure.rates import time_steps
from llm_train_bench.model.loss import LinearCrossEntropy

M_MMAP_THRESHOLD = -3  # malloc.h
KINDS = ["plain", "chunked"] + ["torch"] * hasattr(F, "linear_cross_entropy")


def contestant(
    kind: str, device: torch.device, N: int, d: int, V: int, *chunk: int
) -> Callable[[], None]:
    """Loss and backward of one kind on random data; parameters fp32, bf16 on a GPU as under AMP."""
    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(N, d, device=device, dtype=low, requires_grad=True)
    weight = torch.randn(V, d, device=device, requires_grad=True)
    labels = torch.randint(V, (N,), device=device)
    ours = LinearCrossEntropy(V, *chunk)

    def step():
        hidden.grad = weight.grad = None
        if kind == "chunked":
            with torch.autocast(device.type, torch.bfloat16, enabled=low != torch.float32):
                loss = ours(hidden, weight, labels)
        elif kind == "torch":
            options = torch.nn.LinearCrossEntropyOptions()
            loss = F.linear_cross_entropy(hidden, weight.to(low), labels, options=options)
        else:
            loss = F.cross_entropy((hidden @ weight.to(low).t()).float(), labels)
        loss.backward()

    return step


def peak(kind: str, device: torch.device, *sizes: int) -> float:
    """Peak memory of one loss and backward beyond inputs, in GiB."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc: every tensor above 1 MiB is given back when it is freed
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    step = contestant(kind, device, *sizes)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / GIB
    before = peak_resident_bytes()
    step()
    return (peak_resident_bytes() - before) / GIB


def main() -> None:
    parser = parser_of(__doc__, 7)
    parser.add_argument(
        "--peak", nargs="+", help="only print the peak of KIND, N, d, V, and elements of a chunk"
    )
    args = parser.parse_args()
    device = pick_device("auto")
    d = 4096 if device.type == "cuda" else 256
    if args.peak:
        kind, *sizes = args.peak
        print(peak(kind, device, *map(int, sizes)))
        return
    N, V = (8192, 128256) if device.type == "cuda" else (2048, 32000)
    steps = {k: contestant(k, device, N, d, V) for k in KINDS}
    timers = {k: functools.partial(time_steps, s, 3, device) for k, s in steps.items()}
    times = interleave(timers, args.rounds)
    ratios = {f"chunked / {k}": ("chunked", k) for k in steps if k != "chunked"}
    report("loss", times, ratios, f"head and loss, forward and backward, N {N}, d {d}, V {V}")
    peaks = {}
    for kind in KINDS:
        peaks[kind] = number_apart(__file__, "--peak", kind, 8192, d, 128256)
        print(f"peak memory at N 8192, d {d}, V 128256, {kind}: {peaks[kind]:.2f} GiB")
    save("loss_memory", {"about": f"GiB beyond inputs, N 8192, d {d}, V 128256", "gib": peaks})


if __name__ == "__main__":
    main()
