"""A step as events on streams, laid out in time where the formulas add up. Needs no torch.

Ranks that do the same are one: a group of a pipeline, or all. Each has a stream for computation, one for
its network, on which collectives wait for each other, and one for sends. Times of single events are the
formulas' (speed_model.py, collectives.py); what waits for what is simulated.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

from llm_train_bench.base.files import write_whole
from llm_train_bench.base.hardware import Hardware, constants
from llm_train_bench.formulas.collectives import (
    bucket_bytes,
    collective_time,
    ddp_bytes,
    send_time,
    token_time,
    unit_times,
)
from llm_train_bench.formulas.parameters import matrices, parameter_shapes
from llm_train_bench.formulas.speed_model import block_time, estimate_speed, head_time
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
    pp = work.fsdp.pp
    c = dataclasses.replace(constants(), **gpu.fitted)
    costs = _costs(work, gpu, per_node)
    clock = _Clock(gpu.platform == "cpu")
    if pp > 1:
        end = _pipeline(work, costs, clock, send_time(work, gpu, per_node, c))
    elif work.fsdp:
        end = _sharded(work, costs[0], clock)
    else:
        end = _replicated(work, costs[0], clock, gpu, per_node)
    slowest = 1.0 + c.slowest_node * math.log2(max(1.0, work.world / per_node))
    times = [(e, slowest * e.start_s, slowest * e.end_s) for e in clock.events]
    return [dataclasses.replace(e, start_s=s, end_s=t) for e, s, t in times], end * slowest


def _costs(work: Work, gpu: Hardware, per_node: int) -> list[_Costs]:
    """What each group's events take. Casts and copies counted in all lie on the blocks."""
    c = dataclasses.replace(constants(), **gpu.fitted)
    alone, micro = estimate_speed(work, gpu, per_node), work.batch.grad_acc_steps
    groups = []
    for group in range(work.fsdp.pp):
        layers = work.layers_of(group)
        passes = {i: [sum(part) for part in block_time(work, i, gpu, c)] for i in layers}
        last = work.config.num_hidden_layers - 1 in layers
        head = sum(head_time(work, gpu, c)) if last else 0.0
        groups.append((group, passes, sum(map(sum, passes.values())), head))
    # Of the slowest group: casts, copies, launches, what is lost beside communication.
    computed = alone.matmul_s + alone.attention_s + alone.memory_s + alone.beside_s
    counted = max(blocks + head for *_, blocks, head in groups)
    found = []
    for group, passes, blocks, head in groups:
        moves = token_time(work, gpu, per_node, c, group)
        whole = max(computed / micro, alone.host_s / micro - moves)
        stretch = max(1.0, whole / counted)
        each = stretch + (moves / blocks if blocks else 0.0)
        forward, backward = ({i: t[k] * each for i, t in passes.items()} for k in (0, 1))
        units = unit_times(work, gpu, per_node, c, group) if work.fsdp else {}
        found.append(_Costs(forward, backward, head * stretch, units, alone.optimizer_s))
    return found


def _sharded(work: Work, costs: _Costs, clock: _Clock) -> float:
    """FSDP2: a block's gather is sent for when the block before begins, its reduction when it ends."""
    layers, again = list(costs.forward), work.trains and work.fsdp.reshard
    end = 0.0
    for micro in range(work.batch.grad_acc_steps):
        clock.free[0, "compute"] = end
        ready = clock.run(0, "network", "gather the rest", costs.units[-1][0], end)
        ready = clock.run(0, "network", f"gather {layers[0]}", costs.units[layers[0]][0], ready)
        for layer, coming in zip(layers, [*layers[1:], None], strict=True):
            start = max(ready, clock.now(0, "compute"))
            if coming is not None:
                ready = clock.run(0, "network", f"gather {coming}", costs.units[coming][0], start)
            end = clock.run(0, "compute", f"forward {layer} #{micro}", costs.forward[layer], start)
        end = clock.run(0, "compute", f"head and loss #{micro}", costs.head)
        if not work.trains:
            continue
        ready = clock.run(
            0, "network", f"gather {layers[-1]}", again * costs.units[layers[-1]][0], end
        )
        for layer, coming in zip(layers[::-1], [*layers[-2::-1], None], strict=True):
            start = max(ready, clock.now(0, "compute"))
            if again and coming is not None:
                ready = clock.run(0, "network", f"gather {coming}", costs.units[coming][0], start)
            done = clock.run(
                0, "compute", f"backward {layer} #{micro}", costs.backward[layer], start
            )
            end = clock.run(0, "network", f"reduce {layer}", costs.units[layer][1], done)
        end = clock.run(0, "network", "reduce the rest", costs.units[-1][1], max(end, done))
    return clock.run(0, "compute", "optimizer", costs.optimizer, end)


