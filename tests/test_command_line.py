"""Every argument error is one line of ours: what, the allowed values, the nearest right one."""

import json
import os
import re

from llm_train_bench.settings.before_torch import check_early

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
from llm_train_bench.base.number_text import parse_number
from llm_train_bench.estimate.predict import EstimateArgs, EstimateFlags
from llm_train_bench.settings import other_names
from llm_train_bench.settings.command_line import parse_args, parse_dataclass
from llm_train_bench.settings.flags import Args, Script, declared, defaults, flag_of, help_texts
from llm_train_bench.settings.other_names import in_our_words
from tests.helpers import ROOT, answers, python, words

TINY = "configs/gpt2-tiny.json"
KINDS = (
    Args, EstimateFlags, sweep.SweepArgs, compare.CompareArgs, prepare_data.PrepareArgs,
    trace_report.ReportArgs, doctor.DoctorArgs, check.CheckArgs,
)  # fmt: skip


def test_every_flag_has_help_and_there_are_few(capsys):
    n = sum(not flag.positional for kind in KINDS for flag in declared(kind).values())
    assert n + 1 <= 125  # --from
    for kind in KINDS:
        assert help_texts(kind).keys() == declared(kind).keys()
        with pytest.raises(SystemExit) as end:
            parse_dataclass(kind, ["--help", "all"], "x.py")
        shown = capsys.readouterr().out
        for name, text in help_texts(kind).items():
            assert text.split(".")[0].split()[0] in shown and len(text) < 300, name
        assert end.value.code == 0


MODULES = check, compare, doctor, estimate, prepare_data, sweep, trace_report
TOOLS = {f"{tool.__name__}.py": tool for tool in MODULES}


def run(script: str, argv: list[str]) -> int:
    """The exit code of a script that ends before it imports torch."""
    try:
        return TOOLS[script].main(argv) if script in TOOLS else check_early(argv, script) or 0
    except SystemExit as end:
        return int(str(end))


