"""From a command line to checked arguments; each mistake becomes one line. Needs no torch."""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llm_train_bench.base.errors import UsageError
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
)
from llm_train_bench.settings.help_text import help_text
from llm_train_bench.settings.other_names import (
    allowed,
    in_our_words,
    no_such_flag,
    read_value,
    replacement,
)
from llm_train_bench.settings.rules import check, refuse_foreign

if TYPE_CHECKING:
    from llm_train_bench.settings.run_file import RunFile

Parsed = TypeVar("Parsed")
FROM = Flag(metavar="FILE", annotation=str)


def parse_args(argv: Sequence[str], script: str) -> Args:
    """Parse and check; UsageError in one line on bad input. `--help` prints and exits with 0."""
    script = Script(script)
    values, _ = parse_flags(Args, argv, script, script)
    if script is Script.PP and values.get("grad_acc_steps") == 1:
        raise UsageError(
            "--grad-acc-steps 1: a pipeline needs as many micro batches as stages, or more; leave it out "
            "for 2 x --pp"
        )
    return check(make_args(Args, values), script)


def parse_dataclass(kind: type[Parsed], argv: Sequence[str], prog: str) -> Parsed:
    """A tool's command line as a dataclass of flags; UsageError for what cannot be parsed."""
    return make_args(kind, parse_flags(kind, argv, prog)[0])


def parse_flags(
    kind: type, argv: Sequence[str], prog: str, script: Script | None = None
) -> tuple[dict[str, Any], "RunFile | None"]:
    """The values on a command line by flag, and the file of its --from FILE, whose values are below.

    UsageError for what cannot be parsed. --help and --version print and exit with 0.
    """
    if asked := asked_for(argv):
        what, topic = asked
        text = version_text() if what == "version" else help_text(kind, prog, script, topic)
        with contextlib.suppress(BrokenPipeError):  # --help | head
            print(text)
        raise SystemExit(0)
    values, file = parse_words(kind, argv, prog), None
    if path := values.pop("from", None):
        from llm_train_bench.settings.run_file import read_run_file  # needs YAML

        try:
            file = read_run_file(Path(path), script, values)
        except UsageError as error:
            raise UsageError(f"--from {path}: {error}") from None
        values = file.flags | values
    if script:
        refuse_foreign(values, script)  # also with their default values
    return values, file


def make_args(kind: type[Parsed], values: dict[str, Any]) -> Parsed:
    """A dataclass of flags; UsageError if one is missing, or outside its bounds."""
    for name, default in defaults(kind).items():
        if default is dataclasses.MISSING and name not in values:
            example = "; give a model config, for example configs/gpt2-125m.json"
            missing = declared(kind)[name].metavar
            raise UsageError(f"{missing} is missing{example if name == 'config' else ''}")
    if "config" in values:
        values = values | {"config": shipped_config(values["config"])}
    parsed = kind(**(defaults(kind) | values))
    check_bounds(parsed, () if kind is Args else values)
    return parsed


def asked_for(argv: Sequence[str]) -> tuple[str, str] | None:
    """`help` and its topic, or `version`, if a command line asks for one of them."""
    for arg, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, _, topic = arg.partition("=")
        if name in ("--help", "-h"):
            return "help", topic or ("" if following.startswith("-") else following)
        if arg in ("--version", "-V"):
            return "version", ""
    return None


def parse_words(kind: type, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """The values of the flags on a command line by name; UsageError for what cannot be parsed."""
    flags, arguments = declared(kind), list(argv)
    if issubclass(kind, Args):
        flags, arguments = flags | {"from": FROM}, in_our_words(argv)
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
        values[name] = read_value(flag, name, texts if flag.many else texts[0])
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
