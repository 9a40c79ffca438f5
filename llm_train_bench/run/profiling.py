"""Capturing some steps: torch.profiler's traces, or the range between cudaProfilerStart and -Stop.

A watcher's `before` and `after` are called around every step. It holds hooks and a profiler only
from its first step to its last, so other steps cost nothing.
"""

import contextlib
import ctypes
import gzip
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llm_train_bench.apply.compile import compile_counts
from llm_train_bench.measure.device import synchronize
from llm_train_bench.measure.memory import build_profiler
from llm_train_bench.model.operators import noted_paths
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.results.figures import converted_matrices, matmul_work
from llm_train_bench.results.schema import Profile
from llm_train_bench.run.failures import classify
from llm_train_bench.run.record import RunRecord
from llm_train_bench.run.training_run import Run
from llm_train_bench.trace.breakdown import break_down
from llm_train_bench.trace.observed import Observed, fallbacks, observe
from llm_train_bench.trace.read_trace import Trace, read_trace

Draw = Callable[[str], contextlib.AbstractContextManager]
NOT_OBSERVED = "the kernels that ran were not observed"


def build_capture(run: Run, model: nn.Module) -> list["TorchCapture | NsysCapture"]:
    """The watchers that the run's flags ask for: none or one."""
    kinds = {"torch": [TorchCapture], "nsys": [NsysCapture], None: []}
    return [kind(run, model) for kind in kinds[run.schedule.profiler]]


class TorchCapture:
    """A trace of some steps by torch.profiler, one file a rank, and rank 0's breakdown of it."""

    def __init__(self, run: Run, model: nn.Module):
        self.run, self.model = run, model
        self.steps = run.schedule.captured
        self.first = run.schedule.profiled.start

    def before(self, step: int) -> None:
        if step == self.first:
            self._start()
        if step == self.steps.start:
            self.ranges = draw_ranges(self.run, self.model, torch.profiler.record_function)

    def _start(self) -> None:
        synchronize(self.run.device)
        warmup = self.steps.start - self.first
        schedule = torch.profiler.schedule(
            skip_first=self.first, wait=0, warmup=warmup, active=len(self.steps), repeat=1
        )
        self.profiler = build_profiler(
            self.run.device,
            schedule=schedule,
            # On a CPU a matmul's name says nothing of its format.
            record_shapes=self.run.device.type == "cpu",
        )
        self.profiler.step_num = self.first  # the trace counts steps as the run does
        self.profiler.current_action = schedule(self.first)
        self.profiler.start()

    def after(self, step: int) -> None:
        """End the step in the trace, and write all of it after the last one.

        The captured steps begin and end with an idle device.
        """
        if not self.first <= step < self.steps.stop:
            return
        if step + 1 in (self.steps.start, self.steps.stop):
            synchronize(self.run.device)
        if step == self.steps[-1]:
            self.ranges.close()
        self.profiler.step()
        if step == self.steps[-1]:
            self.profiler.stop()
            self._write()

    def _write(self) -> None:
        # The name that TensorBoard's profiler plugin looks for.
        path = self.run.directory / f"trace/rank{self.run.ranks.rank}.pt.trace.json.gz"
        path.parent.mkdir(exist_ok=True, parents=True)
        plain = path.with_suffix("")
        self.profiler.export_chrome_trace(str(plain))
        # PyTorch's own compression, line by line, takes nine times as long.
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
        if self.run.ranks.main:
            self.run.result.profile = self._breakdown(path)
        self.run.start_together()

    def _breakdown(self, path: Path) -> Profile:
        work = self.run.plan.work
        flops, ideal_s = matmul_work(self.run.result, work)
        trace = read_trace(path)
        self.run.result.observed = observed_in(trace, self.run)
        b = break_down(trace, flops)
        # Attention in plain matmuls counts in their time, but not in their FLOPs; recurrent layers too.
        plain = {"math", "flex"} if self.run.device.type == "cpu" else {"math"}
        apart = not plain & {self.run.result.attention_kernel, work.attention.causal}
        apart = apart and "recurrent" not in work.config.parts
        fields: dict[str, Any] = {n: getattr(b, n) for n in Profile.model_fields if hasattr(b, n)}
        fraction = ideal_s / b.matmul_s if ideal_s and b.matmul_s else None
        fields |= {"matmul_roof_fraction": fraction} if apart else {"matmul_tflops": None}
        return Profile(**fields, first_step=self.steps.start, in_window=False)


@contextlib.contextmanager
def traced(record: RunRecord, observed: Callable[[Trace, Any], Observed]) -> Iterator[None]:
    """Trace a step on rank 0, until its device is idle, for `result.observed`.

    An error of the step passes. One of the profiler is a remark, as is another profiler that is on: a
    second one would destroy its trace.
    """
    if profiler_is_on():
        record.result.remark(f"{NOT_OBSERVED}: the loop has a profiler on")
        yield
        return
    path, step_ended = record.directory / "observed.json", False
    profiler = build_profiler(record.device, record_shapes=True) if record.ranks.main else None
    try:
        with profiler or contextlib.nullcontext():
            yield
            step_ended = True
            synchronize(record.device)
        if profiler is not None:
            profiler.export_chrome_trace(str(path))
            record.result.observed = observed(read_trace(path), record)
    except Exception as error:
        if not step_ended:
            raise
        text = classify(error).text.replace(str(path), path.name)
        record.result.remark(f"{NOT_OBSERVED}: {text}")
    finally:
        path.unlink(missing_ok=True)


