"""Which rank this process is, and joining the others."""

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llm_train_bench.base.start import LAUNCHERS, PARENT

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from llm_train_bench.base.errors import Finished, NotJoined, UsageError
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.machine import n_cores, output_of
from llm_train_bench.measure.device import is_out_of_memory
from llm_train_bench.results.result_files import RUN_POINTER

# The private directory of a launcher of ours, on each machine; the ranks of one machine meet there.
MEETING = "LLM_TRAIN_BENCH_MEETING"
CHECK_MEETING = (
    "check that all were started, that MASTER_ADDR and MASTER_PORT are rank 0's host and a free port of "
    "it, and what the other ranks say"
)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among all: rank 0 writes and prints."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def here(self) -> int:
        """The number of ranks on this machine; of all where the launcher does not say."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))


ALONE = Ranks()


def find_ranks(environ: Mapping[str, str]) -> Ranks | None:
    """The ranks that a launcher put into the environment; None without one.

    A world of one counts only from torchrun: `srun --pty bash`, say, is an ordinary shell. UsageError
    for variables that say no rank.
    """
    for names in LAUNCHERS:
        if names[0] in environ and names[1] in environ:
            values = [environ[name] for name in names if name in environ]
            if not all(value.isascii() and value.isdigit() for value in values):
                shown = ", ".join(f"{name}={environ.get(name)!r}" for name in names)
                raise UsageError(
                    f"{shown}: must be whole numbers; was the launcher's variable unset?"
                )
            rank, world, local = map(int, [*values, 0][:3])
            if world == 1 and names[0] != "RANK":
                continue
            if names[0] == "PMI_RANK" and names[2] not in environ:  # others than MPICH set it too
                raise UsageError(
                    f"PMI_RANK without {names[2]}: the launcher is unknown; set RANK, WORLD_SIZE, "
                    "LOCAL_RANK and MASTER_ADDR, or start torchrun"
                )
            if rank >= world or local >= world:
                shown = f"{names[0]}={rank} and {names[2]}={local}"
                raise UsageError(f"{shown}: both must be below {names[1]}={world}")
            return Ranks(rank, world, local)
    return None


def joined_ranks() -> Ranks:
    """The ranks of torch.distributed; RuntimeError where a launcher started several that did not meet."""
    if dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    if (find_ranks(os.environ) or ALONE).world > 1:
        raise RuntimeError(
            "a launcher started several ranks, and torch.distributed is not initialized; call "
            "torch.distributed.init_process_group first"
        )
    return ALONE


def join(ranks: Ranks, device: torch.device, timeout_s: float, offload: bool = False) -> None:
    """Make the process group of all ranks: NCCL (RCCL on AMD) for GPUs, gloo for CPUs.

    With `offload` gradients are on the CPU, where their norm is summed up too. A process that belongs
    to a group already keeps it. NotJoined where the ranks do not find each other.
    """
    if dist.is_initialized():
        return
    os.environ.setdefault("RANK", str(ranks.rank))
    os.environ.setdefault("WORLD_SIZE", str(ranks.world))
    one_machine = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    private = os.environ.get(MEETING) if one_machine else None
    if "MASTER_ADDR" not in os.environ and not private:
        os.environ["MASTER_ADDR"] = _first_host(os.environ)
    if "MASTER_PORT" not in os.environ and not private:
        # One port for all ranks of a job, and another for another job on the same hosts.
        job = int(os.environ.get("SLURM_JOB_ID", "0"))
        os.environ["MASTER_PORT"] = str(29500 + job % 1000)
    cuda = device.type == "cuda"
    timeout = collective_timeout(device, timeout_s)
    if cuda:  # NCCL's second watchdog waits for the first
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{max(480, 2 * timeout_s):.0f}")
        # Otherwise the first ends the process before it can say what went wrong on the GPU.
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    if offload:  # the optimizer runs on the CPU, which the ranks of a machine share
        here = min(ranks.world, torch.cuda.device_count() or 1)
        torch.set_num_threads(max(1, n_cores() // here))
    at = private or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _open_store(private, ranks, timeout)
        _wait_for_all(store, ranks, timeout_s, at)
        dist.init_process_group(
            "gloo" if not cuda else "cpu:gloo,cuda:nccl" if offload else "nccl",
            timeout=timeout,
            device_id=device if cuda else None,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world,
        )
    except dist.DistError as error:
        if is_out_of_memory(error):
            raise
        advice = CHECK_MEETING
        if isinstance(error, dist.DistBackendError):
            advice = "NCCL_DEBUG=INFO says more, and so may the other ranks"
        raise NotJoined(
            f"could not join the {ranks.world} ranks that meet at {at}: {error}; {advice}"
        ) from error


def _wait_for_all(store: Store, ranks: Ranks, timeout_s: float, at: str) -> None:
    """Return when every rank has come to the store; NotJoined names those that did not in time.

    NCCL would wait for them in C without end, and would hear no signal there.
    """
    keys = [f"here/{rank}" for rank in range(ranks.world)]
    store.set(keys[ranks.rank], "")
    store.add("here", 1)
    end, pause = time.monotonic() + timeout_s, 0.02
    while store.add("here", 0) < ranks.world:
        if time.monotonic() > end:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise NotJoined(
                f"could not join the {ranks.world} ranks that meet at {at}: after {timeout_s:g} s "
                f"rank {', '.join(missing[:9])}{', ...' * (len(missing) > 9)} is missing; {CHECK_MEETING}"
            )
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def broken_group() -> str | None:
    """The error that NCCL reports for a group of this process; None while it reports none.

    NCCL tells of a peer that died elsewhere only when asked.
    """
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(Exception):  # a group without NCCL
            error = group._get_backend(torch.device("cuda")).get_error()
            if error != ErrorType.SUCCESS:
                return error.name
    return None


def collective_timeout(device: torch.device, timeout_s: float) -> datetime.timedelta:
    """How long a collective may take. NCCL ends a process silently, so run/hang.py acts first."""
    cuda = device.type == "cuda"
    return datetime.timedelta(seconds=1.25 * timeout_s if cuda else timeout_s)


def _open_store(private: str | None, ranks: Ranks, timeout: datetime.timedelta) -> Store:
    """The store for the ranks' addresses: files in a private directory, or a server.

    torchrun keeps one store over all restarts, with the addresses of the attempt before. So each
    attempt writes under its own name.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if private:
        store = FileStore(str(Path(private) / f"ranks{attempt}"), ranks.world)
        store.set_timeout(timeout)
        return store
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        # Kubernetes sets such a variable for a service that is called master.
        raise UsageError(f"MASTER_PORT={port}: must be the number of a free port of rank 0's host")
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    main = ranks.main and not theirs
    store = TCPStore(address, int(port), ranks.world, main, timeout, wait_for_workers=False)
    return PrefixStore(attempt, store)


