"""Flags of other trainers and of earlier versions, and what replaces them. Needs no torch."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from llm_train_bench.base.errors import did_you_mean
from llm_train_bench.settings.flags import REMOVED


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
