"""Batches of tokens, as a pure function of the seed and the number of the sample.

Sample s is the same whatever the number of ranks or accumulation steps, and needs no state:
a run that continues at step k asks for the samples of step k.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llm_train_bench.base.documents import Packing, make_packing, starts_of
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.token_files import Windows, open_tokens
from llm_train_bench.formulas.work import Batch, Work
from llm_train_bench.model.init import ROUNDS
from llm_train_bench.model.layout import Documents
from llm_train_bench.model.loss import MASKED
from llm_train_bench.settings.flags import DataFlags
from llm_train_bench.settings.plan import Schedule


class SyntheticTokens:
    """Uniform random tokens, made on the device from a hash of seed, sample and position.

    The same on every device and at every number of ranks, at the cost of a few elementwise kernels.
    """

    AHEAD = 2**17  # tokens made at once: a MiB
    packing: Packing | None = None
    global_batch = 1
    until = None

    def __init__(self, vocab_size: int, bsz: int, seq_len: int, seed: int, device: torch.device):
        self.vocab_size, self.bsz, self.seed, self.stride = vocab_size, bsz, seed, seq_len + 1
        self.places = torch.arange(bsz * self.stride, device=device).view(bsz, -1)

    def micro_batches(self, plan: range) -> Iterator[Tensor]:
        """(bsz, seq_len + 1) int64 ids for each first sample of a plan, on the device.

        Several are made at once: launches for each small micro batch would cost a few percent of a
        step.
        """
        n = max(1, self.AHEAD // self.places.numel())
        for start in range(0, len(plan), n):
            part = plan[start : start + n]
            firsts = torch.arange(part.start, part.stop, part.step, device=self.places.device)
            counter = self.places + firsts[:, None, None] * self.stride
            yield from hash_ids(counter, self.seed).remainder_(self.vocab_size)


def hash_ids(counter: Tensor, seed: int) -> Tensor:
    """31-bit pseudo-random numbers of int64 counters, by the rounds of initial values."""
    mask = 0xFFFFFFFF
    # Counters above 2**32 (long runs) enter through their upper half too.
    h = (counter & mask) ^ ((counter >> 32) * 0x9E3779B1 & mask) ^ (seed * 0x85EBCA6B & mask)
    for shift, factor in ROUNDS:
        h = (h ^ (h >> shift)) * factor & mask
    return (h ^ (h >> 16)) >> 1


class FileTokens:
    """Windows of seq_len + 1 tokens of a .bin file, in a new random order every epoch."""

    packing: Packing | None = None
    global_batch = 1
    until: int | None = None
    """Samples from here on fill up a micro batch: they repeat the one before, with masked labels."""

    def __init__(
        self, path: str, vocab_size: int, bsz: int, seq_len: int, seed: int, dtype: str = "auto"
    ):
        self.path, self.vocab_size, self.bsz, self.seq_len = path, vocab_size, bsz, seq_len
        self.tokens = open_tokens(path, dtype)
        self.windows = Windows(path, len(self.tokens), seq_len, seed)

    def rows(self, first: int, n: int) -> np.ndarray:
        """(n, seq_len + 1) tokens of the samples from number `first` on, in the file's width."""
        last = first + n if self.until is None else self.until - 1
        starts = [self.windows.start(min(sample, last)) for sample in range(first, first + n)]
        return np.stack([self.tokens[s : s + self.seq_len + 1] for s in starts])

    def micro_batches(self, plan: range) -> Iterator[Tensor]:
        """(bsz, seq_len + 1) int64 ids for each first sample of a plan, on the CPU."""
        for first in plan:
            yield torch.from_numpy(self.rows(first, self.bsz).astype(np.int64))

    def check(self, n_samples: int) -> None:
        """UsageError if one of the samples 0 ... n_samples - 1 holds an id outside the vocabulary."""
        n_samples = min(n_samples, self.windows.number)
        for first in range(0, n_samples, 256):
            rows = self.rows(first, min(256, n_samples - first))
            if rows.max() >= self.vocab_size:
                raise UsageError(
                    f"{self.path}: holds token id {rows.max()}, but the model's vocabulary ends at "
                    f"{self.vocab_size - 1}; tokenise for this model or choose another config"
                )


Source = SyntheticTokens | FileTokens


