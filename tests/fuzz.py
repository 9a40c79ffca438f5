"""Any bytes as any of the files that the tools read: each ends in a result or in one clear line.

    make fuzz                 a million cases in all
    make fuzz CASES=2000      so many of each kind of file

tests/test_holes.py runs a few of each.
"""

import contextlib
import io
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.apply.tokens import open_tokens, write_tokens
from bench.compare.find_results import read_records
from bench.compare.gate import read_baselines
from bench.compare.records import LogFacts
from bench.errors import UsageError
from bench.formulas import hardware
from bench.run.checkpoint import manifest
from bench.sweep.cell_runs import Rows
from bench.sweep.experiment import read_experiment
from bench.sweep.grid import make_cells
from bench.trace.breakdown import break_down
from bench.trace.read_trace import read_trace
from model.config import ConfigError, load_config
from model.hf import _index
from tests.helpers import ROOT

EXPECTED = (UsageError, ConfigError)
# Values that a careless reader stumbles over.
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([10**400, -1, 0, 2**31, 2**63, 1e308]),
    st.floats(), st.text(max_size=20), st.just([]), st.just({}), st.just("../x"), st.just("\x1b[2J"),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=5), st.none(), max_size=2),
)  # fmt: skip


def places(value, path=()) -> list[tuple]:
    """The paths of all values inside JSON data."""
    found = [path]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def replaced(value, path: tuple, new):
    """JSON data with another value at a path; None stands for its removal from an object."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    key, *rest = path
    copy[key] = replaced(copy[key], tuple(rest), new)
    return copy


def read_hardware(path: Path) -> None:
    with mock.patch.object(hardware, "HARDWARE_FILE", path), mock.patch.object(
        hardware, "ROOFS_FILE", path
    ):  # fmt: skip
        hardware.devices.cache_clear()
        hardware.constants.cache_clear()
        try:
            hardware.find_roof("NVIDIA H100 80GB HBM3")
            hardware.find_peaks("NVIDIA H100 80GB HBM3")
            hardware.constants()
        finally:
            hardware.devices.cache_clear()
            hardware.constants.cache_clear()


def read_tokenizer(path: Path) -> None:
    import prepare_data

    with contextlib.redirect_stderr(io.StringIO()):
        encode, _ = prepare_data.load_encoder(str(path))
        encode("a b")


def read_rows(path: Path) -> None:
    target = path.with_name("rows.jsonl")
    target.write_bytes(path.read_bytes())
    Rows(target)


def read_weights_index(path: Path) -> None:
    target = path.with_name("model.safetensors.index.json")
    target.write_bytes(path.read_bytes())
    _index(path.parent)


def read_checkpoint(path: Path) -> None:
    (path.parent / "c").mkdir(exist_ok=True)
    (path.parent / "c" / manifest.MANIFEST).write_bytes(path.read_bytes())
    with contextlib.suppress(ValueError, OSError):  # what newest() leaves out
        manifest.verify(path.parent / "c")


def read_steps(path: Path) -> None:
    content = (ROOT / "tests/version1/plain/result.json").read_text()
    (path.parent / "result.json").write_text(content)
    (path.parent / "steps.jsonl").write_bytes(path.read_bytes())
    read_records([str(path.parent / "result.json")], print, LogFacts())


def read_foreign(path: Path) -> None:
    read_records([str(path)], print, LogFacts())


def samples(directory: Path) -> dict[str, tuple[str, bytes, Callable[[Path], object]]]:
    """Kind of file to its name's ending, one that is right, and what reads it."""
    write_tokens(directory / "x.bin", [list(range(50))], 256)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
                 "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
                 "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}  # fmt: skip
    trace = {"traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10.0, "dur": 5.0, "pid": 0, "tid": 7,
         "args": {"device": 0, "stream": 7, "correlation": 1}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 3.0, "pid": 1, "tid": 1,
         "args": {"External id": 1}},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0.0, "dur": 20.0,
         "pid": 1, "tid": 1}]}  # fmt: skip
    part = {"file": "a", "offsets": [0], "lengths": [1]}
    inner = {"schema_version": 1, "run": "r", "step": 1, "samples": 1, "world": 1, "layout": "x",
             "args": {}, "global_batch": 1, "seq_len": 1, "model_hash": "x", "config": {}, "data": {},
             "loss": None, "scaler": None, "versions": {}, "files": {"a": {"bytes": 1, "crc32": 1}},
             "tensors": {"p/x": {"dtype": "F32", "shape": [1], "parts": [part]}}}  # fmt: skip
    content = manifest.Manifest.model_validate(inner).text()

    def text(path: str) -> bytes:
        return (ROOT / path).read_bytes()

    def experiment(path: Path) -> None:
        make_cells(read_experiment(path), "cpu")

    def as_trace(path: Path) -> None:
        with contextlib.suppress(UsageError):
            break_down(read_trace(path))

    return {
        "config": (".json", text("configs/llama-tiny.json"), load_config),
        "tokens": (".bin", (directory / "x.bin").read_bytes(), open_tokens),
        "result": (".json", text("tests/version1/plain/result.json"), read_foreign),
        "steps": (".jsonl", text("tests/version1/plain/steps.jsonl")[:900], read_steps),
        "log": (".log", text("tests/logs/primus.log")[:3000], read_foreign),
        "trainer": (".json", text("tests/logs/trainer_state.json"), read_foreign),
        "printed": (".log", text("tests/logs/axolotl.log"), read_foreign),
        "metrics": (".csv", text("tests/logs/lightning.csv"), read_foreign),
        "lines": (".jsonl", b'{"step": 1, "tps": 8.0, "loss": 2.0}\n' * 3, read_foreign),
        "trace": (".json", json.dumps(trace).encode(), as_trace),
        "experiment": (".yaml", text("tests/version1/experiment.yaml"), experiment),
        "baselines": (".json", text("tests/version1/baselines.json"),
                      lambda path: read_baselines(path, True)),
        "hardware": (".json", text("configs/hardware.json"), read_hardware),
        "rows": (".jsonl", text("tests/version1/rows.jsonl")[:2000], read_rows),
        "weights": (".json", json.dumps({"weight_map": {"a": "b.safetensors"}}).encode(),
                    read_weights_index),
        "tokenizer": (".json", json.dumps(tokenizer).encode(), read_tokenizer),
        "manifest": (".json", content.encode(), read_checkpoint),
    }  # fmt: skip


