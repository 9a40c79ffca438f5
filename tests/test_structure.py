"""Who may import whom, what starts without torch, and that all is documented."""

import ast
import json
import os
import re

import pytest

from tests.helpers import ROOT, python

ROOMS = ("run", "check", "estimate", "parallel", "measure", "sweep", "compare", "apply", "results",
         "trace", "settings", "formulas", "base")  # fmt: skip
PACKAGE = ROOT / "llm_train_bench"
BENCH = sorted(p for p in PACKAGE.glob("**/*.py") if p.parent.name != "model")
ENTRYPOINTS = ("train", "train_ddp", "train_fsdp", "train_pp")


def name_of(path) -> str:
    """A module as it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path) -> set[str]:
    """Modules a file imports, at any depth of nesting."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(ROOT.glob("model/*.py")), ids=lambda p: p.stem)
def test_model_knows_nothing_of_the_machinery(path):
    names = imports(path)
    ours = {n for n in names if n.split(".")[0] in ("llm_train_bench", "model", *ENTRYPOINTS)}
    assert "os" not in names and all(n.startswith("llm_train_bench.model") for n in ours)
    assert not {n for n in names if n.startswith("torch.distributed")}
    assert "environ" not in path.read_text()


@pytest.mark.parametrize("path", BENCH, ids=name_of)
def test_imports_run_downward(path):
    """A room imports itself and the rooms below it."""
    if path.parent == PACKAGE:  # the public names, and the console command
        return
    floor = ROOMS.index(path.relative_to(PACKAGE).parts[0])
    for imported in imports(path):
        words = imported.split(".")
        if words[0] == "llm_train_bench" and len(words) > 1 and words[1] in ROOMS:
            assert ROOMS.index(words[1]) >= floor, f"{name_of(path)} imports {imported}"


def test_formulas_take_numbers_alone():
    """No torch, no files, no environment, no flags."""
    for path in ROOT.glob("llm_train_bench/formulas/*.py"):
        assert not {n.split(".")[0] for n in imports(path)} & {"torch", "os", "pathlib"}


WITHOUT_TORCH = [
    *(name_of(p) for room in ("base", "settings", "formulas", "results", "trace", "compare", "sweep")
      for p in sorted(PACKAGE.glob(f"{room}/*.py"))),
    *(f"llm_train_bench.{name}" for name in
      ("base.token_files", "model.config", "model.json_keys")),
    *(f"llm_train_bench.check.{name}" for name in
      ("findings", "machine_check", "references", "verify", "workloads")),
    "check", "estimate", "sweep", "compare", "trace_report", "doctor", "prepare_data",
]  # fmt: skip


def test_what_only_reads_files_starts_without_torch():
    code = (
        f"import importlib, json, sys\nfound = []\nfor name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n    if 'torch' in sys.modules:\n"
        "        found.append(name)\n        break\nprint(json.dumps(found))"
    )
    assert json.loads(python(["-c", code]).stdout) == []


def test_contributing_lists_the_modules_that_there_are():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `llm_train_bench/(\w+)/`: (.*(?:\n  .*)*)$", page, flags=re.M)
    assert [room for room, _ in listed] == list(ROOMS)
    for room, text in listed:
        folder = PACKAGE / room
        modules = {p.stem for p in folder.rglob("*.py") if p.stem != "__init__"}
        assert set(re.findall(r"`(\w+)`", text)) == modules, room


def test_help_needs_no_torch_and_a_model_no_compiler():
    """Each would take seconds of every start."""
    done = python("-X importtime train_fsdp.py --help")
    assert "--sac-freq" in done.stdout and not re.search(r"\btorch\b", done.stderr)
    code = """
import sys, torch
from llm_train_bench.model.config import load_config
from llm_train_bench.model.transformer import Transformer
with torch.device("meta"):
    Transformer(load_config("configs/moe-tiny.json"), 32)
assert "torch._dynamo" not in sys.modules
"""
    python(["-c", code])


def test_a_model_package_of_the_user_is_not_taken_for_ours(tmp_path):
    (tmp_path / "model.py").write_text("raise SystemExit('the model of the user')")
    code = "import llm_train_bench.model.transformer, llm_train_bench.run.loop, train_fsdp"
    python(["-c", code], cwd=tmp_path, PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
