"""sweep.py: the experiment file, runs that fail, being killed and going on, the table."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from unittest import mock

import pytest

import sweep
from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.hardware import find_hardware
from llm_train_bench.base.machine import cpu_name
from llm_train_bench.compare.ratios import Prices, compare
from llm_train_bench.compare.report import runs_table
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.sweep import all_runs, cell_runs, grid, tune
from llm_train_bench.sweep import experiment as experiments
from llm_train_bench.sweep.all_runs import START_S, hours
from llm_train_bench.sweep.cell_runs import Rows, cell_key
from llm_train_bench.sweep.experiment import read_experiment
from llm_train_bench.sweep.grid import differences, make_cells, work_on
from llm_train_bench.sweep.rows_as_records import records_of_rows
from tests import fuzz
from tests.helpers import ROOT, cases, changed, records_of, result_of, words
from tests.processes import Started, wait_until

MODEL = "configs/gpt2-tiny.json"
RESULT = ROOT / "tests/sample/plain"
BASE = dict(experiment="x", models=[MODEL])


def experiment(**keys) -> experiments.Experiment:
    return experiments.Experiment.model_validate(BASE | keys)


def write(path, **keys) -> str:
    path.write_text(json.dumps(BASE | keys))  # JSON is YAML
    return str(path)


FAST = dict(seq_len=32, n_steps=3, warmup_steps=1, device="cpu", amp="off", no_tensorboard=True)


def start(path, out, root=ROOT) -> Started:
    """A sweep in a new process, which runs the scripts below `root`."""
    code = "import pathlib, sys, sweep; from llm_train_bench.sweep import cell_runs; "
    code += "cell_runs.ROOT = pathlib.Path(sys.argv[1]); sys.exit(sweep.main(sys.argv[2:]))"
    argv = [sys.executable, "-c", code, str(root), path, "--output-dir", str(out)]
    return Started(argv, {}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def read_rows(out) -> list[dict]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


# In place of train.py: runs that end badly, one that does not end, and one with a stored result.
STAND_IN = """
import pathlib, shutil, sys, time
value = dict(zip(sys.argv, sys.argv[1:]))
if not pathlib.Path(value.get("--init-from", ".")).exists():
    sys.exit("missing: no such directory")
if value.get("--bsz") == "400000":
    sys.exit(3)
time.sleep(int(value["--n-steps"]) / 6)
run = pathlib.Path(value["--output-dir"], value["--run-name"])
shutil.copytree({result!r}, run)
(run / "tensorboard").mkdir()
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripts")
    (directory / "train.py").write_text(STAND_IN.format(result=str(RESULT)))
    return directory


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory, scripts):
    """Three settings, twice each: one runs out of memory and one has no weights. The sweep is killed
    outright during the second run of the first, and started again."""
    out = tmp_path_factory.mktemp("sweep")
    cells = [{"bsz": 2, "sac_freq": "1/2"}, {"bsz": 400_000}, {"bsz": 3, "init_from": "missing"}]
    path = write(out / "e.yaml", training=FAST, cells=cells, repeats=2)
    first = start(path, out, scripts)
    assert wait_until(lambda: len(list(out.glob("logs/*.log"))) > 3, 120), first.poll()
    first.kill()
    first.communicate()
    before = (out / "rows.jsonl").read_text()
    with (out / "rows.jsonl").open("a") as f:
        f.write('{"key": "cut o')  # as if killed while writing
    second = start(path, out, scripts)
    text, _ = second.communicate(timeout=300)
    assert second.returncode == 0, text
    assert not first.members() and not second.members(), "something still runs"
    return out, before, text


def test_a_killed_sweep_goes_on_without_repeating_or_losing(killed_and_resumed):
    out, before, text = killed_and_resumed
    rows = read_rows(out)
    keys = [row["key"] for row in rows]
    assert len(keys) == len(set(keys)) == 6
    assert [row["repeat"] for row in rows] == [0, 0, 0, 1, 1, 1]  # interleaved
    n = len(before.splitlines())
    assert n == 3 and rows[:n] == [json.loads(line) for line in before.splitlines()]
    assert f"rows from before: {n}\n" in text and f"[6/{6}]" in text


