"""Peaks: known devices by their whole name, unknown ones not at all."""

import functools
import io
import json
import os
import re
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

import estimate
from benchmarks import gemm
from llm_train_bench.base import hardware
from llm_train_bench.base.errors import OwnError, UsageError
from llm_train_bench.base.hardware import devices, find_cpu, find_hardware, find_peaks
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.measure import device
from llm_train_bench.parallel.ranks import Ranks
from llm_train_bench.results.schema import Result
from llm_train_bench.run import measured_window
from tests import fuzz
from tests.helpers import answers, cases, changed, remark_texts, trained

DEVICES = json.loads(hardware.HARDWARE_FILE.read_text())["devices"]


@pytest.mark.parametrize(("name", "tflops"), answers("device_peaks.txt"))
def test_peaks_of_a_device_and_unknown_is_none_never_a_neighbour(name, tflops):
    peaks = find_peaks(name)
    assert [peaks.bf16_tflops, peaks.fp8_tflops] == json.loads(tflops)
    assert peaks.bf16_tflops is None or "datasheet" in peaks.source


FOUR = {"name": "My Card", "bf16_tflops": 200.0, "memory_gib": 31.0, "memory_tb_per_s": 1.5}


def test_a_gpu_of_ones_own_needs_four_keys(own_hardware, output_of):
    own_hardware(FOUR, FOUR | {"name": "NVIDIA H200", "bf16_tflops": 700.0})
    assert find_peaks("My Card").bf16_tflops == 200 and find_hardware("my card").memory_gib == 31
    assert find_hardware("My Card").fp32_tflops == 200 / 16
    assert find_peaks("NVIDIA H200").bf16_tflops == 700  # one's own goes before
    assert find_peaks("NVIDIA B200").bf16_tflops == 2250
    argv = ["configs/gpt2-125m.json", "--gpu", "my card", "--json"]
    estimated = json.loads(output_of(estimate.main, argv))
    assert estimated["gpu"] == "My Card" and estimated["tokens_per_joule"] is None
    assert 0.05 < estimated["mfu"] < 0.8


BOX = DEVICES[0] | {"name": "Box", "driver_names": ["Box"]}


@pytest.mark.parametrize(("changes", "message"), cases("device"))
def test_a_wrong_entry_is_one_line(own_hardware, changes, message, tmp_path):
    """Of the user's own file, and of ours."""
    whose, _, changes = changes.replace("BIG", str(10**400)).partition(" ")
    entry = changed(BOX if whose == "ours" else FOUR, changes)
    own_hardware(*[entry] * (whose == "own"))
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        if whose == "ours":
            whole = json.loads(hardware.HARDWARE_FILE.read_text()) | {"devices": [*DEVICES, entry]}
            (tmp_path / "ours.json").write_text(json.dumps(whole))
            fuzz.read_hardware(tmp_path / "ours.json")
        devices()
    assert ".json: " in str(refused.value) and "\n" not in str(refused.value)


def test_a_partition_is_not_the_whole():
    whole = hardware.name_of_part("AMD Instinct MI300X VF", 191.5)
    part = hardware.name_of_part("AMD Instinct MI300X", 24.0)
    assert find_peaks(whole).bf16_tflops == 1307
    assert find_peaks(part).bf16_tflops is None and find_peaks(part).name == part
    assert part == "AMD Instinct MI300X, 24 GiB of it"
    assert hardware.name_of_part("Box", 1.0) == hardware.name_of_part("Box", None) == "Box"


def test_the_user_knows_better():
    h200 = find_peaks("NVIDIA H200", 800.0)
    assert (h200.name, h200.bf16_tflops, h200.fp8_tflops) == ("H200 SXM", 800.0, 1978.9)
    assert h200.source.startswith("--peak-tflops; else vendor datasheet")
    box = find_peaks("Box", 12.5)
    assert (box.name, box.fp8_tflops, box.source) == ("Box", None, "--peak-tflops")


def test_every_figure_has_a_source_and_fp8_is_dense():
    names = [n for d in DEVICES for n in d["driver_names"]]
    assert len(names) == len(set(names))
    for d in DEVICES:
        assert d["source"]
        # Sparse figures are twice the dense ones, and dense FP8 is twice BF16.
        # GeForce sums bf16 at half the rate, and Rubin has a format of its own.
        if d["name"] not in ("RTX 5090", "VR200 (one GPU)"):
            assert d["fp8_tflops"] is None or 1.9 < d["fp8_tflops"] / d["bf16_tflops"] < 2.1
        # Nobody ever reached 95 % of the peak, except where the clock is above the listed one.
        measured = d["measured_bf16_tflops"]
        most = 1.3 if d["name"] in ("RTX 3090", "RTX 4090", "RTX 5090") else 0.95
        assert measured is None or 0.45 < measured / d["bf16_tflops"] < most


def test_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for hip, why in ((None, "has no GPU support"), ("7.0", "sees no GPU")):
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", hip)
        with pytest.raises(UsageError, match=why):
            device.pick_device("cuda")


