"""What is to be said of a run: one list of remarks, by what they mean for its figures. Needs no torch.

`derived_remarks` makes those that follow from a result's figures, anew whenever one is read.
"""

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from llm_train_bench.formulas.time_statistics import drift

if TYPE_CHECKING:
    from llm_train_bench.results.schema import DeviceUse, Result

# A device holds its average power to its limit, except for moments.
LIMIT_SLACK = 0.05
# Listed memory is rounded, and some suites count in GB or what the driver holds.
MEMORY_SLACK = 0.02
# Power by the energy counter and by samples agree within this part.
POWER_AGREES = 0.2
# Parts of a machine's CPU time that are worth a remark: of a CPU run, beside a GPU, and withheld.
BUSY_CPU, BUSY_HOST, STOLEN_CPU = 0.1, 0.5, 0.01
# The one reason for lower clocks that is normal: under full load a GPU is at its power limit.
POWER_CAP = "power cap"

# A mean clock below this part of the limit needs a reason, and a GPU so far behind the others too.
LOW_CLOCK, SLOW_DEVICE = 0.7, 0.03
REFERENCE_KERNELS = "reference kernels"
SHARED = "end the other processes that use it: doctor.py lists them"

RemarkKind = Literal["invalid", "disturbed", "information"]


class Remark(BaseModel, extra="forbid", frozen=True):
    """One thing to know about a run.

    invalid: its figures are not those of an undisturbed run of these settings; they are never compared or
    averaged. disturbed: its figures may have changed. information: anything else.
    """

    kind: RemarkKind
    text: str
    advice: str = ""
    from_figures: bool = False


class Remarked:
    """Whatever has a list of remarks: a result, or a run of any suite."""

    if TYPE_CHECKING:  # each class has its own field
        remarks: list[Remark]

    def remark(self, text: str, kind: RemarkKind = "information", advice: str = "") -> None:
        """Add a remark, once."""
        remark = Remark(kind=kind, text=text, advice=advice)
        if remark not in self.remarks:
            self.remarks.append(remark)

    def texts(self, *kinds: RemarkKind) -> list[str]:
        """The texts of its remarks of these kinds."""
        return [remark.text for remark in self.remarks if remark.kind in kinds]

    @property
    def invalid(self) -> list[str]:
        """Why its figures are not those of an undisturbed run; empty if they are."""
        return self.texts("invalid")


def derived_remarks(r: "Result") -> Iterator[Remark]:
    """The remarks that follow from a result's figures, each once."""
    wrong = (*_not_steady(r), *_impossible(r))
    made = [Remark(kind="invalid", text=text, advice=why) for text, why in wrong]
    made += [remark for use in r.devices for remark in device_remarks(use)]
    made += [Remark(kind="disturbed", text=text, advice=why) for text, why in _disturbances(r)]
    for remark in dict.fromkeys(made):
        yield remark.model_copy(update={"from_figures": True})


def device_remarks(use: "DeviceUse") -> Iterator[Remark]:
    """What the sensors of a rank's device said of a window."""
    held = {why: f"{why} {part:.0%}" for why, part in use.held_down.items()}
    if reasons := sorted(held.keys() - {POWER_CAP}):
        text = f"clocks held down ({', '.join(reasons)})"
        yield Remark(kind="invalid", text=text, advice="check cooling, airflow and power supply")
    if held:
        text = f"rank {use.rank}: clocks were held down in the window: {', '.join(held.values())}"
        yield Remark(kind="information", text=text)
    clock, highest = use.sm_clock_mean_mhz, use.sm_clock_limit_mhz
    if clock and highest and not held and clock < LOW_CLOCK * highest:
        text = f"rank {use.rank}: {clock:.0f} of {highest:.0f} MHz without a reason"
        yield Remark(kind="disturbed", text=text, advice="sudo nvidia-smi -rgc and -rac")
    sampled, counted = use.sampled_power_mean_w, use.average_power_w
    if sampled and counted and use.n_samples >= 5 and abs(counted / sampled - 1) > POWER_AGREES:
        text = f"rank {use.rank}: {counted:.0f} W by the energy counter, {sampled:.0f} W by samples"
        yield Remark(kind="information", text=f"{text} of the power: one of them is wrong")
    if use.other_processes:
        yield Remark(kind="invalid", text="shared GPU", advice=SHARED)