def test_what_goes_wrong_is_a_row(killed_and_resumed):
    out, _, text = killed_and_resumed
    rows = read_rows(out)
    status = {(row["axes"]["bsz"], row["status"]) for row in rows}
    assert status == {(2, "ok"), (400_000, "oom"), (3, "failed")}
    (error,) = {row["error"] for row in rows if row["status"] == "failed"}
    assert error == "missing: no such directory"
    with (out / "runs.csv").open() as f:
        table = list(csv.DictReader(f))
    names = {"tokens_per_sec", "step_time_cv", "step_time_std_s"}
    assert len(table) == 6 and names <= set(table[0])
    assert all(float(row["tokens_per_sec"]) > 0 for row in table if not row["invalid"])
    lines = [line for line in text.splitlines() if line.startswith("| bsz")]
    assert "reference" in lines[0] and not (out / "ranked.md").exists()
    names = {"bsz 2, no init-from", "bsz 3, init-from missing", "bsz 400000, no init-from"}
    assert {line.split("|")[1].strip() for line in lines} == names
    assert sum("not compared: failed: missing: no such directory" in line for line in lines) == 1
    links = {path.name for path in out.glob("tensorboard/*") if path.is_dir()}
    assert links == {f"gpt2-tiny bsz 2, sac 1_2, no init-from #{i}" for i in range(2)}


def test_a_run_that_takes_too_long_is_ended(tmp_path, scripts):
    path = write(tmp_path / "e.yaml", training=FAST | {"n_steps": 10**6}, timeout_s=5)
    process = start(path, tmp_path, scripts)
    assert wait_until((tmp_path / "sweep.json").exists, 120), process.poll()
    other = start(path, tmp_path)
    refused, _ = other.communicate(timeout=60)
    assert other.returncode == 2 and refused.count("\n") == 1
    assert f"sweep.py: {tmp_path}: process" in refused
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "timeout: not done after 5 s" in text
    assert not process.members()


def test_a_killed_run_says_so(tmp_path):
    process = start(write(tmp_path / "e.yaml", training=FAST | {"n_steps": 10**6}), tmp_path)
    assert wait_until(lambda: list(tmp_path.glob("runs/*/result.json")), 120), process.poll()
    (run,) = process.members().keys() - {process.pid}
    os.kill(run, signal.SIGKILL)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "failed: killed by SIGKILL" in text
    # Its row and what it left count once.
    (record,) = records_of(tmp_path)
    assert record.invalid == ["status killed"]


def test_what_failed_is_run_again_on_request(tmp_path, output_of, scripts, monkeypatch):
    monkeypatch.setattr(cell_runs, "ROOT", scripts)
    later = tmp_path / "later"
    path = write(tmp_path / "e.yaml", training=FAST | {"init_from": str(later)})
    argv = [path, "--output-dir", tmp_path / "out"]
    output_of(sweep.main, argv, code=1)
    later.mkdir()
    assert "rows from before: 1\n" in output_of(sweep.main, argv, code=1)
    output_of(sweep.main, argv, "--retry")
    (row,) = read_rows(tmp_path / "out")
    assert row["status"] == "ok"


def test_rows_survive_torn_deep_and_escaped_lines(tmp_path, capsys):
    path, name = tmp_path / "rows.jsonl", printable(fuzz.ESCAPE)
    row = {"model": "m", "status": "oom", "axes": {}}
    a, b, c = (json.dumps({"key": key} | row) for key in "abc")
    deep = [f'{{"x": {"[" * n}{"]" * n}, {a[1:]}' for n in (50_000, 90)]
    without = [
        '{"key": "e"}',
        '{"key": "f", "model": "m", "status": "ok", "axes": {}}',
        json.dumps(row | {"key": "g"})[:-1] + ', "wall_s": 1e999}',
        json.dumps(row),
    ]
    spoilt = row | {"key": fuzz.ESCAPE, "axes": {fuzz.ESCAPE: [{fuzz.ESCAPE: fuzz.ESCAPE}]}}
    path.write_text("\n".join([*deep, b, *without, json.dumps(spoilt), c[:-9]]))
    rows = Rows(path)
    damaged = [f"{path}:{line}: is damaged; its setting runs again" for line in (1, 2, 4, 5, 6, 7)]
    assert capsys.readouterr().out.splitlines() == damaged
    assert rows.rows[name] == row | {"key": name, "axes": {name: [{name: name}]}}
    rows.forget("failed")
    assert list(rows.rows) == ["b", name]
    rows.add({"key": "d"} | row)
    del rows
    assert list(Rows(path).rows) == ["b", name, "d"]


