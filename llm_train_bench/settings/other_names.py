"""Names and values of flags: other trainers' names, and what to say of a wrong one. Needs no torch."""

import contextlib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError, did_you_mean
from llm_train_bench.settings.flags import REMOVED, Flag, flag_of


def _by_name(answers: dict[str, str]) -> dict[str, str]:
    """A table's rows by the names that they are for."""
    return {name: ours for ours, names in answers.items() for name in names.split()}


_ROWS = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text(encoding="utf-8"))
ACCEPTED, ANSWERED = _by_name(_ROWS["accepted"]), _by_name(_ROWS["answered"])
# Values of other trainers with their flag, as "--amp fp32".
VALUES: dict[str, str] = _ROWS["values"]


def _plain(flag: str) -> str:
    """A flag's name as the tables have it: `--seq_len=4096` is seq-len."""
    return flag.partition("=")[0].lstrip("-").replace("_", "-")


def in_our_words(argv: Sequence[str]) -> list[str]:
    """A command line with our names for the flags of others that mean the same."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        ours = ACCEPTED.get(_plain(name)) if name.startswith("--") else None
        words.append(f"--{ours}{equals}{value}" if ours else word)
    return words


def replacement(flag: str) -> str | None:
    """What takes the place of another trainer's flag, or of one that is gone; None for an unknown one."""
    whole = _plain(flag)
    name = whole.rpartition(".")[2]  # of a flag with a section, as in --training.seq-len
    if ours := ACCEPTED.get(name):
        return f"--{ours}"
    answer = ANSWERED.get(whole) or ANSWERED.get(name)
    if answer is None and whole.replace("-", "_") in REMOVED:
        return "it is gone, and CHANGELOG.md says what to do instead"
    return answer


def no_such_flag(flag: str, known: Iterable[str]) -> str:
    """What to say of a flag that is not among the `known` fields: ours, or a near one."""
    if instead := replacement(flag):
        use = "use " if instead.startswith("--") else ""
        return f"no such flag; {use}{instead}"
    word, words = _plain(flag), [_plain(name) for name in known]
    if (name := word.rpartition(".")[2]) in words:
        return f"no such flag; use --{name}"
    if longer := next((other for other in words if other.startswith(f"{word}-")), None):
        return f"no such flag; did you mean --{longer}?"
    cutoff = 0.75 if len(word) > 4 else 0.6  # of three letters, two may be swapped
    return f"no such flag{did_you_mean(word.lower(), words, cutoff, '--')}"


def allowed(flag: Flag) -> str:
    """The values that a flag takes, in words."""
    names: dict[Any, Any] = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
    }
    *others, last = (names.get(o, o) for o in flag.options)
    return f"{', '.join(others)} or {last}" if others else last


def read_value(flag: Flag, name: str, value: Any, where: str = "") -> Any:
    """A flag's value of a text or of a file; UsageError with `where` and the values that are allowed."""
    with contextlib.suppress(ValueError):
        return flag.read(value)
    shown = " ".join(map(str, value)) if isinstance(value, list) else value
    written = f"{flag_of(name)} {shown}"
    if right := VALUES.get(written):
        raise UsageError(f"{where}{written}: no such value; use {right}")
    words = [option for option in flag.options if isinstance(option, str)]
    near = did_you_mean(str(shown).lower(), words)
    raise UsageError(f"{where}{written}: must be {allowed(flag)}{near}")
