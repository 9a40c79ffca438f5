"""A step as events on streams: what waits for what, given the seconds of each piece. Needs no torch.

Ranks that do the same are one: a group of a pipeline, or all. Each has a stream for computation, one for
its network, on which collectives wait for each other, and one for sends. speed_model.py gives the seconds
of pieces and adds up what comes out. Micro batches repeat: of many, a few are laid out, and the time of
one more is that of the last ones laid out.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

from llm_train_bench.formulas.work import Work


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Seconds of what a group does: forward and backward of blocks, head, optimizer, and collectives.

    FSDP has those of units, and a pipeline sends. A block's gradients fill so many of DDP's buckets.
    `after` follows the optimizer.
    """

    forward: dict[int, float]
    backward: dict[int, float]
    head: float
    optimizer: float
    units: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    send_s: float = 0.0
    filled: dict[int, float] = dataclasses.field(default_factory=dict)
    buckets: float = 0.0
    bucket_s: float = 0.0
    after: float = 0.0

    @functools.cached_property
    def computing(self) -> float:
        """Seconds of computation of a micro batch."""
        return sum(self.forward.values()) + sum(self.backward.values()) + self.head

    @property
    def network(self) -> float:
        """Seconds of collectives of weights and gradients, each counted once."""
        return sum(map(sum, self.units.values())) + self.buckets * self.bucket_s + self.after


class Laid(NamedTuple):
    """Seconds of a step; of its collectives of weights and gradients; and when no group computes."""

    seconds: float
    network: float
    exposed: float


class Clock:
    """When each stream of each group is free, and how long it was busy."""

    def __init__(self, merged: Collection[str] = ()):
        self.merged = merged  # the streams whose events wait for computation, and it for them
        self.free: dict[tuple[int, str], float] = defaultdict(float)
        self.busy: dict[tuple[int, str], float] = defaultdict(float)

    def run(self, group: int, stream: str, seconds: float, after: float = 0.0) -> float:
        """Put an event on a stream, no earlier than `after`; returns its end."""
        key = group, ("compute" if stream in self.merged else stream)
        self.free[key] = max(after, self.free[key]) + seconds
        self.busy[group, stream] += seconds
        return self.free[key]


def lay_out(work: Work, pieces: list[Pieces], clock: Clock) -> Laid:
    """Put all events of a step on the clock."""
    exposed = 0.0
    if work.parallelism.pp > 1:
        end, exposed = _pipeline(work, pieces, clock)
    else:
        end = _replicas(work, pieces[0], clock)
    network = max(clock.busy[group, "network"] for group in range(work.parallelism.pp))
    return Laid(end, network, exposed)


def step_seconds(work: Work, pieces: list[Pieces], merged: Collection[str]) -> Laid:
    """The seconds of a step of any number of micro batches."""
    number, pp = work.batch.grad_acc_steps, work.parallelism.pp
    rounds = _round_of(work) if work.parallelism.virtual > 1 else pp
    # A pipeline is in its stride once all groups have work, two rounds on.
    most = (2 if pp == 1 else 3) * rounds + number % rounds
    if number <= most + rounds:
        return lay_out(work, pieces, Clock(merged))

    def laid(n: int) -> Laid:
        batch = dataclasses.replace(work.batch, grad_acc_steps=n)
        return lay_out(dataclasses.replace(work, batch=batch), pieces, Clock(merged))

    fewer, more = laid(most), laid(most + rounds)
    times = (number - most - rounds) / rounds
    return Laid(*(b + times * (b - a) for a, b in zip(fewer, more, strict=True)))


def _replicas(work: Work, pieces: Pieces, clock: Clock) -> float:
    """One device, or replicas that reduce gradients while the backward goes on.

    FSDP: a block's gather is sent for when the block before begins, its reduction when it ends. Without
    prefetch a gather of the backward is sent for when the block before ends (FSDP1's BACKWARD_POST).
    Where weights stay gathered, it happens only in the first micro batch. DDP reduces full buckets, only
    in the last micro batch.
    """
    trainer, layers, end = work.trainer, list(pieces.forward), 0.0
    units = pieces.units or dict.fromkeys((-1, *layers), (0.0, 0.0))
    whole = trainer.zero < 3
    passes = [("forward", layers, pieces.forward, True)]
    if work.trains:
        reshard = bool(work.fsdp and work.fsdp.reshard) and not whole
        passes.append(("backward", layers[::-1], pieces.backward, reshard))
    n_micro, once = work.batch.grad_acc_steps, work.ddp or (work.fsdp and work.fsdp.reduce_last)
    filled = sent = 0.0
    for micro in range(n_micro):
        reduces = micro + 1 == n_micro or not (once or trainer.zero < 2)
        fetches = micro == 0 or not whole
        ready = clock.run(0, "network", fetches * units[-1][0], end)  # all but blocks
        for name, order, seconds, again in passes:
            gathers = again and fetches
            ready = clock.run(0, "network", gathers * units[order[0]][0], ready)
            for layer, coming in zip(order, [*order[1:], None], strict=True):
                start = max(ready, clock.free[0, "compute"])
                ahead = trainer.prefetch or name == "forward"
                if gathers and coming is not None and ahead:
                    ready = clock.run(0, "network", units[coming][0], start)
                end = clock.run(0, "compute", seconds[layer], start)
                if gathers and coming is not None and not ahead:
                    ready = clock.run(0, "network", units[coming][0], end)
                if name == "backward" and reduces:  # its gradients, or buckets that they filled
                    filled += pieces.filled.get(layer, 0.0)
                    full = int(filled - sent)
                    sent += full
                    clock.run(0, "network", units[layer][1] + full * pieces.bucket_s, end)
            if name == "forward":
                end = ready = clock.run(0, "compute", pieces.head)  # and the loss
            elif reduces:  # the rest
                left = (pieces.buckets - sent) * pieces.bucket_s
                end = clock.run(0, "network", units[-1][1] + left, end)
    end = clock.run(0, "compute", pieces.optimizer, end)
    return clock.run(0, "network", pieces.after, end)  # gather parameters


