"""A meter for training loops of others: the step log, window and result of our own loop around theirs."""

import contextlib
import dataclasses
import itertools
import json
import math
import operator
import os
import re
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
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
from llm_train_bench.parallel.ranks import Ranks, find_ranks, gather, on_main
from llm_train_bench.results.figures import fill_flop_rates
from llm_train_bench.results.result_files import command_began, now, this_process
from llm_train_bench.results.schema import METER_LENGTH, Lineage, ModelInfo, Result, StepSize
from llm_train_bench.run.failures import classify
from llm_train_bench.run.profiling import start_together, traced
from llm_train_bench.run.provenance import (
    default_name,
    describe_device,
    describe_environment,
    describe_model,
    digest_of,
)
from llm_train_bench.run.record import RunRecord
from llm_train_bench.settings.flags import OutputFlags, TrackerName
from llm_train_bench.trace.observed import fallbacks, observe, sequence_lengths
from llm_train_bench.trace.read_trace import Trace

MOST_STEPS = 10**7
# What a Meter itself writes among the arguments of its result.
OWN_ARGS = (*METER_LENGTH, "tokens_per_step", "seq_len", "command", "script")
# Why nothing may begin in some states of a meter.
BUSY = {
    "inside": "a step has not ended; steps are not nested, and pauses are between them",
    "part": "a part has not ended; parts are not nested",
    "ended": "the meter has ended",
}
# The meter that is open in this process; and endings that tell apart those of one second.
_OPEN: "weakref.WeakSet[Meter]" = weakref.WeakSet()
_SUFFIXES = (f"-{i}" if i else "" for i in itertools.count())
# Libraries with training loops of their own, which a result names if they are loaded.
LOOPS = ("transformers", "accelerate", "lightning", "peft", "deepspeed", "trl")


