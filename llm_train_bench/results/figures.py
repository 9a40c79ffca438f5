"""Turns finished steps into the figures of a result; docs/METRICS.md defines each."""

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

from llm_train_bench.formulas.flops import (
    flops_per_token,
    matmul_flops,
    nemo_lora_flops_per_token,
    recomputed_flops_per_token,
    step_flops_per_token,
)
from llm_train_bench.formulas.parameters import linear_parameters
from llm_train_bench.formulas.time_statistics import describe
from llm_train_bench.formulas.work import PASS_FORWARDS, STEP_PARTS, Fp8Work, Work
from llm_train_bench.model.config import ModelConfig, describe_keys_without_effect
from llm_train_bench.results.remarks import POWER_CAP
from llm_train_bench.results.result_files import Step, finite
from llm_train_bench.results.schema import DeviceUse, Fp8Info, RankInfo, Result, StepSize

# The shortest window whose ticks of CPU time tell who used it [CPU seconds].
SHORTEST_LOOK_S = 1.0


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """One rank's contribution to the result of all."""

    rank: int
    host: str
    step_times_s: list[float]
    part_means_s: dict[str, Any]
    device: DeviceUse
    memory: dict[str, float | int | None]
    probe_tflops: float | None  # of its device by itself (llm_train_bench/measure/matmul_rate.py)
    # Inside the window. A disturbance makes the run invalid; its advice comes with it.
    disturbances: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    compile_s: float = 0.0
    graphs_recorded: int | None = None
    # Of its machine: all, busy, stolen; and its own (llm_train_bench/measure/device.py).
    cpu_seconds: tuple[float, ...] | None = None


def mean_part_times(steps: list[Step]) -> dict[str, Any]:
    """Mean time [s] of each part of a step, None where unknown; of waiting without a pipeline too."""
    fields = {part: [getattr(s, f"{part}_time_s") for s in steps] for part in STEP_PARTS}
    means = {
        part: None if None in seconds or not seconds else statistics.fmean(seconds)
        for part, seconds in fields.items()
    }
    return means | {"idle": means["idle"] or None}


