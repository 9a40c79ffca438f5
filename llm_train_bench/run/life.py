"""One run's directory and its result, whatever ends it."""

import contextlib
import faulthandler
import os
import shutil
import signal
import threading
import time
from collections import Counter
from typing import Self

import torch

from llm_train_bench.apply.compile import compile_counts
from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.apply.precision import LossScaler
from llm_train_bench.base.errors import CompileError, UsageError
from llm_train_bench.formulas.flops import flops_per_token
from llm_train_bench.measure.device import peak_memory
from llm_train_bench.measure.steps import StepLog
from llm_train_bench.model.onednn import available, faster_linear
from llm_train_bench.model.operators import taken
from llm_train_bench.parallel.ranks import Ranks, broken_group, on_main
from llm_train_bench.results.console import ProgressDisplay, print_header, print_result, say
from llm_train_bench.results.figures import fill_flop_metrics, fill_rank_metrics, fill_step_metrics
from llm_train_bench.results.goodput import lineage_before, time_parts
from llm_train_bench.results.result_files import ResultFile, StepsFile, now
from llm_train_bench.results.schema import ResumedFrom, Status
from llm_train_bench.results.tensorboard import TensorBoardFile
from llm_train_bench.results.trackers import check_trackers, track
from llm_train_bench.run.checkpoint.lineage import Attempt, attempts, open_place
from llm_train_bench.run.failures import NO_CAUSE, classify, first_error, keep_error, report
from llm_train_bench.run.hang import HangWatch, patience
from llm_train_bench.run.provenance import open_result
from llm_train_bench.run.signals import handled_by, held
from llm_train_bench.run.window import Window
from llm_train_bench.settings.plan import Plan

# Matmul operations of a micro batch below which `--linear auto` does not spend 0.3 s on a choice.
SMALL_STEP = 2e10