@pytest.mark.parametrize("script", [*Script, *TOOLS])
def test_every_script_has_a_version_and_help_of_one_screen(script, capsys):
    for word in ("--version", "-V"):
        assert run(script, [word]) == 0
        shown = capsys.readouterr().out
        assert re.match(rf"llm-train-bench {__version__} \(commit .+\)\n$", shown)
    assert run(script, ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: {script} ") and len(lines) <= 60
    assert max(map(len, lines)) <= 102
    assert doctor is TOOLS.get(script) or sum(f"python {script}" in line for line in lines) >= 2
    if script in set(Script):
        flags = [flag_of(n) for n, f in declared(Args).items() if f.common and script in f.scripts]
        shown = [line.split()[0] for line in lines if line.startswith("  --")]
        assert shown == [flag for flag in flags if flag != "--config"]


def test_help_shows_a_group_a_flag_or_all(capsys):
    def shown(*argv, script="train_ddp.py") -> list[str]:
        assert run(script, ["--help", *argv]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.split()[0] for line in lines if line.startswith("  --")]

    assert shown("parallel")[2:] == ["--bucket-cap-mb", "--zero1", "--reduce-dtype"]
    assert shown("sac-freq") == shown("--bsz", "4")[8:9] == ["--sac-freq"]
    assert run("train.py", ["--help=fp8", "--from", "none.yaml"]) == 0
    assert "--fp8-recipe" in capsys.readouterr().out
    for script in Script:
        names = [n for n, f in declared(Args).items() if script in f.scripts and n != "config"]
        assert shown("all", script=script) == [flag_of(name) for name in names]
        assert run(script, ["--help", "all"]) == 0
        told = [n for n in names if str(defaults(Args)[n]) not in ("None", "False", "()")]
        assert capsys.readouterr().out.count("(default:") == len(told) > 20
    assert run("estimate.py", ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index(next(line for line in lines if "--gpu NAME" in line)) < 12


LINES = (ROOT / "tests/wrong_commands.txt").read_text().splitlines()
WRONG = [line.rsplit(" -> ", 1) for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize(("command", "message"), WRONG, ids=lambda text: text[:60])
def test_a_wrong_command_is_answered_in_one_line(command, message, capsys, tmp_path):
    command, has_file, content = command.partition(" FILE ")
    (tmp_path / "file").write_text(content)
    script, *argv = words(command, tmp_path / "file" if has_file else "")
    assert run(script, argv) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"{script}: ") and message in error and len(error) < 1000


def test_a_mistake_needs_no_torch(tmp_path):
    """Nor does one of a model's config, or of how flags fit together."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    for argv, message in (
        ("train.py gpt2-tiny --bzs 4", "did you mean --bsz"),
        ("train_fsdp.py no.json", "no such file"),
        ("train_ddp.py gpt2-tiny --nproc 2 --global-bsz 9", "8 or 16"),
    ):
        path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
        assert message in python(argv, code=2, PYTHONPATH=path).stderr
    # A rank of a launcher says it later, one for all of its machine.
    done = python(argv, code=1, PYTHONPATH=path, RANK="0", WORLD_SIZE="1")
    assert done.stderr == "torch was imported\n"


ACCEPTED = answers("accepted_commands.txt")


@pytest.mark.parametrize(("command", "values"), ACCEPTED, ids=lambda text: text[:40])
def test_names_of_other_trainers_underscores_and_any_order_are_accepted(command, values):
    script, *argv = words(command)
    assert vars(parse_args(argv, script)).items() >= json.loads(values).items()


def test_ten_flags_of_other_trainers_are_ours_and_answers_name_ours(tmp_path):
    assert len(other_names.ACCEPTED) == 10
    assert in_our_words(["--steps", "--steps=5", "--model.steps=5", "steps"]) == [
        "--n-steps", "--n-steps=5", "--model.steps=5", "steps"]  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text("config: gpt2-tiny\nmicro_batch_size: 8\nglobal-batch-size: 16\nmax_steps: 3\n")
    a = parse_args(["--from", str(path)], "train.py")
    assert (a.bsz, a.global_bsz, a.n_steps) == (8, 16, 3)
    more = ["--local-batch-size", "2", "--grad-acc-steps=4"]
    a = parse_args(["--from", str(path), *more], "train.py")
    assert (a.bsz, a.global_bsz, a.grad_acc_steps) == (2, None, 4)
    known = {flag_of(n) for kind in (*KINDS, Args) for n in declared(kind)}
    for theirs, ours in (other_names.ANSWERED | other_names.VALUES).items():
        assert set(re.findall(r"--[a-z0-9-]+", ours)) <= known, theirs
    assert {f"--{ours}" for ours in other_names.ACCEPTED.values()} <= known
    own = {n.replace("_", "-") for n, flag in declared(Args).items() if not flag.positional}
    assert not own & (other_names.ACCEPTED | other_names.ANSWERED).keys()


def test_numbers_are_read_as_people_write_them():
    read = {"1e2": 100, "4k": 4000, "1.5M": 1_500_000, "1T": 10**12, "2_000": 2000, "-3": -3}
    assert {text: parse_number(text, int) for text in read} == read
    assert parse_number("4k", int, 1024) == 4096 and parse_number(str(2**63 - 1), int) == 2**63 - 1
    assert [parse_number(t, float) for t in ("0.05", ".5", "3e-4", "1B")] == [0.05, 0.5, 3e-4, 1e9]
    assert parse_number("5%", float, percent=True) == 0.05
    wrong = "1.5 0.1 5% k 1e 0x10 1e999 4_ _4 1__0 1e3k 4kk nan inf - . ١".split()
    for text in (*wrong, "", "4 k"):
        with pytest.raises(ValueError):
            parse_number(text, int)
    e = parse_dataclass(EstimateArgs, words("gpt2-125m --gpu h100 --tokens 1T"), "estimate.py")
    assert e.tokens == 1e12


@pytest.mark.parametrize("text", ["7%", "0.07"])
def test_per_cent_mean_the_same_everywhere(text):
    argv = ["--baseline", "b", "--tolerance", text]
    assert parse_dataclass(compare.CompareArgs, argv, "compare.py").tolerance == 0.07
    assert parse_dataclass(check.CheckArgs, ["--at-least", text], "check.py").at_least == 0.07


def test_a_name_of_ours_finds_its_config_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_args(["gpt2-tiny"], "train.py").config == TINY
    (tmp_path / "gpt2-tiny").mkdir()
    assert parse_args(["gpt2-tiny"], "train.py").config == "gpt2-tiny"


def test_without_a_repository_the_commit_is_the_image_s(monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/none")
    monkeypatch.setenv("BENCH_GIT_SHA", "abc")
    assert version_text().endswith("(commit abc)")


def test_a_config_anywhere_replaces_that_of_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"config: {TINY}\nbsz: 2\ntrack: [wandb]\n")
    a = parse_args(["--bsz", "3", "configs/llama-tiny.json", "--from", str(path)], "train.py")
    assert (a.config, a.bsz, a.track) == ("configs/llama-tiny.json", 3, ("wandb",))
    assert parse_args(["--from", str(path)], "train.py").config == TINY
    # Of a result, FP8's flags count where it ran in FP8.
    args = {"config": TINY, "pt_compile": True, "fp8_recipe": "rowwise"}
    for fp8, recipe in ((True, "rowwise"), (False, "auto")):
        result = {"schema_version": 3, "entrypoint": "train.py", "args": args | {"use_fp8": fp8}}
        path.write_text(json.dumps(result))
        assert parse_args(["--from", str(path)], "train.py").fp8_recipe == recipe


def test_absent_is_not_empty_in_a_file(tmp_path):
    """Null leaves a flag out, and so does false where the script has no such switch; 0 is a value."""
    path = tmp_path / "run.yaml"
    path.write_text("config: gpt2-tiny\nscript: null\nbsz:\nseq_len: Null\nzero1: false\nlr: 0\n")
    args = parse_args([f"--from={path}"], "train.py")
    assert (args.bsz, args.seq_len, args.lr) == (4, None, 0.0)
    path.write_text('config: gpt2-tiny\ndata: ""\n')
    with pytest.raises(UsageError, match="data: is empty"):
        parse_args([f"--from={path}"], "train.py")
