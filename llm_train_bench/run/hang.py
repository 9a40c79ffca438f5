"""Ending a rank that hangs in a collective: there it runs no Python, and so no signal handler.

Otherwise a rank that waits on a GPU for a lost peer would be killed by its agent half a minute
after SIGTERM, or aborted by NCCL's own watchdog. Its result would say nothing.
"""

import math
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from llm_train_bench.base.errors import Interrupted, NoStep
from llm_train_bench.run.failures import LOST
from llm_train_bench.run.signals import ENDING, Heard, signal_said


class HangWatch:
    """Calls `end` from a thread if the main thread hangs, with an error and its time (`time.time()`).

    The main thread hangs if a step lasts too long. It also hangs if it does not call `close` soon after
    a signal, or soon after `broken` reports an error of the collectives. Make this in the main thread.
    """

    PATIENCE_S = 3.0  # torchrun's agent kills after 30

    def __init__(
        self,
        end: Callable[[BaseException, float], None],
        broken: Callable[[], str | None] = lambda: None,
    ):
        self.end, self.broken = end, broken
        self.save_s = 0.0  # what the first signal leaves the main thread besides, to save
        self.allow(math.inf)
        self.over = threading.Event()  # the main thread has reacted, or is being ended
        # Python's own C handler tells of a signal at once, whatever the main thread does.
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()

    def allow(self, seconds: float) -> None:
        """The next step must begin, or the last one end, within so many seconds from now."""
        self.limit_s = seconds
        self.limit = time.monotonic() + seconds

    def _watch(self) -> None:
        heard = Heard()
        with self.receiver:
            while not self.over.is_set():
                ready, _, _ = select.select([self.receiver], [], [], 1.0)
                number = int.from_bytes(self.receiver.recv(1)) if ready else 0
                if number in ENDING:
                    save_s = 0.0 if heard.again(number) else self.save_s
                    error = Interrupted(signal_said(number))
                    self._end_after(self.PATIENCE_S + save_s, error)
                elif time.monotonic() > self.limit:
                    text = f"no step in {self.limit_s:g} s: waits for a rank that is gone"
                    self._end_after(0.0, NoStep(f"{text}, or is stuck itself"))
                    break
                elif why := self.broken():
                    self._end_after(self.PATIENCE_S, NoStep(f"{LOST}: NCCL reports {why}"))
                    break

    def _end_after(self, seconds: float, error: BaseException) -> None:
        """Unless the main thread has reacted by then, end with this error and that thread's stack."""
        when = time.time()

        def wait() -> None:
            if not self.over.wait(seconds):
                self.over.set()
                frame = sys._current_frames().get(threading.main_thread().ident or 0)
                error.add_note("the main thread is in\n" + "".join(traceback.format_stack(frame)))
                self.end(error, when)

        threading.Thread(target=wait, daemon=True).start()

    def close(self) -> None:
        """The main thread has reacted, or there is nothing more to watch."""
        self.over.set()
        signal.set_wakeup_fd(self.before)
        self.sender.close()
