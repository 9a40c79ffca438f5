"""The traces of all ranks of a run: who is late, and who waits for whom. Needs no torch.

Clocks of ranks are not compared. All ranks end a collective together, so the one with the shortest call
came last. The others waited for it, by as much as their calls are longer.
"""

import contextlib
import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.tables import markdown_table, milliseconds
from llm_train_bench.trace.breakdown import (
    HOST,
    IDLE,
    Breakdown,
    Piece,
    activities,
    break_down,
    collectives,
    joined,
    union,
)
from llm_train_bench.trace.kernel_names import COMMUNICATION, COPIES
from llm_train_bench.trace.read_trace import NoTrace, Trace, read_trace


@dataclasses.dataclass
class Rank:
    """What is kept of a rank's trace; times in seconds per step."""

    rank: int
    trace: Trace
    """Without its spans."""
    breakdown: Breakdown
    calls: dict[tuple[str, str], list[float]]
    """Times of a collective's calls, in order, by its kind and process group."""
    exposed: dict[str, float]
    """By kind: when nothing computes."""


@dataclasses.dataclass
class Waiting:
    """Who waited for whom, in seconds per step."""

    by_pair: Counter = dataclasses.field(default_factory=Counter)
    """(who waited, who came last)"""
    by_kind: Counter = dataclasses.field(default_factory=Counter)
    by_rank: Counter = dataclasses.field(default_factory=Counter)
    caused_by: Counter = dataclasses.field(default_factory=Counter)
    matched: int = 0
    unmatched: int = 0


def read_traces(directory: Path) -> list[Rank]:
    """The traces in a directory, one in memory at a time; other JSON files are passed over."""
    ranks = []
    files = (p for p in directory.glob("*") if p.name.endswith((".json", ".json.gz")))
    for path in sorted(p for p in files if p.is_file()):
        with contextlib.suppress(NoTrace):
            trace = read_trace(path)
            named = re.search(r"rank[-_]?(\d+)", path.name)
            number = int(named[1]) if named else len(ranks)
            ranks.append(summary_of(trace, number if trace.rank is None else trace.rank))
    return ranks


def read_ranks(directory: Path) -> list[Rank]:
    """All ranks of a run, in its directory or its `trace/`; UsageError for what cannot be one run."""
    ranks = read_traces(directory) or read_traces(directory / "trace")
    if not ranks:
        raise UsageError(f"{directory}: holds no trace of torch.profiler (.json, .json.gz)")
    for rank in {r.rank for r in ranks}:
        files = [Path(r.trace.path).name for r in ranks if r.rank == rank]
        if len(files) > 1:
            several = f"rank {rank} has {len(files)} traces ({', '.join(files)})"
            raise UsageError(f"{directory}: {several}; give one run's")
    # Of two runs a straggler would be found too.
    for what, values in {
        "GPUs": {r.trace.device_name for r in ranks} - {None},
        "runs, by their numbers of ranks": {r.trace.world_size for r in ranks} - {None},
        "numbers of steps": {r.breakdown.n_steps for r in ranks},
    }.items():
        if len(values) > 1:
            found = ", ".join(sorted(map(str, values)))
            raise UsageError(
                f"{directory}: holds traces of different {what} ({found}); give one run's"
            )
    return sorted(ranks, key=lambda r: r.rank)


def summary_of(trace: Trace, number: int) -> Rank:
    """A rank's breakdown and collectives."""
    breakdown = break_down(trace)
    micros = breakdown.n_steps * 1e6
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    times: dict[str, list[Piece]] = defaultdict(list)
    for kind, span in collectives(trace):
        calls[kind, str(span.args.get("Process Group Name", ""))].append(span.length / micros)
        times[kind].append((span.start, span.end))
    apart = (COMMUNICATION, COPIES, HOST)
    busy = joined(piece for a in activities(trace) if a.label not in apart for piece in a.pieces)
    exposed = {kind: (union([*busy, *each]) - union(busy)) / micros for kind, each in times.items()}
    trace = dataclasses.replace(trace, gpu=[], host={}, launches={}, steps=[])
    return Rank(number, trace, breakdown, dict(calls), exposed)


