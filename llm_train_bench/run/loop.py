"""The one timed loop of all training scripts."""

import contextlib
import gc
import math
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llm_train_bench.apply.compile import compile_errors_named
from llm_train_bench.apply.data import MicroBatch, Validation, batches, repeating_last
from llm_train_bench.apply.optimizer import learning_rate, optimizer_step
from llm_train_bench.apply.precision import autocast
from llm_train_bench.apply.sharded import reshard, sharded_modules
from llm_train_bench.base.errors import Preempted
from llm_train_bench.measure.device import synchronize
from llm_train_bench.measure.memory import MemoryReport
from llm_train_bench.model.experts import imbalance_since, mixtures, rows_so_far, update_corrections
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.parallel.ranks import average_over_ranks, gather
from llm_train_bench.results.result_files import seconds_alive
from llm_train_bench.run.failures import classify
from llm_train_bench.run.profiling import NOT_OBSERVED, build_capture, observed_in, traced
from llm_train_bench.run.signals import ENDING, ignore, signal_said
from llm_train_bench.run.training_run import Run

if TYPE_CHECKING:  # these take a second to import
    from llm_train_bench.parallel.pipeline import Pipeline
    from llm_train_bench.run.checkpoint.saver import Saver

Batches = Iterator[MicroBatch]
NoSync = Callable[[], contextlib.AbstractContextManager]
# The phase of a step that is only traced, by observe_kernels.
OBSERVE = "observe"
# A step's forward and backward passes: from its number to its loss. They leave the gradients behind.
Passes = Callable[[int], Tensor]
Evaluate = Callable[[], float | None]


def measure(
    run: Run,
    model: nn.Module,
    optimizer: Optimizer | None,
    step_fn: Callable[[int, str], None],
    evaluate: Evaluate = lambda: None,
    saver: "Saver | None" = None,
) -> None:
    """Run the warm-up steps and the measured ones; times, losses and energy go into `run`.

    `step_fn(step, phase)` is one optimizer step (build_step). Between the first and the last measured
    step nothing but training happens: no synchronisation, no evaluation; files and screen are served
    every two seconds at most. The validation loss is taken before the first step and after the last one.
    """
    schedule, work = run.schedule, run.plan.work
    captures = build_capture(run, model)
    looks = (run.device.type == "cuda" or run.plan.args.memory_snapshot) and not work.cuda_graphs
    memory = MemoryReport(run.result, run.log, schedule, looks, model, optimizer)
    watchers = [memory, *captures]
    eval_every, m = run.plan.args.eval_every, run.result.metrics
    m.val_loss_before = evaluate()
    rows: list[Any] = []
    # Forward passes name their block themselves.
    listening = run.stop_request.listening() if saver else contextlib.nullcontext()
    with listening, uncollected(), compile_errors_named("the backward of a block"):
        run.log.start()
        for step in range(schedule.start, schedule.total):
            if saver and step >= schedule.start + 2 and run.log.stop_of(step - 2):
                save_and_stop(run, saver, step)  # a stop need not wait for the window to open
            if step == schedule.window_begin:
                synchronize(run.device)
                run.log.drain()
                gc.collect()
                run.end_steps()  # warming the device up may take long
                rows = rows_so_far(model)
                run.begin_window()
            for watcher in watchers:
                watcher.before(step)
            step_fn(step, schedule.phase_of(step))
            if captures:
                run.end_steps()  # writing a trace may take long
            for watcher in watchers:
                watcher.after(step)
            if saver:
                saver.after(step)
            if step == schedule.start and run.start.checkpoint:
                synchronize(run.device)
                m.restart_s = seconds_alive()
            if eval_every and (step + 1) % eval_every == 0:
                run.end_steps()
                m.val_losses.append((step + 1, evaluate()))
                if schedule.window_begin <= step < schedule.window_end - 1:
                    m.window_evaluations = (m.window_evaluations or 0) + 1
                run.log.start()
            if step == schedule.window_end - 1 and step >= schedule.window_begin:
                run.close_window()
                fill_imbalance(run, imbalance_since(rows, model))
                run.log.start()
            if step % 1000 == 999:
                gc.collect(0)  # so that a long run does not leak; takes microseconds
        run.end_steps()
    m.val_loss = evaluate()
    if m.val_loss is not None and m.val_loss < 700:  # beyond, e to its power is not a number
        m.val_perplexity = math.exp(m.val_loss)


