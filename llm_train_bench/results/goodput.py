"""Where the time of a run went since its first attempt was started. Needs no torch."""

import itertools
from collections.abc import Sequence
from typing import Any

from llm_train_bench.results.result_files import wall_clock
from llm_train_bench.results.schema import Result

# Clocks of two processes that differ by more [s] contradict each other.
CLOCKS_AGREE_S = 1.0


def fill_goodput(r: Result, steps: Sequence[dict[str, Any]]) -> None:
    """Fill in the use of a run's time, all attempts together, until now.

    `steps` are the lines of steps.jsonl: each step once. Where the clocks of two attempts contradict each
    other, there is a remark instead.
    """
    ends = [attempt.end or wall_clock() for attempt in r.attempts]
    for i, (end, after) in enumerate(zip(ends, r.attempts[1:], strict=False)):
        if end > after.opened + CLOCKS_AGREE_S:
            r.remark(f"no goodput: by the clocks, attempt {i} ended after attempt {i + 1} began")
            return
    parts: dict[str, float] = dict.fromkeys(
        "steps compile save start lost waiting other".split(), 0.0
    )
    last_end = r.attempts[0].start
    for attempt, end, after in itertools.zip_longest(r.attempts, ends, r.attempts[1:]):
        own = [s for s in steps if attempt.opened <= s["at"] <= (after.opened if after else end)]
        begin = max(attempt.start, last_end)  # it may be started before the one before it has ended
        first = own[0]["at"] - own[0]["step_time_s"] if own else max(begin, end - attempt.lost_s)
        parts["waiting"] += begin - last_end
        parts["start"] += first - begin
        parts["lost"] += attempt.lost_s
        for step in own:
            compiled = min(step.get("compile_s", 0.0), step["step_time_s"])
            parts["compile"] += compiled
            parts["steps"] += step["step_time_s"] - compiled
        for one, other in itertools.pairwise(own):
            pause = other["at"] - other["step_time_s"] - one["at"]
            parts["save"] += max(0.0, pause) if one.get("saved") else 0.0
        last_end = end
    whole = last_end - r.attempts[0].start
    parts["other"] = whole - sum(parts.values())
    r.metrics.time_parts_s, r.metrics.goodput = parts, parts["steps"] / whole
