"""Ending a rank that hangs in a collective: there it runs no Python, and so no signal handler.

Otherwise a rank that waits on a GPU for a lost peer would be killed by its agent half a minute
after SIGTERM, or aborted by NCCL's own watchdog. Its result would say nothing.
"""

import faulthandler
import math
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch

from llm_train_bench.base.errors import Interrupted, NoStep
from llm_train_bench.run.failures import LOST
from llm_train_bench.run.signals import ENDING, Heard, signal_said


def patience(device: torch.device, timeout_s: float) -> float | None:
    """Seconds without a step until a rank ends itself: sooner than NCCL, which says nothing.

    None on a CPU, where the collectives themselves notice, and raise.
    """
    return timeout_s if device.type == "cuda" else None


class HangWatch:
    """Calls `end` from a thread, with an error and when it began (`time.time()`), if the main
    thread hangs: it ignores a signal or what `broken` says of the collectives, or begins no step
    for `timeout_s`.

    Python's own C handler tells of a signal at once through a socket (signal.set_wakeup_fd),
    whatever the main thread does. Must be made in the main thread. If that hangs and lets no other
    thread run, the process ends with a traceback, a tenth of `timeout_s` and ten seconds later.
    """

    PATIENCE_S = 3.0  # torchrun's agent kills after 30

    def __init__(
        self,
        end: Callable[[BaseException, float], None],
        timeout_s: float | None,
        broken: Callable[[], str | None] = lambda: None,
    ):
        self.end, self.timeout_s, self.broken = end, timeout_s or math.inf, broken
        self.last_step: float | None = None
        self.armed = -1.0  # when the last resort was last put off
        self.reacted = threading.Event()
        # Seconds that the first signal leaves the main thread: it saves before it ends.
        self.spared: float | None = None
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        heard, first, until = Heard(), 0, math.inf  # the main thread may save and end until then
        timed = self.timeout_s < math.inf
        while True:
            last, now = self.last_step, time.monotonic()
            left = math.inf if last is None else max(0.0, last + self.timeout_s - now)
            asleep = min(left, 1.0) if timed or first else None
            ready = select.select([self.receiver], [], [], asleep)[0]
            late = time.monotonic() > until
            if ready or late:
                number = int.from_bytes(self.receiver.recv(1)) if ready else first
                if number in ENDING and self.spared is not None and not late:
                    again = heard.again(number)
                    if not first:
                        first, until = number, time.monotonic() + self.spared
                    if not again:
                        continue
                if number in ENDING:
                    self._end_unless_reacted(Interrupted(signal_said(number)))
                if number in (0, *ENDING):  # 0: the watch is closed
                    break
            elif left == 0.0 and last == self.last_step:
                text = f"no step in {self.timeout_s:g} s: waits for a rank that is gone"
                self.end(self._waiting(f"{text}, or is stuck itself"), time.time())
                break
            elif timed and (why := self.broken()):
                self._end_unless_reacted(self._waiting(f"{LOST}: NCCL reports {why}"))
                break
        self.receiver.close()

    def _end_unless_reacted(self, error: BaseException) -> None:
        when = time.time()
        if not self.reacted.wait(self.PATIENCE_S):
            self.end(error, when)

    def _waiting(self, text: str) -> NoStep:
        """The error of a waiting rank, with its main thread's stack."""
        error = NoStep(text)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        error.add_note("the main thread is in\n" + "".join(traceback.format_stack(frame)))
        return error

    def step(self) -> None:
        """A step, or a part of it, begins: from now on the next must follow in time."""
        if self.timeout_s == math.inf:
            return
        self.last_step = now = time.monotonic()
        if now > self.armed + 1.0:  # not for every one: it starts a thread, outside of Python
            self.armed = now
            faulthandler.dump_traceback_later(1.1 * self.timeout_s + 10.0, exit=True)

    def rest(self) -> None:
        """From now on there is no time limit."""
        if self.last_step is not None:
            self.last_step, self.armed = None, -1.0
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """The main thread has reacted, or there is nothing more to watch."""
        self.reacted.set()
        self.rest()
        signal.set_wakeup_fd(self.before)
        self.sender.close()  # the thread then reads the end
