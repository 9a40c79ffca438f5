"""A step as events on streams, laid out in time where the formulas add up. Needs no torch.

Ranks that do the same are one: a group of a pipeline, or all. Each has a stream for computation, one for
its network, on which collectives wait for each other, and one for sends. Times of single events are the
formulas' (speed_model.py, collectives.py); what waits for what is simulated.
"""

import dataclasses
import functools
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from llm_train_bench.base.files import write_whole
from llm_train_bench.base.hardware import Hardware
from llm_train_bench.formulas.collectives import (
    bucket_bytes,
    collective_time,
    ddp_bytes,
    send_time,
    token_time,
    unit_times,
)
from llm_train_bench.formulas.parameters import matrices, parameter_shapes
from llm_train_bench.formulas.speed_model import block_time, estimate_speed, head_time, slowest_node
from llm_train_bench.formulas.work import Work


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a group of like ranks does on one of its streams; seconds from the step's start."""

    group: int
    stream: str
    name: str
    start_s: float
    end_s: float


class _Clock:
    """The events so far, and when each stream of each group is free."""

    def __init__(self, one_stream: bool):
        self.one_stream = one_stream  # a CPU, where exchanges take the cores that compute
        self.events: list[Event] = []
        self.free: dict[tuple[int, str], float] = {}

    def run(self, group: int, stream: str, name: str, seconds: float, after: float = 0.0) -> float:
        """Put an event on a stream, no earlier than `after`; returns its end."""
        stream = "compute" if self.one_stream else stream
        start = max(after, self.free.get((group, stream), 0.0))
        if seconds:
            self.events.append(Event(group, stream, name, start, start + seconds))
        self.free[group, stream] = start + seconds
        return start + seconds

    def now(self, group: int, stream: str) -> float:
        stream = "compute" if self.one_stream else stream
        return self.free.get((group, stream), 0.0)


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Seconds of what a group does: forward and backward of blocks, head, collectives of units."""

    forward: dict[int, float]
    backward: dict[int, float]
    head: float
    units: dict[int, tuple[float, float]]
    optimizer: float


def simulate_step(work: Work, gpu: Hardware, per_node: int = 8) -> tuple[list[Event], float]:
    """The events of a step, and its seconds."""
    costs, clock = _costs(work, gpu, per_node), _Clock(gpu.platform == "cpu")
    if work.fsdp.pp > 1:
        end = _pipeline(work, costs, clock, send_time(work, gpu, per_node))
    elif work.fsdp:
        end = _sharded(work, costs[0], clock)
    else:
        end = _replicated(work, costs[0], clock, gpu, per_node)
    slowest = slowest_node(work, gpu, per_node)
    times = [(e, slowest * e.start_s, slowest * e.end_s) for e in clock.events]
    return [dataclasses.replace(e, start_s=s, end_s=t) for e, s, t in times], end * slowest


def _costs(work: Work, gpu: Hardware, per_node: int) -> list[_Costs]:
    """What each group's events take. Casts and copies counted in all lie on the blocks."""
    alone, micro = estimate_speed(work, gpu, per_node), work.batch.grad_acc_steps
    groups = []
    for group in range(work.fsdp.pp):
        layers = work.layers_of(group)
        passes = {i: [sum(part) for part in block_time(work, i, gpu)] for i in layers}
        last = work.config.num_hidden_layers - 1 in layers
        head = sum(head_time(work, gpu)) if last else 0.0
        groups.append((group, passes, sum(map(sum, passes.values())), head))
    # Of the slowest group: casts, copies, launches, what is lost beside communication.
    computing = ("matmuls", "attention", "memory-bound", "beside communication")
    computed = sum(alone.parts[name] for name in computing)
    counted = max(blocks + head for *_, blocks, head in groups)
    costs = []
    for group, passes, blocks, head in groups:
        moves = token_time(work, gpu, per_node, group)
        whole = max(computed / micro, alone.host_s / micro - moves)
        stretch = max(1.0, whole / counted)
        each = stretch + (moves / blocks if blocks else 0.0)
        forward, backward = ({i: t[k] * each for i, t in passes.items()} for k in (0, 1))
        units = unit_times(work, gpu, per_node, group) if work.fsdp else {}
        costs.append(_Costs(forward, backward, head * stretch, units, alone.parts["optimizer"]))
    return costs


