"""One run's directory and its result, whatever ends it; exit codes of the scripts."""

import contextlib
import dataclasses
import datetime
import errno
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.args import Args, parse_args
from bench.console import ProgressDisplay, print_header, print_result
from bench.device import (
    device_memory_gib,
    device_name,
    is_out_of_memory,
    peak_memory,
    reset_peak_memory,
)
from bench.environment import describe_environment
from bench.errors import Interrupted, UsageError
from bench.flops import count_parameters, flops_per_token, linear_parameters
from bench.hardware import find_peaks
from bench.metrics import fill_flop_metrics, fill_step_metrics
from bench.parallel import compile_seconds
from bench.power import EnergyMeter
from bench.results import Batch, Device, ModelInfo, Result, ResultFile
from bench.stepfile import StepsFile
from bench.steps import StepLog
from bench.tensorboard import TensorBoardFile
from model.config import ConfigError, ModelConfig

OOM_ADVICE = (
    "what helps: a smaller --bsz with more --grad-acc-steps, a shorter --seq-len, --amp bf16, "
    "--pt-compile"
)


class Run:
    """The record of one run: `with Run(...) as run` leaves a result.json behind in every case.

    Entering makes the run's directory. Leaving by an exception writes what was measured until then
    with the status that fits, and lets the exception pass.
    """

    def __init__(
        self,
        entrypoint: str,
        args: Args,
        config: ModelConfig,
        device: torch.device,
        seq_len: int,
    ):
        self.args, self.config, self.device = args, config, device
        now = datetime.datetime.now(datetime.UTC)
        name = args.run_name or f"{now:%Y%m%d-%H%M%S}-{config.name}-{os.getpid()}"
        self.directory = Path(args.output_dir) / name
        peaks = find_peaks(device_name(device), args.peak_tflops)
        global_batch = args.bsz * args.grad_acc_steps
        self.result = Result(
            run_name=name,
            entrypoint=entrypoint,
            command=[entrypoint, *sys.argv[1:]],
            started_at=now.isoformat(timespec="seconds"),
            args=dataclasses.asdict(args) | {"seq_len": seq_len},
            model=ModelInfo(
                name=config.name,
                path=config.path,
                hash=config.hash,
                n_parameters=count_parameters(config),
                n_matmul_parameters=sum(linear_parameters(config).values()),
                shape=config.shape(),
                config=config.raw,
                ignored_keys=list(config.unknown_keys),
            ),
            device=Device(
                type=device.type,
                name=device_name(device),
                memory_gib=device_memory_gib(device),
                count=1,
                hardware=peaks.name,
                peak_bf16_tflops=peaks.bf16_tflops,
                peak_fp8_tflops=peaks.fp8_tflops,
                peak_source=peaks.source,
            ),
            batch=Batch(
                micro_batch=args.bsz,
                grad_acc_steps=args.grad_acc_steps,
                data_parallel_size=1,
                global_batch=global_batch,
                seq_len=seq_len,
                tokens_per_step=global_batch * seq_len,
            ),
            environment=describe_environment(device),
        )
        if config.unknown_keys:
            keys = ", ".join(config.unknown_keys)
            self.result.notes.append(f"{config.path}: keys nobody here knows are ignored: {keys}")

    def __enter__(self) -> "Run":
        args = self.args
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir()
            self.file = ResultFile(self.directory)
            steps_file = StepsFile(self.directory / "steps.jsonl")
        except FileExistsError as error:
            raise UsageError(
                f"{error.filename}: exists already; nothing was touched, choose another --run-name "
                "or --output-dir"
            ) from None
        except OSError as error:
            raise UsageError(
                f"--output-dir {args.output_dir}: cannot be written: {error.strerror}; choose another"
            ) from None
        self.started = time.perf_counter()
        self.sinks = [steps_file, ProgressDisplay(args.warmup_steps + args.n_steps)]
        if not args.no_tensorboard:
            self.sinks.append(
                TensorBoardFile(
                    self.directory / "tensorboard",
                    flops_per_token(self.config, self.result.batch.seq_len, False, args.pass_type),
                    self.result.device.peak_bf16_tflops,
                    self.result.device.count,
                    lambda: peak_memory(self.device),
                )
            )
        self.log = StepLog(self.device, self.sinks)
        self.energy = EnergyMeter(self.device)
        self.file.write(self.result)
        reset_peak_memory(self.device)
        print_header(self.result)
        return self

    def begin_window(self) -> None:
        """The measured window starts; the device is idle."""
        self.result.metrics.setup_s = (
            time.perf_counter() - self.started - sum(s.step_time_s for s in self.log.steps)
        )
        self.energy.begin()

    def end_window(self) -> None:
        """The measured window ends; the device is idle."""
        self.result.metrics.energy_j = self.energy.end()
        for key, value in peak_memory(self.device).items():
            setattr(self.result.metrics, key, value)

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        with _signals_ignored():
            r, m = self.result, self.result.metrics
            r.status, r.error = classify(error)
            with contextlib.suppress(Exception):  # a second failure must not hide the first
                self.log.drain()
            fill_step_metrics(r, self.log.of_phase("warmup"), self.log.of_phase("measure"))
            fill_flop_metrics(r, self.config)
            m.energy_source = self.energy.source
            m.compile_s = compile_seconds() if self.args.pt_compile else None
            if error is not None:
                with contextlib.suppress(Exception):
                    for key, value in peak_memory(self.device).items():
                        setattr(m, key, value)
            r.ended_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            for sink in self.sinks:
                with contextlib.suppress(Exception):
                    sink.close()
            self.file.write(r, last=True)
            if error is None:
                print_result(r)
            print(f"{r.status}: {self.file.path}", file=sys.stderr, flush=True)


def classify(error: BaseException | None) -> tuple[str, str | None]:
    """Status of a run that ended with this exception, and its message on one line."""
    if error is None:
        return "ok", None
    text = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return "interrupted", str(error) or "SIGINT"
    if is_out_of_memory(error):
        return "oom", text
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "failed", f"disk full: {text}"
    return "failed", f"{type(error).__name__}: {text}"


def launch(train: Callable[[Args], None], argv: Sequence[str], prog: str) -> int:
    """Parse, train, and turn whatever happens into one line and an exit code.

    0 done, 2 bad arguments or config, 3 out of memory, 1 anything else. Only a failure of our own
    shows a traceback.
    """

    def on_sigterm(number, frame):
        raise Interrupted("SIGTERM")

    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        train(parse_args(argv, prog))
        return 0
    except (UsageError, ConfigError) as error:
        return _end(prog, str(error), 2)
    except (KeyboardInterrupt, Interrupted) as error:
        return _end(prog, f"interrupted by {classify(error)[1]}", 1)
    except Exception as error:
        status, text = classify(error)
        if status == "oom":
            return _end(prog, f"out of memory: {text}; {OOM_ADVICE}", 3)
        if not text.startswith("disk full"):
            traceback.print_exc()
        return _end(prog, text, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
        gc.enable()


def _end(prog: str, text: str, code: int) -> int:
    print(f"{prog}: {text}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _signals_ignored():
    """While the result is written, a second Ctrl-C must not cut it off."""
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
