"""What a result is: its schema. docs/METRICS.md says what each field means. Needs no torch."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from bench.settings.combinations import GRAPH_MODES

SCHEMA_VERSION = 1
# Part of the window below which throttled clocks are a sample's chance.
HELD_DOWN = 0.01
# The one reason to hold clocks down that belongs to a GPU at work: under full load it is at its limit.
POWER_CAP = "power cap"


class Strict(BaseModel):
    """A part of a file of ours; keys that its schema does not know are errors."""

    model_config = ConfigDict(extra="forbid")


class ModelInfo(Strict):
    """The model that ran."""

    name: str
    path: str
    hash: str
    n_parameters: int
    n_matmul_parameters: int
    shape: dict[str, Any]
    config: dict[str, Any]
    ignored_keys: list[str]


class Device(Strict):
    """The device and the peaks it is held against."""

    type: Literal["cuda", "cpu"]
    name: str
    memory_gib: float | None
    count: int
    hardware: str
    peak_bf16_tflops: float | None
    peak_fp8_tflops: float | None
    peak_source: str
    roof_bf16_tflops: float | None = None
    roof_fp8_tflops: float | None = None
    roof_source: str = "unknown"


class Fp8Info(Strict):
    """What ran in FP8."""

    backend: Literal["te", "torchao"]
    version: str
    recipe: str
    emulated: bool
    all_gather: bool
    primary_weights: bool = False
    n_linear_layers: int
    n_parameters: int
    high_precision: dict[str, str]


class Batch(Strict):
    """What one optimizer step processes."""

    micro_batch: int
    grad_acc_steps: int
    data_parallel_size: int
    global_batch: int
    seq_len: int
    tokens_per_step: int


class RankInfo(Strict):
    """One rank of several."""

    rank: int
    host: str
    step_time_mean_s: float
    data_time_mean_s: float
    forward_time_mean_s: float
    backward_time_mean_s: float
    optimizer_time_mean_s: float
    peak_memory_gib: float | None
    probe_tflops: float | None = None


class DeviceUse(Strict):
    """Power, clocks and company of one rank's device over the window; None where it does not say."""

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
    n_samples: int = 0
    throttled: dict[str, float] | None = None
    other_processes: int | None = None

    @property
    def held_down(self) -> dict[str, float]:
        """What held its clocks down in more than a moment, and in which part of the window."""
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


class CostlyKernel(Strict):
    """A kernel, or on a CPU an operator, of a profiled step."""

    name: str
    kind: str
    calls: float
    time_s: float


class Profile(Strict):
    """Where the time of the profiled steps went, on rank 0."""

    first_step: int
    n_steps: int
    in_window: bool
    step_time_s: float
    slowdown: float | None = None
    classes_s: dict[str, float]
    communication_overlapped_s: float
    host_gaps: float | None
    host_gaps_s: float | None
    longest_host_gap_s: float | None
    host_gaps_by_part_s: dict[str, float]
    costliest: list[CostlyKernel]
    matmul_flops: float | None
    matmul_tflops: float | None
    matmul_roof_fraction: float | None


