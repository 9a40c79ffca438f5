"""Where the time of a run went since its first attempt was started. Needs no torch."""

import contextlib
import datetime
import itertools
from collections.abc import Sequence
from pathlib import Path

from llm_train_bench.results.result_files import read_result, read_steps
from llm_train_bench.results.schema import Result


def time_parts(attempts: Sequence[Path], now: float, saved_at: float | None) -> dict[str, float]:
    """Seconds from the start of a lineage until `now`, by what they were spent on; they add up to it.

    `attempts` are the directories of its attempts, in order. The last one, which ends now, waited for
    its last save until `saved_at`. Times are in seconds since 1970.
    """
    names = ("steps", "start", "restart", "compile", "save", "lost steps", "waiting", "other")
    parts: dict[str, float] = dict.fromkeys(names, 0.0)
    results = [read_result(path / "result.json") for path in attempts]
    later = [r.resumed_from.step if r.resumed_from else 0 for r in results[1:]]
    for i, (path, r) in enumerate(zip(attempts, results, strict=True)):
        last = i == len(results) - 1
        steps = [step for step in read_steps(path / "steps.jsonl") if step.get("at")]
        begin, first = r.lineage.started, min(later[i:], default=float("inf"))
        # One that was killed leaves no time of its end, nor what it did after its last line.
        ended = datetime.datetime.fromisoformat(r.ended_at).timestamp() if r.ended_at else begin
        end = now if last else max(ended, steps[-1]["at"] if steps else begin)
        parts["restart" if i else "start"] += (
            steps[0]["at"] - steps[0]["step_time_s"] if steps else end
        ) - begin
        for step in steps:
            compiled = min(step.get("compile_s", 0.0), step["step_time_s"])
            parts["compile"] += compiled
            part = "steps" if step["step"] < first else "lost steps"
            parts[part] += step["step_time_s"] - compiled
        for step, after in itertools.pairwise(steps):
            if step.get("saved"):
                parts["save"] += max(0.0, after["at"] - after["step_time_s"] - step["at"])
        if steps and steps[-1].get("saved"):
            until = (saved_at or steps[-1]["at"]) if last else end
            parts["save"] += max(0.0, until - steps[-1]["at"])
        if not last:
            parts["waiting"] += max(0.0, results[i + 1].lineage.started - end)
    parts["other"] = now - results[0].lineage.began - sum(parts.values())
    return parts


def lineage_before(candidates: Sequence[Path], result: Result) -> list[Path]:
    """The directories among `candidates` with earlier attempts of a result's lineage, in order."""
    earlier = {}
    for path in candidates:
        with contextlib.suppress(OSError, ValueError):
            line = read_result(path / "result.json").lineage
            if line.id == result.lineage.id and line.attempt < result.lineage.attempt:
                earlier[line.attempt] = path
    return [path for _, path in sorted(earlier.items())]
