"""The fixed workloads, by which machines are compared, and their known losses. Needs no torch."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError
from llm_train_bench.model.config import load_config
from llm_train_bench.model.json_files import CONFIGS, parse_json
from llm_train_bench.results.schema import Result
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import LEARNT, Args, Script, of_kind, present_flags
from llm_train_bench.settings.run_file import unknown_settings

FOLDER = CONFIGS / "workloads" / "v1"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A run file of configs/workloads, and the figures of its first steps.

    `losses` and `grad_norms` are those of an fp32 run; a run in another format may differ from them by
    the format's part of `bands`.
    """

    name: str
    path: Path
    args: Args
    losses: list[float]
    grad_norms: list[float]
    bands: dict[str, dict[str, float]]

    @property
    def shape(self) -> str:
        """Its name without the number format: runs in all formats have the same losses."""
        return self.name.rpartition("-")[0]

    @property
    def number_format(self) -> str:
        """fp32, bf16 or fp8."""
        return self.name.rpartition("-")[2]

    def wrong_steps(self, number_format: str, steps: list[dict[str, Any]]) -> str | None:
        """What is wrong with the first steps of a run in a format; None if nothing is."""
        band, first = self.bands[number_format], {step.get("step"): step for step in steps}
        for name, known in (("loss", self.losses), ("grad_norm", self.grad_norms)):
            for number, right in enumerate(known):
                found = first.get(number, {}).get(name)
                if not isinstance(found, int | float) or isinstance(found, bool):
                    return f"step {number} has no {name}"
                if not abs(found - right) <= band[name] * right:
                    return (
                        f"the {name} of step {number} is {found:.6g}; {self.shape} in {number_format} "
                        f"has {right:.6g} within {band[name]:.2%}"
                    )
        return None


@functools.cache
def workloads() -> dict[str, Workload]:
    """All workloads by their names."""
    known = parse_json((FOLDER / "losses.json").read_text(encoding="utf-8"))
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        figures = known["workloads"][path.stem.rpartition("-")[0]]
        args = parse_args(["--from", str(path)], Script.ONE)
        found[path.stem] = Workload(
            path.stem, path, args, figures["losses"], figures["grad_norms"], known["bands"]
        )
    return found


def format_of(r: Result) -> str:
    """The number format of a run's matmuls: fp32, tf32, fp16, bf16 or fp8."""
    amp = str(r.args.get("amp"))
    if r.fp8:
        return "fp8"
    if amp == "off":
        return "tf32" if r.args.get("tf32") else "fp32"
    return amp


@functools.cache
def model_hash(config: str, layers: int | None) -> str:
    """The hash of a shipped config's model, or of its first layers."""
    return load_config(config, layers=layers).hash


def workload_of(r: Result) -> Workload | None:
    """The workload that a run is, whatever its number format and flags of speed; None for others."""
    if not r.ours or r.first_step or unknown_settings(r.args):
        return None
    fixed, flags = of_kind(LEARNT), present_flags(r.args)
    learnt = [flags[name] for name in fixed]
    run = [r.batch.global_batch, r.batch.seq_len, r.model.hash, *learnt]
    for w in workloads().values():
        a, learnt = w.args, [getattr(w.args, name) for name in fixed]
        if run == [a.global_bsz, a.seq_len, model_hash(a.config, a.layers), *learnt]:
            return w
    return None


def workload_named(name: str) -> Workload:
    """A workload by its name; UsageError with the known ones."""
    if name not in workloads():
        raise UsageError(f"{name}: no such workload; there are {', '.join(workloads())}")
    return workloads()[name]
