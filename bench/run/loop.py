"""The one timed loop of all training scripts."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bench.apply.compile import compile_errors_named, uses_cuda_graphs
from bench.apply.data import Validation, batches
from bench.apply.optimizer import learning_rate, optimizer_step
from bench.apply.precision import autocast
from bench.measure.device import synchronize
from bench.measure.memory import MemoryReport
from bench.parallel.fsdp import average_over_ranks
from bench.parallel.ranks import meet
from bench.run.life import Run
from bench.run.profiling import build_capture
from bench.settings.flags import Args, phase_of, total_steps, window_end

Batches = Iterator[tuple[Tensor, Tensor]]
NoSync = Callable[[], contextlib.AbstractContextManager]


def measure(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    micro_batches: Batches,
    no_sync: NoSync = contextlib.nullcontext,
) -> None:
    """Run the warm-up steps and the measured ones; times, losses and energy go into `run`.

    `no_sync` is the context of the micro steps before a step's last one (DDP's, which leaves the
    gradients unreduced). Between the first and the last measured step nothing but training happens:
    no synchronisation, no evaluation; files and screen are served about once a second.
    """
    args = run.args
    step_fn = build_step(run, model, optimizer, micro_batches, no_sync)
    captures = build_capture(run, model)
    watchers = [MemoryReport(run.result, run.log, args, model, optimizer), *captures]
    # Forward passes name their block themselves.
    with uncollected(), compile_errors_named("the backward of a block"):
        run.log.start()
        for step in range(total_steps(args)):
            if step == args.warmup_steps:
                synchronize(run.device)
                run.log.drain()
                gc.collect()
                run.begin_window()
                meet(run.ranks)  # or the first step of some has the preparations of others in it
                synchronize(run.device)
                run.log.start()
            for watcher in watchers:
                watcher.before(step)
            step_fn(step, phase_of(step, args))
            if captures:
                run.end_steps()  # writing a trace takes as long as it does
            for watcher in watchers:
                watcher.after(step)
            if step == window_end(args) - 1:
                synchronize(run.device)
                run.end_window()
                run.log.start()
            for watcher in captures:
                watcher.write(step)
            if step % 1000 == 999:
                gc.collect(0)  # so that a long run does not leak; takes microseconds
        run.end_steps()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection at moments of Python's choosing: it shows as outliers of step time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def build_step(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    micro_batches: Batches,
    no_sync: NoSync,
) -> Callable[[int, str], None]:
    """The function of one step for the run's --pass-type: `step_fn(step, phase)`."""
    args, log, device = run.args, run.log, run.device
    tokens = run.result.batch.tokens_per_step
    n_micro = run.result.batch.grad_acc_steps
    scaler = run.scaler
    fp8 = run.fp8
    amp = forward_amp(args, model)
    train = args.pass_type != "forward"
    sharded = sharded_modules(model)
    graphs = uses_cuda_graphs(args, device)
    parameters = list(model.parameters())  # a walk through gpt2-125m takes 0.4 ms
    if graphs and train:
        # A gradient made inside a CUDA graph lives in the graph's memory and is overwritten by its
        # next replay; into one that exists already it is added.
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step_fn(step: int, phase: str) -> None:
        total = torch.zeros((), device=device)
        for micro in range(n_micro):
            run.begin_micro_step(step)
            with log.part("data"):
                inputs, labels = next(micro_batches)
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with no_sync() if micro < n_micro - 1 else contextlib.nullcontext():
                with log.part("forward"):
                    with torch.set_grad_enabled(train), autocast(amp, device), fp8.forward(micro):
                        loss = model(inputs, labels) / n_micro
                    total += loss.detach()
                if train:
                    with log.part("backward"):
                        (loss if scaler is None else loss * scaler.scale).backward()
                else:
                    reshard(sharded)
        rate, norm = 0.0, None
        with log.draw("optimizer"):
            if args.pass_type == "step":
                rate = learning_rate(step, args)
                norm = optimizer_step(parameters, optimizer, rate, args.grad_clip, scaler)
                fp8.after_step(model)
            if graphs and train:  # in place, and not with a kernel for each
                torch._foreach_zero_([parameter.grad for parameter in parameters])
            elif train:
                for parameter in parameters:
                    parameter.grad = None
        average_over_ranks(total)
        log.finish(step, phase, rate, tokens, total, norm)

    return step_fn


def forward_amp(args: Args, model: nn.Module) -> str:
    """The autocast of a forward pass: none for a sharded model, which casts when it gathers."""
    return "off" if isinstance(model, FSDPModule) else args.amp


@torch.no_grad()
def evaluate(run: Run, model: nn.Module, data: Validation | None) -> float | None:
    """Mean validation loss without dropout, or None without data; never inside the window.

    Every rank computes all of it: sharded models need all ranks in each forward. Transformer Engine's
    modules run without FP8 here, since delayed scaling would remember these activations.
    """
    if data is None:
        return None
    args, device = run.args, run.device
    amp = forward_amp(args, model)
    model.eval()
    total = torch.zeros((), device=device)
    for inputs, labels in batches(*data, device):
        if uses_cuda_graphs(args, device):
            torch.compiler.cudagraph_mark_step_begin()
        with autocast(amp, device):
            total += model(inputs, labels)
    model.train()
    reshard(sharded_modules(model))
    return (total / len(data[1])).item()


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The parts that FSDP gathers together; none without it."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(modules: list[FSDPModule]) -> None:
    """After a forward pass without a backward: let go what was gathered, which would else stay.

    What stays is in low precision, no export, and the next pass would find it there.
    """
    for module in modules:
        module.reshard()
