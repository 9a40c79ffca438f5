"""From finished steps to the figures of a result; docs/METRICS.md defines each."""

from bench.flops import flops_per_token
from bench.results import Result
from bench.statistics import describe
from bench.stepfile import PARTS, Step, finite
from model.config import ModelConfig


def fill_step_metrics(result: Result, warmup: list[Step], measured: list[Step]) -> None:
    """Times, throughput, losses and energy efficiency of the steps that finished, into `result`."""
    m = result.metrics
    result.warmup_step_times_s = [s.step_time_s for s in warmup]
    result.step_times_s = times = [s.step_time_s for s in measured]
    steps = warmup + measured
    if steps:
        m.first_step_s = steps[0].step_time_s
        m.warmup_s = sum(result.warmup_step_times_s)
        m.first_loss, m.final_loss = finite(steps[0].loss), finite(steps[-1].loss)
        broken = [s.step for s in steps if finite(s.loss) is None]
        if broken:
            result.notes.append(f"the loss is not finite from step {broken[0]} on")
    m.n_measured_steps = len(measured)
    if not measured:
        return
    for key, value in describe(times).items():
        setattr(m, key, value)
    for part in PARTS:
        mean = sum(getattr(s, f"{part}_time_s") for s in measured) / len(measured)
        setattr(m, f"{part}_time_mean_s", mean)
    m.window_s = sum(times)
    tokens = result.batch.tokens_per_step * len(measured)
    m.tokens_per_sec = tokens / m.window_s
    m.tokens_per_sec_per_gpu = m.tokens_per_sec / result.device.count
    if m.energy_j:
        m.average_power_w = m.energy_j / m.window_s
        m.tokens_per_joule = tokens / m.energy_j
    price = result.args.get("usd_per_hour")
    if price:
        m.usd_per_million_tokens = price / 3600 / m.tokens_per_sec_per_gpu * 1e6


def fill_flop_metrics(result: Result, config: ModelConfig) -> None:
    """FLOPs per token, the rate they ran at, and that rate against the peak, into `result`."""
    m, T, pass_type = result.metrics, result.batch.seq_len, result.args["pass_type"]
    m.flops_per_token_palm = flops_per_token(config, T, False, pass_type)
    m.flops_per_token_causal = flops_per_token(config, T, True, pass_type)
    if m.tokens_per_sec_per_gpu is None:
        return
    m.model_tflops_per_gpu = m.tokens_per_sec_per_gpu * m.flops_per_token_palm / 1e12
    m.model_tflops_per_gpu_causal = m.tokens_per_sec_per_gpu * m.flops_per_token_causal / 1e12
    peak = result.device.peak_bf16_tflops
    if peak is None:
        result.notes.append(
            f"mfu is null: no known peak for {result.device.name!r}; --peak-tflops gives one"
        )
        return
    m.mfu = m.model_tflops_per_gpu / peak
    m.mfu_causal = m.model_tflops_per_gpu_causal / peak
    m.hfu = m.mfu  # nothing is recomputed
    if result.args["amp"] == "off":
        result.notes.append(
            "ideal_time_fraction is null: the peak of fp32 matmuls is not tabulated"
        )
    else:
        # All matmuls run in 16 bits, whose dense peak is the BF16 one.
        m.ideal_time_fraction = m.mfu_causal