@pytest.mark.parametrize(("keys", "found"), cases("differences"))
def test_identical_config_names_every_difference(keys, found):
    e = experiment(**json.loads(keys))
    assert differences(e, "x") == json.loads(found) and len(make_cells(e, "nvidia")) == 1


@pytest.mark.parametrize(("keys", "flags"), cases("cell"))
def test_flags_of_a_cell(keys, flags):
    (cell,) = make_cells(experiment(**json.loads(keys)), "nvidia")
    assert dict(cell.flags) == json.loads(flags)


def test_elsewhere_the_installed_command_is_named(output_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where another train.py may be
    out = output_of(sweep.main, "--models configs/gpt2-125m.json --set bsz=1 --dry-run")
    command = "llm-train-bench train configs/gpt2-125m.json --bsz 1"
    assert out.startswith(f"{command}\n# 1 setting x 1 repeat = 1 run;")


def test_the_time_of_a_sweep_is_estimated_from_what_is_known(output_of, own_hardware, capsys):
    """From the GPU that a file names, or the measured CPU; START_S is the start of each run."""
    argv = f"--models {MODEL} --set bsz=1,2 n-steps=90 --repeats 3 --dry-run --platform"
    unknown = "6 runs; the time is unknown until the first run ends"
    assert unknown in output_of(sweep.main, argv, "amd")
    cpu = dict(bf16_tflops=0.1, memory_gib=8.0, memory_tb_per_s=0.01)
    own_hardware(dict(name=f"{cpu_name()}, 1 thread") | cpu)
    summary = output_of(sweep.main, argv, "cpu").splitlines()[-1]
    e = experiment(grid={"bsz": [1, 2]}, training={"n_steps": 90})
    steps = [estimate_speed(*work_on(cell, e, "cpu")).step_s for cell in make_cells(e, "cpu")]
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.3)
    seconds = 3 * (2 * START_S + 100 * sum(steps))
    told = f"# 2 settings x 3 repeats = 6 runs; estimated {hours(seconds)};"
    assert summary == f"{told} compilation is extra"


def test_the_time_left_follows_from_the_runs_that_ended(tmp_path, monkeypatch, capsys):
    """Runs of 20, 50 and 90 s, by their mean."""
    e = experiment(grid={"bsz": [1, 4, 8]}, training=FAST, repeats=2)

    def run_cell(cell, repeat, directory, timeout_s):
        bsz = dict(cell.flags)["bsz"]
        row = cell_runs.first_of_row(cell, repeat) | {"status": "ok", "tokens_per_sec": 1.0}
        return row | {"wall_s": 10.0 + 10 * bsz}

    monkeypatch.setattr(all_runs, "run_cell", run_cell)
    all_runs.run_all(make_cells(e, "cpu"), e, Rows(tmp_path / "rows.jsonl"), "cpu")
    lines = capsys.readouterr().out.splitlines()
    left = [re.search(r"\((.*) left\)", line)[1] for line in lines]
    assert left == ["0:01:40", "0:02:20", "0:02:40", "0:01:30", "0:00:46", "0:00:00"]