def _round_of(work: Work) -> int:
    """Micro batches that a virtual stage takes before the next stage's turn."""
    n_micro = work.batch.grad_acc_steps
    return n_micro // max(1, n_micro // work.parallelism.pp)


def _order(work: Work, group: int) -> Iterator[tuple[bool, int, int]]:
    """A group's (backward, stage, micro batch) in turn: as PyTorch's schedules have them."""
    pp, v, m = work.parallelism.pp, work.parallelism.virtual, work.batch.grad_acc_steps
    round_of = _round_of(work)

    def at(k: int, back: bool) -> tuple[bool, int, int]:
        chunk = k // round_of % v
        micro = k // (round_of * v) * round_of + k % round_of
        stage = (v - 1 - chunk if back else chunk) * pp + group
        return back, stage, micro

    total = m * v
    warm = pp - 1 - group if v == 1 else (v - 1) * round_of + 2 * (pp - 1 - group)
    warm = min(total, warm)
    for k in range(total + warm):
        if k < total:
            yield at(k, False)
        if k >= warm and work.trains:
            yield at(k - warm, True)


def _pipeline(work: Work, pieces: list[Pieces], clock: Clock) -> tuple[float, float]:
    """Groups take turns by the schedule; streams travel between them beside the computation.

    Returns the step's end, and the seconds before the first and after the last pass.
    """
    parallel, pp, stages = work.parallelism, work.parallelism.pp, work.parallelism.stages
    orders = [list(_order(work, group)) for group in range(pp)]
    gathered = [0.0] * stages
    seconds: list[tuple[float, float]] = []
    for stage in range(stages):
        group, layers = stage % pp, work.stage_layers(stage)
        piece = pieces[group]
        if stage < pp:
            clock.run(group, "network", piece.units[-1][0])  # gather all but blocks
        for layer in layers:
            gathered[stage] = clock.run(group, "network", piece.units[layer][0])
        head = piece.head if stage == stages - 1 else 0.0
        forward = sum(piece.forward[layer] for layer in layers) + head
        seconds.append((forward, sum(piece.backward[layer] for layer in layers)))
    # When the input of a pass of a stage for a micro batch is there.
    arrived = {(False, 0, micro): 0.0 for micro in range(work.batch.grad_acc_steps)}
    at, reducible, moved = [0] * pp, [0.0] * stages, True
    while moved:
        moved = False
        for group, order in enumerate(orders):
            while at[group] < len(order) and (start := arrived.get(order[at[group]])) is not None:
                back, stage, micro = order[at[group]]
                at[group] += 1
                moved, step = True, -1 if back else 1
                start = max(start, gathered[stage])
                end = clock.run(group, "compute", seconds[stage][back], start)
                if 0 <= stage + step < stages:
                    clock.run(group, "send", pieces[group].send_s, end)
                    arrived[back, stage + step, micro] = end + pieces[group].send_s
                elif not back:
                    arrived[True, stage, micro] = end
                reducible[stage] = end
    end, last = 0.0, max(clock.free[group, "compute"] for group in range(pp))
    for group, piece in enumerate(pieces):
        done = clock.free[group, "compute"]
        for stage in reversed(parallel.stages_of(group)) if work.trains else ():
            for layer in reversed(work.stage_layers(stage)):
                reduced = clock.run(group, "network", piece.units[layer][1], reducible[stage])
                done = max(done, reduced)
        done = clock.run(group, "network", piece.units[-1][1], done)  # reduce the rest
        end = max(end, clock.run(group, "compute", piece.optimizer, done))
    return end, gathered[0] + max(0.0, end - last - pieces[-1].optimizer)
