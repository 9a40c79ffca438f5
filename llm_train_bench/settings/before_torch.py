"""Imported first by the training scripts: what needs no torch is answered before it is imported.

That is --help, --version, and mistakes in the arguments, the config, or how they fit together.
"""

import os
import sys
from pathlib import Path

from llm_train_bench.base import start
from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.machine import detect_platform
from llm_train_bench.model.config import load_config
from llm_train_bench.model.json_keys import ConfigError
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.other_names import remarks_on
from llm_train_bench.settings.plan import make_plan


def answer(argv: list[str], name: str) -> None:
    """Exit with 0 after --help, and with 2 after one line on a mistake; otherwise print remarks."""
    try:
        args, script = parse_args(argv, name), Script(name)
        config = load_config(args.config, args.pad_vocab)
        if not args.pack and "cpu" in (args.device, detect_platform()):
            world = 1 if script is Script.ONE else args.nproc or 2
            make_plan(args, script, world, "cpu", config)
    except (UsageError, ConfigError) as error:
        print(f"{name}: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    for remark in remarks_on(argv):
        print(f"{name}: {remark}", file=sys.stderr)


def launched() -> bool:
    """Whether a launcher started this process: then one rank of each machine says what is wrong."""
    return any(rank in os.environ and size in os.environ for rank, size, _ in start.LAUNCHERS)


if start.is_script() and (Path(sys.argv[0]).name in set(Script)) and not launched():
    answer(sys.argv[1:], Path(sys.argv[0]).name)
