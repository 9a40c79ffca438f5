"""Flags of other trainers and of earlier versions, and what replaces them. Needs no torch."""

import functools
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from llm_train_bench.base.errors import did_you_mean
from llm_train_bench.settings.flags import REMOVED, Script

Table = dict[str, str]


@functools.cache
def tables() -> dict[str, Table]:
    """What other_names.toml says of each name, by table."""
    path = Path(__file__).with_name("other_names.toml")
    rows = tomllib.loads(path.read_text(encoding="utf-8"))
    values = rows.pop("values")
    by_name = {
        table: {name: ours for ours, names in answers.items() for name in names.split()}
        for table, answers in rows.items()
    }
    return by_name | {"values": values}


def _plain(flag: str) -> str:
    """A flag's name as the tables have it: `--seq_len=4096` is seq-len."""
    return flag.partition("=")[0].lstrip("-").replace("_", "-")


def in_our_words(argv: Sequence[str]) -> list[str]:
    """A command line with our names for the flags of others that mean the same."""
    accepted = tables()["accepted"]
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        ours = accepted.get(_plain(name)) if name.startswith("--") else None
        words.append(f"--{ours}{equals}{value}" if ours else word)
    return words


def surprises(argv: Sequence[str]) -> list[str]:
    """A line on each of these flags whose meaning may surprise."""
    accepted, remarks = tables()["accepted"], tables()["remarks"]
    names = [_plain(word) for word in argv if word.startswith("--")]
    return [f"--{n} is --{accepted[n]}: {remarks[n]}" for n in names if n in remarks]


def replacement(flag: str, prog: str) -> str | None:
    """What takes the place of another trainer's flag, or of one that is gone; None for an unknown one."""
    whole = _plain(flag)
    name = whole.rpartition(".")[2]  # of a flag with a section, as in --training.seq-len
    if ours := tables()["accepted"].get(name):
        return f"--{ours}"
    answers = tables()["answered"] | tables().get(prog, {})
    answer = answers.get(whole) or answers.get(name)
    if answer is None and whole.replace("-", "_") in REMOVED:
        return "it is gone, and CHANGELOG.md says what to do instead"
    return answer


def no_such_flag(flag: str, known: Iterable[str], prog: str = Script.ONE) -> str:
    """What to say of a flag that is not among the `known` fields: ours, or a near one."""
    if instead := replacement(flag, prog):
        use = "use " if instead.startswith("--") else ""
        return f"no such flag; {use}{instead}"
    word, words = _plain(flag), [_plain(name) for name in known]
    if longer := next((other for other in words if other.startswith(f"{word}-")), None):
        return f"no such flag; did you mean --{longer}?"
    cutoff = 0.75 if len(word) > 4 else 0.6  # of three letters, two may be swapped
    return f"no such flag{did_you_mean(word.lower(), words, cutoff, '--')}"


def right_value(flag: str, text: str) -> str | None:
    """The flag with our value in place of another trainer's."""
    return tables()["values"].get(f"{flag} {text}")
