"""torchrun's agent for our scripts: it starts all ranks of a run, or those of one node.

    python -m llm_train_bench.run.agent [torchrun's options] SCRIPT CONFIG [flags]

is torchrun that passes signals on to the ranks, which may take their time to save, that says in one line
and in the result what ended an attempt, and that exits with our codes.
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

from llm_train_bench.base.start import PARENT

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from llm_train_bench.base.errors import Interrupted, Killed, NotJoined, UsageError
from llm_train_bench.parallel.ranks import MEETING, ROUND
from llm_train_bench.results.console import say
from llm_train_bench.results.result_files import RUN_POINTER, complete_result, run_told
from llm_train_bench.run.failures import LOST, NO_CAUSE, PREEMPTED, first_error, keep_error
from llm_train_bench.run.launch import guarded
from llm_train_bench.run.signals import ENDING, SECOND, Heard, end_at_first, handled_by, ignore

SIGNALS = (*ENDING, signal.SIGUSR1)
# torch wraps methods of its agent in a decorator without types.
TorchAgent: Any = LocalElasticAgent


class Agent(TorchAgent):
    """torchrun's agent, which also passes signals on, and says what ended the ranks."""

    prog = ""  # whose ranks they are
    asked = ""  # the signal that was passed on
    insists = False

    def _invoke_run(self, role):
        self.pointer, self.heard = Path(os.environ[MEETING]) / RUN_POINTER, Heard()
        with handled_by(self._hear, SIGNALS):
            result = super()._invoke_run(role)
            ignore(SIGNALS)  # SLURM signals this once more when another node has ended
            return result

    def _hear(self, number: int, frame: object) -> None:
        if self._worker_group.state != WorkerState.HEALTHY:
            end_at_first(number, frame)
        self.insists |= self.heard.again(number)
        if not self.asked:
            self.asked = signal.Signals(number).name
            for pid in self._pcontext.pids().values():
                with contextlib.suppress(OSError):
                    os.killpg(pid, number)

    def _start_workers(self, worker_group):
        # Nodes count restarts differently: one whose ranks did not fail does not count any.
        if worker_group.group_rank == 0:
            worker_group.store.set(ROUND, uuid.uuid4().hex)
        os.environ[ROUND] = worker_group.store.get(ROUND).decode()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group):
        if self.insists:
            self._pcontext.close(SECOND)
        result = super()._monitor_workers(worker_group)
        if result.failures:
            first = first_failure(result.failures)
            if first["code"] in (2, 4, PREEMPTED):  # all would end the same again
                self._remaining_restarts = 0
            elif self.asked:
                status = "interrupted"
                complete_result(self.pointer, status, f"{status} by {self.asked}", (LOST,))
                raise Interrupted(self.asked)
            self._report(first, worker_group)
        return result

    def _report(self, first: dict[str, Any], worker_group) -> None:
        """Print the error of the rank that failed first, and put it into the result."""
        rank, text, status = first["rank"], first["text"], first["status"]
        run, who = run_told(self.pointer), f"rank {rank}: {text}"
        if run and first.get("killed"):  # other nodes read it there
            keep_error(run, rank, Killed(text))
        if run and text.startswith(NO_CAUSE) and worker_group.group_world_size > 1:
            time.sleep(4.0)  # another node's agent writes that its rank was killed
            status, who = first_error(run, time.time()) or (status, who)
        say(f"{first.get('trace', '')}{self.prog}: {text if first['code'] in (2, 4) else who}")
        if any(worker.global_rank == 0 for worker in worker_group.workers):
            complete_result(self.pointer, status, who, (LOST,))


def first_failure(failed: dict[int, Any]) -> dict[str, Any]:
    """What the rank that failed first said (failures.report), or how it was killed.

    Times are in whole seconds. Of equal ones, that counts which torchrun's agent saw first.
    """
    rank = min(failed, key=lambda rank: failed[rank].timestamp)
    failure, message = failed[rank], failed[rank].error_file_data["message"]
    if isinstance(message, dict):
        return message["extraInfo"]
    signalled = failure.exitcode < 0
    text = f"killed by {failure.signal_name()}" if signalled else f"exit code {failure.exitcode}"
    return dict(rank=rank, text=text, status="failed", code=1, killed=True)


def run_agent(options: argparse.Namespace) -> int:
    """Run the ranks of this node by torchrun's options until all have ended; the exit code."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # the agent's: all there is to say is said here
    api.__dict__["LocalElasticAgent"], Agent.prog = Agent, Path(options.training_script).name
    with tempfile.TemporaryDirectory("", "llm-train-bench-", ignore_cleanup_errors=True) as private:
        os.environ |= {PARENT: str(os.getpid()), MEETING: private}
        options.log_dir = options.log_dir or private
        if options.standalone:  # this machine's ranks meet in files: nothing listens for others
            options.rdzv_backend, options.rdzv_conf = "c10d", "store_type=file"
            options.rdzv_endpoint, options.rdzv_id = f"{private}/agent", "alone"
            options.local_addr = "127.0.0.1"
        try:
            config, program, arguments = torchrun.config_from_args(options)
            config.signals_to_handle = "none"  # all are handled here
            api.elastic_launch(config, program)(*arguments)
            return 0
        except ChildFailedError as error:
            return first_failure(error.failures)["code"]
        except RendezvousError as error:
            raise NotJoined(f"the nodes did not meet: {error}") from None
        except ValueError as error:
            raise UsageError(error) from None


def main(argv: Sequence[str]) -> int:
    """The command line; its exit code."""
    options = torchrun.parse_args(argv)
    return guarded(lambda: run_agent(options), Path(options.training_script).name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