def _not_steady(r: "Result") -> Iterator[tuple[str, str]]:
    m = r.metrics
    steady = "inside the window: the figures are not those of a steady run; use"
    compiled = (
        f"torch.compile worked for {m.window_compile_s or 0:.1f} s {steady} more --warmup-steps"
    )
    again = f"CUDA graphs were recorded {m.window_graphs_recorded} times {steady} another --compile-mode"
    no_loss = r.status == "ok" and r.loss_known and m.final_loss is None and r.step_times_s
    nothing = r.status == "ok" and r.first_step > 0 and not m.n_measured_steps
    after = f"only warm-up was left after step {r.first_step}; use more --n-steps from the start"
    for applies, text, advice in (
        (r.status != "ok", f"status {r.status}", ""),
        (nothing, "no step was measured", after),
        (profiled_in_window(r), "profiled in the window", "use a later --nsys-start"),
        (m.device_shared, "shared GPU", SHARED),
        (m.window_compile_s, "compiled in the window", compiled),
        (m.window_graphs_recorded, "CUDA graphs recorded in the window", again),
        (m.window_saves, "saved in the window", ""),
        (m.window_evaluations, "evaluated in the window", ""),
        (no_loss, "loss not finite", ""),
        (r.fp8 and r.fp8.emulated, "FP8 emulated", "the figures say nothing of FP8's speed"),
    ):
        if applies:
            yield text, advice


def profiled_in_window(r: "Result") -> bool:
    """Whether a profiler was on in some of the measured steps."""
    if r.profile:
        return r.profile.in_window
    a = r.args
    start, stop = a.get("nsys_start"), a.get("nsys_end")
    if not r.ours or start is None or stop is None:
        return False
    begin = a.get("warmup_steps", 0)
    return start < begin + a.get("n_steps", 0) and stop > begin


def _impossible(r: "Result") -> Iterator[tuple[str, str]]:
    """Figures beyond what is possible."""
    m, d = r.metrics, r.device
    # The time that useful FLOPs need at the peaks, over the measured time.
    without = m.ideal_time_fraction is None and not r.fp8  # as for fp32
    if (part := (m.mfu_causal if without else m.ideal_time_fraction) or 0) > 1:
        why = f"the peak of {d.name!r} ({d.peak_source}) or a time is wrong"
        reached = f"the run reached {part:.0%} of the peak, which is impossible"
        yield "faster than its peak", f"{reached}: {why}"
    for use in r.devices:
        watts, limit = use.average_power_w or 0, use.power_limit_w or math.inf
        if watts > (1 + LIMIT_SLACK) * limit:
            why = f"its limit is {limit:,.0f} W; the energy counter is wrong"
            drew = f"rank {use.rank} drew {watts:,.0f} W on average, which is impossible"
            yield "more power than its limit", f"{drew}: {why}"
            break
    gib = max(m.peak_reserved_gib or 0, m.peak_allocated_gib or 0)
    yield from memory_remark(gib, d.memory_gib)
    low, high = random_loss(r) or (-math.inf, math.inf)
    if m.first_loss is not None and not low <= m.first_loss <= high:
        right = f"random values on random tokens give {low:.2f} to {high:.2f}"
        why = f"{right}: the model does not compute what it should"
        text = f"the first loss is {m.first_loss:.2f}, and {why}"
        yield "first loss not that of random values", text
    edited = "was the file edited?"
    if r.step_times_s and min(r.step_times_s) <= 0:
        yield "impossible step times", edited
        return
    if (rate := m.tokens_per_sec_per_gpu) is None or not r.batch.tokens_per_step:
        return
    tokens = r.batch.tokens_per_step * len(r.step_times_s) / d.count
    if not tokens or not 0.99 < rate * sum(r.step_times_s) / tokens < 1.01:
        yield "the rate does not match the step times", edited
    interval = [t for t in (m.step_time_ci95_low_s, m.step_time_ci95_high_s) if t is not None]
    if interval != sorted(interval) or min(interval, default=0.0) < 0:
        yield "an impossible interval of step times", edited


