"""How data goes from rank to rank, by NCCL's and RCCL's own lines, and how fast that should be."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench.base.children import private_directory
from llm_train_bench.base.hardware import Hardware

# What NCCL 2.18 to 2.30 and RCCL print on a connection at its first use:
# "Channel 00/1 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/1(2)/GDRDMA/Shared".
_VIA = re.compile(
    r"(?:Channel|Ring) +\d+(?:/\d+)? : (\d+)(?:\[[0-9a-f]+\])? -> (\d+)(?:\[[0-9a-f]+\])?"
    r"(?: \[(?:send|receive)\])? via (P2P|SHM|direct shared memory|NET/([^/\n]+?)/\d+)"
)
_NETWORKS = (
    ("TCP sockets", r"(Fast)?Socket"),
    ("EFA", r"(AWS )?Libfabric"),
    ("libfabric", "OFI"),
    ("RDMA", r"IB|IB-CAST|IBext(_v\d+)?|SPCX|UCX|gIB"),
    ("GPUDirect-TCPX", r"FasTrak|GPUDirectTCPX(_v\d+)?"),
)
# The libfabric plugin may itself be on TCP, or on another card than EFA.
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^ ,]+)")
_PROVIDERS = dict.fromkeys(("tcp", "sockets", "udp"), "TCP sockets") | {"cxi": "Slingshot"}
_CHOSEN = re.compile(r"(NCCL_IB_DISABLE|NCCL_NET) set by environment to (1|Socket)\b")
_NO_CARD = re.compile(r"NET/IB ?: No device found|Failed to open libibverbs")
_NO_PLUGIN = re.compile(r"NET/Plugin ?: .*(No plugin found|Could not find)")
# Below these parts of the nominal rate a link fails, or it is uncertain. Published: TCP in the place of
# RDMA 1 to 12 %, a broken RoCE 26 %, RDMA without GPUDirect 37 to 48 %, healthy links 59 to 97 %.
FAILS, UNCERTAIN = 0.3, 0.6


@contextlib.contextmanager
def listening() -> Iterator[Path]:
    """A file in which NCCL and RCCL, started within, tell this process's connections."""
    with private_directory() as private:
        log = private / "nccl.log"
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,P2P,SHM",
            "NCCL_DEBUG_FILE": str(log),
        }
        yield log


def transports_of(text: str, rank: int) -> dict[int, str]:
    """How a rank's data goes to and comes from others, by the lines of its log: by their numbers."""
    found = {}
    provider = next((m[1].partition(";")[0] for m in _PROVIDER.finditer(text)), "")
    for match in _VIA.finditer(text):
        ends = {int(match[1]), int(match[2])}
        if rank in ends and len(ends) == 2:
            (peer,) = ends - {rank}
            found[peer] = _kind(match[3], match[4], provider)
    return found


def _kind(via: str, network: str | None, provider: str) -> str:
    if network is None:
        return "peer access" if via == "P2P" else "host memory"
    known = (kind for kind, names in _NETWORKS if re.fullmatch(names, network))
    kind = next(known, f"network plugin {network}")
    return _PROVIDERS.get(provider, kind) if kind in ("EFA", "libfabric") else kind


def cause_of_tcp(text: str) -> str:
    """Why NCCL took TCP sockets, by its own lines."""
    if match := _CHOSEN.search(text):
        return f"{match[1]}={match[2]} is set"
    if match := _PROVIDER.search(text):
        return f"the libfabric plugin took the provider {match[1]}"
    if _NO_CARD.search(text):
        plugin = " or EFA plugin" if _NO_PLUGIN.search(text) else " device"
        return f"no InfiniBand{plugin} was found"
    return "NCCL says nothing of the cause"


def nominal_of(transport: str, gpu: Hardware | None) -> float | None:
    """GB/s, one way, that a link of two GPUs should have; None where the list has no such rate."""
    if gpu is None or not transport or "host memory" in transport:
        return None
    if transport == "peer access":
        return gpu.peer_gb_per_s or gpu.ring_gb_per_s
    return gpu.nic_gb_per_s


def judged_link(transport: str, rate: float, nominal: float | None) -> tuple[str, str]:
    """`pass`, `fail` or `not judged` of a link by itself, and why; a rate in GB/s."""
    part = rate / nominal if nominal else None
    if "TCP sockets" in transport:
        return "fail", f"TCP sockets: {rate:.3g}{f' of {nominal:g}' if nominal else ''} GB/s"
    if "host memory" in transport:
        return "not judged", f"{rate:.3g} GB/s through the host's memory: no peer access"
    if part is None:
        return "not judged", "no nominal rate is known"
    text = f"{transport}: {rate:.3g} of {nominal:g} GB/s ({part:.0%})"
    return ("fail" if part < FAILS else "not judged" if part < UNCERTAIN else "pass"), text


def failures_of(told: dict[str, Any]) -> Sequence[str]:
    """The lines of a survey's JSON that say what is slow."""
    units = told["units"]
    lines = [f"{unit['name']}: {text}" for unit in units for text in unit["failed"]]
    failed = [link for link in told["links"] if link["verdict"] == "fail"]
    if failed and len(failed) == len(told["links"]):  # it is the fabric, not a link
        return [*lines, f"every link is too slow: {failed[0]['why']}: {failed[0]['cause']}"]
    by_node = {i for i, unit in enumerate(units) if any("sends" in text for text in unit["failed"])}
    for link in (link for link in failed if not by_node & {*link["units"]}):
        a, b = (units[i]["name"] for i in link["units"])
        lines.append(f"the link between {a} and {b} is slow: {link['why']}")
    return lines