class Metrics(Strict):
    """Everything measured; None where it could not be, with the reason in `notes`."""

    n_measured_steps: int = 0
    window_s: float | None = None
    step_time_median_s: float | None = None
    step_time_mean_s: float | None = None
    step_time_std_s: float | None = None
    step_time_cv: float | None = None
    step_time_min_s: float | None = None
    step_time_max_s: float | None = None
    step_time_p10_s: float | None = None
    step_time_p90_s: float | None = None
    step_time_ci95_low_s: float | None = None
    step_time_ci95_high_s: float | None = None
    step_time_drift: float | None = None
    data_time_mean_s: float | None = None
    forward_time_mean_s: float | None = None
    backward_time_mean_s: float | None = None
    optimizer_time_mean_s: float | None = None
    setup_s: float | None = None
    warmup_s: float | None = None
    first_step_s: float | None = None
    compile_s: float | None = None
    n_compiled_graphs: int | None = None
    n_graph_breaks: int | None = None
    n_recompilations: int | None = None
    window_compile_s: float | None = None
    window_graphs_recorded: int | None = None
    tokens_per_sec: float | None = None
    tokens_per_sec_per_gpu: float | None = None
    flops_per_token_palm: float | None = None
    flops_per_token_causal: float | None = None
    model_tflops_per_gpu: float | None = None
    model_tflops_per_gpu_causal: float | None = None
    mfu: float | None = None
    mfu_causal: float | None = None
    hfu: float | None = None
    hfu_causal: float | None = None
    ideal_time_fraction: float | None = None
    roof_time_fraction: float | None = None
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    allocator_retries: int | None = None
    peak_rss_gib: float | None = None
    slowest_rank: int | None = None
    rank_imbalance: float | None = None
    slowest_device: int | None = None
    device_imbalance: float | None = None
    all_gather_bytes: int | None = None
    reduce_scatter_bytes: int | None = None
    all_reduce_bytes: int | None = None
    energy_j: float | None = None
    energy_source: str | None = None
    average_power_w: float | None = None
    tokens_per_joule: float | None = None
    usd_per_million_tokens: float | None = None
    clocks_held_down: bool | None = None
    power_cap_fraction: float | None = None
    device_shared: bool | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    skipped_steps: int | None = None
    val_loss_before: float | None = None
    val_loss: float | None = None


class Result(Strict):
    """One run, complete enough to be compared years later without anything else."""

    schema_version: Literal[1] = SCHEMA_VERSION
    status: Literal["running", "ok", "oom", "failed", "interrupted"] = "running"
    error: str | None = None
    notes: list[str] = []
    run_name: str
    entrypoint: str
    command: list[str]
    started_at: str
    ended_at: str | None = None
    args: dict[str, Any]
    model: ModelInfo
    device: Device
    batch: Batch
    fp8: Fp8Info | None = None
    attention_kernel: str | None = None
    environment: dict[str, Any]
    metrics: Metrics = Metrics()
    memory: Memory | None = None
    profile: Profile | None = None
    step_times_s: list[float] = []
    warmup_step_times_s: list[float] = []
    ranks: list[RankInfo] = []
    devices: list[DeviceUse] = []

    @property
    def unfit(self) -> list[str]:
        """Why its figures are not those of an undisturbed run; empty if they are."""
        marks = [] if self.status == "ok" else [f"status {self.status}"]
        if self.profile or self.args.get("profile") or self.args.get("nsys_start") is not None:
            marks.append("profiled")
        if self.spoilt_by:
            marks.append(f"clocks held down ({', '.join(self.spoilt_by)})")
        if self.metrics.device_shared:
            marks.append("shared GPU")
        if self.metrics.window_compile_s:
            marks.append("compiled in the window")
        if self.metrics.window_graphs_recorded:
            marks.append("CUDA graphs recorded in the window")
        if self.status == "ok" and self.metrics.final_loss is None and self.step_times_s:
            marks.append("loss not finite")
        if self.fp8 and self.fp8.emulated:
            marks.append("FP8 emulated")
        if (self.part_of_peak or 0) > 1:
            marks.append("faster than its peak")
        return marks

    @property
    def part_of_peak(self) -> float | None:
        """Time that the useful FLOPs need at the peaks over the measured one; above 1 one is wrong."""
        m = self.metrics
        without = m.ideal_time_fraction is None and not self.fp8  # as for fp32
        return m.mfu_causal if without else m.ideal_time_fraction

    @property
    def spoilt_by(self) -> list[str]:
        """What held clocks down in more than a moment of the window, but for power caps."""
        return sorted({why for d in self.devices for why in d.held_down} - {POWER_CAP})

    @property
    def peak_memory(self) -> tuple[float | None, str]:
        """The most memory of a rank [GiB], and of what kind: allocated, reserved or resident.

        Tensors that live in CUDA graphs are not among the allocated, but in what was reserved.
        """
        m, args = self.metrics, self.args
        if m.peak_allocated_gib is None:
            return m.peak_rss_gib, "resident"
        if args["pt_compile"] and args["compile_mode"] in GRAPH_MODES:
            return m.peak_reserved_gib, "reserved"
        return m.peak_allocated_gib, "allocated"

    @property
    def power_limit_w(self) -> float | None:
        """The lowest power limit of its devices [W]."""
        return min((d.power_limit_w for d in self.devices if d.power_limit_w), default=None)
