"""Writing files that others read."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in one piece: whatever ends the process, what was there stays or the new is whole."""
    spare = path.with_suffix(".new")
    spare.write_text(text, encoding="utf-8")
    spare.replace(path)
