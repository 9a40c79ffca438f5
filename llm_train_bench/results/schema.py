"""The schema of a result. docs/METRICS.md defines each field. Needs no torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from llm_train_bench.base.strict import Strict
from llm_train_bench.results.metrics import Metrics
from llm_train_bench.results.remarks import Remark, Remarked, derived_remarks
from llm_train_bench.settings.flags import GRAPH_MODES, Script, flag_of
from llm_train_bench.trace import breakdown
from llm_train_bench.trace.breakdown import CostlyKernel, HostGaps  # noqa: F401
from llm_train_bench.trace.observed import CollectiveUse, Observed  # noqa: F401 (both are parts of a result)

# Results of an older schema were never released and are refused.
SCHEMA_VERSION = 3
# Clocks throttled in less than this part of the window may be a sample's chance.
HELD_DOWN = 0.01


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

    micro_batch: Size | None = None
    grad_acc_steps: Size | None = None
    data_parallel_size: Size | None = None
    global_batch: Size | None = None
    seq_len: Size | None = None
    tokens_per_step: Size | None = None


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


class Profile(breakdown.StepTime):
    """Where the time of the profiled steps went, on rank 0."""

    first_step: int
    in_window: bool
    slowdown: float | None = None
    costliest: list[CostlyKernel]
    matmul_tflops: float | None


class Writer(Strict):
    """A process, so that it can be told from any later one."""

    host: str
    boot: str | None = None
    pid: int
    started: int | None = None


class Attempt(Strict):
    """One start of a run, which goes on where the attempt before it was saved. Times in s since 1970."""

    first_step: int = 0
    start: float = 0.0
    opened: float = 0.0
    end: float | None = None
    ended: str | None = None
    lost_s: float = 0.0


Status = Literal["running", "ok", "oom", "failed", "interrupted", "preempted", "killed", "unknown"]


# A Meter's own arguments whose runs are repeats.
METER_LENGTH = ("n_steps", "warmup_steps", "usd_per_hour")


class Result(Strict, Remarked):
    """One run, complete enough to be compared years later without anything else."""

    schema_version: Literal[3] = SCHEMA_VERSION
    status: Status = "running"
    error: str | None = None
    remarks: list[Remark] = Field(default_factory=list)
    writer: Writer
    run_id: str
    attempts: list[Attempt] = Field(min_length=1)
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
    def first_step(self) -> int:
        """The first step of the last attempt, whose figures these are; above 0 where it was resumed."""
        return self.attempts[-1].first_step

    @property
    def ours(self) -> bool:
        """Whether one of our scripts ran; else a Meter did, in a loop of others."""
        return self.entrypoint in set(Script)

    def argument(self, name: str) -> str:
        """An argument as the user knows it: its flag, or in Python its name."""
        return flag_of(name) if self.ours else name

    @model_validator(mode="after")
    def _has_all_remarks(self) -> "Result":
        try:
            self.judge()
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"its figures or args cannot be judged: {error}") from None
        return self

    def judge(self) -> None:
        """Make the remarks that follow from the figures anew; call it after a figure has changed."""
        derived = list(derived_remarks(self))
        known = {text for remark in derived for text in (remark.text, remark.advice)}
        noted = [x for x in self.remarks if not x.from_figures and x.text not in known]
        self.remarks = noted + derived

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
