"""What a shared result proves: its tier, and the first thing that is wrong with it. Needs no torch.

Nothing in a file is believed that can be computed again: the figures are made anew from the steps, the
FLOPs from the config, the peaks from configs/hardware.json.
"""

import dataclasses
import datetime
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llm_train_bench.base.errors import UsageError, printable
from llm_train_bench.base.hardware import Hardware, device_called, find_peaks, threads_of
from llm_train_bench.check.references import estimate_of, plan_of_result
from llm_train_bench.check.share import (
    ENVIRONMENT,
    SharedRun,
    cleaned_result,
    folder_of,
    read_shared,
)
from llm_train_bench.check.workloads import Workload, format_of, workload_of
from llm_train_bench.formulas.flops import flops_per_token
from llm_train_bench.formulas.parameters import count_parameters, linear_parameters
from llm_train_bench.model.config import parse_config
from llm_train_bench.model.json_keys import ConfigError
from llm_train_bench.results.figures import fill_flop_metrics, fill_flop_rates, fill_step_metrics
from llm_train_bench.results.metrics import Metrics
from llm_train_bench.results.schema import LIMIT_SLACK, Result
from llm_train_bench.settings.flags import Args, declared

TIERS = {
    0: "not a valid result",
    1: "schema: every field is known and of its kind",
    2: "arithmetic: the figures follow from the steps and the config, and no limit is exceeded",
    3: "plausible: the first losses are those of the workload, and the speed is in the estimate's range",
    4: "reproduced: another submitter reached the same speed within 5 %",
}
# Recomputed figures may differ by this part: libraries round sums and percentiles differently.
EXACT = 1e-6
# Clocks of the host and of the device agree to this part of a window, and this many steps.
CLOCKS_AGREE, STEPS_AHEAD = 0.05, 3
REPRODUCED = 0.05


class Refused(Exception):
    """A file that contradicts itself or what is known; the message says where."""


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
    def what(self) -> tuple[Any, ...]:
        """What another run must share to reproduce this one: model, hardware, size and format."""
        r = self.shared.result
        sizes = (r.batch.global_batch, r.batch.seq_len, r.device.count)
        flags = tuple(r.args.get(name) for name in ("pt_compile", "compile_mode", "sac_freq"))
        layout = tuple(
            r.args.get(n) for n in ("tp", "cp", "ep", "pp", "dp_replicate", "cpu_offload")
        )
        return (
            r.model.hash,
            r.device.hardware,
            sizes,
            self.number_format,
            flags,
            layout,
            r.entrypoint,
        )


