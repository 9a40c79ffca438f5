"""What may not leave a machine: credentials, and the places of files. One filter for every text."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Names of variables, settings and flags whose values are secret. A key is at the end of its name: the
# key of num_key_value_heads is none. Tokens with a meaning for a tokenizer are none either.
SECRET = re.compile(
    r"(?<!pad.)(?<!bos.)(?<!eos.)(?<!unk.)(?<!sep.)(?<!cls.)(?<!mask.)token(?!iz|s(?!ecret)|_id|_type|_index)"
    r"|secret|api.?keys?$|(?<![a-z])key(?:_id)?$|auth(?!ors?(?![a-z]))|passw|passphrase|^-*pass$|credential|bearer"
    r"|(?:db|user|http|proxy|smtp|sql|root|admin)_?pass$|cookie|webhook|(?<![a-z])(?:pw|pwd|pat|sig|signature)$",
    re.I,
)
# Numbers under these names are secret too.
_NUMBERS = re.compile(r"passw|secret|pwd|passphrase|(?<![a-z])pin$", re.I)
# A name like these before `=` or `:` in any text has a secret behind it.
_NAMED = (
    r"api.?keys?|secret|passw(?:or)?d|passphrase|pwd"
    r"|(?<![a-z])(?:[a-z]*[_-])?(?<!pad_)(?<!eos_)(?<!bos_)token"
)
_SIGNED = r"(?:[\w.-]*[_.-])?(?:sig|signature|token|key|secret|credential|password|code)"
_WEBHOOKS = r"hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.]+/webhook\w*"
# Secrets under any name, and what is shown for them.
_FORMS = [
    (r"(?<![\w-])(?:hf_|gh[opsur]_)[A-Za-z0-9]{16,}", "..."),
    (r"(?<![\w-])(?:github_pat_|glpat-|xox[abeprs]-|sk-|nvapi-)[\w-]{16,}", "..."),
    (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]{8,}\.[\w.-]+", "..."),  # AWS; a JSON web token
    (r"://(?:[^/\s:@]+:[^\s\"']+|[^/@\s]+)@", "://...@"),
    (rf"(?i)([?&]{_SIGNED}=)[^&\s\"']+", r"\1..."),
    (rf"((?:{_WEBHOOKS})/)[^\s\"']+", r"\1..."),
    (r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?\w+\s+)[^\s\"']+", r"\1..."),
    (r"(?i)\b(bearer\s+)(?=\S*\d)[\w.~+/=-]{8,}", r"\1..."),
    (rf"(?i)((?:{_NAMED})[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]{{2,}}", r"\1..."),
]  # fmt: skip


def redact_text(text: str) -> str:
    """A text with `...` for everything in it that has the form of a secret."""
    for pattern, shown in _FORMS:
        text = re.sub(pattern, shown, text)
    return text


def redact(value: Any, name: str = "") -> Any:
    """JSON data with its texts as `redact_text`; under a secret name all texts are `...`."""
    if isinstance(value, dict):
        names = {key: name if SECRET.search(name) else str(key) for key in value}
        return {redact_text(str(key)): redact(item, names[key]) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        return "..." if value and SECRET.search(name) else redact_text(value)
    return "..." if value is not None and value is not True and _NUMBERS.search(name) else value


def redact_command(arguments: Iterable[str]) -> list[str]:
    """A command line without secrets, and without the values of what has a secret name.

    A value follows `=`, `:` or a space after the name, or is the arguments from a flag to the next one.
    """
    shown: list[str] = []
    follows = hidden = False  # whether a value follows, and whether this argument is one
    for argument in arguments:
        is_value = follows and not argument.startswith("--")
        hidden = is_value or (hidden and not argument.startswith("-"))
        follows = False
        name = re.match(r"(?:--[\w.-]+=)?([\w.-]+)([=:])(.*)", argument)
        if hidden:
            argument = "..."
        elif name and SECRET.search(name[1]):
            follows = not name[3]
            argument = argument[: name.end(2)] + "..." * bool(name[3])
        elif argument.startswith("-") and SECRET.search(argument):
            follows = True
        shown.append(redact_text(argument))
    return shown


def shown_path(path: str | Path) -> str:
    """A path as it may leave the machine: below the working directory, or its name."""
    path = Path(path)
    if not path.is_absolute() and ".." not in path.parts and not str(path).startswith("~"):
        return str(path)
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    deep = path.name == "result.json" and len(path.parts) > 4
    return str(Path(*path.parts[-2:])) if deep else path.name


def shown_text(text: str) -> str:
    """A value of a flag or variable, without secrets; paths in it as they may leave the machine."""
    text = redact_text(text)
    if text.startswith(("/", "~", "../")):
        return shown_path(text)
    return re.sub(r"(?<![\w.~/-])/(?:[\w.+-]+/)+", "", text)


def command_as_setting(arguments: list[str]) -> str:
    """A command line as people see it, and a digest of all its words, which may hold secrets.

    Both are without `--seed N`: repeats of a setting differ in it.
    """
    pairs = zip(["", *arguments], arguments, strict=False)
    words = [word for before, word in pairs if "--seed" not in (before, word.split("=")[0])]
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]
    return f"{' '.join(shown_command(words))} ({digest})"


def shown_command(arguments: Iterable[str]) -> list[str]:
    """A command line with its paths as they may leave the machine, and without secrets."""
    shown = []
    for argument in redact_command(arguments):
        flag, equals, value = argument.partition("=")
        alone = not equals or argument.startswith(("/", "~", "../"))
        shown.append(shown_text(argument) if alone else f"{flag}={shown_text(value)}")
    return shown
