"""The schema of a result, with the meaning of each field. Needs no torch.

docs/METRICS.md's tables are made of it (make docs).
"""

import dataclasses
import math
from typing import Any, Literal

from pydantic import model_validator

from llm_train_bench.formulas.time_statistics import drift
from llm_train_bench.formulas.work import Batch
from llm_train_bench.results.metrics import Metrics
from llm_train_bench.settings.flags import GRAPH_MODES
from llm_train_bench.strict import Strict, about
from llm_train_bench.trace.breakdown_schema import CostlyKernel, HostGaps
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

    name: str = about("Name of the config file, or of the directory of a `config.json`.")
    path: str = about("Its path as given.")
    hash: str = about(
        "First 16 hex digits of the SHA-256 of the resolved shape. Two files of one `model_type` "
        "that mean the same model have the same hash; their names and `--pad-vocab` do not change "
        "it."
    )
    n_parameters: int = about(
        "Trainable parameters without padding rows, a tied head counted once."
    )
    n_matmul_parameters: int = about(
        "N of the FLOP formulas: parameters that multiply, i.e. linear layers and head, without "
        "embeddings, norms and biases."
    )
    shape: dict[str, Any] = about("The resolved values in one vocabulary for all families.")
    config: dict[str, Any] = about("The config file's content.")
    ignored_keys: list[str] = about(
        "Keys of the file that this project does not know; they had no effect."
    )


class Device(Strict):
    """The device and the peaks it is held against."""

    type: Literal["cuda", "cpu"] = about("`cuda` (NVIDIA and AMD) or `cpu`.")
    name: str = about("As the driver gives it.")
    memory_gib: float | None = about("Memory of one GPU [GiB]; `null` on a CPU.")
    count: int = about("Ranks: one per GPU; on a CPU, the processes that share it.", ge=1)
    hardware: str = about(
        "The entry of `configs/hardware.json` that was used, or the device's own name."
    )
    peak_bf16_tflops: float | None = about(
        "Dense BF16 datasheet peak of one device [TFLOP/s]; `null` for a device that is not listed "
        "by its whole name."
    )
    peak_fp8_tflops: float | None = about("Dense FP8 peak, likewise.")
    peak_source: str = about("Where the peaks come from.")
    roof_bf16_tflops: float | None = about(
        "Sustained BF16 matmul rate of the best shape on a warm device of this kind [TFLOP/s]. "
        "`benchmarks/gemm.py` measures it into `configs/roofs.json`; `null` where it never ran. A "
        "model can exceed it: the GPU cools during work other than matmuls, and then clocks "
        "higher.",
        default=None,
    )
    roof_fp8_tflops: float | None = about(
        "The same in FP8, for one forward matmul with fast accumulation and two backward ones "
        "without it, as libraries run them in training. `--pass-type forward` is compared with the "
        "same mixture.",
        default=None,
    )
    roof_source: str = about("When and with what it was measured.", default="unknown")


class Fp8Info(Strict):
    """The layers that ran in FP8."""

    backend: Literal["te", "torchao"] = about(
        "`te` (Transformer Engine) or `torchao`. With accumulation, `te` casts weights once a "
        "step; in `train_fsdp.py`, which shards them, in every micro step."
    )
    version: str = about("Its version.")
    recipe: str = about(
        "How tensors are scaled to FP8. With `delayed` and `--sac-freq`, Transformer Engine "
        "reduces the amax values over all ranks once more for each recomputed block."
    )
    emulated: bool = about("Computed in higher precision: the losses are FP8's, the speed is not.")
    all_gather: bool = about("FSDP gathered the weights of the blocks in FP8.")
    primary_weights: bool = about(
        "The weights of the blocks were kept in FP8, their fp32 copies in the optimizer.",
        default=False,
    )
    n_linear_layers: int = about("Linear layers that were converted.")
    n_parameters: int = about("Parameters of these layers that multiply in FP8.")
    high_precision: dict[str, str] = about("The parts that stayed in high precision, and why.")


