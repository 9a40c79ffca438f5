"""Did it get slower? Results against stored baselines, judged on intervals. Needs no torch.

A baseline belongs to hardware, model, settings and number of ranks; configs/baselines.json keeps it
and its origin.
"""

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bench.compare.find_results import discover
from bench.compare.ratios import unlike_limits
from bench.errors import UsageError, printable
from bench.files import write_whole
from bench.formulas.time_statistics import bootstrap_mean
from bench.results.result_files import read_result, software
from bench.results.schema import Result
from bench.settings.flags import LENGTH, OUTPUT, Args, defaults, of_kind
from model.json_keys import plain_file

# Beyond this much faster, a run probably does less than it did.
PLAUSIBLE_GAIN = 0.25
# 2: keys without validation and --global-bsz.
BASELINES_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A setting against its baseline, on one line; `bad` fails the gate."""

    line: str
    bad: bool
    unknown: bool = False  # there was nothing to judge by
    new: bool = False  # no baseline
    missing: bool = False  # no result


def baseline_key(r: Result, version: int = BASELINES_VERSION) -> str:
    """Hardware, model and world size in words, and a hash of the shape and of all settings.

    A key of version 1 has validation and --global-bsz in it, on which speed does not depend.
    """
    passed_over = of_kind(OUTPUT, LENGTH)
    if version == 1:
        passed_over -= {"val_data", "val_batches", "global_bsz"}
    # A flag at its default is left out: a new flag must not make every baseline another's.
    default = defaults(Args)
    settings = {
        k: v
        for k, v in r.args.items()
        if k not in passed_over and (k not in default or v != default[k])
    }
    text = json.dumps([r.model.hash, r.entrypoint, settings], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{r.device.hardware} / {r.model.name} / {r.device.count} / {digest}"


def unfit(r: Result) -> str | None:
    """Why a result cannot be a baseline, nor be compared with one."""
    if r.unfit:
        return ", ".join(r.unfit)
    m = r.metrics
    if not (m.tokens_per_sec_per_gpu and m.step_time_ci95_low_s and m.step_time_ci95_high_s):
        return "too few or too unlike steps for a rate with an interval"
    times = 0, m.step_time_ci95_low_s, m.step_time_ci95_high_s, math.inf
    if not 0 < m.tokens_per_sec_per_gpu < math.inf or list(times) != sorted(set(times)):
        return "an impossible rate or interval: was the file edited?"
    return None


def entry_of(results: list[Result]) -> dict[str, Any]:
    """The baseline entry of a setting's runs: figures with their interval, and where they come from.

    The interval is over runs if there are three or more; otherwise it spans those of their steps.
    """
    r = results[0]
    m, e = r.metrics, r.environment
    rates = [each.metrics.tokens_per_sec_per_gpu for each in results]
    low = min(_rate(each, each.metrics.step_time_ci95_high_s) for each in results)
    high = max(_rate(each, each.metrics.step_time_ci95_low_s) for each in results)
    if len(results) >= 3:
        low, high = bootstrap_mean(rates)
    return {
        "tokens_per_sec_per_gpu": statistics.fmean(rates),
        "low": low,
        "high": high,
        "n_runs": len(results),
        "memory_gib": max((each.peak_memory[0] or 0.0) for each in results) or None,
        "n_steps": m.n_measured_steps,
        "power_limit_w": r.power_limit_w,
        "provenance": {
            "run": r.run_name,
            "command": r.command,
            "started_at": r.started_at,
            "git_sha": e.get("git_sha"),
            "git_dirty": e.get("git_dirty"),
            "device": r.device.name,
            "software": software(r),
        },
    }


def _rate(r: Result, step_s: float | None) -> float | None:
    """Tokens/s per device of a step time."""
    return r.batch.tokens_per_step / r.device.count / step_s if step_s else None


def judge(results: list[Result], baselines: dict[str, Any], tolerance: float) -> Verdict:
    """The runs of one setting together: slower, if even their interval's upper end is below the floor.

    The floor is what the entry's tolerance allows, or the given one.
    """
    fit = [r for r in results if not unfit(r)]
    name = printable_names(fit or results)
    if not fit:
        return Verdict(f"UNFIT, left out {name}: {unfit(results[0])}", False, unknown=True)
    r = fit[0]
    baseline = baselines.get(baseline_key(r)) or baselines.get(baseline_key(r, version=1))
    if baseline is None:
        line = f"NO BASELINE {name}: {baseline_key(r)}; --update-baselines adds one"
        return Verdict(line, False, unknown=True, new=True)
    now = entry_of(fit)
    limit, had = now["power_limit_w"], baseline.get("power_limit_w")
    if unlike_limits(limit, had):
        why = f"power limit {limit:.0f} W, the baseline's was {had:.0f} W"
        return Verdict(f"UNFIT, left out {name}: {why}", False, unknown=True)
    tolerance = baseline.get("tolerance", tolerance)
    rate, was = now["tokens_per_sec_per_gpu"], baseline["tokens_per_sec_per_gpu"]
    change = f"{rate:,.0f} tokens/s per GPU [{now['low']:,.0f}, {now['high']:,.0f}], was {was:,.0f}"
    change += f" ({rate / was - 1:+.1%})"
    left_out = [other for other in results if other not in fit]
    if left_out:
        change += f"; left out {', '.join(f'{o.run_name} ({unfit(o)})' for o in left_out)}"
    floor = (1 - tolerance) * was
    problems = []
    if now["high"] < floor:
        problems.append("SLOWER")
    memory, held = now["memory_gib"], baseline["memory_gib"]
    if memory and held and memory > (1 + tolerance) * held:
        problems.append("MORE MEMORY")
        change += f"; {memory:.2f} GiB, was {held:.2f} ({memory / held - 1:+.1%})"
    if problems:
        before = baseline.get("provenance", {}).get("software", {})
        after = now["provenance"]["software"]
        changed = [
            f"{key} {before.get(key, 'none')} -> {after.get(key, 'none')}"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ]
        since = f"; since then {', '.join(changed)}" if before and changed else ""
        return Verdict(f"{' and '.join(problems)} {name}: {change}{since}", True)
    if rate > (1 + PLAUSIBLE_GAIN) * was:
        why = "does it still do the same work? If so, --update-baselines"
        return Verdict(f"IMPLAUSIBLE GAIN {name}: {change}; {why}", False, unknown=True)
    doubt = ", not certain: its interval reaches the tolerance" if rate < floor else ""
    return Verdict(f"ok {name}: {change}{doubt}", False)


def printable_names(results: list[Result]) -> str:
    """The first run's name, and how many more there are."""
    more = f" and {len(results) - 1} more" if len(results) > 1 else ""
    return f"{results[0].run_name}{more}"


