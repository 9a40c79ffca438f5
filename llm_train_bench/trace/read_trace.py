"""A stored trace of torch.profiler (Chrome trace format, as Kineto writes it) as spans. Needs no torch.

It may be ours or any other PyTorch program's, on a CPU, CUDA or ROCm, plain or gzipped.
"""

import bisect
import dataclasses
import functools
import gzip
import io
import itertools
import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.model.json_files import plain_file

# Categories of the events that are read, also as PyTorch 1.8 to 1.11 name them.
CATEGORIES = {name: ("gpu", name) for name in ("kernel", "gpu_memcpy", "gpu_memset")}
CATEGORIES |= {name: ("launch", name) for name in ("cuda_runtime", "cuda_driver")}
CATEGORIES |= {name: ("host", name) for name in ("cpu_op", "user_annotation")}
CATEGORIES |= {"memcpy": ("gpu", "gpu_memcpy"), "memset": ("gpu", "gpu_memset")}
CATEGORIES |= {"runtime": ("launch", "cuda_runtime"), "operator": ("host", "cpu_op")}
# Kineto's others, which say nothing of a step's time; any other is named to the reader.
PASSED_OVER = set(
    "trace python_function python gpu_user_annotation overhead cuda_sync cuda_event cpu_instant_event "
    "external_correlation cuda_profiler_range gpu_pm_counter collective_comm".split()
)
STEP = "ProfilerStep#"
LARGEST = 2**31  # bytes that are read whole
Thread = tuple[Any, Any]  # process and thread
_NOTHING: dict[str, Any] = {}
PLAIN = {str, int, float, bool, type(None)}
# Arguments that a span keeps: of an operator, then of a collective.
READ_ARGS = {"Input Dims", "Input type"}
READ_ARGS |= {"Collective name", "Process Group Name", "Group size", "In msg nelems", "dtype"}


@dataclasses.dataclass(slots=True)
class Span:
    """Something that took from `start` to `end` [us] on a thread of the host or a stream of a GPU.

    `args` are the shapes and types of an operator, and what a collective says of itself.
    """

    name: str
    category: str
    start: float
    end: float
    thread: Thread
    operator: Any = None  # id of the CPU operator; in older traces the correlation
    correlation: Any = None  # of a launch with what it launched
    device: Any = None
    args: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace's spans by what they are, each list in order of start."""

    path: str
    device_name: str | None
    gpu: list[Span]
    host: dict[Thread, list[Span]]
    launches: dict[int, Span]
    steps: list[Span]
    rank: int | None = None
    """As its process group said."""
    world_size: int | None = None
    lists_idle_gpu: bool = False
    """Whether it names a GPU, but has none of its work."""
    notes: tuple[str, ...] = ()
    """What the file has beyond this, in words."""

    @property
    def host_spans(self) -> Iterator[Span]:
        """The spans of all threads of the host."""
        return itertools.chain.from_iterable(self.host.values())

    @property
    def training_thread(self) -> Thread:
        """The thread that runs the steps; without marked steps the busiest."""
        if self.steps:
            return self.steps[0].thread
        return max(self.host, key=lambda thread: len(self.host[thread]))

    @functools.cached_property
    def operator_ids(self) -> set[Any]:
        """Of all CPU operators."""
        return {s.operator for s in self.host_spans if s.category == "cpu_op"} - {None}

    @functools.cached_property
    def operators(self) -> dict[Any, dict[str, Any]]:
        """Arguments of the CPU operators with recorded shapes, by the id that their kernels carry."""
        spans = (s for s in self.host_spans if s.category == "cpu_op" and s.operator is not None)
        return {s.operator: s.args for s in spans if s.args.get("Input Dims")}

    def launch_of(self, activity: Span) -> Span | None:
        """The call of the host that gave this to the GPU, where it was recorded."""
        return self.launches.get(activity.correlation)

    def origin_of(self, activity: Span) -> float | None:
        """When an activity's launch began; by its start if the launch was lost and its operator was not.

        None for what was launched before the trace.
        """
        if launch := self.launch_of(activity):
            return launch.start
        known = activity.operator in self.operator_ids and activity.operator != activity.correlation
        return activity.start if known else None

    def operator_id(self, activity: Span) -> int | None:
        """The id of the CPU operator behind a GPU activity.

        If none is known, older traces put the activity's correlation there: its launch must agree.
        """
        launch = self.launch_of(activity)
        return activity.operator if launch and launch.operator == activity.operator else None


