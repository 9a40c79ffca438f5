"""CONTRIBUTING.md's recipes in a copy of the tree: a family, a flag and a metric."""

import json
import os
import re
import shutil
import subprocess

import pytest

from tests.helpers import LLAMA, ROOT, python, result_of, words


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the code."""
    top = tmp_path_factory.mktemp("copy of the tree")
    for name in ("llm_train_bench", "model", "configs", "docs", "tests"):
        unneeded = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, top / name, symlinks=True, ignore=unneeded)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, top)
    return top


TRAIN = words("train.py new.json --device cpu --amp off --bsz 2 --seq-len 16 --warmup-steps 1")
FLAGS, METRICS = "llm_train_bench/settings/flags.py", "llm_train_bench/results/metrics.py"
# For a family, a flag and a metric: the file, the place, and the text to insert before it.
INSERTIONS = [
    ("model/families.json", '    "mistral": {',
     re.search(r"```json\n(.*?)   ```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
     .replace("\n   ", "\n")[3:].rstrip(" ")),
    (FLAGS, "    grad_clip: float = flag(",
     "    lr_power: float = flag(1.0, LEARNT, above=0, at_most=2)\n"),
    (FLAGS, "    grad_clip: Largest", "    lr_power: A new flag [no unit].\n"),
    (METRICS, "    steps_per_sec: float", "    tokens_per_minute: float | None = None\n"),
    (METRICS, "\ntokens/s per device |", "\ntokens a minute | {tokens_per_minute:,.0f}"),
    (METRICS, ' val_loss "\n', " tokens_per_minute"),
    ("llm_train_bench/results/figures.py", "    m.tokens_per_sec_per_gpu = m.tokens_per_sec /",
     "    m.tokens_per_minute = 60 * m.tokens_per_sec\n"),
]  # fmt: skip


def run(tree, *argv, code=0) -> subprocess.CompletedProcess:
    path = f"{tree}{os.pathsep}{os.environ['PYTHONPATH']}"
    return python([str(word) for word in argv], code=code, cwd=tree, PYTHONPATH=path)


def test_add_a_family_a_flag_and_a_metric(tree):
    """One run of a model of a new family, with a new flag, in whose result a new metric is."""
    for path, place, inserted in INSERTIONS:
        text = (tree / path).read_text(encoding="utf-8")
        assert text.count(place) == 1, place
        (tree / path).write_text(text.replace(place, inserted + place), encoding="utf-8")
    for path in ("new.json", "tests/configs/arcee.json"):
        (tree / path).write_text(json.dumps(LLAMA | dict(model_type="arcee")))
    run(tree, *words("-m pytest -q -p no:cacheprovider tests/test_parity.py -k arcee"))
    argv = [*TRAIN, "--n-steps", 3]
    out = run(tree, *argv, "--lr-power", 0.5, "--export", "--run-name", "new").stdout
    result = result_of(tree / "runs/new")
    rate = result["metrics"]["tokens_per_sec"]
    assert result["metrics"]["tokens_per_minute"] == pytest.approx(60 * rate)
    assert f"{60 * rate:,.0f}" in next(x for x in out.splitlines() if "tokens a minute" in x)
    assert result["args"]["lr_power"] == 0.5 and result["model"]["shape"]["gated_mlp"] is False
    exported = json.loads((tree / "runs/new/export/config.json").read_text())
    assert exported["architectures"] == ["ArceeForCausalLM"]
    # Help and bounds follow by themselves.
    assert "--lr-power X" in run(tree, "train.py", "--help", "all").stdout
    refused = run(tree, *argv, "--lr-power", 3, code=2).stderr
    assert refused == "train.py: --lr-power 3.0: must be at most 2\n"
