"""One run's directory and its result, whatever ends it."""

import contextlib
import datetime
import faulthandler
import os
import platform
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Self

import torch

from bench.apply.compile import compile_counts, uses_cuda_graphs
from bench.apply.fp8.base import Fp8
from bench.apply.precision import LossScaler
from bench.errors import CompileError, UsageError
from bench.formulas.flops import flops_per_token
from bench.measure.device import peak_memory, reset_peak_memory
from bench.measure.matmul_rate import device_tflops
from bench.measure.memory import AllocatorRecord
from bench.measure.power import PowerMeter
from bench.measure.steps import StepLog
from bench.parallel import ranks as dist
from bench.parallel.ranks import ALONE, Ranks
from bench.results.console import ProgressDisplay, print_header, print_result
from bench.results.figures import (
    RankTimes,
    fill_flop_metrics,
    fill_rank_metrics,
    fill_step_metrics,
    part_means,
)
from bench.results.result_files import ResultFile, StepsFile
from bench.results.schema import Batch
from bench.results.tensorboard import TensorBoardFile
from bench.run.failures import NO_CAUSE, classify, first_error, handled_by, keep_error, report
from bench.run.hang import HangWatch, patience
from bench.run.provenance import open_result
from bench.settings.flags import Args, total_steps
from model.config import ModelConfig