def read_trace(path: str | Path) -> Trace:
    """The spans of a trace file; UsageError if it is not a trace."""
    events, header = _content(Path(path))
    gpu, steps = [], []
    launches: dict[Any, dict[Any, Span]] = defaultdict(dict)  # by process
    host: dict[Thread, list[Span]] = defaultdict(list)
    passed_over: Counter[str] = Counter()
    seen: dict[Any, Any] = {}  # one object for each name, thread and shape, however often it comes
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category = str(event.get("cat", "")).lower()
        if category.startswith("mtia"):
            raise UsageError(f"{path}: is of an MTIA device, whose kernels are not read")
        if category not in CATEGORIES:
            if category not in PASSED_OVER:
                passed_over[f"of the unknown category {printable(category)[:40]!r}"] += 1
            continue
        kind, category = CATEGORIES[category]
        try:
            start, length = float(event["ts"]), float(event.get("dur", 0))
        except (KeyError, TypeError, ValueError, OverflowError):
            start, length = math.nan, 0.0
        if not math.isfinite(start + length) or length < 0:
            passed_over["without times"] += 1
            continue
        args = event.get("args") or _NOTHING
        if _is_odd(event, args):
            raise UsageError(
                f"{path}: has an event of a form that torch.profiler does not write: {str(event)[:80]}"
            )
        name = event.get("name", "")
        name = seen.get(name) or seen.setdefault(name, printable(str(name)))
        thread = (event.get("pid"), event.get("tid"))
        thread = seen.setdefault(thread, thread)
        read_args = _NOTHING
        if kind != "launch" and not READ_ARGS.isdisjoint(args):
            read_args = {key: args[key] for key in READ_ARGS if key in args}
            read_args = seen.setdefault(str(read_args), read_args)
        operator = args.get("External id", args.get("external id"))
        launch, device = args.get("correlation"), args.get("device")
        end = start + length
        span = Span(name, category, start, end, thread, operator, launch, device, read_args)
        if kind == "gpu":
            gpu.append(span)
        elif kind == "launch":
            if span.correlation is not None:
                launches[thread[0]][span.correlation] = span
        elif name.startswith(STEP):
            steps.append(span)
        else:
            host[thread].append(span)
    notes = [f"{n} event{'s' * (n > 1)} {what} left out" for what, n in passed_over.items()]
    if not gpu and not host:
        besides = ", ".join(["holds no operators and no GPU kernels", *notes[:3]])
        raise UsageError(f"{path}: {besides}; is it a PyTorch trace?")
    given = [c for each in launches.values() for c in each.values() if "Launch" in c.name]
    if given and not gpu:
        raise UsageError(
            f"{path}: has {len(given)} launches of GPU kernels, but no kernel: CUPTI or ROCTracer "
            "recorded none; profile again with ProfilerActivity.CUDA, and without another profiler"
        )
    for spans in host.values():
        # If two start together, the longer is the outer one.
        spans.sort(key=lambda s: (s.start, -s.end))
    steps = _of_one_thread(steps)
    processes = {thread[0] for thread in (*host, *(s.thread for s in steps))}
    if len(processes) > 1:  # traces of several ranks in one file
        main = steps[0].thread if steps else max(host, key=lambda thread: len(host[thread]))
        host = {thread: spans for thread, spans in host.items() if thread[0] == main[0]}
        others = set().union(*(each for pid, each in launches.items() if pid != main[0]))
        launches = {main[0]: launches[main[0]]}
        if len({(s.device, s.thread[0]) for s in gpu}) < 2 and others & launches[main[0]].keys():
            raise UsageError(f"{path}: mixes {len(processes)} processes; give a file of each rank")
        gpu = [s for s in gpu if s.correlation not in others - launches[main[0]].keys()]
        several = (
            f"{len(processes)} processes are in this file, and only process {main[0]} is shown"
        )
        notes.append(f"{several}: give a file of each rank")
    own = {key: span for each in launches.values() for key, span in each.items()}
    gpu, others = _of_busiest_device(gpu, own, merged=len(processes) > 1)
    if others:
        notes.append(
            f"GPU {gpu[0].device} is shown, the busiest of {1 + len(others)}; the others worked "
            f"{sum(others) / max(1e-9, _busy(gpu)):.0%} as long"
        )
    # Only by name: on ROCm the number of an activity's device is not the one in this list.
    listed = header.get("deviceProperties")
    names = {
        printable(d["name"])
        for d in (listed if isinstance(listed, list) else [])
        if isinstance(d, dict) and isinstance(d.get("name"), str)
    }
    if names and not gpu:
        notes.append(
            f"{', '.join(names)}: has no work in this file; the times are those of the host"
        )
    about = header.get("distributedInfo")
    about = about if isinstance(about, dict) else {}
    rank, world_size = (
        n if isinstance(n, int) else None for n in map(about.get, ("rank", "world_size"))
    )
    return Trace(
        str(path),
        (min(names) or None) if len(names) == 1 and gpu else None,
        sorted(gpu, key=lambda s: s.start),
        dict(host),
        own,
        sorted(steps, key=lambda s: s.start),
        rank,
        world_size,
        bool(names and not gpu),
        tuple(notes),
    )