def fill_rank_metrics(result: Result, ranks: list[RankTimes]) -> None:
    """Per-rank times, the slowest rank, energy and memory over all ranks, into `result`."""
    m = result.metrics
    fill_device_metrics(result, [r.device for r in ranks])
    for key in ranks[0].memory:
        values = [value for r in ranks if (value := r.memory[key]) is not None]
        setattr(m, key, max(values, default=None))
    if m.allocator_retries:
        result.remark(
            f"memory was so full that the allocator emptied its cache {m.allocator_retries} times in the "
            "window, which takes time; a smaller --bsz, or PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    _fill_compile_metrics(result, ranks)
    _fill_machine_use(result, ranks)
    # Times of the slowest rank. The largest time of every step would add up to more than the
    # window, since ranks do not end a step at the same moment.
    result.step_times_s = max((r.step_times_s for r in ranks), key=sum)
    numbers = [len(r.step_times_s) for r in ranks]
    if min(numbers) < max(numbers):  # in a loop of others
        what = f"ranks measured different numbers of steps: {min(numbers)} to {max(numbers)}"
        result.remark(what, "invalid")
    for text, advice in sorted(set().union(*(r.disturbances for r in ranks))):
        result.remark(text, "invalid", advice)
    if len(ranks) == 1:
        return
    result.ranks = [
        RankInfo(
            rank=r.rank,
            host=r.host,
            step_time_mean_s=statistics.fmean(r.step_times_s or [0.0]),
            peak_memory_gib=r.memory["peak_allocated_gib"] or r.memory["peak_rss_gib"],
            probe_tflops=r.probe_tflops,
            **{f"{part}_time_mean_s": mean for part, mean in r.part_means_s.items()},
        )
        for r in ranks
    ]
    if any(r.part_means_s["idle"] for r in ranks):
        m.pipeline_bubble = statistics.fmean(
            (r.part_means_s["idle"] or 0.0)
            / (r.part_means_s["forward"] + r.part_means_s["backward"])
            for r in ranks
        )
    forward_known = all(r.part_means_s["forward"] is not None for r in ranks)
    if forward_known and not (m.all_gather_bytes or m.all_to_all_bytes or m.send_bytes):
        # Ranks wait for each other in backward, so all have the same step time. A late rank shows
        # in the parts before backward, unless it waits for weights there.
        before = [r.part_means_s["data"] + r.part_means_s["forward"] for r in ranks]
        m.slowest_rank = before.index(max(before))
        m.rank_imbalance = max(before) / statistics.fmean(before) - 1
    rates = [r.probe_tflops for r in ranks if r.probe_tflops is not None]
    if len(rates) == len(ranks):
        m.slowest_device = rates.index(min(rates))
        m.device_imbalance = 1 - min(rates) / statistics.fmean(rates)


def _fill_compile_metrics(result: Result, ranks: list[RankTimes]) -> None:
    """Compiling and recording inside the window, on any rank: all others waited for it."""
    m = result.metrics
    spent = max(r.compile_s for r in ranks)
    if result.args.get("pt_compile") or spent:  # FlexAttention compiles without being asked
        m.window_compile_s = spent
    m.window_graphs_recorded = max(
        (r.graphs_recorded for r in ranks if r.graphs_recorded is not None), default=None
    )


def _fill_machine_use(result: Result, ranks: list[RankTimes]) -> None:
    """Parts of CPU time that went to other processes or were withheld, on the worst host."""
    m = result.metrics
    for host in {r.host for r in ranks if r.cpu_seconds}:
        used = [r.cpu_seconds for r in ranks if r.host == host and r.cpu_seconds]
        total, busy, stolen = (max(column) for column in list(zip(*used, strict=True))[:3])
        if total < SHORTEST_LOOK_S:
            continue
        others = max(0.0, busy - sum(own for *_, own in used)) / total
        m.other_cpu_fraction = max(m.other_cpu_fraction or 0.0, others)
        m.stolen_cpu_fraction = max(m.stolen_cpu_fraction or 0.0, stolen / total)


def fill_device_metrics(result: Result, devices: list[DeviceUse]) -> None:
    """Energy of all devices, and if clocks or other processes spoilt the window, into `result`."""
    m = result.metrics
    result.devices = devices
    joules = [d.energy_j for d in devices if d.energy_j is not None]
    m.energy_j = (sum(joules) or None) if len(joules) == len(devices) else None
    throttled = [d.throttled for d in devices if d.throttled is not None]
    if throttled:
        m.power_cap_fraction = max(parts.get(POWER_CAP, 0.0) for parts in throttled)
        m.clocks_held_down = any(d.held_down.keys() - {POWER_CAP} for d in devices)
    for d in devices:
        if d.other_processes is not None:
            m.device_shared = m.device_shared or d.other_processes > 0


def fill_step_metrics(result: Result, warmup: list[Step], measured: list[Step]) -> None:
    """Times, throughput, losses and energy efficiency of the steps that finished, into `result`."""
    m = result.metrics
    result.warmup_step_times_s = [s.step_time_s for s in warmup]
    if not result.step_times_s:  # ended early, or never gathered from other ranks
        result.step_times_s = [s.step_time_s for s in measured]
    times = result.step_times_s
    steps = warmup + measured
    if steps:
        m.first_step_s = steps[0].step_time_s
        m.warmup_s = sum(result.warmup_step_times_s)
        m.first_loss, m.final_loss = finite(steps[0].loss), finite(steps[-1].loss)
        broken = [s.step for s in steps if s.loss is not None and finite(s.loss) is None]
        if broken:
            of = f"{len(broken)} of {len(steps)} steps, first in step {broken[0]}"
            result.remark(f"the loss is not finite in {of}")
    m.n_measured_steps = len(times)
    if not times:
        return
    for key, value in describe(times).items():
        setattr(m, key, value)
    for part, mean in mean_part_times(measured).items():
        setattr(m, f"{part}_time_mean_s", mean)
    m.window_s = sum(times)
    # Of this rank's steps, which may differ in a loop of others.
    tokens = statistics.fmean(s.tokens for s in measured) * len(times)
    m.steps_per_sec = len(times) / m.window_s
    m.tokens_per_sec = tokens / m.window_s
    m.tokens_per_sec_per_gpu = m.tokens_per_sec / result.device.count
    if m.energy_j:
        m.average_power_w = m.energy_j / m.window_s
        m.tokens_per_joule = tokens / m.energy_j
    if price := result.args.get("usd_per_hour"):
        m.usd_per_million_tokens = price / 3600 / m.tokens_per_sec_per_gpu * 1e6
        m.tokens_per_usd = m.tokens_per_sec_per_gpu * 3600 / price


def fill_flop_metrics(result: Result, work: Work) -> None:
    """FLOPs per token, the rate they ran at, and that rate against the peak, into `result`."""
    m, d, config, batch = result.metrics, result.device, work.config, work.batch
    palm, causal = (step_flops_per_token(work, masked) for masked in (False, True))
    fill_flop_rates(result, palm, causal)
    if work.lora:
        m.flops_per_token_nemo = nemo_lora_flops_per_token(work)
        m.mfu_nemo = m.mfu_causal and m.mfu_causal * m.flops_per_token_nemo / causal
    if batch.documents:
        number = sum(count for _, count in batch.documents)
        m.document_length_mean = sum(n * count for n, count in batch.documents) / number
        m.flops_per_token_unpacked = flops_per_token(config, batch.seq_len, False, work.pass_type)
        m.mfu_unpacked = m.mfu and m.mfu * m.flops_per_token_unpacked / palm
    if m.tokens_per_sec_per_gpu is None:
        return
    low = d.peak_fp4_tflops if work.fp8 and work.fp8.recipe == "nvfp4" else d.peak_fp8_tflops
    if result.fp8 and not result.fp8.emulated and m.model_tflops_per_gpu and low and _all_low(work):
        m.mfu_low = m.model_tflops_per_gpu / low
    m.roof_time_fraction, _ = _time_fraction(result, work, d.roof_bf16_tflops, d.roof_fp8_tflops)
    if m.mfu is None or m.mfu_causal is None:
        return
    again = recomputed_flops_per_token(work)
    m.hfu = m.mfu * (1 + again / palm)
    again = recomputed_flops_per_token(work, causal=True)
    m.hfu_causal = m.mfu_causal * (1 + again / causal)
    m.ideal_time_fraction, why = _time_fraction(result, work, d.peak_bf16_tflops, low)
    if why is not None:
        result.remark(f"ideal_time_fraction is null: {why}")


@dataclasses.dataclass
class LoopWork:
    """What a loop of others told of its work: model, FLOPs per token, and tokens per sample."""

    config: ModelConfig | None
    given_flops: float | None
    lengths: set[Any]

    def flops_per_token(self, seq_len: int | None, causal: bool = False) -> float | None:
        """In one convention, None where unknown; of a number that was given, only palm is known."""
        if self.given_flops:
            return None if causal else self.given_flops
        if self.config is None or seq_len is None:
            return None
        return flops_per_token(self.config, seq_len, causal)


def fill_loop_metrics(result: Result, work: LoopWork, measured: list[Step]) -> None:
    """Batch and FLOPs of the measured steps of a loop of others, into `result`."""
    told = [step.tokens for step in measured]
    tokens = round(statistics.fmean(told)) if told else result.batch.tokens_per_step
    seq_len = next(iter(work.lengths)) if len(work.lengths) == 1 else None
    samples = tokens // seq_len if tokens and seq_len and tokens % seq_len == 0 else None
    result.batch = StepSize(tokens_per_step=tokens, seq_len=seq_len, global_batch=samples)
    result.args |= {"tokens_per_step": tokens if len(set(told)) < 2 else None, "seq_len": seq_len}
    if work.config and (keys := describe_keys_without_effect(work.config)) is not None:
        result.remark(keys)
    if palm := work.flops_per_token(seq_len):
        fill_flop_rates(result, palm, work.flops_per_token(seq_len, causal=True))
        return
    why = "give seq_len" if work.config else "give config or flops_per_token"
    if work.config and work.lengths:
        why = f"samples have {sorted(work.lengths)} tokens"
    result.remark(f"mfu and TFLOP/s are null: {why}")


def fill_flop_rates(result: Result, palm: float, causal: float | None) -> None:
    """The rates at which FLOPs per token ran in both conventions, against the peak, into `result`."""
    m, d = result.metrics, result.device
    m.flops_per_token_palm, m.flops_per_token_causal = palm, causal
    if (rate := m.tokens_per_sec_per_gpu) is None:
        return
    tflops, causal_tflops = rate * palm / 1e12, None if causal is None else rate * causal / 1e12
    m.model_tflops_per_gpu, m.model_tflops_per_gpu_causal = tflops, causal_tflops
    if (peak := d.peak_bf16_tflops) is None:
        cpu = ", and benchmarks/gemm.py measures it with as many threads" if d.type == "cpu" else ""
        gives = "--peak-tflops" if result.ours else "an entry in your hardware.json"
        result.remark(f"mfu is null: no known peak for {d.name!r}; {gives} gives one{cpu}")
        return
    m.mfu, m.mfu_causal = tflops / peak, None if causal_tflops is None else causal_tflops / peak


def matmul_work(result: Result, work: Work) -> tuple[float, float | None]:
    """FLOPs of a step's matmuls on one device, and their seconds at the measured roof.

    As formulas.flops.matmul_flops counts them. The seconds are None where the roof is not known.
    """
    (flops, low, _), d = matmul_flops(work), result.device
    low = 0.0 if result.fp8 is None or result.fp8.emulated else low
    if work.amp == "off" or not d.roof_bf16_tflops or (low and not d.roof_fp8_tflops):
        return flops, None
    seconds = (flops - low) / d.roof_bf16_tflops
    seconds += low / d.roof_fp8_tflops if d.roof_fp8_tflops else 0.0
    return flops, seconds / 1e12


def _time_fraction(
    result: Result, work: Work, bf16_tflops: float | None, fp8_tflops: float | None
) -> tuple[float | None, str | None]:
    """Part of the measured time that the useful matmuls need at these rates, or why none."""
    m, fp8 = result.metrics, result.fp8
    if work.amp == "off":
        return None, "the rate of fp32 matmuls is not tabulated"
    if fp8 and fp8.emulated:
        return None, "FP8 was emulated"
    low = _low_flops_per_token(fp8, work) if fp8 else 0.0
    if bf16_tflops is None or (low and fp8_tflops is None):
        return None, f"the {'FP8' if low else 'BF16'} rate of the device is not known"
    seconds = ((m.flops_per_token_causal or 0.0) - low) / (bf16_tflops * 1e12)
    seconds += low / (fp8_tflops * 1e12) if fp8_tflops else 0.0
    return seconds * (m.tokens_per_sec_per_gpu or 0.0), None


def _all_low(work: Work) -> bool:
    """Whether all linear layers of blocks, routers apart, are in the low format in all passes."""
    if work.fp8 is None or work.fp8.recipe == "rowwise_with_gw_hp":
        return False
    every = work.config.weights.values()
    modules = {w.module for w in every if w.is_matrix and not w.stays_exact}
    return modules <= {*work.fp8.layers}


def _low_flops_per_token(fp8: Fp8Info, work: Work) -> float:
    """Useful FLOPs per token of the matmuls in FP8."""
    passes = PASS_FORWARDS[work.pass_type]
    if passes == 3 and fp8.recipe == "rowwise_with_gw_hp":
        passes = 2  # the gradient of the weight is a bf16 matmul
    linear = linear_parameters(work.config)
    layers = work.fp8.layers if work.fp8 else ()
    return 2 * passes * sum(linear.get(module, 0) for module in layers)


def describe_fp8(fp8: Fp8Work, config: ModelConfig, version: str) -> Fp8Info:
    """A result's account of the converted layers of a whole model; a layer's experts count as one."""
    matrices = converted_matrices(fp8, config, range(config.num_hidden_layers))
    same = ("backend", "recipe", "emulated", "all_gather")
    return Fp8Info(
        **{name: getattr(fp8, name) for name in same},
        version=version,
        n_linear_layers=len(matrices),
        n_parameters=sum(matrices),
        high_precision=dict(fp8.high_precision),
    )


def converted_matrices(
    fp8: Fp8Work, config: ModelConfig, layers: Iterable[int], grouped: bool = True
) -> list[int]:
    """Numbers in each converted layer of these blocks; without `grouped` not those of experts."""
    blocks = (config.matrices[i] if grouped else config.linear_layers(i) for i in layers)
    converted = (w for block in blocks for w in block if w.module in fp8.layers)
    return [math.prod(weight.shape) for weight in converted]
