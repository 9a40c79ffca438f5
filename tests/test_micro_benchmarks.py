"""benchmarks/attention.py and collectives.py in small: what they count, and that they run."""

import json
import subprocess
import sys

import torch

from bench.formulas.hardware import devices, find_hardware
from benchmarks import attention, collectives
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
    (tmp_path / "hardware.json").write_text('{"devices": []}')
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
