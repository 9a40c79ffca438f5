"""A machine's figures beside what such a machine should reach, and the verdict. Needs no torch."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from llm_train_bench.base.files import ROOT
from llm_train_bench.base.hardware import Hardware
from llm_train_bench.base.machine import Platform
from llm_train_bench.check.workloads import Workload
from llm_train_bench.estimate.predict import EstimateFlags, make_estimate
from llm_train_bench.model.config import parse_config
from llm_train_bench.model.json_files import parse_json
from llm_train_bench.results.schema import Result
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script, to_argv
from llm_train_bench.settings.plan import Plan, make_plan
from llm_train_bench.settings.run_file import result_flags

PUBLISHED = ROOT / "benchmarks" / "published"


@dataclasses.dataclass(frozen=True)
class Reference:
    """What such a machine should reach, and the range that covers most of its like."""

    kind: Literal["measured", "published", "estimated"]
    value: float
    low: float
    high: float
    source: str


@dataclasses.dataclass(frozen=True)
class Reached:
    """A measured figure in its unit; `reference` is None if it is unknown.

    `missing` says why there is no value. Only a workload's figure is judged: a kernel's rate explains.
    """

    name: str
    unit: str
    value: float | None
    reference: Reference | None = None
    missing: str = ""
    workload: bool = False

    @property
    def part(self) -> float | None:
        """The part of its reference that it reaches."""
        if self.value is None or self.reference is None:
            return None
        return self.value / self.reference.value


RATES = {
    "matmul bf16": "TFLOP/s",
    "matmul fp32": "TFLOP/s",
    "matmul fp8": "TFLOP/s",
    "memory": "TB/s",
    "attention forward": "TFLOP/s",
    "attention with backward": "TFLOP/s",
    "launch": "us",
    "host to device": "GB/s",
    "device to host": "GB/s",
}


# Part of the listed bandwidth that a plain copy reaches.
COPIED = 0.85


def rate_figures(rates: Mapping[str, Any], hardware: Hardware | None) -> Iterator[Reached]:
    """The figures of check/probe.py, held against configs/hardware.json where the device is listed."""
    known: dict[str, Reference] = {}
    if hardware and hardware.platform != "cpu":
        for name in ("bf16", "fp8"):
            if best := getattr(hardware, f"measured_{name}_tflops"):
                source = "highest published matmul rate"
                known[f"matmul {name}"] = Reference("published", best, best, best, source)
        memory = COPIED * hardware.memory_tb_per_s
        share = f"{COPIED:.0%} of the datasheet"
        known["memory"] = Reference("estimated", memory, memory, hardware.memory_tb_per_s, share)
    if link := rates.get("link_gb_per_s"):
        for name in ("host to device", "device to host"):
            known[name] = Reference("published", link, link, link, "rate of its PCIe link")
    for name, unit in RATES.items():
        if name in rates:
            yield Reached(name, unit, rates[name], known.get(name))


def workload_figure(
    w: Workload, r: Result, hardware: Hardware | None, measured: Sequence[float]
) -> Reached:
    """A workload's tokens/s per device beside the best kind of reference that there is.

    `measured`: what others reached with it on this hardware, one value a submitter.
    """
    reference = None
    if measured:
        middle = statistics.median(measured)
        text = f"results/, {len(measured)} submitter{'s' * (len(measured) > 1)}"
        reference = Reference("measured", middle, min(measured), max(measured), text)
    reference = reference or published(w, r, hardware) or estimated(r, hardware)
    return Reached(w.name, "tokens/s", r.metrics.tokens_per_sec_per_gpu, reference, workload=True)


def published(w: Workload, r: Result, hardware: Hardware | None) -> Reference | None:
    """The fastest published row with this model, length, format and number of such devices."""
    if hardware is None:
        return None
    wanted = hardware.name, r.device.count, w.args.config, w.args.layers, w.args.seq_len
    rates = {}
    for path in sorted(PUBLISHED.glob("*.json")):
        content = parse_json(path.read_text(encoding="utf-8"))
        for row in content["rows"]:
            found = tuple(row.get(name) for name in ("gpu", "gpus", "config", "layers", "seq_len"))
            if found == wanted and ("--use-fp8" in row.get("flags", "")) == bool(r.fp8):
                rates[row["tokens_per_sec_per_gpu"]] = content["source"]
    if not rates:
        return None
    best = max(rates)
    return Reference("published", best, best, best, rates[best])


def estimated(r: Result, hardware: Hardware | None) -> Reference | None:
    """The estimate of the same run, with the range of its errors; without one, nobody knows it."""
    if hardware is None:
        return None
    plan = plan_of_result(r, hardware.platform, hardware.memory_gib)
    e = make_estimate(plan, EstimateFlags(gpu=hardware.name, gpus=r.device.count), hardware)
    rate, text = e.tokens_per_sec_per_gpu, "estimate.py; no published figure tells its error"
    if e.accuracy is None:
        if hardware.platform == "cpu":
            text = "from the rates above; its error is not known"
        return Reference("estimated", rate, 0.0, math.inf, text)
    wide, rows = e.accuracy["covers_80"], e.accuracy["rows"]
    text = f"estimate.py; 80 % of {rows} published rows are within {wide:.0%}"
    return Reference("estimated", rate, rate * (1 - wide), rate * (1 + wide), text)


def plan_of_result(r: Result, platform: Platform, memory_gib: float | None) -> Plan:
    """The plan of a run, only from its result; UsageError or ConfigError where there is none."""
    script = Script(r.entrypoint)
    flags = result_flags(r.args)
    words = [str(flags.pop("config", "config.json")), *to_argv(flags)]
    args = parse_args(words, script)
    config = parse_config(r.model.config, r.model.path or args.config, args.pad_vocab)
    return make_plan(args, script, r.device.count, platform, config, memory_gib)


def judge_machine(figures: Sequence[Reached], at_least: float) -> tuple[str, float | None, str]:
    """The verdict, the part of its references that the machine reaches, and a line on both.

    The part is the geometric mean over workloads. A reference with a range gives the part a range: it
    passes if all of it is at least `at_least`, and is below if none of it is.
    """
    judged = [(f.value, f.reference) for f in figures if f.workload and f.value and f.reference]
    unknown = [f.name for f in figures if f.workload and f.part is None]
    if not judged:
        return "not judged", None, "no figure has a reference"
    value = statistics.geometric_mean(reached / r.value for reached, r in judged)
    low = statistics.geometric_mean(reached / min(r.high, 1e30) for reached, r in judged)
    high = statistics.geometric_mean(reached / max(r.low, 1e-30) for reached, r in judged)
    kinds = sorted({r.kind for _, r in judged})
    text = f"{value:.0%} of the {' and '.join(kinds)} reference"
    if unknown:
        text += f", without {', '.join(unknown)}"
    if high < at_least:
        return "below", value, text
    if low >= at_least or (value >= at_least and kinds == ["measured"]):
        return "as it should be", value, text
    span = "" if high > 1e6 else f" (between {low:.0%} and {high:.0%})"
    return "not judged", value, f"{text}, which is too uncertain for a verdict{span}"
