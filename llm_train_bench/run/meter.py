"""A meter for training loops of others: the step log, window and result of our own loop around theirs."""

import contextlib
import json
import os
import re
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import torch.distributed as dist
from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError, validate_call
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from llm_train_bench import __version__
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import shown_command, without_secrets
from llm_train_bench.formulas.flops import flops_per_token as flops_of
from llm_train_bench.measure.device import synchronize
from llm_train_bench.measure.steps import REST
from llm_train_bench.model.config import (
    ModelConfig,
    describe_keys_without_effect,
    load_config,
    parse_config,
)
from llm_train_bench.parallel.ranks import ALONE, Ranks, find_ranks, gather, on_main
from llm_train_bench.results.figures import fill_flop_rates
from llm_train_bench.results.result_files import begin_attempt, now, this_process
from llm_train_bench.results.schema import METER_LENGTH, ModelInfo, Result, StepSize
from llm_train_bench.run import provenance
from llm_train_bench.run.failures import classify
from llm_train_bench.run.profiling import NOT_OBSERVED, start_together, traced
from llm_train_bench.run.record import RunRecord
from llm_train_bench.settings.flags import OutputFlags, TrackerName
from llm_train_bench.trace.observed import fallbacks, observe, sequence_lengths
from llm_train_bench.trace.read_trace import Trace

# What a Meter itself writes among the arguments of its result.
OWN_ARGS = (*METER_LENGTH, "tokens_per_step", "seq_len", "command", "script")
# Libraries with training loops of their own, which a result names if they are loaded.
LOOPS = ("transformers", "accelerate", "lightning", "peft", "deepspeed", "trl")
# The states of a meter.
NEW, BETWEEN, IN_STEP = "not entered", "between two steps", "inside a step"
IN_PART, ENDED = "inside a part", "at its end"
# The meter that is open in this process.
_OPEN: "weakref.WeakSet[Meter]" = weakref.WeakSet()


def _plain(value: Any) -> Any:
    """A number of torch or numpy as one of Python; other values as they are."""
    if isinstance(value, Tensor) and value.is_cuda:
        raise ValueError("it is on a GPU; give a number, which is known without waiting")
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        return value.item()
    return value


def _read_loss(loss: Any) -> Any:
    """A loss on a GPU as a vector, to be read once the GPU has passed the step; others as numbers."""
    if not isinstance(loss, Tensor):
        return _plain(loss)
    if loss.numel() != 1:
        raise ValueError(f"it has {loss.numel()} elements, not one")
    return loss.detach().reshape(1) if loss.is_cuda else _plain(loss)


@contextlib.contextmanager
def in_one_line(of: str) -> Iterator[None]:
    """UsageError for what a schema or the types of a function do not allow; `of` is its beginning."""
    try:
        yield
    except ValidationError as error:
        first, *more = error.errors()
        # Several where a value may have one of several types, whose names then end the places.
        problems = [first, *(problem for problem in more if problem["loc"][0] == first["loc"][0])]
        shared = [key for key in first["loc"] if all(key in problem["loc"] for problem in problems)]
        where = ".".join(map(str, shared))
        why = " or ".join(dict.fromkeys(problem["msg"] for problem in problems))
        raise UsageError(f"{of}{where}={first['input']!r:.80}: {why}") from None


Steps = Annotated[int, Field(ge=0, le=10**7), BeforeValidator(_plain)]
Tokens = Annotated[int, Field(ge=1, lt=2**63), BeforeValidator(_plain)]
Rate = Annotated[int | FiniteFloat, Field(gt=0, le=1e300), BeforeValidator(_plain)]
Setting = Annotated[bool | int | FiniteFloat | str | None, BeforeValidator(_plain)]
TYPES = ConfigDict(strict=True, arbitrary_types_allowed=True)


@pydantic_dataclass(config=TYPES, slots=True)
class MeterStep:
    """What a loop tells of one step: its loss (a number, or a tensor of one element), lr and tokens.

    `tokens` are those of all ranks, where they are not the Meter's `tokens_per_step`.
    """

    loss: Annotated[float | Tensor | None, BeforeValidator(_read_loss)] = None
    lr: Annotated[float | None, BeforeValidator(_plain)] = None
    tokens: Tokens | None = None


