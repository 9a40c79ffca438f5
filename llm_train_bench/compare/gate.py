"""Did it get slower? Results against stored baselines: yes, no, or uncertain. Needs no torch.

For tests of your own: `assert_no_regression`, or pytest's fixture `no_regression` (pytest_plugin.py).

A baseline belongs to hardware, model, settings and number of ranks; configs/baselines.json keeps it
and its origin.
"""

import collections
import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.files import shown_command, shown_word, write_whole
from llm_train_bench.base.tables import markdown_cell, number
from llm_train_bench.compare.find_results import discover, not_taken
from llm_train_bench.compare.ratios import unlike_limits
from llm_train_bench.formulas.time_statistics import NORMAL, Mean, difference, mean_of, student_t
from llm_train_bench.model.json_keys import parse_json, plain_file
from llm_train_bench.results.result_files import read_result, settings_of, software
from llm_train_bench.results.schema import Result
from llm_train_bench.settings.flags import LENGTH, OUTPUT, Args, defaults, of_kind

# Beyond this much faster, a run probably does less than it did.
PLAUSIBLE_GAIN = 0.25
BASELINES_VERSION = 4

WORSE = ("SLOWER", "MORE MEMORY", "SLOWER and MORE MEMORY")
# One-sided confidence of each answer. benchmarks/gate.py shows the errors: a loss of 2 % beyond the
# tolerance passes in under 1 % of cases, and no loss is called one in under 1 %.
SLOWER_BY, WITHIN_BY = 0.93, 0.99
MOST_RUNS = 30
LARGEST_FIGURE = 1e30


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A setting against its baseline: `ok`, one of `WORSE`, `UNCERTAIN`, or why nothing was judged.

    `key` is the setting's in the baselines, `name` says it in words. `now` and `was` are entries as
    baselines have them (`entry_of`); None where there is none.
    """

    status: str
    name: str
    text: str = ""
    key: str = ""
    now: dict[str, Any] | None = None
    was: dict[str, Any] | None = None

    @property
    def line(self) -> str:
        """One line that says it."""
        return f"{self.status} {self.name}{': ' if self.text else ''}{self.text}"

    @property
    def judged(self) -> bool:
        """Whether there was something to judge by."""
        return self.status == "ok" or self.status in WORSE


class Regression(AssertionError):
    """Results got slower, take more memory, or could not be judged; says each setting's line."""


