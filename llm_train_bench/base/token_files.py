"""Token files: a flat array of uint16 or uint32 ids, with or without a header. Needs no torch.

A header (256 int32: magic, version, number of tokens, zeros) tells the width, as in the files of
llm.c: version 1 is uint16, version 7 is uint32. Without one (nanoGPT's files) the user must name it.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llm_train_bench.base.errors import UsageError
from llm_train_bench.model.json_files import plain_file

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}


def open_tokens(path: str | Path, dtype: str = "auto") -> np.ndarray:
    """Map a token file into memory: a read-only 1-d array; UsageError if it is none.

    `dtype` is --data-dtype: a file without a header is read only if that says its format.
    """
    path = Path(path)
    try:
        size = plain_file(path).stat().st_size
        with path.open("rb") as f:
            start = f.read(HEADER_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; make one with prepare_data.py, or use --data synthetic"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    header = np.frombuffer(start, dtype="<i4") if len(start) == HEADER_BYTES else [0, 0, 0]
    magic, version, count = map(int, header[:3])
    width = FORMATS.get((magic, version))
    # Such a header would be trained on as tokens.
    if width is None and any(magic == known for known, _ in FORMATS):
        known = ", ".join(f"{m} version {v}" for m, v in FORMATS)
        raise UsageError(
            f"{path}: has llm.c's magic {magic}, but of version {version}; there are {known}"
        )
    if width is None and dtype == "auto":
        raise UsageError(
            f"{path}: has no header that says it holds tokens; make token files with "
            "prepare_data.py, or name the format of a bare array: --data-dtype uint16 (or uint32)"
        )
    if width is None:
        bare = np.dtype(dtype).newbyteorder("<")
        if size % bare.itemsize or not size:
            raise UsageError(f"{path}: {size} bytes are not an array of {dtype}; is it complete?")
        return np.memmap(path, dtype=bare, mode="r")
    if dtype not in ("auto", width.name):
        raise UsageError(f"--data-dtype {dtype}: the header of {path} says {width.name}")
    if size != HEADER_BYTES + count * width.itemsize:
        raise UsageError(
            f"{path}: its header promises {count} tokens, its size holds "
            f"{(size - HEADER_BYTES) / width.itemsize:g}; is it complete?"
        )
    return np.memmap(path, dtype=width, mode="r", offset=HEADER_BYTES, shape=(count,))


class Windows:
    """Samples of a token file: windows of seq_len + 1 tokens, in a new random order every epoch.

    Windows start seq_len apart, so that every token is a label once an epoch and no two samples of an
    epoch share one. UsageError for a file that holds none.
    """

    def __init__(self, path: str | Path, n_tokens: int, seq_len: int, seed: int):
        self.seq_len, self.seed, self.number = seq_len, seed, (n_tokens - 1) // seq_len
        if self.number < 1:
            raise UsageError(
                f"{path}: {n_tokens} tokens are fewer than one sequence of {seq_len} and its "
                "labels need; use a longer file or a smaller --seq-len"
            )
        self.orders: dict[int, np.ndarray] = {}

    def start(self, sample: int) -> int:
        """Where in the file a sample begins."""
        epoch, index = divmod(sample, self.number)
        if epoch not in self.orders:
            if len(self.orders) > 1:  # a batch may straddle two epochs, never three at a time
                self.orders.pop(min(self.orders))
            generator = np.random.default_rng([self.seed, epoch])
            self.orders[epoch] = generator.permutation(self.number)
        return int(self.orders[epoch][index]) * self.seq_len


def write_tokens(path: str | Path, parts: Iterable[np.ndarray], vocab_size: int) -> int:
    """Write arrays of ids one after the other, with a header; returns the number of tokens."""
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
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