def test_ranks_share_a_gpu_only_where_asked(monkeypatch):
    for name, answer in {"is_available": True, "device_count": 2, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert device.pick_device("cuda", 1) == torch.device("cuda", 1)
    with pytest.raises(OwnError, match=r"sees no GPU for itself, only 2 in all.*_ENABLE=1 lets"):
        device.pick_device("cuda", 2)
    monkeypatch.setenv(device.SHARE_GPU, "1")
    assert device.pick_device("cuda", 5) == torch.device("cuda", 1)
    monkeypatch.setattr(device, "memory_gib", lambda _: 80.0)
    share = functools.partial(device.share_of_memory_gib, torch.device("cuda", 1), 6)
    assert share() == pytest.approx(80 / 3)
    monkeypatch.delenv(device.SHARE_GPU)
    assert share() == 80  # of another machine
    assert device.share_of_memory_gib(torch.device("cpu"), 4) == 10.0  # half of all is for ranks
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Ranks(0, 4, 0).here == 2


def test_a_result_of_ranks_that_share_a_gpu_is_marked(monkeypatch, tmp_path):
    """Two ranks with the same number of GPU may have two, if each sees one only."""
    for uuids, shared in (("GPU-1", "GPU-1"), True), (("GPU-1", "GPU-2"), False):
        hosts = [("box", pid, uuid) for pid, uuid in enumerate(uuids)]
        told = lambda _, x, hosts=hosts: hosts if isinstance(x, tuple) else [x]  # noqa: E731
        monkeypatch.setattr(measured_window, "gather", told)
        flags = "--device cpu --bsz 1 --seq-len 8 --n-steps 1 --warmup-steps 1 --warmup-seconds 0"
        r = trained(tmp_path / uuids[1], "gpt2-tiny --no-tensorboard", flags)
        assert ("ranks share a GPU" in Result.model_validate(r).invalid) == shared
        assert any("2 ranks share a GPU" in note for note in remark_texts(r)) == shared


def test_ranks_share_the_threads_of_a_cpu(own_hardware, monkeypatch):
    own_hardware(*(FOUR | {"name": f"{name}"} for name in ("Box, 8 threads", "Other, 32 threads")))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert find_cpu("Box", 1).name == "Box, 8 threads"
    for name, ranks, message in (
        ("Box", 3, "Box, 2 threads in .*; OMP_NUM_THREADS=2 python"),
        ("Box", 9, "Box, 1 thread in .*; OMP_NUM_THREADS=1 python"),
        ("Nobody's", 1, "no peak of Nobody's in .*; python"),
    ):
        with pytest.raises(UsageError, match=message):
            find_cpu(name, ranks)


def test_a_measured_cpu_has_an_estimate(own_hardware, tmp_path, monkeypatch, output_of, refused):
    """benchmarks/gemm.py writes it, a run is held against it, --calibrate makes its estimate right."""
    path, threads = own_hardware(FOUR), torch.get_num_threads()
    gemm.keep_cpu(torch.device("cpu"), seconds=0.01)
    entries = json.loads(path.read_text())["devices"]
    assert entries[0] == FOUR and entries[-1]["name"] == hardware.threads_of(cpu_name(), threads)
    e = entries[-1]
    assert e["bf16_tflops"] >= e["fp32_tflops"] > 0 and e["memory_tb_per_s"] > 0
    devices.cache_clear()
    flags = "configs/gpt2-tiny.json --seq-len 128 --amp off --bsz"
    r = trained(tmp_path, f"{flags} 8 --device cpu --n-steps 5 --warmup-steps 2 --run-name r")
    assert r["device"]["peak_bf16_tflops"] == e["bf16_tflops"]
    assert r["device"]["hardware"] == cpu_name()
    mfu = r["metrics"]["model_tflops_per_gpu"] / e["bf16_tflops"]
    assert r["metrics"]["mfu"] == pytest.approx(mfu)

    def step_s(bsz) -> float:
        argv = (f"{flags} {bsz} --gpu cpu --json --calibrate", tmp_path / "r")
        return json.loads(output_of(estimate.main, *argv))["step_s"]

    right = step_s(8)
    assert right == pytest.approx(r["metrics"]["step_time_median_s"], rel=1e-3)
    # One slow step is no slower device.
    times = r["step_times_s"]
    r["metrics"] |= {"step_time_mean_s": 3 * sum(times), "window_s": 15 * sum(times)}
    (tmp_path / "r/result.json").write_text(json.dumps(r))
    assert step_s(8) == right and 1.7 < step_s(16) / right < 2.0
    argv = f"{flags} 8 --pt-compile --gpu cpu --calibrate", tmp_path / "r"
    shown = output_of(estimate.main, *argv)
    assert "that run had another choice of --pt-compile, which one factor cannot carry" in shown
    monkeypatch.setenv("OMP_NUM_THREADS", "77")  # a run would have so many
    message = "OMP_NUM_THREADS=77 python benchmarks/gemm.py"
    refused(estimate.main, message, f"{flags} 16 --gpu cpu")


@pytest.mark.parametrize(("facts", "cores", "identity"), answers("cpu_names.txt"))
def test_a_cpu_is_its_name_instruction_sets_and_cores(facts, cores, identity, monkeypatch):
    block = "processor: 0\n" + facts.replace("; ", "\n") + "\n\n"
    text = block.replace(": ", "\t: ") * int(cores) if facts else ""
    monkeypatch.setattr(Path, "open", lambda self, *args, **kwargs: io.StringIO(text))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(int(cores))), raising=False)
    assert cpu_name() == identity


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux only")
def test_memory_and_cpu_time_are_the_systems(monkeypatch):
    pages = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert device.memory_now(torch.device("cpu")) * 2**30 == pytest.approx(pages, rel=0.2)
    peak = device.peak_resident_bytes()
    assert 0.8 * pages < peak <= 1.01 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stat = io.StringIO("cpu  100 20 30 400 50 6 7 8 99 99\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(Path, "open", lambda path, **_: stat)
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    *machine, own = device.cpu_seconds()
    assert machine == pytest.approx([62.1, 16.3, 0.8])
    assert own == pytest.approx(sum(os.times()[:4]), abs=1.0)
    monkeypatch.setattr(device, "_of_process", lambda name: None)
    monkeypatch.setattr(resource, "getrusage", lambda who: mock.Mock(ru_maxrss=3))
    assert device.peak_resident_bytes() == 3 * 1024
