"""A meter for training loops of others: the step log, window and result of our own loop, around theirs.

from llm_train_bench import Meter

with Meter(config="config.json", tokens_per_step=8192, warmup_steps=10, n_steps=50) as meter:
    for batch in loader:
        with meter.step():
            train(batch)
"""

import contextlib
import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from llm_train_bench import __version__
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import shown_command
from llm_train_bench.formulas.flops import flops_per_token as flops_of
from llm_train_bench.measure.device import synchronize
from llm_train_bench.measure.steps import REST
from llm_train_bench.model.config import ModelConfig, load_config, parse_config
from llm_train_bench.parallel.ranks import Ranks, find_ranks, meet, on_main
from llm_train_bench.results.figures import fill_flop_rates
from llm_train_bench.results.result_files import command_began, now, this_process
from llm_train_bench.results.schema import Lineage, ModelInfo, Result, StepSize
from llm_train_bench.results.trackers import TRACKERS
from llm_train_bench.run.failures import classify
from llm_train_bench.run.profiling import traced
from llm_train_bench.run.provenance import (
    default_name,
    describe_device,
    describe_environment,
    describe_model,
    digest_of,
)
from llm_train_bench.run.record import RunRecord
from llm_train_bench.settings.flags import OutputFlags, TrackerName
from llm_train_bench.trace.observed import observe, sequence_length
from llm_train_bench.trace.read_trace import Trace

# Libraries with training loops of their own, which a result names if they are loaded.
LOOPS = ("transformers", "accelerate", "lightning", "peft", "deepspeed", "trl")


class MeterStep:
    """One step of a loop: what the loop tells of it; `loss` is a number or a tensor of one element."""

    loss: float | Tensor | None = None
    lr: float | None = None
    tokens: int | None = None
    """Over all ranks, where it is not the Meter's `tokens_per_step`."""


