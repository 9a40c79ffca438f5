"""Saving during a run: when, by whom, and stopping all ranks at one step on request."""

import contextlib
import dataclasses
import datetime
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from llm_train_bench.base.start import early_wish

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from llm_train_bench.base.errors import Interrupted, NotFinite, Preempted, one_line
from llm_train_bench.measure.device import synchronize
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.stored import NAMES, encoded
from llm_train_bench.parallel.ranks import gather
from llm_train_bench.results.console import say
from llm_train_bench.run.checkpoint import manifest as manifests
from llm_train_bench.run.checkpoint import training_state
from llm_train_bench.run.checkpoint.durable import SAVE_S, Files, failure_of
from llm_train_bench.run.failures import SAVES
from llm_train_bench.run.life import Run
from llm_train_bench.run.signals import ENDING, SAVING, Heard, handled_by, ignore, signal_said

# What a rank may ask all to do, as numbers that can be averaged over ranks.
STOP, NOT_FINITE = 1.0, 2.0**20
# Time [s] from such a signal to the save, two steps later.
STOPPING_S = 60.0


def build_saver(run: Run, model: HasWeights, optimizer: Optimizer | None) -> "Saver | None":
    """Load the checkpoint that the run resumes from, if any; the saver, if the run saves."""
    directory, manifest = run.attempt.checkpoint, run.attempt.manifest
    if optimizer is None:  # nothing is trained, resumed or saved
        return None
    if directory and manifest:
        training_state.load(directory, manifest, model, optimizer, run.ranks)
        run.fp8.after_step(model)
        if run.scaler is not None and manifest.scaler:
            for name, value in manifest.scaler.items():
                getattr(run.scaler, name).fill_(value)
        _resume_dropout(run, directory, manifest)
    return Saver(run, model, optimizer) if run.attempt.saves else None


def _resume_dropout(run: Run, directory: Path, manifest: manifests.Manifest) -> None:
    if manifest.layout == layout(run):
        training_state.restore_random_state(directory, run.ranks.rank, run.device)
        return
    seed = hash((run.plan.args.seed, run.ranks.rank, manifest.step)) % 2**63
    torch.manual_seed(seed)
    if any((run.plan.work.config.residual_dropout, run.plan.work.config.attention_dropout)):
        run.result.remark(
            f"dropout draws other numbers than before step {manifest.step}: the layout is another"
        )


def layout(run: Run) -> str:
    """Script, ranks and accumulation."""
    work, batch = run.plan.work, run.plan.work.batch
    micro_batches = f"{batch.micro_batch} x {batch.grad_acc_steps}"
    return f"{run.plan.script} on {work.world}, {work.parallelism}, {micro_batches}"


@dataclasses.dataclass
class _Share:
    """What a rank wrote of a checkpoint, or why it could not."""

    name: str
    size: int = 0
    crc: int = 0
    tensors: dict[str, manifests.StoredTensor] = dataclasses.field(default_factory=dict)
    finite: bool = True
    error: str | None = None


@dataclasses.dataclass
class _Save:
    """One save in its thread. The staged copies are its own until the next save."""

    step: int
    deadline: float
    scale: dict[str, float] | None
    thread: threading.Thread = dataclasses.field(default_factory=threading.Thread)
    # The first to take it decides: the thread, to commit, or the loop, to give up.
    fate: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def lasts(self, until: float) -> bool:
        """Whether it is still running at that time (`time.monotonic()`)."""
        self.thread.join(max(0.0, until - time.monotonic()))
        return self.thread.is_alive()


