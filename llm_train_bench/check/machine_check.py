"""One check of this machine: findings, rates, workloads, and what they amount to. Needs no torch."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llm_train_bench import __version__
from llm_train_bench.base.children import run_child
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import ROOT
from llm_train_bench.base.hardware import Hardware, device_called, name_of_part
from llm_train_bench.base.machine import Platform
from llm_train_bench.base.tables import markdown_table, number
from llm_train_bench.base.tool_main import print_apart
from llm_train_bench.check import findings
from llm_train_bench.check.fabric import failures_of
from llm_train_bench.check.findings import Finding
from llm_train_bench.check.references import (
    Reached,
    Reference,
    judge_machine,
    rate_figures,
    workload_figure,
)
from llm_train_bench.check.workloads import Workload, format_of, workload_of
from llm_train_bench.compare.gate import unusable
from llm_train_bench.compare.records import Record
from llm_train_bench.results.remarks import device_remarks
from llm_train_bench.results.result_files import read_result, read_steps, storable
from llm_train_bench.results.schema import DeviceUse, Result

# A rate is measured for so many seconds.
PROBE_SECONDS = 0.3
# A process that measures rates has ended after this time, or is stuck [s].
LONGEST_PROBE_S = 300


@dataclasses.dataclass
class MachineCheck:
    """All that a check found."""

    device: str
    count: int
    figures: list[Reached]
    findings: list[Finding]
    verdict: str = "not judged"
    part: float | None = None
    about: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        figures = [dataclasses.asdict(f) | {"part": f.part} for f in self.figures]
        told = {"version": __version__} | dataclasses.asdict(self) | {"figures": figures}
        return storable(told)


def probe_device(device: str, directory: Path) -> dict[str, Any]:
    """What check/probe.py measures, in a process that frees the device; UsageError if it fails."""
    path = directory.resolve() / "rates.json"
    command = [sys.executable, "-m", "llm_train_bench.check.probe", path, device, PROBE_SECONDS]
    try:
        code, errors = run_child(command, LONGEST_PROBE_S, cwd=ROOT)
    except subprocess.TimeoutExpired:
        why = f"the rates took more than {LONGEST_PROBE_S} s: is the device stuck?"
        raise UsageError(why) from None
    if code:
        last = (errors.strip() or "no message").splitlines()[-1]
        raise UsageError(f"the rates cannot be measured: {last}")
    return json.loads(path.read_text(encoding="utf-8"))


def survey_figures(
    told: dict[str, Any], hardware: Hardware | None, found: list[Finding]
) -> Iterator[Reached]:
    """The bus bandwidths of the largest collectives; slow devices and links become findings."""
    for line in failures_of(told):
        advice = "look at its clocks, power and links; leave it out if that does not help"
        found.append(Finding("slow device or link", "warn", line, advice))
    largest = max(row["mib"] for row in told["collectives"])
    reference = None
    if hardware and hardware.platform != "cpu":
        ring, source = hardware.ring_gb_per_s, "ring_gb_per_s of configs/hardware.json"
        reference = Reference("published", ring, ring, ring, source)
    for row in told["collectives"]:
        if row["mib"] == largest and row["kind"] in ("all_gather", "reduce_scatter"):
            yield Reached(row["kind"].replace("_", "-"), "bus GB/s", row["bus_gb_per_s"], reference)


def run_workload(w: Workload, ranks: int, directory: Path) -> tuple[Result | None, str]:
    """A workload's result on all devices, or why there is none."""
    script = "train_ddp.py" if ranks > 1 else "train.py"
    command = [sys.executable, str(ROOT / script), "--from", str(w.path), "--output-dir", directory]
    command += ["--run-name", w.name, *(["--nproc", ranks] if ranks > 1 else [])]
    code, errors = run_child(command)
    if code:
        lines = [line for line in errors.splitlines() if line.startswith(script)]
        return None, (lines or errors.splitlines() or [f"exit code {code}"])[-1]
    return read_result(directory / w.name / "result.json"), ""


def check_machine(
    kind: Platform,
    chosen: Sequence[Workload],
    ranks: int,
    directory: Path,
    at_least: float,
    others: Sequence[Record],
) -> MachineCheck:
    """Measure everything and judge it, also by the runs of others."""
    device = "cpu" if kind == "cpu" else "cuda"
    found = [f for f in findings.of_machine(kind) if f.state != "ok" and not f.optional]
    print_apart("check.py", "rates ...")
    told = probe_device(device, directory)
    rates = told["rates"]
    hardware = device_called(name_of_part(told["device"], told["memory_gib"]))
    if ranks == 1 and (entry := rates.get("entry")):
        hardware = Hardware(**entry)
    result = MachineCheck(told["device"], ranks, list(rate_figures(rates, hardware)), found)
    if ranks > 1:
        from llm_train_bench.check.node_survey import survey_here  # needs torch

        print_apart("check.py", "nodes ...")
        result.figures += list(survey_figures(survey_here(ranks), hardware, found))
    found += findings.of_remarks(device_remarks(DeviceUse(**told["use"])), "rates")
    found += findings.of_rates(rates)
    for w in chosen:
        print_apart("check.py", f"{w.name} ...")
        run, why = run_workload(w, ranks, directory)
        if run is None:
            result.figures.append(Reached(w.name, "tokens/s", None, missing=why, workload=True))
            continue
        measured = reached_by_others(others, w, run.device.hardware, ranks)
        result.figures.append(workload_figure(w, run, hardware, measured))
        found += findings.of_remarks(run.remarks, run.run_name)
        steps = read_steps(directory / w.name / "steps.jsonl")
        if wrong := w.wrong_steps(format_of(run), steps):
            advice = "this machine computes something else: test its memory, update its libraries"
            found.append(Finding(f"{w.name}: wrong numbers", "bad", wrong, advice))
    result.verdict, result.part, result.about = judge_machine(result.figures, at_least)
    if any(f.what.endswith("wrong numbers") for f in found):
        result.verdict = "below"
    return result


def show_check(c: MachineCheck) -> None:
    """The table, the findings, and the verdict in words."""
    title = f"{c.count} x {c.device}"
    columns = ("what", "measured", "unit", "reference", "kind", "reached", "source")
    rows = []
    for f in c.figures:
        r = f.reference
        known = ("none", "", "", "")
        if r:
            known = (_figure(r.value), r.kind, number(f.part, ".0%"), r.source)
        rows.append((f.name, f.missing or _figure(f.value), f.unit, *known))
    print(markdown_table(columns, rows, left=("unit", "kind", "source"), title=title), end="")
    findings.show(c.findings)
    print(f"This machine is {c.verdict}: {c.about}.")
    print(f"Findings that may hold it back: {len(c.findings) or 'none'}.")


def _figure(value: float | None) -> str:
    return number(value, ",.4g" if (value or 0) < 1000 else ",.0f")


def reached_by_others(
    records: Sequence[Record], w: Workload, hardware: str, devices: int
) -> list[float]:
    """What each submitter, whose folder has the runs, measured best [tokens/s per device]."""
    best: dict[str, float] = {}
    for record in records:
        r = record.result
        if r is None or (r.device.hardware, r.device.count) != (hardware, devices):
            continue
        other = workload_of(r)
        same = other and (other.shape, format_of(r)) == (w.shape, w.number_format)
        if same and not unusable(record):
            submitter = Path(record.path).parent.name
            rate = record.tokens_per_sec_per_gpu or 0.0
            best[submitter] = max(best.get(submitter, 0.0), rate)
    return sorted(best.values())