class Run:
    """The record of one run: `with Run(...) as run` leaves a result.json behind in every case.

    Entering makes the run's directory. Leaving by an exception writes what was measured until then
    with the status that fits, and the exception passes. Every rank has a Run; only rank 0's writes.
    """

    def __init__(
        self,
        plan: Plan,
        attempt: Attempt,
        device: torch.device,
        ranks: Ranks,
        fp8: Fp8,
        attention_kernel: str | None,
    ):
        self.plan, self.attempt, self.device, self.ranks = plan, attempt, device, ranks
        self.saved_at: float | None = None  # when the loop had waited for the last save
        self.counted = False
        self.fp8 = fp8
        self.scaler = LossScaler(device) if plan.work.amp == "fp16" else None
        self.directory = attempt.directory
        self.result = open_result(
            plan, device, fp8.info, attention_kernel, self.directory.name, attempt.lineage
        )
        self.result.notes += attempt.notes
        if before := attempt.manifest:
            self.result.resumed_from = ResumedFrom(
                run=before.run, step=before.step, path=str(attempt.checkpoint)
            )

    def __enter__(self) -> Self:
        self.file: ResultFile | None = None
        try:
            self._open()
        except BaseException as error:
            if self.file:
                self.result.status, self.result.error = classify(error)
                self.file.write(self.result, last=True)
            self._release()
            raise
        return self

    def _open(self) -> None:
        self.sinks: list[StepsFile | ProgressDisplay | TensorBoardFile] = []
        on_main(self.ranks, self._open_files)
        self.started = time.perf_counter()
        taken.clear()
        self.compiled_at_start = compile_counts()
        seconds = (lambda: compile_counts().seconds) if self.plan.work.compiled else lambda: 0.0
        self.log = StepLog(self.device, self.plan.schedule.total, [*self.sinks], held, seconds)
        name = f"memory-rank{self.ranks.rank}.pickle" if self.ranks.rank else "memory.pickle"
        snapshot, graphs = self.plan.profile.memory_snapshot, self.plan.work.cuda_graphs
        self.window = Window(self.device, self.ranks, graphs, self.directory / name, snapshot)
        self.hang, self.ending = None, threading.Lock()
        if self.ranks.world > 1:
            limit = patience(self.device, self.plan.ranks.dist_timeout)
            self.hang = HangWatch(self._end_hanging, limit, broken_group)
        if self.file:
            self.file.write(self.result)
            print_header(self.result, self.plan.work)
            if before := self.result.resumed_from:
                say(f"goes on from step {before.step} of {before.run}")
            for note in self.attempt.notes:
                say(note)

    def _open_files(self) -> None:
        plan, r = self.plan, self.result
        check_trackers(plan.output.track)
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir()
            self.file = ResultFile(self.directory, plan.schedule.total)
            self.steps = StepsFile(self.directory / "steps.jsonl")
        except FileExistsError as error:
            raise UsageError(
                f"{error.filename}: exists already; nothing was touched, choose another --run-name "
                "or --output-dir"
            ) from None
        except OSError as error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise UsageError(
                f"--output-dir {plan.output.output_dir}: cannot be written: {error.strerror}; "
                "choose another"
            ) from None
        open_place(self.attempt)
        work, count, peak = plan.work, r.device.count, r.device.peak_bf16_tflops
        flops = flops_per_token(work.config, work.batch.seq_len, False, work.pass_type)
        self.sinks += [self.steps, ProgressDisplay(plan.schedule.total, flops / count, peak)]
        if not plan.output.no_tensorboard:
            directory, memory = self.directory / "tensorboard", lambda: peak_memory(self.device)
            self.sinks.append(board := TensorBoardFile(directory, flops, peak, count, memory))
            board.describe(r)

    def _release(self) -> None:
        for lease in self.attempt.leases:
            lease.release()

    def choose_linear(self) -> str:
        """The library of linear layers, the same on all ranks: the one asked for, or a checkpoint's.

        Otherwise rank 0 times both, if a step is long. The result and checkpoints hold what was asked
        for or chosen. UsageError where this PyTorch lacks oneDNN.
        """
        work, before = self.plan.work, self.attempt.manifest
        small = 6 * sum(work.block_parameters) * work.batch.micro_tokens < SMALL_STEP
        way = (before and before.linear) if work.linear == "auto" else work.linear
        if work.linear == "auto" and way is None and not small:
            config = work.config
            shapes = [shape for i in work.layers for shape in config.block_shapes(i).values()]
            shapes = Counter([*shapes, (config.padded_vocab_size, config.hidden_size)])
            way = on_main(self.ranks, lambda: faster_linear(shapes, work.own_tokens))
        if way == "onednn" and not available():
            raise UsageError("linear layers by oneDNN: this PyTorch has none; use --linear plain")
        taken.clear()  # timing is no step
        self.result.linear = way
        return way or "plain"

    def begin_micro_step(self, step: int) -> None:
        """The host begins a micro batch; those of the first two steps may compile for long."""
        if self.hang and step >= 2:
            self.hang.step()

    def end_steps(self) -> None:
        """The work that follows is no step, and may take long."""
        if self.hang:
            self.hang.rest()

    def begin_window(self) -> None:
        """The measured window starts; the device is idle."""
        warmup = sum(s.step_time_s for s in self.log.steps)
        self.result.metrics.setup_s = time.perf_counter() - self.started - warmup
        # The first three warm-up steps wait for the compiler rather than work.
        worked = sum(s.step_time_s for s in self.log.steps[3:])
        schedule = self.plan.schedule
        heat_s = max(0.0, schedule.warmup_s - worked)
        if schedule.window_begin >= schedule.window_end:
            heat_s = 0.0  # nothing will be measured
        elif heat_s and schedule.profiler and schedule.window_begin in schedule.profiled[1:]:
            heat_s = 0.0
            self.result.notes.append(
                "no matmuls warmed the device before the window: the steps around its begin are traced"
            )
        if heat_s:
            self.result.notes.append(
                f"{heat_s:.1f} s of matmuls warmed the device before the window"
            )
        self.window.open(heat_s)

    def end_window(self) -> None:
        """The measured window has ended; the device is idle. With several ranks all must come here."""
        fill_rank_metrics(self.result, self.window.close(self.log))

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        when = time.time()
        if self.hang:
            self.hang.close()
        # While the result is written, a second Ctrl-C must not cut it off.
        with handled_by(signal.SIG_IGN):
            self.window.release()
            if error is not None and (self.ranks.world > 1 or isinstance(error, CompileError)):
                keep_error(self.directory, self.ranks.rank, error)
            if self.file:
                with self.ending:
                    self._finish(error, when, self.file)
            self._release()

    def _end_hanging(self, error: BaseException, when: float) -> None:
        """In another thread: the main one waits for a rank that will not come."""
        if not self.ending.acquire(blocking=False):
            return
        # A query to the driver may hang as well; after 30 s this process ends in any case.
        faulthandler.dump_traceback_later(30, exit=True)
        try:
            keep_error(self.directory, self.ranks.rank, error)
            if self.file:
                self.result.status, self.result.error = self._ending(error, when)
                self.file.write(self.result)
            with contextlib.suppress(OSError):  # a terminal that is gone
                report(error, self.result.entrypoint, self.ranks)
            if self.file:
                self._finish(error, when, self.file)
        finally:
            os._exit(1)

    def _ending(self, error: BaseException, when: float) -> tuple[Status, str]:
        """Status and error of the run, which ended at `when`; later failures are not its cause."""
        status, text = classify(error)
        # A rank that lost another, or that the agent ended, is not the cause.
        interrupted = status == "interrupted"
        if text.startswith(NO_CAUSE) or interrupted:
            return first_error(self.directory, when, interrupted) or (status, text)
        return status, text

    def _finish(self, error: BaseException | None, when: float, file: ResultFile) -> None:
        r, m = self.result, self.result.metrics
        r.status, r.error = self._ending(error, when) if error else ("ok", None)
        with contextlib.suppress(Exception):  # a second failure must not hide the first
            self.log.drain()
        fill_step_metrics(r, self.log.of_phase("warmup"), self.log.of_phase("measure"))
        fill_flop_metrics(r, self.plan.work)
        m.energy_source = self.window.power.source
        self.count(error)
        if r.profile and m.step_time_median_s:
            r.profile.slowdown = r.profile.step_time_s / m.step_time_median_s
        if m.peak_allocated_gib is None and m.peak_rss_gib is None:
            with contextlib.suppress(Exception):
                for key, value in peak_memory(self.device).items():
                    setattr(m, key, value)
        if m.peak_reserved_gib and r.device.memory_gib:
            m.memory_utilization = m.peak_reserved_gib / r.device.memory_gib
        r.notes += [*r.disturbances.values(), *r.impossible.values()]
        if r.observed:
            r.notes += [f"unfit for comparison: {mismatch}" for mismatch in r.observed.mismatches]
        r.ended_at = now()
        if self.plan.saving.save_every or self.attempt.checkpoint:
            with contextlib.suppress(OSError, ValueError, LookupError):  # files of other programs
                runs = attempts(self.directory.parent, self.attempt.lineage.name)
                runs = [*lineage_before(runs, r), self.directory]
                m.time_parts_s = time_parts(runs, time.time(), self.saved_at)
                m.goodput = m.time_parts_s["steps"] / sum(m.time_parts_s.values())
        for sink in self.sinks:
            with contextlib.suppress(Exception):
                if isinstance(sink, TensorBoardFile):
                    sink.conclude(r)
            with contextlib.suppress(Exception):
                sink.close()
        try:
            file.write(r, last=True)
        finally:  # the directory may be gone, or the disk full
            if error is None:
                print_result(r)
        say(f"{r.status}: {file.path}")
        for line in track(self.plan.output.track, r, self.directory):
            say(line)

    def count(self, error: BaseException | None = None) -> None:
        """Fill in the skipped steps and compilations so far, once: later ones are not the run's."""
        if self.counted:
            return
        self.counted, m = True, self.result.metrics
        if self.scaler is not None and (error is None or self.device.type == "cpu"):
            with contextlib.suppress(Exception):  # the device may be what failed
                m.skipped_steps = int(self.scaler.skipped)
        if not self.plan.work.compiled:
            return
        counts = compile_counts() - self.compiled_at_start
        m.compile_s, m.n_compiled_graphs = counts.seconds, counts.graphs
        m.n_graph_breaks, m.n_recompilations = counts.graph_breaks, max(0, counts.recompilations)
        if counts.graphs_refused and self.plan.work.cuda_graphs:
            self.result.notes.append(
                f"{counts.graphs_refused} compiled graphs run without CUDA graphs, which PyTorch "
                "refused for them; TORCH_LOGS=cudagraphs says why"
            )