def waiting(ranks: Sequence[Rank]) -> Waiting:
    """Match the n-th call of each collective on all ranks of its group."""
    found = Waiting()
    keys = dict.fromkeys(key for r in ranks for key in r.calls)
    for kind, group in keys:
        members = [r for r in ranks if (kind, group) in r.calls]
        lengths = [r.calls[kind, group] for r in members]
        counts = {len(part) for part in lengths}
        if len(members) < 2 or len(counts) > 1:
            found.unmatched += max(counts)
            continue
        for call in zip(*lengths, strict=True):
            shortest = min(call)
            late = members[call.index(shortest)].rank
            for member, length in zip(members, call, strict=True):
                if length > shortest:
                    found.by_pair[member.rank, late] += length - shortest
                    found.by_rank[member.rank] += length - shortest
                    found.caused_by[late] += length - shortest
                    found.by_kind[kind] += length - shortest
            found.matched += 1
    return found


def show_ranks(ranks: Sequence[Rank], waits: Waiting) -> None:
    """A row a rank, a row a collective, and who is waited for, in words."""
    columns = ("rank", "step, ms", "computes", "communication exposed", "hidden", "idle",
               "waits for others", "others wait for it")  # fmt: skip
    rows = []
    for r in ranks:
        seconds = Counter(r.breakdown.classes_s)
        apart = (COMMUNICATION, IDLE, HOST)
        times = (
            r.breakdown.step_time_s,
            sum(t for name, t in seconds.items() if name not in apart),
            seconds[COMMUNICATION],
            r.breakdown.communication_overlapped_s,
            seconds[IDLE] + seconds[HOST],
            waits.by_rank[r.rank],
            waits.caused_by[r.rank],
        )
        rows.append((str(r.rank), *map(milliseconds, times)))
    print(markdown_table(columns, rows), end="")
    columns = ("collective", "calls a step", "ms a step", "exposed", "of it waiting")
    times = ("time_s", "exposed_s", "waiting_s")
    rows = [
        (kind, f"{row['calls']:.4g}", *(milliseconds(row[key]) for key in times))
        for kind, row in by_collective(ranks, waits).items()
    ]
    print(markdown_table(columns, rows), end="")
    for line in verdict_on_ranks(ranks, waits):
        print(line)
    for r in ranks:
        for note in r.trace.notes:
            print(f"note: rank {r.rank}: {note}")


def by_collective(ranks: Sequence[Rank], waits: Waiting) -> dict[str, dict[str, float]]:
    """Calls and seconds a step of each kind, means over the ranks that have it."""
    rows = {}
    for kind in dict.fromkeys(kind for r in ranks for kind in r.exposed):
        having = [r for r in ranks if kind in r.exposed]
        n = len(having)
        calls = [t for r in having for (k, _), each in r.calls.items() if k == kind for t in each]
        rows[kind] = {
            "calls": len(calls) / n / having[0].breakdown.n_steps,
            "time_s": sum(calls) / n,
            "exposed_s": sum(r.exposed[kind] for r in having) / n,
            "waiting_s": waits.by_kind[kind] / n,
        }
    return dict(sorted(rows.items(), key=lambda item: -item[1]["time_s"]))


def verdict_on_ranks(ranks: Sequence[Rank], waits: Waiting) -> list[str]:
    """Who is waited for, and what could not be matched, in words."""
    total, lines = sum(waits.by_pair.values()), []
    if total:
        late, caused = waits.caused_by.most_common(1)[0]
        most = max((p for p in waits.by_pair if p[1] == late), key=waits.by_pair.__getitem__)
        if caused > 1.5 * total / len(ranks):
            lines.append(
                f"rank {late} is the straggler: others wait for it {milliseconds(caused)} "
                f"ms a step, {caused / total:.0%} of all waiting; rank {most[0]} most"
            )
        else:
            lines.append("no straggler: no rank causes much more than its share of the waiting")
    elif len(ranks) > 1 and waits.matched:
        lines.append("no rank waits for another")
    if waits.unmatched:
        lines.append(
            f"{waits.unmatched} collectives are not matched: ranks recorded different numbers of them"
        )
    return lines


def ranks_as_json(ranks: Sequence[Rank], waits: Waiting) -> dict[str, Any]:
    """The same as plain data; seconds a step."""
    return {
        "ranks": [
            {"rank": r.rank, "trace": r.trace.path, "device": r.trace.device_name, "notes": r.trace.notes,
             **r.breakdown.model_dump(),
             "waits_s": waits.by_rank[r.rank], "waited_for_s": waits.caused_by[r.rank]}
            for r in ranks
        ],
        "waiting": [
            {"rank": who, "for": late, "seconds": seconds}
            for (who, late), seconds in waits.by_pair.most_common()
        ],
        "collectives": by_collective(ranks, waits),
        "matched": waits.matched, "unmatched": waits.unmatched,
    }  # fmt: skip
