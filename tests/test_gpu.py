"""What only a GPU can show; `make gpu-check` runs it on a machine that has one."""

import json

import pytest
import torch

from tests.helpers import ROOT, only_result, read_steps, run_train

pytestmark = pytest.mark.gpu
SMALL = ["configs/gpt2-125m.json", "--bsz", 4, "--seq-len", 256, "--device", "cuda",
         "--n-steps", 8, "--warmup-steps", 4, "--lr-warmup-steps", 2]  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    assert torch.cuda.is_available(), "these tests were asked for, and there is no GPU"
    monkeypatch.chdir(ROOT)


def losses(tmp_path, name, *argv):
    assert run_train(*SMALL, *argv, "--output-dir", tmp_path / name) == 0
    return [s["loss"] for s in read_steps(tmp_path / name)]


def test_event_times_agree_with_the_wall_clock(tmp_path):
    losses(tmp_path, "x")
    r = only_result(tmp_path / "x")
    m = r["metrics"]
    assert m["window_s"] == pytest.approx(sum(r["step_times_s"]))
    parts = [m[f"{p}_time_mean_s"] for p in ("data", "forward", "backward", "optimizer")]
    assert sum(parts) == pytest.approx(m["step_time_mean_s"], rel=1e-3)
    assert m["peak_allocated_gib"] > 1 and m["peak_reserved_gib"] >= m["peak_allocated_gib"]
    if r["device"]["peak_bf16_tflops"]:
        assert 0 < m["mfu"] < 0.85


@pytest.mark.parametrize(
    "flags",
    [
        ["--pt-compile"],
        ["--pt-compile", "--compile-mode", "reduce-overhead"],
        ["--pt-compile", "--compile-mode", "max-autotune-no-cudagraphs"],
        ["--attention", "flash"],
        ["--attention", "cudnn"],
        ["--attention", "efficient"],
        ["--attention", "math"],
        ["--sac-freq", "1/2"],
        ["--sac-freq", "1/1", "--sac-policy", "op"],
        ["--pt-compile", "--sac-freq", "1/2"],
        ["--pad-vocab", "128"],
        ["--bsz", 2, "--grad-acc-steps", 2],
        ["--bsz", 2, "--grad-acc-steps", 2, "--pt-compile", "--compile-mode", "reduce-overhead"],
        ["--amp", "fp16"],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_toggles_compute_the_same(flags, tmp_path):
    plain = losses(tmp_path, "plain")
    other = losses(tmp_path, "other", *flags)
    assert other == pytest.approx(plain, rel=1e-2)


def test_window_by_flex_and_by_mask_train_alike(tmp_path):
    values = json.loads((ROOT / "configs/mistral-7b-v0.1.json").read_text())
    values |= {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024,
               "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
               "sliding_window": 96}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    found = {}
    for name, flags in {
        "mask": ["--attention", "math"],
        "flex": ["--attention", "flex"],
        "compiled": ["--pt-compile"],
    }.items():
        argv = [path, *SMALL[1:], *flags, "--output-dir", tmp_path / name]
        assert run_train(*argv) == 0
        found[name] = [s["loss"] for s in read_steps(tmp_path / name)]
    assert found["flex"] == pytest.approx(found["mask"], rel=1e-2)
    assert found["compiled"] == pytest.approx(found["mask"], rel=1e-2)


def test_out_of_memory_is_exit_code_3(tmp_path):
    argv = [*SMALL, "--bsz", 100000, "--output-dir", tmp_path]
    assert run_train(*argv) == 3
    assert only_result(tmp_path)["status"] == "oom"


def test_energy_is_measured(tmp_path):
    losses(tmp_path, "x", "--n-steps", 200, "--bsz", 16)
    m = only_result(tmp_path / "x")["metrics"]
    assert 50 < m["average_power_w"] < 2000, m["energy_source"]


@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp"])
def test_one_rank_with_nccl_gives_the_losses_of_train(script, tmp_path):
    """World size 1 through the whole distributed path."""
    import subprocess
    import sys

    plain = losses(tmp_path, "plain", "--amp", "off")
    argv = [*map(str, SMALL), "--amp", "off", "--nproc", "1", "--output-dir", str(tmp_path / "d")]
    command = [sys.executable, f"{script}.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [s["loss"] for s in read_steps(tmp_path / "d")] == pytest.approx(plain, rel=1e-4)
