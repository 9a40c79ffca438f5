"""Tables as Markdown, to read on the screen and to paste into a report. Needs no torch."""

import csv
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Member = TypeVar("Member")
Key = TypeVar("Key")


def grouped(items: Iterable[Member], key: Callable[[Member], Key]) -> dict[Key, list[Member]]:
    """Items by their key, in order."""
    groups: dict[Key, list[Member]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def markdown_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[str]],
    left: Collection[str] = (),
    title: str = "",
) -> str:
    """A table as Markdown, as wide as its cells, with `title` on a line above it.

    Figures are aligned right; the first column and those in `left` are aligned left.
    """
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_left = [i == 0 or name in left for i, name in enumerate(columns)]
    texts = [title] if title else []
    for line in lines:
        padded = (
            cell.ljust(width) if is_text else cell.rjust(width)
            for cell, width, is_text in zip(line, widths, to_left, strict=True)
        )
        texts.append(f"| {' | '.join(padded)} |")
    ends = ("-" if is_text else ":" for is_text in to_left)
    rule = "|".join("-" * (width + 1) + end for width, end in zip(widths, ends, strict=True))
    texts.insert(2 if title else 1, f"|{rule}|")
    return "\n".join(texts) + "\n"


def markdown_cell(text: str) -> str:
    """Text as it stands in a file of Markdown: no HTML, no new column."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as a CSV with all of their columns."""
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, list(columns))
        writer.writeheader()
        writer.writerows({name: csv_cell(x) for name, x in row.items()} for row in rows)


def csv_cell(value: Any) -> Any:
    """A value as it stands in a CSV: text that a spreadsheet would compute becomes plain text."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def number(value: float | None, form: str) -> str:
    """A formatted number, or that it is unknown."""
    return "unknown" if value is None else format(value, form)


def short(name: str) -> str:
    """A name of at most 80 characters: kernels often differ in their last ones."""
    return name if len(name) <= 80 else f"{name[:47]}...{name[-30:]}"


def milliseconds(seconds: float) -> str:
    """Seconds as they stand in a table of milliseconds."""
    return f"{1e3 * seconds:,.3f}"
