"""Show the time breakdown of a traced step, or the changes between two traces.

    python trace_report.py runs/RUN/trace/rank0.pt.trace.json.gz
    python trace_report.py BEFORE.json.gz AFTER.json.gz
    python trace_report.py runs/RUN --html timeline.html     (all ranks: who waits for whom)

Reads torch.profiler's traces from our runs or any other PyTorch program, on CPU, CUDA and ROCm.
Needs no torch and no GPU.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import llm_train_bench.base.start  # noqa: F401

from rich.console import Console

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.tables import markdown_table, milliseconds, short
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.model.json_keys import parse_json
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import flag, positional
from llm_train_bench.trace.breakdown import break_down
from llm_train_bench.trace.breakdown_schema import Breakdown
from llm_train_bench.trace.breakdown_table import show_breakdown
from llm_train_bench.trace.rank_tables import ranks_as_json, show_ranks, timeline_page
from llm_train_bench.trace.rank_traces import read_ranks, waiting
from llm_train_bench.trace.read_trace import Trace, read_trace

Key = TypeVar("Key")


@dataclasses.dataclass(frozen=True)
class ReportArgs:
    """Show the time breakdown of a traced step, or the changes between two traces.

    traces: One trace (.json or .json.gz), two to compare, or a directory with the traces of all ranks.
    json: Print JSON instead of tables.
    html: Write the timelines of all ranks, for a directory.
    """

    traces: tuple[str, ...] = positional("TRACE [TRACE]", ())
    json: bool = flag(False)
    html: str | None = flag(None, metavar="FILE")


@tool("trace_report.py")
def main(argv: Sequence[str]) -> int:
    """Report, and return the exit code: 0, or 2 for what cannot be read."""
    args = parse_dataclass(ReportArgs, argv, "trace_report.py")
    if len(args.traces) not in (1, 2):
        raise UsageError(f"{len(args.traces)} traces: give one, two to compare, or a directory")
    directories = [path for path in args.traces if Path(path).is_dir()]
    if directories:
        if len(args.traces) > 1:
            raise UsageError(f"{directories[0]}: is a directory; give it alone")
        return report_ranks(Path(directories[0]), args)
    if args.html:
        raise UsageError("--html: needs a directory with the traces of all ranks")
    read, found = zip(*(understand(path) for path in args.traces), strict=True)
    if args.json:
        print(json.dumps([as_json(t, b) for t, b in zip(read, found, strict=True)], indent=1))
        return 0
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    if len(found) == 1:
        print_one(console, read[0], found[0])
    else:
        print_change(console, read, found)
    return 0


def report_ranks(directory: Path, args: ReportArgs) -> int:
    """The ranks of a run side by side."""
    ranks = read_ranks(directory)
    found = waiting(ranks)
    if args.json:
        print(json.dumps(ranks_as_json(ranks, found), indent=1))
    else:
        show_ranks(ranks, found)
    if args.html:
        try:
            write_whole(Path(args.html), timeline_page(directory.name, ranks, found))
        except OSError as error:
            raise UsageError(f"--html {args.html}: cannot be written: {error.strerror}") from None
        print(f"wrote {args.html}", file=sys.stderr)
    return 0


def understand(path: str) -> tuple[Trace, Breakdown]:
    """A trace and its breakdown; UsageError if it is no trace."""
    trace = read_trace(path)
    run = profile_of_run(trace.path)
    # A run without a rate had attention in plain matmuls, which its FLOPs leave out.
    flops = run.get("matmul_flops") if run.get("matmul_tflops") else None
    b = break_down(trace, flops)
    return trace, b.model_copy(update={"matmul_roof_fraction": run.get("matmul_roof_fraction")})


def profile_of_run(path: str) -> dict[str, float]:
    """The figures of the profile in our run's result if the trace lies in its directory."""
    file = Path(path).resolve().parent.parent / "result.json"
    try:
        profile = dict(parse_json(file.read_text(encoding="utf-8"))["profile"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {k: v for k, v in profile.items() if isinstance(v, int | float) and 0 < v < 1e30}


def as_json(trace: Trace, b: Breakdown) -> dict:
    """The breakdown as plain data."""
    return (
        {"trace": trace.path, "device": trace.device_name}
        | b.model_dump()
        | {"matmul_tflops": b.matmul_tflops}
    )


def print_one(console: Console, trace: Trace, b: Breakdown) -> None:
    """The tables of one trace."""
    steps = (
        f"{b.n_steps} step{'s' * (b.n_steps != 1)}"
        if trace.steps
        else "no marked steps, taken as one"
    )
    console.print(f"{trace.path}: {trace.device_name or 'device not named'}, {steps}")
    show_breakdown(console, "class", b)


def print_change(console: Console, traces: Sequence[Trace], found: Sequence[Breakdown]) -> None:
    """The differences of two traces, by class and by kernel, the largest loss first."""
    before, after = found
    for which, trace in zip(("before", "after"), traces, strict=True):
        console.print(f"{which}: {trace.path}: {trace.device_name or 'device not named'}")
    rows = changes(before.classes_s, after.classes_s)
    table = markdown_table("class", "before, ms", "after, ms", "change, ms", "change")
    for name, a, b in [*rows, ("step", before.step_time_s, after.step_time_s)]:
        table.add_row(
            name,
            milliseconds(a),
            milliseconds(b),
            f"{1e3 * (b - a):+.3f}",
            f"{b / a - 1:+.1%}" if a else "new",
        )
    console.print(table)
    # One kernel can have time in several classes: an addition in the loss, and one in a norm.
    kernels = changes(
        *({(c.name, c.kind): c.time_s for c in each.kernels} for each in (before, after))
    )
    table = markdown_table(
        "kernel", "class", "before, ms", "after, ms", "change, ms", left=["class"]
    )
    for (name, kind), a, b in kernels[:10]:
        table.add_row(short(name), kind, milliseconds(a), milliseconds(b), f"{1e3 * (b - a):+.3f}")
    console.print(table)


def changes(before: dict[Key, float], after: dict[Key, float]) -> list[tuple[Key, float, float]]:
    """Name, value before, value after; the largest growth first."""
    names = [*before, *(name for name in after if name not in before)]
    rows = [(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]
    return sorted(rows, key=lambda row: row[1] - row[2])


if __name__ == "__main__":
    run_tool(main)
