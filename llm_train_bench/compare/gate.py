"""Did it get slower? Runs against stored runs: yes, no, or uncertain. Needs no torch.

For tests of your own: `assert_no_regression`.
"""

import dataclasses
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.tables import grouped
from llm_train_bench.compare.find_results import read_records, without_copies
from llm_train_bench.compare.read_results import records_of_file
from llm_train_bench.compare.records import LogFacts, Record
from llm_train_bench.compare.setting import identity, name_by_itself, unlike_limits
from llm_train_bench.formulas.time_statistics import NORMAL, Mean, difference, mean_of, student_t
from llm_train_bench.results.remarks import drift_remark

# Beyond this much faster, a run probably does less than it did.
PLAUSIBLE_GAIN = 0.25

WORSE = ("SLOWER", "MORE MEMORY", "SLOWER and MORE MEMORY")
# Chosen by simulation (docs/COMPARE.md): a loss of 2 % beyond the tolerance passes in under 1 % of
# cases, and no loss is called one in under 1 %.
SURELY_OK, SURELY_SLOWER = 0.99, 0.93
MOST_RUNS = 30


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A setting against its baseline: `ok`, one of `WORSE`, `UNCERTAIN`, or why nothing was judged.

    `name` says the setting in words.
    """

    status: str
    name: str
    text: str = ""

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


def unusable(r: Record) -> str | None:
    """Why a run can be no baseline, nor be compared with one."""
    if r.invalid:
        return ", ".join(r.invalid)
    if r.result is None:
        return "is a log: its settings are not known"
    m = r.result.metrics
    if not (r.tokens_per_sec_per_gpu and m.step_time_ci95_low_s and m.step_time_ci95_high_s):
        return "too few or too unlike steps for a rate with an interval"
    return next((f"{text}: no steady state" for text, _ in drift_remark(r.step_times_s)), None)


def rate_of(runs: Sequence[Record]) -> Mean:
    """The mean rate of a setting's usable runs [tokens/s per device]."""
    return mean_of([r.tokens_per_sec_per_gpu or 0.0 for r in runs])


def interval_of(runs: Sequence[Record]) -> tuple[float, float]:
    """95 % interval of that rate over runs; of a single run it is that of its steps."""
    rate, r = rate_of(runs), runs[0].result
    if r and not rate.degrees:
        times = r.metrics.step_time_ci95_high_s, r.metrics.step_time_ci95_low_s
        tokens = (r.batch.tokens_per_step or 0) / r.device.count
        low, high = (tokens / seconds if seconds else rate.value for seconds in times)
    else:
        wide = student_t(0.975, rate.degrees) * math.sqrt(rate.error)
        low, high = rate.value - wide, rate.value + wide
    return max(low, 0.0), high


def answer(now: Mean, was: Mean, tolerance: float) -> str:
    """`ok` if the loss is surely within the tolerance, `SLOWER` if surely beyond, else `UNCERTAIN`."""
    part = 1 - tolerance
    bound = dataclasses.replace(was, value=part * was.value, std=part * was.std)
    gap = difference(now, bound)
    if gap is None:
        return "UNCERTAIN"
    margin, error, degrees = gap
    if margin + student_t(SURELY_SLOWER, degrees) * error < 0:
        return "SLOWER"
    return "ok" if margin >= student_t(SURELY_OK, degrees) * error else "UNCERTAIN"


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


