"""The schema of a result. docs/METRICS.md defines each field. Needs no torch."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from llm_train_bench.base.strict import Strict
from llm_train_bench.formulas.time_statistics import drift
from llm_train_bench.results.metrics import Metrics
from llm_train_bench.settings.flags import GRAPH_MODES, LENGTH, OUTPUT, Script, of_kind
from llm_train_bench.trace.breakdown import CostlyKernel, HostGaps
from llm_train_bench.trace.observed import CollectiveUse, Observed  # noqa: F401 (both are parts of a result)

# Older results were never released and are refused.
SCHEMA_VERSION = 3
# Clocks throttled in less than this part of the window may be a sample's chance.
HELD_DOWN = 0.01
# A device holds its average power to its limit, except for moments.
LIMIT_SLACK = 0.05
# Parts of a machine's CPU time that are worth a note: of a CPU run, beside a GPU, and withheld.
BUSY_CPU, BUSY_HOST, STOLEN_CPU = 0.1, 0.5, 0.01
# The one reason that is normal: under full load a GPU is at its power limit.
POWER_CAP = "power cap"


class ModelInfo(Strict):
    """The model that ran."""

    name: str
    path: str = ""
    hash: str
    n_parameters: int | None = None
    n_matmul_parameters: int | None = None
    shape: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    ignored_keys: list[str] = Field(default_factory=list)


Size = Annotated[int, Field(ge=1)]


class StepSize(Strict):
    """Samples and tokens of one optimizer step; None for what a loop of others did not tell."""

    micro_batch: Size | None
    grad_acc_steps: Size | None
    data_parallel_size: Size | None
    global_batch: Size | None
    seq_len: Size | None
    tokens_per_step: Size | None


class Device(Strict):
    """The device and the peaks it is held against."""

    type: Literal["cuda", "cpu"]
    name: str
    memory_gib: float | None
    count: int = Field(ge=1)
    hardware: str
    peak_bf16_tflops: float | None
    peak_fp8_tflops: float | None
    peak_fp4_tflops: float | None = None
    peak_source: str
    roof_bf16_tflops: float | None = None
    roof_fp8_tflops: float | None = None
    roof_source: str = "unknown"


class Fp8Info(Strict):
    """The layers that ran in FP8."""

    backend: Literal["te", "torchao"]
    version: str
    recipe: str
    emulated: bool
    all_gather: bool
    primary_weights: bool = False
    n_linear_layers: int
    n_parameters: int
    high_precision: dict[str, str]


class RankInfo(Strict):
    """One rank of several."""

    rank: int
    host: str
    step_time_mean_s: float
    data_time_mean_s: float
    forward_time_mean_s: float | None
    backward_time_mean_s: float | None
    optimizer_time_mean_s: float | None
    idle_time_mean_s: float | None = None
    peak_memory_gib: float | None
    probe_tflops: float | None = None


class DeviceUse(Strict):
    """Power, clocks and other processes of a rank's device over the window; None where unknown."""

    rank: int
    energy_j: float | None = None
    average_power_w: float | None = None
    sampled_power_mean_w: float | None = None
    peak_power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mean_mhz: float | None = None
    sm_clock_min_mhz: float | None = None
    sm_clock_limit_mhz: float | None = None
    memory_clock_mean_mhz: float | None = None
    temperature_max_c: float | None = None
    memory_mean_gib: float | None = None
    n_samples: int = 0
    throttled: dict[str, float] | None = None
    other_processes: int | None = None

    @property
    def held_down(self) -> dict[str, float]:
        """Reasons that held its clocks down for over a moment, each with its part of the window."""
        return {why: part for why, part in (self.throttled or {}).items() if part >= HELD_DOWN}


class Memory(Strict):
    """Memory of one step by kind, on rank 0."""

    step: int
    parameters_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    workspace_gib: float
    peak_gib: float


class Profile(Strict):
    """Where the time of the profiled steps went, on rank 0."""

    first_step: int
    n_steps: int
    in_window: bool
    step_time_s: float
    slowdown: float | None = None
    classes_s: dict[str, float]
    communication_overlapped_s: float
    host_gaps: HostGaps | None
    costliest: list[CostlyKernel]
    matmul_flops: float | None
    matmul_tflops: float | None
    matmul_roof_fraction: float | None