def mutated(right: bytes):
    """Strategy: the file with some bytes changed, cut, or (JSON) values replaced."""
    flips = st.lists(st.tuples(st.floats(0, 0.9999), st.integers(0, 255)), min_size=1, max_size=4)

    def flip(edits) -> bytes:
        data = bytearray(right)
        for where, value in edits:
            data[int(where * len(data))] = value
        return bytes(data)

    kinds = [
        flips.map(flip),
        st.integers(0, len(right)).map(lambda n: right[:n]),
        st.binary(max_size=64),
    ]
    with contextlib.suppress(ValueError):
        content = json.loads(right)
        spots = places(content)
        one = st.tuples(st.sampled_from(spots), ODD).map(lambda edit: replaced(content, *edit))
        kinds.insert(0, one.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")))
    return st.one_of(kinds)


def attack(name: str, cases: int, directory: Path) -> None:
    """Read so many spoilt files of one kind; AssertionError where one ends in something unexpected."""
    ending, right, read = samples(directory)[name]
    path = directory / f"spoilt{ending}"

    @settings(max_examples=cases, deadline=None, database=None, print_blob=False,
              derandomize=cases < 1000, suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(mutated(right))
    def one(content: bytes) -> None:
        path.write_bytes(content)
        begin = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                read(path)
        except EXPECTED as error:
            assert "\n" not in str(error) and len(str(error)) < 2000, str(error)
        assert time.monotonic() - begin < 20, "too slow"

    one()


KINDS = ("config", "tokens", "result", "steps", "log", "trainer", "printed", "metrics", "lines", "trace",
         "experiment", "baselines", "hardware",
         "rows", "weights", "tokenizer", "manifest")  # fmt: skip


def main() -> None:
    """CASES of each kind, by default a million in all; KINDS chooses some."""
    cases = int(os.environ.get("CASES") or math.ceil(1e6 / len(KINDS)))
    for name in (os.environ.get("KINDS") or " ".join(KINDS)).split():
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            attack(name, cases, Path(directory))
        print(f"{name}: {cases} cases; {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
