"""Files that others made, or will read."""

import os
from collections.abc import Iterator
from pathlib import Path

from bench.errors import UsageError

# The top of this project's tree.
ROOT = Path(__file__).resolve().parents[1]


def write_whole(path: Path, text: str) -> None:
    """Write a file whole: whatever ends the process, the file is all old or all new."""
    path = path.resolve()  # a link stays one
    spare = path.with_suffix(".new")
    spare.write_text(text, encoding="utf-8")
    spare.replace(path)


def walk(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each directory from `top` down, once, also through links, with its files' sorted names.

    UsageError for one that cannot be read: its files would be missing silently.
    """

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}")

    seen = set()
    for root, directories, files in os.walk(top, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            directories.clear()
            continue
        seen.add(real)
        yield Path(root), sorted(files)
