"""Imported first by the training scripts: what needs no torch is answered before it is imported.

That is --help, --version, and mistakes in the arguments, the config, or how they fit together.
"""

import os
import sys
from pathlib import Path

from llm_train_bench.base import start
from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.machine import detect_platform, n_cores
from llm_train_bench.model.config import load_config
from llm_train_bench.model.json_keys import ConfigError
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import make_plan


def check_early(argv: list[str], name: str) -> None:
    """Exit with 0 after --help, and with 2 after one line on a mistake."""
    try:
        args, script = parse_args(argv, name), Script(name)
        config = load_config(args.config, args.pad_vocab, args.layers)
        device = detect_platform() if args.device == "auto" else args.device
        world = 1 if script is Script.ONE else args.nproc or 2
        if device == "cpu" and world > (most := max(64, 8 * n_cores())):
            raise UsageError(f"--nproc {world}: this machine has {n_cores()} cores; at most {most}")
        if device == "cpu" and not args.pack:  # which reads whole files
            make_plan(args, script, world, "cpu", config)
    except (UsageError, ConfigError) as error:
        print(f"{name}: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


def has_launcher() -> bool:
    """Whether a launcher gave this process a rank: then one of each machine says what is wrong, later."""
    names = [(rank, size) for rank, size, _ in start.LAUNCHERS]
    return any(os.environ.get(rank) and os.environ.get(size) for rank, size in names)


script = Path(sys.argv[0]).name
if start.is_script() and script in set(Script) and not has_launcher():
    check_early(sys.argv[1:], script)
