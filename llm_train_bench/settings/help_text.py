"""--help: one screen, a group of flags, a flag, or all. Needs no torch."""

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from llm_train_bench.base.start import ROOT

from llm_train_bench.base.errors import UsageError, did_you_mean
from llm_train_bench.settings.flags import (
    Args,
    Flag,
    Script,
    declared,
    defaults,
    flag_of,
    help_texts,
)

# Lines of a screen, and its columns if the terminal has more.
ROWS, COLUMNS = 60, 100


def help_text(kind: type, prog: str, script: Script | None, topic: str = "") -> str:
    """The help of a script's flags; with a `script` only those that it takes.

    Without a topic: all where they fill no more than a screen; otherwise the common ones and the names of
    the groups. UsageError for an unknown topic.
    """
    flags, groups = declared(kind), _groups(kind, script)
    shown = [name for _, names in groups.values() for name in names]
    positionals = [str(flags[n].metavar) for n in flags if flags[n].positional]
    head = [f"usage: {' '.join([prog, *positionals])} [flags]", "", *_summary(kind, prog)]
    everything = [*head, *_sections(kind, groups)]
    if topic == "all" or (not topic and len(everything) <= ROWS):
        return "\n".join(everything)
    if topic:
        topic = "config" if topic == "from" else topic  # whose help has it
        known = [*groups, *(flag_of(name)[2:] for name in shown)]
        if topic not in known:
            near = did_you_mean(topic, known)
            raise UsageError(
                f"--help {topic}: no such group or flag{near or '; there are all, ' + ', '.join(groups)}"
            )
        chosen = groups.get(topic) or ("", [topic.replace("-", "_")])
        return "\n".join(_sections(kind, {topic: chosen})).strip("\n")
    own = {name: g for name, g in groups.items() if not set(g[1]) <= declared(Args).keys()}
    common = [name for name in shown if flags[name].common]
    lines = [*head, *_sections(kind, own or {"common": ("Common flags", common)})]
    names = ", ".join(name for name in groups if name not in own)
    more = f"More flags: --help all, --help FLAG, or --help GROUP with one of {names}."
    if own:
        words = " ".join(flag_of(n) for n in common if not flags[n].positional)
        more = f"Flags of the training scripts work too, such as {words}. {more}"
    return "\n".join([*lines, "", textwrap.fill(more, _width(), break_on_hyphens=False)])


def _groups(kind: type, script: Script | None) -> dict[str, tuple[str, list[str]]]:
    """Title and flags of each group by its name; a tool's own groups come first."""
    flags, groups = declared(kind), {}
    bases = sorted(kind.__mro__, key=lambda base: (base in Args.__mro__, -kind.__mro__.index(base)))
    for base in bases:
        names = [n for n in inspect.get_annotations(base) if n in flags]
        names = [n for n in names if script is None or script in flags[n].scripts]
        if names:
            title = "Options." if base is kind else (inspect.getdoc(base) or "").splitlines()[0]
            name = base.__name__.removesuffix("Args").removesuffix("Flags").lower()
            groups[name] = title.rstrip("."), names
    return groups


def _summary(kind: type, prog: str) -> list[str]:
    """What a script does, and the first three examples of its docstring."""
    path, examples = ROOT / prog, []
    if path.exists():
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        examples = re.findall(r"^ *(python .+)", text, re.MULTILINE)[:3]
    summary = (inspect.getdoc(kind) or "").split("\n\n")[0]
    return [summary, *([""] if examples else []), *(f"  {example}" for example in examples)]


def _sections(kind: type, groups: dict[str, tuple[str, list[str]]]) -> list[str]:
    """Groups as lines: a title, then flags with their values, help and defaults."""
    lines: list[str] = []
    for title, names in groups.values():
        lines += ["", f"{title}:"] if title else []
        for usage, text in _described(kind, names):
            left = f"  {usage}"
            if len(left) > 28:
                lines.append(left)
                left = ""
            wrap = textwrap.TextWrapper(_width(), f"{left:<30}", " " * 30, break_on_hyphens=False)
            lines += wrap.wrap(text)
    return lines


def _described(kind: type, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its values, and its help with the default."""
    flags, default, texts = declared(kind), defaults(kind), help_texts(kind)
    for n in names:
        is_switch = flags[n].annotation is bool
        value = "" if is_switch else f" {flags[n].metavar or _metavar(flags[n])}"
        quiet = is_switch or default[n] in (None, (), "", dataclasses.MISSING)
        shown = f"{default[n]:.0%}" if flags[n].metavar == "PERCENT" else default[n]
        text = texts[n] if quiet else f"{texts[n]} (default: {shown})"
        yield value.strip() if flags[n].positional else flag_of(n) + value, text


def described_flags(kind: type) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each group of flags for a page: its title, and its flags with values, help and scripts."""
    flags, described = declared(kind), []
    for title, names in _groups(kind, None).values():
        lines = []
        for n, (usage, text) in zip(names, _described(kind, names), strict=True):
            only = ", ".join(flags[n].scripts) if len(flags[n].scripts) < len(Script) else ""
            lines.append((usage, f"{text} Only {only}." if only else text))
        described.append((title, lines))
    return described


def _width() -> int:
    return min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns)


def _metavar(flag: Flag) -> str:
    names: dict[Any, Any] = {int: "N", float: "X", str: "TEXT"}
    options = [names.get(o, o) for o in flag.options]
    return "|".join(options) + (" ..." if flag.many else "")
