"""Step times; tokens/s and memory stand beside them in the JSON."""


def test_step_time(run, record, benchmark):
    result = run("--n-steps", 20, "--warmup-steps", 5)
    record("step time", result.step_times_s)
    for name in ("tokens_per_sec", "peak_rss_gib", "peak_allocated_gib"):
        benchmark.extra_info[name] = getattr(result.metrics, name)
