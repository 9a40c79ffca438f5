"""From a command line to checked arguments; each mistake becomes one line. Needs no torch."""

import collections
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from llm_train_bench.base.errors import UsageError, did_you_mean
from llm_train_bench.base.machine import version_text
from llm_train_bench.base.number_text import parse_number
from llm_train_bench.model.json_keys import shipped_config
from llm_train_bench.settings.flags import (
    Args,
    Flag,
    Script,
    check_bounds,
    declared,
    defaults,
    flag_of,
    kinds_of_value,
    to_argv,
)
from llm_train_bench.settings.help_text import help_text
from llm_train_bench.settings.other_names import in_our_words, replacement, right_value, surprises
from llm_train_bench.settings.rules import check, foreign

Parsed = TypeVar("Parsed")


def parse_args(argv: Sequence[str], script: str) -> Args:
    """Parse and check; UsageError in one line on bad input. `--help` prints and exits with 0."""
    script = Script(script)
    words = with_file(argv, script)[0]
    args = parse_dataclass(Args, words, script, script)
    if script is Script.PP and args.grad_acc_steps == 1 and "--grad-acc-steps" in map(_name, words):
        raise UsageError(
            "--grad-acc-steps 1: a pipeline needs as many micro batches as stages, or more; leave it out "
            "for 2 x --pp"
        )
    return check(args, script)


def with_file(
    argv: Sequence[str], script: Script | None, kind: type = Args, prog: str = ""
) -> tuple[list[str], Any]:
    """A command line in our words, with `--from FILE` replaced by what the file holds; and that.

    Flags and a config on the command line override the file's. None without --from.
    """
    argv = in_our_words(argv)
    if asked_for(argv) or not any(_name(word) == "--from" for word in argv):
        return argv, None
    from llm_train_bench.settings.run_file import split_from  # needs YAML

    words, file = split_from(argv, script)
    if "config" not in parse_words(kind, words, prog or str(script)):
        if file.config is None:
            raise UsageError("--from: its file names no config; give the model's config")
        words = [file.config, *words]
    return [*words, *to_argv(file.flags)], file


def asked_for(argv: Sequence[str]) -> tuple[str, str] | None:
    """`help` and its topic, or `version`, if a command line asks for one of them."""
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, _, topic = word.partition("=")
        if name in ("--help", "-h"):
            return "help", topic or ("" if following.startswith("-") else following)
        if word in ("--version", "-V"):
            return "version", ""
    return None


def remarks_on(argv: Sequence[str]) -> list[str]:
    """A line on each flag that is given twice, and on others' flags whose meaning may surprise."""
    counts = collections.Counter(_name(w) for w in in_our_words(argv) if w.startswith("--"))
    twice = [f"{flag} is given twice; the last one counts" for flag, n in counts.items() if n > 1]
    return [*twice, *surprises(argv)]


def refuse_foreign(argv: Sequence[str], script: Script) -> None:
    """UsageError for a flag of other scripts, also where its value is the default."""
    flags = declared(Args)
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in flags and script not in flags[name].scripts:
            raise UsageError(foreign(name, script))


def _name(word: str) -> str:
    """A flag without its value, as --help spells it."""
    return word.partition("=")[0].replace("_", "-")


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
        refuse_foreign(argv, script)
    values, flags = parse_words(kind, argv, prog), declared(kind)
    for name, flag in flags.items():
        if defaults(kind)[name] is dataclasses.MISSING and name not in values:
            example = "; give a model config, for example configs/gpt2-125m.json"
            raise UsageError(f"{flag.metavar} is missing{example if name == 'config' else ''}")
    if "config" in values:
        values["config"] = shipped_config(values["config"])
    parsed = kind(**(defaults(kind) | values))
    check_bounds(parsed, values.keys() if script is None else ())
    for remark in remarks_on(argv) if script is None else ():  # the training scripts say it early
        print(f"{prog}: {remark}", file=sys.stderr)
    return parsed


