"""--from: a whole run in one file, a result.json or YAML, as a command line. Needs no torch."""

import contextlib
import dataclasses
from collections.abc import Mapping, Set
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
    of_kind,
    present_flags,
    usual_values,
    without_meaning,
)
from llm_train_bench.settings.other_names import in_our_words, no_such_flag, read_value


class Texts(yaml.BaseLoader):
    """YAML whose values are texts, which flags read as on a command line; unique keys, no aliases.

    The library would silently drop the first of two equal keys, and a few aliases can stand for
    billions of values.
    """

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(None, None, "aliases (*name) are not read", mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node) -> Any:
        absent = node.style is None and node.value.lower() in ("", "~", "null")
        return None if absent else super().construct_scalar(node)

    def construct_mapping(self, node, deep=False):
        names = [str(key.value).replace("-", "_") for key, _ in node.value]
        for (key, _), name in zip(node.value, names, strict=True):
            if names.count(name) > 1:
                raise yaml.MarkedYAMLError(None, None, f"{key.value} is twice here", key.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """YAML from any source, its values as texts; ValueError with one line for anything else."""
    try:
        return yaml.load(text, Texts)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(one_line(error)) from None


@dataclasses.dataclass(frozen=True)
class RunFile:
    """A run: its flags with the config; script and number of ranks where the file tells them."""

    flags: dict[str, Any]
    script: Script | None
    ranks: int | None


def read_run_file(path: Path, script: Script | None, given: Mapping[str, Any]) -> RunFile:
    """What the file of `--from FILE` holds, except flags that the command line has `given`.

    FILE is a run's result.json, or YAML or JSON with `config`, flags and optionally the `script`, which
    must then be the given one. Without one the caller decides how many ranks there are.
    """
    try:
        text = plain_text(path, 256)
        content = parse_yaml(text)
        if isinstance(content, dict) and "schema_version" in content:
            content = parse_json(text)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"is neither YAML nor JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError("must hold names with values: config, and flags")
    if content.keys() & {"experiment", "models", "grid", "cells"}:
        raise UsageError("is an experiment, of several runs; use python sweep.py FILE")
    is_result = "schema_version" in content
    named = content.get("entrypoint" if is_result else "script")
    if named not in (None, *Script):
        raise UsageError(f"script: must be {', '.join(Script)}")
    if script and named not in (None, script):
        raise UsageError(f"is for {named}; run that, or leave out its script")
    if is_result:
        flags = _flags_to_repeat(content.get("args"), given)
    else:
        names = [field_of(arg) for arg in in_our_words([flag_of(key) for key in content])]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"{twice} is given twice, once by another tool's name")
        flags = dict(zip(names, content.values(), strict=True))
        flags.pop("script", None)
    flags = read_flags(flags, declared(Args).keys())
    device = content.get("device")
    ranks = flags.get("nproc") or (device.get("count") if isinstance(device, dict) else None)
    left = {*given, *(name for name, value in flags.items() if value is None or value is False)}
    if script is None:
        left.add("nproc")
    if "grad_acc_steps" in given:
        left.add("global_bsz")  # which would set it
    flags = {name: value for name, value in flags.items() if name not in left}
    valid = type(ranks) is int and ranks > 0
    return RunFile(flags, named and Script(named), ranks if valid else None)


def read_flags(flags: Mapping[str, Any], known: Set[str], where: str = "") -> dict[str, Any]:
    """The flags of a file in their types; UsageError, after `where`, for a name or value that is none.

    `none` is what labels and tables write of a flag that is left out, as YAML's null leaves it.
    """
    if wrong := sorted(flags.keys() - known):
        raise UsageError(f"{where}{wrong[0]}: {no_such_flag(wrong[0], SETTABLE)}")
    read = {}
    for name, value in flags.items():
        flag = declared(Args)[name]
        if value == "":
            raise UsageError(f"{where}{name}: is empty; was a variable of the shell not set?")
        absent = value is None or (value == "none" and flag.optional)
        read[name] = None if absent else read_value(flag, name, value, where)
    return read


def _flags_to_repeat(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a result's run; UsageError for one that this version lacks and that is not given."""
    if not isinstance(args, dict):
        raise UsageError("args: must hold the run's flags")
    for name, value in unknown_settings(args).items():
        if name not in given:
            lacks = "value" if name in defaults(Args) else "flag"
            raise UsageError(
                f"its run had {flag_of(name)} {value}, and this version has no such {lacks}; delete "
                f"{name} from a copy of the file to run without it"
            )
    return result_flags(args)


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
    with contextlib.suppress(ValueError):
        return flag.read(value) == value
    return False
