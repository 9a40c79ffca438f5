"""How much of a run's time since its first attempt was started its steps took. Needs no torch."""

import itertools
from collections.abc import Sequence
from typing import Any

from llm_train_bench.results.result_files import wall_clock
from llm_train_bench.results.schema import Result

# Clocks of two processes that differ by more [s] contradict each other.
CLOCKS_AGREE_S = 1.0


def fill_goodput(r: Result, steps: Sequence[dict[str, Any]]) -> None:
    """Fill in the use of a run's time by the lines of steps.jsonl; a remark if clocks contradict."""
    waiting = 0.0
    for i, (before, after) in enumerate(itertools.pairwise(r.attempts)):
        end = before.end or 0.0
        if end > after.opened + CLOCKS_AGREE_S:
            r.remark(f"no goodput: by the clocks, attempt {i} ended after attempt {i + 1} began")
            return
        waiting += max(0.0, after.start - end)  # the one before it may end after its start
    compiled = sum(min(step.get("compile_s", 0.0), step["step_time_s"]) for step in steps)
    kept = sum(step["step_time_s"] for step in steps) - compiled
    lost = sum(attempt.lost_s for attempt in r.attempts)
    whole = (r.attempts[-1].end or wall_clock()) - r.attempts[0].start
    parts = {"steps": kept, "compile": compiled, "lost": lost, "waiting": waiting}
    r.metrics.time_parts_s = parts | {"other": whole - sum(parts.values())}
    r.metrics.goodput = kept / whole
