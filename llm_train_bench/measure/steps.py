"""Times and values of each step, read without making the device wait.

The end of one step is the start of the next, so that the step times of a window add up to the window.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from llm_train_bench.formulas.work import STEP_PARTS
from llm_train_bench.results.result_files import Step, wall_clock

Stamp = torch.cuda.Event | float
# What is left of a step in a loop of others, besides the parts that it marks.
REST = "rest"


def _stamp(device: torch.device) -> Stamp:
    """Now, as the device sees it: after all work given to it so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Stamp, end: Stamp) -> float:
    """Seconds between two stamps that have passed."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3
    return cast(float, end) - cast(float, start)


@dataclasses.dataclass
class _Pending:
    known: dict[str, Any]  # the fields of its Step that the host knows
    marks: list[tuple[str, Stamp]]

    @property
    def end(self) -> Stamp:
        return self.marks[-1][1]

    def passed(self) -> bool:
        """Whether the device has finished the step; asks without waiting."""
        return self.end.query() if isinstance(self.end, torch.cuda.Event) else True


class StepLog:
    """Collects stamps and values during the loop, and hands on finished steps now and then."""

    # Steps are handed on no more often than this, so that files and screen cost the loop nothing.
    INTERVAL_S = 2.0

    def __init__(
        self,
        device: torch.device,
        n_steps: int,
        sinks: list[Callable[[list[Step]], None]],
        guard: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        compile_s: Callable[[], float] = lambda: 0.0,
    ):
        """`guard` is the context in which the main thread hands steps on: all sinks or none get them.

        `compile_s` returns the seconds of compilation so far; it is not called inside the window.
        """
        self.compile_s, self.compiled_s = compile_s, compile_s()
        self.device, self.sinks, self.guard = device, sinks, guard
        self.steps: list[Step] = []
        self.pending: deque[_Pending] = deque()
        self.marks: list[tuple[str, Stamp]] = []
        self.last_drain = -math.inf
        # Functions from a part's name to a context, in which the part then runs.
        self.watchers: list[Callable[[str], contextlib.AbstractContextManager]] = []
        # By step the gradient norm, the loss and the stop request, once the step has passed. Allocated
        # once: pinning memory is slow, and would happen inside the window.
        self.values = torch.zeros(n_steps, 3, pin_memory=device.type == "cuda")

    def start(self) -> None:
        """Stamp the start of the first step after a pause."""
        self.marks = [("start", _stamp(self.device))]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One of the STEP_PARTS: stamps its end, and runs it in the watchers' contexts."""
        with self.watched(name):
            yield
        self.mark(name)

    def watched(self, name: str) -> contextlib.AbstractContextManager:
        """The context of a part of a step for all watchers, the oldest first."""
        stack = contextlib.ExitStack()
        for watcher in self.watchers:
            stack.enter_context(watcher(name))
        return stack

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to this part."""
        self.marks.append((part, _stamp(self.device)))

    def finish(
        self,
        step: int,
        phase: str,
        lr: float | None,
        tokens: int,
        values: Tensor | float | None,
        norm: Tensor | None = None,
        last: str = "optimizer",
    ) -> None:
        """End the step: send its values to the CPU without waiting, and hand on what has passed.

        `values` are the loss and, if the run saves, the stop request; a loss that the host knows may be a
        number. None where they are unknown.
        `norm` is the gradient's. `last` is the part that ends here; REST says that the step's parts are
        unknown, except those that were marked.
        """
        if isinstance(values, Tensor):
            begin, end = 1, 1 + len(values)
            if norm is not None:
                # If gradients are offloaded to the CPU, their norm is there too.
                begin, values = 0, torch.cat((norm[None].to(values.device), values))
            self.values[step, begin:end].copy_(values, non_blocking=True)
        self.mark(last)
        known: dict[str, Any] = {"step": step, "phase": phase, "lr": lr, "tokens": tokens}
        known["at"] = round(wall_clock(), 6)
        if not isinstance(values, Tensor):
            known["loss"] = values
        if norm is None:
            known["grad_norm"] = None
        if phase != "measure":
            before, self.compiled_s = self.compiled_s, self.compile_s()
            known["compile_s"] = self.compiled_s - before
        self.pending.append(_Pending(known, self.marks))
        self.marks = self.marks[-1:]
        if time.perf_counter() - self.last_drain > self.INTERVAL_S:
            self.drain(keep=1)

    def stop_of(self, step: int) -> bool:
        """Whether a rank asked to stop in an earlier step, once the device has finished that."""
        for pending in self.pending:
            if pending.known["step"] == step and isinstance(pending.end, torch.cuda.Event):
                pending.end.synchronize()
        return self.values[step, 2].item() > 0

    def pause(self) -> None:
        """A save follows the last step, which the device has finished: hand on all steps.

        The time until `start` belongs to no step.
        """
        if self.pending:
            self.pending[-1].known["saved"] = True
        self.drain()

    def drain(self, keep: int = 0) -> None:
        """Hand on the steps that the device has finished, except the last `keep`."""
        self.last_drain = time.perf_counter()
        # A step goes to all sinks or none. Python's signal handlers run only in the main thread.
        main = threading.current_thread() is threading.main_thread()
        with self.guard() if main else contextlib.nullcontext():
            finished = []
            while len(self.pending) > keep and self.pending[0].passed():
                finished.append(self._read(self.pending.popleft()))
            if finished:
                self.steps += finished
                for sink in self.sinks:
                    sink(finished)

    def _read(self, pending: _Pending) -> Step:
        unknown = None if pending.marks[-1][0] == REST else 0.0
        parts: dict[str, Any] = dict.fromkeys(STEP_PARTS, unknown)
        parts |= {"data": 0.0, "idle": 0.0, REST: 0.0}
        for (_, begin), (part, end) in zip(pending.marks, pending.marks[1:], strict=False):
            parts[part] = (parts[part] or 0.0) + _seconds(begin, end)
        del parts[REST]
        # A micro batch ends with its backward, or its forward where there is none.
        ends = [stamp for part, stamp in pending.marks if part == "backward"]
        ends = ends or [stamp for part, stamp in pending.marks if part == "forward"]
        begins = [pending.marks[0][1], *ends]
        micro = [_seconds(begin, end) for begin, end in zip(begins, ends, strict=False)]
        read = self.values[pending.known["step"]].tolist()
        return Step(
            **{"grad_norm": read[0], "loss": read[1]} | pending.known,
            step_time_s=_seconds(pending.marks[0][1], pending.end),
            micro_batch_times_s=tuple(micro) if len(micro) > 1 else (),
            **{f"{part}_time_s": seconds for part, seconds in parts.items()},
        )

    def of_phase(self, phase: str) -> list[Step]:
        """Finished steps of `warmup` or `measure`."""
        return [step for step in self.steps if step.phase == phase]
