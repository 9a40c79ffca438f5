"""What a shared result proves: its tier, and the first thing that is wrong with it. Needs no torch.

Nothing in a file is believed that can be computed again: the figures are made anew from the steps, the
FLOPs from the config, the peaks from configs/hardware.json.
"""

import dataclasses
import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.hardware import Hardware, device_called, devices
from llm_train_bench.check.references import estimate_of
from llm_train_bench.check.share import (
    EXACT,
    Refused,
    SharedRun,
    canonical,
    changed_paths,
    folder_of,
    moment,
    read_shared,
)
from llm_train_bench.check.workloads import Workload, format_of, workload_of
from llm_train_bench.model.json_keys import ConfigError
from llm_train_bench.results.result_files import Step
from llm_train_bench.results.schema import LIMIT_SLACK, Result
from llm_train_bench.settings.flags import Script

TIERS = {
    0: "not a valid result",
    1: "schema: every field is known and of its kind",
    2: "arithmetic: the figures follow from the steps and the config, and no limit is exceeded",
    3: "plausible: the first losses are those of the workload, and the speed is in the estimate's range",
    4: "reproduced: another submitter reached the same speed within 5 %",
}
# The host's clock, read when a step has been issued, is within this part of a step, of a window, and
# seconds from the device's times. On an H200 it was within 0.2 of a step.
STEP_LAG, CLOCKS_AGREE, CLOCK_S = 0.6, 0.03, 0.02
# A plausible run has so many measured steps, or takes so long [s]; and so much of the estimated memory.
FEWEST_STEPS, SHORTEST_S, MEMORY_AGREES = 20, 20.0, 0.5
REPRODUCED = 0.05
# A device's average power by its counter, and by samples, and its average over the window.
POWER_AGREES, ENERGY_AGREES = 0.25, 0.05
# bf16 operations a clock of a core with matrix units (AMX, Intel's intrinsics guide), at 6 GHz [TFLOP/s].
CORE_TFLOPS = 2048 * 6e9 / 1e12


@dataclasses.dataclass(frozen=True)
class Verified:
    """A file's tier, why it is not higher, and the run's workload and number format."""

    tier: int
    why_not_higher: str
    shared: SharedRun
    workload: Workload | None = None
    known_hardware: bool = False
    rates: tuple[float, ...] = ()
    """Tokens/s per device of each of the file's runs; `shared` is the median run."""
    runs: tuple[SharedRun, ...] = ()

    @property
    def number_format(self) -> str:
        """fp32, tf32, fp16, bf16 or fp8."""
        return format_of(self.shared.result)

    @property
    def name(self) -> str:
        """The workload's name without its format, or the model's."""
        return self.workload.shape if self.workload else self.shared.result.model.name

    @property
    def rate(self) -> float:
        """Tokens/s per device."""
        return statistics.median(self.rates)

    @property
    def what(self) -> str:
        """What another run must share to reproduce this one: all settings but the micro batch."""
        r = self.shared.result
        own = ("bsz", "grad_acc_steps", "config", "device", "nproc", "peak_tflops", "usd_per_hour")
        settings = {k: v for k, v in r.settings.items() if k not in own}
        sizes = (r.batch.global_batch, r.batch.seq_len, r.device.count)
        parts = r.model.hash, r.device.hardware, sizes, r.entrypoint, settings
        return json.dumps(parts, sort_keys=True, default=str)


