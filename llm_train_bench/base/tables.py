"""Tables as Markdown, to read on the screen and to paste into a report. Needs no torch."""

import csv
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

Member = TypeVar("Member")
Key = TypeVar("Key")
# Prints text as it is: brackets are no markup, and numbers have no colours.
plain_console = functools.partial(Console, highlight=False, markup=False)


def grouped(items: Iterable[Member], key: Callable[[Member], Key]) -> dict[Key, list[Member]]:
    """Items by their key, in order."""
    groups: dict[Key, list[Member]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def markdown_table(*columns: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """An empty table: figures go right, text (the first column and those in `left`) goes left."""
    table = Table(box=box.MARKDOWN, title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name in left else "right")
    return table


def markdown_cell(text: str) -> str:
    """Text as it stands in a file of Markdown: no HTML, no new column."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def markdown_text(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table as it stands in a file of Markdown."""
    rows = [list(map(markdown_cell, line)) for line in (columns, *lines)]
    rows.insert(1, ["---"] * len(columns))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


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


def show_whole(table: Table) -> None:
    """A table on the screen, as wide as it must be: no number is cut."""
    needed = plain_console(width=1000).measure(table).maximum
    plain_console(width=max(needed, 40)).print(table)
