"""Files that hang, lie or come from elsewhere: tests/fuzz.py in small, what it found, and others."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings

import compare
import estimate
import sweep
import trace_report
from tests import fuzz
from tests.helpers import ROOT, rows_of, train_main

TINY = "configs/gpt2-tiny.json"
BASELINES = ROOT / "tests/sample/baselines.json"
DEEP = "[" * 100_000


LONG = "LLM_TRAIN_BENCH_FUZZ" in os.environ  # make fuzz
SLOW = ("experiment", "run", "again")  # YAML in plain Python


@pytest.mark.parametrize("kind", [*fuzz.kinds()])
def test_any_spoilt_file(kind):
    ending, rights, _ = fuzz.kinds()[kind]
    for right in rights:
        fuzz.read_file(kind, right, whole=True)
    cases = 4 if ":" in kind or kind in SLOW else 60

    @settings(max_examples=cases * (50 if LONG else 1), derandomize=not LONG, deadline=None,
              suppress_health_check=[*HealthCheck], report_multiple_bugs=False)  # fmt: skip
    @given(fuzz.spoilt(rights, ending))
    def check(data):
        fuzz.read_file(kind, data)

    check()


FOUND = [
    ("hardware", {"devices": [{"name": "x" * 5000}]}),
    ("again", {"schema_version": 1, "args": {"config": "c.json"}, "entrypoint": ["x"] * 999}),
    *(tuple(json.loads(row).values()) for row in rows_of("fuzzed.jsonl")),
]


@pytest.mark.parametrize(("kind", "content"), FOUND, ids=lambda x: x if isinstance(x, str) else "")
def test_what_the_fuzzer_found(kind, content):
    rights = fuzz.kinds()[kind][1]
    if kind in ("gate:result", "trace:run", "compare:result", "estimate:calibrate"):
        whole = json.loads(rights[0])
        content = {k: whole[k] | v if isinstance(whole[k], dict) else v for k, v in content.items()}
        content = whole | content
    lines = content if isinstance(content, list) else [content]
    fuzz.read_file(kind, "\n".join(map(json.dumps, lines)).encode())


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
        ("run.yaml", "config: x\nbsz: !!bool x\n", "from"),
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
    message = str(path) if text is not None else "is not a plain file"
    assert len(refused(main, message, before, path, after)) < 600


@pytest.mark.parametrize(
    ("name", "reader"),
    [("result.json", "compare"), ("x.log", "compare"), ("x.jsonl", "compare"),
     ("x.json", "baseline"), ("result.json", "gate"), ("result.json", "calibrate"),
     ("config.json", "config"), ("run.yaml", "from"), ("result.json", "from"), ("e.yaml", "sweep"),
     ("x.json", "trace")],
)  # fmt: skip
def test_a_file_of_8_gib_of_nothing_is_not_read_whole(name, reader, tmp_path, refused):
    path, (main, before, after) = tmp_path / name, READERS[reader]
    with path.open("wb") as f:
        f.truncate(8 * 2**30)
    refused(main, "is larger than" if reader != "trace" else "", before, path, after)


def test_numbers_that_no_float_holds(tmp_path, refused):
    tiny = json.loads((ROOT / "configs/llama-tiny.json").read_text())
    for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"):
        for value in (10**400, 10**300):
            (tmp_path / "config.json").write_text(json.dumps(tiny | {key: value}))
            refused(estimate.main, f"{tmp_path}/config.json: {key}", tmp_path, "--gpu h100")
