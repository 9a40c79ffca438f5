"""Is this machine as fast as it should be? Rates, fixed workloads, what they should reach, and causes.

    python check.py
    python check.py --only gpt2-125m-bf16 --at-least 95%

Takes ten minutes on a GPU, three on a CPU. docs/CHECK.md explains the figures and their references.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llm_train_bench.base.start  # noqa: F401

from llm_train_bench.base.errors import NotJoined, UsageError, one_line, printable
from llm_train_bench.base.machine import detect_platform
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.check import machine_check
from llm_train_bench.check.share import folder_of
from llm_train_bench.check.verify import TIERS, Refused, fourth_tier, verified_files, verify
from llm_train_bench.check.workloads import workload_named, workloads
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import flag

CODES = {"as it should be": 0, "below": 1, "not judged": 5}


@dataclasses.dataclass(frozen=True)
class CheckArgs:
    """Check this machine's speed.

    verify: Check a shared result instead: print its tier, or what is wrong with it. Needs no torch.
    results: With --verify: a folder of shared results, HARDWARE/SUBMITTER/NAME.json, in which another
        submitter's run may reproduce this one. Otherwise: where references are from.
    author: With --verify: who submits the file.
    nodes: Find the slow node or link of a job: run this under your launcher, one process a GPU. Without a
        launcher it starts one process for each GPU of this machine.
    only: Workloads to run. By default all for the device; configs/workloads has them.
    at_least: The part of its reference that counts as fast enough.
    nproc: GPUs to use. By default all.
    output_dir: Keep the runs here.
    json: Print JSON instead of tables.
    """

    verify: str | None = flag(None, metavar="FILE.json")
    results: str = flag("results", metavar="FOLDER")
    author: str | None = flag(None, metavar="NAME", needs="verify")
    nodes: bool = flag(False)
    only: tuple[str, ...] = flag((), metavar="NAME ...")
    at_least: str = flag("90%", metavar="PERCENT")
    nproc: int | None = flag(None, at_least=1)
    output_dir: str | None = flag(None, metavar="DIR")
    json: bool = flag(False)


@tool("check.py")
def main(argv: Sequence[str]) -> int:
    """Check, print, and return the exit code: 0, 1 below, 5 not judged, 2 for bad input."""
    args = parse_dataclass(CheckArgs, argv, "check.py")
    if args.verify:
        return show_tier(Path(args.verify), Path(args.results), args.author, args.json)
    if args.nodes:
        return check_nodes(args.nproc, args.json)
    at_least = percent(args.at_least)
    kind = detect_platform()
    device = "cpu" if kind == "cpu" else "cuda"
    chosen = [workload_named(name) for name in args.only]
    chosen = chosen or [w for w in workloads().values() if w.device == device]
    with contextlib.contextmanager(machine_check.output_directory)(args.output_dir) as directory:
        result = machine_check.check_machine(
            kind,
            chosen,
            args.nproc or 1,
            directory,
            at_least,
            machine_check.reached_by_others(Path(args.results)),
            say,
        )
    if args.json:
        print(json.dumps(result.as_json(), indent=1))
    else:
        machine_check.show_check(result)
    return CODES[result.verdict]


def show_tier(path: Path, folder: Path, author: str | None, as_json: bool) -> int:
    """Print what a shared result proves; 0, or 1 if it is refused."""
    try:
        v = verify(path)
    except Refused as refusal:
        told: dict[str, Any] = {"tier": 0, "refused": str(refusal)}
        print(json.dumps(told) if as_json else f"refused: {printable(str(refusal))}")
        return 1
    remark = ""
    if author:
        others = verified_files(folder, say, folder_of(v.shared.result.device.hardware))
        v, remark = fourth_tier(v, author, [(submitter, other) for submitter, _, other in others])
    r = v.shared.result
    told = {"tier": v.tier, "proves": TIERS[v.tier], "why_not_higher": v.why_not_higher}
    told |= {"remark": remark, "hardware": r.device.hardware, "known_hardware": v.known_hardware}
    told |= {"devices": r.device.count, "workload": v.name, "number_format": v.number_format}
    told |= {"tokens_per_sec_per_device": v.rate, "runs": len(v.rates)}
    if as_json:
        print(json.dumps(told, indent=1))
        return 0
    print(f"tier {v.tier}, {TIERS[v.tier]}")
    if v.why_not_higher:
        print(printable(f"not tier {v.tier + 1}: {v.why_not_higher}"))
    many, unknown = (
        f"{r.device.count} x {r.device.hardware}",
        "" if v.known_hardware else " (not listed)",
    )
    print(
        printable(
            f"{v.name} in {v.number_format} on {many}{unknown}: {v.rate:,.0f} tokens/s a device"
        )
    )
    if remark:
        print(printable(remark))
    return 0


def check_nodes(nproc: int | None, as_json: bool) -> int:
    """Join the launcher's ranks, or start some; 0, or 1 if a node or link is slow."""
    import torch

    from llm_train_bench.check import node_survey
    from llm_train_bench.measure.device import pick_device
    from llm_train_bench.parallel.ranks import find_ranks, join, leave

    ranks = find_ranks(os.environ)
    if ranks is None:
        n = nproc or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
        if n < 2:
            raise UsageError(
                "--nodes: one rank has nothing to compare; give --nproc, or start several"
            )
        told = node_survey.survey_here(n)
    else:
        device = pick_device("auto", ranks.local_rank)
        if device.type == "cpu":
            torch.set_num_threads(1)
        try:
            join(ranks, device, node_survey.TIMEOUT_S)
            told = node_survey.survey(device, ranks).as_json()
        except (NotJoined, RuntimeError) as error:
            print(f"check.py: rank {ranks.rank}: {one_line(error)}", file=sys.stderr)
            return 1
        leave()
        if not ranks.main:
            return 0
    if as_json:
        print(json.dumps(told, indent=1))
    else:
        node_survey.show_survey(told)
    return 0 if told["passed"] else 1


def percent(text: str) -> float:
    """A part given as per cent; UsageError for anything else."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 < value < 10:
        raise UsageError(f"--at-least {text}: must be per cent, such as 90%")
    return value


def say(text: str) -> None:
    """Progress, apart from the table."""
    print(f"check.py: {text}", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