def fill_imbalance(run: Run, mine: tuple[float, float] | None) -> None:
    """Record how unequal the rows of experts were over the window; all ranks call it."""
    known = list(filter(None, gather(run.ranks, mine))) if run.plan.work.config.experts else []
    if known:
        m, worst = run.result.metrics, map(max, zip(*known, strict=True))
        m.expert_rows_max_over_mean, m.ep_rank_rows_max_over_mean = worst


def save_and_stop(run: Run, saver: "Saver", step: int) -> None:
    """Save before a step, and raise Preempted: a rank was asked to, two steps ago."""
    if saver.last_good != step:
        saver.save(step)
    why = signal_said(run.stop_request.number) if run.stop_request.number else None
    if saver.last_good != step:
        raise Preempted(f"{why or 'a signal'}, and could not be saved")
    ignore((*ENDING, signal.SIGUSR1))
    with contextlib.suppress(RuntimeError):  # SLURM ends all ranks when the first has ended
        why = next(filter(None, gather(run.ranks, why)), why)
    raise Preempted(why or "a signal", step)


def build_saver(run: Run, model: Any, optimizer: Optimizer | None) -> "Saver | None":
    """Load the checkpoint that a run starts from, if any. Its saver, if it saves."""
    resumed, initial, saves = run.start.checkpoint, run.start.initial, run.plan.args.save_every
    if not (resumed or initial or saves):
        return None
    from llm_train_bench.run.checkpoint import saver  # takes a second to import

    if resumed and optimizer:
        saver.load(run, model, optimizer, resumed[0])
    elif initial:
        saver.read(initial[0], saver.state_tensors(model, {}))
    run.fp8.after_step(model)
    return saver.Saver(run, model, optimizer) if optimizer and saves else None


def observe_kernels(run: Run, step_fn: Callable[[int, str], None]) -> None:
    """Trace one more step, the last thing a run does, for `result.observed`.

    All ranks run it, the first one traces it. It comes after everything that is saved, exported,
    validated or measured, and changes none of that. A failure is a note.
    """
    schedule = run.schedule
    observed = schedule.profiler == "torch"  # in the captured steps
    if run.plan.args.no_observe or observed or schedule.total <= schedule.start:
        return
    run.count()

    try:
        with traced(run, observed_in):
            step_fn(schedule.total, OBSERVE)
    except Exception as error:
        run.result.remark(f"{NOT_OBSERVED}: {classify(error).text}")
    finally:
        run.end_steps()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turn off automatic garbage collection, which shows as outliers of step time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def build_passes(
    run: Run, model: nn.Module, micro_batches: Batches, no_sync: NoSync = contextlib.nullcontext
) -> Passes:
    """Forward and backward of all micro batches of a step, one after the other.

    `no_sync` is the context of the micro steps before a step's last one (DDP's, which leaves the
    gradients unreduced).
    """
    work, log, device, scaler, fp8 = run.plan.work, run.log, run.device, run.scaler, run.fp8
    n_micro, train, graphs = work.batch.grad_acc_steps, work.trains, work.cuda_graphs
    sharded = sharded_modules(model)
    amp = "off" if sharded else work.amp  # FSDP casts when it gathers
    micro_batches = repeating_last(micro_batches)
    # Ranks that share a batch each add a part of its gradient; otherwise FSDP and DDP average.
    loss_divisor = work.parallelism.ranks if work.parallelism.divided else 1
    balances = bool(work.config.experts and work.config.experts.aux_loss)

    def passes(step: int) -> Tensor:
        total = torch.zeros((), device=device)
        if balances:
            scale = 1.0 if scaler is None else scaler.scale
            for mixture in mixtures(model):
                mixture.scale_balance_loss(scale / n_micro / loss_divisor)
        for micro in range(n_micro):
            run.begin_micro_step(step)
            with log.part("data"):
                batch = next(micro_batches)
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with no_sync() if micro < n_micro - 1 else contextlib.nullcontext():
                with log.part("forward"):
                    with torch.set_grad_enabled(train), autocast(amp, device), fp8.forward(micro):
                        loss = model(*batch[:3]) / (n_micro / batch.weight)
                    total += loss.detach()
                if train:
                    with log.part("backward"):
                        loss = loss if scaler is None else loss * scaler.scale
                        (loss if loss_divisor == 1 else loss / loss_divisor).backward()
                else:
                    reshard(sharded)
        return total

    return passes


