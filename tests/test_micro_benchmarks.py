"""Benchmarks in small: what they count, that they run, and what a quarter of an hour of a GPU runs."""

import importlib.util
import json
import math
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import on_gpu
from llm_train_bench.formulas.memory_model import estimate_memory
from tests.helpers import ROOT, plan_of, write_config
from tests.processes import forked


@pytest.fixture(params=[80, 140])
def for_a_gpu(monkeypatch, request):
    """benchmarks/on_gpu.py as it is on a GPU of so many GiB, to look at only; and 95 % of these."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=request.param * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    spec = importlib.util.spec_from_file_location("on_a_gpu", ROOT / "benchmarks/on_gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_a_gpu", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module, 0.95 * request.param


def test_commands_for_a_gpu_are_ours_and_fit(for_a_gpu, tmp_path):
    """A script takes each, and by estimate it fits the smallest GPU for which its batch is meant."""
    on, most = for_a_gpu
    kinds = on.MISSION, on.MOE, on.FP8, on.TRACED
    commands = [command for kind in kinds for command in kind.values()]
    assert any("--compile-mode reduce-overhead" in command for command in commands)
    for command in commands:
        script, model, *flags = f"{command} {on.STEPS}".split()
        shape, B, T = on.sized(model)
        argv = [write_config(tmp_path, shape), "--bsz", B, "--seq-len", T, *flags]
        work = plan_of(argv, script, 1, "nvidia").work
        assert estimate_memory(work).on_device(1) < most * 2**30, command


def test_a_run_of_on_gpu_that_fails_or_is_wrong_ends_no_other(tmp_path):
    def run(loss, norm=2.0):
        return lambda number: {"losses": [4.1, loss], "norm": norm, "ms": 1.0 + number}

    def broken(number):
        raise torch.OutOfMemoryError("out of memory")

    def absent(number):
        raise on_gpu.LeftOut("is not installed")

    part = on_gpu.Part("moe", tmp_path, time.monotonic() + 600, None)
    turns = {"125m, bf16": run(4.0), "125m, FP8": run(4.005), "8b": run(7.0)}
    turns |= {"125m, bad": run(4.02), "125m, backward": run(4.0, 2.2), "125m, nan": run(math.nan)}
    turns |= {"125m, large": broken, "125m, te": absent}
    part.take_turns(turns, rounds=2)
    rows = json.loads((tmp_path / "moe.json").read_text())
    assert [row["run"] for row in rows[8:]] == [row["run"] for row in rows[:6]]
    wrong = {row["run"]: row["wrong"] for row in rows if "wrong" in row}
    assert wrong.pop("125m, backward") == "other norm"
    assert wrong == dict.fromkeys(("125m, bad", "125m, nan"), "other losses")
    assert {row["run"] for row in rows if "failed" in row} == {"125m, large"}
    assert {row["run"] for row in rows if "left_out" in row} == {"125m, te"}
    assert on_gpu.show("moe", tmp_path) == 1
    late = on_gpu.Part("late", tmp_path, time.monotonic(), None)
    late.take_turns({"125m": run(4.0)}, rounds=1)
    assert late.rows[0]["left_out"] == "no time" and on_gpu.show("late", tmp_path) == 5


def test_on_gpu_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    """One part of it. All take two minutes: python benchmarks/on_gpu.py."""
    done = forked("benchmarks/on_gpu.py mission --minutes 30 --output-dir", tmp_path / "out")
    rows = json.loads((tmp_path / "out/mission.json").read_text())
    assert all("Transformer Engine" in row["run"] for row in rows if "left_out" in row)
    assert all(len(row["losses"]) == 3 for row in rows if "left_out" not in row)
    assert len(rows) == len(on_gpu.MISSION) and "mission: exit code 0" in done.stdout
    for argv, why in (
        (["mission", "--output-dir", str(tmp_path / "out")], "has results already"),
        (["facts"], "facts: no such part; there are mission, peers"),
        (["moe", "--output-dir", str(tmp_path / "out/mission.json/x")], "cannot be made"),
        (["peers", "--nanogpt", str(tmp_path)], "has no model.py"),
        (["moe", "--minutes", "nan"], "is too short"),
    ):
        monkeypatch.setattr(sys, "argv", ["on_gpu.py", *argv])
        with pytest.raises(SystemExit) as end:
            on_gpu.main()
        assert end.value.code == 2 and why in capsys.readouterr().err