def _replicated(work: Work, costs: _Costs, clock: _Clock, gpu: Hardware, per_node: int) -> float:
    """One device, or DDP: full buckets are reduced while the backward of the last micro batch goes on."""
    layers, micro_steps = list(costs.forward), work.batch.grad_acc_steps
    size, filled, done, bucket, overlap = 0.0, 0.0, 0.0, math.inf, False
    if work.ddp and work.trains:
        size = ddp_bytes(matrices(parameter_shapes(work.config)), work).get("all_reduce", 0.0)
        bucket, overlap = bucket_bytes(work, size), work.ddp.overlap
    numbers = work.block_parameters
    whole = sum(numbers) + work.config.padded_vocab_size * work.config.hidden_size
    end = 0.0
    for micro in range(micro_steps):
        for layer in layers:
            clock.run(0, "compute", f"forward {layer} #{micro}", costs.forward[layer])
        done = clock.run(0, "compute", f"head and loss #{micro}", costs.head)
        for layer in reversed(layers) if work.trains else ():
            done = clock.run(0, "compute", f"backward {layer} #{micro}", costs.backward[layer])
            if not size or micro + 1 < micro_steps:
                continue
            filled += size * numbers[layer] / whole
            full = int(filled // bucket) if overlap else 0
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
    """What a group does in turn: (forward or backward, stage, micro batch).

    1F1B, or interleaved (Narayanan et al. 2021, section 2.2), as PyTorch's schedules have them.
    """
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
    for k in range(warm):
        yield at(k, False)
    for k in range(total - warm):
        yield at(k + warm, False)
        yield at(k, True)
    for k in range(total - warm, total):
        yield at(k, True)


def _pipeline(work: Work, costs: list[_Costs], clock: _Clock, send_s: float) -> float:
    """Groups take turns by the schedule; streams travel between them beside the computation."""
    pp, stages = work.fsdp.pp, work.fsdp.stages
    orders = [list(_order(work, group)) for group in range(pp)]
    if not work.trains:
        orders = [[op for op in order if op[0] == "forward"] for order in orders]
    ends: dict[tuple[str, int, int], float] = {}
    at, ready = [0] * pp, {}
    for group, cost in enumerate(costs):
        clock.run(group, "network", "gather the rest", cost.units[-1][0])
        for stage in range(group, stages, pp):
            for layer in work.stage_layers(stage):
                ready[stage] = clock.run(group, "network", f"gather {layer}", cost.units[layer][0])

    def needed(what: str, stage: int, micro: int) -> float | None:
        """When its input is there; None if what makes it has not run yet."""
        if what == "forward":
            if stage == 0:
                return ready.get(stage, 0.0)
            before = ends.get(("forward", stage - 1, micro))
            return None if before is None else max(before + send_s, ready.get(stage, 0.0))
        if stage == stages - 1:
            return ends.get(("forward", stage, micro))
        after = ends.get(("backward", stage + 1, micro))
        return None if after is None else after + send_s

    moved = True
    while moved:
        moved = False
        for group, cost in enumerate(costs):
            while at[group] < len(orders[group]):
                op = what, stage, micro = orders[group][at[group]]
                when = needed(*op)
                if when is None:
                    break
                part = cost.forward if what == "forward" else cost.backward
                seconds = sum(part[layer] for layer in work.stage_layers(stage))
                if what == "forward" and stage == stages - 1:
                    seconds += cost.head
                name = f"{what} stage {stage} #{micro}"
                ends[op] = clock.run(group, "compute", name, seconds, when)
                if (what == "forward" and stage < stages - 1) or (what == "backward" and stage):
                    clock.run(group, "send", name, send_s, ends[op])
                at[group] += 1
                moved = True
    end = 0.0
    for group, cost in enumerate(costs):
        done = clock.now(group, "compute")
        for stage in reversed(range(group, stages, pp)) if work.trains else ():
            last = max(t for (what, s, _), t in ends.items() if s == stage and what == "backward")
            for layer in reversed(work.stage_layers(stage)):
                ended = clock.run(group, "network", f"reduce {layer}", cost.units[layer][1], last)
                done = max(done, ended)
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
    content += [
        {
            "ph": "X", "cat": "simulated", "name": e.name, "pid": e.group, "tid": streams[e.stream],
            "ts": 1e6 * e.start_s, "dur": 1e6 * (e.end_s - e.start_s),
        }
        for e in events]  # fmt: skip
    write_whole(path, json.dumps({"traceEvents": content}) + "\n")
