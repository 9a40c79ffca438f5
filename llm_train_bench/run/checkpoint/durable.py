"""Writing files so that a crash leaves the old or the new content, never half. Needs no torch.

A file is on disk when it was synchronised; a name is there when its directory was. A checkpoint is a
directory that gets its final name last: that rename is the commit.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CHUNK = 2**24
# Seconds after which a save is given up.
SAVE_S = 600.0


class Files:
    """The calls that reach the disk, one method each, so that a test can fail at every one."""

    def make(self, directory: Path) -> None:
        """Make a directory, unless another rank did."""
        directory.mkdir(exist_ok=True)

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """Write a new file and synchronise it; its bytes and CRC-32."""
        size = crc = 0
        with path.open("xb") as f:
            for part in parts:
                f.write(part)
                size += len(part)
                crc = zlib.crc32(part, crc)
            f.flush()
            self.synchronize(f.fileno())
        return size, crc

    def synchronize(self, descriptor: int) -> None:
        """Wait until a file's content is on disk."""
        os.fsync(descriptor)

    def synchronize_names(self, directory: Path) -> None:
        """Wait until the names in a directory are on disk."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, directory: Path) -> None:
        shutil.rmtree(directory)


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file, as it is read back; OSError if it cannot be."""
    size = crc = 0
    with path.open("rb") as f:
        while part := f.read(CHUNK):
            size += len(part)
            crc = zlib.crc32(part, crc)
    return size, crc


def failure_of(work: Callable[..., object], *args: Any) -> str | None:
    """Why some work on files failed; None if it did not."""
    try:
        work(*args)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return None
