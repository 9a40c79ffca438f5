"""Did it get slower? Results against stored baselines: yes, no, or uncertain. Needs no torch.

For tests of your own: `assert_no_regression`, or pytest's fixture `no_regression` (pytest_plugin.py).

A baseline belongs to hardware, model, settings and number of ranks; configs/baselines.json keeps it
and its origin.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.files import shown_command, shown_word, write_whole
from llm_train_bench.base.strict import first_problem
from llm_train_bench.base.tables import grouped, markdown_cell, markdown_text, number
from llm_train_bench.compare.find_results import discover, not_taken
from llm_train_bench.compare.ratios import unlike_limits
from llm_train_bench.formulas.time_statistics import NORMAL, Mean, difference, mean_of, student_t
from llm_train_bench.model.json_keys import parse_json, plain_file
from llm_train_bench.results.result_files import read_result, settings_of, software
from llm_train_bench.results.schema import Result
from llm_train_bench.settings.flags import usual_values

# Beyond this much faster, a run probably does less than it did.
PLAUSIBLE_GAIN = 0.25

WORSE = ("SLOWER", "MORE MEMORY", "SLOWER and MORE MEMORY")
# One-sided confidence of each answer. benchmarks/gate.py shows the errors: a loss of 2 % beyond the
# tolerance passes in under 1 % of cases, and no loss is called one in under 1 %.
SLOWER_BY, WITHIN_BY = 0.93, 0.99
MOST_RUNS = 30

Figure = Annotated[float, Field(strict=True, ge=0, lt=1e30)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class Provenance(BaseModel, extra="allow"):
    """Where a baseline comes from: its run, command, revision, device and software."""

    run: str | None = None
    command: list[str] = []
    started_at: str | None = None
    git_sha: str | None = None
    git_dirty: bool | None = None
    device: str | None = None
    software: dict[str, str] = {}


class Entry(BaseModel, extra="allow"):
    """The figures of a setting's runs with their interval, as the file of baselines has them.

    The interval is over runs; of a single run it is that of its steps. `noise` is the standard
    deviation of runs as a fraction of their mean, known by `noise_degrees` of freedom.
    """

    setting: str
    tokens_per_sec_per_gpu: Annotated[Figure, Field(gt=0)]
    low: Figure
    high: Figure
    n_runs: Annotated[Count, Field(ge=1)]
    noise: Figure | None
    noise_degrees: Count
    samples_per_sec_per_gpu: Figure | None = None
    memory_gib: Figure | None = None
    memory_mean_gib: Figure | None = None
    n_steps: int | None = None
    power_limit_w: Figure | None = None
    provenance: Provenance = Provenance()
    tolerance: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None

    @property
    def mean(self) -> Mean:
        """The mean rate of the runs, with their noise."""
        rate = self.tokens_per_sec_per_gpu
        return Mean(rate, self.n_runs, (self.noise or 0.0) * rate, self.noise_degrees)


class Baselines(BaseModel):
    """A file of baselines: each setting's entry by its key."""

    about: str = ""
    schema_version: Literal[4]
    baselines: dict[str, Entry]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A setting against its baseline: `ok`, one of `WORSE`, `UNCERTAIN`, or why nothing was judged.

    `key` is the setting's in the baselines, `name` says it in words. `now` and `was` are None where
    there are no figures.
    """

    status: str
    name: str
    text: str = ""
    key: str = ""
    now: Entry | None = None
    was: Entry | None = None

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
    default = usual_values() | {"bsz": None}
    settings = {
        k: v for k, v in r.settings.items() if not r.ours or k not in default or v != default[k]
    }
    around = settings_of(r)
    if r.device.type == "cpu":
        around["threads"] = str(r.environment.get("torch_threads"))
    if r.linear == "onednn":
        around["linear"] = r.linear
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
        return "impossible step times: was the file edited?"
    tokens = (r.batch.tokens_per_step or 0) * len(r.step_times_s) / r.device.count
    if not tokens or not 0.99 < m.tokens_per_sec_per_gpu * sum(r.step_times_s) / tokens < 1.01:
        return "the rate does not match the step times: was the file edited?"
    times = 0, m.step_time_ci95_low_s, m.step_time_ci95_high_s, math.inf
    if not 0 < m.tokens_per_sec_per_gpu < math.inf or list(times) != sorted(set(times)):
        return "an impossible rate or interval: was the file edited?"
    return None


def entry_of(results: list[Result]) -> Entry:
    """The baseline entry of a setting's runs, all of them fit."""
    r, devices = results[0], [d for each in results for d in each.devices]
    mean = mean_of([each.metrics.tokens_per_sec_per_gpu or 0.0 for each in results])
    if mean.degrees:
        wide = student_t(0.975, mean.degrees) * math.sqrt(mean.error)
        low, high = mean.value - wide, mean.value + wide
    else:
        tokens = (r.batch.tokens_per_step or 0) / r.device.count
        times = r.metrics.step_time_ci95_high_s, r.metrics.step_time_ci95_low_s
        low, high = (tokens / seconds if seconds else mean.value for seconds in times)
    origin: dict[str, Any] = {name: r.environment.get(name) for name in ("git_sha", "git_dirty")}
    origin |= {"run": r.run_name, "command": shown_command(r.command), "started_at": r.started_at}
    origin |= {"device": r.device.name, "software": software(r)}
    # Not validated: a spoilt result may hold any figure.
    return Entry.model_construct(
        setting=setting_of(r),
        tokens_per_sec_per_gpu=mean.value,
        low=max(low, 0.0),
        high=high,
        n_runs=mean.n,
        noise=mean.std / mean.value if mean.degrees else None,
        noise_degrees=mean.degrees,
        samples_per_sec_per_gpu=mean.value / r.batch.seq_len if r.batch.seq_len else None,
        memory_gib=max(filter(None, (each.peak_memory[0] for each in results)), default=None),
        memory_mean_gib=max(filter(None, (d.memory_mean_gib for d in devices)), default=None),
        n_steps=r.metrics.n_measured_steps,
        power_limit_w=r.power_limit_w,
        provenance=Provenance.model_construct(**origin),
    )


