"""The traces of all ranks of a run: who is late, and who waits for whom. Needs no torch.

Clocks of ranks are not compared. All ranks end a collective together, so the one with the shortest call
came last. The others waited for it, by as much as their calls are longer.
"""

import dataclasses
import gzip
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.tables import markdown_table, milliseconds
from llm_train_bench.trace.breakdown import (
    HOST,
    Breakdown,
    Interval,
    break_down,
    joined,
    pieces_of_thread,
    span_labels,
    union,
)
from llm_train_bench.trace.kernel_names import (
    COMMUNICATION,
    COPIES,
    collective_kind,
    kernel_class,
    operator_class,
)
from llm_train_bench.trace.read_trace import Span, Trace, open_trace, read_trace


@dataclasses.dataclass
class Rank:
    """What is kept of a rank's trace; times in us, from the begin of the rank's window."""

    rank: int
    path: str
    device_name: str | None
    world_size: int | None
    notes: tuple[str, ...]
    breakdown: Breakdown
    calls: dict[tuple[str, str], list[float]]
    """Lengths of a collective's calls, in order, by its kind and process group."""
    exposed: dict[str, float]
    """By kind: when nothing computes."""


@dataclasses.dataclass
class Waiting:
    """Who waited for whom over all steps [us]."""

    by_pair: Counter
    """(who waited, who came last)"""
    by_kind: Counter
    matched: int
    unmatched: int

    def of(self, rank: int) -> float:
        return sum(t for (who, _), t in self.by_pair.items() if who == rank)

    def caused_by(self, rank: int) -> float:
        return sum(t for (_, late), t in self.by_pair.items() if late == rank)


def trace_files(directory: Path) -> list[Path]:
    """The trace files of a run's directory, or of its `trace/`; UsageError if there are none."""
    for place in (directory, directory / "trace"):
        names = sorted(p for p in place.glob("*") if p.name.endswith((".json", ".json.gz")))
        if traces := [p for p in names if _looks_like_a_trace(p)]:
            return traces
    raise UsageError(f"{directory}: holds no trace of torch.profiler (.json, .json.gz)")


def _looks_like_a_trace(path: Path) -> bool:
    try:
        with open_trace(path) as f:
            return b'"traceEvents"' in f.read(2**20)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return True  # damaged, as its reader says: without it the waiting of the others is wrong
    except OSError:
        return False