class Writer(Strict):
    """A process, so that it can be told from any later one."""

    host: str
    boot: str | None = None
    pid: int
    started: int | None = None


class ResumedFrom(Strict):
    """The checkpoint that a run went on from."""

    run: str
    step: int
    path: str


class Lineage(Strict):
    """A training with all of its attempts: an attempt goes on where the one before it was saved."""

    id: str
    name: str
    attempt: int
    began: float
    started: float


Status = Literal["running", "ok", "oom", "failed", "interrupted", "preempted", "killed", "unknown"]


# A Meter's own arguments whose runs are repeats.
METER_LENGTH = ("n_steps", "warmup_steps", "usd_per_hour")


class Result(Strict):
    """One run, complete enough to be compared years later without anything else."""

    schema_version: Literal[3] = SCHEMA_VERSION
    status: Status = "running"
    error: str | None = None
    notes: list[str] = Field(default_factory=list)
    writer: Writer
    resumed_from: ResumedFrom | None = None
    lineage: Lineage
    run_name: str
    version: str
    entrypoint: str
    command: list[str]
    started_at: str
    ended_at: str | None = None
    args: dict[str, Any]
    model: ModelInfo
    device: Device
    batch: StepSize
    loss_known: bool = True
    unfit_reasons: list[str] = Field(default_factory=list)
    fp8: Fp8Info | None = None
    attention_kernel: str | None = None
    linear: str | None = None
    environment: dict[str, Any]
    observed: Observed | None = None
    metrics: Metrics = Field(default_factory=Metrics)
    memory: Memory | None = None
    profile: Profile | None = None
    step_times_s: list[float] = Field(default_factory=list)
    warmup_step_times_s: list[float] = Field(default_factory=list)
    ranks: list[RankInfo] = Field(default_factory=list)
    devices: list[DeviceUse] = Field(default_factory=list)

    @property
    def ours(self) -> bool:
        """Whether one of our scripts ran; else a Meter did, in a loop of others."""
        return self.entrypoint in set(Script)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that tell it from other runs. A loop's may have the names of our flags."""
        no_setting = of_kind(OUTPUT, LENGTH) if self.ours else METER_LENGTH
        return {k: v for k, v in self.args.items() if k not in no_setting}

    @property
    def unfit(self) -> list[str]:
        """Why its figures are not those of an undisturbed run; empty if they are."""
        m, a, spoilt = self.metrics, self.args, ", ".join(self.spoilt_by)
        asked = self.ours and (a.get("profile") or a.get("nsys_start") is not None)
        profiled = self.profile or asked
        no_loss = self.loss_known and m.final_loss is None and self.step_times_s
        marks = {
            f"status {self.status}": self.status != "ok",
            "profiled": profiled,
            f"clocks held down ({spoilt})": spoilt,
            "shared GPU": m.device_shared,
            "compiled in the window": m.window_compile_s,
            "saved in the window": m.window_saves,
            "evaluated in the window": m.window_evaluations,
            "CUDA graphs recorded in the window": m.window_graphs_recorded,
            "loss not finite": self.status == "ok" and no_loss,
            "FP8 emulated": self.fp8 and self.fp8.emulated,
        }
        mismatches = self.observed.mismatches if self.observed else []
        marked = [mark for mark, on in marks.items() if on]
        return [*marked, *self.unfit_reasons, *self.impossible, *mismatches]

    @property
    def impossible(self) -> dict[str, str]:
        """Figures beyond what is possible: a mark of each, and the line that says why."""
        m, d, marks = self.metrics, self.device, {}
        # The time that useful FLOPs need at the peaks, over the measured time.
        without = m.ideal_time_fraction is None and not self.fp8  # as for fp32
        if (part := (m.mfu_causal if without else m.ideal_time_fraction) or 0) > 1:
            marks["faster than its peak"] = (
                f"the run reached {part:.0%} of the peak, which is impossible: the peak of "
                f"{d.name!r} ({d.peak_source}) or a time is wrong"
            )
        for use in self.devices:
            watts, limit = use.average_power_w or 0, use.power_limit_w or math.inf
            if watts > (1 + LIMIT_SLACK) * limit:
                marks["more power than its limit"] = (
                    f"rank {use.rank} drew {watts:,.0f} W on average, which is impossible: its limit is "
                    f"{limit:,.0f} W; the energy counter is wrong"
                )
        has = d.memory_gib or math.inf
        if (gib := max(m.peak_reserved_gib or 0, m.peak_allocated_gib or 0)) > has * 1.001:
            marks["more memory than its device has"] = (
                f"the run held {gib:,.2f} GiB, which is impossible: the device has {has:,.2f}"
            )
        low, high = self.random_loss or (-math.inf, math.inf)
        if m.first_loss is not None and not low <= m.first_loss <= high:
            marks["first loss not that of random values"] = (
                f"the first loss is {m.first_loss:.2f}, and random values on random tokens give "
                f"{low:.2f} to {high:.2f}: the model does not compute what it should"
            )
        return marks

    @property
    def random_loss(self) -> tuple[float, float] | None:
        """Bounds of the first loss of random values on random tokens [nats]; None for others.

        Logits are then about normal, with a standard deviation s of `initializer_range` x the square
        root of `hidden_size`: the loss is ln V + s^2 / 2 on average. The bounds leave s^2 / 2 and half a
        nat on both sides, and five standard errors of a mean over the step's tokens.
        """
        a, shape = self.args, self.model.shape
        if a.get("init_from") or self.resumed_from or a.get("data") != "synthetic":
            return None
        keys = ("vocab_size", "hidden_size", "initializer_range")
        if not all(isinstance(shape.get(k), int | float) and shape[k] > 0 for k in keys):
            return None
        s = shape["initializer_range"] * shape["hidden_size"] ** 0.5 * shape.get("logit_scale", 1.0)
        middle = math.log(shape["vocab_size"]) + s * s / 2
        wide = s * s / 2 + 0.5 + 5 * s / (self.batch.tokens_per_step or 1) ** 0.5
        # With a tied head a token's logit for itself is up to d x initializer_range.
        self_logit = s * shape["hidden_size"] ** 0.5 if shape.get("tie_word_embeddings") else 0.0
        return middle - wide, max(middle, self_logit) + wide

    @property
    def disturbances(self) -> dict[str, str]:
        """What may have changed the figures: a mark of each, and the line that says it."""
        m, marks = self.metrics, {}
        change, drifts = drift(self.step_times_s)
        if drifts:
            marks[f"drift {change:+.1%}"] = (
                f"step time changed by {change:+.1%} over the window (last third to first): the device "
                "may not have been in a steady state; use more --warmup-steps and --n-steps"
            )
        others, stolen = m.other_cpu_fraction or 0, m.stolen_cpu_fraction or 0
        if others > (BUSY_CPU if self.device.type == "cpu" else BUSY_HOST):
            marks[f"busy CPU {others:.0%}"] = (
                f"other processes took {others:.0%} of the machine's CPU time in the window"
            )
        if stolen > STOLEN_CPU:
            marks[f"stolen CPU {stolen:.0%}"] = (
                f"the virtual machine's host withheld {stolen:.0%} of the CPU time in the window"
            )
        return marks

    @property
    def drifts(self) -> bool:
        """Whether step time changed over the window by more than chance: no steady state."""
        return drift(self.step_times_s)[1]

    @property
    def spoilt_by(self) -> list[str]:
        """Reasons except power caps that held clocks down for more than a moment of the window."""
        return sorted({why for d in self.devices for why in d.held_down} - {POWER_CAP})

    @property
    def peak_memory(self) -> tuple[float | None, str]:
        """The most memory of a rank [GiB], and of what kind: allocated, reserved or resident.

        Reserved memory includes tensors that live in CUDA graphs; allocated memory does not.
        """
        m, args = self.metrics, self.args
        if m.peak_allocated_gib is None:
            return m.peak_rss_gib, "resident"
        if args.get("pt_compile") and args.get("compile_mode") in GRAPH_MODES:
            return m.peak_reserved_gib, "reserved"
        return m.peak_allocated_gib, "allocated"

    @property
    def power_limit_w(self) -> float | None:
        """The lowest power limit of its devices [W]."""
        return min((d.power_limit_w for d in self.devices if d.power_limit_w), default=None)