def _sharded(work: Work, costs: _Costs, clock: _Clock) -> float:
    """FSDP2: a block's gather is sent for when the block before begins, its reduction when it ends."""
    compute, network = (functools.partial(clock.run, 0, x) for x in ("compute", "network"))
    layers, units, end = list(costs.forward), costs.units, 0.0
    passes = [("forward", layers, costs.forward, True)]
    if work.trains:
        passes.append(("backward", layers[::-1], costs.backward, work.fsdp.reshard))
    n_micro = work.batch.grad_acc_steps
    for micro in range(n_micro):
        reduces = micro + 1 == n_micro or not work.fsdp.reduce_last
        ready = network("gather the rest", units[-1][0], end)
        for name, order, seconds, gathers in passes:
            ready = network(f"gather {order[0]}", gathers * units[order[0]][0], ready)
            for layer, coming in zip(order, [*order[1:], None], strict=True):
                start = max(ready, clock.now(0, "compute"))
                if gathers and coming is not None:
                    ready = network(f"gather {coming}", units[coming][0], start)
                end = compute(f"{name} {layer} #{micro}", seconds[layer], start)
                if name == "backward" and reduces:
                    network(f"reduce {layer}", units[layer][1], end)
            if name == "forward":
                end = ready = compute(f"head and loss #{micro}", costs.head)
            elif reduces:
                end = network("reduce the rest", units[-1][1], end)
    return compute("optimizer", costs.optimizer, end)


