"""From a command line to checked arguments; each mistake becomes one line. Needs no torch."""

import contextlib
import dataclasses
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llm_train_bench.base.errors import UsageError, did_you_mean
from llm_train_bench.base.machine import version_text
from llm_train_bench.model.json_keys import CONFIGS
from llm_train_bench.settings.flags import (
    Args,
    Script,
    check_bounds,
    declared,
    defaults,
    flag_of,
    help_texts,
    to_argv,
)
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
    """A command line with `--from FILE` replaced by what the file holds, and that; None without.

    Flags and a config on the command line override the file's.
    """
    if not any(_name(word) == "--from" for word in argv):
        return list(argv), None
    from llm_train_bench.settings.run_file import split_from  # needs YAML

    words, file = split_from(argv, script)
    if "config" not in parse_words(kind, words, prog or str(script)):
        if file.config is None:
            raise UsageError("--from: its file names no config; give the model's config")
        words = [file.config, *words]
    return [*words, *to_argv(file.flags)], file


def refuse_foreign(argv: Sequence[str], script: Script) -> None:
    """UsageError for a flag of other scripts, also where its value is the default."""
    flags = declared(Args)
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in flags and script not in flags[name].scripts:
            raise UsageError(foreign(name, script))


# Flags of other suites that mean the same as one of ours, and what replaces the others.
RENAMED = {"--context-length": "--seq-len", "--batch-size": "--bsz", "--measure-steps": "--n-steps"}
REPLACED = {
    "--reduce-freq": "gradients are reduced once a step, after --grad-acc-steps micro batches",
    "--ckpt-freq": "use --save-every, and --resume auto to resume (docs/RELIABILITY.md)",
    "--no-sync": "no step waits for the device, and times are exact all the same (docs/METRICS.md)",
    "--backend": "the script is the backend: train_ddp.py, train_fsdp.py or train_pp.py",
    "--num-steps": "use --n-steps",
    "--warmup": "use --warmup-steps",
    "--local-batch-size": "use --bsz",
    "--micro-batch-size": "use --bsz",
    "--output": "use --output-dir; compare.py and sweep.py write the CSV",
    "--no-ddp-overlap": "use --ddp-mode bucketed-after or parameter-after",
    "--grad-compression": "use --reduce-dtype bf16",
    "--fp8-primary-weights": "use --fp8-all-gather with --fp8-backend te",
}
MODEL_SIZES = ("small", "medium", "large", "xl", "2.7B")


def translated(argv: Sequence[str]) -> list[str]:
    """A command line of an earlier tool in our words; UsageError that names what replaces a flag."""
    words: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in REPLACED:
            raise UsageError(f"{name}: is a flag of an earlier tool; {REPLACED[name]}")
        words.append(RENAMED[name] + equals + value if name in RENAMED else word)
    config = []
    for i in reversed(range(len(words))):
        name, equals, value = words[i].partition("=")
        name, value = _name(name), value if equals else "".join(words[i + 1 : i + 2])
        if name == "--model-size":
            if value not in MODEL_SIZES:
                known = _either(MODEL_SIZES)
                raise UsageError(f"--model-size {value}: must be {known}; or give a config")
            config = [str(CONFIGS / f"cs336-{value.lower()}.json")]
        elif name not in ("--nsys-start", "--nsys-end") or value != "-1":  # -1 switched it off
            continue
        words[i : i + 2 - bool(equals)] = []
    words = ["forward-backward" if word == "forward_backward" else word for word in words]
    return config + words


def _name(word: str) -> str:
    """A flag without its value, as --help spells it."""
    return word.partition("=")[0].replace("_", "-")


def parse_dataclass(
    kind: type[Parsed], argv: Sequence[str], prog: str, script: Script | None = None
) -> Parsed:
    """A command line as a dataclass of flags; UsageError for what cannot be parsed.

    --help and --version print and exit with 0.
    """
    if {"--version", "--help", "-h"} & set(argv):
        with contextlib.suppress(BrokenPipeError):  # --help | head
            print(version_text() if "--version" in argv else help_text(kind, prog, script))
        raise SystemExit(0)
    if script:
        refuse_foreign(argv, script)
    values, flags = parse_words(kind, argv, prog), declared(kind)
    for name, flag in flags.items():
        if defaults(kind)[name] is dataclasses.MISSING and name not in values:
            example = "; give a model config, for example configs/gpt2-125m.json"
            raise UsageError(f"{flag.metavar} is missing{example if name == 'config' else ''}")
    parsed = kind(**(defaults(kind) | values))
    check_bounds(parsed)
    return parsed


