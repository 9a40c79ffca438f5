"""doctor.py on this machine and with stand-ins for the drivers' tools."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

import doctor
from llm_train_bench.base.machine import detect_platform
from llm_train_bench.check import findings as machine_findings
from tests.helpers import python

NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu*) echo "0, GPU-aaa, NVIDIA H200, 580.1, 91000, 143771"; echo "1, GPU-bbb, NVIDIA H200, 580.1, 4, 143771";;
--query-compute-apps*) echo "GPU-aaa, 4711, 90800, python3";;
esac
"""  # noqa: E501


def test_this_machine(output_of):
    findings = {f["what"]: f for f in json.loads(output_of(doctor.main, "--json"))}
    assert findings["Python"]["found"].startswith(f"{sys.version_info.major}.")
    assert findings["torch"]["state"] == "ok" and findings["PyTorch"]["found"].startswith("2.")
    assert "PyTorch" in output_of(doctor.main)


def test_without_any_library():
    """As on a fresh machine: -S hides what is installed."""
    done = python("-S doctor.py", code=1, PYTHONPATH="")
    assert done.stderr == ""
    for name in ("torch", "numpy", "pydantic", "PyYAML"):
        assert f"fail  {name:18}  not installed" in done.stdout


@pytest.fixture
def installed(monkeypatch):
    """Lets findings.libraries find these versions (None: not installed), and 2.12 of all others."""

    def library(kind, name, **versions):
        def version(library):
            if (found := versions.get(library.replace("-", "_"), "2.12")) is None:
                raise importlib.metadata.PackageNotFoundError
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)
        return next((f for f in machine_findings.libraries(kind) if f.what == name), None)

    return library


def test_libraries_that_are_old_or_missing(installed):
    torch = installed("cpu", "torch", torch="2.9.1+cu128")
    assert torch.state == "fail" and "2.9.1+cu128, older than 2.11" in torch.found
    torchao = installed("nvidia", "torchao", torchao=None)
    assert (
        torchao.state == "warn" and torchao.optional and "pip install -e '.[fp8]'" in torchao.advice
    )
    assert installed("nvidia", "numpy", numpy=None).state == "fail"
    assert installed("nvidia", "nvidia-ml-py").state == "ok"
    assert installed("nvidia", "amdsmi") is None


def test_amds_build_of_transformer_engine_has_another_name(installed):
    without = dict.fromkeys(["transformer_engine", "transformer_engine_rocm10"])
    assert installed("amd", "transformer-engine", **without).state == "ok"
    without |= dict.fromkeys(["transformer_engine_rocm7", "transformer_engine_rocm_torch"])
    missing = installed("amd", "transformer-engine", **without)
    assert "ROCm/TransformerEngine" in missing.advice


@pytest.mark.parametrize(
    ("tool", "text", "states", "says"),
    [("nvidia-smi", NVIDIA_SMI, {"GPU 0": "ok", "GPU 0 is in use": "warn", "GPU 1": "ok"},
      ["90800 MiB by process 4711 (python3)", "kill 4711"]),
     ("amd-smi", "#!/bin/sh\n", {"GPU driver": "ok"}, ["amd-smi monitor"]),
     ("nvidia-smi", "#!/bin/sh\nexit 9\n", {"GPU driver": "fail"}, ["dmesg"])],
)  # fmt: skip
def test_gpus_and_who_holds_their_memory(tool, text, states, says, tmp_path, monkeypatch):
    """Also where the driver fails, and on AMD, whose own tool shows them."""
    (tmp_path / tool).write_text(text)
    (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [*machine_findings.drivers("nvidia" if tool == "nvidia-smi" else "amd")]
    assert {f.what: f.state for f in found} == states
    assert all(any(words in f.found + f.advice for f in found) for words in says)


@pytest.mark.parametrize(
    ("there", "kind"),
    [("/dev/nvidiactl", "nvidia"), ("/usr/lib/wsl/lib/libnvidia-ml.so.1", "nvidia"),
     ("/dev/kfd", "amd"), ("/dev/dri", "cpu")],
)  # fmt: skip
def test_whose_gpus_by_what_their_driver_leaves(there, kind, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == there)
    assert detect_platform() == kind


def test_settings_that_slow_a_run_down(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    findings = {f.what: f for f in machine_findings.settings()}
    assert findings["CUDA_LAUNCH_BLOCKING"].advice.startswith("unset CUDA_LAUNCH_BLOCKING")
    assert findings["CUDA_VISIBLE_DEVICES"].found == "is empty"