@dataclasses.dataclass(slots=True)
class MeterStep:
    """What a loop tells of one step: its loss (a number, or a tensor of one element), lr and tokens.

    `tokens` are those of all ranks, where they are not the Meter's `tokens_per_step`.
    """

    loss: float | Tensor | None = None
    lr: float | None = None
    tokens: int | None = None


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
        track: `wandb`: send the run to Weights & Biases.
        observe: Trace the first step after the measured ones.
        quiet: Print nothing.

        Under several ranks, torch.distributed must be initialized, and every rank has a Meter. UsageError
        or ConfigError for what cannot be used.
        """
        for what, value, kinds, words in (
            ("name", name or "", str, "a str"),
            ("run_name", run_name or "", str, "a str"),
            ("output_dir", output_dir, str | os.PathLike, "a path"),
            ("settings", settings or {}, Mapping, "a mapping"),
            ("track", track, list | tuple, "a list of names"),
        ):
            if not isinstance(value, kinds):
                raise UsageError(f"Meter: {what}={value!r}: must be {words}")
        for what, size in {"tokens_per_step": tokens_per_step, "seq_len": seq_len}.items():
            if size is not None:
                _whole(f"Meter: {what}", size, 1, 2**63)
        _whole("Meter: n_steps", n_steps, 1, MOST_STEPS)
        _whole("Meter: warmup_steps", warmup_steps, 0, MOST_STEPS)
        if seq_len and tokens_per_step and tokens_per_step % seq_len:
            raise UsageError(
                f"Meter: tokens_per_step={tokens_per_step} is no multiple of seq_len={seq_len}"
            )
        rates = {"flops_per_token": flops_per_token, "peak_tflops": peak_tflops}
        for what, value in (rates | {"usd_per_hour": usd_per_hour}).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < float("inf")):
                raise UsageError(f"Meter: {what}={value!r}: must be a number above 0 and finite")
        for key, value in (settings or {}).items():
            if key in OWN_ARGS:
                raise UsageError(
                    f"Meter: settings: {key!r} is set by another argument; leave it out"
                )
            plain = isinstance(key, str) and isinstance(value, str | int | float | bool | None)
            if not plain or (isinstance(value, float) and not math.isfinite(value)):
                raise UsageError(
                    f"Meter: settings: {key!r}: {value!r} must be a str, bool, None or finite number"
                )
        if run_name is not None and (
            run_name in ("", ".", "..")
            or re.search(r"[/\\]", run_name)
            or not run_name.isprintable()
        ):
            raise UsageError(f"Meter: run_name={run_name!r}: must be the name of one directory")
        for tracker in track:
            if tracker != "wandb":
                raise UsageError(f"Meter: track={tracker!r}: must be wandb")
        if config is not None and flops_per_token is not None:
            raise UsageError("Meter: give a config or flops_per_token, not both")
        self.config, self.seq_len = _read_config(config, name), seq_len
        self.warmup_steps, self.window_end = warmup_steps, warmup_steps + n_steps
        self.tokens_per_step, self.flops, self.observes = tokens_per_step, flops_per_token, observe
        # Tokens of a sample that were seen, where none are given.
        self.lengths: set[int] = set()
        self.n, self.observed = 0, False
        # new, between (steps), inside (a step) or ended
        self.state = "new"
        # Ends this meter when another one is entered, where its loop cannot tell that it failed.
        self.give_way: Callable[[BaseException], None] | None = None
        here = torch.cuda.current_device() if torch.cuda.is_available() else None
        default, ranks = "cpu" if here is None else f"cuda:{here}", _ranks()
        try:
            device = torch.device(default if device is None else device)
        except (RuntimeError, TypeError):
            raise UsageError(f"Meter: device={device!r}: is no device of torch") from None
        if device.type not in ("cuda", "cpu"):
            raise UsageError(f"Meter: device {device}: only GPUs (cuda) and CPUs are measured")
        if device.type == "cuda" and (here is None or device.index not in (None, here)):
            advice = f"must be the current GPU, which is {here}; see torch.cuda.set_device"
            raise UsageError(f"Meter: device {device}: {advice}")
        script = Path(sys.argv[0] or "python").name
        args: dict[str, Any] = {"n_steps": n_steps, "warmup_steps": warmup_steps}
        args |= {} if usd_per_hour is None else {"usd_per_hour": usd_per_hour}
        if settings is None:  # for people; the digest is of the whole words, which may hold keys
            words = " ".join(shown_command(sys.argv[1:]))
            args["command"] = f"{words} ({digest_of(json.dumps(sys.argv[1:]))[:8]})"
        args |= dict(settings or {})
        if self.config:
            model = describe_model(self.config)
        else:
            name = name or Path(sys.argv[0]).stem or "model"
            model = ModelInfo(name=name, hash=digest_of(f"{name} {flops_per_token}"))
        called = run_name or default_name(re.sub(r"[^\w.+-]", "_", model.name), {}) + next(
            _SUFFIXES
        )
        mine = called, uuid.uuid4().hex, command_began(False)
        called, identity, began = on_main(ranks, lambda: mine)
        result = Result(
            run_name=called,
            version=__version__,
            entrypoint=f"Meter in {script}",
            command=[script, *without_secrets(sys.argv[1:])],
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
        if self.config and (keys := describe_keys_without_effect(self.config)) is not None:
            result.remark(keys)
        output = OutputFlags(
            output_dir=str(output_dir), no_tensorboard=not tensorboard, track=tuple(track), quiet=quiet
        )  # fmt: skip
        palm = flops_per_token or (
            flops_of(self.config, seq_len, False) if self.config and seq_len else None
        )
        directory = Path(output_dir).absolute() / called  # the loop may go elsewhere
        super().__init__(result, directory, device, ranks, self.window_end, output, palm, bar=False)
        self.shows_table = not quiet

    @property
    def done(self) -> bool:
        """Whether all steps are measured, and the kernels observed if they are to be."""
        return self.n >= self.window_end and (self.observed or not self.observes)

    def open(self) -> None:
        super().open()
        self.state = "between"
        self.log.start()
        if not self.warmup_steps:
            self._open_window()

    @contextlib.contextmanager
    def step(self) -> Iterator[MeterStep]:
        """One optimizer step: all of its forward and backward passes, and the optimizer."""
        self._must_be("between", "step", "enter the meter first: with Meter(...) as meter:")
        step, self.state = MeterStep(), "inside"
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
            self.state = "between" if self.state == "inside" else self.state

    def _must_be(self, state: str, what: str, advice: str) -> None:
        """UsageError unless the meter is in this state."""
        if self.state != state:
            raise UsageError(f"Meter.{what}: {BUSY.get(self.state, advice)}")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a step, whose time the result then has: data, forward, backward or optimizer.

        The time since the last mark belongs to it. A part may come several times in a step.
        """
        if name not in ("data", "forward", "backward", "optimizer"):
            raise UsageError(f"Meter.part: {name!r} is not data, forward, backward or optimizer")
        self._must_be("inside", "part", "call it inside a step")
        self.state = "part"
        try:
            with self.log.part(name) if self.n < self.window_end else contextlib.nullcontext():
                yield
        finally:
            self.state = "inside"

    def paused(self, kind: Literal["evaluation", "save"]) -> None:
        """An evaluation or a save has ended: the time since the last step belongs to no step.

        Inside the window it makes the run invalid, as in our own loop.
        """
        fields = {"evaluation": "window_evaluations", "save": "window_saves"}
        if kind not in fields:
            raise UsageError(f"Meter.paused: {kind!r} is not evaluation or save")
        self._must_be("between", "paused", "it belongs between two steps")
        if self.warmup_steps <= self.n < self.window_end:
            before = getattr(self.result.metrics, fields[kind]) or 0
            setattr(self.result.metrics, fields[kind], before + 1)
        if self.n < self.window_end:
            self.log.start()

    def _finish_step(self, step: MeterStep) -> None:
        loss, lr = step.loss, None
        if loss is not None:
            self.result.loss_known = True
            if isinstance(loss, Tensor) and loss.numel() != 1:
                raise UsageError(f"Meter: a step's loss has {loss.numel()} elements, not one")
            if isinstance(loss, Tensor) and loss.is_cuda:  # read once the GPU has passed the step
                loss = loss.detach().reshape(1)
            else:
                loss = _number("Meter: step.loss", loss)
        tokens = self.tokens_per_step
        if step.tokens is not None:
            tokens = _whole("Meter: step.tokens", step.tokens, 1, 2**63)
        elif tokens is None:
            raise UsageError("Meter: give tokens_per_step, or set the tokens of each step")
        if step.lr is not None:
            lr = _number("Meter: step.lr", step.lr)
        if self.n >= self.warmup_steps and _profiler_is_on():
            self.result.remark("a profiler was on in the window", "invalid")
        phase = "warmup" if self.n < self.warmup_steps else "measure"
        self.log.finish(self.n, phase, lr, tokens, loss, last=REST)
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
        start_together(self)

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        """Trace a step; what goes wrong in the step itself is the loop's, and the rest is a note."""
        if _profiler_is_on():  # a second one would destroy its trace
            why = "the loop has a profiler on"
            self.result.remark(f"the kernels that ran were not observed: {why}")
            yield
            return
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
            why = classify(error).text
            self.result.remark(f"the kernels that ran were not observed: {why}")

    def _look(self, trace: Trace) -> None:
        self.result.observed = observe(trace, True, self.ranks.world, assume_math=False)
        for text, advice in fallbacks(trace):
            self.result.remark(text, advice=advice)
        if not self.seq_len:
            self.lengths |= sequence_lengths(trace)

    def close_window(self) -> None:
        super().close_window()
        m = self.result.metrics
        mine = self.n - self.warmup_steps, m.window_evaluations or 0, m.window_saves or 0
        counts, evaluations, saves = zip(*gather(self.ranks, mine), strict=True)
        m.window_evaluations, m.window_saves = max(evaluations) or None, max(saves) or None
        if len(set(counts)) > 1:
            what = "ranks measured different numbers of steps"
            self.result.remark(f"{what}: {min(counts)} to {max(counts)}", "invalid")

    def __enter__(self) -> Self:
        for other in list(_OPEN):
            if other.give_way:
                other.give_way(RuntimeError("another Meter began"))
        if len(_OPEN):
            raise UsageError("Meter: another one is open in this process; end it first")
        if self.state != "new":
            raise UsageError("Meter: cannot be used twice; create a new one")
        entered = super().__enter__()
        _OPEN.add(self)
        return entered

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        self.state = "ended"
        _OPEN.discard(self)
        # The end of a generator, or of a program that succeeded, is no failure.
        done = isinstance(error, SystemExit) and error.code in (None, 0)
        error = None if done or isinstance(error, GeneratorExit) else error
        if error is None and self.warmup_steps <= self.n < self.window_end:
            measured = self.n - self.warmup_steps
            self.result.remark(
                f"the loop ended after {measured} of {self.window_end - self.warmup_steps} measured steps"
            )
            synchronize(self.device)
            self.close_window()
        super().__exit__(kind, error, trace)

    def fill(self, error: BaseException | None) -> None:
        r, seq_len, why = self.result, self.seq_len, "no seq_len was given, and none was seen"
        self.fill_compile_counts()
        if self.n < self.warmup_steps and error is None:
            r.remark(f"the loop ended in step {self.n} of the warm-up: nothing was measured")
        steps = [step.tokens for step in self.log.of_phase("measure")]
        tokens = round(sum(steps) / len(steps)) if steps else self.tokens_per_step
        if not seq_len and self.lengths:
            seq_len, *more = sorted(self.lengths)
            if more or any(n % seq_len for n in steps):
                seen = ", ".join(map(str, sorted(self.lengths)))
                seq_len, why = None, f"samples of {seen} tokens were seen; give seq_len"
            elif self.config:
                r.remark(f"{seq_len} tokens a sample: observed, no seq_len was given")
        r.batch = StepSize(tokens_per_step=tokens, **_samples(tokens, seq_len))
        r.args |= {"tokens_per_step": tokens if len(set(steps)) < 2 else None, "seq_len": seq_len}
        if self.flops:
            fill_flop_rates(r, self.flops, None)
        elif self.config and seq_len:
            palm, causal = (flops_of(self.config, seq_len, masked) for masked in (False, True))
            fill_flop_rates(r, palm, causal)
        else:
            why = why if self.config else "Meter was given no config and no flops_per_token"
            r.remark(f"mfu and TFLOP/s are null: {why}")


