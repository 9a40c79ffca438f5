"""The run of a training script: its record, its checkpoints' attempt, and its end by a silent rank."""

import contextlib
import dataclasses
import faulthandler
import math
import os
import shutil
import time

import torch

from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.apply.precision import LossScaler
from llm_train_bench.base.files import hold_lock
from llm_train_bench.formulas.flops import step_flops_per_token
from llm_train_bench.model.operators import forget_paths
from llm_train_bench.parallel.ranks import Ranks, broken_group, tell_launcher
from llm_train_bench.results.console import print_header, say
from llm_train_bench.results.figures import describe_fp8, fill_flop_metrics
from llm_train_bench.results.goodput import fill_goodput
from llm_train_bench.results.result_files import read_steps
from llm_train_bench.run.checkpoint import attempt
from llm_train_bench.run.failures import keep_error, report
from llm_train_bench.run.hang import HangWatch
from llm_train_bench.run.provenance import open_result
from llm_train_bench.run.record import RunRecord
from llm_train_bench.run.signals import StopRequest
from llm_train_bench.settings.plan import Plan


class Run(RunRecord):
    """The record of a planned run, and what its loop needs: FP8, the loss scaler, the attempt."""

    def __init__(
        self, plan: Plan, device: torch.device, ranks: Ranks, fp8: Fp8, attention_kernel: str | None
    ):
        super().__init__(device, ranks, plan.args, plan.schedule.total)
        work = plan.work
        self.plan, self.fp8, self.attention_kernel = plan, fp8, attention_kernel
        self.compiles, self.cuda_graphs = work.compiled, work.cuda_graphs
        self.allocator_history = plan.args.memory_snapshot
        self.stop_request = StopRequest()
        self.counted = False
        self.scaler = LossScaler(device) if work.amp == "fp16" else None

    def open(self) -> None:
        """Find where the run starts, and open its record there; UsageError or Finished if it cannot."""
        forget_paths()
        self.start = attempt.resolve_start(self.plan, self.ranks)
        self.schedule = dataclasses.replace(self.plan.schedule, start=self.start.first_step)
        self.directory, work = self.start.directory, self.plan.work
        self.flops_per_token = step_flops_per_token(work, causal=False)
        fp8 = describe_fp8(work.fp8, work.config, self.fp8.version or "") if work.fp8 else None
        self.result = open_result(
            self.plan, self.schedule, self.device, fp8, self.attention_kernel, self.start
        )
        for note in self.start.notes:
            self.result.remark(note)
        super().open()
        # On a CPU the collectives themselves notice, and raise.
        self.step_limit_s = self.plan.args.dist_timeout if self.device.type == "cuda" else math.inf
        self.hang = None
        if self.ranks.world > 1:
            self.hang = HangWatch(self._end_hanging, broken_group)
        if self.file and not self.output.quiet:
            print_header(self.result, work)
            if self.start.checkpoint:
                path, before = self.start.checkpoint
                say(f"resumes at step {before.step} of {before.result.run_name}: {path}")
            for note in (*self.plan.notes, *self.start.notes):
                say(note)
        tell_launcher(self.ranks, self.directory)

    def make_directory(self) -> int:
        """Take the directory; set aside what cannot be used of the attempts before this one."""
        if not self.start.lock:  # it does not go on in a directory
            super().make_directory()
            self.start.lock = hold_lock(self.directory / attempt.LOCK, "--run-name")
        first_step, checkpoints = self.start.first_step, self.directory / "checkpoints"
        for path in (self.directory / "errors", *checkpoints.glob("step-*.tmp")):
            shutil.rmtree(path, ignore_errors=True)
        for path in attempt.checkpoints_at(checkpoints):
            if attempt.step_of(path) > first_step:
                path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
        attempt.remove_older(checkpoints)
        return first_step

    def begin_micro_step(self, step: int) -> None:
        """The host begins a micro batch; those of the first two steps may compile for long."""
        if self.hang and step >= 2:
            self.hang.allow(self.step_limit_s)

    def end_steps(self) -> None:
        """The work that follows is not a step, and may take long."""
        if self.hang:
            self.hang.allow(math.inf)

    def begin_window(self) -> None:
        """The measured window starts."""
        # The first three warm-up steps wait for the compiler rather than work.
        worked = sum(s.step_time_s for s in self.log.steps[3:])
        schedule = self.schedule
        heat_s = max(0.0, schedule.warmup_s - worked)
        if schedule.window_begin >= schedule.window_end:
            heat_s = 0.0  # nothing will be measured
        elif heat_s and schedule.profiler and schedule.window_begin in schedule.profiled[1:]:
            heat_s = 0.0
            self.result.remark(
                "no matmuls warmed the device before the window: the steps around its begin are traced"
            )
        if heat_s:
            self.result.remark(f"{heat_s:.1f} s of matmuls warmed the device before the window")
        self.open_window(heat_s)

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if self.hang:
            self.hang.close()
        super().__exit__(kind, error, trace)
        if self.start.lock:
            self.start.lock.close()

    def _end_hanging(self, error: BaseException, when: float) -> None:
        """In another thread: the main one waits for a rank that will not come."""
        if not self.ending.acquire(blocking=False):
            return
        # A query to the driver may hang as well; after 30 s this process ends in any case.
        faulthandler.dump_traceback_later(30, exit=True)
        try:
            keep_error(self.directory, self.ranks.rank, error)
            report(error, self.result.entrypoint, self.ranks)
            if self.file:
                self.result.status, self.result.error = self.how_it_ended(error, when)
                self.file.write(self.result)
                self.finish(error, when, self.file)
        finally:
            os._exit(1)

    def fill(self, error: BaseException | None) -> None:
        r, m = self.result, self.result.metrics
        fill_flop_metrics(r, self.plan.work)
        self.count(error)
        if r.profile and m.step_time_median_s:
            r.profile.slowdown = r.profile.step_time_s / m.step_time_median_s
        if self.plan.args.save_every or self.start.checkpoint:
            with contextlib.suppress(OSError, LookupError, TypeError):  # a file that others changed
                fill_goodput(r, read_steps(self.directory / "steps.jsonl"))

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
        counts = self.fill_compile_counts()
        if counts["graphs_refused"] and self.plan.work.cuda_graphs:
            self.result.remark(
                f"{counts['graphs_refused']} compiled graphs run without CUDA graphs, which PyTorch "
                "refused for them; TORCH_LOGS=cudagraphs says why"
            )
