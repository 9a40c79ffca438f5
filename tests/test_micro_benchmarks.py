"""Benchmarks in small: what they count, that they run, and what a GPU's first half hour runs."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch

from benchmarks import attention, collectives
from llm_train_bench.base.hardware import devices, find_hardware
from llm_train_bench.measure.collective_rates import COLLECTIVES
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import make_plan
from tests.helpers import ROOT
from tests.processes import forked


def test_attention_s_memory_is_that_of_the_formula():
    """The plain one keeps T x T weights for each sample, the fused one none."""
    inputs = [torch.randn(2, 256, 16, requires_grad=True) for _ in range(3)]
    ways = {"plain": attention.plain, "fused": attention.fused}
    plain, fused = attention.of_one_size(ways, inputs, rounds=1)
    squares = 2 * 256 * 256 * 4 / 2**20
    assert squares < plain["kept_mib"] < 4 * squares and fused["kept_mib"] < squares / 2
    assert 0 < plain["forward_ms"][0] <= plain["forward_ms"][1] and fused["backward_ms"][0] > 0
    torch.testing.assert_close(attention.plain(*inputs), attention.fused(*inputs))


def test_collectives_run_and_estimates_take_their_rate(own_hardware):
    own, flags = own_hardware(), "--device cpu --mib 0.01 1 --rounds 1 --no-save --hardware h100"
    known = find_hardware("h100")
    done = forked("benchmarks/collectives.py --nproc 2", flags)
    assert all(done.stdout.count(kind) == 2 for kind in COLLECTIVES)
    (entry,) = json.loads(own.read_text())["devices"]
    devices.cache_clear()
    found = find_hardware("h100")
    assert found.ring_gb_per_s == entry["ring_gb_per_s"] < 100
    assert found.bf16_tflops == 989.4 and found.fitted and found.fp8_tflops
    assert found.peak_clock_mhz == known.peak_clock_mhz and found.peak_clock_mhz


def test_one_rank_has_nothing_to_exchange(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--nproc", "1"])
    with pytest.raises(SystemExit, match=r"^collectives\.py: one rank"):
        collectives.main()


@pytest.mark.parametrize("part", ["facts", "compare", "test"])
def test_commands_of_the_first_half_hour_on_a_gpu_are_ours(part, tmp_path):
    """Every one is a script's or benchmark's that is there, with flags that it takes; in nine minutes."""
    environment = os.environ | {"DRY": "1", "OUT": str(tmp_path), "PY": sys.executable}
    options = {"cwd": ROOT, "env": environment, "text": True}
    out = subprocess.check_output(["benchmarks/gpu.sh", part], **options)
    lines = [line for line in out.splitlines() if line.startswith(sys.executable)]
    assert len(lines) >= 2
    for _, name, *argv in map(shlex.split, lines):
        if name == "train.py":
            make_plan(parse_args(argv, name), Script.ONE, 1, "nvidia")
        else:
            assert name == "-m" or (ROOT / name).exists()
    assert subprocess.run(["benchmarks/gpu.sh", "x"], **options).returncode == 2
