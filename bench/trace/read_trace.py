"""A stored trace of torch.profiler (Chrome trace format, as Kineto writes it) as spans. Needs no torch.

It may be ours or any other PyTorch program's, on a CPU, CUDA or ROCm, plain or gzipped.
"""

import bisect
import dataclasses
import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.errors import UsageError, printable
from model.json_keys import plain_file

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
HOST_CATEGORIES = ("cpu_op", "user_annotation")
STEP = "ProfilerStep#"

Thread = tuple[Any, Any]  # process and thread


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `start` to `end` [us] on a thread of the host or a stream of a GPU."""

    name: str
    category: str
    start: float
    end: float
    thread: Thread
    args: dict[str, Any]

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

    def launch_of(self, activity: Span) -> Span | None:
        """The call of the host that gave this to the GPU, where it was recorded."""
        return self.launches.get(activity.args.get("correlation"))

    def operator_id(self, activity: Span) -> int | None:
        """The id of the CPU operator behind a GPU activity.

        If none is known, older traces put the activity's correlation there: its launch must agree.
        """
        launch, known = self.launch_of(activity), activity.args.get("External id")
        return known if launch and launch.args.get("External id") == known else None


def read_trace(path: str | Path) -> Trace:
    """The spans of a trace file; UsageError if it is no trace."""
    content = _read_json(Path(path))
    gpu, launches, steps = [], {}, []
    host: dict[Thread, list[Span]] = defaultdict(list)
    for event in content["traceEvents"]:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category = event.get("cat")
        try:
            start, length = float(event["ts"]), float(event.get("dur", 0))
        except (KeyError, TypeError, ValueError, OverflowError):
            length = 0.0
            start = math.nan
        if not math.isfinite(start + length):
            raise UsageError(f"{path}: has an event without times: {str(event)[:80]}")
        _check_form(event, path)
        span = Span(
            printable(str(event.get("name", ""))),
            str(category).lower(),
            start,
            start + length,
            (event.get("pid"), event.get("tid")),
            event.get("args") or {},
        )
        if span.category.startswith("mtia"):
            raise UsageError(f"{path}: is of an MTIA device, whose kernels are not read")
        if span.category in GPU_CATEGORIES:
            gpu.append(span)
        elif span.category in LAUNCH_CATEGORIES:
            if "correlation" in span.args:
                launches[span.args["correlation"]] = span
        elif span.category in HOST_CATEGORIES:
            if span.name.startswith(STEP):
                steps.append(span)
            else:
                host[span.thread].append(span)
    if not gpu and not host:
        raise UsageError(f"{path}: holds no operators and no GPU kernels; is it a PyTorch trace?")
    for spans in host.values():
        # If two start together, the longer is the outer one.
        spans.sort(key=lambda s: (s.start, -s.end))
    gpu = _of_busiest_device(gpu)
    # By name alone: on ROCm the number of an activity's device is not the one in this list.
    listed = content.get("deviceProperties")
    names = {
        printable(d["name"])
        for d in (listed if isinstance(listed, list) else [])
        if isinstance(d, dict) and isinstance(d.get("name"), str)
    }
    return Trace(
        str(path),
        names.pop() if len(names) == 1 else None,
        sorted(gpu, key=lambda s: s.start),
        dict(host),
        launches,
        sorted(steps, key=lambda s: s.start),
    )


def _check_form(event: dict[str, Any], path: str | Path) -> None:
    """UsageError for an event with fields of a type that no reader could use."""
    args = event.get("args") or {}
    right = isinstance(args, dict) and isinstance(args.get("Input type", []), list)
    plain = [event.get("pid"), event.get("tid")]
    plain += [args.get(k) for k in ("device", "correlation", "stream")] if right else []
    if not right or not all(isinstance(value, str | int | float | None) for value in plain):
        raise UsageError(
            f"{path}: has an event of a form that torch.profiler does not write: {str(event)[:80]}"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        size = plain_file(path).stat().st_size
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as f:  # a JSON of events shrinks to a tenth or so
                data = f.read(most := 100 * size + 2**26)
                if f.read(1):
                    raise UsageError(
                        f"{path}: unpacks to over {most / 2**20:,.0f} MiB; no trace does"
                    )
        # Kineto does not escape everything that JSON wants escaped.
        content = json.loads(data.decode("utf-8", errors="replace"), strict=False)
    except (OSError, EOFError, gzip.zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON ({error}); was the trace cut off?") from None
    if isinstance(content, list):  # the format's other form: the events alone
        content = {"traceEvents": content}
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise UsageError(f"{path}: is JSON, but has no traceEvents; is it a PyTorch trace?")
    return content


def _of_busiest_device(gpu: list[Span]) -> list[Span]:
    """A process may touch other devices; its own is the one it keeps busy."""
    busy: dict[Any, float] = defaultdict(float)
    for span in gpu:
        busy[span.args.get("device")] += span.length
    return [s for s in gpu if s.args.get("device") == max(busy, key=busy.get)]


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
