"""--from: a whole run in one file, a result.json or YAML, as a command line. Needs no torch."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.model.json_files import parse_json, plain_text
from llm_train_bench.settings.flags import (
    OUTPUT,
    SETTABLE,
    Args,
    Script,
    declared,
    defaults,
    field_of,
    flag_of,
    given_fields,
    of_kind,
    present_flags,
    usual_values,
    without_meaning,
)
from llm_train_bench.settings.other_names import in_our_words, no_such_flag


class UniqueKeys(yaml.SafeLoader):
    """YAML with unique keys and without aliases.

    The library would silently drop the first of two equal keys, and a few aliases can stand for
    billions of values.
    """

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(None, None, "aliases (*name) are not read", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        names = [str(key.value).replace("-", "_") for key, _ in node.value]
        for (key, _), name in zip(node.value, names, strict=True):
            if names.count(name) > 1:
                raise yaml.MarkedYAMLError(None, None, f"{key.value} is twice here", key.start_mark)
        return super().construct_mapping(node, deep)


def _plain_int(loader: UniqueKeys, node: yaml.ScalarNode) -> int:
    """YAML 1.1 reads 010 as eight and 1:30 as ninety; no author means that."""
    if not re.fullmatch(r"[+-]?(0|[1-9]\d*)", node.value):
        why = f"{node.value} is not a plain number; quote what is a text"
        raise yaml.MarkedYAMLError(None, None, why, node.start_mark)
    return loader.construct_yaml_int(node)


UniqueKeys.add_constructor("tag:yaml.org,2002:int", _plain_int)


def parse_yaml(text: str) -> Any:
    """YAML from any source; ValueError with one line for anything else, and for a false !!tag."""
    wrong = yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError
    try:
        return yaml.load(text, UniqueKeys)
    except wrong as error:
        raise ValueError(one_line(error)) from None


@dataclasses.dataclass(frozen=True)
class RunFile:
    """A whole run: flags, and where the file tells them config, script and number of ranks."""

    flags: dict[str, Any]
    config: str | None
    script: Script | None
    ranks: int | None
    unknown: Mapping[str, Any]
    """Settings that this version cannot repeat."""


def split_from(argv: Sequence[str], script: Script | None) -> tuple[list[str], RunFile]:
    """A command line without its `--from FILE`, and what the file holds.

    FILE is a run's result.json, or YAML or JSON with `config`, flags and optionally the `script`, which
    must then be the given one, if any.
    """
    arguments = list(argv)
    positions = [i for i, arg in enumerate(arguments) if f"{arg}=".startswith("--from=")]
    i = positions[0]
    name = arguments[i].partition("=")[2] or (arguments[i + 1] if i + 1 < len(arguments) else "")
    if len(positions) > 1 or not name or name.startswith("--"):
        raise UsageError("--from takes one file: a result.json, or YAML with config and flags")
    del arguments[i : i + (1 if "=" in arguments[i] else 2)]
    file = _run_file(Path(name))
    if script and file.script not in (None, script):
        raise UsageError(f"--from {name}: is for {file.script}; run that, or leave out its script")
    later = given_fields(arguments)
    for flag, value in file.unknown.items():
        if flag not in later:
            lacks = "value" if flag in defaults(Args) else "flag"
            raise UsageError(
                f"--from {name}: its run had {flag_of(flag)} {value}, and this version has no such "
                f"{lacks}; delete {flag} from a copy of the file to run without it"
            )
    flags = {k: v for k, v in file.flags.items() if k not in later}
    if "grad_acc_steps" in later:  # which it would set
        flags.pop("global_bsz", None)
    if script is None:  # the caller decides how many ranks there are
        flags.pop("nproc", None)
    ranks = file.flags.get("nproc") or file.ranks
    return arguments, dataclasses.replace(file, flags=flags, ranks=ranks)


def _run_file(path: Path) -> RunFile:
    try:
        text = plain_text(path, 256)
        content = parse_yaml(text)
        if isinstance(content, dict) and "schema_version" in content:
            content = parse_json(text)  # YAML 1.1 takes 6e-05 for a text
    except OSError as error:
        raise UsageError(f"--from {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--from {path}: is neither YAML nor JSON: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"--from {path}: must hold names with values: config, and flags")
    ranks, unknown = None, {}
    if "schema_version" in content:  # a result: its run's flags, besides its place
        args = content.get("args")
        if not isinstance(args, dict):
            raise UsageError(f"--from {path}: args: must hold the run's flags")
        flags, script = result_flags(args), content.get("entrypoint")
        unknown = unknown_settings(args) if script in (*Script,) else {}
        device = content.get("device")
        ranks = device.get("count") if isinstance(device, dict) else None
        if type(ranks) is not int or ranks < 1:
            ranks = None
    else:
        if content.keys() & {"experiment", "models", "grid", "cells"}:
            raise UsageError(
                f"--from {path}: is an experiment, of several runs; use python sweep.py FILE"
            )
        names = [field_of(arg) for arg in in_our_words([flag_of(key) for key in content])]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"--from {path}: {twice} is given twice, once by another tool's name")
        flags = dict(zip(names, content.values(), strict=True))
        script = flags.pop("script", None)
        if wrong := sorted(flags.keys() - declared(Args).keys()):
            hint = no_such_flag(wrong[0], SETTABLE)
            raise UsageError(f"--from {path}: {wrong[0]}: {hint}")
        where = f"--from {path}"
        flags = {k: v if k == "config" else meant_value(k, v, where) for k, v in flags.items()}
    config = flags.pop("config", None)
    if script not in (None, *Script):
        raise UsageError(f"--from {path}: script: must be {', '.join(Script)}")
    if config is not None and not isinstance(config, str):
        raise UsageError(f"--from {path}: config: must be a path")
    return RunFile(flags, config, script and Script(script), ranks, unknown)


def meant_value(name: str, value: Any, where: str) -> Any:
    """A value in the flag's type: YAML reads `off` as false, and numbers may be quoted.

    UsageError for true, false or a list where the flag takes something else.
    """
    flag = declared(Args)[name]
    if value is False and "off" in flag.options:
        return "off"
    if value is None or (value == "none" and flag.optional):
        return None  # `none` is what labels and tables write
    try:
        return flag.read(value)
    except ValueError:
        raise UsageError(f"{where}: {name}: {value!r} is not a value of {flag_of(name)}") from None


def result_flags(args: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that repeat a run with these arguments of its result: those not at a default."""
    flags, default = present_flags(args), usual_values()
    ignored = of_kind(OUTPUT) - {"device"} | without_meaning(flags)
    if args.get("global_bsz"):
        ignored |= {"grad_acc_steps"}
    names = [n for n in args if n in default and n not in ignored]
    return {name: flags[name] for name in names if flags[name] != defaults(Args)[name]}


def unknown_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a result that this version does not have: flags that are gone, and values."""
    flags = {k: v for k, v in present_flags(args).items() if k not in of_kind(OUTPUT)}
    return {name: value for name, value in flags.items() if not _can_be(name, value)}


def _can_be(name: str, value: Any) -> bool:
    """Whether this version has such a flag, and the flag such a value."""
    flag = declared(Args).get(name)
    if flag is None or value is None:
        return flag is not None and flag.optional
    try:
        return flag.read(value) == value
    except ValueError:
        return False
