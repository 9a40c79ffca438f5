"""Files that hang, lie or come from elsewhere: tests/fuzz.py in small, what it found, and others."""

import json
import math
import os

import pytest

import compare
import estimate
import sweep
import trace_report
from llm_train_bench.base.errors import printable
from tests import fuzz
from tests.helpers import ROOT, train_main

TINY = "configs/gpt2-tiny.json"
BASELINES = ROOT / "tests/sample/baselines.json"
BENCHMARK = json.loads((ROOT / "tests/logs/automodel-benchmark.json").read_text())
DEEP = "[" * 100_000


@pytest.mark.parametrize("kind", [*fuzz.kinds()])
def test_any_spoilt_file(kind, tmp_path):
    fuzz.attack(kind, 4 if ":" in kind or kind in fuzz.SLOW else 60, tmp_path)


FOUND = [
    ("hardware", {"devices": [{"name": "x" * 5000}]}),
    ("again", {"schema_version": 1, "args": {"config": "c.json"}, "entrypoint": ["x"] * 999}),
    # 16 GiB of nothing
    ("suite", BENCHMARK | {"seq_len": [None], "global_batch_size": 2**31}),
    ("compare:lines", [{"step": i, "tps": 8.0, "loss": math.nan} for i in range(3)]),
    ("gate:result", {"environment": {"image": {"name": 7}, "libraries": [1]}}),
    ("gate:result", {"device": {"count": 0}}),
    ("trace:run", {"profile": {"matmul_flops": "x", "matmul_tflops": 1}}),
    ("doctor:amd", {"card0": {"VRAM Total Memory (B)": 7, "Card Series": "\x1b[2J"}, "system": 7}),
]


@pytest.mark.parametrize(("kind", "content"), FOUND, ids=lambda x: x if isinstance(x, str) else "")
def test_what_the_fuzzer_found(kind, content, tmp_path):
    ending, rights, read = fuzz.kinds()[kind]
    if kind in ("gate:result", "trace:run"):
        whole = json.loads(rights[0])
        content = {k: whole[k] | v if isinstance(whole[k], dict) else v for k, v in content.items()}
        content = whole | content
    lines = content if isinstance(content, list) else [content]
    (tmp_path / f"x{ending}").write_text("\n".join(map(json.dumps, lines)))
    assert list(fuzz.complaints(read, tmp_path / f"x{ending}")) == []


READERS = {  # a tool, and the words before and after the file
    "compare": (compare.main, "", ""),
    "gate": (compare.main, "", ["--baseline", BASELINES]),
    "baseline": (compare.main, [ROOT, "--baseline"], ""),
    "calibrate": (estimate.main, f"{TINY} --gpu h100 --calibrate", ""),
    "config": (estimate.main, "", "--gpu h100"),
    "from": (train_main, "--from", ""),
    "train": (train_main, "", "--device cpu"),
    "data": (train_main, f"{TINY} --seq-len 16 --device cpu --data", ""),
    "trace": (trace_report.main, "", ""),
    "sweep": (sweep.main, "", "--dry-run"),
}


@pytest.mark.parametrize(
    ("name", "text", "reader"),
    [
        # None is a FIFO, which must not block.
        ("x.json", None, "train"), ("x.json", None, "data"), ("result.json", None, "compare"),
        ("x.json", None, "trace"), ("e.yaml", None, "sweep"), ("x.json", None, "baseline"),
        ("result.json", f'{{"schema_version": 3, "metrics": {DEEP}', "compare"),
        ("result.json", DEEP, "gate"), ("result.json", DEEP, "calibrate"),
        ("run.yaml", "config: " + DEEP[:5000], "from"),
        ("run.yaml", "config: x\nbsz: !!bool 7\n", "from"),
        ("result.json", '{"schema_version": 2, "args": [1]}', "from"),
        ("e.yaml", "experiment: !!timestamp x\n", "sweep"), ("index.json", DEEP, "config"),
        ("e.yaml", DEEP[:5000], "sweep"), ("x.json", DEEP, "trace"),
    ],
)  # fmt: skip
def test_a_foreign_file_is_one_line(name, text, reader, tmp_path, refused):
    path, (main, before, after) = tmp_path / name, READERS[reader]
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    message = str(path) if text is not None else "is no plain file"
    assert len(refused(main, message, before, path, after)) < 600


def test_printable():
    assert printable("a\nb\x1b[0m\x9bé\udcff") == "a\\nb\\x1b[0m\\x9bé\\udcff"
