"""Every metric, declared once: meaning, unit, formula, how it is printed, where it shows. Needs no torch.

docs/METRICS.md, the final table, the CSV columns of a sweep and TensorBoard's final values are made of
this class. To add a metric: declare it here, and fill it where it is measured.
"""

import string
from typing import Any

from pydantic import Field

from llm_train_bench.strict import Strict


def metric(
    meaning: str,
    unit: str = "",
    row: tuple[str, str] | None = None,
    always: bool = False,
    csv: bool = False,
    final: bool = False,
    default: Any = None,
) -> Any:
    """A field of Metrics. `meaning` holds the formula; with `csv` sweeps have a column of it.

    `row` is a line of the final table, a label and a template of metrics; it is left out where this
    metric is unknown, unless it is shown `always`. With `final` TensorBoard compares runs by it.
    """
    shown = {"unit": unit, "row": row, "always": always, "csv": csv, "final": final}
    return Field(default, description=meaning, json_schema_extra=shown)


class Metrics(Strict):
    """Everything measured; None where it could not be, with the reason in `notes`."""

    tokens_per_sec: float | None = metric(
        "`tokens_per_step` x `n_measured_steps` / `window_s`, all devices together.",
        unit="tokens/s",
        row=("tokens/s", "{tokens_per_sec:,.0f}"),
        always=True,
        csv=True,
        final=True,
    )
    tokens_per_sec_per_gpu: float | None = metric(
        "The same over `device.count`.",
        unit="tokens/s",
        row=("tokens/s per device", "{tokens_per_sec_per_gpu:,.0f}"),
        always=True,
        csv=True,
        final=True,
    )
    samples_per_sec: float | None = metric(
        "`global_batch` x `n_measured_steps` / `window_s`, all devices together.",
        unit="samples/s",
        csv=True,
    )
    flops_per_token_palm: float | None = metric(
        "Training: 6 N + 12 L d T, d = heads x head_dim (Chowdhery et al. 2022, appendix B). A "
        "layer with a window W < T has W in place of T. Forward alone: a third.",
        unit="FLOP",
    )
    flops_per_token_causal: float | None = metric(
        "Training: 6 N + 6 L d T: the masked half of attention is not counted. With a window: 12 d "
        "(W - W^2 / 2T) a layer.",
        unit="FLOP",
    )
    model_tflops_per_gpu: float | None = metric(
        "`tokens_per_sec_per_gpu` x `flops_per_token_palm` / 10^12.",
        unit="TFLOP/s",
        row=(
            "TFLOP/s per device: palm / causal",
            "{model_tflops_per_gpu:.2f} / {model_tflops_per_gpu_causal:.2f}",
        ),
        always=True,
        csv=True,
        final=True,
    )
    model_tflops_per_gpu_causal: float | None = metric(
        "The same in the `causal` convention.", unit="TFLOP/s"
    )
    mfu: float | None = metric(
        "`model_tflops_per_gpu` / `peak_bf16_tflops`. Always palm, always against the dense BF16 "
        "peak.",
        row=("MFU: palm / causal", "{mfu:.1%} / {mfu_causal:.1%}"),
        always=True,
        csv=True,
        final=True,
    )
    mfu_causal: float | None = metric("The same in the `causal` convention.")
    hfu: float | None = metric(
        "As `mfu`, plus the FLOPs that activation checkpointing repeats. In each checkpointed "
        "block these are all except the last matmul's. Eager blocks repeat that one too if a "
        "dropout follows it or FP8 computes it. With `--sac-policy op` only attention with dropout "
        "counts. FlexAttention in eager blocks under `op` is repeated but not counted.",
        csv=True,
        final=True,
    )
    hfu_causal: float | None = metric(
        "The same in the `causal` convention: attention kernels skip the masked half, so at long "
        "sequences this is nearer to what the hardware did."
    )
    ideal_time_fraction: float | None = metric(
        "Time that the useful FLOPs (matmuls and attention, causal) need at the dense peaks, over "
        "the measured time. Layers converted to FP8 count against the FP8 peak (with "
        "`rowwise_with_gw_hp` two thirds of their FLOPs), the rest against BF16's. With all "
        "matmuls in 16 bits it equals `mfu_causal`. `null` where a peak is unknown, as for fp32, "
        "and for emulated FP8. A value above 1 (without FP8, `mfu_causal` above 1) is impossible: "
        "a peak or a time is wrong, the run is unfit for comparison and a note says so.",
        row=(
            "ideal time of matmuls: datasheet / measured roof",
            "{ideal_time_fraction:.1%} / {roof_time_fraction:.1%}",
        ),
        always=True,
        csv=True,
        final=True,
    )
    roof_time_fraction: float | None = metric(
        "As `ideal_time_fraction`, against the measured rates `roof_*_tflops` in place of the "
        "datasheet's."
    )
    usd_per_million_tokens: float | None = metric(
        "`--usd-per-hour` / 3600 / `tokens_per_sec_per_gpu` x 10^6.", unit="US$", csv=True
    )
    tokens_per_usd: float | None = metric(
        "The inverse: `tokens_per_sec_per_gpu` x 3600 / `--usd-per-hour`.", unit="tokens/US$"
    )
    steps_per_sec: float | None = metric("`n_measured_steps` / `window_s`.", unit="steps/s")
    memory_utilization: float | None = metric(
        "`peak_reserved_gib` / the device's memory, on a GPU; the highest of all ranks."
    )
    n_measured_steps: int = metric("Measured steps that finished.", default=0)
    window_s: float | None = metric("Sum of their times.", unit="s")
    step_time_median_s: float | None = metric(
        "Median.",
        unit="s",
        row=("step time: median", "{step_time_median_s:.4f} s"),
        always=True,
        csv=True,
        final=True,
    )
    step_time_mean_s: float | None = metric(
        "Mean: `window_s` / `n_measured_steps`.",
        unit="s",
        row=(
            "step time: mean [95 %]",
            "{step_time_mean_s:.4f} s [{step_time_ci95_low_s:.4f}, {step_time_ci95_high_s:.4f}]",
        ),
        always=True,
        csv=True,
    )
    step_time_std_s: float | None = metric(
        "Standard deviation of the sample (n - 1).",
        unit="s",
        row=("step time: std, CV", "{step_time_std_s:.4f} s, {step_time_cv:.1%}"),
        always=True,
        csv=True,
    )
    step_time_cv: float | None = metric("Standard deviation over mean.", csv=True)
    step_time_min_s: float | None = metric("Shortest.", unit="s")
    step_time_max_s: float | None = metric("Longest.", unit="s")
    step_time_p10_s: float | None = metric("10th percentile, linear interpolation.", unit="s")
    step_time_p90_s: float | None = metric("90th percentile, likewise.", unit="s")
    step_time_ci95_low_s: float | None = metric(
        "Lower end of a 95 % interval of the mean: a percentile bootstrap over the means of ten "
        "consecutive parts of the window, since neighbouring steps are alike. It is widened "
        "because ten parts are few (Hesterberg 2015). It covers 95 % for independent steps. If "
        "each step keeps half of the last one's deviation, it covers 92 % for a hundred steps and "
        "83 % for twenty. It knows this run's steps, not how much runs differ. `null` for one "
        "step.",
        unit="s",
        csv=True,
    )
    step_time_ci95_high_s: float | None = metric("Upper end.", unit="s", csv=True)
    step_time_drift: float | None = metric(
        "Mean step time of the window's last third over that of its first, minus 1; `null` below "
        "nine steps. Beyond both 2 % and four standard errors a note reports it, and the run is no "
        "baseline: clocks fall while a GPU warms up, and more `--warmup-steps` help.",
        row=("step time: drift over the window", "{step_time_drift:+.1%}"),
        csv=True,
    )
    other_cpu_fraction: float | None = metric(
        "Part of the machine's CPU time in the window that went to processes other than the run's "
        "ranks, the largest of all hosts. A note reports more than 10 % on a CPU, 50 % beside a GPU.",
    )
    stolen_cpu_fraction: float | None = metric(
        "Part of the CPU time that a virtual machine's host withheld, likewise. A note reports more "
        "than 1 %."
    )
    data_time_mean_s: float | None = metric(
        "Part of the mean step until its batch is on the device, with the host's bookkeeping since "
        "the last step. A run's samples are checked before it starts, so a slow disk shows there "
        "and not here.",
        unit="s",
        row=(
            "data / forward / backward / optimizer",
            "{data_time_mean_s:ms} / {forward_time_mean_s:ms} / {backward_time_mean_s:ms} / "
            "{optimizer_time_mean_s:ms} ms",
        ),
        always=True,
    )
    forward_time_mean_s: float | None = metric(
        "Forward passes and loss. The gradients of the head and of the logits are taken here, with "
        "the loss.",
        unit="s",
    )
    backward_time_mean_s: float | None = metric("Backward passes.", unit="s")
    optimizer_time_mean_s: float | None = metric(
        "Clipping, optimizer, zeroing gradients.", unit="s"
    )
    idle_time_mean_s: float | None = metric(
        "Waiting for other stages of a pipeline, on rank 0; `ranks` has each rank's. `null` without one.",
        unit="s",
    )
    pipeline_bubble: float | None = metric(
        "That time over the time of forward and backward passes, mean over all ranks.",
        row=(
            "pipeline bubble: measured, ideal",
            "{pipeline_bubble:.1%}, {pipeline_bubble_ideal:.1%}",
        ),
        csv=True,
    )
    pipeline_bubble_ideal: float | None = metric(
        "(p - 1) / (v m) for p groups of ranks, v stages each and m micro batches: what the schedule "
        "costs if all stages take the same time and sending none (Narayanan et al. 2021, section 2.2)."
    )
    setup_s: float | None = metric(
        "From making the run's directory to the window, without the warm-up steps: building the "
        "model, first validation.",
        unit="s",
    )
    warmup_s: float | None = metric(
        "Sum of the warm-up steps.", unit="s", row=("warm-up", "{warmup_s:.1f} s"), always=True
    )
    first_step_s: float | None = metric("The run's very first step.", unit="s")
    compile_s: float | None = metric(
        "Wall time torch.compile took in this process for tracing and code generation; autotuning "
        "at first launches and recording CUDA graphs are in `warmup_s`. It is less if Inductor's "
        "disk cache has the code from an earlier run. `null` when not compiled.",
        unit="s",
        row=("compilation", "{compile_s:.1f} s"),
        csv=True,
        final=True,
    )
    n_compiled_graphs: int | None = metric(
        "Graphs that torch.compile captured, recompilations included; `null` when not compiled, "
        "like the next three."
    )
    n_graph_breaks: int | None = metric(
        "Times torch.compile had to fall back to Python between graphs. Blocks are compiled with "
        "`fullgraph`, so there it is an error."
    )
    n_recompilations: int | None = metric(
        "Graphs captured because an earlier one did not fit any more."
    )
    window_compile_s: float | None = metric(
        "Compile time inside the window, with FlexAttention's, which compiles without being asked. "
        "It should be 0; if not, the run is unfit for comparison and a note says so.",
        unit="s",
    )
    window_graphs_recorded: int | None = metric(
        "CUDA graphs recorded inside the window, which should be 0 too; `null` without CUDA graphs."
    )
    peak_allocated_gib: float | None = metric(
        "Most memory in tensors on the GPU. It leaves out tensors inside CUDA graphs; "
        "`peak_reserved_gib` has them.",
        unit="GiB",
        row=(
            "peak memory: allocated / reserved",
            "{peak_allocated_gib:.2f} / {peak_reserved_gib:.2f} GiB",
        ),
        csv=True,
        final=True,
    )
    peak_reserved_gib: float | None = metric(
        "Most memory held by PyTorch's allocator, including memory kept from before the window.",
        unit="GiB",
        csv=True,
        final=True,
    )
    allocator_retries: int | None = metric(
        "Times the allocator had to free its cache and retry: above 0, the run was at the edge."
    )
    peak_rss_gib: float | None = metric(
        "CPU runs: peak resident size of the process since its start.",
        unit="GiB",
        row=("peak memory: resident", "{peak_rss_gib:.2f} GiB"),
        csv=True,
        final=True,
    )
    slowest_rank: int | None = metric(
        "The rank with the largest mean of data and forward time. Step times cannot tell: ranks "
        "wait for each other in every step. `null` where weights are gathered in the forward pass "
        "(FSDP): fast ranks wait for slow ones there too.",
        row=("latest rank: before backward", "{slowest_rank}, {rank_imbalance:+.1%} to the mean"),
    )
    rank_imbalance: float | None = metric(
        "That time over the mean of all ranks, minus 1; `null` in the same case."
    )
    slowest_device: int | None = metric(
        "The rank with the device that was slowest by itself, by `probe_tflops`.",
        row=(
            "slowest device by itself: rank",
            "{slowest_device}, {device_imbalance:.1%} behind the mean",
        ),
    )
    device_imbalance: float | None = metric(
        "How far its `probe_tflops` is below the mean of all ranks, as a fraction of that mean."
    )
    all_gather_bytes: int | None = metric(
        "Bytes that a rank hands to all-gathers per optimizer step, at the size of their outputs. "
        "By formula (`formulas/collectives.py`), without the 4 bytes of the loss and norm.",
        unit="B",
    )
    reduce_scatter_bytes: int | None = metric(
        "The same for reduce-scatters, at the size of their inputs.", unit="B"
    )
    all_reduce_bytes: int | None = metric("The same for all-reduces.", unit="B")
    expert_rows_max_over_mean: float | None = metric(
        "Rows of the fullest expert over the mean of its layer, in the worst layer, over all steps and "
        "ranks. 1 with --route balanced.",
        row=("fullest expert: rows over the mean",
             "{expert_rows_max_over_mean:.2f}"),
    )  # fmt: skip
    all_to_all_bytes: int | None = metric(
        "The same for all-to-alls: what this rank sends, its own part included.", unit="B"
    )
    send_bytes: int | None = metric(
        "What rank 0 sends to other groups of a pipeline: the residual stream, its gradient, and the "
        "gradient of a tied head.",
        unit="B",
    )
    energy_j: float | None = metric("Joules.", unit="J", csv=True)
    energy_source: str | None = metric("The counter that was read, or why none was.")
    average_power_w: float | None = metric(
        "`energy_j` / `window_s`.",
        unit="W",
        row=("energy", "{average_power_w:.0f} W, {tokens_per_joule:.2f} tokens/J"),
        csv=True,
        final=True,
    )
    tokens_per_joule: float | None = metric(
        "Tokens of the window / `energy_j`.", unit="tokens/J", csv=True, final=True
    )
    clocks_held_down: bool | None = metric(
        "Whether the clocks of any device were held down in more than 1 % of the window by "
        "anything except its power cap. `devices` names the reason. `null` if no device tells."
    )
    power_cap_fraction: float | None = metric(
        "Part of the window with clocks held down by the power cap, on the device with the largest "
        "part. That is usual under full load: it is how fast the device is at this "
        "`power_limit_w`."
    )
    device_shared: bool | None = metric(
        "Whether another process was on any of the GPUs. This is checked when the window opens and "
        "closes, and about once a second in between; `null` if no driver tells."
    )
    first_loss: float | None = metric(
        "Loss of the first step, warm-up included.",
        unit="nats",
        row=("loss: first, last", "{first_loss:.4f}, {final_loss:.4f}"),
        always=True,
    )
    final_loss: float | None = metric(
        "Loss of the last finished step of warm-up and window; steps added for a profiler are in "
        "`steps.jsonl`.",
        unit="nats",
        csv=True,
        final=True,
    )
    skipped_steps: int | None = metric(
        "Optimizer steps skipped because fp16 gradients overflowed, warm-up included; `null` "
        "without fp16."
    )
    n_checkpoints: int | None = metric("Checkpoints that were committed; `null` without saving.")
    window_saves: int | None = metric("Saves that began inside the window; they mark the run.")
    checkpoint_bytes: int | None = metric("Size of the last checkpoint.", unit="B")
    checkpoint_stall_s: float | None = metric(
        "Mean time for which a save held up the loop: waiting for the last one, and copying.", unit="s",
        row=("checkpoint: size, stall, write", "{checkpoint_bytes:,} B, {checkpoint_stall_s:.3f} s, "
             "{checkpoint_write_s:.3f} s"),
    )  # fmt: skip
    checkpoint_write_s: float | None = metric(
        "Mean time from the copy to the commit, beside the training.", unit="s"
    )
    checkpoint_gb_per_s: float | None = metric(
        "`checkpoint_bytes` / `checkpoint_write_s` / 10^9.", unit="GB/s"
    )
    restart_s: float | None = metric(
        "From the start of the process to the end of its first step; `null` unless resumed.",
        unit="s",
    )
    goodput: float | None = metric(
        "`time_parts_s` of the steps over the sum of all parts; `null` without saving or resuming.",
        row=("goodput since the first start", "{goodput:.1%}"),
        csv=True,
        final=True,
    )
    time_parts_s: dict[str, float] | None = metric(
        "Where the time went since the first attempt was started: `steps` that count, `start` to the "
        "first step, `restart` likewise in later attempts, `compile`, `save` (the loop waited), "
        "`lost steps` (done again later), `waiting` between attempts, `other`. An attempt that was "
        "killed has up to a second of its last steps in `waiting`.",
        unit="s",
    )
    val_losses: list[tuple[int, float]] = metric(
        "Step and validation loss of each `--eval-every`.", default=[]
    )
    window_evaluations: int | None = metric("Evaluations inside the window; they mark the run.")
    val_perplexity: float | None = metric("e to the power of `val_loss`.")
    val_loss_before: float | None = metric(
        "Loss over `--val-data` before the first step: `--val-batches` micro batches, or all whole "
        "ones if there are fewer.",
        unit="nats",
    )
    val_loss: float | None = metric(
        "The same batches after the last step.",
        unit="nats",
        row=("validation loss: before, after", "{val_loss_before:.4f}, {val_loss:.4f}"),
        final=True,
    )


def shown_of(name: str) -> dict[str, Any]:
    """A metric's declaration besides its meaning: unit, row, always, csv, final."""
    return Metrics.model_fields[name].json_schema_extra


CSV_COLUMNS = tuple(name for name in Metrics.model_fields if shown_of(name)["csv"])
FINAL_METRICS = tuple(name for name in Metrics.model_fields if shown_of(name)["final"])


def metric_rows(metrics: Metrics) -> list[tuple[str, str]]:
    """Label and text of each line of the final table; what is unknown says so."""
    values = metrics.model_dump()
    rows = []
    for name in Metrics.model_fields:
        shown = shown_of(name)
        if shown["row"] and (shown["always"] or values[name] is not None):
            label, template = shown["row"]
            rows.append((label, _Template().format(template, **values)))
    return rows


class _Template(string.Formatter):
    """Formats unknown values as such, and seconds as milliseconds where the format is `ms`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "unknown"
        if format_spec == "ms":
            return format(1e3 * value, ".1f")
        return super().format_field(value, format_spec)
