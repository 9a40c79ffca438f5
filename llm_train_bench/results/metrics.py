"""The metrics of a result, and their registry: unit, format, meaning, and where each shows. No torch.

fields.toml is the registry. The final table, runs.csv, TensorBoard, comparisons and docs/METRICS.md are
made of it. To add a metric: add it there and to `Metrics`, fill it where it is measured, run `make docs`.
"""

import dataclasses
import string
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field

from llm_train_bench.base.strict import Strict


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


@dataclasses.dataclass(frozen=True)
class Metric:
    """A row of the registry; fields.toml says what each part is."""

    text: str
    unit: str = ""
    format: str = "g"
    shows: str = ""
    column: str = ""


# Sections of fields.toml: what each field of a result is, by the class that has it.
FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
METRICS = {name: Metric(**row) for name, row in FIELDS["Metrics"].items()}
RUN_COLUMNS = [name for name, metric in METRICS.items() if "runs" in metric.shows]
MEANS = [name for name, metric in METRICS.items() if "mean" in metric.shows]


def metric_text(name: str, value: Any) -> str:
    """A value as the registry formats it, without its unit; or that it is unknown."""
    if value is None:
        return "unknown"
    form = METRICS[name].format
    return format(1e3 * value, ".1f") if form == "ms" else format(value, form)


def metric_rows(metrics: Metrics) -> list[tuple[str, str]]:
    """Label and text of each line of the final table that has a known metric."""
    values, rows = metrics.model_dump(), []
    for label, template in FIELDS["console"].items():
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
        if any(values[name] is not None for name in names):
            texts = {name: metric_text(name, values[name]) for name in names}
            rows.append((label, template.format_map(texts)))
    return rows
