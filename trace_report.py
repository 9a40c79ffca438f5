"""Show the time breakdown of a traced step, or the changes between two traces.

    python trace_report.py runs/RUN/trace/rank0.pt.trace.json.gz
    python trace_report.py BEFORE.json.gz AFTER.json.gz
    python trace_report.py runs/RUN     (all ranks: who waits for whom)

Reads torch.profiler's traces from our runs or any other PyTorch program, on CPU, CUDA and ROCm.
Needs no torch and no GPU.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llm_train_bench.base.start  # noqa: F401

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.tables import markdown_table, milliseconds, short
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.model.json_files import parse_json
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import flag
from llm_train_bench.trace.breakdown import Breakdown, break_down
from llm_train_bench.trace.breakdown_table import breakdown_tables
from llm_train_bench.trace.rank_traces import ranks_as_json, read_ranks, show_ranks, waiting
from llm_train_bench.trace.read_trace import Trace, read_trace


@dataclasses.dataclass(frozen=True)
class ReportArgs:
    """Show the time breakdown of a traced step, or the changes between two traces.

    traces: One trace (.json or .json.gz), two to compare, or a directory with the traces of all ranks.
    json: Print JSON instead of tables.
    """

    traces: tuple[str, ...] = flag((), metavar="TRACE [TRACE]", positional=True)
    json: bool = flag(False)


@tool("trace_report.py")
def main(argv: Sequence[str]) -> int:
    """Report, and return the exit code: 0, or 2 for what cannot be read."""
    args = parse_dataclass(ReportArgs, argv, "trace_report.py")
    if len(args.traces) not in (1, 2):
        raise UsageError(f"{len(args.traces)} traces: give one, two to compare, or a directory")
    directories = [path for path in args.traces if Path(path).is_dir()]
    if directories:
        if len(args.traces) > 1:
            raise UsageError(f"{directories[0]}: is a directory; give nothing beside it")
        ranks = read_ranks(Path(directories[0]))
        waits = waiting(ranks)
        if args.json:
            print(json.dumps(ranks_as_json(ranks, waits), indent=1))
        else:
            show_ranks(ranks, waits)
        return 0
    traces = [understand(path) for path in args.traces]
    if args.json:
        content = [
            {
                "trace": t.path,
                "device": t.device_name,
                "notes": t.notes,
                "marked_steps": len(t.steps),
            }
            | b.model_dump()
            | {"matmul_tflops": b.matmul_tflops}
            for t, b in traces
        ]
        print(json.dumps(content, indent=1))
    elif len(traces) == 2:
        print_change(traces)
    else:
        ((trace, b),) = traces
        steps = f"{b.n_steps} step{'s' * (b.n_steps != 1)}"
        if b.n_steps < len(trace.steps):
            steps += f" of {len(trace.steps)}: no GPU work of the first ones was recorded"
        steps = steps if trace.steps else "no marked steps, taken as one"
        print(f"{trace.path}: {trace.device_name or 'device not named'}, {steps}")
        print(breakdown_tables("class", b), end="")
        print("timeline: open the trace in https://ui.perfetto.dev, which keeps it on this machine")
    for trace, _ in [] if args.json else traces:
        for note in trace.notes:
            print(f"note: {trace.path}: {note}")
    return 0


def understand(path: str) -> tuple[Trace, Breakdown]:
    """A trace and its breakdown; UsageError if it is not a trace."""
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


def print_change(traces: Sequence[tuple[Trace, Breakdown]]) -> None:
    """The differences of two traces, by class and by kernel, what got slower most first."""
    for name, (trace, _) in zip(("before", "after"), traces, strict=True):
        print(f"{name}: {trace.path}: {trace.device_name or 'device not named'}")
    (_, before), (_, after) = traces
    step = ("step", before.step_time_s, after.step_time_s)
    rows = [
        (name, *times(a, b), f"{b / a - 1:+.1%}" if a else "new")
        for name, a, b in [*changes(before.classes_s, after.classes_s), step]
    ]
    columns = ("before, ms", "after, ms", "change, ms")
    print(markdown_table(("class", *columns, "change"), rows), end="")
    # One kernel can have time in several classes: an addition in the loss, and one in a norm.
    kernels = [{(c.name, c.kind): c.time_s for c in b.kernels} for _, b in traces]
    rows = [(short(name), kind, *times(a, b)) for (name, kind), a, b in changes(*kernels)[:10]]
    print(markdown_table(("kernel", "class", *columns), rows, left=["class"]), end="")


def times(before: float, after: float) -> tuple[str, str, str]:
    """Two times [s] and their difference, in ms."""
    return milliseconds(before), milliseconds(after), f"{1e3 * (after - before):+.3f}"


def changes(before: dict[Any, float], after: dict[Any, float]) -> list[tuple[Any, float, float]]:
    """Name, value before, value after; the largest growth first."""
    names = dict.fromkeys((*before, *after))
    rows = [(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]
    return sorted(rows, key=lambda row: row[1] - row[2])


if __name__ == "__main__":
    run_tool(main)
