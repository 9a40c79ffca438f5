"""Every metric, declared once: where it shows, and how it is printed. Needs no torch.

docs/METRICS.md says what each means, with unit and formula; a test holds the page against this class. To
add a metric: declare it here and there, and fill it where it is measured.
"""

import string
from typing import Any

from pydantic import Field, model_validator

from llm_train_bench.base.strict import Strict

# Metrics that are gone, which results of earlier versions have.
REMOVED_METRICS = "repeated_steps ep_capacity_needed checkpoint_stall_s checkpoint_gb_per_s".split()


class Metrics(Strict):
    """Everything measured; None where it could not be, with the reason in `remarks`."""

    tokens_per_sec: float | None = None
    tokens_per_sec_per_gpu: float | None = None
    samples_per_sec: float | None = None
    flops_per_token_palm: float | None = None
    flops_per_token_causal: float | None = None
    model_tflops_per_gpu: float | None = None
    model_tflops_per_gpu_causal: float | None = None
    mfu: float | None = None
    mfu_causal: float | None = None
    mfu_low: float | None = None
    mfu_unpacked: float | None = None
    flops_per_token_unpacked: float | None = None
    flops_per_token_nemo: float | None = None
    mfu_nemo: float | None = None
    document_length_mean: float | None = None
    hfu: float | None = None
    hfu_causal: float | None = None
    ideal_time_fraction: float | None = None
    roof_time_fraction: float | None = None
    usd_per_million_tokens: float | None = None
    tokens_per_usd: float | None = None
    steps_per_sec: float | None = None
    memory_utilization: float | None = None
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
    other_cpu_fraction: float | None = None
    stolen_cpu_fraction: float | None = None
    data_time_mean_s: float | None = None
    forward_time_mean_s: float | None = None
    backward_time_mean_s: float | None = None
    optimizer_time_mean_s: float | None = None
    idle_time_mean_s: float | None = None
    pipeline_bubble: float | None = None
    pipeline_bubble_ideal: float | None = None
    setup_s: float | None = None
    warmup_s: float | None = None
    first_step_s: float | None = None
    compile_s: float | None = None
    n_compiled_graphs: int | None = None
    n_graph_breaks: int | None = None
    n_recompilations: int | None = None
    window_compile_s: float | None = None
    window_graphs_recorded: int | None = None
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
    expert_rows_max_over_mean: float | None = None
    ep_rank_rows_max_over_mean: float | None = None
    all_to_all_bytes: int | None = None
    send_bytes: int | None = None
    energy_j: float | None = None
    energy_source: str | None = None
    average_power_w: float | None = None
    tokens_per_joule: float | None = None
    clocks_held_down: bool | None = None
    power_cap_fraction: float | None = None
    device_shared: bool | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    skipped_steps: int | None = None
    n_checkpoints: int | None = None
    window_saves: int | None = None
    checkpoint_bytes: int | None = None
    checkpoint_write_s: float | None = None
    restart_s: float | None = None
    goodput: float | None = None
    time_parts_s: dict[str, float] | None = None
    val_losses: list[tuple[int, float | None]] = Field(default_factory=list)
    window_evaluations: int | None = None
    val_perplexity: float | None = None
    val_loss_before: float | None = None
    val_loss: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if key not in REMOVED_METRICS}


# Columns of runs.csv, and what TensorBoard compares runs by.
COMPARED = (
    "tokens_per_sec tokens_per_sec_per_gpu samples_per_sec model_tflops_per_gpu mfu hfu "
    "ideal_time_fraction usd_per_million_tokens step_time_median_s step_time_mean_s step_time_std_s "
    "step_time_cv step_time_ci95_low_s step_time_ci95_high_s step_time_drift pipeline_bubble "
    "compile_s peak_allocated_gib peak_reserved_gib peak_rss_gib energy_j average_power_w "
    "tokens_per_joule final_loss goodput val_loss "
).split()
# Lines of the final table: label, `?` the metric without which it is left out, template.
ROWS = """
tokens/s | {tokens_per_sec:,.0f}
tokens/s per device | {tokens_per_sec_per_gpu:,.0f}
TFLOP/s per device: palm / causal | {model_tflops_per_gpu:.2f} / {model_tflops_per_gpu_causal:.2f}
MFU: palm / causal | {mfu:.1%} / {mfu_causal:.1%}
MFU of the FP8 or FP4 peak: palm ? mfu_low | {mfu_low:.1%}
ideal time of matmuls: datasheet / measured roof | {ideal_time_fraction:.1%} / {roof_time_fraction:.1%}
step time: median | {step_time_median_s:.4f} s
step time: mean [95 %] | {step_time_mean_s:.4f} s [{step_time_ci95_low_s:.4f}, \
{step_time_ci95_high_s:.4f}]
step time: std, CV | {step_time_std_s:.4f} s, {step_time_cv:.1%}
step time: drift over the window ? step_time_drift | {step_time_drift:+.1%}
data / forward / backward / optimizer | {data_time_mean_s:ms} / {forward_time_mean_s:ms} / \
{backward_time_mean_s:ms} / {optimizer_time_mean_s:ms} ms
pipeline bubble: measured, ideal ? pipeline_bubble | {pipeline_bubble:.1%}, {pipeline_bubble_ideal:.1%}
warm-up | {warmup_s:.1f} s
compilation ? compile_s | {compile_s:.1f} s
peak memory: allocated / reserved ? peak_allocated_gib | {peak_allocated_gib:.2f} / \
{peak_reserved_gib:.2f} GiB
peak memory: resident ? peak_rss_gib | {peak_rss_gib:.2f} GiB
latest rank: before backward ? slowest_rank | {slowest_rank}, {rank_imbalance:+.1%} to the mean
slowest device by itself: rank ? slowest_device | {slowest_device}, {device_imbalance:.1%} behind \
the mean
rows over the mean: fullest expert / ep rank ? expert_rows_max_over_mean | \
{expert_rows_max_over_mean:.2f} / {ep_rank_rows_max_over_mean:.2f}
energy ? average_power_w | {average_power_w:.0f} W, {tokens_per_joule:.2f} tokens/J
loss: first, last | {first_loss:.4f}, {final_loss:.4f}
checkpoint ? checkpoint_write_s | {checkpoint_bytes:,} B in {checkpoint_write_s:.3f} s
goodput since the first start ? goodput | {goodput:.1%}
validation loss: before, after ? val_loss | {val_loss_before:.4f}, {val_loss:.4f}
"""


def metric_rows(metrics: Metrics) -> list[tuple[str, str]]:
    """Label and text of each line of the final table; what is unknown says so."""
    values, rows = metrics.model_dump(), []
    for line in ROWS.strip().splitlines():
        head, template = line.split(" | ")
        label, _, needed = head.partition(" ? ")
        if not needed or values[needed] is not None:
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
