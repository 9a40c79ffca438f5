"""What may not leave a machine: credentials, and the places of files. One filter for every text."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Names of variables, settings and flags whose values are secret.
SECRET = re.compile(
    r"token(?!iz|s)|secret|key(?![a-z])|auth|passw|pass(?![\w-])|credential|bearer|cookie|webhook|signature"
    r"|(?<![a-z])(?:pw|pwd|pat|sig)(?![a-z])", re.I)  # fmt: skip
# A name like these before `=` or `:` in any text has a secret behind it.
_NAMED = "api.?key|secret|passw(?:or)?d|pwd|(?:access|auth|hub|hf|api)[_-]?token|bearer"
_SERVICES = r"hf_|gh[opsur]_|github_pat_|glpat-|xox[abeprs]-|sk-|nvapi-"
_WEBHOOKS = r"hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.]+/webhook\w*"
_SIGNED = "(?i:sig|token|key|secret|credential|passw|code)"
# Secrets under any name, and what is shown for them.
_FORMS = [
    (rf"\b(?:{_SERVICES})(?:(?=[\w-]*[A-Z\d])[\w-]{{4,}}|[a-z]{{16,}})", "..."),
    (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]{8,}\.[\w.-]+", "..."),  # AWS; a JSON web token
    (r"://[^/@\s]+@", "://...@"),
    (rf"([?&][\w.-]*{_SIGNED}[\w-]*=)[^&\s\"']+", r"\1..."),
    (rf"((?:{_WEBHOOKS})/)[^\s\"']+", r"\1..."),
    (r"\b((?i:bearer|basic)\s+)[\w.~+/=-]{8,}", r"\1..."),
    (rf"(?i)([\w-]*(?:{_NAMED})[\w-]*[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+", r"\1..."),
]


def redact_text(text: str) -> str:
    """A text with `...` for everything in it that has the form of a secret."""
    for pattern, shown in _FORMS:
        text = re.sub(pattern, shown, text)
    return text


def redact(value: Any) -> Any:
    """JSON data with its texts as `redact_text`; a text under a secret name is `...`."""
    if isinstance(value, dict):
        return {redact_text(name): _redact_item(name, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def _redact_item(name: str, item: Any) -> Any:
    named = isinstance(item, str) and item and SECRET.search(name)
    return "..." if named else redact(item)


def redact_command(arguments: Iterable[str]) -> list[str]:
    """A command line without secrets, and without the values of what has a secret name.

    A value follows `=`, `:` or a space after the name, or is the arguments from a flag to the next one.
    """
    shown: list[str] = []
    follows = hidden = False  # whether a value follows, and whether this argument is one
    for argument in arguments:
        hidden = (follows and not argument.startswith("--")) or (
            hidden and not argument.startswith("-")
        )
        argument = "..." if hidden else redact_text(argument)
        name = re.search(rf"(?:{SECRET.pattern})[^=:\s]*[=:\s]", argument, re.I)
        follows = (
            argument.endswith(name[0])
            if name
            else argument.startswith("-") and bool(SECRET.search(argument))
        )
        shown.append(argument[: name.end()] + "..." if name and not follows else argument)
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


def shown_command(arguments: Iterable[str]) -> list[str]:
    """A command line with its paths as they may leave the machine, and without secrets."""
    shown = []
    for argument in redact_command(arguments):
        flag, equals, value = argument.partition("=")
        alone = not equals or argument.startswith(("/", "~", "../"))
        shown.append(shown_text(argument) if alone else f"{flag}={shown_text(value)}")
    return shown
