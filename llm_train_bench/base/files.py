"""Files that others made, or will read."""

import contextlib
import fcntl
import os
import platform
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from llm_train_bench.base.start import ROOT

from llm_train_bench.base.errors import UsageError, one_line


def how_to_install(command: str) -> str:
    """A `pip install -e ...` of this source tree; beside an installed wheel that of the package."""
    if (ROOT / "pyproject.toml").exists():
        return command
    return command.replace("-e '.[", "'llm-train-bench[").replace("-e .", "llm-train-bench")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old file or the new one, also after a crash."""
    path = Path(os.path.realpath(path))  # a link stays one
    spare = path.with_name(f".llm-train-bench-{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        spare.write_text(text, encoding="utf-8", errors="surrogateescape")
        if path.exists():
            shutil.copymode(path, spare)
        spare.replace(path)
    except BaseException:
        spare.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep others out while a file is changed: they lock its directory, where the disk has locks."""
    descriptor = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def hold_lock(path: Path, flag: str) -> TextIO:
    """A lock file, which this process holds until it closes it or ends; it names the process.

    Where there are no locks, as on some network file systems, nobody is refused. UsageError while another
    process holds it; `flag` chooses another directory.
    """
    lock = path.open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        who = lock.read() or "another process"
        instead = f"end it first, or choose another {flag}"
        raise UsageError(f"{path.parent}: {who} is alive, and writes there; {instead}") from None
    except OSError:
        pass
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    return lock


def checksum(path: Path) -> int:
    """CRC-32 of a file, as it is read back."""
    crc = 0
    with path.open("rb") as f:
        while part := f.read(2**24):
            crc = zlib.crc32(part, crc)
    return crc


def first_cause(error: BaseException) -> str:
    """Why work on files failed, in one line: the first cause, which PyTorch hides when a disk is full."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        name = f"{Path(error.filename).name}: " if error.filename else ""
        return name + error.strerror
    return one_line(error) or type(error).__name__


def sync_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def walk(top: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Each directory from `top` down, once, also through links, with its directories and files.

    Names are sorted. Directories that the caller takes off the list are left out.
    """

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}")

    seen = set()
    for root, directories, files in os.walk(top, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            directories.clear()
            continue
        seen.add(real)
        directories.sort()
        yield Path(root), directories, sorted(files)