def read_ranks(directory: Path) -> list[Rank]:
    """All ranks of a run, one trace in memory at a time; UsageError for what cannot be one run."""
    ranks = []
    for i, path in enumerate(trace_files(directory)):
        trace = read_trace(path)
        named = re.search(r"rank[-_]?(\d+)", path.name)
        number = trace.rank if trace.rank is not None else int(named[1]) if named else i
        ranks.append(summary_of(trace, number))
    for rank in {r.rank for r in ranks}:
        files = [Path(r.path).name for r in ranks if r.rank == rank]
        if len(files) > 1:
            several = f"rank {rank} has {len(files)} traces ({', '.join(files)})"
            raise UsageError(f"{directory}: {several}; give one run's")
    # Of two runs a straggler would be found too.
    for what, values in {
        "GPUs": {r.device_name for r in ranks if r.device_name},
        "runs, by their numbers of ranks": {r.world_size for r in ranks if r.world_size},
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
    labelled = [(s, kernel_class(s.name)) for s in trace.gpu] if trace.gpu else _host_spans(trace)
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    times: dict[str, list[Interval]] = defaultdict(list)
    for span, label in labelled:
        # On a CPU a collective is the transfer itself, not the call or the wait around it.
        transfer = trace.gpu or span.name.startswith(("gloo:", "nccl:"))
        if label != COMMUNICATION or not transfer:
            continue
        kind = collective_kind(span.args.get("Collective name"), span.name)
        calls[kind, str(span.args.get("Process Group Name", ""))].append(span.length)
        times[kind].append((span.start, span.end))
    busy = joined(
        (s.start, s.end) for s, label in labelled if label not in (COMMUNICATION, COPIES, HOST)
    )
    exposed = {kind: union([*busy, *each]) - union(busy) for kind, each in times.items()}
    breakdown = break_down(trace)
    about = number, trace.path, trace.device_name, trace.world_size, trace.notes
    return Rank(*about, breakdown, dict(calls), exposed)


def _host_spans(trace: Trace) -> list[tuple[Span, str]]:
    """A CPU's work: pieces of the training thread by class, and communication of any thread."""
    thread = trace.training_thread
    spans = trace.host.get(thread, [])
    labels = dict(zip(map(id, spans), span_labels(spans), strict=True))
    end = max((s.end for s in spans), default=0.0)
    labelled = [
        (Span(span.name, span.category, start, stop, thread), labels[id(span)])
        for start, stop, span in pieces_of_thread(spans, 0.0, end)
        if span is not None and labels[id(span)] not in (HOST, COMMUNICATION)
    ]
    labelled += [
        (s, COMMUNICATION) for s in trace.host_spans if operator_class(s.name) == COMMUNICATION
    ]
    return sorted(labelled, key=lambda pair: pair[0].start)


def waiting(ranks: Sequence[Rank]) -> Waiting:
    """Match the n-th call of each collective on all ranks of its group."""
    found = Waiting(Counter(), Counter(), 0, 0)
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
                    found.by_kind[kind] += length - shortest
            found.matched += 1
    return found


def show_ranks(ranks: Sequence[Rank], waits: Waiting) -> None:
    """A row a rank, a row a collective, and who is waited for, in words."""
    columns = ("rank", "step, ms", "computes", "communication exposed", "hidden", "idle",
               "waits for others", "others wait for it")  # fmt: skip
    rows = []
    for r in ranks:
        seconds, n = r.breakdown.classes_s, r.breakdown.n_steps
        apart = ("communication", "idle", "host")
        rows.append((str(r.rank), *(milliseconds(t) for t in (
            r.breakdown.step_time_s, sum(t for name, t in seconds.items() if name not in apart),
            seconds.get("communication", 0.0), r.breakdown.communication_overlapped_s,
            seconds.get("idle", 0.0) + seconds.get("host", 0.0),
            waits.of(r.rank) / n / 1e6, waits.caused_by(r.rank) / n / 1e6,
        ))))  # fmt: skip
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
        for note in r.notes:
            print(f"note: rank {r.rank}: {note}")


def by_collective(ranks: Sequence[Rank], waits: Waiting) -> dict[str, dict[str, float]]:
    """Calls and seconds a step of each kind, means over the ranks that have it."""
    rows = {}
    for kind in dict.fromkeys(kind for r in ranks for kind, _ in r.calls):
        having = [r for r in ranks if kind in r.exposed]
        rows[kind] = dict.fromkeys(("calls", "time_s", "exposed_s", "waiting_s"), 0.0)
        for r in having:
            each = len(having) * r.breakdown.n_steps
            lengths = [t for (k, _), times in r.calls.items() if k == kind for t in times]
            rows[kind]["calls"] += len(lengths) / each
            rows[kind]["time_s"] += sum(lengths) / each / 1e6
            rows[kind]["exposed_s"] += r.exposed[kind] / each / 1e6
        steps = len(having) * having[0].breakdown.n_steps
        rows[kind]["waiting_s"] = waits.by_kind[kind] / steps / 1e6
    return dict(sorted(rows.items(), key=lambda item: -item[1]["time_s"]))


def verdict_on_ranks(ranks: Sequence[Rank], waits: Waiting) -> list[str]:
    """Who is waited for, and what could not be matched, in words."""
    total, lines = sum(waits.by_pair.values()), []
    if total:
        late = max(ranks, key=lambda r: waits.caused_by(r.rank))
        caused = waits.caused_by(late.rank)
        most = max((p for p in waits.by_pair if p[1] == late.rank), key=waits.by_pair.__getitem__)
        n = late.breakdown.n_steps
        fair = 1.5 * total / len(ranks)
        if caused > fair:
            lines.append(
                f"rank {late.rank} is the straggler: others wait for it {milliseconds(caused / n / 1e6)} "
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
    steps = {r.rank: r.breakdown.n_steps for r in ranks}
    return {
        "ranks": [
            {"rank": r.rank, "trace": r.path, "device": r.device_name, "notes": r.notes,
             **r.breakdown.model_dump(),
             "waits_s": waits.of(r.rank) / r.breakdown.n_steps / 1e6,
             "waited_for_s": waits.caused_by(r.rank) / r.breakdown.n_steps / 1e6}
            for r in ranks
        ],
        "waiting": [
            {"rank": who, "for": late, "seconds": us / steps[who] / 1e6}
            for (who, late), us in waits.by_pair.most_common()
        ],
        "collectives": by_collective(ranks, waits),
        "matched": waits.matched, "unmatched": waits.unmatched,
    }  # fmt: skip
