"""Random small changes of the program: one of the tests that run a changed line must fail.

    make mutants COUNT=60 SEED=1

First the suite runs under coverage, each test a context; the data stays in .mutants/ for further seeds.
Then SEED draws COUNT operators and constants of the package and model/. Each is changed alone in a clone,
and changes that no test notices are listed. Texts are not changed.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coverage

from tests.helpers import ROOT

STORE = ROOT / ".mutants"
DATA, TIMES, CONFIG = STORE / "coverage", STORE / "seconds.json", STORE / "coveragerc"
# Ranks are forked; other processes are told the test that starts them by pytest's own variable.
SETTINGS = f"""[run]
data_file = {DATA}
source = llm_train_bench
    model
parallel = true
patch = fork
    _exit
context = ${{PYTEST_CURRENT_TEST-}}
concurrency = thread
    multiprocessing
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""
# Comparisons are negated; a boundary that moves (< to <=) is often the same program.
SWAPPED = [("==", "!="), ("<", ">="), (">", "<="), ("is", "is not"), ("in", "not in"), ("and", "or"),
           ("+", "-"), ("*", "/"), ("&", "|"), ("<<", ">>")]  # fmt: skip
OPERATORS = dict(SWAPPED) | {b: a for a, b in SWAPPED} | {"//": "*", "%": "*", "**": "*"}


def pytest_runtest_logstart(nodeid):
    """As a plugin of pytest's: what runs from here on belongs to this test."""
    if current := coverage.Coverage.current():
        current.switch_context(nodeid)


def pytest_terminal_summary(terminalreporter):
    """As a plugin of pytest's: keep the seconds that each test took."""
    seconds = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid] += report.duration
    if "COVERAGE_PROCESS_START" in os.environ:
        TIMES.write_text(json.dumps(seconds))


def run_suite() -> None:
    """Run all tests under coverage; which test ran which line goes to DATA."""
    shutil.rmtree(STORE, ignore_errors=True)
    STORE.mkdir()
    CONFIG.write_text(SETTINGS)
    argv = [
        "-m",
        "pytest",
        "-m",
        "not gpu",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-p",
        "tests.mutants",
    ]
    environment = os.environ | {"COVERAGE_PROCESS_START": str(CONFIG)}
    if subprocess.run([sys.executable, *argv], cwd=ROOT, env=environment).returncode:
        raise SystemExit("mutants: the tests must pass before the program is changed")
    combined = coverage.Coverage(config_file=str(CONFIG))
    combined.combine([str(STORE)])
    combined.save()


def changes(path: Path) -> list[tuple[int, int, str, str]]:
    """Start and end [characters], the text there, and its replacement, of each change of a file."""
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        return (starts[node.lineno - 1] + node.col_offset,
                starts[node.end_lineno - 1] + node.end_col_offset)  # fmt: skip

    def between(left: ast.AST, right: ast.AST) -> list[tuple[int, int, str, str]]:
        begin, end = span(left)[1], span(right)[0]
        text = encoded[begin:end].decode()
        operator = " ".join(text.replace("(", " ").replace(")", " ").split())
        if operator not in OPERATORS or text.count(operator) != 1:
            return []
        begin += text.index(operator)
        return [(begin, begin + len(operator), operator, OPERATORS[operator])]

    sites = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            sites += between(node.left, node.right)
        elif isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                sites += between(left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                sites += between(left, right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin = span(node)[0]
            sites.append((begin, begin + len("not "), "not ", ""))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = node.value + 1 if type(node.value) is int else 2 * node.value + (not node.value)
            if isinstance(node.value, bool):
                value = not node.value
            sites.append((*span(node), encoded[slice(*span(node))].decode(), repr(value)))
    return sorted(set(sites))


def tests_of(data: coverage.CoverageData, path: Path, line: int) -> list[str]:
    """Tests that run a line; of one that runs at import, the tests that run others of its file."""
    seconds = json.loads(TIMES.read_text())
    lines = data.contexts_by_lineno(str(path))
    names = {name.split("|")[-1].split(" (")[0] for name in lines.get(line, ())} & set(seconds)
    if not _in_function(path, line):
        names = {name.split("|")[-1].split(" (")[0] for of in lines.values() for name in of}
    return sorted(names & set(seconds), key=seconds.__getitem__)


def _in_function(path: Path, line: int) -> bool:
    functions = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef))
    return any(f.body[0].lineno <= line <= f.end_lineno for f in functions)


def survives(path: Path, change: tuple[int, int, str, str], tests: list[str], limit: float) -> bool:
    """Whether tests pass on the changed tree; first those that run the line, then all of their files.

    A module's fixture counts for the first test that asked for it, hence the files.
    """
    begin, end, _, new = change
    with tempfile.TemporaryDirectory(prefix="mutant-") as top:
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), top], check=True)
        changed = Path(top) / path.relative_to(ROOT)
        source = changed.read_bytes()
        changed.write_bytes(source[:begin] + new.encode() + source[end:])
        for chosen in (tests[:200], list(dict.fromkeys(t.split("::")[0] for t in tests))[:8]):
            argv = ["-m", "pytest", "-x", "-q", "-m", "not gpu", *chosen]
            try:
                done = subprocess.run(
                    [sys.executable, *argv], cwd=top, capture_output=True, timeout=limit
                )
            except subprocess.TimeoutExpired:
                return False
            if done.returncode:
                return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600, help="of the tests of one change [s]")
    args = parser.parse_args()
    if subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT):
        raise SystemExit("mutants: commit first; the changes are made in clones of the repository")
    if not TIMES.exists():
        run_suite()
    data = coverage.CoverageData(str(DATA))
    data.read()
    listed = subprocess.check_output(
        ["git", "ls-files", "llm_train_bench", "model"], cwd=ROOT, text=True
    )
    paths = [ROOT / name for name in listed.split() if name.endswith(".py")]
    sites = [(path, change) for path in paths for change in changes(path)]
    drawn = random.Random(args.seed).sample(sites, args.count)

    def judge(site: tuple[Path, tuple[int, int, str, str]]) -> bool:
        path, change = site
        line = path.read_bytes()[: change[0]].count(b"\n") + 1
        tests = tests_of(data, path, line)
        alive = survives(path, change, tests, args.limit) if tests else True
        where = f"{path.relative_to(ROOT)}:{line}: {change[2]} -> {change[3] or 'nothing'}"
        print(f"{'SURVIVED' if alive else 'caught'} {where} ({len(tests)} tests)", flush=True)
        return alive

    with ThreadPoolExecutor(2) as pool:
        survivors = sum(pool.map(judge, drawn))
    print(f"{survivors} of {len(drawn)} changes survived, of {len(sites)} possible ones")
    return 0


if __name__ == "__main__":
    sys.exit(main())
