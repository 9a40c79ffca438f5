"""A stored trace of torch.profiler (Chrome trace format, as Kineto writes it) as spans. Needs no torch.

It may be ours or any other PyTorch program's, on a CPU, CUDA or ROCm, plain or gzipped.
"""

import bisect
import dataclasses
import functools
import gzip
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.tables import grouped
from llm_train_bench.model.json_files import plain_file

# Categories of the events that are read.
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
HOST = {"cpu_op", "user_annotation"}
READ = GPU | LAUNCHES | HOST
# As PyTorch 1.8 to 1.11 named them.
OLD_NAMES = {"memcpy": "gpu_memcpy", "memset": "gpu_memset"}
OLD_NAMES |= {"runtime": "cuda_runtime", "operator": "cpu_op"}
# Kineto's others, which say nothing of a step's time; any other is named to the reader.
PASSED_OVER = set(
    "trace python_function python gpu_user_annotation overhead cuda_sync cuda_event cpu_instant_event "
    "external_correlation cuda_profiler_range gpu_pm_counter collective_comm".split()
)
STEP = "ProfilerStep#"
LARGEST = 2**31  # bytes that are read whole
FOREVER = 1e300  # us; larger numbers are no times
Thread = tuple[Any, Any]  # process and thread
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
    def operators(self) -> dict[Any, dict[str, Any]]:
        """Arguments of the CPU operators, by the id that their kernels carry."""
        spans = [s for s in self.host_spans if s.category == "cpu_op" and s.operator is not None]
        spans.sort(key=lambda s: bool(s.args.get("Input Dims")))  # of two, the one with shapes
        return {s.operator: s.args for s in spans}

    def launch_of(self, activity: Span) -> Span | None:
        """The call of the host that gave this to the GPU, where it was recorded."""
        return self.launches.get(activity.correlation)

    def origin_of(self, activity: Span) -> float | None:
        """When an activity's launch began; by its start if the launch was lost and its operator was not.

        None for what was launched before the trace.
        """
        if launch := self.launch_of(activity):
            return launch.start
        known = activity.operator in self.operators and activity.operator != activity.correlation
        return activity.start if known else None

    def operator_id(self, activity: Span) -> int | None:
        """The id of the CPU operator behind a GPU activity.

        If none is known, older traces put the activity's correlation there: its launch must agree.
        """
        launch = self.launch_of(activity)
        return activity.operator if launch and launch.operator == activity.operator else None


def read_trace(path: str | Path) -> Trace:
    """The spans of a trace file; UsageError if it is not a trace of one process."""
    header = _content(Path(path))
    spans, notes = _spans_of(path, header["traceEvents"])
    on_host = [s for s in spans if s.category in HOST]
    host = grouped((s for s in on_host if not s.name.startswith(STEP)), lambda s: s.thread)
    gpu = [s for s in spans if s.category in GPU]
    if not gpu and not host:
        besides = ", ".join(["holds no operators and no GPU kernels", *notes[:3]])
        raise UsageError(f"{path}: {besides}; is it a PyTorch trace?")
    processes = {s.thread[0] for s in on_host}
    if len(processes) > 1:
        raise UsageError(f"{path}: mixes {len(processes)} processes; give a file of each rank")
    calls = [s for s in spans if s.category in LAUNCHES and s.correlation is not None]
    n_launches = sum("Launch" in call.name for call in calls)
    if n_launches and not gpu:
        raise UsageError(
            f"{path}: has {n_launches} launches of GPU kernels, but no kernel: CUPTI or ROCTracer "
            "recorded none; profile again with ProfilerActivity.CUDA, and without another profiler"
        )
    # Several threads may mark the same steps.
    marks = grouped((s for s in on_host if s.name.startswith(STEP)), lambda s: s.thread)
    # A process's own device is the one that it keeps busy.
    devices = sorted(grouped(gpu, lambda s: s.device).values(), key=_busy, reverse=True)
    if len(devices) > 1:
        own, *others = map(_busy, devices)
        gpu = devices[0]
        notes.append(
            f"GPU {gpu[0].device} is shown, the busiest of {len(devices)}; the others worked "
            f"{sum(others) / max(1e-9, own):.0%} as long"
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
        min(names) if len(names) == 1 and gpu else None,
        gpu,
        host,
        {call.correlation: call for call in calls},
        max(marks.values(), key=len, default=[]),
        rank,
        world_size,
        bool(names and not gpu),
        tuple(notes),
    )


