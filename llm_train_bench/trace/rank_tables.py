"""The ranks of a run as tables and as JSON. Needs no torch."""

from collections.abc import Sequence
from typing import Any

from llm_train_bench.base.tables import markdown_table, milliseconds, show_whole
from llm_train_bench.trace.rank_traces import Rank, Waiting


def show_ranks(ranks: Sequence[Rank], waits: Waiting) -> None:
    """A row a rank, a row a collective, and who is waited for, in words."""
    table = markdown_table(
        "rank", "step, ms", "computes", "communication exposed", "hidden", "idle", "waits for others",
        "others wait for it",
    )  # fmt: skip
    for r in ranks:
        seconds, n = r.breakdown.classes_s, r.breakdown.n_steps
        apart = ("communication", "idle", "host")
        table.add_row(str(r.rank), *(milliseconds(t) for t in (
            r.breakdown.step_time_s, sum(t for name, t in seconds.items() if name not in apart),
            seconds.get("communication", 0.0), r.breakdown.communication_overlapped_s,
            seconds.get("idle", 0.0) + seconds.get("host", 0.0),
            waits.of(r.rank) / n / 1e6, waits.caused_by(r.rank) / n / 1e6,
        )))  # fmt: skip
    show_whole(table)
    table = markdown_table("collective", "calls a step", "ms a step", "exposed", "of it waiting")
    for kind, row in by_collective(ranks, waits).items():
        times = (milliseconds(row[key]) for key in ("time_s", "exposed_s", "waiting_s"))
        table.add_row(kind, f"{row['calls']:.4g}", *times)
    show_whole(table)
    for line in verdict_on_ranks(ranks, waits):
        print(line)


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
            {"rank": r.rank, "trace": r.path, "device": r.device_name, **r.breakdown.model_dump(),
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