def unmeasured(results: list[Result], baselines: dict[str, Any]) -> list[Verdict]:
    """Baselines of the results' hardware and number of ranks that no result is of."""
    measured = {key for r in results for key in (baseline_key(r), baseline_key(r, version=1))}
    places = {(r.device.hardware, str(r.device.count)) for r in results}
    found = []
    for key in baselines:
        hardware, *_, count, _ = key.split(" / ") if key.count(" / ") >= 3 else ("", "", "")
        if (hardware, count) in places and key not in measured:
            found.append(Verdict(f"NOT MEASURED: {key}", False, unknown=True, missing=True))
    return found


def read_baselines(path: Path, must_exist: bool) -> dict[str, Any]:
    """The stored baselines by key."""
    try:
        content = json.loads(plain_file(path).read_text(encoding="utf-8"))
        if content.get("schema_version", 1) not in range(1, BASELINES_VERSION + 1):
            raise ValueError(
                f"schema_version {content['schema_version']}: newer than {BASELINES_VERSION}"
            )
        baselines = dict(content["baselines"])
        for key, entry in baselines.items():
            rate, memory = entry["tokens_per_sec_per_gpu"], entry.setdefault("memory_gib", None)
            if not (isinstance(rate, int | float) and 0 < rate < math.inf):
                raise ValueError(f"{key}: tokens_per_sec_per_gpu is {rate!r}")
            if memory is not None and not isinstance(memory, int | float):
                raise ValueError(f"{key}: memory_gib is {memory!r}")
            if not isinstance(entry.setdefault("provenance", {}), dict):
                raise ValueError(f"{key}: provenance is {entry['provenance']!r}")
            allowed = entry.get("tolerance", 0.0)
            if not (isinstance(allowed, int | float) and 0 <= allowed < 1):
                raise ValueError(f"{key}: tolerance is {allowed!r}; must be from 0 to below 1")
        return baselines
    except FileNotFoundError:
        if must_exist:
            raise UsageError(
                f"--baseline {path}: no such file; --update-baselines makes it"
            ) from None
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"--baseline {path}: is no file of baselines: {error}") from None


def write_baselines(path: Path, baselines: dict[str, Any]) -> None:
    """Write all of them, sorted."""
    about = "Written by compare.py --update-baselines; see docs/COMPARE.md."
    content = {
        "about": about,
        "schema_version": BASELINES_VERSION,
        "baselines": dict(sorted(baselines.items())),
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")


def gate(
    paths: Sequence[str], path: Path, text: str, update: bool, allowed: Collection[str] = ()
) -> int:
    """Judge results by the baselines in `path`, or `update` those; returns the exit code.

    1 if something got slower, 5 if something could not be judged: a result without a baseline, unless
    `new` is allowed; a baseline of this machine without a result, unless `missing` is.
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
        for key, runs in by_setting(results).items():
            fit = [r for r in runs if not unfit(r)]
            for r in runs:
                if why := unfit(r):
                    print(printable(f"UNFIT {r.run_name}: {why}; its baseline stays as it was"))
                    code = 5
            if fit:
                before = stored.get(key, {})
                kept = {"tolerance": before["tolerance"]} if "tolerance" in before else {}
                stored[key] = entry_of(fit) | kept
                rate = stored[key]["tokens_per_sec_per_gpu"]
                print(printable(f"baseline {key}: {rate:,.0f}"))
        write_baselines(path, stored)
        return code
    verdicts = [judge(runs, stored, tolerance) for runs in by_setting(results).values()]
    verdicts += unmeasured(results, stored)
    for verdict in verdicts:
        print(printable(verdict.line))
    if all(verdict.unknown for verdict in verdicts):
        print(f"NOTHING JUDGED: {path} has no baseline of any of these runs that are fit")
    if any(verdict.bad for verdict in verdicts):
        return 1
    unjudged = [
        v for v in verdicts
        if v.unknown and not (v.new and "new" in allowed) and not (v.missing and "missing" in allowed)
    ]  # fmt: skip
    return 5 if unjudged or all(v.unknown for v in verdicts) else 0


def by_setting(results: list[Result]) -> dict[str, list[Result]]:
    """The runs of each setting, by its baseline's key."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(baseline_key(result), []).append(result)
    return groups


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
            results.append(read_result(plain_file(file)))
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise UsageError(f"{file}: cannot be read as a result.json") from None
    if not results:
        raise UsageError(f"{', '.join(paths)}: no result.json in there")
    return results
