"""Ending a rank that hangs in a collective: there it runs no Python, and so no signal handler.

A rank that waits on a GPU for a peer that is gone would else be killed by its agent half a minute after
SIGTERM, or aborted by NCCL's own watchdog, without a word in its result.
"""

import select
import signal
import socket
import threading
import time
from collections.abc import Callable

from bench.errors import Interrupted


class HangWatch:
    """Calls `end` from a thread, with an error and when it began (`time.time()`), where the main
    thread does not react to a signal, or has begun no step for `timeout_s`.

    Python's own C handler tells of a signal at once through a socket (signal.set_wakeup_fd), whatever
    the main thread does. Must be made in the main thread.
    """

    PATIENCE_S = 5.0  # torchrun's agent kills after 30

    def __init__(self, end: Callable[[BaseException, float], None], timeout_s: float | None):
        self.end, self.timeout_s = end, timeout_s
        self.last_step: float | None = None
        self.reacted = threading.Event()
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while not self._over():
            left = 1.0
            if self.timeout_s and self.last_step is not None:
                left = self.last_step + self.timeout_s - time.monotonic()
            if select.select([self.receiver], [], [], max(0.0, left))[0]:
                received = self.receiver.recv(1)
                number = received[0] if received else None
                if number in (signal.SIGINT, signal.SIGTERM):
                    when = time.time()
                    if not self.reacted.wait(self.PATIENCE_S):
                        self.end(Interrupted(signal.Signals(number).name), when)
                if number in (None, signal.SIGINT, signal.SIGTERM):
                    break
        self.receiver.close()

    def _over(self) -> bool:
        """Whether the time for a step is over; then the run ends here."""
        if not self.timeout_s or self.last_step is None:
            return False
        if time.monotonic() < self.last_step + self.timeout_s:
            return False
        why = f"Timed out waiting for other ranks: no step in {self.timeout_s:g} s"
        self.end(RuntimeError(why), time.time())
        return True

    def step(self) -> None:
        """A step begins: from now on the next must follow in time."""
        self.last_step = time.monotonic()

    def rest(self) -> None:
        """The steps are over: what follows may take as long as it does."""
        self.last_step = None

    def close(self) -> None:
        """The main thread has reacted, or there is nothing more to watch."""
        self.reacted.set()
        self.rest()
        signal.set_wakeup_fd(self.before)
        self.sender.close()  # the thread then reads the end