def verify_file(path: Path) -> Verified:
    """Tiers 1 to 3 of a file, the lowest of its runs; Refused with what is wrong with it.

    UsageError if it is no such file.
    """
    runs = sorted(map(verify_run, read_shared(path).runs), key=lambda v: v.rates)
    if len({run.what for run in runs}) > 1:
        raise Refused("its runs are not repeats of one setting; share each in a file")
    results = [run.shared for run in runs]
    if any(is_copy(a, b) for a, b in itertools.combinations(results, 2)):
        raise Refused("a run is in it twice")
    rates = tuple(rate for run in runs for rate in run.rates)
    lowest, middle = min(runs, key=lambda v: v.tier), runs[(len(runs) - 1) // 2]
    return dataclasses.replace(lowest, shared=middle.shared, rates=rates, runs=tuple(results))


# What older files do not have.
LATER_FIGURES = ("metrics", "mfu_low"), ("device", "peak_fp4_tflops")


def verify_run(shared: SharedRun) -> Verified:
    """Tiers 1 to 3 of one run; Refused with what is wrong with it."""
    r = shared.result
    try:
        if r.status != "ok" or r.resumed_from:
            raise Refused(f"the run's status is {r.status}, or it was resumed")
        check_steps(shared)
        right, found = (x.model_dump(mode="json") for x in (canonical(shared), r))
        for group, name in LATER_FIGURES:
            if found[group][name] is None:
                right[group][name] = None
        if "--amp" in right["command"] and "--amp" not in found["command"]:
            i = right["command"].index("--amp")
            if right["command"][i + 1] == "bf16":  # it was the default once
                del right["command"][i : i + 2]
        if wrong := min(changed_paths(found, right), default=None, key=_order):
            shown = (str(_at(x, wrong))[:60] for x in (found, right))
            raise Refused("{} is {}; what the file holds gives {}".format(wrong, *shown))
        hardware = device_called(r.device.hardware)  # not of a part of a GPU
        check_devices(r, hardware)
        check_limits(r, hardware)
        rates = (r.metrics.tokens_per_sec_per_gpu or 0.0,)
        result = Verified(2, "", shared, None, hardware is not None, rates)
        if not r.model.config:
            why = "its model's config is not known, so nobody can compute its FLOPs"
            return dataclasses.replace(result, tier=1, why_not_higher=why)
        workload = workload_of(r)
        told = third_tier(shared, workload, hardware)
        return dataclasses.replace(result, workload=workload, **told)
    except (UsageError, ConfigError) as error:
        raise Refused(f"its flags and config make no run: {error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"its figures cannot be computed again: {error}") from None


def _order(path: str) -> tuple[bool, int, str]:
    """What is named first of several differences: not what only repeats others."""
    return path.split(".")[0] in ("command", "run_name", "lineage"), path.count("."), path


def _at(content: Any, path: str) -> Any:
    """The value at a dotted path, as far as there is one."""
    for key in path.split("."):
        content = content.get(key) if isinstance(content, dict) else content
    return content


def check_steps(shared: SharedRun) -> None:
    """Refused where steps are missing, or contradict the flags, the result or the host's clock."""
    r, steps = shared.result, shared.steps
    if [s.step for s in steps] != list(range(len(steps))):
        raise Refused("steps are missing or out of order")
    phases = [s.phase for s in steps]
    n = phases.count("measure")
    if any(s.saved for s in steps):
        raise Refused("steps were saved, which takes time between them")
    if not n or phases != ["warmup"] * (len(steps) - n) + ["measure"] * n:
        raise Refused("it has no measured step, or one before the end of the warm-up")
    counts = len(steps) - n, n
    if counts != (r.args.get("warmup_steps"), r.args.get("n_steps")):
        said = f"{r.args.get('warmup_steps')} and {r.args.get('n_steps')}"
        raise Refused(
            f"it has {counts[0]} steps of warm-up and {n} measured ones; its flags say {said}"
        )
    for s in steps:
        _check_step(s, r)
    first, times = steps[-n:], [s.step_time_s for s in steps[-n:]]
    at = [s.at for s in first]
    late = [
        a - at[0] - total
        for a, total in zip(at, itertools.accumulate([0.0, *times[1:]]), strict=True)
    ]
    room = STEP_LAG * max(times) + CLOCKS_AGREE * sum(times) + CLOCK_S
    if any(b < a for a, b in itertools.pairwise(s.at for s in steps)) or max(map(abs, late)) > room:
        raise Refused(
            f"the measured steps are up to {max(map(abs, late)):.3g} s off the host's clock"
        )
    if times[0] < 0.5 * min(times[1:], default=0.0):  # before it the clock has no mark
        raise Refused("the first measured step takes less than half of any other")
    began, ended = moment(r.started_at) or 0.0, moment(r.ended_at) or 0.0
    if not began - 2 <= steps[0].at <= at[-1] <= ended + 2 or ended > time.time() + 86_400:
        raise Refused("its steps lie outside the run's start and end, or in the future")
    if sum(s.step_time_s for s in steps) > ended - began + 2:
        raise Refused("its steps take longer than the run from its start to its end")
    if r.device.count > 1:
        whole = sum(r.step_times_s)
        if len(r.step_times_s) != n or min(r.step_times_s) <= 0:
            raise Refused(f"it has {len(r.step_times_s)} times of the slowest rank, and {n} steps")
        near = all(0.1 < s / t < 10 for s, t in zip(r.step_times_s, times, strict=True))
        if not near or not 1 - EXACT <= whole / sum(times) <= 1.1:
            raise Refused("the slowest rank's times are not near those of the steps")


def _check_step(s: Step, r: Result) -> None:
    parts = [s.data_time_s, s.forward_time_s, s.backward_time_s, s.optimizer_time_s, s.idle_time_s]
    known = [p for p in (*parts, s.compile_s) if p is not None]
    if s.step_time_s <= 0 or min(known) < 0:
        raise Refused(f"step {s.step} has a time that is not above 0")
    if sum(p or 0.0 for p in parts) > 1.02 * s.step_time_s + 1e-3:
        raise Refused(f"the parts of step {s.step} take longer than the step")
    if s.compile_s and s.phase == "measure":
        raise Refused(f"step {s.step} was compiled in the window")
    if s.tokens < 1 or (r.ours and s.tokens != r.batch.tokens_per_step):
        raise Refused(f"step {s.step} has {s.tokens} tokens, not {r.batch.tokens_per_step}")
    if r.ours and s.loss is None:
        raise Refused(f"step {s.step} has no finite loss")
    if (
        not 0 <= (s.loss or 0) <= 1000
        or min(s.grad_norm or 0, s.lr or 0, *s.micro_batch_times_s, 0) < 0
    ):
        raise Refused(f"step {s.step} has a loss, norm or rate that no run has")


def check_devices(r: Result, hardware: Hardware | None) -> None:
    """Refused for readings of sensors that contradict each other."""
    if len(r.devices) not in (
        (r.device.count,) if r.device.type == "cuda" else (0, r.device.count)
    ):
        raise Refused(f"it has {r.device.count} devices and readings of {len(r.devices)}")
    if [u.rank for u in r.devices] != list(range(len(r.devices))):
        raise Refused("the readings are not one of each rank")
    if r.entrypoint == Script.ONE and r.device.count != 1:
        raise Refused(f"{r.entrypoint} runs on one device, not on {r.device.count}")
    window = r.metrics.window_s or 0.0
    for u in r.devices:
        numbers = [v for v in u.model_dump().values() if isinstance(v, float)]
        if min([*numbers, *(u.throttled or {}).values(), u.other_processes or 0], default=0) < 0:
            raise Refused(f"rank {u.rank} has a reading below 0")
        if u.n_samples < 0 or max([*(u.throttled or {}).values()], default=0) > 1.05:
            raise Refused(f"rank {u.rank} has a part of the window above 1, or samples below 0")
        if (u.temperature_max_c or 0) > 150 or (u.sm_clock_mean_mhz or 0) > 5000:
            raise Refused(f"rank {u.rank} is hotter than 150 C, or faster than 5 GHz")
        if (u.memory_mean_gib or 0) > 1.05 * (r.device.memory_gib or math.inf):
            raise Refused(f"rank {u.rank} held more memory than it has")
        if (u.energy_j is None) != (u.average_power_w is None):
            raise Refused(f"rank {u.rank} has energy without power, or the reverse")
        if u.energy_j is not None and u.average_power_w is not None:
            if not _near(u.energy_j, u.average_power_w * window, ENERGY_AGREES):
                raise Refused(
                    f"rank {u.rank}: {u.energy_j:.4g} J in {window:.4g} s, and {u.average_power_w:.4g} W"
                )
            sampled = u.sampled_power_mean_w if u.n_samples >= 5 else None
            if sampled and not _near(u.average_power_w, sampled, POWER_AGREES):
                raise Refused(f"rank {u.rank}: energy and samples of power differ")
            watts = u.power_limit_w or (hardware and hardware.tdp_w) or math.inf
            if u.average_power_w > (1 + LIMIT_SLACK) * watts:
                raise Refused(
                    f"rank {u.rank} drew {u.average_power_w:.0f} W; its limit is {watts:.0f} W"
                )
        if hardware and hardware.tdp_w and (u.power_limit_w or 0) > 1.2 * hardware.tdp_w:
            raise Refused(
                f"a power limit of {u.power_limit_w:.0f} W; {hardware.name} has {hardware.tdp_w:.0f} W"
            )
        clocks = [c for c in (u.sm_clock_min_mhz, u.sm_clock_mean_mhz, u.sm_clock_limit_mhz) if c]
        if any(b < a / 1.05 for a, b in itertools.pairwise(clocks)):
            raise Refused(f"rank {u.rank}: its clocks are not in order: {clocks}")


def check_limits(r: Result, hardware: Hardware | None) -> None:
    """Refused above a peak, a power limit or a memory, of the file's device or of the listed one."""
    for line in r.impossible.values():
        raise Refused(line)
    d, m = r.device, r.metrics
    for name, value in m.model_dump().items():
        if isinstance(value, float) and value < 0 and "drift" not in name and "loss" not in name:
            raise Refused(f"metrics.{name} is {value:.4g}, below 0")
    if max(m.stolen_cpu_fraction or 0, m.other_cpu_fraction or 0) > 1.05:
        raise Refused("other processes took more than all CPU time")
    if (m.peak_reserved_gib or math.inf) < (m.peak_allocated_gib or 0.0):
        raise Refused("more memory was allocated than reserved")
    tflops = m.model_tflops_per_gpu_causal or 0.0
    if d.type == "cpu":
        cores = re.search(r"(\d+) cores?\)$", d.name)
        if d.name != r.environment.get("cpu") or not cores or similar_devices(d.name):
            raise Refused(f"device.name {d.name} is no CPU's, or not the one of the environment")
        if tflops * d.count > CORE_TFLOPS * int(cores[1]):
            raise Refused(f"{tflops:.3g} TFLOP/s are more than {cores[1]} cores can do")
        return
    if d.memory_gib is None or m.peak_allocated_gib is None:
        raise Refused("device.memory_gib or metrics.peak_allocated_gib is missing")
    hardware = hardware or device_called(d.name)  # a part of a GPU has the whole one's limits
    if hardware is None:
        if near := similar_devices(d.name):
            raise Refused(f"device.name {d.name} is like {near}, and is none of its names")
        return
    has = f"{hardware.name} has {hardware.memory_gib:.4g} GiB"
    if (
        max(d.memory_gib, m.peak_allocated_gib, m.peak_reserved_gib or 0.0)
        > 1.05 * hardware.memory_gib
    ):
        raise Refused(f"a memory of {d.memory_gib:.4g} GiB, or its use; {has}")
    peak = _peak_of(r, hardware)
    if tflops > peak:
        raise Refused(f"{tflops:,.0f} TFLOP/s; the dense peak of {hardware.name} is {peak:,.0f}")


def similar_devices(name: str) -> str | None:
    """The listed device whose name this one resembles; its own name counts too."""

    def bare(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.casefold())

    known = {
        bare(n): d.name for d in devices() if d.platform != "cpu" for n in (d.name, *d.driver_names)
    }
    return known.get(bare(name))


def _near(a: float, b: float, part: float) -> bool:
    return abs(a - b) <= part * max(abs(a), abs(b))


def _peak_of(r: Result, hardware: Hardware) -> float:
    """The highest dense rate of any format that the run used [TFLOP/s]."""
    if r.fp8:
        return max(hardware.fp8_tflops or 0.0, hardware.bf16_tflops)
    if format_of(r) == "fp32":
        return max(hardware.fp32_tflops, 0.0)
    return hardware.bf16_tflops


def third_tier(
    shared: SharedRun, workload: Workload | None, hardware: Hardware | None
) -> dict[str, Any]:
    """Tier 3, or why it is not reached. Wrong losses are refused: the machine computed something else."""
    r = shared.result
    if workload is None:
        return {"why_not_higher": "it is none of the workloads in configs/workloads"}
    number_format = format_of(r)
    if number_format not in workload.bands:
        return {"why_not_higher": f"nobody knows the losses of {workload.shape} in {number_format}"}
    if wrong := workload.wrong_steps(number_format, [vars(s) for s in shared.steps]):
        raise Refused(wrong)
    kernels: dict[str, float] = {}
    for name, count in r.observed.matmuls.items() if r.observed else ():
        kernels[name.split()[-1]] = kernels.get(name.split()[-1], 0.0) + count
    wanted = number_format.replace("tf32", "fp32")
    if kernels and (
        min(kernels.values()) < 0
        or kernels.get(wanted, 0.0) < max(kernels.values())
        or (wanted != "fp8" and "fp8" in kernels)
    ):
        raise Refused(f"it says {number_format}, and the kernels that ran are {kernels}")
    asked = r.args.get("attention")
    if asked not in ("auto", r.attention_kernel):
        raise Refused(f"it asked for {asked} attention, and {r.attention_kernel} ran")
    if r.unfit:
        return {
            "why_not_higher": f"its figures are not of an undisturbed run: {'; '.join(r.unfit)}"
        }
    if hardware is None or r.device.type == "cpu":
        return {"why_not_higher": "its hardware is not listed, so nothing bounds its speed"}
    if not kernels:
        return {"why_not_higher": "nobody looked which kernels ran"}
    n, window = len(r.step_times_s), r.metrics.window_s or 0.0
    if n < FEWEST_STEPS and window < SHORTEST_S:
        return {"why_not_higher": f"{n} steps in {window:.3g} s are too few"}
    e = estimate_of(r, hardware)
    estimated = (e.memory.peak + e.memory_outside) / 2**30
    if not _near(r.metrics.peak_allocated_gib or 0.0, estimated, MEMORY_AGREES):
        return {"why_not_higher": f"its memory is far from the estimate, {estimated:.4g} GiB"}
    if e.accuracy is None:
        return {
            "why_not_higher": f"no published figure tells the error of estimates for {hardware.name}"
        }
    ratio = (r.metrics.tokens_per_sec_per_gpu or 0.0) / e.tokens_per_sec_per_gpu
    wide = e.accuracy["covers_80"]
    if not 1 - wide <= ratio <= 1 + wide:
        text = f"its speed is {ratio:.0%} of the estimate, whose range is {wide:.0%}"
        return {"why_not_higher": text}
    return {"tier": 3, "why_not_higher": "nobody else has reproduced it"}


def fourth_tier(
    one: Verified, author: str, others: Iterable[tuple[str, Verified]]
) -> tuple[Verified, str]:
    """Tier 4 if a run of another submitter has the same speed; and a line on those that have not."""
    if one.tier < 3:
        return one, ""
    away = []
    for submitter, other in others:
        if _same_name(submitter, author) or other.tier < 3 or other.what != one.what:
            continue
        if any(is_copy(a, b) for a, b in itertools.product(one.runs, other.runs)):
            away.append(f"the file of {submitter} is a copy")
            continue
        if abs(other.rate / one.rate - 1) <= REPRODUCED:
            return dataclasses.replace(one, tier=4, why_not_higher=""), f"reproduced by {submitter}"
        away.append(f"{submitter} has {other.rate / one.rate:.0%} of its speed")
    return one, "; ".join(away)


# GitHub's names.
SUBMITTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}(\[bot\])?", re.ASCII)


def _same_name(a: str, b: str) -> bool:
    return a.casefold() == b.casefold()


def is_copy(a: SharedRun, b: SharedRun) -> bool:
    """Whether two runs are one: step times of two runs are not proportional to each other."""
    x, y = a.result, b.result
    if x.lineage.id == y.lineage.id or moment(x.started_at) == moment(y.started_at):
        return True
    if {s.at for s in a.steps} & {s.at for s in b.steps}:
        return True
    first, second = ([s.step_time_s for s in run.steps] for run in (a, b))
    for shift in range(-4, 5):  # a few steps may be left out
        pairs = zip(first[max(0, shift) :], second[max(0, -shift) :], strict=False)
        ratios = [s / t for s, t in pairs][2:]
        if len(ratios) > 2 and statistics.pstdev(ratios) < 1e-3 * statistics.fmean(ratios):
            return True
    return False


def shared_files(folder: Path, hardware: str = "*") -> Iterator[tuple[str, Path]]:
    """(submitter, file) of a folder of results, HARDWARE/SUBMITTER/NAME.json."""
    for path in sorted(folder.glob(f"{hardware}/*/*.json")):
        if SUBMITTER.fullmatch(path.parent.name):
            yield path.parent.name, path


def verified_files(
    folder: Path, say: Callable[[str], None], hardware: str = "*"
) -> list[tuple[str, Path, Verified]]:
    """All files of a folder that verify, with tier 4 where it is earned; others are reported."""
    found = []
    for submitter, path in shared_files(folder, hardware):
        try:
            found.append((submitter, path, verify_file(path)))
        except (Refused, UsageError) as error:
            say(f"{path}: left out: {error}")
    pairs = [(submitter, v) for submitter, _, v in found]
    return [(s, path, fourth_tier(v, s, pairs)[0]) for s, path, v in found]


def check_place(path: Path, author: str, r: Result) -> None:
    """Refused unless a submitted file lies where its hardware and its author say."""
    hardware, right = folder_of(r.device.hardware), path.resolve().parts[-3:-1]
    if (
        right != (hardware, author)
        or not SUBMITTER.fullmatch(author)
        or not re.fullmatch(r"[\w.-]{1,100}\.json", path.name, re.ASCII)
    ):
        raise Refused(f"a file of {author} belongs in results/{hardware}/{author}/NAME.json")


def show_tier(
    path: Path, folder: Path, author: str | None, as_json: bool, say: Callable[[str], None]
) -> int:
    """Print what a shared result proves; 0, or 1 if it is refused."""
    try:
        v = verify_file(path)
        if author:
            check_place(path, author, v.shared.result)
    except Refused as refusal:
        told: dict[str, Any] = {"tier": 0, "refused": str(refusal)}
        print(json.dumps(told) if as_json else f"refused: {printable(str(refusal))}")
        return 1
    remark = ""
    if author:
        others = verified_files(folder, say, folder_of(v.shared.result.device.hardware))
        v, remark = fourth_tier(v, author, [(submitter, other) for submitter, _, other in others])
    r = v.shared.result
    told = {"tier": v.tier, "proves": TIERS[v.tier], "why_not_higher": v.why_not_higher}
    told |= {"remark": remark, "hardware": r.device.hardware, "known_hardware": v.known_hardware}
    told |= {"devices": r.device.count, "workload": v.name, "number_format": v.number_format}
    told |= {"tokens_per_sec_per_device": v.rate, "runs": len(v.rates)}
    if as_json:
        print(json.dumps(told, indent=1))
        return 0
    print(f"tier {v.tier}, {TIERS[v.tier]}")
    if v.why_not_higher:
        print(printable(f"not tier {v.tier + 1}: {v.why_not_higher}"))
    many, unknown = (
        f"{r.device.count} x {r.device.hardware}",
        "" if v.known_hardware else " (not listed)",
    )
    print(
        printable(
            f"{v.name} in {v.number_format} on {many}{unknown}: {v.rate:,.0f} tokens/s a device"
        )
    )
    if remark:
        print(printable(remark))
    return 0
