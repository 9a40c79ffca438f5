"""Starting a script: by itself, as one rank under a launcher, or as the parent of its ranks."""

import gc
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from llm_train_bench.apply.precision import native_amp
from llm_train_bench.base import start
from llm_train_bench.base.errors import Interrupted, UsageError
from llm_train_bench.base.machine import n_cores
from llm_train_bench.measure.device import pick_device, platform_of, share_of_memory_gib
from llm_train_bench.parallel.ranks import ALONE, Ranks, find_ranks, leave
from llm_train_bench.run.hang import HangWatch
from llm_train_bench.run.signals import end_at_first, guarded, report_ending
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import make_plan


def launch(train: Callable[..., None], argv: Sequence[str], script: str) -> int:
    """Run on one device; the exit code."""
    prog = Path(script).name
    return guarded(lambda: train_planned(train, argv, prog, ALONE), prog)


def launch_ranks(train: Callable[..., None], argv: Sequence[str], script: str) -> int:
    """Run as one rank if a launcher started this process, or start one process per device."""
    prog = Path(script).name

    def run_rank(ranks: Ranks) -> None:
        # Connecting to others runs in C, without Python's handlers.
        with closing(HangWatch(lambda error, when: os._exit(report_ending(error, prog, ranks)))):
            train_planned(train, argv, prog, ranks)
            gc.collect()  # DDP must be gone before its process group: the two can wait for each other
            leave()

    def run() -> int:
        ranks = find_ranks(os.environ)
        return guarded(lambda: run_rank(ranks), prog, ranks) if ranks else start_ranks(argv, script)

    return guarded(run, prog)


def train_planned(train: Callable[..., None], argv: Sequence[str], prog: str, ranks: Ranks) -> None:
    """Resolve the arguments into a plan, and call `train(plan, device, ranks)`."""
    args = parse_args(argv, prog)
    if args.nproc not in (None, ranks.here):
        raise UsageError(
            f"--nproc {args.nproc}: this script was started by a launcher, which decides that; leave it "
            "out and use its --nproc-per-node"
        )
    if not args.save_every:
        start.refuse_stop_requests()
    device = pick_device(args.device, ranks.local_rank)
    has = {"memory_gib": share_of_memory_gib(device, ranks.here), "native_amp": native_amp(device)}
    train(make_plan(args, Script(prog), ranks.world, platform_of(device), **has), device, ranks)


def start_ranks(argv: Sequence[str], script: str) -> int:
    """Start the script once per device through torchrun's own agent, and wait for all."""
    from llm_train_bench.run import agent

    signal.signal(signal.SIGUSR1, end_at_first)  # until the agent passes it on
    if number := start.early_stop_request():
        raise Interrupted(signal.Signals(number).name)
    args = parse_args(argv, Path(script).name)
    cuda = args.device != "cpu" and torch.cuda.is_available()
    n = args.nproc or (torch.cuda.device_count() if cuda else 2)
    if not n:  # pytorch/pytorch#186516
        raise UsageError("PyTorch has a GPU but counts none: an amdsmi that does not fit its ROCm?")
    # The ranks share the cores; more threads than cores slow every one of them down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_cores() // n)))
    for name in [name for name in os.environ if name.startswith("PET_")]:  # for torchrun itself
        del os.environ[name]
    words = ["--standalone", "--nproc-per-node", str(n), str(Path(script).resolve())]
    options = agent.torchrun.parse_args(words)
    options.training_script_args = argv  # not parsed: torchrun would take --nproc for its own
    return agent.run_agent(options)