def baseline_key(r: Result) -> str:
    """Hardware, model and world size in words, and a hash of the shape and of all settings."""
    # A flag at its default is left out: a new flag must not make every baseline another's.
    default = defaults(Args) | {"bsz": None}
    settings = {
        k: v
        for k, v in r.args.items()
        if k not in of_kind(OUTPUT, LENGTH) and (k not in default or v != default[k])
    }
    around = settings_of(r)
    if r.device.type == "cpu":
        around["threads"] = str(r.environment.get("torch_threads"))
    text = json.dumps([r.model.hash, r.entrypoint, settings, around], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{r.device.hardware} / {r.model.name} / {r.device.count} / {digest}"


def unfit(r: Result) -> str | None:
    """Why a result cannot be a baseline, nor be compared with one."""
    if r.unfit:
        return ", ".join(r.unfit)
    m = r.metrics
    if not (m.tokens_per_sec_per_gpu and m.step_time_ci95_low_s and m.step_time_ci95_high_s):
        return "too few or too unlike steps for a rate with an interval"
    if r.drifts:
        return f"step time changed by {m.step_time_drift:+.1%} over the window: no steady state"
    if not r.step_times_s or min(r.step_times_s) <= 0:
        return "step times that no run has: was the file edited?"
    tokens = r.batch.tokens_per_step * len(r.step_times_s) / r.device.count
    if not 0.99 < m.tokens_per_sec_per_gpu * sum(r.step_times_s) / tokens < 1.01:
        return "a rate that its step times do not give: was the file edited?"
    times = 0, m.step_time_ci95_low_s, m.step_time_ci95_high_s, math.inf
    if not 0 < m.tokens_per_sec_per_gpu < math.inf or list(times) != sorted(set(times)):
        return "an impossible rate or interval: was the file edited?"
    return None


def entry_of(results: list[Result]) -> dict[str, Any]:
    """The baseline entry of a setting's runs: figures with their interval, and where they come from.

    The interval is over runs; of a single run it is that of its steps. `noise` is the standard
    deviation of runs as a fraction of their mean, known by `noise_degrees` of freedom.
    """
    r = results[0]
    m, e = r.metrics, r.environment
    rates = [each.metrics.tokens_per_sec_per_gpu or 0.0 for each in results]
    mean = mean_of(rates)
    low, high = _rate(r, m.step_time_ci95_high_s), _rate(r, m.step_time_ci95_low_s)
    if mean.degrees:
        wide = student_t(0.975, mean.degrees) * math.sqrt(mean.error)
        low, high = mean.value - wide, mean.value + wide
    return {
        "setting": setting_of(r),
        "tokens_per_sec_per_gpu": mean.value,
        "low": low,
        "high": high,
        "n_runs": mean.n,
        "noise": mean.std / mean.value if mean.degrees else None,
        "noise_degrees": mean.degrees,
        "samples_per_sec_per_gpu": mean.value / r.batch.seq_len,
        "memory_gib": max((each.peak_memory[0] or 0.0) for each in results) or None,
        "memory_mean_gib": max((each.mean_memory_gib or 0.0) for each in results) or None,
        "n_steps": m.n_measured_steps,
        "power_limit_w": r.power_limit_w,
        "provenance": {
            "run": r.run_name,
            "command": shown_command(r.command),
            "started_at": r.started_at,
            "git_sha": e.get("git_sha"),
            "git_dirty": e.get("git_dirty"),
            "device": r.device.name,
            "software": software(r),
        },
    }


def setting_of(r: Result) -> str:
    """A setting in words: model, script, and the flags that are not at their defaults."""
    passed_over, default = of_kind(OUTPUT, LENGTH), defaults(Args)
    words = [r.model.name, r.entrypoint, f"T {r.batch.seq_len}"]
    for name, value in r.args.items():
        known = name not in passed_over and name in default and name not in ("seq_len", "config")
        if known and value != default[name]:
            words.append(name if value is True else f"{name} {shown_word(str(value))}")
    return f"{r.device.hardware} x {r.device.count}: {', '.join(words)}"


def mean_in(entry: dict[str, Any]) -> Mean:
    """The mean rate of an entry's runs, with their noise."""
    rate, noise = entry["tokens_per_sec_per_gpu"], entry["noise"] or 0.0
    return Mean(rate, entry["n_runs"], noise * rate, entry["noise_degrees"])


def answer(now: Mean, was: Mean, tolerance: float) -> str:
    """`ok` if the loss is surely within the tolerance, `SLOWER` if surely beyond, else `UNCERTAIN`."""
    allowed = 1 - tolerance
    floor = Mean(allowed * was.value, was.n, allowed * was.std, was.degrees)
    found = difference(now, floor)
    if found is None:
        return "UNCERTAIN"
    margin, error, degrees = found
    if margin + student_t(SLOWER_BY, degrees) * error < 0:
        return "SLOWER"
    return "ok" if margin >= student_t(WITHIN_BY, degrees) * error else "UNCERTAIN"


def what_settles(now: Mean, was: Mean, tolerance: float) -> str:
    """The number of runs after which figures like these would give an answer, in words."""
    if not (now.degrees or was.degrees):
        return "one run against one tells no noise; make 3 runs, or a baseline of 3"
    for both in (False, True):
        for n in range(max(now.n, 2), MOST_RUNS + 1):
            std = now.std or was.std * now.value / was.value
            base = Mean(was.value, n, was.std or std, n - 1) if both and n > was.n else was
            if answer(Mean(now.value, n, std, n - 1), base, tolerance) != "UNCERTAIN":
                return f"{n} runs{' of it and of the baseline' if both else ''} would settle it"
    return f"it is so near the tolerance that {MOST_RUNS} runs would not settle it"


def _rate(r: Result, step_s: float | None) -> float | None:
    """Tokens/s per device of a step time."""
    return r.batch.tokens_per_step / r.device.count / step_s if step_s else None


def judge(results: list[Result], baselines: dict[str, Any], tolerance: float) -> Verdict:
    """The runs of one setting together against their baseline, by Welch's test on both sides.

    The entry's own tolerance overrides the given one.
    """
    fit = [r for r in results if not unfit(r)]
    name, key = setting_of(results[0]), baseline_key(results[0])
    if not fit:
        return Verdict("UNFIT, left out", name, f"{results[0].run_name}: {unfit(results[0])}", key)
    now = entry_of(fit)
    baseline = baselines.get(key)
    if baseline is None:
        why = f"{printable_names(fit)}; --update-baselines adds one"
        return Verdict("NO BASELINE", name, why, key, now)
    limit, had = now["power_limit_w"], baseline.get("power_limit_w")
    if unlike_limits(limit, had):
        why = f"{printable_names(fit)}: power limit {limit:.0f} W, the baseline's was {had:.0f} W"
        return Verdict("UNFIT, left out", name, why, key, now, baseline)
    tolerance = baseline.get("tolerance", tolerance)
    rate, was = now["tokens_per_sec_per_gpu"], baseline["tokens_per_sec_per_gpu"]
    change = f"{printable_names(fit)}: {rate:,.0f} tokens/s per GPU [{now['low']:,.0f}, "
    change += f"{now['high']:,.0f}], was {was:,.0f} ({rate / was - 1:+.1%})"
    change += f"; tolerance {tolerance:.3g}" if "tolerance" in baseline else ""
    seen = {remark for each in fit for remark in each.disturbances}
    change += f"; {', '.join(sorted(seen))} in the window" if seen else ""
    left_out = [other for other in results if other not in fit]
    if left_out:
        change += f"; left out {', '.join(f'{o.run_name} ({unfit(o)})' for o in left_out)}"
    means = _with_steps(mean_in(now), now), mean_in(baseline)
    told = answer(*means, tolerance)
    worse = ["SLOWER"] if told == "SLOWER" else []
    for kind in ("memory_gib", "memory_mean_gib"):
        memory, held = now[kind], baseline.get(kind)
        if memory and held and memory > (1 + tolerance) * held:
            worse += ["MORE MEMORY"] if "MORE MEMORY" not in worse else []
            change += f"; {'mean ' if 'mean' in kind else ''}{memory:.2f} GiB, was {held:.2f} "
            change += f"({memory / held - 1:+.1%})"
    if worse:
        before = baseline.get("provenance", {}).get("software", {})
        after = now["provenance"]["software"]
        changed = [
            f"{key} {before.get(key, 'none')} -> {after.get(key, 'none')}"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ]
        since = f"; since then {', '.join(changed)}" if before and changed else ""
        if told == "UNCERTAIN":
            since += f"; its speed is uncertain: {what_settles(*means, tolerance)}"
        return Verdict(" and ".join(worse), name, change + since, key, now, baseline)
    if rate > (1 + PLAUSIBLE_GAIN) * was:
        why = "does it still do the same work? If so, --update-baselines"
        return Verdict("IMPLAUSIBLE GAIN", name, f"{change}; {why}", key, now, baseline)
    if told == "UNCERTAIN":
        change += f"; {what_settles(*means, tolerance)}"
    elif left_out:  # who knows what they would have shown
        told = "UNCERTAIN"
    return Verdict(told, name, change, key, now, baseline)


def printable_names(results: list[Result]) -> str:
    """The first run's name, and how many more there are."""
    more = f" and {len(results) - 1} more" if len(results) > 1 else ""
    return f"{results[0].run_name}{more}"


def _with_steps(mean: Mean, entry: dict[str, Any]) -> Mean:
    """A single run is no surer than its own steps say."""
    if mean.n > 1:
        return mean
    return dataclasses.replace(mean, std=(entry["high"] - entry["low"]) / 2 / NORMAL)


def unmeasured(results: list[Result], baselines: dict[str, Any]) -> list[Verdict]:
    """Baselines of the results' hardware and number of ranks that no result is of."""
    measured = {baseline_key(r) for r in results}
    places = {(r.device.hardware, str(r.device.count)) for r in results}
    found = []
    for key in baselines:
        hardware, *_, count, _ = key.split(" / ") if key.count(" / ") >= 3 else ("", "", "")
        if (hardware, count) in places and key not in measured:
            found.append(
                Verdict("NOT MEASURED", baselines[key]["setting"], key=key, was=baselines[key])
            )
    return found


def read_baselines(path: Path, must_exist: bool) -> dict[str, Any]:
    """The stored baselines by key."""
    try:
        content = parse_json(plain_file(path).read_text(encoding="utf-8"))
        if (version := content.get("schema_version")) != BASELINES_VERSION:
            raise ValueError(f"schema_version is {version!r}, and only {BASELINES_VERSION} is read")
        baselines = dict(content["baselines"])
        for key, entry in baselines.items():
            rate = entry["tokens_per_sec_per_gpu"]
            if not _plain(rate) or not rate:
                raise ValueError(f"{key}: tokens_per_sec_per_gpu is {rate!r}")
            _check_noise(key, entry)
            for name in (
                "memory_gib",
                "memory_mean_gib",
                "samples_per_sec_per_gpu",
                "power_limit_w",
            ):
                if entry.get(name) is not None and not _plain(entry[name]):
                    raise ValueError(f"{key}: {name} is {entry[name]!r}")
            origin = entry.setdefault("provenance", {})
            if not isinstance(origin, dict) or not isinstance(origin.get("software", {}), dict):
                raise ValueError(f"{key}: provenance is {origin!r}")
            if not isinstance(entry["setting"], str):
                raise ValueError(f"{key}: setting is {entry['setting']!r}")
            allowed = entry.get("tolerance", 0.0)
            if not (_plain(allowed) and allowed < 1):
                raise ValueError(f"{key}: tolerance is {allowed!r}; must be from 0 to below 1")
        return baselines
    except FileNotFoundError:
        if must_exist:
            raise UsageError(
                f"--baseline {path}: no such file; --update-baselines makes it"
            ) from None
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"--baseline {path}: is no file of baselines: {error}") from None
    except (LookupError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"--baseline {path}: is no file of baselines; --update-baselines makes one"
        ) from None


