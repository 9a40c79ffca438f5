"""Input that hangs, lies or commands: each is refused in one line, or does nothing worse."""

import csv
import gzip
import json
import math
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import compare
import estimate
import sweep
import trace_report
from llm_train_bench.apply.tokens import write_tokens
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.log_formats import SUITES, parse
from llm_train_bench.compare.read_logs import KNOWN
from llm_train_bench.compare.records import LogFacts
from llm_train_bench.errors import UsageError, printable
from llm_train_bench.model.config import ConfigError, load_config
from llm_train_bench.model.hf import check_pretrained, save_pretrained
from llm_train_bench.model.init import materialize
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.results.result_files import is_alive, this_process
from llm_train_bench.run.provenance import describe_environment
from llm_train_bench.sweep.cell_runs import Rows
from tests import fuzz
from tests.faults import SHAPE
from tests.helpers import ROOT, only_result, run_train

TINY = ["configs/gpt2-tiny.json", "--seq-len", "16", "--bsz", "2", "--device", "cpu", "--amp", "off",
        "--n-steps", "2", "--warmup-steps", "1", "--no-tensorboard"]  # fmt: skip


def built(config, seed=0) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config, 16)
    materialize(model, torch.device("cpu"), seed)
    return model


@pytest.fixture
def weights(tmp_path):
    """A directory of weights of a small model, whose files a test may spoil."""
    (tmp_path / "micro.json").write_text(json.dumps(SHAPE))
    model = built(load_config(tmp_path / "micro.json"))
    save_pretrained(model, tmp_path / "weights")
    return model, tmp_path / "weights"


def tensors_of(directory):
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("other", [False, True])
def test_a_head_that_the_config_ties_away_is_refused(other, weights):
    model, directory = weights
    tensors = tensors_of(directory)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + float(other)
    save_file(tensors, directory / "model.safetensors")
    if not other:
        assert check_pretrained(model.config, directory)
        return
    with pytest.raises(ConfigError, match=r"lm_head.weight is not transformer.wte.weight, though"):
        check_pretrained(model.config, directory)


