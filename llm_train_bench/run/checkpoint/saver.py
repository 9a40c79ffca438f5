"""Saving and loading a training state by torch.distributed.checkpoint, and stopping on request."""

import collections
import concurrent.futures
import contextlib
import datetime
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.optim import Optimizer

from llm_train_bench.apply.sharded import local_shard, shard_of_whole
from llm_train_bench.base import files
from llm_train_bench.base.errors import Preempted, UsageError, one_line
from llm_train_bench.measure.device import synchronize
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.parallel.ranks import gather
from llm_train_bench.results.console import say
from llm_train_bench.run.checkpoint import facts as checkpoints
from llm_train_bench.run.checkpoint.facts import Facts
from llm_train_bench.run.checkpoint.parts import (
    UNREADABLE,
    Part,
    read_parts,
    stored_name,
    stored_tensors,
)
from llm_train_bench.run.failures import SAVE_S, SAVES
from llm_train_bench.run.life import Run
from llm_train_bench.run.signals import ENDING, Wish, ignore, signal_said

# Time [s] from a signal to the save, two steps later.
STOPPING_S = 60.0


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
def load(run: Run, model: HasWeights, optimizer: Optimizer, path: Path, facts: Facts) -> None:
    """Set all that training changes, in place, from a checkpoint of any layout.

    UsageError for a tensor that is missing, left over, or of another shape or order of rows.
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
    parts, process = state_parts(model, optimizer), process_parts(run)
    trained = {name for name in stored if not name.startswith(("scaler/", facts.layout))}
    ours = set().union(*gather(run.ranks, {*parts}))  # a pipeline's stage has some of them
    if differs := trained ^ ours:
        who = "the checkpoint" if min(differs) in trained else "this run"
        why = f"only {who} has {min(differs)}"
        raise UsageError(f"{path}: {why}; to go on from the weights alone, use --init-from")
    try:
        read_parts(path, parts | {name: part for name, part in process.items() if name in stored})
    except UNREADABLE as error:
        raise UsageError(f"{path}: cannot be read: {one_line(error)}") from None
    if facts.layout == layout(run):
        for name, generator in generators(run).items():
            generator.set_state(process[name].values)
        return
    torch.manual_seed(hash((run.plan.args.seed, run.ranks.rank, facts.step)) % 2**63)
    if any((run.plan.work.config.residual_dropout, run.plan.work.config.attention_dropout)):
        run.result.remark(
            f"dropout draws other numbers than before step {facts.step}: the layout is another"
        )


def tried(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What some work on files returns, and why it failed; None for the other."""
    try:
        return work(), None
    except (OSError, ValueError, RuntimeError) as error:
        return None, checkpoints.reason(error)


class _Planner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].values