def judge(runs: Sequence[Record], baseline: Sequence[Record], tolerance: float) -> Verdict:
    """Runs of a setting against its baseline's; the tolerance that the baseline has comes first."""
    usable = [r for r in runs if not unusable(r)]
    setting = name_by_itself(runs[0])
    if not usable:
        return Verdict("UNUSABLE, left out", setting, f"{runs[0].label}: {unusable(runs[0])}")
    before = [r for r in baseline if not unusable(r)]
    named = usable[0].label + (f" and {len(usable) - 1} more" if usable[1:] else "")
    if not before:
        advice = "--save FILE adds one"
        if baseline:
            why = unusable(baseline[0])
            advice = f"the baseline's runs are unusable: {why}; save new ones with --save FILE"
        return Verdict("NO BASELINE", setting, f"{named}; {advice}")
    limits = usable[0].power_limit_w, before[0].power_limit_w
    if unlike_limits(*limits):
        why = "{}: power limit {:.0f} W, the baseline's was {:.0f} W".format(named, *limits)
        return Verdict("UNUSABLE, left out", setting, why)
    now, was, (low, high) = rate_of(usable), rate_of(before), interval_of(usable)
    texts = [
        f"{named}: {now.value:,.0f} tokens/s per device [{low:,.0f}, {high:,.0f}], "
        f"was {was.value:,.0f} ({now.value / was.value - 1:+.1%})"
    ]
    if before[0].tolerance is not None:
        tolerance = before[0].tolerance
        texts.append(f"tolerance {tolerance:.3g}")
    if len({str(r.conditions) for r in usable}) > 1:
        changes = _changes(usable[0].conditions, usable[-1].conditions)
        texts.append(f"runs differ in {', '.join(changes)}")
    if disturbed := {text for r in usable for text in r.texts("disturbed")}:
        texts.append(f"{', '.join(sorted(disturbed))} in the window")
    left_out = [f"{r.label} ({why})" for r in runs if (why := unusable(r))]
    if left_out:
        texts.append(f"left out {', '.join(left_out)}")
    if now.n == 1:  # no surer than its own steps say
        now = dataclasses.replace(now, std=(high - low) / 2 / NORMAL)
    speed = answer(now, was, tolerance)
    worse = ["SLOWER"] if speed == "SLOWER" else []
    memory, limit = (max(r.memory_gib or 0.0 for r in each) for each in (usable, before))
    if limit and memory > (1 + tolerance) * limit:
        worse.append("MORE MEMORY")
        texts.append(f"{memory:.2f} GiB, was {limit:.2f} ({memory / limit - 1:+.1%})")
    if worse:
        if changes := _changes(before[0].conditions, usable[0].conditions):
            texts.append(f"since then {', '.join(changes)}")
        if speed == "UNCERTAIN":
            texts.append(f"its speed is uncertain: {what_settles(now, was, tolerance)}")
        speed = " and ".join(worse)
    elif now.value > (1 + PLAUSIBLE_GAIN) * was.value:
        speed = "IMPLAUSIBLE GAIN"
        texts.append("does it still do the same work? If so, --save it")
    elif speed == "UNCERTAIN":
        texts.append(what_settles(now, was, tolerance))
    elif left_out:  # who knows what they would have shown
        speed = "UNCERTAIN"
    return Verdict(speed, setting, "; ".join(texts))


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Conditions that differ."""
    versions = ((n, before.get(n, "none"), after.get(n, "none")) for n in sorted({*before, *after}))
    return [f"{name} {old} -> {new}" for name, old, new in versions if old != new]


def judge_all(paths: Sequence[str | Path], baseline: str | Path, tolerance: float) -> list[Verdict]:
    """Every setting of the runs in `paths` against a file of runs, and what was not measured.

    Baselines of other hardware, or another number of ranks, are passed over. UsageError where a path or
    the file cannot be read.
    """
    before = records_of_file(Path(baseline))
    stored = grouped(before, identity)
    runs = without_copies(own_runs(paths, Path(baseline)), before)
    measured = grouped(runs, identity)
    verdicts = [judge(each, stored.get(key, []), tolerance) for key, each in measured.items()]
    names = (name_by_itself(first).rpartition(": ") for first, *_ in stored.values())
    elsewhere = {name: device for device, _, name in names}
    for i, v in enumerate(verdicts):
        here, _, name = v.name.rpartition(": ")
        if v.status == "NO BASELINE" and elsewhere.get(name, here) != here:
            text = f"{v.text}; {baseline} has this setting on {elsewhere[name]}"
            verdicts[i] = dataclasses.replace(v, text=text)
    places = {(r.hardware, r.n_gpus) for r in runs}
    missing = [first for key, (first, *_) in stored.items() if key not in measured]
    due = [r for r in missing if (r.hardware, r.n_gpus) in places]
    return verdicts + [Verdict("NOT MEASURED", name_by_itself(r)) for r in due]


def own_runs(paths: Sequence[str | Path], besides: Path) -> list[Record]:
    """Our runs in files and directories, but not those in the file `besides`, which may lie there."""
    lines: list[str] = []
    records = read_records(map(str, paths), lines.append, LogFacts())
    if broken := [line for line in lines if "result.json: " in line]:
        raise UsageError(broken[0])
    place = os.path.realpath(besides)
    runs = [r for r in records if r.result and os.path.realpath(r.path) != place]
    if not runs:
        where = ", ".join(map(str, paths))
        raise UsageError(f"{where}: no result.json, and no file of runs besides {besides}")
    return runs


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