class Meter(RunRecord):
    """Measures the steps of a training loop; `with` it, a run's directory with a result.json is left.

    The first `warmup_steps` steps are the warm-up and the next `n_steps` are measured. The loop may go
    on after them: its next step is traced, to observe the kernels, and later ones cost nothing.
    `done` says that nothing is left to measure. A step begins where the one before it ended, so the
    time to load its batch belongs to it. The device is waited for before and after the measured steps
    and the traced one, and nowhere else.
    """

    @in_one_line("Meter: ")
    @validate_call(config=TYPES)
    def __init__(
        self,
        config: Any = None,
        *,
        tokens_per_step: Tokens | None = None,
        seq_len: Tokens | None = None,
        flops_per_token: Rate | None = None,
        name: str | None = None,
        warmup_steps: Steps = 10,
        n_steps: Annotated[Steps, Field(ge=1)] = 50,
        settings: Mapping[str, Setting] | None = None,
        output_dir: str | os.PathLike[str] = "runs",
        run_name: str | None = None,
        device: torch.device | str | None = None,
        peak_tflops: Rate | None = None,
        usd_per_hour: Rate | None = None,
        track: Sequence[TrackerName] = (),
        tensorboard: bool = True,
        observe: bool = True,
        quiet: bool = False,
    ):
        """What is measured, and where the result goes; docs/PYTHON.md has more.

        config: The model's config.json, its content, or a config of transformers, for the FLOPs.
        tokens_per_step: Tokens of an optimizer step over all ranks. By default each step tells its own.
        seq_len: Tokens of a sample, for the FLOPs of attention. By default that of the traced step.
        flops_per_token: FLOPs per trained token (forward and backward) in place of a config.
        name: The model's name. By default that of the config.
        settings: What tells this run from others of the script. By default its command line.
        device: By default the current GPU, or the CPU where there is none.
        peak_tflops: Dense BF16 peak of a device that configs/hardware.json does not list [TFLOP/s].
        usd_per_hour: Price of one device [US$/h].
        track: `wandb`: send the run to Weights & Biases.
        observe: Trace the first step after the measured ones.
        quiet: Print nothing.

        UsageError or ConfigError for what cannot be used.
        """
        if own := [key for key in OWN_ARGS if key in (settings or {})]:
            raise UsageError(f"Meter: settings: {own[0]!r} is set by another argument")
        if seq_len and tokens_per_step and tokens_per_step % seq_len:
            raise UsageError(
                f"Meter: tokens_per_step={tokens_per_step} is no multiple of seq_len={seq_len}"
            )
        if config is not None and flops_per_token is not None:
            raise UsageError("Meter: give a config or flops_per_token, not both")
        if run_name is not None and (
            not run_name.strip(".") or re.search(r"[/\\]", run_name) or not run_name.isprintable()
        ):
            raise UsageError(f"Meter: run_name={run_name!r}: must be the name of one directory")
        self.config, self.seq_len = _read_config(config), seq_len
        self.warmup_steps, self.window_end = warmup_steps, warmup_steps + n_steps
        self.tokens_per_step, self.flops, self.observes = tokens_per_step, flops_per_token, observe
        # Tokens of a sample that were seen, where none are given.
        self.lengths: set[int] = set()
        self.n, self.observed, self.state = 0, False, NEW
        # Ends this meter when another one is entered, where its loop cannot tell that it failed.
        self.give_way: Callable[[BaseException], None] | None = None
        device, ranks = _choose_device(device), _ranks()
        script = Path(sys.argv[0] or "python").name
        args: dict[str, Any] = {"n_steps": n_steps, "warmup_steps": warmup_steps}
        args["usd_per_hour"] = usd_per_hour
        if settings is None:  # for people; the digest is of the whole words, which may hold keys
            words = " ".join(shown_command(sys.argv[1:]))
            args["command"] = f"{words} ({provenance.digest_of(json.dumps(sys.argv[1:]))[:8]})"
        args |= settings or {}
        if self.config:
            model = provenance.describe_model(self.config)
            model.name = name or model.name
        else:
            name = name or Path(sys.argv[0]).stem or "model"
            model = ModelInfo(name=name, hash=provenance.digest_of(f"{name} {flops_per_token}"))
        identity = uuid.uuid4().hex
        # The end of the default name tells apart those of one second.
        usual = provenance.default_name(re.sub(r"[^\w.+-]", "_", model.name), {})
        mine = run_name or f"{usual}-{identity[:4]}", identity
        called, identity = on_main(ranks, lambda: mine)
        result = Result(
            run_name=called,
            version=__version__,
            entrypoint=f"Meter in {script}",
            command=[script, *without_secrets(sys.argv[1:])],
            started_at=now(),
            args=args,
            model=model,
            device=provenance.describe_device(device, ranks.world, peak_tflops),
            batch=_step_size(tokens_per_step, seq_len),
            loss_known=False,
            writer=this_process(),
            run_id=identity,
            attempts=[begin_attempt()],
            environment=provenance.describe_environment(device, LOOPS),
        )  # fmt: skip
        if self.config and (keys := describe_keys_without_effect(self.config)) is not None:
            result.remark(keys)
        output = OutputFlags(
            output_dir=str(output_dir), no_tensorboard=not tensorboard, track=tuple(track), quiet=quiet
        )  # fmt: skip
        palm = flops_of(self.config, seq_len, False) if self.config and seq_len else flops_per_token
        directory = Path(output_dir).absolute() / called  # the loop may go elsewhere
        super().__init__(result, directory, device, ranks, self.window_end, output, palm, bar=False)
        self.shows_table = not quiet

    @property
    def done(self) -> bool:
        """Whether all steps are measured, and the kernels observed if they are to be."""
        return self.n >= self.window_end and (self.observed or not self.observes)

    def open(self) -> None:
        super().open()
        self.state = BETWEEN
        self.log.start()
        if not self.warmup_steps:
            self._open_window()

    def _require(self, state: str, call: str) -> None:
        """UsageError unless the meter is in this state."""
        if self.state != state:
            raise UsageError(f"Meter.{call}: must be called {state}; the meter is {self.state}")

    @contextlib.contextmanager
    def step(self) -> Iterator[MeterStep]:
        """One optimizer step: all of its forward and backward passes, and the optimizer."""
        self._require(BETWEEN, "step")
        step, self.state = MeterStep(), IN_STEP
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
            self.state = BETWEEN if self.state == IN_STEP else self.state

    @contextlib.contextmanager
    def part(self, name: Literal["data", "forward", "backward", "optimizer"]) -> Iterator[None]:
        """A part of a step, whose time the result then has.

        The time since the last mark belongs to it. A part may come several times in a step.
        """
        if name not in ("data", "forward", "backward", "optimizer"):
            raise UsageError(f"Meter.part: {name!r} is not data, forward, backward or optimizer")
        self._require(IN_STEP, "part")
        self.state = IN_PART
        try:
            with self.log.part(name) if self.n < self.window_end else contextlib.nullcontext():
                yield
        finally:
            self.state = IN_STEP

    def paused(self, kind: Literal["evaluation", "save"]) -> None:
        """An evaluation or a save has ended: the time since the last step belongs to no step.

        Inside the window it makes the run invalid, as in our own loop.
        """
        if kind not in ("evaluation", "save"):
            raise UsageError(f"Meter.paused: {kind!r} is not evaluation or save")
        self._require(BETWEEN, "paused")
        if self.warmup_steps <= self.n < self.window_end:
            m = self.result.metrics
            if kind == "save":
                m.window_saves = (m.window_saves or 0) + 1
            else:
                m.window_evaluations = (m.window_evaluations or 0) + 1
        if self.n < self.window_end:
            self.log.start()

    def _finish_step(self, step: MeterStep) -> None:
        with in_one_line("Meter: step."):
            step = MeterStep(loss=step.loss, lr=step.lr, tokens=step.tokens)
        tokens = step.tokens or self.tokens_per_step
        if tokens is None:
            raise UsageError("Meter: give tokens_per_step, or set the tokens of each step")
        if step.loss is not None:
            self.result.loss_known = True
        if self.n >= self.warmup_steps and _profiler_is_on():
            self.result.remark("a profiler was on in the window", "invalid")
        phase = "warmup" if self.n < self.warmup_steps else "measure"
        self.log.finish(self.n, phase, step.lr, tokens, step.loss, last=REST)
        self.n += 1
        if self.n == self.warmup_steps:
            self._open_window()
        if self.n == self.window_end:
            self.close_window()
            if self.file:  # whatever becomes of the loop
                self.file.write(self.result)

    def _open_window(self) -> None:
        synchronize(self.device)
        self.log.drain()
        warmup = sum(s.step_time_s for s in self.log.steps)
        self.result.metrics.setup_s = time.perf_counter() - self.started - warmup
        self.window.open(0.0, probe=False)
        start_together(self)

    def close_window(self) -> None:
        synchronize(self.device)
        super().close_window()
        m = self.result.metrics
        mine = self.n, m.window_evaluations or 0, m.window_saves or 0, self.lengths
        ends, evaluations, saves, lengths = zip(*gather(self.ranks, mine), strict=True)
        m.window_evaluations, m.window_saves = max(evaluations) or None, max(saves) or None
        self.lengths.update(*lengths)
        if len(set(ends)) > 1:
            first, last = (n - self.warmup_steps for n in (min(ends), max(ends)))
            what = "ranks measured different numbers of steps"
            self.result.remark(f"{what}: {first} to {last}", "invalid")

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        """Trace a step; what goes wrong in the step itself is the loop's, and the rest is a note."""
        if _profiler_is_on():  # a second one would destroy its trace
            self.result.remark(f"{NOT_OBSERVED}: the loop has a profiler on")
            yield
            return
        step_ended = False
        try:
            with traced(self, self._look):
                yield
                step_ended = True
        except Exception as error:
            if not step_ended:
                raise
            self.result.remark(f"{NOT_OBSERVED}: {classify(error).text}")

    def _look(self, trace: Trace) -> None:
        self.result.observed = observe(trace, True, self.ranks.world, assume_math=False)
        for text, advice in fallbacks(trace):
            self.result.remark(text, advice=advice)
        if not self.seq_len:
            self.lengths |= sequence_lengths(trace)

    def __enter__(self) -> Self:
        for other in list(_OPEN):
            if other.give_way:
                other.give_way(RuntimeError("another Meter began"))
        if len(_OPEN):
            raise UsageError("Meter: another one is open in this process; end it first")
        if self.state != NEW:
            raise UsageError("Meter: cannot be used twice; create a new one")
        entered = super().__enter__()
        _OPEN.add(self)
        return entered

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        self.state = ENDED
        _OPEN.discard(self)
        # The end of a generator, or of a program that succeeded, is no failure.
        success = isinstance(error, SystemExit) and error.code in (None, 0)
        error = None if success or isinstance(error, GeneratorExit) else error
        if error is None and self.n < self.window_end:
            measured = max(0, self.n - self.warmup_steps)
            wanted = self.window_end - self.warmup_steps
            what = f"the loop ended after {measured} of {wanted} measured steps"
            self.result.remark(what, "invalid")
            if self.n >= self.warmup_steps:
                self.close_window()
        super().__exit__(kind, error, trace)

    def fill(self, error: BaseException | None) -> None:
        self.fill_compile_counts()
        steps = [step.tokens for step in self.log.of_phase("measure")]
        tokens = round(sum(steps) / len(steps)) if steps else self.tokens_per_step
        seq_len = self.seq_len
        whole = [n for n in self.lengths if not any(tokens % n for tokens in steps)]
        if seq_len is None and len(self.lengths) == len(whole) == 1:
            (seq_len,) = whole
            self.result.remark(f"{seq_len} tokens a sample: observed, no seq_len was given")
        r = self.result
        r.batch = _step_size(tokens, seq_len)
        r.args |= {"tokens_per_step": tokens if len(set(steps)) < 2 else None, "seq_len": seq_len}
        if self.flops:
            fill_flop_rates(r, self.flops, None)
        elif self.config and seq_len:
            palm, causal = (flops_of(self.config, seq_len, masked) for masked in (False, True))
            fill_flop_rates(r, palm, causal)
        else:
            why = f"no seq_len was given; lengths seen: {sorted(self.lengths) or 'none'}"
            why = why if self.config else "Meter was given no config and no flops_per_token"
            r.remark(f"mfu and TFLOP/s are null: {why}")


