"""Packed documents: where they begin in each sample, and how long they are. Needs no torch.

Synthetic documents have lengths drawn from a table; those of a token file end where an index says, or
after each separator. Like the tokens they are a pure function of the seed and the sample's number.
"""

import dataclasses
import statistics
from collections import Counter
from pathlib import Path

import numpy as np

from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.base.token_files import Windows, open_tokens
from llm_train_bench.model.json_files import parse_json, plain_file, plain_text

# Documents' lengths, and how many there are of each.
Lengths = tuple[tuple[int, int], ...]
# Quantiles of a lognormal distribution, of which each is as likely.
LEVELS = 2**14
# Samples of which a plan counts the documents.
COUNTED = 4096


def read_lengths(text: str) -> np.ndarray:
    """The table of --pack-lengths: sorted lengths of a JSON list, or of a lognormal's MEAN,SIGMA.

    MEAN is the mean length before rounding [tokens], SIGMA the standard deviation of its natural
    logarithm. UsageError for anything else.
    """
    numbers = text.split(",")
    if len(numbers) == 2:
        try:
            mean, sigma = map(float, numbers)
        except ValueError:
            mean = sigma = -1.0
        if not (1 <= mean < 2**31 and 0 <= sigma <= 5):
            why = "needs a mean of 1 token or more, and a sigma from 0 to 5, as in 800,1.2"
            raise UsageError(f"--pack-lengths {text}: a lognormal distribution {why}")
        normal = statistics.NormalDist()
        z = np.array([normal.inv_cdf((i + 0.5) / LEVELS) for i in range(LEVELS)])
        shape = np.exp(sigma * z)
        return np.maximum(1, np.rint(shape * (mean / shape.mean()))).astype(np.int64)
    try:
        values = parse_json(plain_text(text))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--pack-lengths {text}: {why}; give a JSON list of lengths, or MEAN,SIGMA as in 800,1.2"
        ) from None
    good = isinstance(values, list) and values
    if not good or not all(type(n) is int and 0 < n < 2**31 for n in values):
        raise UsageError(f"--pack-lengths {text}: must be a JSON list of lengths, each 1 or more")
    return np.sort(np.array(values, dtype=np.int64))


@dataclasses.dataclass(frozen=True, eq=False)
class DrawnDocuments:
    """Documents of lengths drawn evenly from a table; the last one of a sample is cut off."""

    table: np.ndarray
    seq_len: int
    seed: int

    def begins(self, samples: np.ndarray) -> np.ndarray:
        """(n, seq_len + 1) whether a document begins there, of the samples of these numbers."""
        begin = np.zeros((len(samples), self.seq_len + 1), dtype=bool)
        begin[:, 0] = True
        rows, at, number = np.arange(len(samples)), np.zeros(len(samples), dtype=np.int64), 0
        while len(rows):  # the next document of each sample that has one
            at += self.table[hashed(samples[rows], number, self.seed) % len(self.table)]
            inside, number = at <= self.seq_len, number + 1
            rows, at = rows[inside], at[inside]
            begin[rows, at] = True
        return begin


def hashed(samples: np.ndarray, number: int, seed: int) -> np.ndarray:
    """64-bit pseudo-random numbers of samples and a draw's number (splitmix64's finaliser)."""
    golden = 0x9E3779B97F4A7C15
    with np.errstate(over="ignore"):
        h = samples.astype(np.uint64) * np.uint64(golden)
        h += np.uint64((number * 0xD1B54A32D192ED03 + (seed + 1) * 0xBF58476D1CE4E5B9) % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
        return (h ^ (h >> np.uint64(31))).astype(np.int64) & (2**63 - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class FileDocuments:
    """Documents of a token file, cut off at the ends of a sample; `ends` (sorted) are theirs."""

    ends: np.ndarray
    windows: Windows

    def begins(self, samples: np.ndarray) -> np.ndarray:
        """As DrawnDocuments."""
        begin = np.zeros((len(samples), self.windows.seq_len + 1), dtype=bool)
        begin[:, 0] = True
        for row, sample in zip(begin, samples.tolist(), strict=True):
            start = self.windows.start(sample)
            low, high = np.searchsorted(self.ends, (start + 1, start + self.windows.seq_len + 1))
            row[self.ends[low:high] - start] = True
        return begin


Packing = DrawnDocuments | FileDocuments


def make_packing(
    data: str,
    dtype: str,
    seq_len: int,
    seed: int,
    lengths: str | None = None,
    separator: int | None = None,
) -> Packing:
    """The documents of --data, as --pack and the flags with it say; UsageError where there are none."""
    if data == "synthetic":
        if lengths is None:
            raise UsageError(
                "--pack with --data synthetic needs their lengths: --pack-lengths 800,1.2, or a file"
            )
        return DrawnDocuments(read_lengths(lengths), seq_len, seed)
    ends = read_ends(data, dtype, separator)
    return FileDocuments(ends, Windows(data, len(open_tokens(data, dtype)), seq_len, seed))


def index_path(path: str | Path) -> Path:
    """Where prepare_data.py writes the ends of a token file's documents."""
    return Path(path).with_suffix(".ends.npy")


def read_ends(path: str, dtype: str, separator: int | None) -> np.ndarray:
    """Ends of a token file's documents: by its index, or after each `separator`; UsageError for none."""
    tokens, index = open_tokens(path, dtype), index_path(path)
    if separator is not None:
        step = 2**24
        pieces = range(0, len(tokens), step)
        found = [np.flatnonzero(tokens[i : i + step] == separator) + i for i in pieces]
        ends = np.concatenate(found) + 1
        if not len(ends):
            raise UsageError(f"--pack-separator {separator}: {path} does not hold that token")
        return ends
    try:
        ends = np.load(plain_file(index), mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(
            f"--pack: {path} has no index {index.name}; write it with prepare_data.py, or name the token "
            "after each document: --pack-separator"
        ) from None
    except Exception as error:  # of a damaged header numpy raises what Python's tokenizer does
        text = f"{index}: cannot be read as an index of documents: {one_line(error)}"
        raise UsageError(text) from None
    good = isinstance(ends, np.ndarray) and ends.ndim == 1 and ends.dtype.kind in "iu" and len(ends)
    ends = ends.astype(np.int64) if good else np.zeros(1, np.int64)  # unsigned differences wrap
    if (np.diff(ends) <= 0).any() or ends[0] <= 0 or ends[-1] != len(tokens):
        raise UsageError(f"{index}: is not an index of the documents in {path}; write both anew")
    return ends


def starts_of(begins: np.ndarray) -> np.ndarray:
    """(n, T) where each position's document begins, of (n, T + 1) beginnings."""
    positions = np.arange(begins.shape[1] - 1)
    return np.maximum.accumulate(np.where(begins[:, :-1], positions, 0), axis=1)


def lengths_in(begins: np.ndarray) -> dict[int, int]:
    """How many documents, or parts of them, there are of each length."""
    edges = begins.copy()
    edges[:, -1] = True  # a sample's labels end there
    rows, columns = edges.nonzero()
    same = rows[1:] == rows[:-1]
    values, counts = np.unique(np.diff(columns)[same], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def count_lengths(packing: Packing, samples: range) -> Lengths:
    """The documents of some samples by length; of evenly chosen ones if there are many."""
    step = max(1, len(samples) // COUNTED)
    total: Counter[int] = Counter()
    for first in range(0, len(samples), 256 * step):
        numbers = np.array(samples[first : first + 256 * step : step])
        total.update(lengths_in(packing.begins(numbers)))
    return tuple(sorted(total.items()))
