"""Starting a script: alone, as one rank under a launcher, or as the parent of its ranks."""

import contextlib
import dataclasses
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.start import PARENT

import torch

from bench import start
from bench.errors import DoesNotFit, Interrupted, UsageError
from bench.formulas.memory_model import MEMORY_ERROR, estimate_memory, largest_batch
from bench.formulas.work import Work
from bench.measure.device import GIB, cpu_count, memory_gib, pick_device, platform_of
from bench.parallel.ranks import ALONE, MEETING, Ranks, find_ranks, leave
from bench.results.result_files import RUN_POINTER, complete_result, read_result
from bench.run.failures import ENDING, LOST, PREEMPTED, exit_code, has_parent, report
from bench.run.hang import HangWatch
from bench.settings.command_line import parse_args
from bench.settings.flags import RankFlags, Script, flag_of
from bench.settings.plan import make_plan


def launch(train: Callable[..., None], argv: Sequence[str], script: str) -> int:
    """Run on one device; whatever happens becomes one line and an exit code.

    0 done, 2 bad arguments or config, 3 out of memory, 1 anything else. Only a failure that
    is our fault shows a traceback.
    """

    prog = Path(script).name
    return _guarded(lambda: train_planned(train, argv, prog, ALONE), prog, ALONE)


def launch_ranks(train: Callable[..., None], argv: Sequence[str], script: str) -> int:
    """Run as one rank if a launcher started this process, or start one process per device."""
    prog = Path(script).name
    try:
        ranks = find_ranks(os.environ)
    except UsageError as error:
        report(error, prog, ALONE)
        return exit_code(error)
    if ranks is None:
        return _guarded(lambda: _start_ranks(argv, script, prog), prog, ALONE)

    def body() -> None:
        train_planned(train, argv, prog, ranks)
        # Only now: DDP must be gone before its process group, or the two can wait for each other.
        gc.collect()
        leave()

    return _guarded(body, prog, ranks)


def train_planned(
    train: Callable[..., None], argv: Sequence[str], script: str, ranks: Ranks
) -> None:
    """Resolve the arguments into a plan, and call `train(plan, device, ranks)`."""
    args = parse_args(argv, script)
    if not has_parent():
        _check_joining(args.part(RankFlags))
    device = pick_device(args.device, ranks.local_rank)
    script, platform = Script(script), platform_of(device)
    free = free_gib(device, ranks)
    plan = make_plan(args, script, ranks.world, platform, memory_gib=free)
    refuse_impossible(plan.work, device)
    if platform != "cpu" and not args.no_fit_check and free:
        plan = dataclasses.replace(plan, notes=(*plan.notes, *check_fit(plan.work, free)))
    train(plan, device, ranks)


def refuse_impossible(work: Work, device: torch.device) -> None:
    """DoesNotFit for a step whose token ids alone are more than the device's memory.

    Others may not fit either; this one would spend minutes before it failed.
    """
    need, has = 8 * work.batch.micro_tokens / GIB, memory_gib(device)
    if has and need > has:
        raise DoesNotFit(
            f"the token ids of a micro batch alone need {need:,.0f} GiB, and this device has {has:,.0f}; "
            "use a smaller --bsz"
        )


def free_gib(device: torch.device, ranks: Ranks) -> float | None:
    """Memory that a rank may plan with [GiB]: a GPU's, or its share of half of a CPU's machine.

    Not what is free just now: ranks that look at different moments must agree.
    """
    has = memory_gib(device)
    if device.type == "cuda" or not has:
        return has
    return has / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))


def check_fit(work: Work, has: float) -> Iterator[str]:
    """A warning where the estimate exceeds a GPU's `has` GiB; DoesNotFit beyond its own error."""
    if (need := estimate_memory(work).on_device(work.world) / GIB) <= has:
        return
    largest = largest_batch(
        lambda bsz: estimate_memory(work.with_micro_batch(bsz)).on_device(work.world), has * GIB
    )
    use = f"the largest --bsz that fits is {largest}" if largest else "no --bsz fits; use more GPUs"
    text = f"by the estimate this needs {need:,.1f} GiB, and the GPU has {has:,.1f}; {use}"
    if need * (1 - MEMORY_ERROR) > has:
        raise DoesNotFit(f"{text}; --no-fit-check tries it all the same")
    yield f"memory may not suffice: {text}"


def _check_joining(flags: RankFlags) -> None:
    """UsageError for flags that work only if the script starts its ranks itself."""
    for flag, instead in (("nproc", "its --nproc-per-node"), ("max_restarts", "torchrun's own")):
        if getattr(flags, flag):
            raise UsageError(
                f"{flag_of(flag)}: this script was started by a launcher, which decides "
                f"that; leave it out and use {instead}"
            )


def _guarded(body: Callable[[], int | None], prog: str, ranks: Ranks) -> int:
    start.imported()
    with _first_signal_counts(_interruption), _heard_while_joining(prog, ranks):
        try:
            return body() or 0
        except (Exception, KeyboardInterrupt, Interrupted) as error:
            report(error, prog, ranks)
            if ranks.world > 1 and exit_code(error) == PREEMPTED and has_parent():
                os._exit(0)  # or the agent would start all again; it is the parent who says 75
            if ranks.world > 1:
                # Taking the process group apart could wait for ranks that are gone.
                sys.stdout.flush()
                os._exit(exit_code(error))
            return exit_code(error)


@contextlib.contextmanager
def _heard_while_joining(prog: str, ranks: Ranks):
    """End this rank if a signal comes while it connects to the others, where no Python runs."""
    if ranks.world == 1:
        yield
        return

    def end(error: BaseException, when: float) -> None:
        report(error, prog, ranks)
        os._exit(exit_code(error))

    watch = HangWatch(end, None)
    try:
        yield
    finally:
        watch.close()


