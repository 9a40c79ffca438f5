"""Writing files that others read."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file, or replace it, in one piece: whatever ends this, a whole file is there."""
    spare = path.with_suffix(".new")
    spare.write_text(text, encoding="utf-8")
    spare.replace(path)
