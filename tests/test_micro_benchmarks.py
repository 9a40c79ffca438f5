"""Benchmarks in small: what they count, that they run, and what a GPU's first half hour runs."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch

from benchmarks import attention, collectives
from llm_train_bench.formulas.hardware import devices, find_hardware
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import make_plan
from tests.helpers import ROOT


def test_attention_s_memory_is_that_of_the_formula():
    """The plain one keeps T x T weights for each sample, the fused one none."""
    inputs = [torch.randn(2, 256, 16, requires_grad=True) for _ in range(3)]
    ways = {"plain": attention.plain, "fused": attention.fused}
    plain, fused = attention.of_one_size(ways, inputs, rounds=1)
    squares = 2 * 256 * 256 * 4 / 2**20
    assert squares < plain["kept_mib"] < 4 * squares and fused["kept_mib"] < squares / 2
    assert 0 < plain["forward_ms"][0] <= plain["forward_ms"][1] and fused["backward_ms"][0] > 0
    torch.testing.assert_close(attention.plain(*inputs), attention.fused(*inputs))


def test_collectives_run_and_estimates_take_their_rate(tmp_path, monkeypatch):
    own = tmp_path / "hardware.json"
    monkeypatch.setenv("LLM_TRAIN_BENCH_HARDWARE", str(own))
    argv = ["--nproc", "2", "--device", "cpu", "--mib", "0.01", "1", "--rounds", "1", "--no-save",
            "--hardware", "h100"]  # fmt: skip
    own.write_text('{"devices": []}')
    known = find_hardware("h100")
    done = subprocess.run(
        [sys.executable, "benchmarks/collectives.py", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(done.stdout.count(kind) == 2 for kind in collectives.KINDS)
    (entry,) = json.loads(own.read_text())["devices"]
    devices.cache_clear()
    try:
        found = find_hardware("h100")
        assert found.ring_gb_per_s == entry["ring_gb_per_s"] < 100
        assert found.bf16_tflops == 989.4 and found.fitted and found.fp8_tflops
        assert found.peak_clock_mhz == known.peak_clock_mhz and found.peak_clock_mhz
    finally:
        devices.cache_clear()


def test_one_rank_has_nothing_to_exchange():
    done = subprocess.run(
        [sys.executable, "benchmarks/collectives.py", "--nproc", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.startswith("collectives.py: one rank")


@pytest.mark.parametrize("part", ["facts", "compare", "test"])
def test_commands_of_the_first_half_hour_on_a_gpu_are_ours(part, tmp_path):
    """Every one is a script's or benchmark's that is there, with flags that it takes; in nine minutes."""
    environment = os.environ | {"DRY": "1", "OUT": str(tmp_path), "PY": sys.executable}
    script = ["benchmarks/gpu.sh", part]
    out = subprocess.run(
        script, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    lines = [
        shlex.split(line) for line in out.stdout.splitlines() if line.startswith(sys.executable)
    ]
    assert len(lines) >= 2
    for _, name, *argv in lines:
        if name == "train.py":
            make_plan(parse_args(argv, name), Script.ONE, 1, "nvidia")
        else:
            assert name == "-m" or (ROOT / name).exists()
    assert subprocess.run(["benchmarks/gpu.sh", "x"], cwd=ROOT, env=environment).returncode == 2
