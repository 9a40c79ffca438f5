"""Spoilt files of every kind that the tools read: each ends in a result or in one clear line.

Each begins as a right file of tests/fuzzed or of other tests' data. Hypothesis changes its structure
(types, keys, nesting, numbers, texts) or its bytes, and makes a change that is found as small as it
can. A tool's output may hold no control characters, no traceback, and no nan in a CSV or JSON.
tests/test_fuzz.py runs some of each kind, and `make fuzz` many.
"""

import contextlib
import csv
import functools
import gzip
import io
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import save_file

import compare
import doctor
import estimate
import prepare_data
import sweep
import trace_report
from llm_train_bench.base import hardware
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.token_files import open_tokens, write_tokens
from llm_train_bench.check import findings
from llm_train_bench.compare.read_results import records_of_file
from llm_train_bench.model.config import ConfigError, load_config
from llm_train_bench.model.hf import _index
from llm_train_bench.run.checkpoint import attempt
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.sweep import all_runs
from llm_train_bench.sweep.cell_runs import Rows, cell_key
from llm_train_bench.sweep.experiment import read_experiment
from llm_train_bench.sweep.grid import make_cells
from llm_train_bench.trace.breakdown import break_down
from llm_train_bench.trace.read_trace import read_trace
from tests.helpers import ROOT, records_of

CODES = (0, 1, 2, 4, 5)
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ESCAPE = "\x1b]52;c;aGk=\x07\x9b2J\u202e"
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                      max_leaves=5)  # fmt: skip
# Values that a careless reader stumbles over; @... becomes what no Python value can be.
ODD = (
    None, True, False, 0, -1, 1, 3, 7.5, 1e308, 5e-324, math.nan, math.inf, -math.inf, 2**31, 2**63,
    10**400, "", "x", "0", "../x", ESCAPE, f"=1+1{ESCAPE}", "a\nb\tc", "\ud800", "<script>|`",
    [], {}, [[]], [None], {"": None}, {ESCAPE: ESCAPE}, "@list", "@object", "@digits",
)  # fmt: skip
NUMBERS = (
    "0", "-1", "nan", "inf", "1e999", "1e-999", "9" * 400, "1,,2", ".", "", ESCAPE, "[", "{'a':",
)  # fmt: skip
UNITS = (("GiB", "B"), ("GB", "TB"), ("ms", "s"), ("ms", "us"), ("%", ""), ("/", " "), (":", "="))


@st.composite
def edited(draw, whole: Any) -> Any:
    """JSON data with something else, or nothing, at some place."""
    *parents, (parent, key) = draw(places({"": whole}))
    old, other = parent[key], draw(places({"": whole}))[-1]
    new = draw(st.sampled_from((*ODD, [old], {"x": old}, [old] * 3, str(old), other[0])) | values)
    gone = bool(parents) and draw(st.booleans())
    if isinstance(parent, dict):
        changed = {k: v for k, v in parent.items() if k != key} | ({} if gone else {key: new})
    else:
        changed = [*parent[:key], *([] if gone else [new]), *parent[key + 1 :]]
    for above, step in reversed(parents):
        copy = above.copy()
        copy[step] = changed
        changed = copy
    return changed[""]


@st.composite
def places(draw, value: Any) -> list[tuple[Any, Any]]:
    """The way to a place inside data: each container on it, and the key there."""
    way = []
    while isinstance(value, dict | list) and value and (not way or draw(st.integers(0, 9))):
        key = draw(st.sampled_from([*value] if isinstance(value, dict) else range(len(value))))
        way.append((value, key))
        value = value[key]
    return way


def as_json(value: Any, n: int = 400) -> str:
    """Data as JSON, with what no Python value can be in place of @list, @object and @digits."""
    text = json.dumps(value).replace('"@list"', "[" * n + "]" * n)
    text = text.replace('"@object"', '{"a":' * n + "1" + "}" * n)
    return text.replace('"@digits"', "9" * 5000)


