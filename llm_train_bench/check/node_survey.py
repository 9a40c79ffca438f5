"""Which node or link of a job is slow: each node by itself, then pairs, then all ranks together."""

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from llm_train_bench.base.children import private_directory
from llm_train_bench.base.errors import NotJoined, UsageError, one_line
from llm_train_bench.base.hardware import device_called
from llm_train_bench.base.tables import grouped, markdown_table, number
from llm_train_bench.check import fabric
from llm_train_bench.check.collective_rates import MIB, collective_rates
from llm_train_bench.measure.device import device_name, pick_device, synchronize
from llm_train_bench.measure.matmul_rate import device_tflops
from llm_train_bench.parallel.ranks import MEETING, Ranks, find_ranks, gather, join, leave, meet

# Launchers' variables for the number of a rank's node.
NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK", "NODE_RANK")
# A node or link below this part of the others' rate fails. Each is measured several times, and the best
# counts: what disturbs one for a moment is no slow node.
SLOW, SLOW_LINK = 0.8, 0.6
PROBES, EXCHANGES = 3, 7
# A smaller exchange would say how long a launch takes: NVLink needs a gibibyte.
EXCHANGED_MIB = {"cpu": 16, "cuda": 1024}
# Up to so many nodes are measured one after the other, and pairs one at a time.
FEW_NODES, MOST_ROUNDS = 16, 31
SIZES_MIB = (1, 64)
# The worst first.
VERDICTS = ("fail", "not judged", "pass")
# Ranks that do not answer for so long are gone [s].
TIMEOUT_S = 300


@dataclasses.dataclass
class Unit:
    """A node with its ranks; of a job on one node, a rank with its device."""

    name: str
    ranks: list[int]
    tflops: float = 0.0
    """Of its slowest device by itself."""
    gb_per_s: float | None = None
    """Of its fastest link to another."""
    host: str = ""
    """The name of a node among several."""
    failed: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Link:
    """A pair of units, by their places in the survey, and its rate.

    `nominal_gb_per_s` is that of its cards or its NVLink together, None where unknown. `verdict` and
    `why` are by that rate and by the other links.
    """

    units: tuple[int, int]
    gb_per_s: float
    transport: str = ""
    nominal_gb_per_s: float | None = None
    verdict: str = "not judged"
    why: str = ""
    cause: str = "look at its cards and switches"


@dataclasses.dataclass
class Survey:
    """The units, the links of all pairs, and all ranks' collectives."""

    device: str
    units: list[Unit]
    links: list[Link]
    collectives: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data, with a `verdict` on all: `pass`, `fail`, or `not judged`."""
        verdicts = [link.verdict for link in self.links]
        verdicts += ["fail" for unit in self.units if unit.failed]
        verdict = min(verdicts, key=VERDICTS.index, default="pass")
        exclude = ",".join(unit.host for unit in self.units if unit.failed and unit.host)
        return dataclasses.asdict(self) | {"verdict": verdict, "exclude": exclude}


def find_units(ranks: Ranks) -> list[Unit]:
    """The job's nodes by what the launcher says, or by host names; its ranks where there is one node."""
    number = next((os.environ[name] for name in NODE_NUMBERS if name in os.environ), None)
    told = gather(ranks, (number, platform.node()))
    nodes = grouped(range(ranks.world), lambda rank: told[rank])
    if len(nodes) == 1:
        return [Unit(f"rank {rank}", [rank]) for rank in range(ranks.world)]
    parts = enumerate(nodes.items())
    return [Unit(f"node {i} ({host})", members, host=host) for i, ((_, host), members) in parts]