def _profiler_is_on() -> bool:
    """Whether the loop has PyTorch's profiler on."""
    return bool(vars(torch.autograd)["_profiler_enabled"]())


def _step_size(tokens: int | None, seq_len: int | None) -> StepSize:
    """A step's tokens, and its samples as far as they are known."""
    samples = tokens // seq_len if tokens and seq_len and tokens % seq_len == 0 else None
    known = {"global_batch": samples, "seq_len": seq_len, "tokens_per_step": tokens}
    return StepSize(**dict.fromkeys(StepSize.model_fields) | known)


def _choose_device(wanted: torch.device | str | None) -> torch.device:
    """The current GPU, or the CPU where there is none or it is wanted; UsageError for any other."""
    gpu = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else None
    name = str(wanted or gpu or "cpu")
    on_gpu = gpu is not None and name in ("cuda", gpu)
    if not on_gpu and name not in ("cpu", "cpu:0"):
        raise UsageError(
            f"Meter: device={name!r}: must be the CPU or the current GPU, which is {gpu}"
        )
    return torch.device(name)


def _read_config(config: Any) -> ModelConfig | None:
    """The model of a config.json, of its content, or of a config of transformers."""
    if config is None:
        return None
    content = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(content, str | os.PathLike):
        return load_config(os.fspath(content))
    if isinstance(content, Mapping):
        name = getattr(config, "name_or_path", "") or content.get("model_type", "model")
        return parse_config(dict(content), str(name))
    what = "a path, the content of a config.json, or a config of transformers"
    raise UsageError(f"Meter: config={config!r:.80}: must be {what}")


def _ranks() -> Ranks:
    """The ranks of torch.distributed; UsageError where a launcher started several that did not meet."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    if (find_ranks(os.environ) or ALONE).world > 1:
        why = "a launcher started several ranks, and torch.distributed is not initialized"
        raise UsageError(f"Meter: {why}; call torch.distributed.init_process_group first")
    return ALONE
