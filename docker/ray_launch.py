r"""Start the ranks on the nodes of a Ray cluster: docker/torchrun_node.sh once on each.

    ray job submit -- python /shared/llm-train-bench/docker/ray_launch.py --nodes 2 --gpus 8 \
        train_fsdp.py CONFIG

This project must be at the same path on every node: on a shared file system, or in the nodes' image.
Do not use Ray's --working-dir: the results would be written to a copy that is deleted with the job.
"""

import argparse
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # print all lines
import ray  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

NODE_SCRIPT = str(Path(__file__).resolve().with_name("torchrun_node.sh"))
# After a node failed, the others have so long to see it themselves [s].
GRACE_S = 30.0


def meeting_point() -> tuple[str, int]:
    """This node's address, and a port that is free on it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def run_node(environ: dict[str, str], arguments: list[str]) -> int:
    """Run the ranks of this node until they end; their exit code."""
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the CPUs of this task
    # Ray kills its workers, but not their children: SIGTERM leaves the ranks time to save.
    command = ["setpriv", "--pdeathsig", "TERM", "bash", NODE_SCRIPT, *arguments]
    return subprocess.run(command, env=os.environ | environ, check=False).returncode


def main() -> int:
    """Run on all nodes; the exit code of the first that says more than 1, or else the largest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each node; 0: CPUs")
    parser.add_argument("--procs", type=int, default=1, help="ranks of each node without GPUs")
    parser.add_argument("--wait", type=float, default=900.0, help="seconds to wait for the nodes")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    ray.init(logging_level="warning")
    bundle = {"CPU": 1} | ({"GPU": args.gpus} if args.gpus else {})
    group = placement_group([bundle] * args.nodes, strategy="STRICT_SPREAD")
    if not group.wait(args.wait):
        free = ray.available_resources()
        print(
            f"ray_launch.py: {args.nodes} nodes with 1 CPU and {args.gpus} GPUs each were not free "
            f"within {args.wait:g} s; free now: {free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs",
            file=sys.stderr,
        )
        return 2

    def on_node(node: int, function: Callable) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        # No retries: Ray would start one node again, and the others would not know.
        options: dict[str, Any] = dict(num_cpus=1, num_gpus=args.gpus, max_retries=0)
        return ray.remote(**options, scheduling_strategy=place)(function).remote

    head, port = ray.get(on_node(0, meeting_point)())
    shared = {"NNODES": str(args.nodes), "HEAD": head, "PORT": str(port)}
    shared |= {"JOB_ID": secrets.token_hex(8), "GPUS": str(args.gpus or args.procs)}
    words = [args.script, *args.arguments]
    waiting = {
        on_node(node, run_node)(shared | {"NODE": str(node)}, words): node
        for node in range(args.nodes)
    }
    codes: dict[int, int] = {}
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=GRACE_S if any(codes.values()) else None)
        for run in done:
            node = waiting.pop(run)
            try:
                codes[node] = ray.get(run)
            except ray.exceptions.RayError as error:
                codes[node] = 1
                print(f"ray_launch.py: node {node}: {error}", file=sys.stderr)
        if not done:
            for run in waiting:
                ray.cancel(run, force=True)
    print(f"ray_launch.py: exit codes by node: {dict(sorted(codes.items()))}")
    return next((code for code in codes.values() if code not in (0, 1)), max(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