def build_pipelined_passes(run: Run, model: "Pipeline", micro_batches: Batches) -> Passes:
    """Forward and backward of all micro batches of a step, by the schedule of a pipeline.Pipeline."""
    work, log = run.plan.work, run.log
    if not work.trains:
        return build_passes(run, model, micro_batches)
    n_micro, micro_batches = work.batch.grad_acc_steps, repeating_last(micro_batches)
    scheduled = model.build_schedule(run.device, log)
    if work.config.experts and work.config.experts.aux_loss:
        for mixture in mixtures(model):
            mixture.scale_balance_loss(1.0 / n_micro / work.parallelism.ranks)

    def passes(step: int) -> Tensor:
        run.begin_micro_step(step)
        with log.part("data"):
            parts = [next(micro_batches) for _ in range(n_micro)]
        total = scheduled(parts)
        log.mark("idle")
        return total

    return passes


def build_step(
    run: Run, model: nn.Module, optimizer: Optimizer | None, passes: Passes, saver: "Saver | None"
) -> Callable[[int, str], None]:
    """The function of one optimizer step, `step_fn(step, phase)`: passes, clipping, optimizer, log."""
    work, log, scaler, fp8 = run.plan.work, run.log, run.scaler, run.fp8
    flags, n_steps = run.plan.optimizer, run.schedule.window_end
    tokens = work.batch.tokens_per_step
    # A walk through gpt2-125m takes 0.4 ms.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = model.layout.gradients(model) if isinstance(model, HasWeights) else None
    balances = bool(work.config.experts and work.config.experts.correction_rate)
    shape = work.config
    drops = shape.embedding_dropout or shape.residual_dropout or shape.attention_dropout
    keeps_gradients = work.cuda_graphs and work.trains
    if keeps_gradients:
        # A gradient made inside a CUDA graph lives in the graph's memory, which the next replay
        # overwrites. If the gradient exists already, the graph adds to it.
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step_fn(step: int, phase: str) -> None:
        if drops:  # its numbers need no checkpoint
            torch.manual_seed(hash((run.plan.args.seed, run.ranks.rank, step)) % 2**63)
        total = passes(step)
        rate, norm = 0.0, None
        with log.watched("optimizer"):
            if optimizer is not None and flags is not None:
                rate = learning_rate(step, flags, n_steps)
                norm = optimizer_step(parameters, optimizer, rate, flags.grad_clip, scaler, grads)
                fp8.after_step(model)
                if balances:
                    update_corrections(model)
            if keeps_gradients:  # in place, without one kernel for each
                torch.ops.aten._foreach_zero_([parameter.grad for parameter in parameters])
            elif work.trains:
                for parameter in parameters:
                    parameter.grad = None
        # A number of its own says whether a rank was asked to stop; one collective is for both.
        values = total[None]
        if saver:
            asked = torch.full_like(total, run.stop_request.number is not None)
            values = torch.stack((total, asked))
        average_over_ranks(values)
        if phase != OBSERVE:
            log.finish(step, phase, rate, tokens, values, norm)

    return step_fn


def build_evaluation(run: Run, model: nn.Module, data: Validation | None) -> Evaluate:
    """A function that returns the mean validation loss without dropout, or None without data.

    Every rank computes all of it: sharded models need all ranks in each forward. Transformer Engine's
    modules run without FP8 here, since delayed scaling would remember these activations.
    """
    work, device = run.plan.work, run.device
    sharded = sharded_modules(model)
    amp = "off" if sharded else work.amp

    @torch.no_grad()
    def evaluate() -> float | None:
        if data is None:
            return None
        model.eval()
        total = torch.zeros((), device=device)
        for batch in batches(*data, device):
            if work.cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with autocast(amp, device):
                total += model(*batch[:3]) * batch.weight
        model.train()
        reshard(sharded)
        if work.parallelism.divided:  # each rank's loss is of its own tokens
            average_over_ranks(total)
        return (total / len(data[1])).item()

    return evaluate
