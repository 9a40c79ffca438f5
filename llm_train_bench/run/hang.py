"""Ending a rank that hangs in a collective: there it runs no Python, and so no signal handler."""

import math
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from llm_train_bench.base.errors import Interrupted, RunFailed
from llm_train_bench.run.failures import LOST
from llm_train_bench.run.signals import ENDING, Heard, signal_said

End = Callable[[BaseException, float], None]


class HangWatch:
    """Calls `end` from a thread, with an error and its time, if the main thread hangs.

    It hangs if a step lasts too long. It also hangs if it does not call `close` soon after a signal, or
    after `broken` reports an error of the collectives. Make this in the main thread.
    """

    PATIENCE_S = 3.0
    save_s = 0.0  # what the first signal leaves the main thread besides, to save
    limit_s = limit = math.inf

    def __init__(self, end: End, broken: Callable[[], str | None] = lambda: None):
        self.end, self.broken = end, broken
        # Python's own C handler tells of a signal at once, whatever the main thread does.
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()

    def allow(self, seconds: float) -> None:
        """The next step must begin, or the last one end, within so many seconds from now."""
        self.limit_s, self.limit = seconds, time.monotonic() + seconds

    def close(self) -> None:
        """The main thread has reacted, or there is nothing more to watch."""
        signal.set_wakeup_fd(self.before)
        self.sender.close()

    def _watch(self) -> None:
        heard, deadline, error, when = Heard(), math.inf, None, 0.0
        while error is None or time.monotonic() < deadline:
            ready, _, _ = select.select([self.receiver], [], [], min(1.0, self.PATIENCE_S))
            number = int.from_bytes(self.receiver.recv(1)) if ready else -1
            now, found, wait_s = time.monotonic(), None, self.PATIENCE_S
            if number == 0:  # closed
                return
            if number in ENDING:
                found = Interrupted(signal_said(number))
                wait_s += 0.0 if heard.again(number) else self.save_s
            elif now > self.limit:
                text = f"no step in {self.limit_s:g} s: waits for a rank that is gone"
                found, wait_s = RunFailed(f"{text}, or is stuck itself"), 0.0
            elif why := self.broken():
                found = RunFailed(f"{LOST}: NCCL reports {why}")
            if found and now + wait_s < deadline:
                deadline, error, when = now + wait_s, found, time.time()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        error.add_note("the main thread is in\n" + "".join(traceback.format_stack(frame)))
        self.end(error, when)
