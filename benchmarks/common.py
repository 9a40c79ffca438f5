"""Interleaved timing and result files of the benchmarks."""

import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from llm_train_bench.apply.precision import autocast
from llm_train_bench.apply.sharded import materialize
from llm_train_bench.base.files import ROOT, locked, write_whole
from llm_train_bench.base.hardware import devices, own_hardware_file
from llm_train_bench.base.tables import markdown_table
from llm_train_bench.measure.device import device_name
from llm_train_bench.model.config import load_config
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.parallel.ranks import ALONE, Ranks
from llm_train_bench.results.result_files import read_result
from llm_train_bench.results.schema import Result
from llm_train_bench.run.launch import train_planned
from llm_train_bench.run.provenance import describe_environment

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
LR, BETAS, CLIP = 6e-4, (0.9, 0.95), 1.0


class ContestantEnded(RuntimeError):
    """A contestant failed or did not end; the others go on without it."""


def device_of_runs() -> torch.device:
    """The device that train.py takes, not used here: our own use would make it shared."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_train(*argv: object, script: str = "train.py", out: str | Path | None = None) -> Result:
    """The result of `SCRIPT ARGV...`, run in this process, by itself or as torchrun's only rank."""
    # Dynamo refuses to compile one function for more than eight models, as it should in one run.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    ranks = ALONE if script == "train.py" else Ranks(0, 1, 0)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")  # any: nobody else comes
    with tempfile.TemporaryDirectory() as temporary:
        words = [*map(str, argv), "--output-dir", str(out or temporary)]
        train = importlib.import_module(script.removesuffix(".py")).train
        with mock.patch("sys.argv", [script, *words]):  # the result has it
            train_planned(train, words, script, ranks)
        return result_below(out or temporary)


def result_below(directory: str | Path) -> Result:
    """The one result below an --output-dir."""
    (path,) = Path(directory).glob("*/result.json")
    return read_result(path)


def run_train_apart(*argv: object, script: str, out: Path) -> None:
    """Run `SCRIPT ARGV...` in a process of its own; ContestantEnded has its last line if it fails."""
    command = [sys.executable, ROOT / script, *map(str, argv), "--output-dir", out]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"{script}: ")]
        raise ContestantEnded(lines[-1] if lines else f"exit code {done.returncode}")


def show(columns: Sequence[str], rows: Iterable[Iterable[str]], left: Sequence[str] = ()) -> None:
    """Print a table as Markdown; figures go right, the first column and those in `left` go left."""
    print(markdown_table(columns, rows, left), end="")


def fresh_model(config: str | Path, T: int, device: torch.device) -> Transformer:
    """Our model with the weights of seed 0."""
    with torch.device("meta"):
        model = Transformer(load_config(config), T)
    materialize(model, device, seed=0)
    return model


def bare_step(
    model: nn.Module, loss_of: Callable[[Tensor], Tensor], draw: Callable[[], Tensor], amp: str
) -> Callable[[], None]:
    """A training step in as few lines as PyTorch allows: ids are drawn, `loss_of` gives their loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, fused=True)

    def step() -> None:
        ids = draw()
        with autocast(amp, ids.device):
            loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def keep_devices(entries: list[dict[str, Any]]) -> Path:
    """Write entries into the user's own hardware.json, in place of those of the same names."""
    path, names = own_hardware_file(), {entry["name"] for entry in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"devices": []}
        others = [entry for entry in content["devices"] if entry.get("name") not in names]
        write_whole(path, json.dumps(content | {"devices": others + entries}, indent=1) + "\n")
    devices.cache_clear()
    return path


def save(
    name: str, content: dict, device: torch.device | None = None, directory: Path = RESULTS
) -> Path:
    """Write a result file that says where and when it was measured; returns its path."""
    now, device = datetime.datetime.now(datetime.UTC), device or device_of_runs()
    environment = describe_environment(device)
    environment.pop("hostname")  # of no use to a reader, and private
    about = {"benchmark": name, "date": f"{now:%Y-%m-%d}", "device": device_name(device)}
    content = about | {"environment": environment} | content
    directory.mkdir(parents=True, exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in device_name(device).lower())
    path = directory / f"{name}-{slug}-{now:%Y%m%d-%H%M}.json"
    write_whole(path, json.dumps(content, indent=1) + "\n")
    print(f"\nwrote {path.name}", flush=True)
    return path
