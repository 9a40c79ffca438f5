"""torchrun for our scripts: it starts all ranks of a run, or those of one node.

    python -m llm_train_bench.run.agent [torchrun's options] SCRIPT CONFIG [flags]

is torchrun with three changes. It passes signals on to the ranks, and waits while they save. It names in
one line and in the result what ended the run. It exits with our codes.
"""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from llm_train_bench.base.start import INTERRUPTED, PARENT

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from llm_train_bench.base.children import private_directory, signal_session
from llm_train_bench.base.errors import NotJoined, UsageError
from llm_train_bench.parallel.ranks import MEETING
from llm_train_bench.run import signals
from llm_train_bench.run.failures import PREEMPTED, first_failure, report_first
from llm_train_bench.run.signals import ENDING, SECOND, Heard, end_at_first, handled_by


def pass_on_signals(agents: list[Any], sent: list[int]) -> signals.Handler:
    """A handler: the agent's ranks get the first signal as it is, then SECOND, then SIGKILL."""
    heard = Heard()

    def pass_on(number: int, frame: object) -> None:
        workers = [worker for agent in agents for worker in agent.get_worker_group().workers]
        if not any(worker.id for worker in workers):
            end_at_first(number, frame)
        if heard.again(number) or not sent:
            for worker in workers:
                signal_session(worker.id, (number, SECOND, signal.SIGKILL)[min(len(sent), 2)])
            sent.append(number)

    return pass_on


def run_agent(options: argparse.Namespace) -> int:
    """Run the ranks of this node by torchrun's options until all have ended; the exit code."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # the agent's: all there is to say is said here
    agents, sent, prog = [], [], Path(options.training_script).name

    def build_agent(*args: Any, **named: Any) -> LocalElasticAgent:
        agents.append(LocalElasticAgent(*args, **named))
        return agents[-1]

    with contextlib.ExitStack() as stack:
        handler = pass_on_signals(agents, sent)
        stack.enter_context(handled_by(handler, (*ENDING, signal.SIGUSR1)))
        private = str(stack.enter_context(private_directory()))
        api.__dict__["LocalElasticAgent"] = build_agent
        os.environ |= {PARENT: str(os.getpid()), MEETING: private}
        options.log_dir = options.log_dir or private
        if options.standalone:  # this machine's ranks meet in files: nothing listens for others
            options.rdzv_backend, options.rdzv_conf = "c10d", "store_type=file"
            options.rdzv_endpoint, options.rdzv_id = f"{private}/agent", "alone"
            options.local_addr = "127.0.0.1"
            # What gloo and NCCL open is on the loopback. A store behind a port would obey whoever
            # connects to it.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, names[0] if names else "lo")
        try:
            config, program, arguments = torchrun.config_from_args(options)
            config.signals_to_handle = "none"  # all are handled here
            api.elastic_launch(config, program)(*arguments)
            return 0
        except ChildFailedError as error:
            first = first_failure(error.failures)
            asked = signal.Signals(sent[0]).name if sent and first["code"] != PREEMPTED else None
            report_first(first, prog, options.nnodes not in ("1", "1:1"), asked)
            return INTERRUPTED if asked else first["code"]
        except RendezvousError as error:
            raise NotJoined(f"the nodes did not meet: {error}") from None
        except ValueError as error:
            raise UsageError(error) from None


if __name__ == "__main__":
    command = torchrun.parse_args(sys.argv[1:])
    sys.exit(signals.guarded(lambda: run_agent(command), Path(command.training_script).name))