def test_weights_that_are_no_numbers_are_refused(weights):
    model, directory = weights
    tensors = tensors_of(directory)
    tensors["transformer.ln_f.weight"][0] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"ln_f.weight holds numbers that are not finite"):
        materialize(model, torch.device("cpu"), 0, check_pretrained(model.config, directory))
    tensors["transformer.ln_f.weight"] = torch.ones(16).to(torch.float8_e4m3fn)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match="holds F8_E4M3; quantised weights are not read"):
        check_pretrained(model.config, directory)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_names_files_beside_it(name, weights):
    model, directory = weights
    (directory / "model.safetensors").rename(directory / "x.safetensors")
    index = {"weight_map": {"lm_head.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="is no name of a file beside it"):
        check_pretrained(model.config, directory)


def test_padding_rows_change_no_other_value(tmp_path):
    """Where vocabulary x width is no multiple of 16, random numbers are drawn otherwise."""
    (tmp_path / "odd.json").write_text(json.dumps(SHAPE | {"vocab_size": 31, "n_embd": 6}))
    plain = built(load_config(tmp_path / "odd.json"))
    padded = built(load_config(tmp_path / "odd.json", 64))
    assert padded.embed.weight.shape[0] == 64 and not padded.embed.weight[31:].any()
    assert torch.equal(padded.embed.weight[:31], plain.embed.weight)


def test_a_full_shared_memory_is_named(tmp_path, monkeypatch, capsys):
    from llm_train_bench.apply import data

    write_tokens(tmp_path / "x.bin", [np.arange(5000) % 256], 256)
    monkeypatch.setattr(data, "WORKER_TIMEOUT_S", 1)
    monkeypatch.setattr(data.FileTokens, "__getitem__", lambda self, first: time.sleep(60))
    flags = ["--data", tmp_path / "x.bin", "--n-workers", "1", "--output-dir", tmp_path / "r"]
    assert run_train(*TINY, *flags) == 2
    assert "--n-workers 1: no data from them in 1 s" in capsys.readouterr().err
    assert "shared memory" in only_result(tmp_path / "r")["error"]


@pytest.mark.parametrize("what", ["config", "data", "result", "trace", "experiment", "baseline"])
def test_a_fifo_does_not_block(what, tmp_path, capsys):
    fifo = tmp_path / {"result": "result.json", "experiment": "e.yaml"}.get(what, "x.json")
    os.mkfifo(fifo)
    calls = {
        "config": lambda: run_train(fifo, *TINY[1:], "--output-dir", tmp_path / "r"),
        "data": lambda: run_train(*TINY, "--data", fifo, "--output-dir", tmp_path / "r"),
        "result": lambda: compare.main([str(fifo)]),
        "trace": lambda: trace_report.main([str(fifo)]),
        "experiment": lambda: sweep.main([str(fifo), "--dry-run"]),
        "baseline": lambda: compare.main([str(ROOT), "--baseline", str(fifo)]),
    }
    assert calls[what]() == 2
    err = capsys.readouterr().err
    assert "is no plain file" in err and err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--init-from="], ["--init-from", ""], ["--run-name="]])
def test_an_empty_value_is_no_default(flags, tmp_path, capsys):
    assert run_train(*TINY, "--output-dir", tmp_path, *flags) == 2
    assert "is empty; was a variable of the shell not set?" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train.py", "train_ddp.py"])
def test_a_batch_that_cannot_fit_is_refused_at_once(script, tmp_path):
    argv = [sys.executable, script, *TINY, "--bsz", "2147483648", "--output-dir", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 4 and done.stderr.count("\n") == 1
    assert "token ids of a micro batch alone need" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_positions": None}, "n_positions null: must be a whole number, found null"),
        ({"vocab_size": None}, "vocab_size null: must be a whole number"),
        ({"n_layer": 20000}, "n_layer 20000: is absurdly large"),
        ({"initializer_range": 10**400}, "initializer_range: is absurdly large"),
        ({"n_embd": 10**400}, "n_embd: is absurdly large"),
        ({"n_embd": 1e400}, "n_embd"),
    ],
)
def test_impossible_configs_are_one_line(change, message, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(SHAPE | change))
    with pytest.raises(ConfigError) as stop:
        load_config(path)
    assert message in str(stop.value) and len(str(stop.value)) < 300


def test_null_windows_and_long_names(tmp_path):
    qwen = json.loads((ROOT / "configs/qwen3-0.6b.json").read_text()) if (
        ROOT / "configs/qwen3-0.6b.json").exists() else None  # fmt: skip
    if qwen:
        (tmp_path / "q.json").write_text(json.dumps(qwen | {"max_window_layers": None}))
        with pytest.raises(ConfigError, match="max_window_layers"):
            load_config(tmp_path / "q.json")
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load_config("x" * 300)
    assert estimate.main(["x" * 300, "--gpu", "h100"]) == 2


AXES = ("bsz", "seq_len", "n_steps", "seed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiment: e\nmodels: [configs/gpt2-tiny.json]\ntraining: &a {bsz: 2}\ncells: [*a]\n",
         "aliases"),
        ("a: &a [*a]\n", "aliases"),
        ("experiment: e\nmodels: ['--help']\n", "models.0"),
        ("experiment: --x\nmodels: [configs/gpt2-tiny.json]\n", "experiment"),
        ("experiment: e\nmodels: [configs/gpt2-tiny.json]\ngrid:\n"
         + "".join(f"  {name}: {list(range(1, 101))}\n" for name in AXES),
         "100,000,000 settings"),
    ],
)  # fmt: skip
def test_experiments_that_would_never_end_are_refused(text, message, tmp_path, capsys):
    path = tmp_path / "e.yaml"
    path.write_text(text)
    begin = time.monotonic()
    assert sweep.main([str(path), "--dry-run", "--platform", "cpu"]) == 2
    assert message in capsys.readouterr().err and time.monotonic() - begin < 20