def setting_of(r: Result) -> str:
    """A setting in words: model, script, and the flags that are not at their defaults."""
    default = usual_values()
    words = [r.model.name, r.entrypoint, *([f"T {r.batch.seq_len}"] if r.batch.seq_len else [])]
    for name, value in r.settings.items():
        told = name in ("seq_len", "tokens_per_step", *(["config"] if r.ours else []))
        if not told and (not r.ours or (name in default and value != default[name])):
            words.append(name if value is True else f"{name} {shown_word(str(value))}")
    return f"{r.device.hardware} x {r.device.count}: {', '.join(words)}"


def answer(now: Mean, was: Mean, tolerance: float) -> str:
    """`ok` if the loss is surely within the tolerance, `SLOWER` if surely beyond, else `UNCERTAIN`."""
    allowed = 1 - tolerance
    floor = Mean(allowed * was.value, was.n, allowed * was.std, was.degrees)
    welch = difference(now, floor)
    if welch is None:
        return "UNCERTAIN"
    margin, error, degrees = welch
    if margin + student_t(SLOWER_BY, degrees) * error < 0:
        return "SLOWER"
    return "ok" if margin >= student_t(WITHIN_BY, degrees) * error else "UNCERTAIN"


def what_settles(now: Mean, was: Mean, tolerance: float) -> str:
    """The number of runs after which figures like these would give an answer, in words."""
    if not (now.degrees or was.degrees):
        return "a single run against a single run shows no noise; make 3 runs, or a baseline of 3"
    std = now.std or was.std * now.value / was.value  # a window of one step shows no noise
    for both in (False, True):
        for n in range(max(now.n, 2), MOST_RUNS + 1):
            base = Mean(was.value, n, was.std or std, n - 1) if both and n > was.n else was
            if answer(Mean(now.value, n, std, n - 1), base, tolerance) != "UNCERTAIN":
                return f"{n} runs{' of it and of the baseline' if both else ''} would settle it"
    return f"it is so close to the tolerance that {MOST_RUNS} runs would not settle it"