def rounds_of(n: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of n units once, in rounds of pairs that share none (the circle method).

    Few units take one pair at a time, so that no pair disturbs another.
    """
    order: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    for _ in range(min(len(order) - 1, MOST_ROUNDS)):
        half = len(order) // 2
        pairs = zip(order[:half], reversed(order[half:]), strict=True)
        found = [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        yield from [[pair] for pair in found] if n <= FEW_NODES else [found]
        order[1:] = [order[-1], *order[1:-1]]


def exchange_rate(peer: int, device: torch.device) -> float:
    """GB/s in each direction between this rank and another, which calls this too; both at once."""
    size = EXCHANGED_MIB[device.type] * MIB
    own = torch.randn(size // 4, device=device)
    other = torch.empty_like(own)
    times = []
    for _ in range(EXCHANGES + 1):
        start = time.perf_counter()
        both = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return size / min(times[1:]) / 1e9


def survey(device: torch.device, ranks: Ranks, log: Path) -> Survey:
    """Measure and judge; all ranks of a process group call it, and all have the answer.

    `log`: where NCCL tells this rank's connections.
    """
    units = find_units(ranks)
    mine = next(i for i, unit in enumerate(units) if ranks.rank in unit.ranks)
    rate = 0.0
    for turn in range(len(units)) if len(units) <= FEW_NODES else (mine,):
        meet(ranks)
        if turn == mine:
            rate = max(device_tflops(device) for _ in range(PROBES))
    rates = gather(ranks, rate)
    for unit in units:
        unit.tflops = min(rates[rank] for rank in unit.ranks)
    links = []
    for pairs in rounds_of(len(units)):
        meet(ranks)
        pair = next((pair for pair in pairs if mine in pair), None)
        found = None
        if pair:
            other = units[pair[0] + pair[1] - mine].ranks
            place = units[mine].ranks.index(ranks.rank)
            if place < min(len(other), len(units[mine].ranks)):
                found = exchange_rate(other[place], device)
        told = [each for each in gather(ranks, (pair, found)) if each[1] is not None]
        for one in pairs:  # its ranks share the node's cards
            links.append(Link(one, sum(rate for which, rate in told if which == one) / 2))
    together = collective_rates(device, SIZES_MIB, 3)
    result = Survey(device_name(device), units, links, together)
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    known = gather(ranks, (fabric.transports_of(text, ranks.rank), fabric.cause_of_tcp(text)))
    for link in links:
        pairs = list(zip(*(units[i].ranks for i in link.units), strict=False))
        kinds = [kind for a, b in pairs if (kind := known[a][0].get(b) or known[b][0].get(a))]
        link.transport = ", ".join(sorted({*kinds})) or ("gloo" if device.type == "cpu" else "")
        nominal = fabric.nominal_of(link.transport, device_called(result.device))
        link.nominal_gb_per_s = nominal and nominal * len(pairs)
        if "TCP" in link.transport:
            link.cause = known[pairs[0][0]][1]
    judge_survey(result)
    return result


def judge_survey(s: Survey) -> None:
    """Mark slow nodes and links, in place, by the others and by the rates that they should have.

    If all links of a node are slow beside the others, it is the node's fault.
    """
    usual = statistics.median_high(unit.tflops for unit in s.units)
    for unit in s.units:
        if unit.tflops < SLOW * usual:
            unit.failed.append(f"computes at {unit.tflops / usual:.0%} of the median")
    if not s.links:
        return
    # Of n nodes one slow one is in 2 / n of all pairs: the upper quartile is a whole one's.
    fine = sorted(link.gb_per_s for link in s.links)[(3 * len(s.links)) // 4]
    for i, unit in enumerate(s.units):
        own = [link.gb_per_s for link in s.links if i in link.units]
        unit.gb_per_s = max(own, default=None)
        if len(s.units) > 2 and unit.gb_per_s is not None and unit.gb_per_s < SLOW_LINK * fine:
            unit.failed.append(f"sends at {unit.gb_per_s / fine:.0%} of the others' rate")
    for link in s.links:
        rates = link.gb_per_s, link.nominal_gb_per_s
        link.verdict, link.why = fabric.judged_link(link.transport, *rates)
        of_node = any("sends" in text for i in link.units for text in s.units[i].failed)
        if link.gb_per_s < SLOW_LINK * fine and not of_node:
            link.verdict = "fail"


def survey_job(nproc: int | None, as_json: bool) -> int:
    """Join the launcher's ranks, or start `nproc`; rank 0 prints. 0; 1 for a slow part; 5 if unsure."""
    ranks = find_ranks(os.environ)
    if ranks is None:
        n = nproc or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
        if n < 2:
            raise UsageError(
                "--nodes: one rank has nothing to compare; give --nproc, or start several"
            )
        told = survey_here(n)
    else:
        try:
            told = survey_by(ranks)
        except (NotJoined, RuntimeError) as error:
            print(f"check.py: rank {ranks.rank}: {one_line(error)}", file=sys.stderr)
            return 1
        if not ranks.main:
            return 0
    if as_json:
        print(json.dumps(told, indent=1))
    else:
        show_survey(told)
    return {"pass": 0, "fail": 1}.get(told["verdict"], 5)


def survey_here(n: int) -> dict[str, Any]:
    """The survey of n ranks that are started on this machine, as JSON data; UsageError if one fails."""
    with private_directory() as private:
        try:
            spawn(_rank_of_survey, (n, str(private)), n)
        except (ProcessRaisedException, ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise UsageError(f"a rank of the survey failed: {last}") from None
        return json.loads((private / "survey.json").read_text(encoding="utf-8"))


def _rank_of_survey(rank: int, n: int, private: str) -> None:
    os.environ[MEETING] = private
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    told = survey_by(Ranks(rank, n, rank))
    if rank == 0:
        (Path(private) / "survey.json").write_text(json.dumps(told), encoding="utf-8")


def survey_by(ranks: Ranks) -> dict[str, Any]:
    """The survey of these ranks, as JSON data; they join for it, and leave."""
    device = pick_device("auto", ranks.local_rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    with fabric.listening() as log:
        join(ranks, device, TIMEOUT_S)
        told = survey(device, ranks, log).as_json()
        leave()
    return told


def show_survey(told: dict[str, Any]) -> None:
    """Print a line a node, the slow links, and the collectives of all, from a survey's JSON data."""
    columns = ("node", "ranks", "slowest device: TFLOP/s", "fastest link: GB/s", "verdict")
    rows = []
    for unit in told["units"]:
        verdict = f"FAIL: {'; '.join(unit['failed'])}" if unit["failed"] else "pass"
        ranks = "-".join(str(unit["ranks"][i]) for i in sorted({0, len(unit["ranks"]) - 1}))
        rate, link = number(unit["tflops"], ".4g"), number(unit["gb_per_s"], ".2f")
        rows.append((unit["name"], ranks, rate, link, verdict))
    title = f"{sum(len(unit['ranks']) for unit in told['units'])} ranks, {told['device']}"
    print(markdown_table(columns, rows, left=("verdict",), title=title), end="")
    _show_links(told)
    for line in fabric.failures_of(told):
        print(f"FAIL: {line}")
    rows = [
        (x["kind"], f"{x['mib']:g}", f"{1e3 * x['seconds']:.3f}", f"{x['bus_gb_per_s']:.2f}")
        for x in told["collectives"]
    ]
    print(markdown_table(("all ranks", "MiB", "ms", "bus GB/s"), rows), end="")
    if told["exclude"]:
        print(f"to leave the nodes that failed out: sbatch --exclude={told['exclude']}")
    if told["verdict"] == "pass":
        print("pass: no node and no link is slow")
    elif told["verdict"] == "not judged":
        print("no node and no link is slower than the others; not all rates could be judged")


def _show_links(told: dict[str, Any]) -> None:
    """A line for each kind of link: its rates, and those that it should have."""
    rows = []
    kinds = grouped(told["links"], lambda x: (x["transport"], x["nominal_gb_per_s"]))
    for (transport, nominal), links in kinds.items():
        links.sort(key=lambda link: link["gb_per_s"])
        rates = [links[i]["gb_per_s"] for i in (0, len(links) // 2, -1)]
        worst = min(links, key=lambda link: VERDICTS.index(link["verdict"]))
        verdict = f"{worst['verdict']}: {worst['why']}"
        shown = (f"{rate:.3g}" for rate in rates)
        name, nominal_rate = transport or "unknown", number(nominal, "g")
        rows.append((name, str(len(links)), *shown, nominal_rate, verdict))
    columns = ("links by", "pairs", "GB/s: lowest", "median", "highest", "nominal", "verdict")
    print(markdown_table(columns, rows), end="")