class Saver:
    """Saves every N steps and at the end, in a thread beside the training; one save at a time."""

    def __init__(self, run: Run, model: HasWeights, optimizer: Optimizer):
        self.run, self.model, self.optimizer = run, model, optimizer
        self.directory = run.start.place
        self.wish = Wish()
        self.thread = concurrent.futures.ThreadPoolExecutor(1, SAVES)
        self.saving: concurrent.futures.Future[str | None] | None = None
        self.step = 0  # of that save
        self.given_up = False  # a save did not end: the ranks may no longer agree on which is next
        self.planner = _Planner(flatten_state_dict=False)
        self.plan: Any = None  # what this rank writes, once there was a save
        self.last_good = run.start.first_step or None
        self.failed: str | None = None
        known = run.start.checkpoint[1].data if run.start.checkpoint else {}
        if run.ranks.main:  # of the files as they are now: others may get their names in a run
            self.data = self.thread.submit(checkpoints.describe_data, run.plan.args, known)
        self.opened = run.directory.stat()
        self.stalls: list[float] = []
        self.writes: list[float] = []
        self.group: dist.ProcessGroup | None = None
        run.result.metrics.n_checkpoints = 0
        if run.ranks.world > 1:
            timeout = datetime.timedelta(seconds=SAVE_S)
            self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    def stop_request(self) -> Tensor:
        """1 where this rank was asked to stop, else 0; averaged over the ranks with a step's loss."""
        return torch.full((), float(self.wish.number is not None), device=self.run.device)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, a signal asks all ranks to save and to stop at the same step."""
        if self.run.hang:
            self.run.hang.save_s = SAVE_S + STOPPING_S
        try:
            with self.wish.listening():
                yield
        except BaseException as error:
            if not isinstance(error, Exception | Preempted):  # at once
                self.finish(time.monotonic())
            raise
        finally:
            self.finish()
            self.thread.shutdown(wait=not self.given_up)

    def before(self, step: int) -> None:
        """Stop here if some rank was asked to two steps ago; that step's event has long passed."""
        if step < self.run.plan.schedule.start + 2 or not self.run.log.stop_of(step - 2):
            return
        until = time.monotonic() + SAVE_S
        self.finish(until)
        if self.last_good != step:
            self.save(step)
            self.finish(until)
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
        self.finish()
        if self.given_up:
            return
        parts = state_parts(self.model, self.optimizer) | process_parts(run)
        if self.plan is None:
            self._share_out(parts)
        for name, staged in self.planner.state_dict.items():
            staged.values.copy_(parts[name].values, non_blocking=True)
        run.end_steps()
        synchronize(run.device)
        run.log.pause()
        self.step, self.saving = step, self.thread.submit(self._write, step)
        self.stalls.append(time.perf_counter() - begin)
        run.result.metrics.checkpoint_stall_s = statistics.fmean(self.stalls)
        run.log.start()
        schedule, m = run.plan.schedule, run.result.metrics
        if schedule.window_begin <= step - 1 < schedule.window_end - 1:
            m.window_saves = (m.window_saves or 0) + 1

    def _share_out(self, parts: dict[str, Part]) -> None:
        """At the first save: what each rank writes of what several have, and memory for it."""
        self.planner.set_up_planner(parts, is_coordinator=self.run.ranks.main)
        local_plans = gather(self.run.ranks, self.planner.create_local_plan(), self.group)
        plans, self.metadata = self.planner.create_global_plan(local_plans)
        plans = FileSystemWriter(self.directory).prepare_global_plan(plans)
        self.plan = plans[self.run.ranks.rank]
        self.planner.state_dict, pinned = {}, self.run.device.type == "cuda"
        for name in (item.index.fqn for item in self.plan.items):
            memory = torch.empty_like(parts[name].values, device="cpu", pin_memory=pinned)
            self.planner.state_dict[name] = parts[name]._replace(values=memory)

    def finish(self, until: float | None = None) -> None:
        """Wait until nothing is being written, or until that time (`time.monotonic()`)."""
        if self.saving is None:
            return
        try:
            why = self.saving.result(
                SAVE_S if until is None else max(0.0, until - time.monotonic())
            )
        except Exception as error:  # a failed save does not fail the run
            self.given_up = True  # who waits for whom is no longer known
            why = f"{one_line(error) or 'it took too long'}; no more saves are made"
        self.saving = None  # only now: a second signal may have ended the wait
        if why is None:
            self.last_good = self.step
        else:
            self.failed = f"step {self.step} was not saved: {why}"
            self.run.result.remark(self.failed)
            if self.run.ranks.main:
                say(self.failed)

    def _write(self, step: int) -> str | None:
        """In a thread: write this rank's parts; rank 0 commits what all have written. Why not, if not."""
        begin, run = time.perf_counter(), self.run
        writer = FileSystemWriter(self.directory / f"step-{step:08}.tmp", per_thread_copy_ahead=0)
        share, why = tried(lambda: self._write_share(writer))
        why = why and f"rank {run.ranks.rank}: {why}"
        shares, problems = zip(*gather(run.ranks, (share, why), self.group), strict=True)
        why = next(filter(None, problems), None)
        if run.ranks.main:
            if why is None:
                _, why = tried(lambda: self._commit(writer, step, shares))
            shutil.rmtree(writer.path, ignore_errors=True)
        (why, *_) = gather(run.ranks, why, self.group)
        if why is None:
            self.writes.append(time.perf_counter() - begin)
            m, parts = run.result.metrics, [part for own, _ in shares for part in own]
            size = sum(part.size_in_bytes for part in parts)
            m.n_checkpoints, m.checkpoint_bytes = len(self.writes), size
            m.checkpoint_write_s = statistics.fmean(self.writes)
            m.checkpoint_gb_per_s = size / m.checkpoint_write_s / 1e9
        return why

    def _write_share(self, writer: FileSystemWriter) -> tuple[list[Any], dict[str, int]]:
        """What was written of each part, and the checksums of this rank's files."""
        if not all(part.values.isfinite().all() for part in self.planner.state_dict.values()):
            raise ValueError("a number in it is not finite")
        path = Path(writer.path)
        if not os.path.samestat(self.run.directory.stat(), self.opened):
            raise ValueError("the directory of the run was moved")
        path.parent.mkdir(exist_ok=True)
        path.mkdir(exist_ok=True)
        torch.serialization.set_crc32_options(
            False
        )  # facts.json has the checksum of the whole file
        parts = writer.write_data(self.plan, self.planner).wait()
        names = {part.storage_data.relative_path for part in parts}
        return parts, {name: files.checksum(path / name) for name in names}

    def _commit(self, writer: FileSystemWriter, step: int, shares: Sequence[Any]) -> None:
        """On rank 0, when all have written: what is where, the losses, and the final name."""
        run, path, config = self.run, Path(writer.path), self.run.plan.work.config
        writer.finish(self.metadata, [parts for parts, _ in shares])
        files.sync_to_disk(path / ".metadata")
        os.fsync(run.steps.fileno())
        facts = Facts(
            run=run.result.run_name,
            step=step,
            layout=layout(run),
            args=checkpoints.resolved_flags(run.plan),
            model_hash=config.hash,
            config=config.raw,
            data=self.data.result(),
            linear=run.result.linear,
            files=dict(collections.ChainMap(*(sums for _, sums in shares))),
        )
        facts.files[".metadata"] = files.checksum(path / ".metadata")
        checkpoints.commit(facts, path)
        checkpoints.remove_older(self.directory)
