"""Meter: the step log, measured window and result of our own loop, for training loops of others."""

import contextlib
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, FiniteFloat, TypeAdapter, validate_call
from pydantic.dataclasses import dataclass

from llm_train_bench.base.errors import RunFailed
from llm_train_bench.base.redaction import command_as_setting
from llm_train_bench.measure.steps import REST
from llm_train_bench.model.config import load_config
from llm_train_bench.parallel.ranks import joined_ranks, on_main
from llm_train_bench.results.console import say
from llm_train_bench.results.figures import LoopWork, fill_loop_metrics
from llm_train_bench.results.result_files import begin_attempt
from llm_train_bench.results.schema import METER_LENGTH, ModelInfo, Result, StepSize
from llm_train_bench.run import provenance
from llm_train_bench.run.checkpoint.attempt import Start
from llm_train_bench.run.profiling import observed_in_loop, profiler_is_on, traced
from llm_train_bench.run.record import RunRecord
from llm_train_bench.run.signals import end_of_process
from llm_train_bench.settings.flags import OutputFlags

# What a Meter itself writes among the arguments of its result.
OWN_ARGS = {*METER_LENGTH, "tokens_per_step", "seq_len", "command", "script"}
NEW, BETWEEN, IN_STEP, ENDED = "not started", "between two steps", "inside a step", "at its end"
Count = Annotated[int, Field(ge=1, le=10**15)]


@dataclass(config={"validate_assignment": True})
class MeterStep:
    """What a loop tells of a step: loss, lr, tokens (of all ranks) and seq_len, each optional.

    The loss may be a tensor of one element. It is read later, without waiting.
    """

    loss: Any = None
    lr: float | None = None
    tokens: Annotated[int, Field(ge=0)] | None = None
    seq_len: Count | None = None


class _LoopRecord(RunRecord):
    """The record of a loop of others."""

    def __init__(self, result: Result, directory: Path, work: LoopWork, *facts: Any):
        super().__init__(*facts)
        self.result, self.directory, self.work = result, directory, work
        self.flops_per_token = work.flops_per_token(result.batch.seq_len)

    def fill(self, error: BaseException | None) -> None:
        self.fill_compile_counts()
        for text, advice in sorted(self.window.disturbances):  # if the window was never closed
            self.result.remark(text, "invalid", advice)
        fill_loop_metrics(self.result, self.work, self.log.of_phase("measure"))


