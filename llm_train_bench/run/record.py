"""The record of one run on one rank: its files, its step log and its window, whatever ends it."""

import contextlib
import importlib.util
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch

from llm_train_bench.apply.compile import compile_counts
from llm_train_bench.base.errors import CompileError, UsageError
from llm_train_bench.base.files import how_to_install
from llm_train_bench.measure.device import peak_memory, synchronize
from llm_train_bench.measure.steps import StepLog
from llm_train_bench.parallel.ranks import Ranks, meet, on_main
from llm_train_bench.results.console import ProgressDisplay, print_result, say
from llm_train_bench.results.figures import fill_rank_metrics, fill_step_metrics
from llm_train_bench.results.result_files import ResultFile, StepsFile, now
from llm_train_bench.results.schema import Result, Status
from llm_train_bench.results.tensorboard import TensorBoardFile
from llm_train_bench.results.wandb_run import WandbRun
from llm_train_bench.run.failures import NO_CAUSE, classify, first_error, keep_error
from llm_train_bench.run.measured_window import MeasuredWindow
from llm_train_bench.run.signals import handled_by, held
from llm_train_bench.settings.flags import OutputFlags


class RunRecord:
    """`with RunRecord(...)`: a result.json is left behind in every case.

    Entering makes the run's directory. Leaving by an exception writes what was measured until then
    with the status that fits, and the exception passes. Every rank has a record; only rank 0's writes.
    Training scripts use a `Run` (training_run.py), and loops of others a `Meter` (meter.py).
    """

    result: Result
    directory: Path
    flops_per_token: float | None = None
    """In the palm convention, for the screen and TensorBoard."""
    compiles = False
    """Whether to keep each step's seconds of compilation."""
    cuda_graphs = False
    allocator_history = False

    def __init__(self, device: torch.device, ranks: Ranks, output: OutputFlags, n_steps: int):
        self.device, self.ranks, self.output, self.n_steps = device, ranks, output, n_steps

    def __enter__(self) -> Self:
        self.file: ResultFile | None = None
        try:
            self.open()
        except BaseException as error:
            if self.file:
                ending = classify(error, advice=self.result.ours)
                self.result.status, self.result.error = ending.status, ending.text
                self.file.write(self.result, last=True)
            raise
        return self

    def open(self) -> None:
        """Make the directory with its files, the step log and the meters."""
        self.sinks: list[StepsFile | ProgressDisplay | TensorBoardFile | WandbRun] = []
        on_main(self.ranks, self.open_files)
        self.started = time.perf_counter()
        self.compiled_at_start = compile_counts()
        seconds = (lambda: compile_counts()["seconds"]) if self.compiles else lambda: 0.0
        self.log = StepLog(self.device, self.n_steps, [*self.sinks], held, seconds)
        name = f"memory-rank{self.ranks.rank}.pickle" if self.ranks.rank else "memory.pickle"
        path = self.directory / name
        self.window = MeasuredWindow(
            self.device, self.ranks, self.cuda_graphs, path, self.allocator_history
        )
        if (n := self.window.ranks_on_a_gpu) > 1:
            advice = f"{n} ranks share a GPU: the figures say nothing of its speed"
            self.result.remark("ranks share a GPU", "invalid", advice)
        self.ending = threading.Lock()
        if self.file:
            self.file.write(self.result)

    def open_files(self) -> None:
        """Make the run's directory and files; UsageError where that cannot be."""
        if self.output.track and importlib.util.find_spec("wandb") is None:
            get = how_to_install("pip install -e '.[track]'")
            raise UsageError(f"{self.result.argument('track')} wandb: needs wandb: {get}")
        existed = self.directory.exists()
        try:
            first_step = self.make_directory()
            self.file = ResultFile(self.directory, self.n_steps)
            self.steps = StepsFile(self.directory / "steps.jsonl", first_step)
            self.sinks += [self.steps, *self._open_displays(first_step)]
        except FileExistsError as error:
            raise UsageError(
                f"{error.filename}: exists already; nothing was touched, choose another "
                f"{self.result.argument('run_name')} or {self.result.argument('output_dir')}"
            ) from None
        except OSError as error:
            if not existed:
                shutil.rmtree(self.directory, ignore_errors=True)
            raise UsageError(
                f"{self.result.argument('output_dir')} {self.output.output_dir}: cannot be written: "
                f"{error.strerror or error}; choose another"
            ) from None
        self.tracked = [WandbRun(self.result, self.directory)] if self.output.track else []
        self.sinks += self.tracked

    def _open_displays(self, first_step: int) -> Iterator[ProgressDisplay | TensorBoardFile]:
        peak, flops = self.result.device.peak_bf16_tflops, self.flops_per_token
        flops = flops and flops / self.result.device.count
        if not self.output.quiet:
            yield ProgressDisplay(self.n_steps, flops, peak, self.result.ours)
        if not self.output.no_tensorboard:
            yield TensorBoardFile(self.directory / "tensorboard", flops, peak, first_step)

    def make_directory(self) -> int:
        """Make the run's directory; the run's first step."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir()
        return 0

    def open_window(self, heat_s: float = 0.0, probe: bool = True) -> None:
        """The measured window begins (MeasuredWindow.open); with several ranks all must come here."""
        synchronize(self.device)
        self.log.drain()
        warmup_s = sum(s.step_time_s for s in self.log.steps)
        self.result.metrics.setup_s = time.perf_counter() - self.started - warmup_s
        self.window.open(heat_s, probe)
        self.start_together()

    def start_together(self) -> None:
        """Begin the next step on all ranks at once, or it would include waiting for one of them."""
        meet(self.ranks)
        synchronize(self.device)
        self.log.start()

    def fill(self, error: BaseException | None) -> None:
        """Put into the result what the owner knows besides times, once the run has ended."""

    def close_window(self) -> None:
        """The measured window has ended; with several ranks all must come here."""
        synchronize(self.device)
        fill_rank_metrics(self.result, self.window.close(self.log))

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        when = time.time()
        # While the result is written, a second Ctrl-C must not cut it off.
        with handled_by(signal.SIG_IGN):
            self.window.release()
            if error is not None and (self.ranks.world > 1 or isinstance(error, CompileError)):
                keep_error(self.directory, self.ranks.rank, error)
            if self.file:
                with self.ending:
                    self.finish(error, when, self.file)

    def how_it_ended(self, error: BaseException, when: float) -> tuple[Status, str]:
        """Status and error of the run, which ended at `when`; later failures are not its cause."""
        ending = classify(error, advice=self.result.ours)
        # A rank that lost another, or that the agent ended, is not the cause.
        interrupted = ending.status == "interrupted"
        if ending.text.startswith(NO_CAUSE) or interrupted:
            cause = first_error(self.directory, when, interrupted)
            return cause or (ending.status, ending.text)
        return ending.status, ending.text

    def finish(self, error: BaseException | None, when: float, file: ResultFile) -> None:
        """Write the result of a run that ended at `when` [s since 1970], and close its files."""
        r, m = self.result, self.result.metrics
        r.status, r.error = self.how_it_ended(error, when) if error else ("ok", None)
        with contextlib.suppress(Exception):  # a second failure must not hide the first
            self.log.drain()
        fill_step_metrics(r, self.log.of_phase("warmup"), self.log.of_phase("measure"))
        m.energy_source = self.window.power.source
        self.fill(error)
        if m.tokens_per_sec and r.batch.seq_len:
            m.samples_per_sec = m.tokens_per_sec / r.batch.seq_len
        if m.peak_allocated_gib is None and m.peak_rss_gib is None:
            with contextlib.suppress(Exception):
                for key, value in peak_memory(self.device).items():
                    setattr(m, key, value)
        if m.peak_reserved_gib and r.device.memory_gib:
            m.memory_utilization = m.peak_reserved_gib / r.device.memory_gib
        r.judge()
        r.ended_at = now()
        for sink in self.sinks:
            with contextlib.suppress(Exception):
                if isinstance(sink, TensorBoardFile):
                    sink.conclude(r)
            with contextlib.suppress(Exception):
                if not isinstance(sink, WandbRun):
                    sink.close()
        try:
            file.write(r, last=True)
        finally:  # the directory may be gone, or the disk full
            shows = r.ours or not self.output.quiet
            if error is None and shows:
                print_result(r)
        for line in [f"{r.status}: {file.path}", *[tracked.finish(r) for tracked in self.tracked]]:
            if shows:
                say(line)

    def fill_compile_counts(self) -> Counter[str]:
        """The compilations since the run's start, into the result too."""
        m, counts = self.result.metrics, compile_counts() - self.compiled_at_start
        m.compile_s, m.n_compiled_graphs = float(counts["seconds"]), counts["graphs"]
        m.n_graph_breaks, m.n_recompilations = counts["graph_breaks"], counts["recompilations"]
        return counts