class Meter(RunRecord):
    """Measures the steps of a training loop; `with` it, a run's directory with a result.json is left.

    The first `warmup_steps` steps are the warm-up and the next `n_steps` are measured. The loop may go
    on after them: its next step is traced, to observe the kernels, and later ones cost nothing.
    `done` says that nothing is left to measure. A step begins where the one before it ended, so the
    time to load its batch belongs to it. The device is waited for before and after the measured steps
    and the traced one, and nowhere else.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | Any | None = None,
        *,
        tokens_per_step: int | None = None,
        seq_len: int | None = None,
        flops_per_token: float | None = None,
        name: str | None = None,
        warmup_steps: int = 10,
        n_steps: int = 50,
        settings: Mapping[str, Any] | None = None,
        output_dir: str | os.PathLike[str] = "runs",
        run_name: str | None = None,
        device: torch.device | str | None = None,
        peak_tflops: float | None = None,
        usd_per_hour: float | None = None,
        track: Sequence[TrackerName] = (),
        tensorboard: bool = True,
        observe: bool = True,
        quiet: bool = False,
    ):
        """What is measured, and where the result goes.

        config: The model's Hugging Face config: a config.json, its content, or a config of
            transformers. Its FLOPs are counted as for our own models.
        tokens_per_step: Tokens of one optimizer step over all ranks. By default each step tells its own
            (`step.tokens`).
        seq_len: Tokens of a sample, for the FLOPs of attention. By default that of the traced step.
        flops_per_token: FLOPs per trained token (forward and backward) in place of a config.
        name: The model's name. By default that of the config.
        settings: What tells this run from others of the same script, such as amp, bsz or lr. compare.py
            takes runs with equal settings as repeats. By default the words of the command line.
        device: By default the current GPU, or the CPU where there is none.
        peak_tflops: Dense BF16 peak of a device that configs/hardware.json does not list [TFLOP/s].
        usd_per_hour: Price of one device [US$/h].
        track: `wandb`, `mlflow`, `openmetrics`.
        observe: Trace the first step after the measured ones.
        quiet: Print nothing.

        Under several ranks, torch.distributed must be initialized, and every rank has a Meter. UsageError
        or ConfigError for what cannot be used.
        """
        sizes = {"tokens_per_step": tokens_per_step, "n_steps": n_steps, "seq_len": seq_len}
        for what, size in sizes.items():
            if size is not None and (type(size) is not int or size < 1):
                raise UsageError(f"Meter: {what}={size!r}: must be a whole number above 0")
        if type(warmup_steps) is not int or warmup_steps < 0:
            raise UsageError(f"Meter: warmup_steps={warmup_steps!r}: must be a whole number from 0")
        if seq_len and tokens_per_step and tokens_per_step % seq_len:
            raise UsageError(
                f"Meter: tokens_per_step={tokens_per_step} is no multiple of seq_len={seq_len}"
            )
        for what, value in {"flops_per_token": flops_per_token, "peak_tflops": peak_tflops}.items():
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"Meter: {what}={value!r}: must be above 0 and finite")
        for tracker in track:
            if tracker not in TRACKERS:
                raise UsageError(f"Meter: track={tracker!r}: must be among {', '.join(TRACKERS)}")
        if config is not None and flops_per_token is not None:
            raise UsageError("Meter: give a config or flops_per_token, not both")
        self.config, self.seq_len = _read_config(config, name), seq_len
        self.warmup_steps, self.window_end = warmup_steps, warmup_steps + n_steps
        self.tokens_per_step, self.flops, self.observes = tokens_per_step, flops_per_token, observe
        self.n, self.inside, self.observed = 0, False, False
        if device is None:
            device = (
                torch.device("cuda", torch.cuda.current_device())
                if torch.cuda.is_available()
                else "cpu"
            )
        device, ranks = torch.device(device), _ranks()
        script = Path(sys.argv[0] or "python").name
        args: dict[str, Any] = {"n_steps": n_steps, "warmup_steps": warmup_steps}
        args |= {} if usd_per_hour is None else {"usd_per_hour": usd_per_hour}
        if settings is None:
            args["command"] = " ".join(shown_command(sys.argv[1:]))
        args |= dict(settings or {})
        model = self._model(name)
        called = run_name or default_name(model.name, {})
        called, identity, began = on_main(
            ranks, lambda: (called, uuid.uuid4().hex, command_began(False))
        )
        result = Result(
            run_name=called,
            version=__version__,
            entrypoint=script,
            command=[script, *sys.argv[1:]],
            started_at=now(),
            args=args,
            model=model,
            device=describe_device(device, ranks.world, peak_tflops),
            batch=StepSize(tokens_per_step=tokens_per_step, **_samples(tokens_per_step, seq_len)),
            loss_known=False,
            writer=this_process(),
            lineage=Lineage(id=identity, name=called, attempt=1, began=began, started=time.time()),
            environment=describe_environment(device, LOOPS),
        )  # fmt: skip
        if self.config and self.config.unknown_keys:
            keys = ", ".join(self.config.unknown_keys)
            result.notes.append(f"{self.config.path}: unknown keys are ignored: {keys}")
        output = OutputFlags(
            output_dir=str(output_dir), no_tensorboard=not tensorboard, track=tuple(track), quiet=quiet
        )  # fmt: skip
        palm = flops_per_token or (
            flops_of(self.config, seq_len, False) if self.config and seq_len else None
        )
        directory = Path(output_dir) / called
        super().__init__(result, directory, device, ranks, self.window_end, output, palm, bar=False)
        self.shows_table = not quiet

    def _model(self, name: str | None) -> ModelInfo:
        if self.config:
            return describe_model(self.config)
        name = name or Path(sys.argv[0]).stem or "model"
        digest = digest_of(f"{name} {self.flops}")
        return ModelInfo(
            name=name,
            path="",
            hash=digest,
            n_parameters=None,
            n_matmul_parameters=None,
            shape={},
            config={},
            ignored_keys=[],
        )

    @property
    def done(self) -> bool:
        """Whether all steps are measured, and the kernels observed if they are to be."""
        return self.n >= self.window_end and (self.observed or not self.observes)

    def open(self) -> None:
        super().open()
        self.log.start()
        if not self.warmup_steps:
            self._open_window()

    @contextlib.contextmanager
    def step(self) -> Iterator[MeterStep]:
        """One optimizer step: all of its forward and backward passes, and the optimizer."""
        if not hasattr(self, "log"):
            raise UsageError("Meter.step: enter the meter first: with Meter(...) as meter:")
        if self.inside:
            raise UsageError("Meter.step: the step before has not ended; steps are not nested")
        step, self.inside = MeterStep(), True
        try:
            if self.n < self.window_end:
                self.log.mark("data")
                yield step
                self._finish_step(step)
            elif self.done:
                yield step
            else:
                self.observed = True
                with self._observing():
                    yield step
        finally:
            self.inside = False

    def part(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A part of a step, whose time the result then has: data, forward, backward or optimizer.

        The time since the last mark belongs to it. A part may come several times in a step.
        """
        if name not in ("data", "forward", "backward", "optimizer"):
            raise UsageError(f"Meter.part: {name!r} is not data, forward, backward or optimizer")
        return self.log.part(name) if self.n < self.window_end else contextlib.nullcontext()

    def paused(self, kind: Literal["evaluation", "save"]) -> None:
        """An evaluation or a save has ended: the time since the last step belongs to no step.

        Inside the window it makes the run unfit for comparison, as in our own loop.
        """
        m = self.result.metrics
        if self.warmup_steps <= self.n < self.window_end:
            if kind == "save":
                m.window_saves = (m.window_saves or 0) + 1
            else:
                m.window_evaluations = (m.window_evaluations or 0) + 1
        if self.n < self.window_end:
            self.log.start()

    def _finish_step(self, step: MeterStep) -> None:
        loss, values = step.loss, None
        if loss is not None:
            self.result.loss_known = True
            loss = torch.as_tensor(loss).detach()
            if loss.numel() != 1:
                raise UsageError(f"Meter: a step's loss has {loss.numel()} elements, not one")
            values = loss.reshape(1).float()
        phase = "warmup" if self.n < self.warmup_steps else "measure"
        tokens = step.tokens or self.tokens_per_step
        if not tokens:
            raise UsageError("Meter: give tokens_per_step, or set the tokens of each step")
        self.log.finish(self.n, phase, step.lr, tokens, values, last=REST)
        self.n += 1
        if self.n == self.warmup_steps:
            self._open_window()
        if self.n == self.window_end:
            synchronize(self.device)
            self.close_window()
            if self.file:  # whatever becomes of the loop
                self.file.write(self.result)

    def _open_window(self) -> None:
        synchronize(self.device)
        self.log.drain()
        warmup = sum(s.step_time_s for s in self.log.steps)
        self.result.metrics.setup_s = time.perf_counter() - self.started - warmup
        self.window.open(0.0, probe=False)
        meet(self.ranks)  # or the first step would include other ranks' preparations
        synchronize(self.device)
        self.log.start()

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        """Trace a step; what goes wrong in the step itself is the loop's, and the rest is a note."""
        failed: BaseException | None = None
        try:
            with traced(self, self._look):
                try:
                    yield
                except BaseException as error:
                    failed = error
                    raise
        except Exception as error:
            if error is failed:
                raise
            why = classify(error)[1]
            self.result.notes.append(f"the kernels that ran were not observed: {why}")

    def _look(self, trace: Trace) -> None:
        self.result.observed = observe(trace, True, self.ranks.world, assume_math=False)
        self.seq_len = self.seq_len or sequence_length(trace)

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if error is None and self.warmup_steps <= self.n < self.window_end:
            measured = self.n - self.warmup_steps
            self.result.notes.append(
                f"the loop ended after {measured} of {self.window_end - self.warmup_steps} measured steps"
            )
            synchronize(self.device)
            if measured:
                self.close_window()
        super().__exit__(kind, error, trace)

    def fill(self, error: BaseException | None) -> None:
        r, seq_len = self.result, self.seq_len
        self.fill_compile_counts()
        if self.n < self.warmup_steps and error is None:
            r.notes.append(f"the loop ended in step {self.n} of the warm-up: nothing was measured")
        tokens = [step.tokens for step in self.log.of_phase("measure")]
        if seq_len and not r.batch.seq_len:
            r.notes.append(f"{seq_len} tokens a sample: observed in a step, no seq_len was given")
        mean = round(sum(tokens) / len(tokens)) if tokens else self.tokens_per_step
        r.batch = StepSize(tokens_per_step=mean, **_samples(mean, seq_len))
        if self.flops:
            fill_flop_rates(r, self.flops, None)
        elif self.config and seq_len:
            palm, causal = (flops_of(self.config, seq_len, masked) for masked in (False, True))
            fill_flop_rates(r, palm, causal)
        else:
            need = "seq_len" if self.config else "a config or flops_per_token"
            r.notes.append(f"mfu and TFLOP/s are null: Meter was given no {need}")