class RankInfo(Strict):
    """One rank of several."""

    rank: int = about("Number of the rank.")
    host: str = about("Its machine.")
    step_time_mean_s: float = about("Its own mean step time [s].")
    data_time_mean_s: float = about("The parts of that, as above [s].")
    forward_time_mean_s: float = about("Under FSDP it contains waiting for gathers.")
    backward_time_mean_s: float = about("Contains waiting for other ranks.")
    optimizer_time_mean_s: float = about("Likewise.")
    idle_time_mean_s: float | None = about(
        "Under a pipeline: waiting for other stages, between forward and backward passes.",
        default=None,
    )
    peak_memory_gib: float | None = about(
        "Its peak: allocated on a GPU (without tensors inside CUDA graphs), resident on a CPU."
    )
    probe_tflops: float | None = about(
        "Rate of its device by itself just before the window, on a square matmul (2048, bf16; on a "
        "CPU 256, fp32), for a tenth of a second [TFLOP/s]. Compare it with other ranks, not with "
        "a peak.",
        default=None,
    )


class DeviceUse(Strict):
    """Power, clocks and other processes of a rank's device over the window; None where unknown."""

    rank: int = about("Number of the rank.")
    energy_j: float | None = about(
        "Joules by the device's counter. If ranks share a machine's CPUs, the machine's first rank "
        "counts them.",
        default=None,
    )
    average_power_w: float | None = about("That over the window [W].", default=None)
    sampled_power_mean_w: float | None = about(
        "Mean of the samples [W]; a note reports an energy counter that is more than 20 % off.",
        default=None,
    )
    peak_power_w: float | None = about("Highest sample [W].", default=None)
    power_limit_w: float | None = about("Limit in force [W].", default=None)
    sm_clock_mean_mhz: float | None = about(
        "Mean clock of the multiprocessors [MHz].", default=None
    )
    sm_clock_min_mhz: float | None = about("Lowest sample [MHz].", default=None)
    sm_clock_limit_mhz: float | None = about("Highest clock the device has [MHz].", default=None)
    memory_clock_mean_mhz: float | None = about("Mean memory clock [MHz].", default=None)
    temperature_max_c: float | None = about("Highest temperature [degrees C].", default=None)
    memory_mean_gib: float | None = about(
        "Mean memory [GiB] when the window opened, at each sample, and when it closed: of tensors on "
        "the GPU, or the resident size of a CPU run's process.",
        default=None,
    )
    n_samples: int = about("Samples taken.", default=0)
    throttled: dict[str, float] | None = about(
        "Reasons for which the clocks were held down, each with its part of the window; empty if "
        "there were none.",
        default=None,
    )
    other_processes: int | None = about(
        "Other processes on the GPU: the largest number seen when the window opened, about once a "
        "second within it, and when it closed.",
        default=None,
    )

    @property
    def held_down(self) -> dict[str, float]:
        """Reasons that held its clocks down for over a moment, each with its part of the window."""
        return {why: part for why, part in (self.throttled or {}).items() if part >= HELD_DOWN}


class Memory(Strict):
    """Memory of one step by kind, on rank 0."""

    step: int = about("The step that was looked at.")
    parameters_gib: float = about("Parameters held by this rank.")
    gradients_gib: float = about("Their gradients when the backward is done.")
    optimizer_gib: float = about("Optimizer state.")
    activations_gib: float = about(
        "Memory that the first forward pass leaves for the backward: activations, the gradients of "
        "head and logits, low-precision copies of weights, and under FSDP the weights that stay "
        "gathered."
    )
    workspace_gib: float = about(
        "The rest of the peak: `peak_gib` - parameters - optimizer - the larger of activations and "
        "gradients. With accumulation both are subtracted, and under DDP too, as its buckets "
        "always exist."
    )
    peak_gib: float = about("Most memory in tensors during the step.")


