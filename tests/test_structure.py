"""Who may import whom, what starts without torch, and that every module is documented."""

import ast
import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT

MODULES = sorted([*ROOT.glob("*.py"), *ROOT.glob("bench/**/*.py"), *ROOT.glob("model/*.py")])


def imports(path) -> set[str]:
    """Modules a file imports, at any depth of nesting."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(ROOT.glob("model/*.py")), ids=lambda p: p.stem)
def test_model_knows_nothing_of_the_machinery(path):
    names = imports(path)
    assert not {n for n in names if n.split(".")[0] in ("bench", "os", "train")}
    assert not {n for n in names if n.startswith("torch.distributed")}
    assert "environ" not in path.read_text()


def test_only_entrypoints_import_the_loop():
    users = {p.stem for p in MODULES if "bench.run.loop" in imports(p)}
    assert users <= {"train", "train_ddp", "train_fsdp"} and users


@pytest.mark.parametrize(
    "name",
    [
        "model.config",
        "model.json_keys",
        "bench.settings.flags",
        "bench.settings.checks",
        "bench.settings.command_line",
        "bench.settings.combinations",
        "bench.formulas.flops",
        "bench.formulas.hardware",
        "bench.results.schema",
        "bench.formulas.time_statistics",
        "bench.settings.plan",
        "bench.apply.tokens",
        "bench.results.console",
        "prepare_data",
        "bench.trace.read_trace",
        "bench.trace.kernel_names",
        "bench.trace.breakdown",
        "trace_report",
        "bench.formulas.memory_model",
        "bench.formulas.speed_model",
        "estimate",
        "sweep",
        "compare",
        "doctor",
        "bench.sweep.experiment",
        "bench.sweep.grid",
        "bench.settings.hyperparameters",
        "bench.sweep.cell_runs",
        "bench.compare.records",
        "bench.compare.read_logs",
        "bench.compare.read_results",
        "bench.compare.ratios",
        "bench.compare.gate",
        "bench.compare.plots",
        "bench.compare.log_formats",
        "bench.sweep.ranking",
        "bench.sweep.auto_batch",
        "bench.settings.tool_main",
    ],
)
def test_what_only_reads_files_starts_without_torch(name):
    code = f"import {name}, sys, json; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert json.loads(done.stdout) is False


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_public_things_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name}"
