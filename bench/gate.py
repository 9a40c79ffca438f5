"""The gate: our results against stored baselines, one line each. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from bench.baselines import (
    baseline_key,
    entry_of,
    judge,
    read_baselines,
    unfit,
    write_baselines,
)
from bench.discover import discover
from bench.errors import UsageError
from bench.result_file import read_result
from bench.results import Result


def gate(paths: Sequence[str], path: Path, text: str, update: bool) -> int:
    """Results against the baselines in `path`, or (`update`) made them; returns the exit code.

    `text` is the tolerance as it was given: 5%, or 0.05.
    """
    try:
        tolerance = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < 1:
        raise UsageError(f"--tolerance {text}: must be from 0 to below 100%, for example 5%")
    stored = read_baselines(path, must_exist=not update)
    results = own_results(paths)
    if update:
        code = 0
        for result in one_each(results):
            if why := unfit(result):
                print(f"UNFIT {result.run_name}: {why}; its baseline stays as it was")
                code = 1
                continue
            stored[baseline_key(result)] = entry_of(result)
            print(f"baseline {baseline_key(result)}: {result.metrics.tokens_per_sec_per_gpu:,.0f}")
        write_baselines(path, stored)
        return code
    verdicts = [judge(result, stored, tolerance) for result in results]
    for verdict in verdicts:
        print(verdict.line)
    if all(verdict.unknown for verdict in verdicts):
        print(f"NOTHING JUDGED: {path} has no baseline of any of these runs; that is no pass")
        return 1
    return 1 if any(verdict.bad for verdict in verdicts) else 0


def one_each(results: list[Result]) -> list[Result]:
    """Of several runs of one setting (a sweep's repeats) the one with the median rate."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(baseline_key(result), []).append(result)
    kept = []
    for members in groups.values():
        fit = [m for m in members if not unfit(m)] or members
        fit.sort(key=lambda m: m.metrics.tokens_per_sec_per_gpu or 0.0)
        kept.append(fit[(len(fit) - 1) // 2])
    return kept


def own_results(paths: Sequence[str]) -> list[Result]:
    """Our result.json files in files and directories, checked."""
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        found = discover(path) if path.is_dir() else [path]
        files += [p for p in found if p.name == "result.json" or p == path]
    results = []
    for file in files:
        try:
            results.append(read_result(file))
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise UsageError(f"{file}: is no result.json of this version") from None
    if not results:
        raise UsageError(f"{', '.join(paths)}: no result.json in there")
    return results