def judge(results: list[Result], baselines: dict[str, Entry], tolerance: float) -> Verdict:
    """A setting's runs against its baseline (Welch's test), whose own tolerance comes first."""
    fit = [r for r in results if not unfit(r)]
    name, key = setting_of(results[0]), baseline_key(results[0])
    if not fit:
        return Verdict("UNFIT, left out", name, f"{results[0].run_name}: {unfit(results[0])}", key)
    now, was = entry_of(fit), baselines.get(key)
    verdict = functools.partial(Verdict, name=name, key=key, now=now, was=was)
    runs = fit[0].run_name + (f" and {len(fit) - 1} more" if fit[1:] else "")
    if was is None:
        return verdict("NO BASELINE", text=f"{runs}; --update-baselines adds one")
    limits = now.power_limit_w, was.power_limit_w
    if unlike_limits(*limits):
        why = "{}: power limit {:.0f} W, the baseline's was {:.0f} W".format(runs, *limits)
        return verdict("UNFIT, left out", text=why)
    rate, before = now.tokens_per_sec_per_gpu, was.tokens_per_sec_per_gpu
    texts = [
        f"{runs}: {rate:,.0f} tokens/s per GPU [{now.low:,.0f}, {now.high:,.0f}], "
        f"was {before:,.0f} ({rate / before - 1:+.1%})"
    ]
    if was.tolerance is not None:
        tolerance = was.tolerance
        texts.append(f"tolerance {tolerance:.3g}")
    if disturbances := {text for r in fit for text in r.disturbances}:
        texts.append(f"{', '.join(sorted(disturbances))} in the window")
    left_out = [f"{r.run_name} ({why})" for r in results if (why := unfit(r))]
    if left_out:
        texts.append(f"left out {', '.join(left_out)}")
    mean = now.mean
    if mean.n == 1:  # no surer than its own steps say
        mean = dataclasses.replace(mean, std=(now.high - now.low) / 2 / NORMAL)
    speed = answer(mean, was.mean, tolerance)
    worse = ["SLOWER"] if speed == "SLOWER" else []
    for kind, field in (("", "memory_gib"), ("mean ", "memory_mean_gib")):
        memory, limit = getattr(now, field), getattr(was, field)
        if memory and limit and memory > (1 + tolerance) * limit:
            worse.append("MORE MEMORY")
            change = f"{memory / limit - 1:+.1%}"
            texts.append(f"{kind}{memory:.2f} GiB, was {limit:.2f} ({change})")
    if worse:
        if changed := _changes(was.provenance.software, now.provenance.software):
            texts.append(f"since then {', '.join(changed)}")
        if speed == "UNCERTAIN":
            texts.append(f"its speed is uncertain: {what_settles(mean, was.mean, tolerance)}")
        speed = " and ".join(dict.fromkeys(worse))
    elif rate > (1 + PLAUSIBLE_GAIN) * before:
        speed = "IMPLAUSIBLE GAIN"
        texts.append("does it still do the same work? If so, --update-baselines")
    elif speed == "UNCERTAIN":
        texts.append(what_settles(mean, was.mean, tolerance))
    elif left_out:  # who knows what they would have shown
        speed = "UNCERTAIN"
    return verdict(speed, text="; ".join(texts))


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Software that differs; nothing if it was not recorded before."""
    names = sorted(before.keys() | after.keys()) if before else []
    versions = ((name, before.get(name, "none"), after.get(name, "none")) for name in names)
    return [f"{name} {old} -> {new}" for name, old, new in versions if old != new]


def read_baselines(path: Path, must_exist: bool) -> dict[str, Entry]:
    """The stored baselines by key."""
    try:
        path.stat()  # a package's own baselines are not the user's
        content = parse_json(plain_file(path).read_text(encoding="utf-8"))
        return Baselines.model_validate(content).baselines
    except FileNotFoundError:
        if must_exist:
            text = f"--baseline {path}: no such file; --update-baselines makes it"
            raise UsageError(text) from None
        return {}
    except (OSError, ValueError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise UsageError(f"--baseline {path}: is no file of baselines: {why}") from None


def judge_all(paths: Sequence[str | Path], baseline: str | Path, tolerance: float) -> list[Verdict]:
    """Every setting of the results in `paths` against a file of baselines, and what was not measured.

    Baselines of other hardware, or another number of ranks, are passed over. UsageError where a path or
    the file cannot be read.
    """
    stored = read_baselines(Path(baseline), must_exist=True)
    results = own_results([str(path) for path in paths])
    groups = grouped(results, baseline_key)
    verdicts = [judge(runs, stored, tolerance) for runs in groups.values()]
    places = {(r.device.hardware, str(r.device.count)) for r in results}
    for key, entry in stored.items():
        if key not in groups and (key.split(" / ")[0], key.split(" / ")[-2:][0]) in places:
            verdicts.append(Verdict("NOT MEASURED", entry.setting, key=key, was=entry))
    return verdicts


def gate_code(verdicts: Sequence[Verdict], allowed: Collection[str]) -> int:
    """0; 1 if something got worse; 5 if nothing or not everything could be judged.

    `allowed` statuses, `NO BASELINE` or `NOT MEASURED`, do not count as such.
    """
    if any(v.status in WORSE for v in verdicts):
        return 1
    left = any(not v.judged and v.status not in allowed for v in verdicts)
    return 5 if left or not any(v.judged for v in verdicts) else 0


def assert_no_regression(
    *paths: str | Path, baseline: str | Path, tolerance: float = 0.05, allowed: Collection[str] = ()
) -> list[Verdict]:
    """For tests: `Regression` unless all results in `paths` are as fast as their baselines."""
    verdicts = judge_all(paths, baseline, tolerance)
    if gate_code(verdicts, allowed):
        raise Regression("\n" + "\n".join(printable(v.line) for v in verdicts))
    return verdicts


def gate(
    paths: Sequence[str],
    path: Path,
    tolerance: float,
    update: bool,
    allowed: Collection[str] = (),
    directory: Path | None = None,
) -> int:
    """Judge results by the baselines in `path`, or `update` those; returns the exit code.

    The `tolerance` is a fraction. The `directory` gets gate.md, a comment for a pull request, and
    benchmark.json, the figures for github-action-benchmark (customBiggerIsBetter).
    """
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
        print(f"NOTHING JUDGED: {path} gives no certain answer on any of these runs")
    return code


def update_baselines(paths: Sequence[str], path: Path) -> int:
    """Make the results the baselines; returns 5 if one is unfit and left as it was, otherwise 0."""
    stored, code, lines = read_baselines(path, must_exist=False), 0, []
    for key, runs in grouped(own_results(paths), baseline_key).items():
        for r in runs:
            if why := unfit(r):
                lines.append(f"UNFIT {r.run_name}: {why}; left out of the baselines")
                code = 5
        if fit := [r for r in runs if not unfit(r)]:
            entry, before = entry_of(fit), stored.get(key)
            if before and before.tolerance is not None:
                entry.tolerance = before.tolerance
            if before and before.noise and not entry.noise_degrees:
                entry.noise, entry.noise_degrees = before.noise, before.noise_degrees
            stored[key] = entry
            lines.append(
                f"baseline {entry.setting}: {entry.tokens_per_sec_per_gpu:,.0f} tokens/s per GPU, "
                f"{entry.n_runs} run{'s' * (entry.n_runs > 1)}"
            )
    about = "Written by compare.py --update-baselines; see docs/COMPARE.md."
    file = Baselines(about=about, schema_version=4, baselines=dict(sorted(stored.items())))
    write_whole(path, json.dumps(file.model_dump(exclude_unset=True), indent=1) + "\n")
    for line in lines:
        print(printable(line))
    return code


def comment(verdicts: Sequence[Verdict], code: int) -> str:
    """The verdicts as Markdown for a pull request: what failed first."""
    titles = {0: "no regression", 1: "something got worse", 5: "not everything could be judged"}
    columns = "setting", "verdict", "tokens/s per GPU", "samples/s", "peak GiB", "mean GiB"
    keys = "tokens_per_sec_per_gpu", "samples_per_sec_per_gpu", "memory_gib", "memory_mean_gib"
    rows = []
    for v in sorted(verdicts, key=lambda v: (v.status == "ok", v.status not in WORSE)):
        cells = [printable(v.name), v.status.lower()]
        for key in keys:
            now, was = (getattr(entry, key, None) for entry in (v.now, v.was))
            change = f" ({now / was - 1:+.1%})" if now and was else ""
            cells.append(number(now, ",.0f" if key == keys[0] else ",.2f") + change)
        rows.append(cells)
    lines = [f"- {markdown_cell(printable(v.line))}\n" for v in verdicts if v.status != "ok"]
    table = markdown_text(columns, rows)
    return f"### Training speed: {titles[code]}\n\n{table}" + "".join(["\n" * bool(lines), *lines])


def benchmark_points(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """The figures in github-action-benchmark's form `customBiggerIsBetter`: one series a setting."""
    shared = collections.Counter(v.name for v in verdicts)
    names = {id(v): v.name if shared[v.name] == 1 else f"{v.name} ({v.key[-6:]})" for v in verdicts}
    return [
        {"name": f"{names[id(v)]}: {what}", "unit": unit, "value": getattr(v.now, key)}
        | ({"range": f"{v.now.low:.1f} to {v.now.high:.1f}"} if key.startswith("tok") else {})
        | {"extra": v.line}
        for v in verdicts
        if v.now
        for key, what, unit in (
            ("tokens_per_sec_per_gpu", "speed", "tokens/s per GPU"),
            ("samples_per_sec_per_gpu", "samples", "samples/s per GPU"),
        )
    ]


def own_results(paths: Sequence[str]) -> list[Result]:
    """Our result.json files in files and directories, checked."""
    files: list[Path] = []
    taken: set[Path | bytes] = set()
    for path in map(Path, paths):
        fresh = not_taken(discover(path) if path.is_dir() else [path], taken)
        files += [file for file in fresh if file.suffix == ".json" or file == path]
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