def test_a_trace_that_unpacks_without_end_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json.gz"
    with gzip.open(path, "wb") as f:
        for _ in range(90):
            f.write(b" " * 2**20)
    assert trace_report.main([str(path)]) == 2
    assert "unpacks to over" in capsys.readouterr().err
    path = tmp_path / "y.json"
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 10**400}
    path.write_text(json.dumps({"traceEvents": [event]}))
    assert trace_report.main([str(path)]) == 2
    assert "an event without times" in capsys.readouterr().err


@pytest.mark.parametrize("suite", KNOWN)
def test_a_run_of_digits_is_parsed_in_linear_time(suite):
    needs = " ".join(SUITES[suite].line) or "{'loss': "
    rows = [re.sub(r"\\.|[\[\](){}?*+|^]", " ", row[3].pattern.split("([-+]")[0])
            for row in SUITES[suite].rows]  # fmt: skip
    line = f"{needs} iteration 1/2 Step 1 | step: 1 global_step=1 "
    text = "".join(f"{line}{row}{'1' * 100_000}x\n" for row in rows[:6]) + "\n" * 20_000
    begin = time.monotonic()
    parse(text, suite)
    assert time.monotonic() - begin < 20


NASTY = "\x1b]52;c;aGk=\x07x[/y]<script>|=cmd"


