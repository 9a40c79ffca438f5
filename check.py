"""Is this machine as fast as it should be? Rates, fixed workloads, what they should reach, and causes.

    python check.py
    python check.py --only gpt2-125m-bf16 --at-least 95%

Takes ten minutes on a GPU, one to three on a CPU. docs/CHECK.md explains figures and references.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import llm_train_bench.base.start  # noqa: F401
from llm_train_bench.base.start import ROOT

from llm_train_bench.base.children import private_directory
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.machine import detect_platform, n_cores
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.check import machine_check
from llm_train_bench.check.verify import verify_file
from llm_train_bench.check.workloads import workload_named, workloads
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.records import LogFacts
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import changed, flag, flag_of

# The flags that the two other modes use.
USED = {"verify": {"verify", "json"}, "nodes": {"nodes", "nproc", "json"}}
CODES = {"as it should be": 0, "below": 1, "not judged": 5}


@dataclasses.dataclass(frozen=True)
class CheckArgs:
    """Check this machine's speed: ten minutes on a GPU, one to three on a CPU.

    verify: Check a file of runs instead (compare.py --save): print what is wrong with it, what was
        checked, and what was not. Needs no torch.
    nodes: Find the slow node or link of a job: run this under your launcher, one process a GPU. Without a
        launcher it starts one process for each GPU of this machine.
    only: Workloads to run. By default all for the device; configs/workloads has them.
    at_least: The part of its reference that counts as fast enough.
    nproc: GPUs to use. By default all.
    output_dir: Keep the runs here.
    json: Print JSON instead of tables.
    """

    verify: str | None = flag(None, metavar="FILE")
    nodes: bool = flag(False)
    only: tuple[str, ...] = flag((), metavar="NAME ...")
    at_least: float = flag(0.9, above=0, at_most=2, metavar="PERCENT")
    nproc: int | None = flag(None, at_least=1)
    output_dir: str | None = flag(None, metavar="DIR")
    json: bool = flag(False)


@tool("check.py")
def main(argv: Sequence[str]) -> int:
    """Check, print, and return the exit code: 0, 1 below, 5 not judged, 2 for bad input."""
    args = parse_dataclass(CheckArgs, argv, "check.py")
    for mode, used in USED.items():
        if getattr(args, mode) and (unused := sorted({*changed(args)} - used)):
            raise UsageError(f"{flag_of(unused[0])}: --{mode} does not use it; leave it out")
    if args.verify:
        return verify_file(Path(args.verify), args.json)
    if args.nodes:
        from llm_train_bench.check.node_survey import survey_job  # needs torch

        return survey_job(args.nproc, args.json)
    kind = detect_platform()
    cpu = kind == "cpu"
    able = [w for w in workloads().values() if (w.args.device == "cpu") == cpu]
    chosen = [workload_named(name) for name in args.only] or able
    if wrong := [w.name for w in chosen if w not in able]:
        raise UsageError(f"--only {wrong[0]}: is not for this machine, which has {kind}")
    most = n_cores()
    if not cpu:
        import torch

        most = max(1, torch.cuda.device_count())
    ranks = args.nproc or (1 if cpu else most)
    if ranks > most:
        raise UsageError(f"--nproc {ranks}: this machine has {most} {'cores' if cpu else 'GPUs'}")
    shared = ROOT / "results"
    others = read_records([str(shared)], lambda line: None, LogFacts()) if shared.is_dir() else []
    with private_directory() as temporary:
        directory = Path(args.output_dir or temporary)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{directory}: cannot be written: {error.strerror}") from None
        if any((directory / w.name).exists() for w in chosen):
            raise UsageError(
                f"--output-dir {directory}: has runs of a check already; choose another"
            )
        result = machine_check.check_machine(kind, chosen, ranks, directory, args.at_least, others)
    if args.json:
        print(json.dumps(result.as_json(), indent=1))
    else:
        machine_check.show_check(result)
    return CODES[result.verdict]


if __name__ == "__main__":
    run_tool(main)