class Run:
    """The record of one run: `with Run(...) as run` leaves a result.json behind in every case.

    Entering makes the run's directory. Leaving by an exception writes what was measured until then
    with the status that fits, and lets the exception pass. Every rank has a Run; rank 0's writes.
    """

    def __init__(
        self,
        entrypoint: str,
        args: Args,
        config: ModelConfig,
        device: torch.device,
        batch: Batch,
        ranks: Ranks = ALONE,
        fp8: Fp8 | None = None,
    ):
        self.args, self.config, self.device, self.ranks = args, config, device, ranks
        self.fp8 = fp8 or Fp8()
        self.scaler = LossScaler(device) if args.amp == "fp16" else None
        self.result = open_result(
            entrypoint, args, config, device, batch, ranks.world, self.fp8.info
        )
        self.result.run_name = dist.broadcast(ranks, self.result.run_name)
        self.directory = Path(args.output_dir) / self.result.run_name

    def __enter__(self) -> Self:
        problem = None
        sinks = []
        if self.ranks.main:
            try:
                sinks = self._open_files()
            except UsageError as error:
                problem = str(error)
        if problem := dist.broadcast(self.ranks, problem):
            raise UsageError(problem)
        self.started = time.perf_counter()
        self.compiled_at_start = compile_counts()
        self.log = StepLog(self.device, total_steps(self.args), sinks)
        here = platform.node()
        others = dist.gather(self.ranks, (here, os.getpid()))
        self.power = PowerMeter(self.device, {pid for host, pid in others if host == here})
        self.probe_tflops = None
        self.allocator = None
        if self.device.type == "cuda":
            name = f"memory-rank{self.ranks.rank}.pickle" if self.ranks.rank else "memory.pickle"
            self.allocator = AllocatorRecord(self.directory / name, self.args.memory_snapshot)
        reset_peak_memory(self.device)
        self.hang, self.ending = None, threading.Lock()
        if self.ranks.world > 1:
            self.hang = HangWatch(
                self._end_hanging,
                patience(self.device, self.args.dist_timeout),
                dist.broken_group,
            )
        if self.ranks.main:
            self.file.write(self.result)
            print_header(self.result)
        return self

    def _open_files(self) -> list:
        args, batch = self.args, self.result.batch
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir()
            self.file = ResultFile(self.directory, total_steps(args))
            sinks = [StepsFile(self.directory / "steps.jsonl")]
        except FileExistsError as error:
            raise UsageError(
                f"{error.filename}: exists already; nothing was touched, choose another --run-name "
                "or --output-dir"
            ) from None
        except OSError as error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise UsageError(
                f"--output-dir {args.output_dir}: cannot be written: {error.strerror}; choose another"
            ) from None
        sinks.append(ProgressDisplay(total_steps(args)))
        if not args.no_tensorboard:
            sinks.append(
                TensorBoardFile(
                    self.directory / "tensorboard",
                    flops_per_token(self.config, batch.seq_len, False, args.pass_type),
                    self.result.device.peak_bf16_tflops,
                    self.result.device.count,
                    lambda: peak_memory(self.device),
                )
            )
            sinks[-1].describe(self.result)
        return sinks

    def set_traffic(self, moved: dict[str, int]) -> None:
        """Bytes that a step hands to collectives, by kind."""
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            setattr(self.result.metrics, f"{kind}_bytes", moved.get(kind, 0))

    def begin_micro_step(self, step: int) -> None:
        """The host begins a micro batch; those of the first two steps may compile for long."""
        if self.hang and step >= 2:
            self.hang.step()

    def end_steps(self) -> None:
        """What follows is no step, and may take long."""
        if self.hang:
            self.hang.rest()

    def begin_window(self) -> None:
        """The measured window starts; the device is idle."""
        warmup = sum(s.step_time_s for s in self.log.steps)
        self.result.metrics.setup_s = time.perf_counter() - self.started - warmup
        self.compiled_before = compile_counts()
        if self.allocator:
            self.allocator.stop()
        if self.ranks.world > 1:
            self.probe_tflops = device_tflops(self.device)
        reset_peak_memory(self.device)
        dist.meet(self.ranks)  # or the energy has the waiting for others in it
        self.power.begin()

    def end_window(self) -> None:
        """The measured window has ended; the device is idle. With several ranks all must come here."""
        device = self.power.end(self.ranks.rank)
        self.log.drain()
        before, after = self.compiled_before, compile_counts()
        recorded = after.graphs_recorded_again - before.graphs_recorded_again
        if self.device.type == "cpu" and self.ranks.local_rank and device.energy_j is not None:
            # The counter is the whole machine's; its first rank speaks for all.
            device = device.model_copy(update={"energy_j": 0.0, "average_power_w": None})
        measured = self.log.of_phase("measure")
        memory = peak_memory(self.device)
        times = RankTimes(
            self.ranks.rank, platform.node(), [s.step_time_s for s in measured],
            part_means(measured), device, memory, self.probe_tflops,
            compile_s=after.seconds - before.seconds,
            n_recompilations=after.recompilations - before.recompilations,
            graphs_recorded=recorded if uses_cuda_graphs(self.args, self.device) else None,
        )  # fmt: skip
        fill_rank_metrics(self.result, dist.gather(self.ranks, times))

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        when = time.time()
        if self.hang:
            self.hang.close()
        # While the result is written, a second Ctrl-C must not cut it off.
        with handled_by(signal.SIG_IGN):
            self.power.close()
            if self.allocator:
                self.allocator.close()
            if error is not None and (self.ranks.world > 1 or isinstance(error, CompileError)):
                keep_error(self.directory, self.ranks.rank, error)
            if self.ranks.main:
                with self.ending:
                    self._finish(error, when)

    def _end_hanging(self, error: BaseException, when: float) -> None:
        """In another thread: the main one waits for a rank that will not come."""
        if not self.ending.acquire(blocking=False):
            return
        # Whatever the driver is asked may hang as well; that much later this is over anyhow.
        faulthandler.dump_traceback_later(30, exit=True)
        try:
            keep_error(self.directory, self.ranks.rank, error)
            if self.ranks.main:
                self.result.status, self.result.error = self._ending(error, when)
                self.file.write(self.result)
            with contextlib.suppress(OSError):  # a terminal that is gone
                report(error, self.result.entrypoint, self.ranks)
            if self.ranks.main:
                self._finish(error, when)
        finally:
            os._exit(1)

    def _ending(self, error: BaseException | None, when: float) -> tuple[str, str | None]:
        """Status and error of the run; `when` it ended, since what failed after that is no cause."""
        status, text = classify(error)
        # A rank that lost another, or is ended by their agent, is not what went wrong.
        interrupted = status == "interrupted"
        if text and (text.startswith(NO_CAUSE) or interrupted):
            status, text = first_error(self.directory, when, interrupted) or (status, text)
        return status, text

    def _finish(self, error: BaseException | None, when: float) -> None:
        r, m = self.result, self.result.metrics
        r.status, r.error = self._ending(error, when)
        with contextlib.suppress(Exception):  # a second failure must not hide the first
            self.log.drain()
        fill_step_metrics(r, self.log.of_phase("warmup"), self.log.of_phase("measure"))
        fill_flop_metrics(r, self.config)
        m.energy_source = self.power.source
        if self.args.pt_compile:
            counts, before = compile_counts(), self.compiled_at_start
            m.compile_s = counts.seconds - before.seconds
            m.n_compiled_graphs = counts.graphs - before.graphs
            m.n_graph_breaks = counts.graph_breaks - before.graph_breaks
            m.n_recompilations = max(0, counts.recompilations - before.recompilations)
            refused = counts.graphs_refused - before.graphs_refused
            if refused and uses_cuda_graphs(self.args, self.device):
                r.notes.append(
                    f"{refused} compiled graphs run without CUDA graphs, which PyTorch refused for them; "
                    "TORCH_LOGS=cudagraphs says why"
                )
        if r.profile and m.step_time_median_s:
            r.profile.slowdown = r.profile.step_time_s / m.step_time_median_s
        if self.scaler is not None and (error is None or self.device.type == "cpu"):
            with contextlib.suppress(Exception):  # the device may be what failed
                m.skipped_steps = int(self.scaler.skipped)
        if m.peak_allocated_gib is None and m.peak_rss_gib is None:
            with contextlib.suppress(Exception):
                for key, value in peak_memory(self.device).items():
                    setattr(m, key, value)
        r.ended_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        for sink in self.log.sinks:
            with contextlib.suppress(Exception):
                if isinstance(sink, TensorBoardFile):
                    sink.conclude(r)
            with contextlib.suppress(Exception):
                sink.close()
        self.file.write(r, last=True)
        if error is None:
            print_result(r)
        print(f"{r.status}: {self.file.path}", file=sys.stderr, flush=True)