def parse_words(kind: type, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """The values of the flags on a command line by name; UsageError for what cannot be parsed."""
    words, hints, flags = list(argv), get_type_hints(kind), declared(kind)
    values: dict[str, Any] = {}
    places = [name for name, flag in flags.items() if flag.positional]
    lists = {name for name, hint in hints.items() if get_origin(hint) is tuple}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if not word:
                raise UsageError("an argument: is empty; was a variable of the shell not set?")
            place = next((n for n in places if n in lists or n not in values), None)
            if place is None or word[0] == "-":
                raise UsageError(f"{word}: unexpected argument; see {prog} --help")
            values[place] = (*values.get(place, ()), word) if place in lists else word
            continue
        flag, equals, inline = word.partition("=")
        flag = flag.replace("_", "-")
        name = flag.removeprefix("--").replace("-", "_")
        following = [inline] if equals else words[:1]
        if name not in flags or flags[name].positional:
            raise _unknown(flag, following, flags, prog)
        if name in lists and name in values:
            raise UsageError(f"{flag}: is given twice; give all values after one {flag}")
        if hints[name] is bool:
            if equals or {*map(str.lower, following)} & {"true", "false", "yes", "no", "1", "0"}:
                raise UsageError(f"{flag}: takes no value; leave out {equals}{following[0]}")
            values[name] = True
            continue
        texts = [inline] if equals else []
        while (
            not equals and words and not words[0].startswith("--") and (name in lists or not texts)
        ):
            texts.append(words.pop(0))
        if "" in texts:
            raise UsageError(f"{flag}: is empty; was a variable of the shell not set?")
        if not texts:
            raise UsageError(f"{flag}: needs a value: {allowed(hints[name])}")
        parsed = [_value(flag, text, hints[name], flags[name]) for text in texts]
        values[name] = tuple(parsed) if name in lists else parsed[0]
    return values


def _unknown(
    flag: str, following: Sequence[str], flags: Mapping[str, Flag], prog: str
) -> UsageError:
    """What to say of a flag that `prog` does not have, and of the word after it."""
    instead = replacement(flag, prog)
    known = [
        flag_of(n)[2:] for n, f in flags.items() if prog not in set(Script) or prog in f.scripts
    ]
    if (last := flag.rpartition(".")[2]) in known:
        instead = f"--{last}"
    ours = (instead or flag).split()[0].strip(",:").removeprefix("--")
    field = ours.replace("-", "_")
    if field in declared(Args) and field not in flags:
        value = next((word for word in following if not word.startswith("-")), "VALUE")
        use = f"use --set {ours}={value}" if "set" in known else "it is a flag of train.py"
        return UsageError(f"{flag}: no such flag of {prog}; {use}")
    if instead:
        use = "use " if instead.startswith("--") else ""
        return UsageError(f"{flag}: no such flag here; {use}{instead}")
    cutoff = 0.75 if len(flag) > 6 else 0.6  # of three letters, two may be swapped
    longer = next(
        (f"; did you mean --{word}?" for word in known if word.startswith(f"{flag[2:]}-")), ""
    )
    near = longer or did_you_mean(flag[2:].lower(), known, cutoff, "--")
    return UsageError(f"{flag}: unknown flag{near or f'; see {prog} --help'}")


def allowed(hint: Any) -> str:
    """The values that a flag takes, in words."""
    names = {int: "a whole number", float: "a number", str: "text"}
    words = []
    for option in kinds_of_value(hint):
        words += get_args(option) if get_origin(option) is Literal else [names[option]]
    return _either(words)


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _value(flag: str, text: str, hint: Any, about: Flag) -> Any:
    """A flag's value of its text; UsageError with the values that are allowed."""
    for option in kinds_of_value(hint):
        if get_origin(option) is Literal:
            if text in get_args(option):
                return text
        elif option is str:
            return text
        else:
            with contextlib.suppress(ValueError):
                return parse_number(text, option, about.thousand, about.metavar == "PERCENT")
    if right := right_value(flag, text):
        raise UsageError(f"{flag} {text}: no such value; use {right}")
    words = [w for o in kinds_of_value(hint) if get_origin(o) is Literal for w in get_args(o)]
    raise UsageError(f"{flag} {text}: must be {allowed(hint)}{did_you_mean(text.lower(), words)}")
