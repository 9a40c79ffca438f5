"""Starting a script: alone, as one rank under a launcher, or as the parent of its ranks."""

import contextlib
import dataclasses
import gc
import math
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from llm_train_bench.apply.precision import native_amp
from llm_train_bench.base import start
from llm_train_bench.base.errors import DoesNotFit, Interrupted, UsageError
from llm_train_bench.base.machine import n_cores
from llm_train_bench.formulas.memory_model import estimate_memory, largest_batch
from llm_train_bench.formulas.work import Work
from llm_train_bench.measure.device import GIB, SHARE_GPU, memory_gib, pick_device, platform_of
from llm_train_bench.parallel.ranks import ALONE, MEETING, Ranks, find_ranks, leave
from llm_train_bench.run import failures
from llm_train_bench.run.hang import HangWatch
from llm_train_bench.run.signals import end_at_first, handled_by
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import ParallelFlags, Script, flag_of
from llm_train_bench.settings.plan import make_plan


def launch(train: Callable[..., None], argv: Sequence[str], script: str) -> int:
    """Run on one device; whatever happens becomes one line and an exit code (failures.Ending).

    Only a failure that is our fault shows a traceback.
    """
    prog = Path(script).name
    return _guarded(lambda: train_planned(train, argv, prog, ALONE), prog, ALONE)


def launch_ranks(train: Callable[..., None], argv: Sequence[str], script: str) -> int:
    """Run as one rank if a launcher started this process, or start one process per device."""
    prog = Path(script).name
    try:
        ranks = find_ranks(os.environ)
    except UsageError as error:
        return _report_failure(error, prog, ALONE)
    if ranks is None:
        return _guarded(lambda: _start_ranks(argv, script, prog), prog, ALONE)

    def body() -> None:
        train_planned(train, argv, prog, ranks)
        # Only now: DDP must be gone before its process group, or the two can wait for each other.
        gc.collect()
        leave()

    return _guarded(body, prog, ranks)


def train_planned(train: Callable[..., None], argv: Sequence[str], prog: str, ranks: Ranks) -> None:
    """Resolve the arguments into a plan, and call `train(plan, device, ranks)`."""
    args = parse_args(argv, prog)
    if not failures.has_parent():
        check_started_by_launcher(args)
    if not args.save_every:
        start.refuse_wishes()
    device = pick_device(args.device, ranks.local_rank)
    platform, free = platform_of(device), free_gib(device, ranks)
    has = {"memory_gib": free, "native_amp": native_amp(device)}
    plan = make_plan(args, Script(prog), ranks.world, platform, **has)
    refuse_impossible(plan.work, device)
    if platform != "cpu" and free:
        plan = dataclasses.replace(plan, notes=(*plan.notes, *warn_of_memory(plan.work, free)))
    train(plan, device, ranks)


def refuse_impossible(work: Work, device: torch.device) -> None:
    """DoesNotFit for a step whose token ids alone are more than the device's memory."""
    need, has = 8 * work.batch.micro_tokens / GIB, memory_gib(device)
    if has and need > has:
        raise DoesNotFit(
            f"the token ids of a micro batch alone need {need:,.0f} GiB, and this device has {has:,.0f}; "
            "use a smaller --bsz"
        )


def free_gib(device: torch.device, ranks: Ranks) -> float | None:
    """Memory that a rank may plan with [GiB]: its share of a GPU's, or of half of a CPU's machine."""
    has, here = memory_gib(device), int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
    if not has:
        return None
    if device.type == "cpu":
        return has / 2 / here
    shares = os.environ.get(SHARE_GPU) == "1"
    return has / math.ceil(here / torch.cuda.device_count()) if shares else has