class Profile(Strict):
    """Where the time of the profiled steps went, on rank 0."""

    first_step: int = about("First captured step.")
    n_steps: int = about("How many.")
    in_window: bool = about(
        "Whether profiling touched measured steps; the figures above are then those of a slowed "
        "run."
    )
    step_time_s: float = about("A captured step, by the trace [s].")
    slowdown: float | None = about(
        "That over `step_time_median_s`: the cost of profiling.", default=None
    )
    classes_s: dict[str, float] = about(
        "Seconds of a step by class; they add up to `step_time_s`. `matmul` with the format of its "
        "inputs where known, `attention`, `elementwise` (norms and activations too), `loss` and "
        "`optimizer` (by the range they were launched in; matmuls of the loss count as matmuls), "
        "`convolution`, `scan` (state-space models), `embedding` (kernels of libraries for it), "
        "`communication` (exposed; it includes waiting in a collective for slower ranks), "
        "`copies`, `idle` or `host`."
    )
    communication_overlapped_s: float = about(
        "Communication with computation running at the same time [s]."
    )
    host_gaps: HostGaps | None = about(
        "Idle gaps of the GPU that the host caused: the next kernel's launch began after the gap did; "
        "`null` on a CPU:"
    )
    costliest: list[CostlyKernel] = about("The ten kernels (on a CPU operators) that take longest:")
    matmul_flops: float | None = about(
        "FLOPs of a step's matmuls on this device, by formula: without attention, with recomputed "
        "matmuls and padded rows."
    )
    matmul_tflops: float | None = about("`matmul_flops` over the time their kernels run [TFLOP/s].")
    matmul_roof_fraction: float | None = about(
        "The time the matmuls would take at the measured `roof_*_tflops` over the time they took."
    )


class Writer(Strict):
    """A process, so that it can be told from any later one."""

    host: str = about("Its host's name.")
    boot: str | None = about("Id of the host's boot; `null` where there is none.", default=None)
    pid: int = about("Its process id.")
    started: int | None = about("Its start, in clock ticks since the boot.", default=None)


class ResumedFrom(Strict):
    """The checkpoint that a run went on from."""

    run: str = about("Name of the run that wrote it.")
    step: int = about("The first step that was not done yet.")
    path: str = about("Its directory.")


class Lineage(Strict):
    """A training with all of its attempts: an attempt goes on where the one before it was saved."""

    id: str = about("The same in the results and checkpoints of all attempts, and in no others.")
    name: str = about("Name of the first attempt.")
    attempt: int = about("Number of this attempt, from 0.")
    began: float = about("Start of the first attempt's command, in seconds since 1970.")
    started: float = about("Start of this attempt, likewise.")


