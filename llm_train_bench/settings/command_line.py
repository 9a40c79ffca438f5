"""From a command line to checked arguments; each mistake becomes one line. Needs no torch."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import os
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_type_hints

import tyro

from llm_train_bench.errors import UsageError
from llm_train_bench.settings.checks import check, foreign
from llm_train_bench.settings.flags import Args, Script, declared, defaults, flag_of

Parsed = TypeVar("Parsed")


def parse_args(argv: Sequence[str], script: str) -> Args:
    """Parse and check; UsageError in one line on bad input. `--help` prints and exits with 0."""
    script = Script(script)
    if any(word == "--from" or word.startswith("--from=") for word in argv):
        from llm_train_bench.settings.run_file import with_file  # needs YAML

        argv, _ = with_file(argv, script)
    args = parse_dataclass(Args, argv, script, script)
    refuse_foreign(argv, script)
    words = {word.replace("_", "-").split("=")[0] for word in argv}
    if script is Script.PP and args.grad_acc_steps == 1 and "--grad-acc-steps" in words:
        raise UsageError(
            "--grad-acc-steps 1: a pipeline needs as many micro batches as stages, or more; "
            "leave it out for 2 x --pp"
        )
    return check(args, script)


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
    "--ckpt-freq": "use --save-every, and --resume auto to go on (docs/RELIABILITY.md)",
    "--no-sync": "no step waits for the device here, and times are exact all the same (docs/METRICS.md)",
    "--backend": "the script is the backend: train_ddp.py, train_fsdp.py or train_pp.py",
    "--num-steps": "use --n-steps",
    "--warmup": "use --warmup-steps",
    "--local-batch-size": "use --bsz",
    "--micro-batch-size": "use --bsz",
    "--output": "use --output-dir; compare.py and sweep.py write the CSV",
}
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODEL_SIZES = ("small", "medium", "large", "xl", "2.7B")


def translated(argv: Sequence[str]) -> list[str]:
    """A command line of a predecessor in our words; UsageError that names what replaces a flag."""
    words: list[str] = []
    for word in argv:
        name, _, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in REPLACED:
            raise UsageError(f"{name}: is another suite's flag; {REPLACED[name]}")
        if name in RENAMED or name == "--model-size":
            words += [RENAMED.get(name, name), value] if value else [RENAMED.get(name, name)]
        else:
            words.append(word)
    at = {word: i for i, word in enumerate(words)}
    if "--model-size" in at:
        i = at["--model-size"]
        size = words[i + 1] if i + 1 < len(words) else ""
        if size not in MODEL_SIZES:
            raise UsageError(
                f"--model-size {size}: there are {', '.join(MODEL_SIZES)}; or name a config"
            )
        words[i : i + 2] = []
        words.insert(0, str(CONFIGS / f"cs336-{size.lower()}.json"))
    for flag in ("--nsys-start", "--nsys-end"):  # -1 switched it off
        for spelt in (flag, flag.replace("-", "_").replace("__", "--", 1)):
            for i in reversed([i for i, word in enumerate(words) if word == spelt]):
                if words[i + 1 : i + 2] == ["-1"]:
                    del words[i : i + 2]
        words = [word for word in words if word.replace("_", "-") != f"{flag}=-1"]
    return ["forward-backward" if word == "forward_backward" else word for word in words]


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """Flags as a command line: true is the bare flag, false and null leave it out."""
    words = []
    for name, value in flags.items():
        flag = flag_of(name)
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)] if value else []
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def parse_dataclass(
    kind: type[Parsed], argv: Sequence[str], prog: str, script: Script | None = None
) -> Parsed:
    """A command line as a dataclass of flags; what cannot be parsed is a UsageError.

    --help prints and exits with 0.
    """
    if {"-h", "--help"} & set(argv):
        _print_help(kind, prog, script)
    if issubclass(kind, Args):
        argv = translated(argv)
    for before, word in zip(("", *argv), argv, strict=False):
        if not word or re.fullmatch(r"--[\w-]+=", word):
            name = word.rstrip("=") or (before if before.startswith("--") else "an argument")
            raise UsageError(f"{name}: is empty; was a variable of the shell not set?")
    for field in dataclasses.fields(kind):  # the values of the first would be lost
        name = flag_of(field.name)
        if isinstance(field.default, tuple) and [w.replace("_", "-") for w in argv].count(name) > 1:
            raise UsageError(f"{name}: is given twice; give all values after one {name}")
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages), _columns("500"):
            found = tyro.cli(
                _parser(kind), prog=prog, args=list(argv), config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit:
        text = _first_message(messages.getvalue())
        raise UsageError(f"{text}{_nearest(argv, kind)}; see {prog} --help") from None
    return kind(**{f.name: getattr(found, f.name) for f in dataclasses.fields(kind)})


def _print_help(kind: type, prog: str, script: Script | None) -> NoReturn:
    """The flags in the groups that declare them; with a `script` only those that it takes."""
    groups = {}
    for base in reversed(kind.__mro__):
        names = [n for n in inspect.get_annotations(base) if n in declared(kind)]
        if script:
            names = [n for n in names if script in declared(kind)[n].scripts]
        if names:
            title = base.__name__.removesuffix("Flags").removesuffix("Args").lower()
            group = _parser(kind, tuple(names))
            told = base is not kind and base.__doc__.rstrip(".").lower() != title
            group.__doc__ = base.__doc__ if told else ""
            groups[title] = group
    parser = dataclasses.make_dataclass(kind.__name__, list(groups.items()), frozen=True)
    parser.__doc__ = kind.__doc__
    markers = tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff  # it would read sources
    config = tyro.conf.FlagCreatePairsOff, *markers
    with contextlib.suppress(BrokenPipeError):  # --help | head
        tyro.cli(parser, prog=prog, args=["--help"], config=config)
    raise SystemExit(0)


@functools.cache
def _parser(kind: type, names: tuple[str, ...] | None = None) -> type:
    """These flags of a dataclass, or all, as the parsing library reads them."""
    hints, default, flags = get_type_hints(kind), defaults(kind), declared(kind)
    fields = [(n, *_argument(hints[n], default[n], flags[n])) for n in names or flags]
    parser = dataclasses.make_dataclass(kind.__name__, fields, frozen=True)
    parser.__doc__ = kind.__doc__
    return parser


def _argument(hint: Any, default: Any, flag: Any) -> tuple[Any, Any]:
    """A flag's type with its help, and its field."""
    options = get_args(hint)
    optional = isinstance(hint, types.UnionType) and type(None) in options
    plain = next(o for o in options if o is not type(None)) if optional else hint
    metavar = flag.metavar or {int: "N", float: "X", str: "TEXT"}.get(plain)
    # A default that says nothing is not shown.
    quiet = default is None or isinstance(default, bool) or default in ((), "", dataclasses.MISSING)
    shown = f"(default: {default})" if not quiet else ""
    if default is dataclasses.MISSING:
        shown = "(required)"
    given = tyro.conf.arg(help=flag.help, metavar=metavar, help_behavior_hint=shown)
    annotated = (
        Annotated[hint, given, tyro.conf.Positional] if flag.positional else Annotated[hint, given]
    )
    if default is dataclasses.MISSING:
        return annotated, dataclasses.field()
    return annotated, dataclasses.field(default=default)


def _nearest(argv: Sequence[str], kind: type) -> str:
    """The flag that a mistyped one was meant to be, if one is near."""
    known = [flag_of(name) for name, flag in declared(kind).items() if not flag.positional]
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in (*known, "--help"):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            return f"; did you mean {near[0]}?" if near else ""
    return ""


@contextlib.contextmanager
def _columns(width: str):
    """A terminal so wide that no message is broken into lines."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = width
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _first_message(panel: str) -> str:
    """The message of the parser's boxed error text (drawn in ASCII or not), on one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in panel.splitlines()][1:]  # the first is the title
    message: list[str] = []
    for line in lines:
        if set(line) <= {"─", "-"}:  # a rule stands below the title or ends the message
            if message:
                break
        else:
            message.append(line)
    return re.sub(r"\s+", " ", " ".join(message)) or "bad arguments"
