"""Spoilt files of every kind that the tools read: each ends in a result or in one clear line.

    make fuzz                                  a million files through readers, 100,000 through tools
    make fuzz CASES=2000 KINDS="log trace"     so many of each of these kinds
    make fuzz CASES=1 KINDS=log FIRST=4711     one case again, with its traceback

Each begins as a right file of tests/fuzzed or of other tests' data. Its structure is changed (types,
keys, nesting, numbers, texts), or its bytes. A tool's output may hold no control characters, no
traceback, and no nan in a CSV or JSON.
tests/test_fuzz.py runs a few of each.
"""

import contextlib
import csv
import functools
import gzip
import io
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

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
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.read_results import records_of_file
from llm_train_bench.compare.records import LogFacts
from llm_train_bench.model.config import ConfigError, load_config
from llm_train_bench.model.hf import _index
from llm_train_bench.run.checkpoint import manifest
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.sweep import all_runs
from llm_train_bench.sweep.cell_runs import Rows, cell_key
from llm_train_bench.sweep.experiment import read_experiment
from llm_train_bench.sweep.grid import make_cells
from llm_train_bench.trace.breakdown import break_down
from llm_train_bench.trace.read_trace import read_trace
from tests.helpers import ROOT

EXPECTED = (UsageError, ConfigError)
CODES = (0, 1, 2, 4, 5)
CONTROL = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ESCAPE = "\x1b]52;c;aGk=\x07\x9b2J\u202e"
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


def edited(whole: Any, rng: random.Random) -> Any:
    """JSON data with one change at a random place."""
    path, old = _spot(whole, rng)
    kind, number = type(old), type(old) in (int, float)
    other = _spot(whole, rng)[1]
    changes = [
        rng.choice(ODD), rng.choice(ODD), rng.choice(ODD), other, [old], {"x": old}, [old] * 3,
        str(old) if number else len(old) if kind is str else rng.choice(ODD),
        old * rng.choice((-1, 1000, 1e-12, 1e12, 1e300)) if number and abs(old) < 2**63 else other,
    ]  # fmt: skip
    if kind is dict:
        key = rng.choice([*old, "x"])
        changes += [{}, list(old.values()), [*old], {k: v for k, v in old.items() if k != key},
                    old | {key: other}, old | {rng.choice(("", ESCAPE, "x")): other},
                    {f"{k}{ESCAPE}" if k == key else k: v for k, v in old.items()}]  # fmt: skip
    if kind is list:
        i = rng.randrange(len(old) + 1)
        changes += [[], dict(zip(map(str, old[:9]), old, strict=False)), old[:i], old[:i] + old[i + 1 :],
                    [*old[:i], other, *old[i:]], old[::-1]]  # fmt: skip
    return _replaced(whole, path, rng.choice(changes))


def _spot(value: Any, rng: random.Random) -> tuple[list, Any]:
    """A random place inside JSON data: its path, and what stands there."""
    path = []
    while isinstance(value, dict | list) and value and rng.random() < 0.9:
        path.append(rng.choice([*value] if isinstance(value, dict) else range(len(value))))
        value = value[path[-1]]
    return path, value