def _spans_of(path: str | Path, events: list[Any]) -> tuple[list[Span], list[str]]:
    """Spans in order of start, an outer one before those inside it; what was left out, in words."""
    spans: list[Span] = []
    left_out: Counter[str] = Counter()
    clean = functools.cache(printable)
    seen: dict[Any, Any] = {}  # one object for each thread and shape, however often it comes
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category = str(event.get("cat", "")).lower()
        category = OLD_NAMES.get(category, category)
        if category not in READ:
            if category not in PASSED_OVER:
                left_out[f"of the unknown category {printable(category)[:40]!r}"] += 1
            continue
        start: Any = event.get("ts")
        length: Any = event.get("dur", 0)
        if not (_is_time(start) and _is_time(length) and length >= 0):
            left_out["without times"] += 1
            continue
        args = event.get("args") or {}
        if _is_odd(event, args):
            raise UsageError(
                f"{path}: has an event of a form that torch.profiler does not write: {str(event)[:80]}"
            )
        thread = (event.get("pid"), event.get("tid"))
        read_args = {key: args[key] for key in READ_ARGS if key in args}
        spans.append(
            Span(
                clean(str(event.get("name", ""))),
                category,
                float(start),
                float(start) + float(length),
                seen.setdefault(thread, thread),
                args.get("External id", args.get("external id")),
                args.get("correlation"),
                args.get("device"),
                seen.setdefault(str(read_args), read_args),
            )
        )
    spans.sort(key=lambda s: (s.start, -s.end))
    return spans, [f"{n} event{'s' * (n > 1)} {what} left out" for what, n in left_out.items()]


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < FOREVER


def _busy(spans: list[Span]) -> float:
    return sum(s.length for s in spans)


def _is_odd(event: dict[str, Any], args: Any) -> bool:
    """Whether an event has fields of a type that no reader could use."""
    if not isinstance(args, dict):
        return True
    ids = map(args.get, ("device", "correlation", "External id", "external id"))
    keys = (event.get("pid"), event.get("tid"), *ids)
    lists = (args.get("Input type", []), args.get("Input Dims", []))
    hashable = not any(isinstance(key, list | dict) for key in keys)
    return not hashable or not all(isinstance(value, list) for value in lists)


class NoTrace(UsageError):
    """A JSON file without a trace's events."""


def _content(path: Path) -> dict[str, Any]:
    """A trace's `traceEvents`, a list, and what stands beside them."""
    try:
        with plain_file(path).open("rb") as f:
            packed = f.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
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
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise NoTrace(f"{path}: is JSON, but has no traceEvents; is it a PyTorch trace?")
    return content


class Ranges:
    """Spans of the host by thread, to find those that cover a moment."""

    def __init__(self, spans: Iterable[Span]):
        """`spans` of any threads; those of one thread must lie inside each other or apart."""
        ordered = sorted(spans, key=lambda s: (s.start, -s.end))
        self.by_thread = grouped(ordered, lambda s: s.thread)

    def innermost(self, thread: Thread, time: float) -> Span | None:
        """The innermost of the spans around a moment of a thread."""
        spans = self.by_thread.get(thread, [])
        n_begun = bisect.bisect_right(spans, time, key=lambda s: s.start)
        begun = (spans[i] for i in range(n_begun - 1, -1, -1))
        return next((span for span in begun if span.end >= time), None)