class MicroBatch(NamedTuple):
    """(B, T) int64 tokens, the labels next to them, and the documents that they are packed of."""

    inputs: Tensor
    labels: Tensor
    documents: Documents | None = None
    weight: float = 1.0
    """The factor of the mean loss that leaves out the step's masked labels."""


# Validation data: where the micro batches come from, and their first samples.
Validation = tuple[FileTokens, range]
VAL_TOKENS = 2**14  # of a validation loss, in whole samples


def open_data(
    flags: DataFlags, work: Work, n_steps: int, device: torch.device, packing: Packing | None = None
) -> tuple[Source, Validation | None]:
    """Training data and, if asked for, validation data; UsageError if one cannot serve the run.

    `packing` are the documents of the training data; validation data then are packed likewise.
    """
    batch, vocab_size = work.batch, work.config.vocab_size
    bsz, seq_len = batch.micro_batch, batch.seq_len
    if flags.data == "synthetic":
        source = SyntheticTokens(vocab_size, bsz, seq_len, flags.seed, device)
    else:
        source = FileTokens(flags.data, vocab_size, bsz, seq_len, flags.seed, flags.data_dtype)
        source.check(n_steps * batch.global_batch)
    source.packing, source.global_batch = packing, batch.global_batch
    if not flags.val_data:
        return source, None
    val_source = FileTokens(flags.val_data, vocab_size, bsz, seq_len, 0, flags.data_dtype)
    # The same samples whatever the micro batch.
    n_samples = min(val_source.windows.number, -(-VAL_TOKENS // seq_len))
    val_source.check(n_samples)
    val_source.until, plan = n_samples, range(0, n_samples, bsz)
    val_source.global_batch = len(plan) * bsz
    if packing is not None:
        more = seq_len, 0, None, flags.pack_separator
        val_source.packing = make_packing(flags.val_data, flags.data_dtype, *more)
    return source, (val_source, plan)


def sample_plan(schedule: Schedule, batch: Batch, data_rank: int = 0) -> range:
    """First sample of every micro batch of a rank, in order, over all steps of a schedule.

    `data_rank` counts the ranks that get different data. A step takes as many samples as the global
    batch has, after those of the step before. Each micro step deals its micro batches out in turn.
    """
    micro = batch.micro_batch * batch.data_parallel_size
    first = data_rank * batch.micro_batch
    begin, end = (step * batch.global_batch for step in (schedule.start, schedule.total))
    return range(begin + first, end + first, micro)


def repeating_last(items: Iterator) -> Iterator:
    """All items, then the last one for ever: for a step that is only observed."""
    last = None
    for last in items:
        yield last
    yield from itertools.repeat(last)


def batches(source: Source, plan: range, device: torch.device) -> Iterator[MicroBatch]:
    """Micro batches of the plan on the device."""
    step, weight = range(0), 1.0
    until = source.until
    for first, ids in zip(plan, source.micro_batches(plan), strict=False):
        if ids.device.type != device.type:
            ids = ids.pin_memory().to(device, non_blocking=True)
        inputs, labels = ids[:, :-1], ids[:, 1:]
        if source.packing is None and (until is None or source.global_batch <= until):
            yield MicroBatch(inputs, labels)
            continue
        if first not in step:
            begin = first - first % source.global_batch
            step = range(begin, begin + source.global_batch)
            # A step's positions over the labels among them that are not masked.
            kept = ~_masked(source, np.array(step), labels.shape[1])
            weight = kept.size / max(1, int(kept.sum()))
        samples = np.arange(first, first + source.bsz)
        masked = torch.from_numpy(_masked(source, samples, labels.shape[1]))
        documents = None
        if source.packing is not None:
            documents = Documents(torch.from_numpy(starts_of(source.packing.begins(samples))))
        labels = labels.masked_fill(masked.to(device, non_blocking=True), MASKED)
        yield MicroBatch(inputs, labels, documents, weight)


def _masked(source: Source, samples: np.ndarray, seq_len: int) -> np.ndarray:
    """(n, T) labels that do not count: those in another document, and of samples that only fill up."""
    masked = np.zeros((len(samples), seq_len), dtype=bool)
    if source.packing is not None:
        masked |= source.packing.begins(samples)[:, 1:]
    if source.until is not None:
        masked[samples >= source.until] = True
    return masked
