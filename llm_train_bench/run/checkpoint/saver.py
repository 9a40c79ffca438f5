"""Saving and loading a training state by torch.distributed.checkpoint, and stopping on request."""

import collections
import concurrent.futures
import contextlib
import datetime
import errno
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.futures import Future
from torch.optim import Optimizer

from llm_train_bench.apply.sharded import local_shard, shard_of_whole
from llm_train_bench.base.errors import Preempted, UsageError, one_line
from llm_train_bench.base.files import checksum
from llm_train_bench.measure.device import synchronize
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.parallel.ranks import gather
from llm_train_bench.results.console import say
from llm_train_bench.run.checkpoint import facts
from llm_train_bench.run.checkpoint.parts import (
    UNREADABLE,
    Part,
    SavePlanner,
    read_parts,
    stored_name,
    stored_tensors,
)
from llm_train_bench.run.failures import SAVE_S
from llm_train_bench.run.life import Run
from llm_train_bench.run.signals import ENDING, Wish, ignore, signal_said

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, as it should


def state_parts(model: HasWeights, optimizer: Optimizer) -> dict[str, Part]:
    """This rank's part of every tensor that training changes: p/NAME, or KEY/NAME of the optimizer."""
    parts = {}
    for weight, parameter in model.weights():
        for key, tensor in {"p": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
            name = stored_name(key, weight)
            if isinstance(tensor, Tensor) and tensor.ndim:
                parts[name] = Part(*shard_of_whole(weight, model.layout, tensor), weight.shape)
            elif isinstance(tensor, Tensor):
                parts[name] = Part(*local_shard(tensor), ())
    return parts


def process_parts(run: Run) -> dict[str, Part]:
    """The loss scale, and the states of what dropout draws from, which differ between ranks."""
    scaler, states = run.scaler, {name: g.get_state() for name, g in generators(run).items()}
    numbers = {f"scaler/{name}": getattr(scaler, name) for name in scaler.STATE} if scaler else {}
    tensors = states | numbers
    return {name: Part(*local_shard(tensor), tensor.shape) for name, tensor in tensors.items()}


def generators(run: Run) -> dict[str, torch.Generator]:
    """What dropout draws from, by names that only a rank of the same layout has too."""
    own = f"{layout(run)}/{run.ranks.rank}"
    found = {f"{own}/cpu": torch.default_generator}
    if run.device.type == "cuda":
        found[f"{own}/cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def layout(run: Run) -> str:
    """Script, ranks and accumulation."""
    work, batch = run.plan.work, run.plan.work.batch
    micro_batches = f"{batch.micro_batch} x {batch.grad_acc_steps}"
    return f"{run.plan.script} on {work.world}, {work.parallelism}, {micro_batches}"


@torch.no_grad()
def load(run: Run, model: HasWeights, optimizer: Optimizer, path: Path, saved: facts.Facts) -> None:
    """Set all that training changes, in place, from a checkpoint of any layout.

    UsageError for a tensor that is missing, or of another shape or order of rows.
    """
    stored, shares = stored_tensors(path), getattr(optimizer, "shares", {})
    keys = {name.partition("/")[0] for name in stored}
    for weight, parameter in model.weights():
        for key in sorted(keys - {"p"}):
            if (found := stored.get(stored_name(key, weight))) is not None:
                # Moments are as the parameter, or its share with --zero1.
                number = torch.zeros((), dtype=found.properties.dtype, device=parameter.device)
                moment = torch.zeros_like(shares.get(parameter, parameter))
                optimizer.state[parameter].setdefault(key, moment if found.size else number)
    process = {name: part for name, part in process_parts(run).items() if name in stored}
    try:
        read_parts(path, state_parts(model, optimizer) | process)
    except UNREADABLE as error:
        why = f"{one_line(error)}; to go on from the weights alone, use --init-from"
        raise UsageError(f"{path}: cannot be read: {why}") from None
    for name, generator in generators(run).items():
        if name in process:
            generator.set_state(process[name].values)
    if saved.layout == layout(run):
        return
    torch.manual_seed(hash((run.plan.args.seed, run.ranks.rank, saved.step)) % 2**63)
    if any((run.plan.work.config.residual_dropout, run.plan.work.config.attention_dropout)):
        run.result.remark(
            f"dropout draws other numbers than before step {saved.step}: the layout is another"
        )


class Writer(FileSystemWriter):
    """Writes the state before a step; when all ranks have, rank 0 gives it its final name."""

    def __init__(self, run: Run, step: int):
        self.directory = run.start.checkpoints / f"step-{step:08}.tmp"
        super().__init__(self.directory, per_thread_copy_ahead=0)
        self.run, self.step, self.begin = run, step, time.perf_counter()

    def stage(self, state_dict: Any) -> Any:
        """It is in memory of its own already."""
        return state_dict

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """The results of this rank's writes, and the checksums of its files."""
        if not all(part.values.isfinite().all() for part in planner.state_dict.values()):
            raise ValueError("a number in it is not finite")
        torch.serialization.set_crc32_options(False)  # facts.json has that of the whole file
        try:
            results = super().write_data(plan, planner).wait()
        except (OSError, RuntimeError) as error:  # another rank would not learn of the first cause
            raise ValueError(facts.reason(error)) from None
        names = {result.storage_data.relative_path for result in results}
        written = Future()
        written.set_result((results, {name: checksum(self.directory / name) for name in names}))
        return written

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0, when all ranks have written: what is where, the losses, and the final name."""
        super().finish(metadata, [parts for parts, _ in results])
        run, config, m = self.run, self.run.plan.work.config, self.run.result.metrics
        sums = {".metadata": checksum(self.directory / ".metadata")}
        os.fsync(run.steps.fileno())
        saved = facts.Facts(
            run=run.result.run_name,
            step=self.step,
            layout=layout(run),
            args=facts.resolved_flags(run.plan),
            training=run.start.training,
            config=config.raw,
            linear=run.result.linear,
            files=dict(collections.ChainMap(sums, *(sums for _, sums in results))),
        )
        facts.commit(saved, self.directory)
        facts.remove_older(self.directory.parent)
        m.n_checkpoints = (m.n_checkpoints or 0) + 1
        m.checkpoint_bytes = sum(part.length for part in metadata.storage_data.values())
        m.checkpoint_write_s = time.perf_counter() - self.begin
        m.checkpoint_gb_per_s = m.checkpoint_bytes / m.checkpoint_write_s / 1e9


class Saver:
    """Saves every N steps and at the end, in a thread beside the training; one save at a time."""

    def __init__(self, run: Run, model: HasWeights, optimizer: Optimizer):
        self.run, self.model, self.optimizer = run, model, optimizer
        self.wish = Wish()
        self.opened = run.directory.stat()
        self.saving: concurrent.futures.Future[Any] | None = None
        self.step = 0  # of that save
        self.given_up = False  # a save did not end: the ranks may no longer agree on which is next
        self.staged: dict[str, Part] = {}  # what this rank writes, in the host's memory
        self.last_good = run.start.first_step or None
        self.failed: str | None = None
        self.group: dist.ProcessGroup | None = None
        run.result.metrics.n_checkpoints = 0
        if run.ranks.world > 1:
            timeout = datetime.timedelta(seconds=SAVE_S)
            self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        if run.hang:
            run.hang.save_s = 2 * SAVE_S  # what is being written, and the last save

    def stop_request(self) -> Tensor:
        """1 where this rank was asked to stop, else 0; averaged over the ranks with a step's loss."""
        return torch.full((), float(self.wish.number is not None), device=self.run.device)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, a signal asks all ranks to save and to stop at the same step."""
        try:
            with self.wish.listening():
                yield
        except Exception:
            self.finish()
            raise
        self.finish()

    def before(self, step: int) -> None:
        """Stop here if some rank was asked to two steps ago; that step's event has long passed."""
        if step < self.run.plan.schedule.start + 2 or not self.run.log.stop_of(step - 2):
            return
        self.finish()
        if self.last_good != step:
            self.save(step)
            self.finish()
        why = signal_said(self.wish.number) if self.wish.number else None
        if self.last_good != step:
            raise Preempted(f"{why or 'a signal'}, and could not be saved: {self.failed}")
        ignore((*ENDING, signal.SIGUSR1))
        with contextlib.suppress(RuntimeError):  # SLURM ends all ranks when the first has ended
            why = next(filter(None, gather(self.run.ranks, why, self.group)), why)
        raise Preempted(why or "a signal", step)

    def after(self, step: int) -> None:
        """Save if it is time to."""
        plan = self.run.plan
        if (step + 1) % plan.args.save_every == 0 or step + 1 == plan.schedule.total:
            self.save(step + 1)

    def save(self, step: int) -> None:
        """Copy the state before step number `step`, and write it; the loop waits for the copy alone."""
        begin, run = time.perf_counter(), self.run
        if not os.path.samestat(run.directory.stat(), self.opened):  # another run may have the name
            raise FileNotFoundError(errno.ENOENT, "was moved", str(run.directory))
        self.finish()
        if self.given_up:
            return
        parts = state_parts(self.model, self.optimizer) | process_parts(run)
        self.staged = self.staged or self._share_out(parts)
        for name, part in self.staged.items():
            part.values.copy_(parts[name].values, non_blocking=True)
        run.end_steps()
        synchronize(run.device)
        run.log.pause()
        self.step, self.saving = (
            step,
            async_save(
                self.staged,
                storage_writer=Writer(run, step),
                planner=SavePlanner(),
                process_group=self.group,
            ),
        )
        schedule, m = run.plan.schedule, run.result.metrics
        m.checkpoint_stall_s = time.perf_counter() - begin
        run.log.start()
        if schedule.window_begin <= step - 1 < schedule.window_end - 1:
            m.window_saves = (m.window_saves or 0) + 1

    def _share_out(self, parts: dict[str, Part]) -> dict[str, Part]:
        """Memory for what this rank writes. What several ranks have, they write in turn."""
        ours, holders = [(name, part.shard) for name, part in parts.items()], {}
        for rank, theirs in enumerate(gather(self.run.ranks, ours, self.group)):
            for key in theirs:
                holders.setdefault(key, []).append(rank)
        turns = {key: ranks[i % len(ranks)] for i, (key, ranks) in enumerate(holders.items())}
        names = [key[0] for key in ours if turns[key] == self.run.ranks.rank]
        memory = {"device": "cpu", "pin_memory": self.run.device.type == "cuda"}
        empty = {name: torch.empty_like(parts[name].values, **memory) for name in names}
        return {name: parts[name]._replace(values=values) for name, values in empty.items()}

    def finish(self) -> None:
        """Wait until nothing is being written."""
        if self.saving is None:
            return
        try:
            self.saving.result(SAVE_S)
            self.last_good = self.step
        except (Exception, CheckpointException) as error:  # a failed save does not fail the run
            if isinstance(error, CheckpointException):
                rank, (cause, _) = min(error.failures.items())
                why = f"rank {rank}: {facts.reason(cause)}"
            else:  # who waits for whom is no longer known
                self.given_up = True
                why = f"{one_line(error) or 'it took too long'}; no more saves are made"
            self.failed = f"step {self.step} was not saved: {why}"
            self.run.result.remark(self.failed)
            if self.run.ranks.main:
                shutil.rmtree(Writer(self.run, self.step).directory, ignore_errors=True)
                say(self.failed)
        self.saving = None  # only now: a second signal may have ended the wait