class Result(Strict):
    """One run, complete enough to be compared years later without anything else."""

    schema_version: Literal[3] = about("Version of this schema: 3.", default=SCHEMA_VERSION)
    status: Literal[
        "running", "ok", "oom", "failed", "interrupted", "preempted", "killed", "unknown"
    ] = about(
        "`ok`; `oom` out of memory; `failed`; `interrupted` by a signal; `preempted`: saved and ended "
        "on request; `running` while it runs. If nobody was left to write the end, the file says "
        "`running` for good; our tools then show `killed`, or `unknown` on another machine.",
        default="running",
    )
    error: str | None = about("Why it ended, on one line, unless `ok`.", default=None)
    notes: list[str] = about(
        "Facts that a reader of the figures must know: unknown peaks, ignored config keys, a loss "
        "that is not finite.",
        default=[],
    )
    writer: Writer = about("The process that writes this file, see below.")
    resumed_from: ResumedFrom | None = about(
        "The checkpoint that the run went on from, see below; `null` if it began at step 0.",
        default=None,
    )
    lineage: Lineage = about("The attempts that this run is one of, see below.")
    run_name: str = about("Name of the run's directory.")
    version: str = about("Version of this project.")
    entrypoint: str = about("Script that ran.")
    command: list[str] = about("Its command line.")
    started_at: str = about("Start, UTC, ISO 8601.")
    ended_at: str | None = about("End, likewise.", default=None)
    args: dict[str, Any] = about(
        "All arguments; `seq_len` and `grad_acc_steps` with their resolved values."
    )
    model: ModelInfo = about("The model, see below.")
    device: Device = about("The device and its peaks, see below.")
    batch: Batch = about("Sizes of a step, see below.")
    fp8: Fp8Info | None = about(
        "The parts that ran in FP8, see below; `null` without `--use-fp8`.", default=None
    )
    attention_kernel: str | None = about(
        "The kernel that computed attention: `flash`, `cudnn`, `efficient` or `math`, as PyTorch "
        "chooses for these heads, or `flex`. If some layers have a sliding window, it is their "
        "kernel. `null` where PyTorch does not tell.",
        default=None,
    )
    environment: dict[str, Any] = about(
        "Host, operating system, Python, library (NCCL or RCCL too) and driver versions, TF32 "
        "state, name and digest of the container image (`image`, if the launcher passed them on), "
        "the environment variables that change speed or numerics, git revision (`git_sha`), and "
        "whether the tree had changes outside `benchmarks/results` and `configs/roofs.json` "
        "(`git_dirty`)."
    )
    observed: Observed | None = about(
        "The kernels that ran in one step after the window, on rank 0, see below; with `--profile` "
        "in the captured steps. `null` with `--no-observe`, or where the profiler failed.",
        default=None,
    )
    metrics: Metrics = about("All that was measured, see below.", default=Metrics())
    memory: Memory | None = about(
        "Memory of one step by kind, see below; `null` on a CPU without `--memory-snapshot`, and "
        "under CUDA graphs.",
        default=None,
    )
    profile: Profile | None = about(
        "Where the time of the profiled steps went, see below; `null` without `--profile`. A run "
        "with it is no baseline.",
        default=None,
    )
    step_times_s: list[float] = about(
        "Time of each measured step [s]; with several ranks, the times of the rank that took "
        "longest in total.",
        default=[],
    )
    warmup_step_times_s: list[float] = about("Time of each warm-up step [s].", default=[])
    ranks: list[RankInfo] = about("With several ranks one entry each, see below.", default=[])
    devices: list[DeviceUse] = about("Power and clocks, one entry a rank, see below.", default=[])

    @model_validator(mode="after")
    def _has_a_batch(self) -> "Result":
        if min(dataclasses.astuple(self.batch)) < 1:
            raise ValueError("batch: a size is below 1")
        return self

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
        if self.metrics.window_saves:
            marks.append("saved in the window")
        if self.metrics.window_evaluations:
            marks.append("evaluated in the window")
        if self.metrics.window_graphs_recorded:
            marks.append("CUDA graphs recorded in the window")
        if self.status == "ok" and self.metrics.final_loss is None and self.step_times_s:
            marks.append("loss not finite")
        if self.fp8 and self.fp8.emulated:
            marks.append("FP8 emulated")
        marks += self.impossible
        marks += self.observed.mismatches if self.observed else []
        return marks

    @property
    def impossible(self) -> dict[str, str]:
        """Figures beyond what is possible: a mark of each, and the line that says why."""
        m, d, found = self.metrics, self.device, {}
        if (part := self.part_of_peak or 0) > 1:
            found["faster than its peak"] = (
                f"the run reached {part:.0%} of the peak, which is impossible: the peak of "
                f"{d.name!r} ({d.peak_source}) or a time is wrong"
            )
        for use in self.devices:
            watts, limit = use.average_power_w or 0, use.power_limit_w or math.inf
            if watts > (1 + LIMIT_SLACK) * limit:
                found["more power than its limit"] = (
                    f"rank {use.rank} drew {watts:,.0f} W on average, which is impossible: its limit is "
                    f"{limit:,.0f} W; the energy counter is wrong"
                )
        has = d.memory_gib or math.inf
        if (gib := max(m.peak_reserved_gib or 0, m.peak_allocated_gib or 0)) > has * 1.001:
            found["more memory than its device has"] = (
                f"the run held {gib:,.2f} GiB, which is impossible: the device has {has:,.2f}"
            )
        low, high = self.random_loss or (-math.inf, math.inf)
        if m.first_loss is not None and not low <= m.first_loss <= high:
            found["first loss not that of random values"] = (
                f"the first loss is {m.first_loss:.2f}, and random values on random tokens give "
                f"{low:.2f} to {high:.2f}: the model does not compute what it should"
            )
        return found

    @property
    def random_loss(self) -> tuple[float, float] | None:
        """Bounds of the first loss of random values on random tokens [nats]; None for others.

        Logits are then about normal, with a standard deviation s of `initializer_range` x the square
        root of `hidden_size`: the loss is ln V + s^2 / 2 on average. The bounds leave s^2 / 2 and half a
        nat on both sides, and five standard errors of a mean over the step's tokens.
        """
        a, shape = self.args, self.model.shape
        if a.get("init_from") or self.resumed_from or a.get("data", "synthetic") != "synthetic":
            return None
        keys = ("vocab_size", "hidden_size", "initializer_range")
        if not all(isinstance(shape.get(k), int | float) and shape[k] > 0 for k in keys):
            return None
        s = shape["initializer_range"] * shape["hidden_size"] ** 0.5 * shape.get("logit_scale", 1.0)
        middle = math.log(shape["vocab_size"]) + s * s / 2
        wide = s * s / 2 + 0.5 + 5 * s / self.batch.tokens_per_step**0.5
        # With a tied head a token's own logit is up to d x initializer_range, where blocks add little.
        own = s * shape["hidden_size"] ** 0.5 if shape.get("tie_word_embeddings") else 0.0
        return middle - wide, max(middle, own) + wide

    @property
    def disturbances(self) -> dict[str, str]:
        """What may have changed the figures, short, and the line that says it."""
        m, found = self.metrics, {}
        if self.drifts:
            change = drift(self.step_times_s)[0]
            found[f"drift {change:+.1%}"] = (
                f"step time changed by {change:+.1%} over the window (last third to first): the device "
                "may not have been in a steady state; use more --warmup-steps and --n-steps"
            )
        others, stolen = m.other_cpu_fraction or 0, m.stolen_cpu_fraction or 0
        if others > (BUSY_CPU if self.device.type == "cpu" else BUSY_HOST):
            found[f"busy CPU {others:.0%}"] = (
                f"other processes took {others:.0%} of the machine's CPU time in the window"
            )
        if stolen > STOLEN_CPU:
            found[f"stolen CPU {stolen:.0%}"] = (
                f"the virtual machine's host withheld {stolen:.0%} of the CPU time in the window"
            )
        return found

    @property
    def drifts(self) -> bool:
        """Whether step time changed over the window by more than chance: no steady state."""
        return drift(self.step_times_s)[1]

    @property
    def part_of_peak(self) -> float | None:
        """Time that useful FLOPs need at the peaks / measured time; above 1, one is wrong."""
        m = self.metrics
        without = m.ideal_time_fraction is None and not self.fp8  # as for fp32
        return m.mfu_causal if without else m.ideal_time_fraction

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
        if args["pt_compile"] and args["compile_mode"] in GRAPH_MODES:
            return m.peak_reserved_gib, "reserved"
        return m.peak_allocated_gib, "allocated"

    @property
    def mean_memory_gib(self) -> float | None:
        """Mean memory of the rank that has the most [GiB]."""
        return max((d.memory_mean_gib for d in self.devices if d.memory_mean_gib), default=None)

    @property
    def power_limit_w(self) -> float | None:
        """The lowest power limit of its devices [W]."""
        return min((d.power_limit_w for d in self.devices if d.power_limit_w), default=None)
