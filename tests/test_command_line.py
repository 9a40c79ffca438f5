"""Every argument error is one line of ours: what, the allowed values, the nearest right one."""

import json
import re

import pytest

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
from llm_train_bench.model.config import ConfigError
from llm_train_bench.settings.command_line import parse_args, parse_dataclass
from llm_train_bench.settings.flags import Args, Script, declared, help_texts
from llm_train_bench.settings.plan import make_plan
from llm_train_bench.sweep.sweep_flags import SweepArgs

TINY = "configs/gpt2-tiny.json"
KINDS = (
    Args, EstimateFlags, SweepArgs, compare.CompareArgs, prepare_data.PrepareArgs,
    trace_report.ReportArgs, doctor.DoctorArgs,
)  # fmt: skip
MESSAGES = [
    ("train.py", "", "CONFIG is missing; give a model config, for example configs/gpt2-125m.json"),
    ("train.py", f"{TINY} --bsz x", "--bsz x: must be a whole number or auto"),
    ("train.py", f"{TINY} --bsz 0", "--bsz 0: must be at least 1"),
    ("train.py", f"{TINY} --lr high", "--lr high: must be a number"),
    ("train.py", f"{TINY} --lr inf", "--lr inf: must be at least 0 and finite"),
    ("train.py", f"{TINY} --run-name {'é' * 101}",
     "--run-name must be a plain directory name of at most 200 bytes"),
    ("train.py", f"{TINY} --nope 3", "--nope: unknown flag; see train.py --help"),
    ("train.py", f"{TINY} --lora 8", "--lora: unknown flag; see train.py --help"),
    ("train.py", f"{TINY} --seqlen 8", "--seqlen: unknown flag; did you mean --seq-len?"),
    ("train.py", f"{TINY} --amp bf6", "--amp bf6: must be bf16, fp16 or off; did you mean bf16?"),
    ("train.py", f"{TINY} --tf32=1", "--tf32: takes no value; leave out =1"),
    ("train.py", f"{TINY} --bsz", "--bsz: needs a value: a whole number or auto"),
    ("train.py", f"{TINY} --bsz=", "--bsz: is empty; was a variable of the shell not set?"),
    ("train.py", f"{TINY} other.json", "other.json: unexpected argument; see train.py --help"),
    ("train.py", "gpt2-tiny", "gpt2-tiny: no such file; did you mean configs/gpt2-tiny.json?"),
    ("train.py", f"{TINY} --track csv",
     "--track csv: must be wandb, mlflow or openmetrics"),
    ("train.py", f"{TINY} --track wandb --track mlflow",
     "--track: is given twice; give all values after one --track"),
    ("train.py", f"{TINY} --save-keep 3", "--save-keep needs --save-every"),
    ("train.py", f"{TINY} --num-steps 3", "--num-steps: is a flag of an earlier tool; use --n-steps"),
    ("train.py", f"{TINY} --tp 2",
     "--tp has no meaning for train.py; it is for train_fsdp.py or train_pp.py"),
    ("train.py", f"{TINY} --use-fp8 --amp fp16",
     "--use-fp8 with --amp off or fp16: FP8 matmuls take and return bf16; use --amp bf16"),
    ("train.py", f"{TINY} --fp8-recipe rowwise", "--fp8-recipe needs --use-fp8"),
    ("train.py", "--model-size huge",
     "--model-size huge: must be small, medium, large, xl or 2.7B; or give a config"),
    ("train.py", "--from", "--from takes one file: a result.json, or YAML with config and flags"),
    ("train.py", "--from /none.yaml", "--from /none.yaml: cannot be read: No such file or directory"),
    ("train.py", "configs/mistral-7b-v0.1-proxy.json --seq-len 8192 --attention flex",
     "--attention flex: FlexAttention works on a CPU only under --pass-type forward; use "
     "--attention auto"),
    ("train_fsdp.py", f"{TINY} --tp 3",
     f"--tp 3 does not divide heads, key/value heads and MLP of {TINY} (4, 4, 512); 1, 2, 4 would"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "text", "message"), MESSAGES, ids=lambda v: str(v)[:40])
def test_messages_are_exact(script, text, message):
    with pytest.raises((UsageError, ConfigError)) as refused:
        words = re.split(" +", text) if text else []
        make_plan(parse_args(words, script), script, 1 if script == "train.py" else 2, "cpu")
    assert str(refused.value) == message


def test_every_flag_has_help_and_there_are_few(capsys):
    n = sum(not flag.positional for kind in KINDS for flag in declared(kind).values())
    assert n + 1 <= 125  # --from
    for kind in KINDS:
        assert help_texts(kind).keys() == declared(kind).keys()
        with pytest.raises(SystemExit) as end:
            parse_dataclass(kind, ["--help"], "x.py")
        shown = capsys.readouterr().out
        for name, text in help_texts(kind).items():
            assert text.split(".")[0].split()[0] in shown and len(text) < 300, name
        assert end.value.code == 0


@pytest.mark.parametrize(
    "script", [*Script, compare, doctor, estimate, prepare_data, sweep, trace_report]
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