def parse_words(kind: type, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """The values of the flags on a command line by name; UsageError for what cannot be parsed."""
    words = translated(argv) if issubclass(kind, Args) else list(argv)
    hints, flags = get_type_hints(kind), declared(kind)
    values: dict[str, Any] = {}
    places = [name for name, flag in flags.items() if flag.positional]
    lists = {name for name, hint in hints.items() if get_origin(hint) is tuple}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if not word:
                raise UsageError("an argument: is empty; was a variable of the shell not set?")
            place = next((n for n in places if n in lists or n not in values), None)
            if place is None:
                raise UsageError(f"{word}: unexpected argument; see {prog} --help")
            values[place] = (*values.get(place, ()), word) if place in lists else word
            continue
        flag, equals, inline = word.partition("=")
        flag = flag.replace("_", "-")
        name = flag.removeprefix("--").replace("-", "_")
        if name not in flags or flags[name].positional:
            near = did_you_mean(flag[2:], [flag_of(n)[2:] for n in flags], 0.8, "--")
            raise UsageError(f"{flag}: unknown flag{near or f'; see {prog} --help'}")
        if hints[name] is bool:
            if equals:
                raise UsageError(f"{flag}: takes no value; leave out ={inline}")
            values[name] = True
            continue
        if name in lists and name in values:
            raise UsageError(f"{flag}: is given twice; give all values after one {flag}")
        texts = [inline] if equals else []
        while (
            not equals and words and not words[0].startswith("--") and (name in lists or not texts)
        ):
            texts.append(words.pop(0))
        if "" in texts:
            raise UsageError(f"{flag}: is empty; was a variable of the shell not set?")
        if not texts:
            raise UsageError(f"{flag}: needs a value: {allowed(hints[name])}")
        parsed = [_value(flag, text, hints[name]) for text in texts]
        values[name] = tuple(parsed) if name in lists else parsed[0]
    return values


def _options(hint: Any) -> list[Any]:
    """The types that a flag's value may have."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [part for part in parts if part is not type(None)]


def allowed(hint: Any) -> str:
    """The values that a flag takes, in words."""
    names = {int: "a whole number", float: "a number", str: "text"}
    words = []
    for option in _options(hint):
        words += get_args(option) if get_origin(option) is Literal else [names[option]]
    return _either(words)


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _value(flag: str, text: str, hint: Any) -> Any:
    """A flag's value of its text; UsageError with the values that are allowed."""
    for option in _options(hint):
        if get_origin(option) is Literal:
            if text in get_args(option):
                return text
        else:
            with contextlib.suppress(ValueError):
                return option(text)
    words = [w for o in _options(hint) if get_origin(o) is Literal for w in get_args(o)]
    raise UsageError(f"{flag} {text}: must be {allowed(hint)}{did_you_mean(text, words)}")


def help_text(kind: type, prog: str, script: Script | None) -> str:
    """The flags in the groups that declare them; with a `script` only those that it takes."""
    flags, hints = declared(kind), get_type_hints(kind)
    default, texts = defaults(kind), help_texts(kind)
    width = min(110, shutil.get_terminal_size((110, 24)).columns)
    places = [str(flags[n].metavar) for n in flags if flags[n].positional]
    summary = (inspect.getdoc(kind) or "").split("\n\n")[0]
    lines = [f"usage: {' '.join([prog, *places])} [flags]", "", summary]
    for base in reversed(kind.__mro__):
        names = [n for n in inspect.get_annotations(base) if n in flags]
        names = [n for n in names if script is None or script in flags[n].scripts]
        if names:
            title = "Options." if base is kind else (inspect.getdoc(base) or "").splitlines()[0]
            lines += ["", f"{title.rstrip('.')}:"]
        for n in names:
            value = "" if hints[n] is bool else f" {flags[n].metavar or _metavar(hints[n])}"
            left = f"  {value.strip() if flags[n].positional else flag_of(n) + value}"
            quiet = hints[n] is bool or default[n] in (None, (), "", dataclasses.MISSING)
            text = texts[n] if quiet else f"{texts[n]} (default: {default[n]})"
            if len(left) > 28:
                lines.append(left)
                left = ""
            wrap = textwrap.TextWrapper(width, f"{left:<30}", " " * 30, break_on_hyphens=False)
            lines.append(wrap.fill(text))
    return "\n".join(lines)


def _metavar(hint: Any) -> str:
    names = {int: "N", float: "X", str: "TEXT"}
    parts = _options(hint)
    word = "|".join("|".join(get_args(p)) if get_origin(p) is Literal else names[p] for p in parts)
    return f"{word} ..." if get_origin(hint) is tuple else word
