"""Times and values of each step, read without making the device wait.

The end of one step is the start of the next, so that the step times of a window add up to the window.
"""

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from llm_train_bench.formulas.work import STEP_PARTS
from llm_train_bench.results.result_files import Step

Stamp = torch.cuda.Event | float


class Clock:
    """Makes stamps in stream order and reads the time between two of them once they have passed."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def stamp(self) -> Stamp:
        """Now, as the device sees it: after all work given to it so far."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, stamp: Stamp) -> bool:
        """Whether the device has reached a stamp; asks without waiting."""
        return isinstance(stamp, float) or stamp.query()

    def seconds(self, start: Stamp, end: Stamp) -> float:
        """Seconds between two stamps that have passed."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return start.elapsed_time(end) / 1e3
        return cast(float, end) - cast(float, start)


@dataclasses.dataclass
class _Pending:
    step: int
    phase: str
    lr: float
    tokens: int
    marks: list[tuple[str, Stamp]]
    values: Tensor  # loss, gradient norm and wish, on the CPU once the last mark has passed
    at: float
    compile_s: float
    paused: bool = False


class StepLog:
    """Collects stamps and values during the loop, and hands on finished steps now and then."""

    # Steps are handed on no more often than this, so that files and screen cost the loop nothing.
    INTERVAL_S = 1.0

    def __init__(
        self,
        device: torch.device,
        n_steps: int,
        sinks: list[Callable[[list[Step]], None]],
        guard: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        compile_s: Callable[[], float] = lambda: 0.0,
    ):
        """`guard` is the context in which the main thread hands steps on: all sinks or none get them.

        `compile_s` tells the seconds of compilation so far; it is asked outside of the window.
        """
        self.compile_s, self.compiled_s = compile_s, compile_s()
        self.guard = guard
        self.clock = Clock(device)
        self.device = device
        self.sinks = sinks
        self.steps: list[Step] = []
        self.pending: deque[_Pending] = deque()
        self.marks: list[tuple[str, Stamp]] = []
        self.last_drain = 0.0
        # How a part of a step is marked while someone looks: functions from its name to a context.
        self.watchers: list[Callable[[str], contextlib.AbstractContextManager]] = []
        # Allocated once: pinning memory is slow, and would happen inside the window.
        self.values = torch.zeros(n_steps, 3, pin_memory=device.type == "cuda")

    def start(self) -> None:
        """Stamp the start of the first step after a pause."""
        self.marks = [("start", self.clock.stamp())]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One of the STEP_PARTS: stamps its end, and draws it as a range while a profiler looks."""
        with self.watched(name):
            yield
        self.mark(name)

    def watched(self, name: str) -> contextlib.AbstractContextManager:
        """The context of a part of a step for those who look at it; the first began to look first."""
        if not self.watchers:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for watcher in self.watchers:
            stack.enter_context(watcher(name))
        return stack

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to this part."""
        self.marks.append((part, self.clock.stamp()))

    def finish(
        self,
        step: int,
        phase: str,
        lr: float,
        tokens: int,
        loss: Tensor,
        grad_norm: Tensor | None,
        wish: Tensor | None = None,
    ) -> None:
        """End the step: send its values to the CPU without waiting, and hand on what has passed."""
        # If gradients are offloaded to the CPU, their norm is there too.
        norm = loss.new_full((), -1.0) if grad_norm is None else grad_norm.to(loss.device)
        on_device = torch.stack((loss, norm) if wish is None else (loss, norm, wish))
        values = self.values[step, : len(on_device)]
        values.copy_(on_device, non_blocking=True)
        self.mark("optimizer")
        compiled_s, before = self.compiled_s, self.compiled_s
        if phase != "measure":
            self.compiled_s = compiled_s = self.compile_s()
        self.pending.append(
            _Pending(step, phase, lr, tokens, self.marks, values, time.time(), compiled_s - before)
        )
        self.marks = self.marks[-1:]
        if time.perf_counter() - self.last_drain > self.INTERVAL_S:
            self.drain(kept=1)

    def wish_of(self, step: int) -> float:
        """The wish of an earlier step, once the device has finished it."""
        for pending in self.pending:
            if pending.step == step and not self.clock.passed(pending.marks[-1][1]):
                cast(torch.cuda.Event, pending.marks[-1][1]).synchronize()
        return self.values[step, 2].item()

    def pause(self) -> None:
        """A save follows the last step, which the device has finished: hand on all steps.

        The time until `start` belongs to no step.
        """
        if self.pending:
            self.pending[-1].paused = True
        elif self.steps:  # before the window's first step
            self.steps[-1] = dataclasses.replace(self.steps[-1], saved=True)
        self.drain()

    def drain(self, kept: int = 0) -> None:
        """Hand on the steps that the device has finished; not the last one if that is `kept`."""
        self.last_drain = time.perf_counter()
        # A step goes to all sinks or none. Python's signal handlers run in the main thread alone.
        main = threading.current_thread() is threading.main_thread()
        with self.guard() if main else contextlib.nullcontext():
            finished = []
            while len(self.pending) > kept and self.clock.passed(self.pending[0].marks[-1][1]):
                finished.append(self._read(self.pending.popleft()))
            if finished:
                self.steps += finished
                for sink in self.sinks:
                    sink(finished)

    def _read(self, pending: _Pending) -> Step:
        parts: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)
        for (_, begin), (part, end) in zip(pending.marks, pending.marks[1:], strict=False):
            parts[part] += self.clock.seconds(begin, end)
        # A micro batch ends with its backward, or its forward where there is none.
        ends = [stamp for part, stamp in pending.marks if part == "backward"]
        ends = ends or [stamp for part, stamp in pending.marks if part == "forward"]
        begins = [pending.marks[0][1], *ends]
        micro = [self.clock.seconds(*ab) for ab in zip(begins, ends, strict=False)]
        loss, grad_norm, *_ = pending.values.tolist()
        return Step(
            step=pending.step,
            phase=pending.phase,
            loss=loss,
            lr=pending.lr,
            grad_norm=None if grad_norm == -1.0 else grad_norm,
            step_time_s=self.clock.seconds(pending.marks[0][1], pending.marks[-1][1]),
            tokens=pending.tokens,
            saved=pending.paused,
            at=round(pending.at, 6),
            compile_s=pending.compile_s,
            micro_batch_times_s=tuple(micro) if len(micro) > 1 else (),
            **{f"{part}_time_s": seconds for part, seconds in parts.items()},
        )

    def of_phase(self, phase: str) -> list[Step]:
        """Finished steps of `warmup` or `measure`."""
        return [step for step in self.steps if step.phase == phase]
