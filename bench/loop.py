"""The one timed loop of all training scripts."""

import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bench.args import Args
from bench.device import reset_peak_memory, synchronize
from bench.optim import clip_gradients, learning_rate
from bench.parallel import CUDA_GRAPH_MODES
from bench.precision import autocast, grad_scaler
from bench.run import Run

Batches = Iterator[tuple[Tensor, Tensor]]


def measure(
    run: Run,
    args: Args,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Batches,
) -> None:
    """Run the warm-up steps and the measured ones; times, losses and energy go into `run`.

    Between the first and the last measured step nothing but training happens: no synchronisation,
    no garbage collection, no evaluation; files and screen are served about once a second.
    """
    step_fn = build_step(run, args, model, optimizer, batches)
    # Garbage collection at moments of Python's choosing shows as outliers of step time.
    gc.collect()
    gc.disable()
    try:
        run.log.start()
        for step in range(args.warmup_steps + args.n_steps):
            if step == args.warmup_steps:
                synchronize(run.device)
                run.log.drain()
                gc.collect()
                reset_peak_memory(run.device)
                run.begin_window()
                run.log.start()
            step_fn(step, "warmup" if step < args.warmup_steps else "measure")
            if step % 1000 == 999:
                gc.collect(0)  # a long run must not leak; the youngest objects take microseconds
        synchronize(run.device)
        run.end_window()
        run.log.drain()
    finally:
        gc.enable()


def build_step(
    run: Run,
    args: Args,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Batches,
) -> Callable[[int, str], None]:
    """The function of one step for the run's --pass-type: `step_fn(step, phase)`."""
    log, device = run.log, run.device
    tokens = run.result.batch.tokens_per_step
    scaler = grad_scaler(args.amp, device)
    train = args.pass_type != "forward"
    graphs = args.pt_compile and args.compile_mode in CUDA_GRAPH_MODES and device.type == "cuda"
    if graphs and train:
        # A gradient made inside a CUDA graph lives in the graph's memory and is overwritten by its
        # next replay; into one that exists already it is added.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step_fn(step: int, phase: str) -> None:
        total = torch.zeros((), device=device)
        for _ in range(args.grad_acc_steps):
            inputs, labels = next(batches)
            log.mark("data")
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.set_grad_enabled(train), autocast(args.amp, device):
                loss = model(inputs, labels)
            total += loss.detach()
            log.mark("forward")
            if train:
                scaler.scale(loss / args.grad_acc_steps).backward()
                log.mark("backward")
        rate, norm = 0.0, None
        if args.pass_type == "step":
            rate = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = rate
            scaler.unscale_(optimizer)
            norm = clip_gradients(model, args.grad_clip)
            scaler.step(optimizer)
            scaler.update()
        if train:
            model.zero_grad(set_to_none=not graphs)
        log.finish(step, phase, rate, tokens, total / args.grad_acc_steps, norm)

    return step_fn


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, args: Args, device: torch.device) -> float:
    """Mean loss over the batches, without dropout; never called inside the measured window."""
    model.eval()
    total, n = torch.zeros((), device=device), 0
    for inputs, labels in batches:
        if args.pt_compile and args.compile_mode in CUDA_GRAPH_MODES:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast(args.amp, device):
            total += model(inputs, labels)
        n += 1
    model.train()
    return (total / n).item()
