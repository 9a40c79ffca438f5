"""Starting ranks through torchrun's agent: all of a run, or those of one node.

    python -m llm_train_bench.run.agent [torchrun's options] SCRIPT CONFIG [flags]

is torchrun for our scripts. Besides what that does, it leaves the ranks time to save when it is told to
end, and ends with 75 if they did. It says in one line, and in the result, what ended each attempt.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.start import INTERRUPTED, PARENT, early_wish

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig

from llm_train_bench.base.errors import Interrupted, UsageError
from llm_train_bench.base.files import write_whole
from llm_train_bench.parallel.ranks import MEETING, ROUND
from llm_train_bench.results.console import say
from llm_train_bench.results.result_files import RUN_POINTER, complete_result, run_told
from llm_train_bench.run import failures
from llm_train_bench.run.launch import check_started_by_launcher
from llm_train_bench.run.signals import ENDING, SECOND, Heard, handled_by, ignore
from llm_train_bench.settings.command_line import parse_args

# torch wraps methods of its agent in a decorator without types.
TorchAgent: Any = LocalElasticAgent
# Seconds that ranks have to save and to end.
PATIENCE_S = int(failures.SAVE_S) + 90


def run_agent(options: argparse.Namespace, saves: bool) -> int:
    """Run the ranks of this node until all have ended; the exit code. Interrupted by a signal.

    `options` are torchrun's; a run that `saves` does so on request.
    """
    prog = Path(options.training_script).name
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # the agent's: all there is to say is said here
    os.environ[PARENT] = str(os.getpid())
    pids: dict[int, int] = {}  # by local rank

    class Agent(TorchAgent):
        def _monitor_workers(self, worker_group):
            result = super()._monitor_workers(worker_group)
            if result.state == WorkerState.FAILED:
                main = any(worker.global_rank == 0 for worker in worker_group.workers)
                codes.append(_report(result.failures, prog, private, main))
                if codes[-1] in (2, 4):  # it would end the same again
                    self._remaining_restarts = 0
                if self._remaining_restarts:
                    say(f"{prog}: all ranks start again")
            return result

        def _start_workers(self, worker_group):
            # Nodes count restarts differently: one whose ranks did not fail does not count any.
            if worker_group.group_rank == 0:
                worker_group.store.set(ROUND, uuid.uuid4().hex)
            os.environ[ROUND] = worker_group.store.get(ROUND).decode()
            (private / RUN_POINTER).unlink(
                missing_ok=True
            )  # it is the new attempt's, which writes it
            pids.update(super()._start_workers(worker_group))
            return pids

        def _exit_barrier(self):
            # Stopped on request, other nodes' agents may be gone already.
            if not (private / failures.STOPPED_FILE).exists():
                super()._exit_barrier()

    codes: list[int] = []
    heard = Heard()

    def stop(number: int, frame) -> None:
        if heard.first is None:
            heard.again(number)
            raise SignalException(f"got signal {number}", signal.Signals(number))
        if heard.again(number):
            for pid in pids.values():
                with contextlib.suppress(OSError):
                    os.killpg(pid, SECOND)

    numbers = (*ENDING, signal.SIGUSR1) if saves else ENDING
    made = tempfile.TemporaryDirectory(prefix="llm-train-bench-", ignore_cleanup_errors=True)
    with made as name, handled_by(stop, numbers):
        private = Path(name)
        os.environ[MEETING] = name
        config, program, arguments = configure(options, private)
        config.signals_to_handle = "none"  # all are handled here
        if saves:
            if hasattr(config, "shutdown_timeout"):  # torch 2.13
                config.shutdown_timeout = PATIENCE_S
            else:
                PContext.close.__defaults__ = (None, PATIENCE_S)
        api.__dict__["LocalElasticAgent"] = Agent
        try:
            if number := early_wish():
                raise SignalException("while this started", signal.Signals(number))
            api.elastic_launch(config, program)(*arguments)
        except ChildFailedError:
            return codes[-1]
        except SignalException as end:
            if not (private / failures.STOPPED_FILE).exists():
                name, pointer = end.sigval.name, private / RUN_POINTER
                complete_result(pointer, "interrupted", f"interrupted by {name}", (failures.LOST,))
                raise Interrupted(name) from None
        finally:  # this process ends; SLURM tells it to when another node's has ended
            ignore(numbers)
        return failures.PREEMPTED if (private / failures.STOPPED_FILE).exists() else 0


def configure(options: argparse.Namespace, private: Path) -> tuple[LaunchConfig, Any, list[str]]:
    """torchrun's settings, and the program of each rank with its arguments.

    Alone, this machine's ranks meet in a private directory: nothing listens for other machines.
    """
    if options.standalone:
        options.rdzv_backend = "c10d"
        options.rdzv_conf = "store_type=file"
        options.rdzv_endpoint = f"{private}/agent"
        options.rdzv_id = str(os.getpid())
        options.local_addr = "127.0.0.1"
    options.log_dir = options.log_dir or str(private)
    return torchrun.config_from_args(options)


def reported(failure) -> dict[str, Any]:
    """What a rank wrote of its failure; nothing where it was killed."""
    message = failure.error_file_data.get("message")
    return message if isinstance(message, dict) else {}


def first_failure(failed: dict[int, Any]) -> int:
    """The rank that failed first, of those that torchrun's agent names.

    A killed rank leaves no report, and the agent sees it only after others have noticed: it comes
    before what they reported in the ten seconds before. A rank that was told to end is no cause, unless
    it says that this was before anything else.
    """

    def when(rank: int, before_s: int = 0) -> float:
        if report := reported(failed[rank]):
            return report["extraInfo"].get("time_ns", 0)
        return (failed[rank].timestamp - before_s) * 1e9

    def told_to_end(rank: int) -> bool:
        if report := reported(failed[rank]):
            return report["message"].startswith("interrupted by")
        return failed[rank].exitcode == -signal.SIGTERM

    ended = [rank for rank in failed if told_to_end(rank)]
    ended.sort(key=lambda rank: (not reported(failed[rank]), when(rank)))
    first = [rank for rank in failed if rank not in ended]
    first.sort(key=lambda rank: when(rank, 10))
    if not first or (ended and reported(failed[ended[0]]) and when(ended[0]) < when(first[0])):
        return ended[0]
    return first[0]


def _report(failed: dict[int, Any], prog: str, private: Path, main: bool) -> int:
    """Print the error of the rank that failed first, and put it into the result; its exit code."""
    rank = first_failure(failed)
    first, data = failed[rank], reported(failed[rank])
    code = first.exitcode if first.exitcode in (2, 3, 4, INTERRUPTED) else 1
    text = data.get("message") or (
        f"killed by {first.signal_name()}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    )
    interrupted = text.startswith("interrupted by")
    status = "interrupted" if interrupted else "oom" if code == 3 else "failed"
    who, run = f"rank {rank}: {text}", run_told(private / RUN_POINTER)
    if run and not data:  # other nodes read it there
        with contextlib.suppress(OSError):
            (run / "errors").mkdir(exist_ok=True)
            write_whole(run / f"errors/rank{rank}.txt", f"{status}: {text}\n")
    end = time.monotonic() + 5.0
    while run and text.startswith(failures.NO_CAUSE) and time.monotonic() < end:
        if cause := failures.first_error(run, time.time()):
            status, who = cause
            break
        time.sleep(0.1)
    if data.get("extraInfo", {}).get("shown"):
        say(data["extraInfo"]["py_callstack"].rstrip("\n"))
    say(f"{prog}: {text if code in (2, 4) else who}")
    if main:
        complete_result(private / RUN_POINTER, status, who, (failures.LOST,))
    return code


def main(argv: Sequence[str]) -> int:
    """The command line; its exit code."""
    options = torchrun.parse_args(argv)
    prog = Path(options.training_script).name

    try:
        args = parse_args(options.training_script_args, prog)
        check_started_by_launcher(args)
        return run_agent(options, args.save_every > 0)
    except (UsageError, ValueError) as error:
        say(f"{prog}: {error}")
        return 2
    except Interrupted as error:
        say(f"{prog}: interrupted by {error}")
        return INTERRUPTED
    except RendezvousError as error:
        say(f"{prog}: the nodes did not meet: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
