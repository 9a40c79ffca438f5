"""Peaks: known devices by their whole name, unknown ones not at all."""

import json

import pytest

from bench.errors import UsageError
from bench.formulas.hardware import HARDWARE_FILE, devices, find_peaks, name_of_part

DEVICES = json.loads(HARDWARE_FILE.read_text())["devices"]


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H200", 989.4, 1978.9),
        ("NVIDIA H100 80GB HBM3", 989.4, 1978.9),
        ("NVIDIA H100 PCIe", 756, 1513),
        ("AMD Instinct MI300X", 1307, 2615),
        ("AMD Instinct MI250X", 191.5, None),
        ("NVIDIA A100-SXM4-80GB", 312, None),
    ],
)
def test_known(name, bf16, fp8):
    peaks = find_peaks(name)
    assert (peaks.bf16_tflops, peaks.fp8_tflops) == (bf16, fp8)
    assert "datasheet" in peaks.source


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "H200", "NVIDIA GeForce RTX 4060", "CPU", ""])
def test_unknown_is_none_never_a_neighbour(name):
    assert find_peaks(name).bf16_tflops is None


def test_a_partition_is_not_the_whole():
    whole = name_of_part("AMD Instinct MI300X VF", 191.5)
    part = name_of_part("AMD Instinct MI300X", 24.0)
    assert find_peaks(whole).bf16_tflops == 1307
    assert find_peaks(part).bf16_tflops is None and find_peaks(part).name == part
    assert part == "AMD Instinct MI300X, 24 GiB of it"
    assert name_of_part("Box", 1.0) == name_of_part("Box", None) == "Box"


def test_the_user_knows_better():
    h200 = find_peaks("NVIDIA H200", 800.0)
    assert (h200.name, h200.bf16_tflops, h200.fp8_tflops) == ("H200 SXM", 800.0, 1978.9)
    assert h200.source.startswith("--peak-tflops; else vendor datasheet")
    assert find_peaks("NVIDIA H200", None, 1500.0).bf16_tflops == 989.4
    box = find_peaks("Box", 12.5)
    assert (box.name, box.fp8_tflops, box.source) == ("Box", None, "--peak-tflops")
    assert find_peaks("Box", 12.5, 25.0).source == "--peak-tflops, --peak-fp8-tflops"


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tdp_w": None}, "entry Box lacks tdp_w"), ({"colour": "grey"}, "entry Box has colour")],
)
def test_an_incomplete_entry_is_one_line(change, message, tmp_path, monkeypatch):
    entry = DEVICES[0] | {"name": "Box", "driver_names": ["Box"]} | change
    path = tmp_path / "hardware.json"
    entry = {k: v for k, v in entry.items() if k != "tdp_w" or v is not None}
    path.write_text(json.dumps({"devices": [*DEVICES, entry]}))
    monkeypatch.setattr("bench.formulas.hardware.HARDWARE_FILE", path)
    devices.cache_clear()
    try:
        with pytest.raises(UsageError, match=message):
            find_peaks("NVIDIA H200")
    finally:
        devices.cache_clear()


def test_every_figure_has_a_source_and_fp8_is_dense():
    names = [n for d in DEVICES for n in d["driver_names"]]
    assert len(names) == len(set(names))
    for d in DEVICES:
        assert d["source"]
        # Sparse figures are twice the dense ones, and dense FP8 is twice BF16.
        assert d["fp8_tflops"] is None or 1.9 < d["fp8_tflops"] / d["bf16_tflops"] < 2.1
        measured = d["measured_bf16_tflops"]  # nobody ever reached 95 % of the peak
        assert measured is None or 0.45 < measured / d["bf16_tflops"] < 0.95
