"""doctor.py on this machine and with stand-ins for the drivers' tools."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest

import doctor
from llm_train_bench.base.machine import detect_platform
from tests.helpers import python

NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu*) echo "0, GPU-aaa, NVIDIA H200, 580.1, 91000, 143771"; echo "1, GPU-bbb, NVIDIA H200, 580.1, 4, 143771";;
--query-compute-apps*) echo "GPU-aaa, 4711, python3, 90800";;
esac
"""  # noqa: E501
ROCM_SMI = """#!/bin/sh
echo '{"card0": {"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "206141652992",
"VRAM Total Used Memory (B)": "9000000000"}, "system": {"Driver version": "6.12"}}'
"""


def put(tmp_path, monkeypatch, name, text):
    tool = tmp_path / name
    tool.write_text(text)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_this_machine(output_of):
    found = {f["what"]: f for f in json.loads(output_of(doctor.main, "--json"))}
    assert found["Python"]["found"].startswith(f"{sys.version_info.major}.")
    assert found["torch"]["state"] == "ok" and found["PyTorch"]["found"].startswith("2.")
    assert "PyTorch" in output_of(doctor.main)


def test_without_any_library():
    """As on a fresh machine: -S hides what is installed."""
    done = python("-S doctor.py", code=1, PYTHONPATH="")
    assert done.stderr == ""
    for name in ("torch", "numpy", "pydantic", "rich", "PyYAML"):
        assert f"!!  {name:18}  not installed" in done.stdout


def test_an_old_torch_is_bad(monkeypatch):
    versions = {"torch": "2.9.1+cu128"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name, "1.0"))
    (torch,) = [f for f in doctor.libraries("cpu") if f.what == "torch"]
    assert torch.state == "bad" and "2.9.1+cu128, older than 2.11" in torch.found


def test_who_holds_a_gpus_memory(tmp_path, monkeypatch):
    put(tmp_path, monkeypatch, "nvidia-smi", NVIDIA_SMI)
    found = doctor.drivers("nvidia")
    assert [f.what for f in found] == ["GPU 0", "GPU 0 is in use", "GPU 1"]
    assert "90800 MiB by process 4711 (python3)" in found[1].found
    assert "kill 4711" in found[1].advice


def test_amd(tmp_path, monkeypatch):
    put(tmp_path, monkeypatch, "rocm-smi", ROCM_SMI)
    found = doctor.drivers("amd")
    assert "AMD Instinct MI300X, driver 6.12, 196592 MiB" in found[0].found
    assert found[1].what == "card0 is in use"


@pytest.mark.parametrize(
    ("there", "kind"),
    [("/dev/nvidiactl", "nvidia"), ("/usr/lib/wsl/lib/libnvidia-ml.so.1", "nvidia"),
     ("/dev/kfd", "amd"), ("/dev/dri", "cpu")],
)  # fmt: skip
def test_whose_gpus_by_what_their_driver_leaves(there, kind, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == there)
    assert detect_platform() == kind


def test_amd_where_only_the_newer_tool_is(tmp_path, monkeypatch):
    put(tmp_path, monkeypatch, "amd-smi", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor.drivers("amd")
    assert finding.state == "ok" and "amd-smi monitor" in finding.found


def test_a_failing_driver_is_bad(tmp_path, monkeypatch):
    put(tmp_path, monkeypatch, "nvidia-smi", "#!/bin/sh\nexit 9\n")
    (finding,) = doctor.drivers("nvidia")
    assert finding.state == "bad" and finding.advice


def test_missing_libraries_say_how_to_get_them(monkeypatch):
    def version(name):
        if name in ("torchao", "numpy"):
            raise importlib.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f.what: f for f in doctor.libraries("nvidia")}
    assert found["torchao"].state == "missing"
    assert "pip install -e '.[fp8]'" in found["torchao"].advice
    assert found["numpy"].state == "bad" and found["nvidia-ml-py"].state == "ok"
    assert "amdsmi" not in found


def test_amds_build_of_transformer_engine_has_another_name(monkeypatch):
    def version(name):
        if name.startswith("transformer") and name != "transformer-engine-rocm7":
            raise importlib.metadata.PackageNotFoundError
        return "2.8.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f.what: f for f in doctor.libraries("amd")}
    assert found["transformer-engine"].state == "ok"
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    found = {f.what: f for f in doctor.libraries("amd")}
    assert "ROCm/TransformerEngine" in found["transformer-engine"].advice


def test_settings_that_slow_a_run_down(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = {f.what: f for f in doctor.settings()}
    assert found["CUDA_LAUNCH_BLOCKING"].advice.startswith("unset CUDA_LAUNCH_BLOCKING")
    assert found["CUDA_VISIBLE_DEVICES"].found == "is empty"


def test_bad_flag(refused):
    refused(doctor.main, "--mend", "--mend")