def verify_file(path: Path) -> Verified:
    """Tiers 1 to 3 of a file, the lowest of its runs; Refused with what is wrong with it.

    UsageError if it is no such file.
    """
    runs = sorted(map(verify_run, read_shared(path).runs), key=lambda v: v.rates)
    if len({run.what for run in runs}) > 1:
        raise Refused("its runs are not repeats of one setting; share each in a file")
    if len({run.shared.result.started_at for run in runs}) < len(runs):
        raise Refused("a run is in it twice")
    rates = tuple(rate for run in runs for rate in run.rates)
    lowest, middle = min(runs, key=lambda v: v.tier), runs[(len(runs) - 1) // 2]
    return dataclasses.replace(lowest, shared=middle.shared, rates=rates)


def verify_run(shared: SharedRun) -> Verified:
    """Tiers 1 to 3 of one run; Refused with what is wrong with it."""
    r = shared.result
    hardware = device_called(r.device.name) or device_called(r.device.hardware)
    try:
        check_clean(r)
        check_steps(shared)
        why = check_figures_again(shared)
        check_limits(r, hardware)
    except (UsageError, ConfigError) as error:
        raise Refused(f"its arguments and config make no run: {error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"its figures cannot be computed again: {error}") from None
    rates = (r.metrics.tokens_per_sec_per_gpu or 0.0,)
    if why:
        return Verified(1, why, shared, known_hardware=hardware is not None, rates=rates)
    workload = workload_of(r)
    result = Verified(2, "", shared, workload, hardware is not None, rates)
    return dataclasses.replace(result, **third_tier(shared, workload, hardware))


def check_clean(r: Result) -> None:
    """Refused for a file that --share would have cleaned, and for parts that no run has."""
    content = r.model_dump(mode="json")
    if cleaned_result(content, ()) != content:
        raise Refused(
            "it has paths, hosts or secrets; make it with compare.py RUN --share FILE.json"
        )
    if r.status != "ok":
        raise Refused(f"the run's status is {r.status}")
    if unknown := sorted(r.environment.keys() - ENVIRONMENT):
        raise Refused(f"environment.{unknown[0]} is no fact that a run tells")
    if r.ours and (unknown := sorted(r.args.keys() - declared(Args).keys())):
        raise Refused(f"args.{unknown[0]} is no flag")
    if r.resumed_from:
        raise Refused("the run was resumed; share one that has all of its steps")


def check_steps(shared: SharedRun) -> None:
    """Refused where steps are missing, or contradict the arguments, the result or the clocks."""
    r, steps = shared.result, [s for s in shared.steps if s.phase != "profile"]
    if [s.step for s in shared.steps] != list(range(len(shared.steps))):
        raise Refused("steps are missing or out of order")
    phases = [s.phase for s in steps]
    warmup = phases.count("warmup")
    if phases != ["warmup"] * warmup + ["measure"] * (len(phases) - warmup):
        raise Refused("measured steps lie before the warm-up")
    if r.ours and (warmup, len(phases) - warmup) != (
        r.args.get("warmup_steps"),
        r.args.get("n_steps"),
    ):
        raise Refused(
            f"it has {warmup} steps of warm-up and {len(phases) - warmup} measured ones; its flags "
            f"say {r.args.get('warmup_steps')} and {r.args.get('n_steps')}"
        )
    measured = steps[warmup:]
    if not measured:
        raise Refused("it has no measured step")
    for s in steps:
        parts = [
            s.data_time_s,
            s.forward_time_s,
            s.backward_time_s,
            s.optimizer_time_s,
            s.idle_time_s,
        ]
        if s.step_time_s <= 0 or min(p or 0.0 for p in parts) < 0:
            raise Refused(f"step {s.step} has a time that is not above 0")
        if sum(p or 0.0 for p in parts) > 1.02 * s.step_time_s + 1e-3:
            raise Refused(f"the parts of step {s.step} take longer than the step")
        if s.tokens != r.batch.tokens_per_step:
            raise Refused(f"step {s.step} has {s.tokens} tokens, not {r.batch.tokens_per_step}")
    agree("warmup_step_times_s", [s.step_time_s for s in steps[:warmup]], r.warmup_step_times_s)
    _check_slowest_rank(r, [s.step_time_s for s in measured])
    # The host's clock, read when it had issued a step, against the device's times.
    times, at = [s.step_time_s for s in measured], [s.at for s in measured]
    if sorted(at) != at or min(at) <= 0:
        raise Refused("the steps' times of day are missing or out of order")
    span, total = at[-1] - at[0], sum(times[1:])
    room = STEPS_AHEAD * max(times) + CLOCKS_AGREE * total + 0.05
    if len(times) > STEPS_AHEAD and abs(span - total) > room:
        raise Refused(
            f"the measured steps take {total:.3g} s, and {span:.3g} s by the host's clock"
        )
    began, ended = (_moment(text) for text in (r.started_at, r.ended_at))
    whole = sum(s.step_time_s for s in steps)
    if began is None or ended is None or ended - began + 2 < whole:
        raise Refused(
            f"its steps take {whole:.3g} s, longer than the run from its start to its end"
        )
    if not began - 2 <= at[0] <= at[-1] <= ended + 2:
        raise Refused("its steps lie outside the run's start and end")


def _check_slowest_rank(r: Result, first_rank: list[float]) -> None:
    """The times of the window are those of the slowest rank; steps.jsonl has those of the first."""
    if r.device.count == 1:
        agree("step_times_s", first_rank, r.step_times_s)
        return
    if r.ours and [rank.rank for rank in r.ranks] != list(range(r.device.count)):
        raise Refused(f"it has {r.device.count} devices and {len(r.ranks)} ranks")
    means = [rank.step_time_mean_s for rank in r.ranks]
    if means:
        agree("step times of rank 0", statistics.fmean(first_rank), means[0])
        agree("step times of the slowest rank", max(means), statistics.fmean(r.step_times_s))


def _moment(text: str | None) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def check_figures_again(shared: SharedRun) -> str:
    """Compute all figures of steps and FLOPs again; Refused where one differs. Returns what cannot be."""
    r = shared.result
    again = r.model_copy(deep=True, update={"metrics": Metrics(), "notes": []})
    again.metrics.energy_j = sum(d.energy_j or 0.0 for d in r.devices) or None
    if r.metrics.energy_j is None:
        again.metrics.energy_j = None
    steps = [s.as_step() for s in shared.steps]
    phases = {name: [s for s in steps if s.phase == name] for name in ("warmup", "measure")}
    fill_step_metrics(again, phases["warmup"], phases["measure"])
    if r.batch.seq_len and again.metrics.tokens_per_sec:
        again.metrics.samples_per_sec = again.metrics.tokens_per_sec / r.batch.seq_len
    if not r.model.config:
        _compare(r, again)
        return "its model's config is not known, so nobody can compute its FLOPs again"
    config = parse_config(
        r.model.config, r.model.path or "config.json", r.args.get("pad_vocab") or 1
    )
    if r.ours:
        plan = plan_of_result(r, "cpu" if r.device.type == "cpu" else "nvidia", r.device.memory_gib)
        planned = dataclasses.asdict(plan.work.batch)
        for name, value in planned.items():
            agree(f"batch.{name}", value, getattr(r.batch, name))
        if bool(plan.work.fp8) != bool(r.fp8):
            raise Refused("its flags and its result differ on FP8")
        fill_flop_metrics(again, plan.work)
    else:
        for mark in ("palm", "causal"):
            agree(
                f"flops_per_token_{mark}",
                flops_per_token(config, r.batch.seq_len or 0, mark == "causal"),
                getattr(r.metrics, f"flops_per_token_{mark}"),
            )
        fill_flop_rates(
            again, r.metrics.flops_per_token_palm or 0.0, r.metrics.flops_per_token_causal
        )
    agree("model.hash", config.hash, r.model.hash)
    agree("model.n_parameters", count_parameters(config), r.model.n_parameters)
    agree("model.n_matmul_parameters", sum(linear_parameters(config).values()),
          r.model.n_matmul_parameters)  # fmt: skip
    if r.fp8 and r.fp8.n_parameters > sum(linear_parameters(config).values()):
        raise Refused("more parameters ran in FP8 than the model's linear layers have")
    _compare(r, again)
    return ""


# What cannot be computed from the file: a roof is the machine's own.
NOT_AGAIN = {"roof_time_fraction"}


def _compare(r: Result, again: Result) -> None:
    for name, value in again.metrics.model_dump().items():
        if value is not None and name not in NOT_AGAIN:
            agree(f"metrics.{name}", value, getattr(r.metrics, name))
    for name in (
        "mfu",
        "mfu_causal",
        "hfu",
        "hfu_causal",
        "ideal_time_fraction",
        "tokens_per_joule",
    ):
        if getattr(again.metrics, name) is None and getattr(r.metrics, name) is not None:
            raise Refused(f"metrics.{name} has a value, and nothing in the file gives one")


def agree(name: str, right: Any, found: Any) -> None:
    """Refused if a value of the file is not the one that was computed again."""
    if isinstance(right, list):
        same = isinstance(found, list) and len(found) == len(right)
        same = same and all(map(_close, right, found))
    else:
        same = _close(right, found)
    if not same:
        shown = [f"{x:.6g}" if isinstance(x, float) else str(x)[:60] for x in (found, right)]
        raise Refused(f"{name} is {shown[0]}, and what the file holds gives {shown[1]}")


def _close(a: Any, b: Any) -> bool:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return math.isclose(a, b, rel_tol=EXACT, abs_tol=1e-12) if numbers else a == b


def check_limits(r: Result, hardware: Hardware | None) -> None:
    """Refused above a peak, a power limit or a memory, of the file's device or of the listed one."""
    for line in r.impossible.values():
        raise Refused(line)
    d, m = r.device, r.metrics
    cpu = d.type == "cpu" and threads_of(d.name, int(r.environment.get("torch_threads") or 1))
    peaks = find_peaks(d.name)
    if (
        d.type == "cuda"
        and hardware
        and d.hardware != peaks.name
        and not d.hardware.startswith(d.name)
    ):
        raise Refused(
            f"device.hardware is {d.hardware}, and {d.name} is {peaks.name or 'not listed'}"
        )
    if d.type == "cpu" and d.hardware not in (d.name, cpu):
        raise Refused(f"device.hardware is {d.hardware}, and its CPU is {d.name}")
    for use in r.devices:
        if use.energy_j and use.average_power_w:
            agree(
                "devices.energy_j",
                True,
                _near(use.energy_j, use.average_power_w * (m.window_s or 0)),
            )
        watts = use.power_limit_w or (hardware and hardware.tdp_w) or math.inf
        if (use.energy_j or 0) > (1 + LIMIT_SLACK) * watts * (m.window_s or 0.0):
            raise Refused(f"rank {use.rank} used more energy than {watts:.0f} W give in the window")
        if hardware and hardware.tdp_w and (use.power_limit_w or 0) > 1.5 * hardware.tdp_w:
            limit = f"{use.power_limit_w:.0f} W"
            raise Refused(f"a power limit of {limit}; {hardware.name} has {hardware.tdp_w} W")
    if len(r.devices) not in (0, d.count):
        raise Refused(f"it has {d.count} devices and readings of {len(r.devices)}")
    if hardware is None:
        return
    if (d.memory_gib or 0) > 1.05 * hardware.memory_gib:
        has = f"{hardware.name} has {hardware.memory_gib:.0f}"
        raise Refused(f"a memory of {d.memory_gib:.0f} GiB; {has}")
    if "--peak-tflops" not in d.peak_source and d.type == "cuda":
        agree("device.peak_bf16_tflops", peaks.bf16_tflops, d.peak_bf16_tflops)
        agree("device.peak_fp8_tflops", peaks.fp8_tflops, d.peak_fp8_tflops)
    peak = _peak_of(r, hardware)
    if (tflops := m.model_tflops_per_gpu_causal or 0.0) > peak:
        raise Refused(f"{tflops:,.0f} TFLOP/s; the dense peak of {hardware.name} is {peak:,.0f}")


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.05 * max(abs(a), abs(b))


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
    if wrong := workload.wrong_steps(number_format, [s.model_dump() for s in shared.steps]):
        raise Refused(wrong)
    if r.unfit:
        return {
            "why_not_higher": f"its figures are not of an undisturbed run: {'; '.join(r.unfit)}"
        }
    if hardware is None or r.device.type == "cpu":
        return {"why_not_higher": "its hardware is not listed, so nothing bounds its speed"}
    e = estimate_of(r, hardware)
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
        if submitter.lower() == author.lower() or other.tier < 3 or other.what != one.what:
            continue
        if is_copy(one.shared.result, other.shared.result):
            away.append(f"the file of {submitter} is a copy")
            continue
        if abs(other.rate / one.rate - 1) <= REPRODUCED:
            return dataclasses.replace(one, tier=4, why_not_higher=""), f"reproduced by {submitter}"
        away.append(f"{submitter} has {other.rate / one.rate:.0%} of its speed")
    return one, "; ".join(away)


def is_copy(a: Result, b: Result) -> bool:
    """Whether two results are of one run: step times of two runs are not proportional to each other."""
    if a.lineage.id == b.lineage.id or a.started_at == b.started_at:
        return True
    times = list(zip(a.step_times_s, b.step_times_s, strict=False))
    ratios = [x / y for x, y in times]
    return len(ratios) > 2 and statistics.pstdev(ratios) < 1e-5 * statistics.fmean(ratios)


def shared_files(folder: Path, hardware: str = "*") -> Iterator[tuple[str, Path]]:
    """(submitter, file) of a folder of results, HARDWARE/SUBMITTER/NAME.json."""
    for path in sorted(folder.glob(f"{hardware}/*/*.json")):
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
    if right != (hardware, author) or not re.fullmatch(r"[\w.-]{1,100}\.json", path.name, re.ASCII):
        raise Refused(f"a file of {author} belongs into results/{hardware}/{author}/NAME.json")


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
