"""Saving against torch.distributed.checkpoint.async_save: stall of the loop, and time to durable.

    python benchmarks/checkpoint.py [CONFIG]

Both save the same state (parameters and AdamW's moments) of one process to the same disk, in turn.
Ours writes with a checksum and synchronises files and names; theirs synchronises files.
"""

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.common import fresh_model
from llm_train_bench.model.stored import encoded
from llm_train_bench.run.checkpoint.durable import Files, commit
from llm_train_bench.run.checkpoint.training_state import Staging, state_tensors

ROUNDS = 7


def ours(state: dict[str, torch.Tensor], staging: Staging, top: Path) -> tuple[float, float]:
    """Stall and time to durable [s]."""
    begin = time.perf_counter()
    copies, _ = staging.copy(state)
    stall = time.perf_counter() - begin
    files, part = Files(), top / ".part"
    files.make(part)
    size, crc = files.write(part / "rank00000.safetensors", encoded(copies))
    files.write(part / "manifest.json", [json.dumps([size, crc]).encode()])
    commit(part, top / "ours", files)
    return stall, time.perf_counter() - begin


def theirs(state: dict[str, torch.Tensor], top: Path) -> tuple[float, float]:
    """The same by torch's own."""
    begin = time.perf_counter()
    future = async_save(state, checkpoint_id=str(top / "theirs"))
    stall = time.perf_counter() - begin
    if isinstance(future, Future):  # as it is where staging is not asynchronous
        future.result()
    return stall, time.perf_counter() - begin


def main(argv: list[str]) -> None:
    """Print both, interleaved: minimum and median, and the ratio of medians."""
    model = fresh_model(argv[0] if argv else "configs/gpt2-125m.json", 64, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    state = {name: tensor.clone() for name, tensor in state_tensors(model, optimizer)}
    gb = sum(t.numel() * t.element_size() for t in state.values()) / 1e9
    staging = Staging(torch.device("cpu"))
    ways = {"ours": lambda top: ours(state, staging, top), "theirs": lambda top: theirs(state, top)}
    times = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):  # the first warms both up
        for name, save in ways.items():
            with tempfile.TemporaryDirectory(dir=".") as top:
                times[name].append(save(Path(top)))
    print(f"{model.config.name}: {gb:.2f} GB, {ROUNDS} rounds, torch {torch.__version__}")
    medians = {}
    for name, (_, *measured) in times.items():
        parts = list(zip(*measured, strict=True))
        medians[name] = stall, durable = [statistics.median(part) for part in parts]
        (least_stall, least_durable), rate = map(min, parts), gb / durable
        print(f"{name:7} stall {least_stall:.3f} / {stall:.3f} s", end=", ")
        print(f"durable {least_durable:.3f} / {durable:.3f} s, {rate:.2f} GB/s")
    stall, durable = (a / b for a, b in zip(medians["ours"], medians["theirs"], strict=True))
    print(f"ours / theirs, medians: stall {stall:.2f}, durable {durable:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
