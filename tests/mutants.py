"""Random small changes of the program: one of the tests that run a changed line must fail.

    make mutants COUNT=60 SEED=1

First the suite runs under coverage, each test a context; the data stays in .mutants/ for further seeds.
Then SEED draws COUNT operators and constants of the package and model/. Each is changed alone in a clone,
and its line says which test detects it. Unchanged are texts, types of local
variables, which are never evaluated, and `strict` and `frozen`: a right program does the same without.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple

import coverage

from tests.helpers import ROOT

STORE = ROOT / ".mutants"
DATA, TIMES, CONFIG = STORE / "coverage", STORE / "seconds.json", STORE / "coveragerc"
CHOSEN = "MUTANTS_CHOSEN"  # environment variable: a file of the tests to run
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
SUITE = ["-m", "pytest", "-m", "not gpu", "-n", "2", "--dist", "loadfile", "-p", "tests.mutants"]
SOME = [*"-m pytest -x -q -p tests.mutants -m".split(), "not gpu"]
# Comparisons are negated; a boundary that moves (< to <=) is often the same program.
SWAPS = "==:!=,<:>=,>:<=,is:is not,in:not in,and:or,+:-,*:/,&:|,<<:>>".split(",")
OPERATORS = dict(swap.split(":") for swap in SWAPS)
OPERATORS |= {b: a for a, b in OPERATORS.items()} | {"//": "*", "%": "*", "**": "*"}


class Change(NamedTuple):
    """A replacement in a file's bytes."""

    begin: int
    end: int
    old: str
    new: str


_running = [""]


def _attribute() -> None:
    """What this process runs from here on belongs to the test that runs."""
    if current := coverage.Coverage.current():
        current.switch_context(_running[0])


def pytest_configure():
    """As a plugin of pytest's: processes that are forked by a test belong to it."""
    os.register_at_fork(after_in_child=_attribute)


def pytest_runtest_logstart(nodeid):
    """As a plugin of pytest's: a test begins."""
    _running[0] = nodeid
    _attribute()


def pytest_collection_modifyitems(items):
    """As a plugin of pytest's: only the chosen tests, in their order; a change may remove one."""
    if chosen := os.environ.get(CHOSEN):
        order = {name: i for i, name in enumerate(Path(chosen).read_text().splitlines())}
        kept = [item for item in items if item.nodeid in order]
        items[:] = sorted(kept, key=lambda item: order[item.nodeid])


def pytest_terminal_summary(terminalreporter):
    """As a plugin of pytest's: keep the seconds that each test took."""
    seconds = defaultdict(float)
    for report in chain.from_iterable(terminalreporter.stats.values()):
        seconds[getattr(report, "nodeid", None)] += getattr(report, "duration", 0)
    if "COVERAGE_PROCESS_START" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        TIMES.write_text(json.dumps(seconds))


def run_suite() -> None:
    """Run all tests under coverage; which test ran which line goes to DATA."""
    shutil.rmtree(STORE, ignore_errors=True)
    STORE.mkdir()
    CONFIG.write_text(SETTINGS)
    environment = os.environ | {"COVERAGE_PROCESS_START": str(CONFIG)}
    if subprocess.run([sys.executable, *SUITE], cwd=ROOT, env=environment).returncode:
        TIMES.unlink(missing_ok=True)
        raise SystemExit("mutants: the tests must pass before the program is changed")
    combined = coverage.Coverage(config_file=str(CONFIG))
    combined.combine([str(STORE)])
    combined.save()


def changes(path: Path) -> list[Change]:
    """Every change of one operator or constant of a file, and every removal of a call."""
    encoded = path.read_bytes()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.AST, right: ast.AST) -> list[Change]:
        begin, end = span(left)[1], span(right)[0]
        text = encoded[begin:end].decode()
        operator = " ".join(text.replace("(", " ").replace(")", " ").split())
        if operator not in OPERATORS or text.count(operator) != 1:
            return []
        begin += text.index(operator)
        return [Change(begin, begin + len(operator), operator, OPERATORS[operator])]

    sites, tree = [], ast.parse(encoded)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    kept = [getattr(n, "annotation", None) for f in functions for b in f.body for n in ast.walk(b)]
    kept += [n for n in ast.walk(tree) if getattr(n, "arg", None) in ("strict", "frozen")]
    unchanged = {node for top in kept if top for node in ast.walk(top)}
    for node in ast.walk(tree):
        operands = []
        if node in unchanged:
            continue
        if isinstance(node, ast.BinOp):
            operands = [node.left, node.right]
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.BoolOp):
            operands = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin = span(node)[0]
            sites.append(Change(begin, begin + len("not "), "not ", ""))
        elif isinstance(node, ast.Constant) and isinstance(value := node.value, bool | int | float):
            # One more than a limit of many is often the same program too.
            new = value + 1 if isinstance(value, int) and value < 10 else 2 * value + (not value)
            new = not value if isinstance(value, bool) else new
            sites.append(Change(*span(node), encoded[slice(*span(node))].decode(), repr(new)))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            statement = encoded[slice(*span(node))].decode().splitlines()[0]
            sites.append(Change(*span(node), statement, "..."))
        for left, right in pairwise(operands):
            sites += between(left, right)
    return sorted(set(sites))