def _replaced(value: Any, path: list, new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy


def _text(value: Any, rng: random.Random) -> str:
    """Data as JSON, rarely with a key twice."""
    text, n = json.dumps(value), rng.choice((5, 70, 400, 5000))
    text = text.replace('"@list"', "[" * n + "]" * n).replace('"@digits"', "9" * 5000)
    text = text.replace('"@object"', '{"a":' * n + "1" + "}" * n)
    if isinstance(value, dict) and value and rng.random() < 0.05:
        text = f"{{{json.dumps(rng.choice([*value]))}: {json.dumps(rng.choice(ODD))}, {text[1:]}"
    return text


def _table(rows: Any) -> str:
    out = io.StringIO()
    rows = rows if isinstance(rows, list) else [rows]
    with contextlib.suppress(csv.Error):
        csv.writer(out).writerows(row if isinstance(row, list) else [row] for row in rows)
    return out.getvalue()


def reworded(text: str, rng: random.Random) -> str:
    """A log with a changed number, unit or line."""
    lines = text.splitlines(keepends=True) or [""]
    i = rng.randrange(len(lines))
    line, numbers = lines[i], [*re.finditer(r"\d[\d.,]*", lines[i])]
    one = rng.choice(numbers) if numbers else re.search("", line)
    at = rng.randrange(len(line) + 1)
    unit = rng.choice(UNITS)
    lines[i] = rng.choice((
        "", line * 2, line + rng.choice(lines), line[:at], line[:at] + ESCAPE + line[at:],
        line.replace(*unit), line.replace(*unit[::-1]) if unit[1] else line,
        *3 * [line[: one.start()] + rng.choice(NUMBERS) + line[one.end() :]],
    ))  # fmt: skip
    return "".join(lines)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """A file with other bytes, cut off, or with a part twice."""
    n, many = len(data), bytearray(data)
    for _ in range(rng.randint(1, 4) if n else 0):
        many[rng.randrange(n)] = rng.randrange(256)
    a, b = sorted((rng.randrange(n + 1), rng.randrange(n + 1)))
    return rng.choice((bytes(many), data[:a], data[:a] + data[b:], data[:b] + data[a:],
                       rng.randbytes(rng.randrange(64))))  # fmt: skip


@functools.cache
def _parsed(data: bytes, ending: str) -> Any:
    if ending == ".jsonl":
        return [*map(json.loads, data.decode().splitlines())]
    if ending == ".csv":
        return [*csv.reader(io.StringIO(data.decode()))]
    if ending == ".yaml":
        return yaml.safe_load(data)
    return json.loads(gzip.decompress(data) if ending.endswith(".gz") else data)


def spoilt(right: bytes, ending: str, rng: random.Random) -> bytes:
    """The file with one to three changes."""
    if ending == ".bin" or rng.random() < 0.15:
        return flipped(right, rng)
    times = range(rng.choice((1, 1, 2, 3)))
    if ending in (".log", ".txt"):
        text = right.decode()
        for _ in times:
            text = reworded(text, rng)
        return text.encode("utf-8", "surrogatepass")
    value = _parsed(right, ending)
    for _ in times:
        value = edited(value, rng)
    if ending == ".csv":
        text = _table(value)
    elif ending == ".jsonl":
        text = "\n".join(_text(row, rng) for row in (value if isinstance(value, list) else [value]))
    else:
        text = _text(value, rng)
    data = text.encode("utf-8", "surrogatepass")
    return gzip.compress(data, 1) if ending.endswith(".gz") else data


def read_hardware(path: Path) -> None:
    cached = [hardware.devices, hardware.constants]
    files = mock.patch.multiple(hardware, HARDWARE_FILE=path, ROOFS_FILE=path)
    # Fresh ones, in place of what the caches hold.
    fresh = {f.__name__: functools.cache(f.__wrapped__) for f in cached}
    with files, mock.patch.multiple(hardware, **fresh):
        hardware.find_roof("NVIDIA H100 80GB HBM3")
        hardware.find_peaks("NVIDIA H100 80GB HBM3")
        hardware.constants()


def read_weights_index(path: Path) -> None:
    path.rename(path.with_name("model.safetensors.index.json"))
    _index(path.parent)


def read_checkpoint(path: Path) -> None:
    (path.parent / "c").mkdir(exist_ok=True)
    path.rename(path.parent / "c" / manifest.MANIFEST)
    with contextlib.suppress(ValueError, OSError):  # what newest() leaves out
        manifest.verify(path.parent / "c")


def read_steps(path: Path) -> None:
    shutil.copy(PLAIN, path.parent / "result.json")
    path.rename(path.with_name("steps.jsonl"))
    read_foreign(path.parent / "result.json")


def read_foreign(path: Path) -> None:
    read_records([str(path)], print, LogFacts())


def read_run_file(path: Path) -> None:
    parse_args(["--from", str(path)], "train.py")


def run(path: Path, main: Callable, *argv: Any) -> None:
    """Run a tool in this process; AssertionError for a wrong exit code or output.

    In `argv`, @ stands for the file, and @out for a directory that the tool writes into.
    """
    out, stdout, stderr = path.parent / "out", io.StringIO(), io.StringIO()
    words = [str(word).replace("@out", str(out)) for word in argv]
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main([str(path) if word == "@" else word for word in words])
    assert code in CODES, f"exit code {code}"
    assert code != 2 or stderr.getvalue().strip(), "nothing said"
    check_text(stdout.getvalue(), "stdout")
    check_text(stderr.getvalue(), "stderr")
    for file in out.rglob("*"):
        if file.is_file() and file.suffix in (".csv", ".json", ".md", ".html", ".jsonl"):
            check_file(file)


def tool(main: Callable, *argv: Any) -> Callable[[Path], None]:
    """What reads a file by running a tool."""
    return lambda path: run(path, main, *argv)


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
    assert file.name != "report.html" or text.count("<script") == 2, "report.html: another script"


def compares(path: Path) -> None:
    """By itself, and beside a run of ours, in one of some ways."""
    ways = ([], ["--log", "model=gpt"], ["--methodology", "identical_config"])
    more = [[], [PLAIN]][len(path.read_bytes()) % 2]
    flags = ["--output-dir", "@out", "--tokens", 1e12, *ways[path.stat().st_size % 3]]
    run(path, compare.main, "@", *more, *flags)


def compares_sweep(path: Path) -> None:
    shutil.copytree(PLAIN.parent, path.parent / "runs/plain")
    path.rename(path.with_name("sweep.json"))
    run(path, compare.main, path.parent, "--output-dir", "@out")


def gates(path: Path, baselines: Path = ROOT / "tests/sample/baselines.json") -> None:
    result = path if baselines != path else PLAIN
    run(path, compare.main, result, "--baseline", baselines, "--output-dir", "@out")
    shutil.copy(baselines, path.parent / "new.json")
    run(path, compare.main, result, "--save", path.parent / "new.json")


def reports_trace(path: Path) -> None:
    whole = TRACES / "rocm_mi300x_llama_block.json.gz"
    for argv in (["@"], ["@", "--json"], ["@", whole], [whole, "@"]):
        run(path, trace_report.main, *argv)


def reports_ranks(path: Path) -> None:
    ranks = path.parent / "ranks"
    ranks.mkdir()
    path.rename(ranks / f"rank1{path.name.removeprefix('spoilt')}")
    (ranks / "rank0.json").write_bytes((FUZZED / "trace.json").read_bytes())
    for flags in ([], ["--json"]):
        run(path, trace_report.main, ranks, *flags)


def reports_run(path: Path) -> None:
    """A trace in the directory of a run, whose result knows its matmuls."""
    path.rename(path.with_name("result.json"))
    trace = path.parent / "trace/rank0.json"
    trace.parent.mkdir()
    trace.write_bytes((FUZZED / "trace.json").read_bytes())
    for flags in ([], ["--json"]):
        run(path, trace_report.main, trace, *flags)


def sweeps_rows(path: Path) -> None:
    """A sweep that goes on from rows of before; nothing is run."""
    (path.parent / "out").mkdir()
    path.rename(path.parent / "out/rows.jsonl")
    argv = [FUZZED / "e.yaml", "--platform", "cpu", "--output-dir", "@out"]
    row = {"key": "k", "status": "failed", "model": "m", "axes": {}, "error": "x"}
    with mock.patch.object(all_runs, "run_cell", lambda *_: row):
        run(path, sweep.main, *argv)


def plans_sweep(path: Path) -> None:
    for platform in ("nvidia", "cpu"):
        run(path, sweep.main, "@", "--platform", platform, "--dry-run")


def examines(path: Path) -> None:
    """doctor.py with a tool of the driver that prints this."""
    stand_ins = dict.fromkeys(("libraries", "settings", "torch_sees"), lambda *_: [])
    platform = "amd" if path.suffix == ".json" else "nvidia"
    stand_ins["output_of"] = lambda *_: path.read_bytes().decode("utf-8", "replace").strip()
    which = mock.patch.object(shutil, "which", lambda _: "x")
    kind = mock.patch.object(doctor, "detect_platform", lambda: platform)
    with which, kind, mock.patch.multiple(findings, **stand_ins):
        for flags in ([], ["--json"]):
            run(path, doctor.main, *flags)


PLAIN, TRACES = ROOT / "tests/sample/plain/result.json", ROOT / "tests/traces"
TINY = ROOT / "configs/gpt2-tiny.json"
FUZZED = ROOT / "tests/fuzzed"
Kind = tuple[str, list[bytes], Callable[[Path], object]]


def _small(trace: Path) -> bytes:
    """A recorded trace with the first of its events."""
    content = json.loads(gzip.decompress(trace.read_bytes()))
    content["traceEvents"] = content["traceEvents"][:200]
    return gzip.compress(json.dumps(content).encode())


@functools.cache
def kinds() -> dict[str, Kind]:
    """Name to its files' ending, some that are right, and what reads them; tools' names have a colon."""
    stored = json.loads((FUZZED / "manifest.json").read_bytes())
    content = manifest.Manifest.model_validate(stored).text()
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
    states = texts("tests/logs/trainer_state.json")
    csvs = texts("tests/logs/lightning.csv")
    experiments = texts("tests/sample/experiment.yaml", "configs/sweeps/*.yaml")
    (steps,) = texts("tests/sample/plain/steps.jsonl")
    configs = texts("configs/*-tiny.json", "configs/qwen2.5-7b.json", "configs/deepseek-v3.json")
    baselines = texts("tests/sample/baselines.json")
    return {
        "config": (".json", configs, load_config),
        "tokens": (".bin", [tokens], open_tokens),
        "result": (".json", results, read_foreign),
        "steps": (".jsonl", [b"\n".join(steps.splitlines()[:4])], read_steps),
        "log": (".log", logs, read_foreign),
        "trainer": (".json", states, read_foreign),
        "suite": (".json", suites, read_foreign),
        "table": (".csv", csvs, read_foreign),
        "lines": (".jsonl", lines, read_foreign),
        "trace": (".json", traces, lambda path: break_down(read_trace(path))),
        "trace-gz": (".json.gz", gz, lambda path: break_down(read_trace(path))),
        "experiment": (".yaml", experiments, lambda path: make_cells(read_experiment(path), "cpu")),
        "run": (".yaml", texts("tests/fuzzed/run.yaml"), read_run_file),
        "again": (".json", results, read_run_file),
        "baselines": (".json", baselines, records_of_file),
        "hardware": (".json", texts("configs/hardware.json"), read_hardware),
        "rows": (".jsonl", ["\n".join(map(json.dumps, rows)).encode()],
                 lambda path: Rows(path.rename(path.with_name("rows.jsonl")))),
        "weights": (".json", values({"weight_map": {"a": "b.safetensors"}}), read_weights_index),
        "tokenizer": (".json", texts("tests/fuzzed/tokenizer.json"),
                      lambda path: prepare_data.load_encoder(str(path))[0]("a b")),
        "manifest": (".json", [content.encode()], read_checkpoint),
        "compare:result": (".json", results, compares),
        "compare:suite": (".json", suites, compares),
        "compare:log": (".log", logs, compares),
        "compare:trainer": (".json", states, compares),
        "compare:table": (".csv", csvs, compares),
        "compare:lines": (".jsonl", lines, compares),
        "compare:sweep": (".json", texts("tests/fuzzed/sweep.json"), compares_sweep),
        "compare:prices": (".yaml", experiments[:1],
                           tool(compare.main, PLAIN, "--experiment", "@", "--output-dir", "@out")),
        "gate:result": (".json", results, gates),
        "gate:baselines": (".json", baselines, lambda path: gates(path, path)),
        "trace:file": (".json", traces, reports_trace),
        "trace:gz": (".json.gz", gz[:2], reports_trace),
        "trace:ranks": (".json.gz", gz[:2], reports_ranks),
        "trace:run": (".json", texts("tests/sample/profiled/result.json"), reports_run),
        "sweep:rows": (".jsonl", ["\n".join(map(json.dumps, measured)).encode()], sweeps_rows),
        "sweep:experiment": (".yaml", experiments, plans_sweep),
        "estimate:config": (".json", configs, tool(estimate.main, "@", *on_h100)),
        "estimate:calibrate": (".json", values(measured_there),
                               tool(estimate.main, TINY, *on_h100, "--calibrate", "@")),
        "doctor:amd": (".json", texts("tests/fuzzed/rocm-smi.json"), examines),
        "doctor:nvidia": (".txt", texts("tests/fuzzed/nvidia-smi.txt"), examines),
    }  # fmt: skip


SLOW = ("experiment", "run", "again")  # YAML in plain Python


def attack(name: str, cases: int, directory: Path, first: int = 0) -> None:
    """Read so many spoilt files of one kind; AssertionError with each way to fail, and how often."""
    ending, rights, read = kinds()[name]
    failed, example = Counter(), {}
    for number in range(first, first + cases):
        rng = random.Random(f"{name} {number}")
        here = directory / "case"
        here.mkdir()
        path = here / f"spoilt{ending}"
        path.write_bytes(spoilt(rng.choice(rights), ending, rng))
        if why := "".join(complaints(read, path, cases == 1)):
            failed[why] += 1
            example.setdefault(why, number)
        shutil.rmtree(here)
    ways = (f"{n} times: {why} (KINDS={name} FIRST={example[why]})" for why, n in failed.items())
    assert not failed, "\n".join(ways)


def complaints(read: Callable[[Path], object], path: Path, loud: bool = False) -> Iterator[str]:
    """Why reading this file is wrong, if it is."""
    begin = time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read(path)
    except EXPECTED as error:
        if CONTROL.search(str(error)) or "\n" in str(error) or len(str(error)) > 2000:
            yield f"a message that is no line: {str(error)[:200]!a}"
    except AssertionError as error:
        yield str(error)[:200]
    except (Exception, SystemExit) as error:
        if loud:
            traceback.print_exc(file=sys.__stderr__)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename]
        where = [f"{Path(f.filename).relative_to(ROOT)}:{f.lineno}" for f in frames]
        where = [text for text in where if not text.startswith("tests/")][-1:]
        yield f"{type(error).__name__} at {''.join(where)}: {re.sub(r'[0-9]+', 'N', str(error))[:60]!a}"
    if time.monotonic() - begin > 20:
        yield "too slow"


def main() -> int:
    """CASES of each kind, by default a million for readers and 100,000 for tools; KINDS chooses some."""
    code, first = 0, int(os.environ.get("FIRST") or 0)
    for name in (os.environ.get("KINDS") or " ".join(kinds())).split():
        usual = 5000 if ":" in name else 10_000 if name in SLOW else 57_100
        cases, begin = int(os.environ.get("CASES") or usual), time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                attack(name, cases, Path(directory), first)
            except AssertionError as error:
                code = 1
                print(error)
        print(f"{name}: {cases} cases; {time.monotonic() - begin:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