def _plain(value: Any) -> bool:
    """Whether a value is a number that a run may have, and no text or truth value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < LARGEST_FIGURE


def _check_noise(key: str, entry: dict[str, Any]) -> None:
    """ValueError for runs, degrees of freedom or an interval that no runs can have."""
    for name, least in (("n_runs", 1), ("noise_degrees", 0)):
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ValueError(f"{key}: {name} is {value!r}")
    for name in ("noise", "low", "high"):
        value = entry[name]
        if not _plain(value) and not (name == "noise" and value is None):
            raise ValueError(f"{key}: {name} is {value!r}")


def write_baselines(path: Path, baselines: dict[str, Any]) -> None:
    """Write all of them, sorted."""
    about = "Written by compare.py --update-baselines; see docs/COMPARE.md."
    content = {
        "about": about,
        "schema_version": BASELINES_VERSION,
        "baselines": dict(sorted(baselines.items())),
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")


def tolerance_of(text: str) -> float:
    """A tolerance as it is written: 5%, or 0.05."""
    try:
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"--tolerance {text}: must be from 0 to below 100%, for example 5%")
    return value


def judge_all(
    paths: Sequence[str | Path], baseline: str | Path, tolerance: float = 0.05
) -> list[Verdict]:
    """Every setting of the results in `paths` against a file of baselines, and what was not measured.

    UsageError where a path or the file cannot be read.
    """
    stored = read_baselines(Path(baseline), must_exist=True)
    results = own_results([str(path) for path in paths])
    verdicts = [judge(runs, stored, tolerance) for runs in by_setting(results).values()]
    return verdicts + unmeasured(results, stored)


def gate_code(verdicts: Sequence[Verdict], allowed: Collection[str] = ()) -> int:
    """0; 1 if something got worse; 5 if nothing or not everything could be judged.

    `allowed` statuses, `NO BASELINE` or `NOT MEASURED`, do not count as such.
    """
    if any(v.status in WORSE for v in verdicts):
        return 1
    left = any(not v.judged and v.status not in allowed for v in verdicts)
    return 5 if left or not any(v.judged for v in verdicts) else 0


def assert_no_regression(
    *paths: str | Path,
    baseline: str | Path,
    tolerance: float = 0.05,
    allowed: Collection[str] = (),
) -> list[Verdict]:
    """For tests: `Regression` unless all results in `paths` are as fast as their baselines."""
    verdicts = judge_all(paths, baseline, tolerance)
    if gate_code(verdicts, allowed):
        raise Regression("\n" + "\n".join(printable(v.line) for v in verdicts))
    return verdicts


def gate(
    paths: Sequence[str],
    path: Path,
    text: str,
    update: bool,
    allowed: Collection[str] = (),
    directory: Path | None = None,
) -> int:
    """Judge results by the baselines in `path`, or `update` those; returns the exit code.

    `text` is the tolerance as given. The `directory` gets gate.md, a comment for a pull request, and
    benchmark.json, the figures for github-action-benchmark (customBiggerIsBetter).
    """
    tolerance = tolerance_of(text)
    if update:
        if directory:
            raise UsageError("--update-baselines judges nothing; leave out --output-dir")
        return update_baselines(paths, path)
    verdicts = judge_all(paths, path, tolerance)
    code = gate_code(verdicts, allowed)
    if directory:  # before the lines: nobody may read those to their end
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "gate.md", comment(verdicts, code))
        points = json.dumps(benchmark_points(verdicts), indent=1)
        write_whole(directory / "benchmark.json", points + "\n")
    for verdict in verdicts:
        print(printable(verdict.line))
    if not any(verdict.judged for verdict in verdicts):
        print(f"NOTHING JUDGED: {path} has no certain answer on any of these runs")
    return code


def update_baselines(paths: Sequence[str], path: Path) -> int:
    """Make the results the baselines; returns 5 if one is unfit and left as it was, otherwise 0."""
    stored, code, lines = read_baselines(path, must_exist=False), 0, []
    for key, runs in by_setting(own_results(paths)).items():
        fit = [r for r in runs if not unfit(r)]
        for r in runs:
            if why := unfit(r):
                lines.append(f"UNFIT {r.run_name}: {why}; left out of the baselines")
                code = 5
        if fit:
            before, entry = stored.get(key, {}), entry_of(fit)
            kept = {"tolerance": before["tolerance"]} if "tolerance" in before else {}
            if not entry["noise_degrees"] and before.get("noise"):
                kept |= {name: before[name] for name in ("noise", "noise_degrees")}
            stored[key] = entry | kept
            lines.append(
                f"baseline {entry['setting']}: {entry['tokens_per_sec_per_gpu']:,.0f} tokens/s per GPU, "
                f"{entry['n_runs']} run{'s' * (entry['n_runs'] > 1)}"
            )
    write_baselines(path, stored)
    for line in lines:
        print(printable(line))
    return code


def comment(verdicts: Sequence[Verdict], code: int) -> str:
    """The verdicts as Markdown for a pull request: what failed first."""
    told = {0: "no regression", 1: "something got worse", 5: "not everything could be judged"}
    columns = "setting", "verdict", "tokens/s per GPU", "samples/s", "peak GiB", "mean GiB"
    lines = [
        f"### Training speed: {told[code]}",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * 6 + "|",
    ]
    keys = "tokens_per_sec_per_gpu", "samples_per_sec_per_gpu", "memory_gib", "memory_mean_gib"
    for v in sorted(verdicts, key=lambda v: (v.status == "ok", v.status not in WORSE)):
        cells = [markdown_cell(printable(v.name)), v.status.lower()]
        for key in keys:
            now, was = ((entry or {}).get(key) for entry in (v.now, v.was))
            digits = ",.0f" if key == keys[0] else ",.2f"
            change = f" ({now / was - 1:+.1%})" if now and was else ""
            cells.append(number(now, digits) + change)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {markdown_cell(printable(v.line))}" for v in verdicts if v.status != "ok")]
    return "\n".join(lines).rstrip() + "\n"


def benchmark_points(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """The figures in github-action-benchmark's form `customBiggerIsBetter`: one series a setting."""
    shared = collections.Counter(v.name for v in verdicts)
    names = {id(v): v.name if shared[v.name] == 1 else f"{v.name} ({v.key[-6:]})" for v in verdicts}
    return [
        {"name": f"{names[id(v)]}: {what}", "unit": unit, "value": v.now[key]}
        | ({"range": f"{v.now['low']:.1f} to {v.now['high']:.1f}"} if key.startswith("tok") else {})
        | {"extra": v.line}
        for v in verdicts
        if v.now
        for key, what, unit in (
            ("tokens_per_sec_per_gpu", "speed", "tokens/s per GPU"),
            ("samples_per_sec_per_gpu", "samples", "samples/s per GPU"),
        )
    ]


def by_setting(results: list[Result]) -> dict[str, list[Result]]:
    """The runs of each setting, by its baseline's key."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(baseline_key(result), []).append(result)
    return groups


def own_results(paths: Sequence[str]) -> list[Result]:
    """Our result.json files in files and directories, checked."""
    files: list[Path] = []
    taken: set[Path] = set()
    for name in paths:
        path = Path(name)
        found = not_taken(discover(path) if path.is_dir() else [path], taken)
        files += [p for p in found if p.suffix == ".json" or p == path]
    results = []
    for file in files:
        try:
            results.append(read_result(plain_file(file)))
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
        except ValueError:
            if file.name != "result.json" and str(file) not in paths:
                continue  # found in a directory: something else
            raise UsageError(f"{file}: cannot be read as a result.json") from None
    if not results:
        raise UsageError(f"{', '.join(paths)}: no result.json in there")
    return results