class Meter:
    """Measures the steps of a training loop, and leaves a run's directory with a result.json.

    The first `warmup_steps` steps are the warm-up and the next `n_steps` are measured. One more is
    traced, to observe the kernels. Later steps cost nothing. A step begins where the one before it
    ended, so the time to load its batch belongs to it. The device is waited for before and after the
    measured steps and the traced one, and nowhere else. `with` it, or `start()` and `stop()` it.
    """

    _open: ClassVar["Meter | None"] = None

    @validate_call(config={"arbitrary_types_allowed": True, "hide_input_in_errors": True})
    def __init__(
        self,
        config: Any = None,
        *,
        tokens_per_step: Count | None = None,
        seq_len: Count | None = None,
        flops_per_token: Annotated[FiniteFloat, Field(gt=0)] | None = None,
        settings: Mapping[str, bool | int | FiniteFloat | str | None] | None = None,
        warmup_steps: Annotated[int, Field(ge=0, le=10**7)] = 10,
        n_steps: Annotated[int, Field(ge=1, le=10**7)] = 50,
        name: str | None = None,
        device: Any = None,
        run_name: str | None = None,
        **output: Any,
    ):
        """What is measured; docs/PYTHON.md has more. ValueError or TypeError for what cannot be used.

        config: For the FLOPs: the path of a config.json, its content, or a config of transformers.
        tokens_per_step: Tokens of an optimizer step over all ranks. By default each step tells its own.
        seq_len: Tokens of a sample, for the FLOPs of attention. By default each step may tell it.
        flops_per_token: FLOPs per trained token (forward and backward), in place of the config's.
        settings: What tells this run from others of the script. By default its command line.
        name: The model's name. By default that of the config.
        device: By default the current GPU, or the CPU where there is none.
        run_name, output: run_name, output_dir, no_tensorboard, track and quiet, as of train.py.
        """
        if own := OWN_ARGS & set(settings or ()):
            raise ValueError(f"Meter: settings: {min(own)!r} is set by another argument")
        if run_name and not re.fullmatch(r"[^/\\]*[^./\\][^/\\]*", run_name):
            raise ValueError(f"Meter: run_name={run_name!r}: must be the name of one directory")
        if unknown := output.keys() - {field.name for field in fields(OutputFlags)}:
            raise TypeError(f"Meter: {min(unknown)!r} is not an argument of a Meter")
        output["output_dir"] = str(Path(output.get("output_dir", "runs")).absolute())
        flags = TypeAdapter(OutputFlags).validate_python(output)
        ranks = joined_ranks()
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cuda", "cpu"):
            raise ValueError(f"Meter: device={device}: must be the CPU or the current GPU")
        if settings is None:
            settings = {"command": command_as_setting(sys.argv[1:])}
        shape = None if config is None else load_config(config)
        name = name or (shape.name if shape else Path(sys.argv[0]).stem or "model")
        model = ModelInfo(name=name, hash=provenance.digest_of(f"{name} {flops_per_token}"))
        if shape:
            model = provenance.describe_model(shape).model_copy(update={"name": name})
        # The end of the default name tells apart those of one second.
        run_name = run_name or f"{provenance.default_name(name, {})}-{uuid.uuid4().hex[:4]}"
        directory = Path(flags.output_dir, run_name)
        start = on_main(ranks, lambda: Start(directory, {}, attempts=[begin_attempt()]))
        result = provenance.begin_result(
            f"Meter in {Path(sys.argv[0] or 'python').name}",
            {"n_steps": n_steps, "warmup_steps": warmup_steps, **settings},
            model,
            start,
            device,
            ranks.world,
            batch=StepSize(tokens_per_step=tokens_per_step, seq_len=seq_len),
            loss_known=False,
        )
        self._warmup_steps, self._window_end = warmup_steps, warmup_steps + n_steps
        self._n, self._state, self._told = 0, NEW, list[MeterStep]()
        self._trace, self._watch = contextlib.ExitStack(), contextlib.ExitStack()
        work = LoopWork(shape, flops_per_token, {seq_len} - {None})
        facts = device, ranks, flags, self._window_end
        self._record = _LoopRecord(result, start.directory, work, *facts)

    @property
    def result(self) -> Result:
        """The result so far, with the fields of docs/METRICS.md; whole after the meter's end."""
        return self._record.result

    def start(self) -> Self:
        """Begin the first step. Another Meter that was not stopped ends here, as failed."""
        if self._state != NEW:
            raise RuntimeError("Meter: cannot be used twice; create a new one")
        if Meter._open:
            with contextlib.suppress(Exception):  # its directory may be gone
                Meter._open.stop(RuntimeError("another Meter began"))
        self._record.__enter__()
        Meter._open, self._state, self._process = self, BETWEEN, os.getpid()
        self._watch.enter_context(end_of_process(self._stop_with_process))
        self._record.log.start()
        if not self._warmup_steps:
            self._record.open_window(probe=False)
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Write the result: of a loop that ended, or that failed by this error."""
        if self._state in (NEW, ENDED) or os.getpid() != self._process:
            return
        measured, wanted = self._n - self._warmup_steps, self._window_end - self._warmup_steps
        if error is None and measured < wanted:
            error = RunFailed(f"the loop ended after {max(0, measured)} of {wanted} measured steps")
            say(f"Meter: {error}")
            if measured >= 0:
                self._record.close_window()
        self._state, Meter._open = ENDED, None
        self._watch.close()
        self._record.__exit__(type(error) if error else None, error, None)

    __enter__ = start

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        # The end of a generator, or of a program that succeeded, is no failure.
        success = isinstance(error, SystemExit) and error.code in (None, 0)
        self.stop(None if success or isinstance(error, GeneratorExit) else error)

    @contextlib.contextmanager
    def step(self, every: int = 1) -> Iterator[MeterStep]:
        """One optimizer step: all of its forward and backward passes, and the optimizer.

        With `every=N` the block is one of the N micro batches of a step. The step's loss is then the mean
        of theirs, and its tokens are the sum. RuntimeError inside another step, or after the end.
        """
        self._require(BETWEEN, "step")
        if every < 1:
            raise ValueError(f"Meter.step: every={every}: must be 1 or more")
        self._state = IN_STEP
        if self._n < self._window_end:
            self._record.log.mark("data")
        elif self._n == self._window_end and not self._told:
            self._trace.enter_context(traced(self._record, observed_in_loop))
        try:
            self._told.append(told := MeterStep())
            yield told
            if self._state == IN_STEP and len(self._told) >= every:
                self._finish_step()
                self._told = []
            elif self._n < self._window_end:
                self._record.log.mark(REST)
        except BaseException as error:
            self._told = []
            self._trace.__exit__(type(error), error, None)
            raise
        finally:
            self._state = BETWEEN if self._state == IN_STEP else self._state

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """An evaluation, a save or another pause: the time since the last step belongs to no step.

        Inside the window it makes the run invalid, as in our own loop.
        """
        self._require(BETWEEN, "paused")
        if self._told:
            raise RuntimeError("Meter.paused: must be called between steps, not micro batches")
        try:
            yield
        finally:
            if self._state == BETWEEN and self._n < self._window_end:
                if self._n >= self._warmup_steps:
                    advice = "evaluate and save in the warm-up, or after the measured steps"
                    self._record.window.disturbances.add(("paused in the window", advice))
                self._record.log.start()

    def _require(self, state: str, call: str) -> None:
        if self._state != state:
            raise RuntimeError(f"Meter.{call}: must be called {state}; the meter is {self._state}")

    def _finish_step(self) -> None:
        """End an optimizer step: hand on what its micro batches told."""
        record, in_window = self._record, self._n >= self._warmup_steps
        if self._n >= self._window_end:
            self._trace.close()
            self._n = self._window_end + 1
            return
        losses = [step.loss for step in self._told if step.loss is not None]
        loss: Any = sum(losses[1:], losses[0]) / len(losses) if losses else None
        if isinstance(loss, torch.Tensor) and loss.is_cuda:  # read once the GPU has passed the step
            loss = loss.detach().reshape(1)
        elif loss is not None:
            loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        tokens = [step.tokens for step in self._told if step.tokens is not None]
        total = sum(tokens) if tokens else record.result.batch.tokens_per_step
        if not total:
            raise ValueError(f"Meter: tokens={total}: give tokens_per_step, or set step.tokens")
        record.work.lengths |= {step.seq_len for step in self._told} - {None}
        record.result.loss_known |= loss is not None
        if in_window and profiler_is_on():
            record.window.disturbances.add(("a profiler was on in the window", ""))
        phase = "measure" if in_window else "warmup"
        record.log.finish(self._n, phase, self._told[-1].lr, total, loss, last=REST)
        self._n += 1
        if self._n == self._warmup_steps:
            record.open_window(probe=False)
        if self._n == self._window_end:
            record.close_window()
            if record.file:  # whatever becomes of the loop
                record.file.write(record.result)

    def _stop_with_process(self, error: BaseException | None) -> None:
        if error is None and self._n < self._window_end:
            error = RuntimeError("the process ended before the loop did")
        self.stop(error)