def as_table(rows: Any) -> str:
    """Data as CSV."""
    out = io.StringIO()
    rows = rows if isinstance(rows, list) else [rows]
    with contextlib.suppress(csv.Error):
        csv.writer(out).writerows(row if isinstance(row, list) else [row] for row in rows)
    return out.getvalue()


@st.composite
def reworded(draw, text: str) -> str:
    """A log with a changed number, unit or line."""
    lines = text.splitlines(keepends=True) or [""]
    i = draw(st.integers(0, len(lines) - 1))
    line, numbers = lines[i], [*re.finditer(r"\d[\d.,]*", lines[i])]
    one = draw(st.sampled_from(numbers)) if numbers else re.search("", line)
    at, unit = draw(st.integers(0, len(line))), draw(st.sampled_from(UNITS))
    number = draw(st.sampled_from(NUMBERS) | st.floats().map(str) | st.text(max_size=9))
    changed = line[: one.start()] + number + line[one.end() :]
    changes = ["", changed, line * 2, line[:at], line[:at] + ESCAPE + line[at:], line.replace(*unit),
               line + draw(st.sampled_from(lines))]  # fmt: skip
    lines[i] = draw(st.sampled_from(changes))
    return "".join(lines)


@st.composite
def damaged(draw, data: bytes) -> bytes:
    """A file with other bytes, cut off, or with a part twice."""
    a, b = sorted(draw(st.tuples(*2 * [st.integers(0, len(data))])))
    new = draw(st.binary(max_size=8))
    return draw(st.sampled_from((data[:a], data[:a] + new + data[a + len(new) :], data[:a] + data[b:],
                                 data[:b] + data[a:], new)))  # fmt: skip


@functools.cache
def parsed(data: bytes, ending: str) -> Any:
    """The content of a right file."""
    if ending == ".jsonl":
        return [*map(json.loads, data.decode().splitlines())]
    if ending == ".csv":
        return [*csv.reader(io.StringIO(data.decode()))]
    if ending == ".yaml":
        return yaml.safe_load(data)
    return json.loads(gzip.decompress(data) if ending.endswith(".gz") else data)


@st.composite
def spoilt(draw, rights: list[bytes], ending: str) -> bytes:
    """One of the files, with one to three changes of its structure, or of its bytes."""
    right = draw(st.sampled_from(rights))
    if ending == ".bin" or not draw(st.integers(0, 6)):
        return draw(damaged(right))
    is_text = ending in (".log", ".txt")
    value = right.decode() if is_text else parsed(right, ending)
    for _ in range(draw(st.integers(1, 3))):
        value = draw((reworded if is_text else edited)(value))
    if is_text:
        text = value
    elif ending == ".csv":
        text = as_table(value)
    elif ending == ".jsonl":
        text = "\n".join(map(as_json, value if isinstance(value, list) else [value]))
    else:
        text = as_json(value)
    data = text.encode("utf-8", "surrogatepass")
    return gzip.compress(data, 1) if ending.endswith(".gz") else data


def read_hardware(path: Path) -> None:
    cached = [hardware.devices, hardware.our_hardware]
    # Fresh ones, in place of what the caches hold.
    fresh = {f.__name__: functools.cache(f.__wrapped__) for f in cached}
    with mock.patch.multiple(hardware, HARDWARE_FILE=path, **fresh):
        hardware.find_peaks("NVIDIA H100 80GB HBM3")


def read_roofs(path: Path) -> None:
    with mock.patch.object(hardware, "ROOFS_FILE", path):
        hardware.find_roof("NVIDIA H200")


def read_weights_index(path: Path) -> None:
    path.rename(path.with_name("model.safetensors.index.json"))
    save_file({"a": torch.zeros(1)}, path.with_name("b.safetensors"))
    _index(path.parent)


def read_checkpoint(path: Path) -> None:
    (path.parent / "c").mkdir(exist_ok=True)
    path.rename(path.parent / "c" / attempt.FACTS)
    attempt.newest_good([path.parent / "c"], [])


def read_steps(path: Path) -> None:
    shutil.copy(PLAIN, path.parent / "result.json")
    path.rename(path.with_name("steps.jsonl"))
    records_of(path.parent / "result.json")


