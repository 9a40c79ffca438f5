"""Is this machine ready? Drivers, GPUs, processes that use them, libraries, and commands to fix it.

    python doctor.py

It changes nothing, and ends no process. The exit code is 1 if something required is missing.
It needs no library, because it must report missing ones.
"""

import dataclasses
import json
from collections.abc import Sequence

import llm_train_bench.base.start  # noqa: F401

from llm_train_bench.base.machine import detect_platform
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.check import findings
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import flag


@dataclasses.dataclass(frozen=True)
class DoctorArgs:
    """Report what this machine has, what each feature still needs, and how to install it.

    json: Print JSON instead of a table.
    """

    json: bool = flag(False)


@tool("doctor.py")
def main(argv: Sequence[str]) -> int:
    """Look at everything, print it, and return the exit code."""
    args = parse_dataclass(DoctorArgs, argv, "doctor.py")
    kind = detect_platform()
    found = list(findings.of_machine(kind))
    if args.json:
        print(json.dumps([dataclasses.asdict(f) for f in found], indent=1))
    else:
        findings.show(found)
    return 1 if any(f.state == "fail" for f in found) else 0


if __name__ == "__main__":
    run_tool(main)