def test_a_disk_that_fails_keeps_the_rows(tmp_path, capsys):
    (tmp_path / "logs").write_text("in the way")
    path = write(tmp_path / "e.yaml", training=FAST)
    assert sweep.main([path, "--output-dir", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "logs: " in err and "rows kept: 0" in err


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/sweeps/*.yaml")), ids=lambda p: p.stem)
def test_ready_files_are_valid(path):
    e = read_experiment(path)
    assert all(make_cells(e, platform, str(path)) for platform in ("nvidia", "amd"))
    assert e.methodology != "identical_config" or differences(e, "x") == []


def test_an_edited_model_is_another_setting(tmp_path, monkeypatch):
    """The same command on a changed config or other data must not find the earlier rows."""
    values = json.loads((ROOT / "configs/gpt2-tiny.json").read_text())
    path, data = tmp_path / "Llama-3.2-1B" / "config.json", tmp_path / "x.bin"
    path.parent.mkdir()
    path.write_text(json.dumps(values))
    data.write_bytes(b"12")
    (cell,) = make_cells(experiment(models=[str(path.parent)], training={"data": str(data)}), "cpu")
    keys = [cell_key(cell, 0), cell_key(cell, 0)]
    path.write_text(json.dumps(values | {"n_layer": 3}))
    keys.append(cell_key(cell, 0))
    data.write_bytes(b"1234")
    keys.append(cell_key(cell, 0))
    assert keys[0] == keys[1] and len(set(keys)) == 3

    # An edit must not end a running sweep either: its rows are those that were asked for.
    def edit(cell, repeat, directory, timeout_s):
        row = {"key": cell_key(cell, repeat), "status": "failed", "model": "m", "axes": {}}
        data.write_bytes(b"123456")
        return row | {"error": "x"}

    monkeypatch.setattr(all_runs, "run_cell", edit)
    argv = ["--models", path.parent, "--set", f"data={data}", "--output-dir", tmp_path / "o"]
    assert sweep.main(words(argv)) == 1 and '"m"' in (tmp_path / "o" / "rows.jsonl").read_text()
    assert cell.label().startswith("Llama-3.2-1B") and keys[0].startswith("Llama-3.2-1B-")


def rows_with_results(folder) -> list:
    """Three runs each of two settings that are 3 % apart, with a CV of 1 %; and one that left nothing."""
    plain, rows = result_of(RESULT), []
    for bsz, rate in ((1, 1000.0), (2, 1030.0)):
        for i, noise in enumerate((0.99, 1.0, 1.01)):
            seconds, name = 128 / rate / noise, f"m-{bsz}-{i}"
            times = [seconds * (1 + k % 3 / 1000) for k in range(30)]
            r = changed(plain, args__bsz=bsz, run_name=name, step_times_s=times)
            for metric in ("tokens_per_sec", "tokens_per_sec_per_gpu"):
                r["metrics"][metric] = 128 * len(times) / sum(times)
            path = folder / "runs" / name / "result.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(r))
            row = {"key": name, "model": "gpt2-tiny", "status": "ok", "axes": {"bsz": bsz}}
            rows.append(row | {"result": str(path), "seq_len": 32})
    lost = rows[-1] | {"key": "m-3-0", "status": "timeout", "axes": {"bsz": 3}}
    del lost["result"]
    return [*rows, lost | {"error": "not done after 5 s"}]


def test_a_sweep_has_the_verdicts_of_compare(tmp_path):
    """What compare.py tells apart is not tied here; what left no result is a row beside the others."""
    rows = rows_with_results(tmp_path)
    here = compare(records_of_rows(rows), Prices({}, {}), None)
    there = compare(records_of(tmp_path), Prices({}, {}), None)
    ours, theirs = ([(r.ratio, r.answer, r.verdict) for r in rows] for rows in (here[:2], there))
    assert ours == theirs
    first, *_, last = runs_table(here)
    assert (first["bsz"], first["step_time_cv"] > 0, first["kwh"]) == (1, True, None)
    assert (last["bsz"], last["invalid"]) == (3, "timeout: not done after 5 s")
    here[0].record.runs[0].result.metrics.energy_j = 7.2e6
    assert [runs_table(here)[0][name] for name in ("kwh", "gco2")] == [2.0, 890.0]
    assert here[1].ratio == pytest.approx(1.03, rel=1e-3) and len(here[1].record.rates) == 3
    assert [r.record.setting for r in here] == ["bsz 1", "bsz 2", "bsz 3"]
    assert here[2].not_compared[0] == "timeout: not done after 5 s"
    assert here[2].group == here[0].group


def test_of_a_run_whose_result_was_deleted_the_row_tells(tmp_path):
    rows = rows_with_results(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    first, *_ = records_of_rows(rows)
    assert first.invalid == ["its result.json is gone"]


def test_tune_runs_a_fifth_and_keeps_the_two_fastest(tmp_path, monkeypatch, capsys):
    """48 settings whose true rates the estimate knows but roughly: 9 run short, in rounds of 9 and 4."""
    e = experiment(
        grid={"bsz": [1, 2, 4, 8], "sac_freq": [None, "1/2", "1/1"], "amp": ["off", "bf16"],
              "pt_compile": [False, True]},
        training={"device": "cpu", "seq_len": 64},
    )  # fmt: skip
    cells = make_cells(e, "cpu")
    assert len(cells) == 48
    h100 = find_hardware("h100")
    monkeypatch.setattr(grid, "find_cpu", lambda cpu, ranks: h100)
    field = tune.by_estimate(cells, e, "cpu")
    assert len(field) == 9 and [rate for rate, _ in field] == sorted((r for r, _ in field))[::-1]
    assert field[-1][0] > 1e4
    # what the estimate thinks seventh and ninth are the fastest, the ninth more so; the first fails
    true = {cell: 1000.0 + i for i, (_, cell) in enumerate(reversed(field))}
    true[field[6][1]], true[field[8][1]], true[field[0][1]] = 5000.0, 6000.0, 0.0
    ran = []

    def run_cell(short, repeat, directory, timeout_s):
        flags = dict(short.flags)
        (cell,) = [c for c in true if c.label() == short.label()]
        ran.append((flags["n_steps"], cell))
        assert flags["no_tensorboard"] is True and flags["warmup_steps"] == 2 + flags["pt_compile"]
        status = "ok" if true[cell] else "oom"
        return {"key": cell_key(short, repeat), "status": status, "tokens_per_sec": true[cell]}

    monkeypatch.setattr(tune, "run_cell", run_cell)
    rows = Rows(tmp_path / "rows.jsonl")
    chosen = tune.tune(cells, e, rows, "cpu")
    assert [n for n, _ in ran] == [3] * 9 + [6] * 4
    assert {cell for cell, _ in chosen} == {field[8][1], field[6][1]} and len(chosen) == 2 * 5
    assert [cell for cell, _ in chosen[:2]] == [field[8][1], field[6][1]]  # in turn
    assert tune.tune(cells, e, rows, "cpu") == chosen and len(ran) == 13  # rows are kept


@pytest.mark.parametrize("row", [{"status": "ok", "invalid": "drift"}, {"status": "oom"}])
def test_nothing_that_failed_or_is_invalid_is_tuned(row, monkeypatch):
    e = experiment(grid={"bsz": [1, 2, 4]})
    cells = make_cells(e, "cpu")
    monkeypatch.setattr(tune, "run_cell", mock.Mock())
    rows = mock.MagicMock()
    rows.rows.__getitem__.return_value = row | {"tokens_per_sec": 9.0}
    assert tune.halved(cells, e, rows) == cells[:1]


def test_tune_leaves_out_what_does_not_fit_on_the_gpu():
    e = experiment(
        models=["llama-3.1-8b"], training={"layers": 8}, grid={"bsz": [1, 2, 512, "auto"]},
        script="train_fsdp.py", hardware={"nvidia": {"gpus": 8, "gpu": "h100"}},
    )  # fmt: skip
    field = tune.by_estimate(make_cells(e, "nvidia"), e, "nvidia")
    # auto is the largest that fits: by the GPU's memory more than 2.
    labels = [cell.label() for _, cell in field]
    assert labels == ["llama-3.1-8b-8-layers bsz auto", "llama-3.1-8b-8-layers bsz 2"]
    with pytest.raises(UsageError, match="no setting is estimated to fit"):
        tune.by_estimate(make_cells(e, "nvidia")[2:3], e, "nvidia")


def test_a_machine_whose_speed_is_not_known_is_not_tuned(tmp_path, refused, own_hardware):
    own_hardware()
    argv = [write(tmp_path / "e.yaml"), "--tune", "--platform", "cpu"]
    refused(sweep.main, "no peak of", argv, "--output-dir", tmp_path / "out")


def test_rows_of_another_cpu_are_not_mixed_in(monkeypatch):
    (cell,) = make_cells(experiment(training={"device": "cpu"}), "cpu")
    here = cell_key(cell, 0)
    monkeypatch.setattr(cell_runs, "cpu_name", lambda: "AMD EPYC (avx2, 2 cores)")
    assert cell_key(cell, 0) != here