def random_loss(r: "Result") -> tuple[float, float] | None:
    """Bounds of the first loss of random values on random tokens [nats]; None for others.

    Logits are then about normal, with a standard deviation s of `initializer_range` x the square
    root of `hidden_size`: the loss is ln V + s^2 / 2 on average. The bounds leave s^2 / 2 and half a
    nat on both sides, and five standard errors of a mean over the step's tokens.
    """
    a, shape = r.args, r.model.shape
    if a.get("init_from") or r.first_step or a.get("data") != "synthetic":
        return None
    keys = ("vocab_size", "hidden_size", "initializer_range")
    if not all(isinstance(shape.get(k), int | float) and shape[k] > 0 for k in keys):
        return None
    s = shape["initializer_range"] * shape["hidden_size"] ** 0.5 * shape.get("logit_scale", 1.0)
    middle = math.log(shape["vocab_size"]) + s * s / 2
    wide = s * s / 2 + 0.5 + 5 * s / (r.batch.tokens_per_step or 1) ** 0.5
    # With a tied head a token's logit for itself is up to d x initializer_range.
    self_logit = s * shape["hidden_size"] ** 0.5 if shape.get("tie_word_embeddings") else 0.0
    return middle - wide, max(middle, self_logit) + wide


def memory_remark(gib: float | None, has: float | None) -> Iterator[tuple[str, str]]:
    """A remark's text and advice if a peak of memory is more than the device has [GiB]."""
    if gib and has and gib > (1 + MEMORY_SLACK) * has:
        held = f"the run held {gib:,.2f} GiB, which is impossible"
        yield "more memory than its device has", f"{held}: the device has {has:,.2f}"


def drift_remark(step_times_s: list[float]) -> Iterator[tuple[str, str]]:
    """A remark's text and advice if step time changed over the window by more than chance."""
    change, drifts = drift(step_times_s)
    if drifts:
        changed = f"step time changed by {change:+.1%} over the window (last third to first)"
        why = "the device may not have been in a steady state"
        cure = "use more --warmup-steps and --n-steps"
        yield f"drift {change:+.1%}", f"{changed}: {why}; {cure}"


def _disturbances(r: "Result") -> Iterator[tuple[str, str]]:
    m, times = r.metrics, r.step_times_s
    yield from drift_remark(times)
    longest, usual = max(times, default=0.0), statistics.median(times or [0.0])
    if longest > 5 * usual and longest - usual > 0.1 * sum(times):  # the loop must have paused
        text = f"one step took {longest:.2f} s, {longest / usual:.0f} times the median"
        yield text, "look for slow data, or an evaluation or a save among the measured steps"
    if (behind := m.device_imbalance or 0) > SLOW_DEVICE and r.device.type == "cuda":
        slow = f"rank {m.slowest_device}: its GPU multiplies {behind:.0%} slower than the mean"
        yield slow, "every other one waits for it: look at its clocks, power and temperature"
    others, stolen = m.other_cpu_fraction or 0, m.stolen_cpu_fraction or 0
    if others > (BUSY_CPU if r.device.type == "cpu" else BUSY_HOST):
        took = f"other processes took {others:.0%} of the machine's CPU time in the window"
        yield f"busy CPU {others:.0%}", f"{took}: end them, and repeat; top shows them"
    if stolen > STOLEN_CPU:
        took = f"the virtual machine's host withheld {stolen:.0%} of the CPU time in the window"
        yield f"stolen CPU {stolen:.0%}", f"{took}: use another host, or dedicated cores"