def _of_one_thread(steps: list[Span]) -> list[Span]:
    """The marks of the thread that has most; other threads or ranks may mark the same steps."""
    by_thread: dict[Thread, list[Span]] = defaultdict(list)
    for step in steps:
        by_thread[step.thread].append(step)
    return max(by_thread.values(), key=len, default=[])


def _busy(spans: list[Span]) -> float:
    return sum(s.length for s in spans)


def _of_busiest_device(
    gpu: list[Span], launches: dict[Any, Span], merged: bool
) -> tuple[list[Span], list[float]]:
    """The work of a process's own device, which is the one it keeps busy, and how busy the others were.

    In `merged` traces each process has devices of its own: one that has these launches.
    """
    by_device: dict[Any, list[Span]] = defaultdict(list)
    for span in gpu:
        by_device[span.device, merged and span.thread[0]].append(span)

    def work(spans: list[Span]) -> tuple[int, float]:
        return merged * sum(s.correlation in launches for s in spans), _busy(spans)

    busiest = max(by_device.values(), key=work, default=[])
    others = [] if merged else [spans for spans in by_device.values() if spans is not busiest]
    return busiest, [_busy(spans) for spans in others]


def _is_odd(event: dict[str, Any], args: Any) -> bool:
    """Whether an event has fields of a type that no reader could use."""
    if not isinstance(args, dict):
        return True
    if any(type(args.get(key, [])) is not list for key in ("Input type", "Input Dims")):
        return True
    types = {type(event.get(key)) for key in ("pid", "tid", "name")}
    types |= {
        type(args.get(key)) for key in ("device", "correlation", "External id", "external id")
    }
    return not types <= PLAIN


def open_trace(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """A trace file, which may be gzipped."""
    with plain_file(path).open("rb") as f:
        packed = f.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")


def _content(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """The events of a trace, and what stands beside them."""
    try:
        with open_trace(path) as file:
            size = path.stat().st_size
            most = min(LARGEST, 100 * size + 2**26)  # a JSON of events shrinks to a tenth or so
            data = file.read(most + 1) if size <= most else b""
        if max(size, len(data)) > most:
            raise UsageError(f"{path}: has over {most / 2**20:,.0f} MiB; trace fewer steps")
        # Kineto does not escape everything that JSON wants escaped.
        content = json.loads(data.decode("utf-8", "replace"), strict=False)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON ({error}); was the trace cut off?") from None
    # The format's other form has only the events.
    header = content if isinstance(content, dict) else {"traceEvents": content}
    events = header.pop("traceEvents", None)
    if not isinstance(events, list):
        raise UsageError(f"{path}: is JSON, but has no traceEvents; is it a PyTorch trace?")
    return events, header


class Ranges:
    """Spans of the host by thread, to find those that cover a moment."""

    def __init__(self, spans: list[Span]):
        """`spans` of any threads; those of one thread must lie inside each other or apart."""
        self.by_thread: dict[Thread, list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda s: (s.start, -s.end)):
            self.by_thread[span.thread].append(span)
        self.starts = {t: [s.start for s in spans] for t, spans in self.by_thread.items()}

    def innermost(self, thread: Thread, time: float) -> Span | None:
        """The innermost of the spans around a moment of a thread."""
        spans = self.by_thread.get(thread, [])
        for i in range(bisect.bisect_right(self.starts.get(thread, []), time) - 1, -1, -1):
            if spans[i].end >= time:
                return spans[i]
        return None
