"""Attention by head size and length: PyTorch's kernels against the plain formula, eager and compiled.

    python benchmarks/attention.py [--head-sizes N ...] [--lengths N ...] [--bsz N] [--rounds N]

For each pair the ms of forward and of backward, the memory that the forward leaves for the backward, and
the peak of the backward [MiB]. They are timed in turn, round after round; minima and medians count. On a
CPU the memory is what autograd keeps, and there is no peak.
"""

import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import parser_of, save, show
from llm_train_bench.measure.device import pick_device
from llm_train_bench.measure.rates import time_steps

MIB = 2**20


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the formula has it: all T x T scores exist. (B, T, D) each."""
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(dim=-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel that PyTorch chooses."""
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]


def kept_bytes(function: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(seen.values())


def measure(function: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, float]:
    """Seconds of one forward and one backward, and the memory of both where the device counts it."""
    device, cuda, outputs, row = inputs[0].device, inputs[0].is_cuda, [], {}
    for tensor in inputs:
        tensor.grad = None
    before = torch.cuda.memory_allocated() if cuda else 0
    row["forward_s"] = time_steps(lambda: outputs.append(function(*inputs)), 1, device)
    if cuda:
        row["kept_mib"] = (torch.cuda.memory_allocated() - before) / MIB
        torch.cuda.reset_peak_memory_stats()
    gradient = torch.ones_like(outputs[0])
    row["backward_s"] = time_steps(lambda: outputs[0].backward(gradient), 1, device)
    if cuda:
        row["backward_peak_mib"] = (torch.cuda.max_memory_allocated() - before) / MIB
    return row


def main() -> None:
    parser = parser_of(__doc__, 5)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--bsz", type=int, default=8)
    parser.add_argument("--no-save", action="store_true", help="Only print.")
    args = parser.parse_args()
    device = pick_device("auto")
    cuda = device.type == "cuda"
    lengths = args.lengths or ([256, 1024, 4096, 8192, 16384] if cuda else [128, 256, 512, 1024])
    dtype = torch.bfloat16 if cuda else torch.float32
    ways = {"plain": plain, "plain, compiled": torch.compile(plain), "fused": fused}
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    rows = []
    for size, length in itertools.product(args.head_sizes, lengths):
        inputs = [torch.randn(args.bsz, length, size, **options) for _ in range(3)]
        rows += of_one_size(ways, inputs, args.rounds)
    columns = "D", "T", "attention", "forward ms: min, median", "backward ms", "kept MiB"
    names = "head_size length attention forward_ms backward_ms kept_mib backward_peak_mib".split()
    cells = [[cell(row, name) for name in names] for row in rows]
    show((*columns, "backward's peak"), cells, left=("attention",))
    if not args.no_save:
        save("attention", {"bsz": args.bsz, "rounds": args.rounds, "rows": rows}, device)


def of_one_size(ways: dict[str, Callable], inputs: list[Tensor], rounds: int) -> list[dict]:
    """A row for each way, timed in turn after one round that does not count; one that fails says so."""
    _, length, size = inputs[0].shape
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for number, (name, way) in itertools.product(range(rounds + 1), ways.items()):
        if name in failed:
            continue
        try:
            measured[name] += [measure(way, inputs)] * (number > 0)
        except torch.OutOfMemoryError:
            failed[name] = "out of memory"
    rows = []
    for name, times in measured.items():
        row = {"head_size": size, "length": length, "attention": name, "failed": failed.get(name)}
        if times:
            for part in ("forward", "backward"):
                seconds = [t[f"{part}_s"] for t in times]
                row[f"{part}_ms"] = [1e3 * min(seconds), 1e3 * statistics.median(seconds)]
            row |= {memory: value for memory, value in times[-1].items() if memory.endswith("_mib")}
            if "kept_mib" not in row and "compiled" not in name:
                row["kept_mib"] = kept_bytes(ways[name], inputs) / MIB
        rows.append(row)
    return rows


def cell(row: dict, name: str) -> str:
    """A figure of a row as text."""
    value = row.get(name, row["failed"] or "" if name.endswith("_ms") else "")
    if isinstance(value, list):
        return ", ".join(f"{each:.2f}" for each in value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
