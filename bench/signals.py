"""What Ctrl-C and SIGTERM do meanwhile. Needs nothing but Python."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def handled_by(handler) -> Iterator[None]:
    """SIGINT and SIGTERM go to this handler in here, or are ignored by signal.SIG_IGN.

    Only in the main thread, where Python's handlers run.
    """
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """They take effect only afterwards."""
    arrived: list[int] = []
    try:
        with handled_by(lambda number, frame: arrived.append(number)):
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)
