"""Imported first by the training scripts: start.py, then --help and --version before torch."""

import contextlib
import sys
from pathlib import Path

import llm_train_bench.base.start  # noqa: F401

from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script

name = Path(getattr(sys.modules["__main__"], "__file__", None) or "").name
if name in list(Script) and {"-h", "--help", "--version"} & set(sys.argv[1:]):
    with contextlib.suppress(Exception):  # what is wrong is said once torch is there
        parse_args(sys.argv[1:], name)