def tests_of(data: coverage.CoverageData, path: Path, line: int, seconds: dict) -> list[str]:
    """Tests that run a line, the quickest first.

    Those of its whole file if the line runs at import, or only in processes that are killed.
    """
    lines = data.contexts_by_lineno(str(path))
    functions = [
        n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, ast.FunctionDef)
    ]
    inside = any(f.body[0].lineno <= line <= (f.end_lineno or 0) for f in functions)
    contexts = (inside and lines.get(line)) or chain.from_iterable(lines.values())
    names = {re.sub(r" \((setup|call|teardown)\)$", "", n.split("|", 1)[-1]) for n in contexts}
    return by_cost(names & set(seconds), seconds)


def by_cost(tests: Iterable[str], seconds: dict[str, float]) -> list[str]:
    """Tests by their time; those of a file with a test of over 20 s, a shared set-up, come later."""
    slow = {test.split("::")[0] for test, time in seconds.items() if time > 20}
    return sorted(tests, key=lambda test: seconds[test] + 0.5 * (test.split("::")[0] in slow))


def outcome(path: Path, change: Change, tests: list[str], seconds: dict, limit: float) -> str:
    """What becomes of the changed tree: first in tests that run the line, then in others of their files.

    A module's fixture counts for the first test that asked for it, and what runs at import for the first
    that imported it, hence the files, and those that import the changed one. Either takes `limit`
    seconds at most by what its tests took before; one that takes six times as long hangs. A test that
    fails detects the change only if it passes without.
    """
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    files = {test.split("::")[0] for test in seconds if "::" in test}
    files = {f for f in files if module in (ROOT / f).read_text()}
    files |= {test.split("::")[0] for test in tests}
    others = by_cost((t for t in seconds if t.split("::")[0] in files), seconds)
    with tempfile.TemporaryDirectory(prefix="mutant-") as top:
        tree, names = Path(top) / "tree", Path(top) / "chosen"
        subprocess.run(["git", "clone", "-qs", ROOT, tree], check=True, capture_output=True)
        changed = tree / path.relative_to(ROOT)
        source = changed.read_bytes()
        changed.write_bytes(source[: change.begin] + change.new.encode() + source[change.end :])
        for stage in (tests, [t for t in others if t not in tests]):
            ends = list(accumulate(seconds[test] for test in stage))
            chosen = [test for test, end in zip(stage, ends, strict=True) if end <= limit]
            names.write_text("\n".join(chosen))
            argv = ["env", f"{CHOSEN}={names}", sys.executable, *SOME]
            argv += sorted({test.split("::")[0] for test in chosen}) or [__file__]  # not every file
            try:
                end = subprocess.run(
                    argv, cwd=tree, capture_output=True, text=True, timeout=60 + 6 * limit
                )
            except subprocess.TimeoutExpired:
                return "hung"
            if end.returncode in (0, 5):  # 5: no such test, perhaps since the change
                continue
            told = [t for t in chosen if f"FAILED {t}" in end.stdout or f"ERROR {t}" in end.stdout]
            if not told:  # the changed file cannot be imported
                return "caught"
            names.write_text(test := max(told, key=len))
            changed.write_bytes(source)  # or the test may fail now and then whatever the change
            alone = subprocess.run(argv, cwd=tree, capture_output=True)
            return f"UNCLEAR {test} fails without" if alone.returncode else f"caught by {test}"
    return "SURVIVED"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600, help="of the tests of one change [s]")
    parser.add_argument("--under", default="llm_train_ model/", help="beginnings of files' names")
    parser.add_argument("--removals", action="store_true", help="also remove single calls")
    args = parser.parse_args()
    if subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT):
        raise SystemExit("mutants: commit first; the changes are made in clones of the repository")
    if not TIMES.exists():
        run_suite()
    data = coverage.CoverageData(str(DATA))
    data.read()
    seconds = json.loads(TIMES.read_text())
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    under = tuple(args.under.split())
    program = [ROOT / n for n in tracked if n.endswith(".py") and n.startswith(under)]
    sites = [(path, change) for path in program for change in changes(path)]
    sites = [site for site in sites if args.removals or site[1].new != "..."]
    drawn = random.Random(args.seed).sample(sites, args.count)

    def judge(site: tuple[Path, Change]) -> bool:
        path, change = site
        before = path.read_bytes()[: change.begin].split(b"\n")
        line, column = len(before), len(before[-1]) + 1
        tests = tests_of(data, path, line, seconds)
        end = outcome(path, change, tests, seconds, args.limit)
        text = f"{change.old} -> {change.new or 'nothing'} ({len(tests)} tests)"
        state, _, why = end.partition(" ")
        print(f"{state} {path.relative_to(ROOT)}:{line}:{column}: {text} {why}", flush=True)
        return state in ("caught", "hung")

    with ThreadPoolExecutor(2) as pool:
        survivors = [*pool.map(judge, drawn)].count(False)
    print(f"{survivors} of {len(drawn)} changes survived, of {len(sites)} possible ones")
    return 0


if __name__ == "__main__":
    sys.exit(main())
