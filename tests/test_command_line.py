"""Every argument error is one line of ours: what, the allowed values, the nearest right one."""

import json
import re

import pytest

import check
import compare
import doctor
import estimate
import prepare_data
import sweep
import trace_report
from llm_train_bench import __version__
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.machine import version_text
from llm_train_bench.estimate.estimate_flags import EstimateFlags
from llm_train_bench.settings.command_line import parse_args, parse_dataclass
from llm_train_bench.settings.flags import Args, Script, declared, help_texts
from llm_train_bench.sweep.sweep_flags import SweepArgs

TINY = "configs/gpt2-tiny.json"
KINDS = (
    Args, EstimateFlags, SweepArgs, compare.CompareArgs, prepare_data.PrepareArgs,
    trace_report.ReportArgs, doctor.DoctorArgs, check.CheckArgs,
)  # fmt: skip


def test_every_flag_has_help_and_there_are_few(capsys):
    n = sum(not flag.positional for kind in KINDS for flag in declared(kind).values())
    assert n + 1 <= 156  # --from
    for kind in KINDS:
        assert help_texts(kind).keys() == declared(kind).keys()
        with pytest.raises(SystemExit) as end:
            parse_dataclass(kind, ["--help"], "x.py")
        shown = capsys.readouterr().out
        for name, text in help_texts(kind).items():
            assert text.split(".")[0].split()[0] in shown and len(text) < 300, name
        assert end.value.code == 0


@pytest.mark.parametrize(
    "script", [*Script, check, compare, doctor, estimate, prepare_data, sweep, trace_report]
)
def test_every_script_has_help_and_a_version_with_the_commit(script, capsys):
    main = script.main if hasattr(script, "main") else lambda argv: parse_args(argv, script)
    for word, shown in (
        ("--version", rf"llm-train-bench {__version__} \(commit .+\)\n$"),
        ("--help", r"usage: [\s\S]{150}"),
    ):
        with pytest.raises(SystemExit) as end:
            main([word])
        assert end.value.code == 0 and re.match(shown, capsys.readouterr().out)


def test_without_a_repository_the_commit_is_the_image_s(monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/none")
    monkeypatch.setenv("BENCH_GIT_SHA", "abc")
    assert version_text().endswith("(commit abc)")


def test_underscores_negative_numbers_and_order_are_accepted():
    a = parse_args(["--n_steps=3", "--lr", "1e-3", TINY, "--track", "mlflow", "wandb"], "train.py")
    assert (a.n_steps, a.lr, a.config, a.track) == (3, 1e-3, TINY, ("mlflow", "wandb"))
    assert parse_args([TINY, "--bsz", "2", "--bsz", "3"], "train.py").bsz == 3
    with pytest.raises(UsageError, match=r"--lr -1.0: must be at least 0"):
        parse_args([TINY, "--lr", "-1"], "train.py")


def test_a_config_anywhere_replaces_that_of_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"config: {TINY}\nbsz: 2\ntrack: [mlflow]\n")
    a = parse_args(["--bsz", "3", "configs/llama-tiny.json", "--from", str(path)], "train.py")
    assert (a.config, a.bsz, a.track) == ("configs/llama-tiny.json", 3, ("mlflow",))
    assert parse_args(["--from", str(path)], "train.py").config == TINY
    # Of a result, FP8's flags count where it ran in FP8.
    args = {"config": TINY, "pt_compile": True, "fp8_recipe": "rowwise"}
    for fp8, recipe in ((True, "rowwise"), (False, "auto")):
        result = {"schema_version": 3, "entrypoint": "train.py", "args": args | {"use_fp8": fp8}}
        path.write_text(json.dumps(result))
        assert parse_args(["--from", str(path)], "train.py").fp8_recipe == recipe