def read_run_file(path: Path) -> None:
    parse_args(["--from", str(path)], "train.py")


def run(path: Path, main: Callable, *ways: Sequence) -> bool:
    """Whether a tool refuses the file in one of these ways; AssertionError for a wrong output.

    In a command line, @ stands for the file, and @out for a directory that the tool writes into.
    """
    out, codes = path.parent / "out", []
    for way in ways:
        stdout, stderr = io.StringIO(), io.StringIO()
        words = [str(path) if word == "@" else str(word).replace("@out", str(out)) for word in way]
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            codes.append(main(words))
        assert codes[-1] in CODES, f"exit code {codes[-1]}"
        assert codes[-1] != 2 or stderr.getvalue().strip(), "nothing said"
        check_text(stdout.getvalue(), "stdout")
        check_text(stderr.getvalue(), "stderr")
    for file in out.rglob("*"):
        if file.is_file() and file.suffix in (".csv", ".json", ".md", ".html", ".jsonl"):
            check_file(file)
    return 2 in codes


def tool(main: Callable, *argv: Any) -> Callable[[Path], bool]:
    """What reads a file by running a tool."""
    return lambda path: run(path, main, argv)


def check_text(text: str, where: str) -> None:
    """AssertionError for what a terminal or a reader should not see."""
    assert not (bad := CONTROL.search(text)), f"{where}: control character {bad[0]!a}"
    assert "Traceback" not in text, f"{where}: a traceback"


def check_file(file: Path) -> None:
    """The same for a file that a tool wrote."""
    text = file.read_bytes().decode()
    check_text(text.replace("\r\n", "\n") if file.suffix == ".csv" else text, file.name)
    if file.suffix == ".json":
        json.dumps(json.loads(text), allow_nan=False)
    if file.suffix == ".csv":
        head, *rows = csv.reader(io.StringIO(text))
        for name, cell in ((n, c) for row in rows for n, c in zip(head, row, strict=False)):
            figure = name not in ("group", "setting", "run", "hardware", "settings")
            assert not figure or cell.lower() not in ("nan", "inf", "-inf"), f"{file.name}: {cell}"
            formula = cell[:1] in ("=", "@", "+", "-") and not re.fullmatch(r"[-+][\d.e+-]+", cell)
            assert not formula, f"{file.name}: a formula, {cell[:20]!a}"
    assert file.name != "report.html" or text.count("<script") == 1, "report.html: another script"


def compares(path: Path) -> bool:
    """By itself, and beside a run of ours."""
    flags = ["--output-dir", "@out", "--tokens", 1e12]
    identical = ["--methodology", "identical_config"]
    return run(path, compare.main, ["@", *flags], ["@", PLAIN, *flags, *identical])


def gates(path: Path, baselines: Path = ROOT / "tests/sample/baselines.json") -> bool:
    result = path if baselines != path else PLAIN
    judge = [result, "--baseline", baselines]
    shutil.copy(baselines, path.parent / "new.json")
    return run(path, compare.main, judge, [result, "--save", path.parent / "new.json"])


def reports_trace(path: Path) -> bool:
    whole = TRACES / "rocm_mi300x_llama_block.json.gz"
    return run(path, trace_report.main, ["@"], ["@", "--json"], ["@", whole], [whole, "@"])


def placed(name: str, beside: dict[str, Path], main: Callable, *ways: Sequence):
    """What reads a file of this name, beside copies of others, as `run` does; @dir is where all lie."""

    def read(path: Path) -> bool:
        here = path.parent
        for place in (name, *beside):
            (here / place).parent.mkdir(parents=True, exist_ok=True)
        path.rename(here / name)
        for place, source in beside.items():
            shutil.copy(source, here / place)
        argv = ([str(word).replace("@dir", str(here)) for word in way] for way in ways)
        return run(path, main, *argv)

    return read


def sweeps_rows(path: Path) -> bool:
    """A sweep that goes on from rows of before; nothing is run."""
    (path.parent / "out").mkdir()
    path.rename(path.parent / "out/rows.jsonl")
    argv = [FUZZED / "e.yaml", "--platform", "cpu", "--output-dir", "@out"]
    row = {"key": "k", "status": "failed", "model": "m", "axes": {}, "error": "x"}
    with mock.patch.object(all_runs, "run_cell", lambda *_: row):
        return run(path, sweep.main, argv)