def warn_of_memory(work: Work, has: float) -> Iterator[str]:
    """A warning where the estimate exceeds a GPU's `has` GiB."""
    if (need := estimate_memory(work).on_device(work.world) / GIB) <= has:
        return
    largest = largest_batch(
        lambda bsz: estimate_memory(work.with_micro_batch(bsz)).on_device(work.world), has * GIB
    )
    use = f"the largest --bsz that fits is {largest}" if largest else "no --bsz fits; use more GPUs"
    needs = f"this needs an estimated {need:,.1f} GiB, and the GPU has {has:,.1f}"
    yield f"memory may not suffice: {needs}; {use}"


def check_started_by_launcher(flags: ParallelFlags) -> None:
    """UsageError for flags that work only if the script starts its ranks itself."""
    for flag, instead in (("nproc", "its --nproc-per-node"), ("max_restarts", "torchrun's own")):
        if getattr(flags, flag):
            raise UsageError(
                f"{flag_of(flag)}: this script was started by a launcher, which decides "
                f"that; leave it out and use {instead}"
            )


def _guarded(body: Callable[[], int | None], prog: str, ranks: Ranks) -> int:
    def end(error: BaseException, when: float) -> None:
        failures.report(error, prog, ranks)
        os._exit(failures.classify(error).code)

    start.imported()
    try:
        with handled_by(end_at_first), contextlib.ExitStack() as stack:
            try:
                if ranks.world > 1:  # connecting to others runs in C, without Python's handlers
                    stack.callback(HangWatch(end).close)
                code = body() or 0
                saves = any(t.name.startswith(failures.SAVES) for t in threading.enumerate())
                if start.is_script() and saves:
                    sys.stdout.flush()
                    os._exit(code)  # a save that was given up; it must not outlive the interpreter
                return code
            except (Exception, KeyboardInterrupt, Interrupted) as error:
                return _report_failure(error, prog, ranks)
    # As the handlers are set or taken away, or before the report of an error.
    except (KeyboardInterrupt, Interrupted) as late:
        return _report_failure(late.__context__ or late, prog, ranks)


def _report_failure(error: BaseException, prog: str, ranks: Ranks) -> int:
    """The exit code after a failure, once it is reported; a rank among others exits here."""
    code = failures.classify(error).code
    with handled_by(signal.SIG_IGN):  # the agent's too, when another rank has failed
        failures.report(error, prog, ranks)
        if start.orphaned():
            shutil.rmtree(os.environ.get(MEETING, ""), ignore_errors=True)
        elif code == failures.PREEMPTED and failures.has_parent():
            (Path(os.environ[MEETING]) / failures.STOPPED_FILE).touch()
            os._exit(0)  # or the agent would start all again; it is the agent who says 75
        if ranks.world > 1:
            # Taking the process group apart could wait for ranks that are gone.
            sys.stdout.flush()
            os._exit(code)
    return code


def _start_ranks(argv: Sequence[str], script: str, prog: str) -> int:
    """Start the script once per device through torchrun's own agent, and wait for all."""
    from torch.distributed import run as torchrun

    from llm_train_bench.run.agent import run_agent

    args = parse_args(argv, prog)
    if not args.save_every:
        start.refuse_wishes()
    cuda = args.device != "cpu" and torch.cuda.is_available()
    n = args.nproc or (torch.cuda.device_count() if cuda else 2)
    if not n:  # pytorch/pytorch#186516
        raise UsageError("PyTorch has a GPU but counts none: an amdsmi that does not fit its ROCm?")
    # The ranks share the cores; more threads than cores slow every one of them down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_cores() // n)))
    # Nothing may listen beyond this machine: what gloo and NCCL open is on the loopback. A store behind a
    # port would obey whoever connects to it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
    for name in [name for name in os.environ if name.startswith("PET_")]:  # for torchrun itself
        del os.environ[name]
    words = f"--standalone --nnodes 1 --nproc-per-node {n} --max-restarts {args.max_restarts}"
    options = torchrun.parse_args([*words.split(), str(Path(script).resolve())])
    options.training_script_args = argv  # not parsed: torchrun would take --nproc for its own
    return run_agent(options, args.save_every > 0)
