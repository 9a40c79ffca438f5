"""Initial values by a hash of their place, beside PyTorch's generator: speed, and equality on a GPU.

python benchmarks/initial_values.py [CONFIG ...]
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import parser_of, save, show
from llm_train_bench.formulas.parameters import parameter_shapes
from llm_train_bench.measure.device import pick_device
from llm_train_bench.measure.rates import time_steps
from llm_train_bench.model.config import load_config
from llm_train_bench.model.init import fill_normal

STD = 0.02


def main() -> None:
    parser = parser_of(__doc__, 5)
    parser.add_argument("configs", nargs="*", default=["configs/gpt2-125m.json"])
    args = parser.parse_args()
    device = pick_device("auto")
    generator = torch.Generator(device).manual_seed(0)
    rows = []
    for path in args.configs:
        shapes = [s for s in parameter_shapes(load_config(path)).values() if len(s) > 1]
        largest = torch.empty(max(map(size, shapes)), device=device)

        def ours(shapes=shapes, largest=largest) -> None:
            for i, shape in enumerate(shapes):
                fill_normal(largest[: size(shape)].view(shape), STD, f"0/{i}")

        def torchs(shapes=shapes, largest=largest) -> None:
            for shape in shapes:
                largest[: size(shape)].normal_(0.0, STD, generator=generator)

        ways, times = {"hash": ours, "generator": torchs}, {"hash": [], "generator": []}
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                seconds = time_steps(way, 1, device)
                times[name] += [seconds] * (number > 0)
        ratios = [a / b for a, b in zip(times["hash"], times["generator"], strict=True)]
        total = sum(map(size, shapes))
        rows.append({"config": path, "values": total, "ratio": statistics.median(ratios)} | times)
    columns = "config", "values", "hash [s]: min", "generator [s]: min", "ratio: median"
    show(columns, [(r["config"], f"{r['values']:,}", f"{min(r['hash']):.4f}",
                    f"{min(r['generator']):.4f}", f"{r['ratio']:.2f}") for r in rows])  # fmt: skip
    here, cpu = torch.empty(2**20 + 3, device=device), torch.empty(2**20 + 3)
    fill_normal(here, STD, "0/equal")
    fill_normal(cpu, STD, "0/equal")
    same = torch.equal(here.cpu(), cpu)
    print(f"the values on {device.type} are {'those' if same else 'NOT those'} of a CPU")
    save("initial_values", {"rows": rows, "same_as_cpu": same}, device)


def size(shape: tuple[int, ...]) -> int:
    """Numbers in a tensor."""
    return torch.Size(shape).numel()


if __name__ == "__main__":
    main()
