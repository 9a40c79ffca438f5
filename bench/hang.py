"""Ending a rank that hangs in a collective: there it runs no Python, and so no signal handler.

A rank that waits on a GPU for a peer that is gone would else be killed by its agent half a minute
after SIGTERM, without a word in its result.
"""

import signal
import socket
import threading
import time
from collections.abc import Callable


class HangWatch:
    """Calls `end` with the signal that came and when, from a thread, where the main thread does not
    react.

    Python's own C handler tells of a signal at once through a socket (signal.set_wakeup_fd), whatever
    the main thread does. Must be made in the main thread.
    """

    PATIENCE_S = 5.0  # torchrun's agent kills after 30

    def __init__(self, end: Callable[[signal.Signals, float], None]):
        self.end = end
        self.reacted = threading.Event()
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while number := self.receiver.recv(1):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                when = time.time()
                if not self.reacted.wait(self.PATIENCE_S):
                    self.end(signal.Signals(number[0]), when)
                break
        self.receiver.close()

    def close(self) -> None:
        """The main thread has reacted, or there is nothing more to watch."""
        self.reacted.set()
        signal.set_wakeup_fd(self.before)
        self.sender.close()  # the thread then reads the end
