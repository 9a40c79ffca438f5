"""Signals: which ask a run to end or to save, and who handles them when."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llm_train_bench.base.start import early_stop_request, orphaned

from llm_train_bench.base import start
from llm_train_bench.base.errors import Interrupted
from llm_train_bench.parallel.ranks import ALONE, Ranks
from llm_train_bench.run.failures import has_parent, report

# What a launcher of ours sends its ranks when it gets a second signal.
SECOND = signal.SIGUSR2
# Signals that ask a run to end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, SECOND)
# Signals that ask for a save, and then the end.
SAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
Handler = Callable[[int, object], None] | signal.Handlers


@contextlib.contextmanager
def handled_by(handler: Handler, numbers: Sequence[int] = ENDING) -> Iterator[dict[int, Any]]:
    """Give these signals to a handler inside the block; yields the handlers before, which come back.

    Signals that are ignored stay so, as under nohup: whoever started this wants it. A handler that the
    block sets for a signal stays. Nothing happens outside the main thread, where Python's handlers run.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if main else {}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, old in before.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, old)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """ENDING's signals act only after the block."""
    arrived: list[int] = []
    try:
        with handled_by(lambda number, frame: arrived.append(number)):
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


@contextlib.contextmanager
def end_of_process(stop: Callable[[BaseException | None], None]) -> Iterator[None]:
    """If this process ends inside the block, call `stop` first with the error that ends it, if any.

    SIGTERM and SIGHUP end it, unless the program handles them.
    """
    last_error = getattr(sys, "last_value", None)  # in a notebook, of an earlier cell

    def at_exit() -> None:
        error = getattr(sys, "last_value", None)
        stop(None if error is last_error else error)

    def at_signal(number: int, frame: object) -> None:
        stop(Interrupted(signal.Signals(number).name))
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    ends = (signal.SIGTERM, signal.SIGHUP)
    atexit.register(at_exit)
    try:
        with handled_by(at_signal, [n for n in ends if signal.getsignal(n) is signal.SIG_DFL]):
            yield
    finally:
        atexit.unregister(at_exit)


def ignore(numbers: Sequence[int]) -> None:
    """Nothing may cut the ending off that follows."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def end_at_first(number: int, frame: object) -> None:
    """A handler: the first signal that asks for an end counts, and later ones are ignored.

    The terminal interrupts a rank; then its agent interrupts it again, to end the ranks it started.
    """
    ignore(ENDING)
    raise KeyboardInterrupt() if number == signal.SIGINT else Interrupted(signal_said(number))


def signal_said(number: int) -> str:
    """What a signal means to this process: its name, or why its launcher sent it."""
    if number == signal.SIGTERM and orphaned():
        return "the end of its launcher"
    return "a second signal" if number == SECOND and has_parent() else signal.Signals(number).name


class Heard:
    """The signals of a process: the first, and whether another one is a second wish.

    A launcher that is signalled together with its ranks sends them the same once more.
    """

    COPY_S, AT_ONCE_S = 3.0, 0.2

    def __init__(self, early: int | None = None):
        self.first: float | None = None
        self.copied = "TORCHELASTIC_RUN_ID" not in os.environ
        if early:
            self.again(early)

    def again(self, number: int) -> bool:
        """Count a signal; whether it is neither the first nor its copy."""
        now = time.monotonic()
        if self.first is None or now < self.first + self.AT_ONCE_S:  # timeout(1) sends it twice
            self.first = now if self.first is None else self.first
            return False
        copied, self.copied = self.copied, True
        return copied or number == SECOND or now > self.first + self.COPY_S


class StopRequest:
    """The first signal that asks this process to save and to stop, in `number`; None until it comes."""

    number: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, that signal is only noted. Another one does what it did before."""
        self.number = early_stop_request()
        heard = Heard(self.number)

        def note(number: int, frame) -> None:
            if not heard.again(number):
                self.number = self.number or number
            elif callable(handler := before[number]):
                handler(number, frame)

        with handled_by(note, SAVING) as before:
            yield


def guarded(body: Callable[[], int | None], prog: str, ranks: Ranks = ALONE) -> int:
    """The exit code of `body`; whatever happens in it becomes one line and a code (failures.Ending)."""
    start.imported()
    code = None
    try:
        with handled_by(end_at_first):
            try:
                code = body() or 0
            except (Exception, KeyboardInterrupt, Interrupted) as error:
                code = report_ending(error, prog, ranks)
    # As the handlers are set or taken away, or before the report of an error.
    except (KeyboardInterrupt, Interrupted) as late:
        code = report_ending(late.__context__ or late, prog, ranks) if code is None else code
    if start.is_script():  # a process group of lost ranks, or a save that was given up, would wait
        sys.stdout.flush()
        os._exit(code)
    return code


def report_ending(error: BaseException, prog: str, ranks: Ranks) -> int:
    """Report an error; the exit code. The agent ends this rank too when another one has failed."""
    with handled_by(signal.SIG_IGN):
        return report(error, prog, ranks)