def tell_launcher(ranks: Ranks, directory: Path) -> None:
    """Tell the launcher of ours that started this rank, if one did, the directory of its run."""
    ours = os.environ.get(PARENT) == str(os.getppid())
    if ours and ranks.local_rank == 0 and MEETING in os.environ:
        with contextlib.suppress(OSError):
            write_whole(Path(os.environ[MEETING]) / RUN_POINTER, str(directory.resolve()))


def _first_host(environ: Mapping[str, str]) -> str:
    """The host where ranks meet: the first of a SLURM job, or this one if Open MPI uses no other."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes and (hosts := output_of("scontrol", "show", "hostnames", nodes)):
        return hosts.split()[0]
    if int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", -1)) == int(environ["WORLD_SIZE"]):
        return "127.0.0.1"
    raise UsageError("MASTER_ADDR is not set; give the address of rank 0's host to every rank")


def broadcast(ranks: Ranks, value: Any) -> Any:
    """Rank 0's value on every rank; any picklable object."""
    if ranks.world == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(ranks: Ranks, function: Callable[[], Any]) -> Any:
    """What the function returns on rank 0, on every rank; so its UsageError or Finished."""
    value = problem = None
    if ranks.main:
        try:
            value = function()
        except OSError as error:
            why = f"{error.filename or 'a file'}: cannot be used: {error.strerror}"
            problem = UsageError(why)
        except (UsageError, Finished) as error:
            problem = error
    value, problem = broadcast(ranks, (value, problem))
    if problem:
        raise problem
    return value


def meet(ranks: Ranks) -> None:
    """Go on when all ranks are here."""
    if ranks.world > 1:
        dist.barrier()


def gather(ranks: Ranks, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in order, on every rank; `group` is another group of all ranks."""
    if ranks.world == 1:
        return [value]
    values = [None] * ranks.world
    dist.all_gather_object(values, value, group=group)
    return values


def average_over_ranks(value: torch.Tensor) -> None:
    """Mean of a tensor over all ranks, in place, in stream order."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()


def leave() -> None:
    """Take the process group apart after a run that went well."""
    if dist.is_initialized():
        dist.destroy_process_group()