class Saver:
    """Saves every N steps and at the end, in a thread beside the training; one save at a time."""

    def __init__(self, run: Run, model: HasWeights, optimizer: Optimizer):
        self.run, self.model, self.optimizer = run, model, optimizer
        self.files, self.directory = Files(), run.attempt.place
        self.copies: dict[str, Tensor] = {}  # of this rank's shares, in host memory
        self.saving: _Save | None = None
        self.given_up = False  # a save did not end: the ranks may no longer agree on which is next
        self.asked = STOP if early_wish() else 0.0
        self.number = early_wish()
        self.failed: str | None = None
        self.group: dist.ProcessGroup | None = None
        self.stalls: list[float] = []
        self.writes: list[float] = []
        run.result.metrics.n_checkpoints = 0
        before = run.attempt.manifest
        self.last_good = before.step if before else None
        self.data = before.data if before else {}
        if run.ranks.world > 1:
            timeout = datetime.timedelta(seconds=SAVE_S)
            self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        # The attempt before may have been killed as it removed older ones.
        if before and run.ranks.main:
            self._retain()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first signal is a wish: all ranks save and stop at the same step."""
        heard = Heard(early_wish())

        def wish(number: int, frame) -> None:
            if heard.again(number):
                if callable(handler := before[number]):
                    handler(number, frame)
            elif not self.asked:
                self.asked, self.number = STOP, number

        if self.run.hang:
            self.run.hang.save_s = SAVE_S + STOPPING_S
        try:
            with handled_by(wish, SAVING) as before:
                yield
        except (Interrupted, KeyboardInterrupt) as error:
            if not isinstance(error, Preempted):
                self._give_up()  # at once
            raise
        finally:
            self.finish()
            self.run.saved_at = time.time()

    def wishes(self, device: torch.device) -> Tensor:
        """What this rank asks of all, to be averaged over them with the loss of a step."""
        return torch.full((), self.asked, device=device)

    def before(self, step: int) -> None:
        """Stop here if some rank asked for it two steps ago; that step's event has long passed."""
        if step < self.run.plan.schedule.start + 2:
            return
        wished = self.run.log.wish_of(step - 2) * self.run.ranks.world
        if not wished:
            return
        if wished >= NOT_FINITE:
            good = "none" if self.last_good is None else f"step {self.last_good}"
            raise NotFinite(f"the state is not finite at step {step}; last good checkpoint: {good}")
        deadline = time.monotonic() + SAVE_S
        self.finish()
        if self.last_good != step:
            self._save(step, deadline)
            self.finish()
        why = signal_said(self.number) if self.number else None
        if self.last_good != step:
            raise Preempted(f"{why or 'a signal'}, and could not be saved: {self.failed}")
        ignore((*ENDING, signal.SIGUSR1))
        with contextlib.suppress(RuntimeError):  # SLURM ends all ranks when the first has ended
            why = next(filter(None, gather(self.run.ranks, why, self.group)), why)
        raise Preempted(why or "a signal", step)

    def after(self, step: int) -> None:
        plan = self.run.plan
        if (step + 1) % plan.args.save_every == 0 or step + 1 == plan.schedule.total:
            self._save(step + 1)

    def _save(self, step: int, deadline: float | None = None) -> None:
        """Copy the state before step number `step`, and write it; the loop waits for the copy alone."""
        start = time.perf_counter()
        self.finish()
        if self.given_up:
            return
        share = _Share(training_state.file_of(self.run.ranks.rank))
        tensors = training_state.random_state(self.run.device)
        for name, weight, tensor in training_state.state_tensors(self.model, self.optimizer):
            own, parts = training_state.own_share(self.model, weight, tensor, self.run.ranks), []
            if own is not None:
                tensors[name] = own[0]
                parts.append(own[1])
            share.tensors[name] = manifests.StoredTensor(
                dtype=NAMES[tensor.dtype],
                shape=weight.shape if tensor.ndim else (),
                groups=weight.groups,
                parts=parts,
            )
        event = training_state.copy_to_host(tensors, self.copies, self.run.device)
        # A committed step's losses are on disk before it is.
        self.run.end_steps()
        synchronize(self.run.device)
        self.run.log.pause()
        scaler = self.run.scaler
        scale = scaler and {name: float(getattr(scaler, name)) for name in scaler.STATE}
        save = _Save(step, deadline or time.monotonic() + SAVE_S, scale)
        arguments = save, event, share
        save.thread = threading.Thread(target=self._write, args=arguments, daemon=True, name=SAVES)
        save.thread.start()
        self.saving = save
        schedule, m = self.run.plan.schedule, self.run.result.metrics
        self.stalls.append(time.perf_counter() - start)
        m.checkpoint_stall_s = statistics.fmean(self.stalls)
        self.run.log.start()
        if schedule.window_begin <= step - 1 < schedule.window_end - 1:
            m.window_saves = (m.window_saves or 0) + 1

    def finish(self) -> None:
        """Wait until nothing is being written, or a save's time is over."""
        if self.saving and self.saving.lasts(self.saving.deadline):
            self._give_up(f"after {SAVE_S:g} s")
        self.saving = None

    def _give_up(self, when: str = "at once") -> None:
        """Save no more. The thread keeps the staged copies, and cannot commit them."""
        save, self.saving = self.saving, None
        if save and save.lasts(0.0):
            self.given_up = True
            if save.fate.acquire(blocking=False):
                text = f"step {save.step} was not saved: given up {when}"
            else:  # it is getting its name just now
                text = f"the save of step {save.step} did not end"
            self._tell(f"{text}; no more saves are made")

    def _write(self, save: _Save, event: torch.cuda.Event | None, share: _Share) -> None:
        """In a thread: write this rank's share; rank 0 commits what all have written."""
        start, ranks = time.perf_counter(), self.run.ranks
        part = self.directory / f".step-{save.step:08}.part"
        try:
            if event:
                event.synchronize()
            floats = (t for t in self.copies.values() if t.is_floating_point())
            share.finite = all(bool(t.isfinite().all()) for t in floats)
            share.error = failure_of(self._write_share, part, share)
            shares = gather(ranks, share, self.group)
            problem = None
            if ranks.main and (problem := failure_of(self._commit, save, part, shares)):
                failure_of(self.files.remove, part)
            (problem, *_) = gather(ranks, problem, self.group)
            if problem:
                self._tell(f"step {save.step} was not saved: {problem}")
                if not all(s.finite for s in shares):
                    self.asked = NOT_FINITE
                return
            self.last_good, self.failed = save.step, None
            self.writes.append(time.perf_counter() - start)
            m, size = self.run.result.metrics, sum(s.size for s in shares)
            m.n_checkpoints, m.checkpoint_bytes = len(self.writes), size
            m.checkpoint_write_s = statistics.fmean(self.writes)
            m.checkpoint_gb_per_s = size / m.checkpoint_write_s / 1e9
        except Exception as error:  # a failed save does not fail the run
            self.given_up |= ranks.world > 1  # who waits for whom is no longer known
            more = "; no more saves are made" * self.given_up
            self._tell(f"step {save.step} was not saved: {one_line(error)}{more}")

    def _write_share(self, part: Path, share: _Share) -> None:
        self.files.make(part)
        share.size, share.crc = self.files.write(part / share.name, encoded(self.copies))

    def _commit(self, save: _Save, part: Path, shares: list[_Share]) -> None:
        """On rank 0: the manifest, then the final name, then older checkpoints go."""
        for rank, share in enumerate(shares):
            if share.error:
                raise ValueError(f"rank {rank}: {share.error}")
        if not all(share.finite for share in shares):
            raise ValueError("a number in it is not finite")
        manifest = self._manifest(save, shares)
        self.files.write(part / manifests.MANIFEST, [manifest.text().encode()])
        self.files.synchronize(self.run.steps.fileno())
        if not save.fate.acquire(blocking=False):
            raise ValueError("given up")
        self.files.synchronize_names(part)
        self.files.rename(part, self.directory / f"step-{save.step:08}")
        self.files.synchronize_names(self.directory)
        self._retain()

    def _retain(self) -> None:
        """Remove older checkpoints than are to be kept."""
        if why := failure_of(manifests.retain, self.directory, self.files):
            self._tell(f"older checkpoints stay: {why}")

    def _manifest(self, save: _Save, shares: list[_Share]) -> manifests.Manifest:
        run, work = self.run, self.run.plan.work
        with contextlib.suppress(OSError):  # moved away since
            self.data = manifests.describe_data(run.plan.args, self.data)
        tensors = dict(shares[0].tensors)
        for name, stored in (item for share in shares[1:] for item in share.tensors.items()):
            tensors.setdefault(name, stored.model_copy(update={"parts": []})).parts += stored.parts
        return manifests.Manifest(
            run=run.result.run_name,
            step=save.step,
            layout=layout(run),
            args=run.result.args,
            global_batch=work.batch.global_batch,
            seq_len=work.batch.seq_len,
            model_hash=work.config.hash,
            config=work.config.raw,
            data=self.data,
            scaler=save.scale,
            linear=run.result.linear,
            tensors=tensors,
            files={s.name: manifests.StoredFile(bytes=s.size, crc32=s.crc) for s in shares},
        )

    def _tell(self, text: str) -> None:
        self.failed = text
        if self.run.ranks.main:
            self.run.result.remark(text)
            say(text)