def plans_sweep(path: Path) -> bool:
    return run(path, sweep.main, ["@", "--platform", "nvidia", "--dry-run"])


def examines(path: Path) -> bool:
    """doctor.py with a tool of the driver that prints this."""
    stand_ins = dict.fromkeys(("libraries", "settings", "torch_sees"), lambda *_: [])
    stand_ins["output_of"] = lambda *_: path.read_bytes().decode("utf-8", "replace").strip()
    which = mock.patch.object(shutil, "which", lambda _: "x")
    kind = mock.patch.object(doctor, "detect_platform", lambda: "nvidia")
    with which, kind, mock.patch.multiple(findings, **stand_ins):
        return run(path, doctor.main, [], ["--json"])


PLAIN, TRACES = ROOT / "tests/sample/plain/result.json", ROOT / "tests/traces"
TINY = ROOT / "configs/gpt2-tiny.json"
FUZZED, RANK0 = ROOT / "tests/fuzzed", "@dir/trace/rank0.json"
Kind = tuple[str, list[bytes], Callable[[Path], object]]


def _small(trace: Path) -> bytes:
    """A recorded trace with the first of its events."""
    content = json.loads(gzip.decompress(trace.read_bytes()))
    content["traceEvents"] = content["traceEvents"][:200]
    return gzip.compress(json.dumps(content).encode())


