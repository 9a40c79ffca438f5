"""The measured window of one rank: energy, memory, compilations and the device's own rate in it."""

import os
import platform
from collections import Counter
from pathlib import Path

import torch

from llm_train_bench.apply.compile import compile_counts
from llm_train_bench.measure.device import cpu_seconds, peak_memory, reset_peak_memory
from llm_train_bench.measure.matmul_rate import device_tflops, heat
from llm_train_bench.measure.memory import AllocatorRecord
from llm_train_bench.measure.power import PowerMeter
from llm_train_bench.measure.steps import StepLog
from llm_train_bench.parallel.ranks import Ranks, gather, meet
from llm_train_bench.results.figures import RankTimes, mean_part_times


class MeasuredWindow:
    """Opened before the first measured step and closed after the last, with an idle device.

    `history` keeps the allocator's history until the window opens, and then writes it to `pickle`.
    """

    def __init__(
        self, device: torch.device, ranks: Ranks, cuda_graphs: bool, pickle: Path, history: bool
    ):
        self.device, self.ranks, self.cuda_graphs = device, ranks, cuda_graphs
        cuda = device.type == "cuda"
        # PyTorch cannot tell everywhere.
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if cuda else None
        processes = gather(ranks, (platform.node(), os.getpid(), uuid and str(uuid)))
        family = {pid for host, pid, _ in processes if host == platform.node()}
        gpus = [(host, gpu) for host, _, gpu in processes if gpu]
        self.ranks_on_a_gpu = max(Counter(gpus).values(), default=1)
        self.power = PowerMeter(device, family)
        self.allocator = AllocatorRecord(pickle, history) if device.type == "cuda" else None
        self.probe_tflops = None
        self.disturbances: set[tuple[str, str]] = set()  # each with its advice
        reset_peak_memory(device)

    def open(self, heat_s: float, probe: bool = True) -> None:
        """The window begins, after so many seconds of matmuls; with several ranks all must come here.

        `probe` measures the device of each of several ranks by itself, which takes memory.
        """
        heat(self.device, heat_s)
        self.compiled_before = compile_counts()
        if self.allocator:
            self.allocator.stop()
        if probe and self.ranks.world > 1:
            self.probe_tflops = device_tflops(self.device)
        reset_peak_memory(self.device)
        meet(self.ranks)  # or the energy would include waiting for others
        self.power.begin()
        self.cpu_before = cpu_seconds()

    def close(self, log: StepLog) -> list[RankTimes]:
        """The window has ended: every rank's part of it, in order. All ranks must come here."""
        cpu, began = cpu_seconds(), self.cpu_before
        use = self.power.end(self.ranks.rank)
        log.drain()
        compiled = compile_counts() - self.compiled_before
        measured = log.of_phase("measure")
        times = RankTimes(
            rank=self.ranks.rank,
            host=platform.node(),
            step_times_s=[s.step_time_s for s in measured],
            part_means_s=mean_part_times(measured),
            device=use,
            memory=peak_memory(self.device),
            probe_tflops=self.probe_tflops,
            disturbances=self.disturbances,
            compile_s=compiled["seconds"],
            graphs_recorded=compiled["graphs_recorded_again"] if self.cuda_graphs else None,
            cpu_seconds=cpu and began and tuple(b - a for a, b in zip(began, cpu, strict=True)),
        )
        return gather(self.ranks, times)

    def release(self) -> None:
        """The run ends: stop the meters, whether the window was ever opened or closed."""
        self.power.close()
        if self.allocator:
            self.allocator.close()
