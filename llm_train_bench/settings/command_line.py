"""From a command line to checked arguments; each mistake becomes one line. Needs no torch."""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from llm_train_bench.base.errors import UsageError, did_you_mean
from llm_train_bench.base.machine import version_text
from llm_train_bench.model.json_files import shipped_config
from llm_train_bench.settings.flags import (
    Args,
    Flag,
    Script,
    check_bounds,
    declared,
    defaults,
    field_of,
    flag_of,
    given_fields,
    to_argv,
)
from llm_train_bench.settings.help_text import help_text
from llm_train_bench.settings.other_names import VALUES, in_our_words, no_such_flag, replacement
from llm_train_bench.settings.rules import check, refuse_foreign

Parsed = TypeVar("Parsed")


def parse_args(argv: Sequence[str], script: str) -> Args:
    """Parse and check; UsageError in one line on bad input. `--help` prints and exits with 0."""
    script = Script(script)
    arguments = with_file(argv, script, Args, script)[0]
    args = parse_dataclass(Args, arguments, script, script)
    one = args.grad_acc_steps == 1 and "grad_acc_steps" in given_fields(arguments)
    if script is Script.PP and one:
        raise UsageError(
            "--grad-acc-steps 1: a pipeline needs as many micro batches as stages, or more; leave it out "
            "for 2 x --pp"
        )
    return check(args, script)


def with_file(
    argv: Sequence[str], script: Script | None, kind: type, prog: str
) -> tuple[list[str], Any]:
    """A command line in our words, with `--from FILE` replaced by what the file holds; and that.

    Flags and a config on the command line override the file's. None without --from.
    """
    argv = in_our_words(argv)
    if asked_for(argv) or "from" not in given_fields(argv):
        return argv, None
    from llm_train_bench.settings.run_file import split_from  # needs YAML

    arguments, file = split_from(argv, script)
    if "config" not in parse_words(kind, arguments, prog):
        if file.config is None:
            raise UsageError("--from: its file names no config; give the model's config")
        arguments = [file.config, *arguments]
    return [*arguments, *to_argv(file.flags)], file


def asked_for(argv: Sequence[str]) -> tuple[str, str] | None:
    """`help` and its topic, or `version`, if a command line asks for one of them."""
    for arg, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, _, topic = arg.partition("=")
        if name in ("--help", "-h"):
            return "help", topic or ("" if following.startswith("-") else following)
        if arg in ("--version", "-V"):
            return "version", ""
    return None


def parse_dataclass(
    kind: type[Parsed], argv: Sequence[str], prog: str, script: Script | None = None
) -> Parsed:
    """A command line as a dataclass of flags; UsageError for what cannot be parsed.

    --help and --version print and exit with 0.
    """
    if asked := asked_for(argv):
        what, topic = asked
        text = version_text() if what == "version" else help_text(kind, prog, script, topic)
        with contextlib.suppress(BrokenPipeError):  # --help | head
            print(text)
        raise SystemExit(0)
    if script:
        refuse_foreign(given_fields(argv), script)  # also with their default values
    values, flags = parse_words(kind, argv, prog), declared(kind)
    for name, flag in flags.items():
        if defaults(kind)[name] is dataclasses.MISSING and name not in values:
            example = "; give a model config, for example configs/gpt2-125m.json"
            raise UsageError(f"{flag.metavar} is missing{example if name == 'config' else ''}")
    if "config" in values:
        values["config"] = shipped_config(values["config"])
    parsed = kind(**(defaults(kind) | values))
    check_bounds(parsed, values.keys() if script is None else ())
    return parsed


def parse_words(kind: type, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """The values of the flags on a command line by name; UsageError for what cannot be parsed."""
    flags, arguments = declared(kind), list(argv)
    values: dict[str, Any] = {}
    positionals = [name for name, flag in flags.items() if flag.positional]
    while arguments:
        arg = arguments.pop(0)
        if not arg.startswith("--"):
            if not arg:
                raise UsageError("an argument: is empty; was a variable of the shell not set?")
            positional = next((n for n in positionals if flags[n].many or n not in values), None)
            if positional is None or arg[0] == "-":
                raise UsageError(f"{arg}: unexpected argument; see {prog} --help")
            several = flags[positional].many
            values[positional] = (*values.get(positional, ()), arg) if several else arg
            continue
        _, equals, inline = arg.partition("=")
        name = field_of(arg)
        texts = [inline]
        if not equals:
            texts = list(itertools.takewhile(lambda text: not text.startswith("--"), arguments))
        flag = flags.get(name)
        if flag is None or flag.positional:
            raise _unknown(arg, texts, flags, prog)
        if flag.annotation is bool:
            if equals or (texts and texts[0].lower() in ("true", "false", "yes", "no", "1", "0")):
                raise UsageError(f"{flag_of(name)}: takes no value; leave out {equals}{texts[0]}")
            values[name] = True
            continue
        if flag.many and name in values:
            raise UsageError(f"{flag_of(name)}: is given twice; give all its values at once")
        if not flag.many:
            texts = texts[:1]
        if not equals:
            del arguments[: len(texts)]
        if "" in texts:
            raise UsageError(f"{flag_of(name)}: is empty; was a variable of the shell not set?")
        if not texts:
            raise UsageError(f"{flag_of(name)}: needs a value: {allowed(flag)}")
        parsed = tuple(_value(flag_of(name), flag, text) for text in texts)
        values[name] = parsed if flag.many else parsed[0]
    return values


def _unknown(arg: str, texts: Sequence[str], flags: Mapping[str, Flag], prog: str) -> UsageError:
    """What to say of a flag that `prog` does not have, and of the words after it."""
    written = flag_of(field_of(arg))
    ours = (replacement(arg) or written).split()[0].strip(",:")
    if field_of(ours) in declared(Args).keys() - flags.keys():
        value = texts[0] if texts and not texts[0].startswith("-") else "VALUE"
        use = f"use --set {ours[2:]}={value}" if "set" in flags else "it is a flag of train.py"
        return UsageError(f"{written}: no such flag of {prog}; {use}")
    own = [n for n, f in flags.items() if prog not in set(Script) or prog in f.scripts]
    hint = no_such_flag(arg, own)
    return UsageError(f"{written}: {hint}" + ("" if ";" in hint else f"; see {prog} --help"))


def allowed(flag: Flag) -> str:
    """The values that a flag takes, in words."""
    names: dict[Any, Any] = {int: "a whole number", float: "a number", str: "text"}
    *others, last = (names.get(o, o) for o in flag.options)
    return f"{', '.join(others)} or {last}" if others else last


def _value(written: str, flag: Flag, text: str) -> Any:
    """A flag's value of its text; UsageError with the values that are allowed."""
    try:
        return flag.parse(text)
    except ValueError:
        pass
    if right := VALUES.get(f"{written} {text}"):
        raise UsageError(f"{written} {text}: no such value; use {right}")
    near = did_you_mean(
        text.lower(), [option for option in flag.options if isinstance(option, str)]
    )
    raise UsageError(f"{written} {text}: must be {allowed(flag)}{near}")