@functools.cache
def kinds() -> dict[str, Kind]:
    """Name to its files' ending, some that are right, and what reads them; tools' names have a colon."""
    content = (FUZZED / "facts.json").read_bytes()
    with tempfile.TemporaryDirectory() as directory:
        write_tokens(Path(directory) / "x.bin", [list(range(50))], 256)
        tokens = (Path(directory) / "x.bin").read_bytes()
    cells = make_cells(read_experiment(FUZZED / "e.yaml"), "cpu")

    def texts(*paths: str) -> list[bytes]:
        return [file.read_bytes() for path in paths for file in sorted(ROOT.glob(path))]

    def values(*contents: Any) -> list[bytes]:
        return [json.dumps(content).encode() for content in contents]

    logs = [(text[: text.rfind(b"\n", 0, 3000)] if len(text) > 3000 else text)
            .decode("utf-8", "replace").encode() for text in texts("tests/logs/*.log")]  # fmt: skip
    results = texts("tests/sample/*/result.json")
    measured_there = json.loads(results[0])
    measured_there["device"]["hardware"] = "H100 SXM"
    on_h100 = ("--gpu", "h100", "--seq-len", 64)
    rows = [json.loads(line) for line in texts("tests/sample/rows.jsonl")[0].splitlines()]
    measured = [row | {"key": cell_key(cell, 0)}
                for row, cell in zip(rows * 9, cells, strict=False)]  # fmt: skip
    torchtune = b'{"step": 1, "tokens_per_second_per_gpu": 8.0, "loss": 2.0, "lr": 1e-3}\n' * 2
    lines = [b"\n".join(texts("tests/logs/automodel.jsonl")[0].splitlines()[:3]), torchtune]
    suites = texts("tests/logs/suite.json", "tests/logs/automodel-benchmark.json")
    traces = texts("tests/fuzzed/*trace.json")
    gz = [gzip.compress(text) for text in traces]
    gz += [_small(file) for file in sorted(TRACES.glob("*.json.gz"))]
    experiments = texts("tests/sample/experiment.yaml", "configs/sweeps/*.yaml")
    (steps,) = texts("tests/sample/plain/steps.jsonl")
    configs = texts("configs/*-tiny.json", "configs/qwen2.5-7b.json", "configs/deepseek-v3.json")
    baselines = texts("tests/sample/baselines.json")
    foreign = {
        "result": (".json", results),
        "log": (".log", logs),
        "trainer": (".json", texts("tests/logs/trainer_state.json")),
        "suite": (".json", suites),
        "table": (".csv", texts("tests/logs/lightning.csv")),
        "lines": (".jsonl", lines),
    }
    return {name: (*files, records_of) for name, files in foreign.items()} | {
        **{f"compare:{name}": (*files, compares) for name, files in foreign.items()},
        "config": (".json", configs, load_config),
        "tokens": (".bin", [tokens], open_tokens),
        "steps": (".jsonl", [b"\n".join(steps.splitlines()[:4])], read_steps),
        "trace": (".json", traces, lambda path: break_down(read_trace(path))),
        "trace-gz": (".json.gz", gz, lambda path: break_down(read_trace(path))),
        "experiment": (".yaml", experiments, lambda path: make_cells(read_experiment(path), "nvidia")),
        "run": (".yaml", texts("tests/fuzzed/run.yaml"), read_run_file),
        "again": (".json", texts("tests/sample/plain/result.json"), read_run_file),
        "baselines": (".json", baselines, records_of_file),
        "hardware": (".json", texts("configs/hardware.json"), read_hardware),
        "roofs": (".json", values({"NVIDIA H200": {"bf16_tflops": 700.0}}), read_roofs),
        "rows": (".jsonl", ["\n".join(map(json.dumps, rows)).encode()],
                 lambda path: Rows(path.rename(path.with_name("rows.jsonl")))),
        "weights": (".json", values({"weight_map": {"a": "b.safetensors"}}), read_weights_index),
        "tokenizer": (".json", texts("tests/fuzzed/tokenizer.json"),
                      lambda path: prepare_data.load_encoder(str(path))[0]("a b")),
        "facts": (".json", [content], read_checkpoint),
        "compare:sweep": (".json", texts("tests/fuzzed/sweep.json"),
                          placed("sweep.json", {"runs/plain/result.json": PLAIN}, compare.main,
                                 ["@dir", "--output-dir", "@out"])),
        "compare:prices": (".yaml", experiments[:1],
                           tool(compare.main, PLAIN, "--experiment", "@", "--output-dir", "@out")),
        "gate:result": (".json", results, gates),
        "gate:baselines": (".json", baselines, lambda path: gates(path, path)),
        "trace:file": (".json", traces, reports_trace),
        "trace:gz": (".json.gz", gz[:2], reports_trace),
        "trace:ranks": (".json.gz", [gz[0], _small(TRACES / "cuda_h100_training_rank1.json.gz")],
                        placed("ranks/rank1.json.gz", {"ranks/rank0.json": FUZZED / "trace.json"},
                               trace_report.main, ["@dir/ranks"], ["@dir/ranks", "--json"])),
        "trace:run": (".json", texts("tests/sample/profiled/result.json"),
                      # A trace in the directory of a run, whose result knows its matmuls.
                      placed("result.json", {"trace/rank0.json": FUZZED / "trace.json"},
                             trace_report.main, [RANK0], [RANK0, "--json"])),
        "sweep:rows": (".jsonl", ["\n".join(map(json.dumps, measured)).encode()], sweeps_rows),
        "sweep:experiment": (".yaml", experiments, plans_sweep),
        "estimate:config": (".json", configs, tool(estimate.main, "@", *on_h100)),
        "estimate:calibrate": (".json", values(measured_there),
                               tool(estimate.main, TINY, *on_h100, "--calibrate", "@")),
        "doctor:nvidia": (".txt", texts("tests/fuzzed/nvidia-smi.txt"), examines),
    }  # fmt: skip


def read_file(kind: str, data: bytes, whole: bool = False) -> None:
    """Read a file of a kind; AssertionError if it ends neither in a result nor in one clear line.

    A `whole` file may not be refused.
    """
    ending, _, read = kinds()[kind]
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"spoilt{ending}"
        path.write_bytes(data)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                refused = read(path) is True
            assert not (whole and refused), "refused"
        except (UsageError, ConfigError) as error:
            message = str(error)
            assert not whole, message
            assert not CONTROL.search(message) and "\n" not in message and len(message) < 2000
        except SystemExit as error:
            raise AssertionError(f"it ends the process: {error}") from None