@contextlib.contextmanager
def _first_signal_counts(
    exception: Callable[[signal.Signals], BaseException],
    numbers: Sequence[signal.Signals] = ENDING,
):
    """The first signal that asks for an end counts; later ones must not cut the ending off.

    The terminal interrupts a rank; then its agent interrupts it again, to end the ranks it started.
    """

    def end(number: int, frame) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise exception(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup: whoever started this wants it so
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:  # still ours: the first signal sets SIG_IGN
                signal.signal(number, handler)


def _interruption(number: signal.Signals) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Interrupted(number.name)


def first_failure(failures: dict[int, Any]) -> int:
    """The rank that failed first, of those that torchrun's agent names.

    A killed rank leaves no report, and the agent sees it only after others have noticed: it comes
    before what they reported in the ten seconds before. A rank that was told to end is no cause, unless
    it says that this was before anything else.
    """

    def reported(failure) -> dict | None:
        message = failure.error_file_data.get("message")
        return message if isinstance(message, dict) else None

    def when(rank: int, before_s: int = 0) -> float:
        report = reported(failures[rank])
        if report:
            return report["extraInfo"].get("time_ns", 0)
        return (failures[rank].timestamp - before_s) * 1e9

    def told_to_end(rank: int) -> bool:
        report = reported(failures[rank])
        if report:
            return report["message"].startswith("interrupted by")
        return failures[rank].exitcode == -signal.SIGTERM

    told = [rank for rank in failures if told_to_end(rank)]
    others = [rank for rank in failures if rank not in told]
    first = min(others, key=lambda rank: when(rank, 10), default=None)
    ended = min(
        told, key=lambda rank: (reported(failures[rank]) is None, when(rank)), default=first
    )
    if first is None or (reported(failures[ended]) and when(ended) < when(first)):
        return ended
    return first


def _start_ranks(argv: Sequence[str], script: str, prog: str) -> int:
    """Start the script once per device through torchrun's own agent, and wait for all."""
    from torch.distributed.elastic.multiprocessing.api import (
        DefaultLogsSpecs,
        PContext,
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    args = parse_args(argv, prog)
    cuda = args.device != "cpu" and torch.cuda.is_available()
    n = args.nproc or (torch.cuda.device_count() if cuda else 2)
    if not n:  # pytorch/pytorch#186516
        raise UsageError("PyTorch has a GPU but counts none: an amdsmi that does not fit its ROCm?")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[PARENT] = str(os.getpid())
    # The ranks share the cores; more threads than cores slow every one of them down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // n)))
    # Nothing may listen beyond this machine: the ranks meet in a private directory, and what gloo and
    # NCCL open is on the loopback. A store behind a port would obey whoever connects to it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _loopback())

    def stop_agent(number: signal.Signals) -> SignalException:
        return SignalException(f"got {number.name}", number)

    with tempfile.TemporaryDirectory(
        prefix="llm-train-bench-", ignore_cleanup_errors=True
    ) as private:
        os.environ[MEETING] = private
        more = {}
        if args.save_every:  # the agent gives its ranks this long to save
            patience = int(args.save_timeout + 30)
            if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:  # torch 2.13
                more["shutdown_timeout"] = patience
            else:
                PContext.close.__defaults__ = (None, patience)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{private}/agent",
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            run_id=f"{os.getpid()}",
            max_restarts=args.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=private),
            signals_to_handle="none",  # all are handled here
            **more,
        )
        try:
            wishes = (signal.SIGUSR1,) if args.save_every else ()
            with _first_signal_counts(stop_agent, (*ENDING, *wishes)):
                elastic_launch(config, sys.executable)("-u", str(Path(script).resolve()), *argv)
        except ChildFailedError as failure:
            return _first_failure(failure, prog, Path(private))
        except SignalException as stop:
            if _preempted(Path(private)):
                return PREEMPTED
            why = f"interrupted by {stop.sigval.name}"
            complete_result(Path(private) / RUN_POINTER, "interrupted", why, (LOST,))
            raise Interrupted(stop.sigval.name) from None
        return PREEMPTED if _preempted(Path(private)) else 0


def _preempted(private: Path) -> bool:
    """Whether the run that a private directory points to was saved and stopped on request."""
    with contextlib.suppress(OSError, ValueError):
        run = Path((private / RUN_POINTER).read_text(encoding="utf-8"))
        return read_result(run / "result.json").status == "preempted"
    return False


def _first_failure(failure, prog: str, private: Path) -> int:
    """Print the error of the rank that failed first, and see that the result says it; its exit code."""
    rank = first_failure(failure.failures)
    first = failure.failures[rank]
    code = first.exitcode if first.exitcode in (2, 3, 4) else 1
    data = first.error_file_data.get("message", {})
    text = data.get("message") if isinstance(data, dict) else None
    text = text or (
        f"killed by {first.signal_name()}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    )
    who = prog if code in (2, 4) else f"{prog}: rank {rank}"
    if isinstance(data, dict) and data.get("extraInfo", {}).get("shown"):
        print(data["extraInfo"]["py_callstack"], file=sys.stderr, end="")
    print(f"{who}: {text}", file=sys.stderr, flush=True)
    status = "oom" if code == 3 else "failed"
    if text.startswith("interrupted by"):
        status = "interrupted"
    complete_result(private / RUN_POINTER, status, f"rank {rank}: {text}", (LOST,))
    return code


def _loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