def _samples(tokens: int | None, seq_len: int | None) -> dict[str, int | None]:
    """A step's sizes in samples, as far as they are known."""
    whole = tokens // seq_len if tokens and seq_len and tokens % seq_len == 0 else None
    unknown = dict.fromkeys(("micro_batch", "grad_acc_steps", "data_parallel_size"))
    return unknown | {"global_batch": whole, "seq_len": seq_len}


def _read_config(config: Any, name: str | None) -> ModelConfig | None:
    """The model of a config.json, of its content, or of a config of transformers."""
    if config is None:
        return None
    if isinstance(config, str | os.PathLike):
        read = load_config(os.fspath(config))
    else:
        raw = config if isinstance(config, Mapping) else config.to_dict()
        called = name or getattr(config, "name_or_path", "") or str(raw.get("model_type", "model"))
        read = parse_config(dict(raw), called)
    return dataclasses.replace(read, name=name) if name else read


def _ranks() -> Ranks:
    """The ranks of torch.distributed; UsageError where a launcher started several that did not meet."""
    started = find_ranks(os.environ) or Ranks()
    if dist.is_available() and dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", started.local_rank))
        return Ranks(dist.get_rank(), dist.get_world_size(), local)
    if started.world > 1:
        raise UsageError(
            f"Meter: a launcher started {started.world} ranks, and torch.distributed is not initialized; "
            "call torch.distributed.init_process_group first"
        )
    return started