def _replicated(work: Work, costs: _Costs, clock: _Clock, gpu: Hardware, per_node: int) -> float:
    """One device, or DDP: full buckets are reduced while the backward of the last micro batch goes on."""
    layers, micro_steps = list(costs.forward), work.batch.grad_acc_steps
    size = ddp_bytes(matrices(parameter_shapes(work.config)), work).get("all_reduce", 0.0)
    bucket = bucket_bytes(work, size)
    numbers = work.block_parameters
    whole = sum(numbers) + work.config.padded_vocab_size * work.config.hidden_size
    filled = done = end = 0.0
    for micro in range(micro_steps):
        for layer in layers:
            clock.run(0, "compute", f"forward {layer} #{micro}", costs.forward[layer])
        done = clock.run(0, "compute", f"head and loss #{micro}", costs.head)
        for layer in reversed(layers) if work.trains else ():
            done = clock.run(0, "compute", f"backward {layer} #{micro}", costs.backward[layer])
            if not size or micro + 1 < micro_steps:
                continue
            filled += size * numbers[layer] / whole
            full = int(filled // bucket) if work.ddp.overlap else 0
            if full:
                seconds = full * collective_time("all_reduce", bucket, work.world, per_node, gpu)
                end = clock.run(0, "network", f"reduce {full} buckets", seconds, done)
                filled -= full * bucket
    if size:
        left = filled + size * (1 - sum(numbers) / whole)
        seconds = left / bucket * collective_time("all_reduce", bucket, work.world, per_node, gpu)
        end = clock.run(0, "network", "reduce the last buckets", seconds, done)
    return clock.run(0, "compute", "optimizer", costs.optimizer, max(end, done))


def _order(work: Work, group: int) -> Iterator[tuple[str, int, int]]:
    """A group's (pass, stage, micro batch) in turn: 1F1B or interleaved, as PyTorch has them."""
    pp, v, m = work.fsdp.pp, work.fsdp.virtual, work.batch.grad_acc_steps
    round_of = m // max(1, m // pp)  # micro batches a stage takes before the next stage's turn

    def at(k: int, back: bool) -> tuple[str, int, int]:
        chunk = k // round_of % v
        micro = k // (round_of * v) * round_of + k % round_of
        stage = (v - 1 - chunk if back else chunk) * pp + group
        return ("backward" if back else "forward"), stage, micro

    total = m * v
    warm = pp - 1 - group if v == 1 else (v - 1) * round_of + 2 * (pp - 1 - group)
    warm = min(total, warm)
    for k in range(total + warm):
        if k < total:
            yield at(k, False)
        if k >= warm and work.trains:
            yield at(k - warm, True)


def _pipeline(work: Work, costs: list[_Costs], clock: _Clock, send_s: float) -> float:
    """Groups take turns by the schedule; streams travel between them beside the computation."""
    pp, stages = work.fsdp.pp, work.fsdp.stages
    orders = [deque(_order(work, group)) for group in range(pp)]
    gathered, reducible = dict.fromkeys(range(stages), 0.0), {}
    for group, cost in enumerate(costs):
        clock.run(group, "network", "gather the rest", cost.units[-1][0])
        for stage in range(group, stages, pp):
            for layer in work.stage_layers(stage):
                seconds = cost.units[layer][0]
                gathered[stage] = clock.run(group, "network", f"gather {layer}", seconds)
    # When the input of a pass of a stage for a micro batch is there.
    arrived = {("forward", 0, micro): 0.0 for micro in range(work.batch.grad_acc_steps)}
    while any(orders):
        for group, (order, cost) in enumerate(zip(orders, costs, strict=True)):
            while order and order[0] in arrived:
                start = arrived[order[0]]
                what, stage, micro = order.popleft()
                part, step = (cost.forward, 1) if what == "forward" else (cost.backward, -1)
                seconds = sum(part[layer] for layer in work.stage_layers(stage))
                if what == "forward" and stage == stages - 1:
                    seconds += cost.head
                name = f"{what} stage {stage} #{micro}"
                end = clock.run(group, "compute", name, seconds, max(start, gathered[stage]))
                if 0 <= stage + step < stages:
                    clock.run(group, "send", name, send_s, end)
                    arrived[what, stage + step, micro] = end + send_s
                elif what == "forward":
                    arrived["backward", stage, micro] = end
                reducible[stage] = end
    end = 0.0
    for group, cost in enumerate(costs):
        done = clock.now(group, "compute")
        for stage in reversed(range(group, stages, pp)) if work.trains else ():
            for layer in reversed(work.stage_layers(stage)):
                seconds = cost.units[layer][1]
                reduced = clock.run(group, "network", f"reduce {layer}", seconds, reducible[stage])
                done = max(done, reduced)
        done = clock.run(group, "network", "reduce the rest", cost.units[-1][1], done)
        end = max(end, clock.run(group, "compute", "optimizer", cost.optimizer, done))
    return end


def write_trace(events: list[Event], path: Path, names: dict[int, str]) -> None:
    """The events as a Chrome trace, which Perfetto opens; a process for each group of ranks."""
    streams = {"compute": 1, "network": 2, "send": 3}
    content: list[dict] = []
    for group, name in names.items():
        content.append({"ph": "M", "pid": group, "name": "process_name", "args": {"name": name}})
        content += [
            {"ph": "M", "pid": group, "tid": t, "name": "thread_name", "args": {"name": stream}}
            for stream, t in streams.items()
        ]
    for e in events:
        place = {"ph": "X", "cat": "simulated", "pid": e.group, "tid": streams[e.stream]}
        times = {"ts": 1e6 * e.start_s, "dur": 1e6 * (e.end_s - e.start_s)}
        content.append(place | {"name": e.name} | times)
    write_whole(path, json.dumps({"traceEvents": content}) + "\n")