def test_names_command_neither_terminal_nor_spreadsheet_nor_browser(tmp_path, capsys):
    """Escapes, markup, HTML and formulas in names from a file."""
    out = tmp_path / "runs"
    assert run_train(*TINY, "--n-steps", 12, "--output-dir", out, "--run-name", "a") == 0
    content = json.loads((out / "a/result.json").read_text())
    content["run_name"] = f"=1+1{NASTY}"
    content["device"]["hardware"] = f"@{NASTY}"
    (tmp_path / "b.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert compare.main([str(tmp_path / "b.json"), "--output-dir", str(tmp_path / "c")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "x[/y]" in shown
    markdown = (tmp_path / "c/compare.md").read_text()
    assert "\x1b" not in markdown and "<script>" not in markdown and "&lt;script>" in markdown
    html = (tmp_path / "c/report.html").read_text()
    assert "\x1b" not in html and html.count("<script") == 2 and r"x[/y]\u003cscript>" in html
    with (tmp_path / "c/compare.csv").open() as f:
        for row in csv.reader(f):
            assert not any(cell[:1] in ("=", "@") for cell in row), row


def test_nested_names_command_nothing(tmp_path, capsys):
    """Values and keys inside a result's args, its software and a sweep's rows."""
    content = json.loads((ROOT / "tests/sample/plain/result.json").read_text())
    paths = []
    for i in range(2):
        content["args"] |= {"optimizer": f"{i}{NASTY}", f"key{NASTY}": i}
        content["environment"]["libraries"] = {f"lib{NASTY}": f"{i}{NASTY}"}
        paths.append(tmp_path / f"{i}.json")
        paths[-1].write_text(json.dumps(content))
    out = tmp_path / "c"
    flags = ["--methodology", "identical_config", "--output-dir", str(out)]
    assert compare.main([*map(str, paths), *flags]) == 0
    shown = capsys.readouterr().out + "".join(file.read_text() for file in out.iterdir())
    assert r"\x1b]52" in shown and "\x1b" not in shown and "\x07" not in shown
    content["args"].pop(f"key{NASTY}")
    content |= {"run_name": NASTY, "device": content["device"] | {"hardware": "H100 SXM"}}
    content["args"]["optimizer"] = "adamw"
    paths[0].write_text(json.dumps(content))
    flags = ["--seq-len", "32", "--calibrate", str(paths[0])]
    assert estimate.main(["configs/gpt2-tiny.json", "--gpu", "h100", *flags]) == 0
    shown = capsys.readouterr().out
    assert r"calibrated: by \x1b]52" in shown and "\x1b" not in shown
    row = {"key": NASTY, "model": "m", "status": "failed", "axes": {NASTY: [{NASTY: NASTY}]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    name = printable(NASTY)
    row |= {"key": name, "axes": {name: [{name: name}]}}
    assert Rows(tmp_path / "rows.jsonl").rows == {name: row}


def test_a_device_with_a_line_break_in_its_name_is_one_line(tmp_path):
    content = json.loads((ROOT / "configs/hardware.json").read_text())
    content["devices"].append({"a\nb": None})
    (tmp_path / "hardware.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"a\\nb") as refused:
        fuzz.read_hardware(tmp_path / "hardware.json")
    assert "\n" not in str(refused.value)


def test_a_field_with_a_line_break_in_its_name_is_one_line(tmp_path):
    content = json.loads((ROOT / "tests/sample/plain/result.json").read_text())
    content["metrics"]["tok\ns"] = 1.0
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"tok\\ns: Extra inputs") as refused:
        read_records([str(tmp_path / "r.json")], print, LogFacts())
    assert "\n" not in str(refused.value)


def test_kernels_may_have_any_name(tmp_path, capsys):
    names = ["x[/y]", "foo[abi:cxx11](int)", NASTY]
    events = [{"ph": "X", "cat": "kernel", "name": n, "ts": 10 * i, "dur": 5, "pid": 0, "tid": 7,
               "args": {"device": 0, "stream": 7}} for i, n in enumerate(names)]  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert trace_report.main([str(tmp_path / "t.json")]) == 0
    out = capsys.readouterr().out
    assert "x[/y]" in out and "foo[abi:cxx11](int)" in out and "\x1b" not in out


def test_printable():
    assert printable("a\nb\x1b[0m\x9bé\udcff") == "a\\nb\\x1b[0m\\x9bé\\udcff"


@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_a_closed_output_ends_no_run(where, tmp_path):
    """As under `| head`: the table goes to the other output, and the result is whole."""
    code = f"import os, sys; os.close({1 if where == 'stdout' else 2}); "
    command = [sys.executable, "train.py", *TINY, "--output-dir", str(tmp_path)]
    code += f"os.open('/dev/full', os.O_WRONLY); os.execv(sys.executable, {command!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert only_result(tmp_path)["status"] == "ok"
    assert "| tokens/s " in (done.stderr if where == "stdout" else done.stdout)


def test_a_directory_that_is_removed_during_a_run_costs_only_the_files(
    tmp_path, monkeypatch, capsys
):
    import shutil

    from llm_train_bench.run import loop

    real = loop.optimizer_step

    def remove(*args):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        return real(*args)

    monkeypatch.setattr(loop, "optimizer_step", remove)
    assert run_train(*TINY, "--n-steps", 12, "--output-dir", tmp_path / "r") == 1
    shown = capsys.readouterr()
    assert "| tokens/s " in shown.out and "is gone; was the run's directory removed?" in shown.err
    assert "Traceback" not in shown.err


def test_secrets_stay_out_of_results(monkeypatch):
    for name in ("OMP_API_KEY", "NCCL_AUTH", "TORCH_TOKEN", "CUDA_PASSWORD", "GLOO_SECRET"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    settings = describe_environment(torch.device("cpu"))["settings"]
    assert settings["NCCL_DEBUG"] == "INFO" and "x" not in settings.values()


def test_a_dead_writer_is_told_from_a_living_one():
    me = this_process()
    assert is_alive(me) is True
    assert is_alive(me.model_copy(update={"started": me.started + 1})) is False
    assert is_alive(me.model_copy(update={"host": "elsewhere"})) is None
    assert is_alive(me.model_copy(update={"boot": "another"})) is False


@pytest.mark.parametrize("argv", [["train.py", "--help"], ["compare.py", "x"]])
def test_ctrl_c_during_imports_is_one_line(argv, tmp_path):
    (tmp_path / "tyro.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"{argv[0]}: interrupted by SIGINT\n")


def test_a_python_without_the_libraries_is_told_what_to_type():
    done = subprocess.run([sys.executable, "-S", "train.py", "x"], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": ""})  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "has no tyro; activate the environment" in done.stderr


@pytest.mark.parametrize("kind", (*fuzz.KINDS, *fuzz.TOOLS))
def test_any_spoilt_file(kind, tmp_path):
    fuzz.attack(kind, 4 if kind in (*fuzz.TOOLS, *fuzz.SLOW) else 60, tmp_path)


FOUND = [
    ("hardware", {"devices": [{"name": "x" * 5000}]}),
    ("again", {"schema_version": 1, "args": {"config": "c.json"}, "entrypoint": ["x"] * 999}),
    (
        "suite",
        fuzz.AUTOMODEL | {"seq_len": [None], "global_batch_size": 2**31},
    ),  # 16 GiB of nothing
    ("compare:lines", [{"step": i, "tps": 8.0, "loss": math.nan} for i in range(3)]),
    ("gate:result", {"environment": {"image": {"name": 7}, "libraries": [1]}}),
    ("gate:result", {"device": {"count": 0}}),
    ("trace:run", {"profile": {"matmul_flops": "x", "matmul_tflops": 1}}),
    ("doctor:amd", {"card0": {"VRAM Total Memory (B)": 7, "Card Series": "\x1b[2J"}, "system": 7}),
]


@pytest.mark.parametrize(
    "i", range(len(FOUND)), ids=[f"{kind} {i}" for i, (kind, _) in enumerate(FOUND)]
)
def test_what_the_fuzzer_found(i, tmp_path, monkeypatch):
    kind, content = FOUND[i]
    ending, rights, read = fuzz.kinds()[kind]
    if kind in ("gate:result", "trace:run"):
        whole = json.loads(rights[0])
        content = {k: whole[k] | v if isinstance(whole[k], dict) else v for k, v in content.items()}
        content = whole | content
    lines = content if isinstance(content, list) else [content]
    (tmp_path / f"x{ending}").write_text("\n".join(map(json.dumps, lines)))
    assert list(fuzz.told(read, tmp_path / f"x{ending}")) == []


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("result.json", f'{{"schema_version": 3, "metrics": {DEEP}', "compare"),
        ("result.json", DEEP, "gate"),
        ("result.json", DEEP, "calibrate"),
        ("run.yaml", "config: " + DEEP[:5000], "from"),
        ("run.yaml", "config: x\nbsz: !!bool 7\n", "from"),
        ("result.json", '{"schema_version": 2, "args": [1]}', "from"),
        ("e.yaml", "experiment: !!timestamp x\n", "sweep"),
        ("index.json", DEEP, "config"),
    ],
)
def test_foreign_json_and_yaml_is_one_line(name, text, read, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(text)
    tiny = str(ROOT / "configs/gpt2-tiny.json")
    calls = {
        "compare": lambda: compare.main([str(path)]),
        "gate": lambda: compare.main(
            [str(path), "--baseline", str(ROOT / "tests/sample/baselines.json")]
        ),
        "calibrate": lambda: estimate.main([tiny, "--gpu", "h100", "--calibrate", str(path)]),
        "from": lambda: run_train("--from", path),
        "sweep": lambda: sweep.main([str(path), "--dry-run"]),
        "config": lambda: estimate.main([str(path), "--gpu", "h100"]),
    }
    assert calls[read]() == 2
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1 and len(error) < 600


@pytest.mark.parametrize("deep", [50_000, 90])
def test_a_deep_row_of_a_sweep_is_no_row(deep, tmp_path):
    row = (
        '{"key": "a", "model": "m", "status": "oom", "axes": {}, "x": '
        + "[" * deep
        + "]" * deep
        + "}"
    )
    plain = '{"key": "b", "model": "m", "status": "oom", "axes": {}}'
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{plain}\n")
    assert list(Rows(tmp_path / "rows.jsonl").rows) == ["b"]


def test_a_value_of_set_that_is_no_yaml_is_refused(capsys):
    assert sweep.main(["--models", "configs/gpt2-tiny.json", "--set", "bsz=!!bool 7"]) == 2
    assert "is no value" in capsys.readouterr().err