def _profiler_is_on() -> bool:
    """Whether the loop has PyTorch's profiler on."""
    return bool(vars(torch.autograd)["_profiler_enabled"]())


def _on_host(what: str, value: Any) -> Any:
    """The value; UsageError for a tensor on a GPU, since the loop would wait for it."""
    if isinstance(value, Tensor) and value.is_cuda:
        why = "is a tensor on a GPU; give a number, which is known without waiting"
        raise UsageError(f"{what}: {why}")
    return value


def _number(what: str, value: Any) -> float:
    """The value as a float; UsageError for what is none."""
    value = _on_host(what, value)
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(f"{what}={value!r}: must be a number") from None


def _whole(what: str, value: Any, least: int, most: int) -> int:
    """A whole number, also numpy's; UsageError for any other value, or one out of bounds."""
    number = None
    with contextlib.suppress(TypeError, ValueError):  # a truth value is no number here
        number = None if isinstance(value, bool) else operator.index(_on_host(what, value))
    if number is None or not least <= number <= most:
        raise UsageError(f"{what}={value!r}: must be a whole number from {least} to {most}")
    return number


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
        raw = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
        if not isinstance(raw, Mapping) or not raw:
            what = "a path, the content of a config.json, or a config of transformers"
            raise UsageError(f"Meter: config={config!r:.80}: must be {what}")
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
