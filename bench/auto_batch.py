"""The largest micro batch that runs, found by trying. Needs no torch."""

from collections.abc import Callable


def search_batch(runs: Callable[[int], bool], first: int, closeness: float = 0.03) -> int:
    """The largest size for which `runs(size)` is true, up to `closeness`; 0 if not even 1 is.

    Starts at `first` (an estimate), goes up by a quarter, then by more, or down by half until it has one
    that runs and one that does not, and halves between them.
    """
    size, good, bad, growth = max(1, first), 0, None, 0.25
    while True:
        if runs(size):
            good = size
            if bad is not None and bad - good <= max(1, closeness * good):
                return good
            size = good + max(1, int(good * growth)) if bad is None else (good + bad) // 2
            growth = min(1.0, 2 * growth)
        else:
            bad = size
            if bad == 1 or bad - good <= 1:
                return good
            if good and bad - good <= closeness * good:
                return good
            size = (good + bad) // 2 if good else max(1, bad // 2)