def profiler_is_on() -> bool:
    """Whether PyTorch's profiler is on in this process."""
    return bool(vars(torch.autograd)["_profiler_enabled"]())


def observed_in(trace: Trace, run: Run) -> Observed:
    """What ran in a trace of a run, and how that differs from what was asked for."""
    work, result = run.plan.work, run.result
    o = observe(trace, work.trains, work.world)
    o.paths = noted_paths()
    compiled = compile_counts()
    if work.compiled or compiled["graphs"]:
        o.graphs_from_cache, o.graphs_generated = compiled["from_cache"], compiled["generated"]
    flex = work.attention.masked == "flex"
    on_gpu, asked = run.device.type == "cuda", "flex" if flex else work.attention.causal
    unnamed = flex if not on_gpu else not trace.gpu  # no kernel has a name there
    attends = any(work.config.layers[i].attends for i in work.layers_of(0))
    if not attends:
        result.attention_kernel = None
    if unnamed or not attends:
        o.attention = {side: [] for side in o.attention}
    ran = o.kernels
    if len(ran) == 1:
        (result.attention_kernel,) = ran
    for text, advice in fallbacks(trace, steps_optimizer=work.pass_type == "step"):
        result.remark(text, advice=advice)
    if "math" in ran and asked == "auto":
        fused = "no dropout of attention, a head size that the fused kernels have, or a newer GPU"
        advice = f"fused kernels need {fused} or PyTorch"
        result.remark("fallback: attention in plain matmuls (math)", "information", advice)
    update = "update PyTorch and its libraries; docs/METRICS.md explains `observed`"
    if asked != "auto" and ran - {asked}:
        what = f"asked for {asked} attention, {', '.join(sorted(ran))} ran"
        result.remark(what, "invalid", update)
    fp8 = result.fp8
    if fp8 and work.fp8 and not fp8.emulated and (trace.gpu or not on_gpu):
        low = sum(calls for name, calls in o.matmuls.items() if name.endswith(("fp8", "fp4")))
        # Of rank 0's own layers; matmuls of experts are known by no format's name.
        here = converted_matrices(work.fp8, work.config, work.layers_of(0), grouped=False)
        least = len(here) * work.batch.grad_acc_steps
        if low < least:
            text = f"{low:g} of at least {least} FP8 matmuls"
            result.remark(f"asked for FP8, {text} ran", "invalid", update)
    return o


def observed_in_loop(trace: Trace, record: RunRecord) -> Observed:
    """What ran in a trace of a loop of others."""
    for text, advice in fallbacks(trace):
        record.result.remark(text, advice=advice)
    return observe(trace, True, record.ranks.world, assume_math=False)


class NsysCapture:
    """The steps between cudaProfilerStart and -Stop, with the parts and blocks as NVTX ranges.

    For `nsys profile -c cudaProfilerApi`. On AMD they are roctx ranges, and
    roctxProfilerResume and -Pause start and stop rocprofv3 (`rocprofv3 --selected-regions`).
    """

    def __init__(self, run: Run, model: nn.Module):
        self.run, self.model, self.steps = run, model, run.schedule.captured

    def before(self, step: int) -> None:
        if step == self.steps.start:
            synchronize(self.run.device)
            _profiler_api(start=True)
            self.ranges = draw_ranges(self.run, self.model, torch.cuda.nvtx.range)
        if step in self.steps:
            torch.cuda.nvtx.range_push(f"step {step}")

    def after(self, step: int) -> None:
        if step in self.steps:
            torch.cuda.nvtx.range_pop()
        if step == self.steps[-1]:
            synchronize(self.run.device)
            self.ranges.close()
            _profiler_api(start=False)
            self.run.start_together()  # the pause is not a part of the next step


def _profiler_api(start: bool) -> None:
    if torch.version.hip:
        roctx = ctypes.CDLL("librocprofiler-sdk-roctx.so")
        (roctx.roctxProfilerResume if start else roctx.roctxProfilerPause)(0)
    else:
        (torch.cuda.profiler.start if start else torch.cuda.profiler.stop)()


def draw_ranges(run: Run, model: nn.Module, draw: Draw) -> contextlib.ExitStack:
    """Draw the parts of a step, each block's forward and backward, and the loss; close() ends it."""
    stack = contextlib.ExitStack()
    run.log.watchers.append(draw)
    stack.callback(run.log.watchers.remove, draw)
    for part in (m for m in model.modules() if isinstance(m, Transformer)):  # stages of a pipeline
        for layer, block in part.blocks.items():
            _draw(stack, draw, f"blocks.{layer}", block, "forward")
            _draw(stack, draw, f"blocks.{layer} backward", block, "full_backward")
        if part.last:
            _draw(stack, draw, "loss", part.loss, "forward")
    return stack


def _draw(
    stack: contextlib.ExitStack, draw: Draw, name: str, module: nn.Module, passes: str
) -> None:
    """Draw a module's `forward` or `full_backward` passes, by the hooks of these names."""
    running = contextlib.ExitStack()

    def enter(*_) -> None:
        running.enter_context(draw(name))

    def leave(*_) -> None:
        running.close()

    stack.callback(getattr(module, f"register_{passes}_pre_hook")(enter).remove)
    stack.callback(getattr(module, f"register_{passes}_hook")(leave).remove)
