"""Step times; tokens/s and memory stand beside them in the JSON."""

from benchmarks.common import run_train

SHORT = ["--n-steps", 20, "--warmup-steps", 5, "--no-tensorboard"]


def test_step_time(setting, benchmark, tmp_path):
    """The steps of a run are the rounds; tokens/s and memory stand beside them in the JSON."""
    benchmark.group = "step time"
    result = run_train(*setting, *SHORT, "--output-dir", tmp_path)
    times = iter(result.step_times_s)
    clock = [0.0]

    def timer() -> float:
        return clock[0]

    def step() -> None:
        clock[0] += next(times)

    benchmark._timer = timer
    benchmark.pedantic(step, rounds=len(result.step_times_s), iterations=1)
    benchmark.extra_info |= {
        "tokens_per_sec": result.metrics.tokens_per_sec,
        "peak_rss_gib": result.metrics.peak_rss_gib,
        "peak_allocated_gib": result.metrics.peak_allocated_gib,
    }
