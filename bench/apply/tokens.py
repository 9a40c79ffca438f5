"""Token files: a flat array of uint16 or uint32 ids, with or without a header. Needs no torch.

With a header (256 int32: magic, version, number of tokens, zeros) the file says its own width, as
the files of llm.c do: version 1 is uint16, version 7 is uint32. Without one (nanoGPT's files) the
width follows from the vocabulary: uint16 up to 65536 ids, uint32 above.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from bench.errors import UsageError

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}


def width_for(vocab_size: int) -> np.dtype:
    """The narrowest of the two widths that holds every id of a vocabulary."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def open_tokens(path: str | Path, vocab_size: int) -> np.ndarray:
    """Map a token file into memory: a read-only 1-d array; UsageError if it is none."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            header = (
                np.frombuffer(f.read(HEADER_BYTES), dtype="<i4", count=-1) if size >= 12 else []
            )
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise UsageError(
                f"{path}: no such file; make one with prepare_data.py, or use --data synthetic"
            ) from None
        if isinstance(error, OSError):
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
        header = []
    dtype = FORMATS.get((int(header[0]), int(header[1]))) if len(header) >= 3 else None
    if dtype is None:
        dtype = width_for(vocab_size)
        if size % dtype.itemsize or not size:
            raise UsageError(
                f"{path}: {size} bytes are no array of {dtype.name} tokens (the width that vocabulary "
                f"{vocab_size} takes where a file has no header); is it complete, and a token file?"
            )
        if why := _no_tokens(path, dtype):
            raise UsageError(f"{path}: {why}")
        return np.memmap(path, dtype=dtype, mode="r")
    count = int(header[2])
    if size != HEADER_BYTES + count * dtype.itemsize:
        raise UsageError(
            f"{path}: its header promises {count} tokens, its size holds "
            f"{(size - HEADER_BYTES) / dtype.itemsize:g}; is it complete?"
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))


def _no_tokens(path: Path, dtype: np.dtype) -> str | None:
    """Why a file of fitting size without a header has no tokens; None if it may have some."""
    with path.open("rb") as f:
        start = f.read(4096)
    if start.startswith(b"\x93NUMPY"):
        return "a .npy file; write the bare tokens, with .tofile(), or use prepare_data.py"
    if len(start) >= 64 and all(32 <= byte < 127 or byte in b"\t\n\r" for byte in start):
        return "looks like text; make tokens of it with prepare_data.py"
    halves = np.frombuffer(start[: len(start) // 4 * 4], dtype="<u2")
    if dtype.itemsize == 2 and len(halves) >= 64 and halves[::2].any() and not halves[1::2].any():
        return (
            "looks like tokens of 32 or 64 bits; a file without a header has 16 for this vocabulary"
        )
    return None


def write_tokens(path: str | Path, parts: Iterable[np.ndarray], vocab_size: int) -> int:
    """Write arrays of ids one after the other, with a header; returns the number of tokens."""
    dtype = width_for(vocab_size)
    magic, version = next(key for key, value in FORMATS.items() if value == dtype)
    path = Path(path)
    unfinished = path.with_name(path.name + ".part")
    total = 0
    with contextlib.ExitStack() as stack:
        stack.callback(unfinished.unlink, missing_ok=True)  # gone already where all went well
        f = stack.enter_context(unfinished.open("wb"))
        f.write(bytes(HEADER_BYTES))
        for part in parts:
            total += len(part)
            if total >= 2**31:
                raise UsageError(
                    f"{path}: more than 2^31 tokens do not fit one file; split the input"
                )
            f.write(np.asarray(part, dtype=dtype).tobytes())
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = magic, version, total
        f.seek(0)
        f.write(header.tobytes())
        f.flush()
        unfinished.replace(path)
    return total
