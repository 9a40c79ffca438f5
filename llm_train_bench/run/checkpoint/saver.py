"""Saving and loading a training state by torch.distributed.checkpoint."""

import collections
import datetime
import errno
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import api, filesystem, metadata, planner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.futures import Future
from torch.optim import Optimizer

from llm_train_bench.apply.sharded import shard_of_whole
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import checksum, first_cause
from llm_train_bench.measure.device import synchronize
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.weights import Shard
from llm_train_bench.results.console import say
from llm_train_bench.run.checkpoint.attempt import Facts, commit
from llm_train_bench.run.failures import SAVE_S
from llm_train_bench.run.training_run import Run

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, as it should


class Part(Tensor):
    """A rank's part of a tensor, which PyTorch's planners see as a tensor of the whole's shape."""

    local: Tensor
    shard: Shard

    @staticmethod
    def __new__(cls, local: Tensor, shard: Shard, shape: tuple[int, ...]) -> "Part":
        self = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype)  # type: ignore
        self.local, self.shard = local, shard
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0]  # only ever detached

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        chunk = metadata.ChunkStorageMetadata(*map(torch.Size, self.shard))
        return [chunk] if self.local.numel() else []

    def __create_write_items__(self, name: str, part: Tensor) -> list[planner.WriteItem]:
        properties, items = metadata.TensorProperties.create_from_tensor(self.local), []
        for chunk in self.__create_chunk_list__():
            index = metadata.MetadataIndex(name, chunk.offsets)
            data = planner.TensorWriteData(chunk, properties, self.shape)
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> Tensor:
        return self.local


def state_tensors(model: HasWeights, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Each parameter, p/NAME, and an optimizer's state of it, KEY/NAME; with the order of its rows."""
    tensors = {}
    for weight, parameter in model.weights():
        order = f", rows in {weight.groups} groups" if weight.groups > 1 else ""
        for key, tensor in {"p": parameter.detach(), **state.get(parameter, {})}.items():
            if isinstance(tensor, Tensor):
                own = shard_of_whole(weight, model.layout, tensor) if tensor.ndim else None
                tensors[f"{key}/{weight.name}{order}"] = Part(*own, weight.shape) if own else tensor
    return tensors


def whole_state(run: Run, model: HasWeights, optimizer: Optimizer) -> dict[str, Tensor]:
    """All that training changes."""
    return state_tensors(model, optimizer.state) | (run.scaler.state() if run.scaler else {})


def read(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors by their names from a checkpoint of any layout; UsageError for what does not fit."""
    try:
        reader = filesystem.FileSystemReader(path)
        load_tensors({**tensors}, storage_reader=reader, no_dist=True)
    except api.CheckpointException as error:
        advice = "to start from its weights, export it, and give the export to --init-from"
        raise UsageError(f"{path}: cannot be read: {cause_of(error)}; {advice}") from None


@torch.no_grad()
def load(run: Run, model: HasWeights, optimizer: Optimizer, path: Path) -> None:
    """Set all that training changes from a checkpoint of any layout."""
    learnt = [parameter for _, parameter in model.weights() if parameter.requires_grad]
    for parameter in learnt:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes its state; what it changes is read
    for parameter in learnt:
        parameter.grad = None
    read(path, whole_state(run, model, optimizer))


def cause_of(error: api.CheckpointException) -> str:
    """Why the first rank failed, in one line."""
    rank, (cause, _) = min(error.failures.items())
    if not isinstance(cause, Exception):  # a signal
        raise cause
    return f"rank {rank}: {first_cause(cause)}"


class StepWriter(filesystem.FileSystemWriter):
    """Writes the state before a step; when all ranks have, rank 0 gives it its final name."""

    def __init__(self, run: Run, step: int):
        self.directory = run.directory / f"checkpoints/step-{step:08}.tmp"
        super().__init__(self.directory)
        self.run, self.step, self.begin = run, step, time.perf_counter()

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """The results of this rank's writes, and the checksums of its files."""
        for tensor in planner.state_dict.values():
            if not getattr(tensor, "local", tensor).isfinite().all():
                raise ValueError("a number in it is not finite")
        torch.serialization.set_crc32_options(False)  # facts.json has that of the whole file
        try:
            results = super().write_data(plan, planner).wait()
        except (OSError, RuntimeError) as error:  # another rank would not learn of the first cause
            raise ValueError(first_cause(error)) from None
        names = {result.storage_data.relative_path for result in results}
        written = Future()
        written.set_result((results, {name: checksum(self.directory / name) for name in names}))
        return written

    def finish(self, metadata: Any, results: list[Any]) -> None:
        """On rank 0, when all ranks have written: what is where, the losses, and the final name."""
        super().finish(metadata, [parts for parts, _ in results])
        run, m = self.run, self.run.result.metrics
        sums = {".metadata": checksum(self.directory / ".metadata")}
        os.fsync(run.steps.fileno())
        files = dict(collections.ChainMap(sums, *(sums for _, sums in results)))
        saved = Facts(step=self.step, training=run.start.training, result=run.result, files=files)
        commit(saved, self.directory)
        m.n_checkpoints = (m.n_checkpoints or 0) + 1
        m.checkpoint_bytes = sum(part.size_in_bytes for parts, _ in results for part in parts)
        m.checkpoint_write_s = time.perf_counter() - self.begin


class Saver:
    """Saves every N steps, at the end, and when a signal asks for it."""

    def __init__(self, run: Run, model: HasWeights, optimizer: Optimizer):
        self.run, self.model, self.optimizer = run, model, optimizer
        self.opened = run.directory.stat()
        self.last_good = run.schedule.start or None
        self.group: Any = None
        run.result.metrics.n_checkpoints = 0
        if run.ranks.world > 1:
            timeout = datetime.timedelta(seconds=SAVE_S)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        if run.hang:
            run.hang.save_s = SAVE_S

    def after(self, step: int) -> None:
        """Save if it is time to."""
        if (step + 1) % self.run.plan.args.save_every == 0 or step + 1 == self.run.schedule.total:
            self.save(step + 1)

    def save(self, step: int) -> None:
        """Save the state before step number `step`; what fails is a remark, and the run goes on."""
        run, writer, m = self.run, StepWriter(self.run, step), self.run.result.metrics
        if not os.path.samestat(run.directory.stat(), self.opened):  # another run may have the name
            raise FileNotFoundError(errno.ENOENT, "was moved", str(run.directory))
        run.end_steps()
        synchronize(run.device)
        run.log.pause()
        try:
            state = whole_state(run, self.model, self.optimizer)
            save_tensors(state, storage_writer=writer, process_group=self.group)
            self.last_good = step
        except api.CheckpointException as error:
            why = f"step {step} was not saved: {cause_of(error)}"
            run.result.remark(why)
            if run.ranks.main:
                shutil.rmtree(writer.directory, ignore_errors=True)
                say(why)
        if run.schedule.window_begin < step < run.schedule.window_end:
            m.window_saves = (m.window_saves or 0) + 1
        run.log.start()
