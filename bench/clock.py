"""Time stamps that do not stall the device: CUDA events on a GPU, the wall clock on a CPU."""

import time

import torch

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
        return not self.cuda or stamp.query()

    def seconds(self, start: Stamp, end: Stamp) -> float:
        """Seconds between two stamps that have passed."""
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start
