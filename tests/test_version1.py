"""Files that version 0.1.0 wrote are read for good: results, steps, baselines, experiments, rows."""

import csv
import json
import shutil

import compare
import sweep
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.gate import baseline_key, judge, own_results, read_baselines
from llm_train_bench.compare.records import LogFacts
from llm_train_bench.results.result_files import parse_result, read_losses, read_result
from llm_train_bench.results.schema import SCHEMA_VERSION
from llm_train_bench.settings.flags import Args, defaults, differing
from llm_train_bench.sweep.cell_runs import Rows
from llm_train_bench.sweep.experiment import read_experiment
from llm_train_bench.sweep.grid import make_cells
from tests.helpers import ROOT, run_train

FILES = ROOT / "tests/version1"


def test_a_result_is_read_and_compared_with_one_of_today(tmp_path, capsys):
    old = read_result(FILES / "plain/result.json")
    assert json.loads((FILES / "plain/result.json").read_text())["schema_version"] == 1
    assert old.schema_version == SCHEMA_VERSION and old.version is None
    assert old.metrics.n_measured_steps == 30 == len(old.step_times_s)
    argv = ["configs/gpt2-tiny.json", "--device", "cpu", "--amp", "off", "--bsz", 2, "--seq-len", 32,
            "--n-steps", 30, "--warmup-steps", 3, "--global-bsz", 4, "--no-tensorboard"]  # fmt: skip
    assert run_train(ROOT / argv[0], *argv[1:], "--output-dir", tmp_path) == 0
    (new,) = read_records([str(tmp_path)], print, LogFacts())
    (before,) = read_records([str(FILES / "plain")], print, LogFacts())
    default = defaults(Args)
    for then, now in (
        (before.hyperparameters, new.hyperparameters),
        (before.arguments, new.arguments),
    ):
        assert then.items() <= now.items() and not differing(then, now)
        newer = now.keys() - then.keys()  # flags of today, at their defaults
        assert {name: now[name] for name in newer} == {name: default[name] for name in newer}
    assert before.losses[0] == new.losses[0] and len(before.losses) == len(new.losses)
    capsys.readouterr()
    report = ["--output-dir", str(tmp_path / "report"), "--no-plot"]
    assert compare.main([str(tmp_path), str(FILES / "plain"), *report]) == 0
    assert "not compared" not in capsys.readouterr().out
    page = (tmp_path / "report/report.html").read_text(encoding="utf-8")
    rows = list(csv.DictReader((tmp_path / "report/runs.csv").open()))
    assert {row["run"] for row in rows} == {old.run_name, new.label}
    assert all(row["run"] in page and not row["not_compared"] for row in rows)


def test_a_file_that_is_named_twice_is_one_run():
    plain, profiled = (str(FILES / name / "result.json") for name in ("plain", "profiled"))
    paths = [plain, plain, str(FILES), profiled]
    records = read_records(paths, print, LogFacts())
    assert len([r for r in records if r.path.endswith("plain/result.json")]) == 1
    assert len(own_results([plain, plain])) == 1


def test_steps_are_read():
    losses = read_losses(FILES / "plain/steps.jsonl")
    assert len(losses) == 33 and losses[0] == 5.603620529174805


def test_a_profile_keeps_what_it_said():
    content = json.loads((FILES / "profiled/result.json").read_text())
    profile, read = content["profile"], parse_result(content).profile
    assert read.classes_s == profile["classes_s"] and read.host_gaps is None
    assert [k.model_dump() for k in read.costliest] == profile["costliest"]
    gaps = {"host_gaps": 2.5, "host_gaps_s": 0.4, "longest_host_gap_s": 0.3,
            "host_gaps_by_part_s": {"forward": 0.4}}  # fmt: skip
    read = parse_result(content | {"profile": profile | gaps}).profile
    assert list(read.host_gaps.model_dump().values()) == list(gaps.values())


def test_a_baseline_is_found_though_its_key_was_made_otherwise():
    baselines = read_baselines(FILES / "baselines.json", must_exist=True)
    result = read_result(FILES / "plain/result.json")
    assert baseline_key(result, version=1) in baselines and baseline_key(result) not in baselines
    verdict = judge([result], baselines, 0.05)
    assert verdict.was and verdict.status == "UNCERTAIN"  # one run against one


def test_rows_go_on_and_their_table_is_read(tmp_path):
    shutil.copy(FILES / "rows.jsonl", tmp_path)
    assert [row["status"] for row in Rows(tmp_path / "rows.jsonl").rows.values()] == ["ok", "ok"]
    records = read_records([str(FILES / "results.csv")], print, LogFacts())
    assert [r.hyperparameters for r in records] == [{"seq_len": 32}] * 2
    assert all(r.tokens_per_sec > 0 for r in records)


def test_an_experiment_means_what_it_meant(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    cells = make_cells(read_experiment(FILES / "experiment.yaml"), "amd")
    assert len(cells) == 4 and dict(cells[0].flags)["dp_replicate"] == 2
    argv = [str(FILES / "experiment.yaml"), "--dry-run", "--platform", "nvidia"]
    assert sweep.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "python train_fsdp.py configs/gpt2-tiny.json --bsz 2 --dp-replicate 2 --global-bsz 64 --lr 0.001 "
        "--nproc 8 --seq-len 64 --usd-per-hour 2.5"
    )
