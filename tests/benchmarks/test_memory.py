"""Peak memory of a step's tensors."""

from benchmarks.common import run_train


def test_memory(setting, benchmark, tmp_path):
    """Peak memory of one step's tensors as the only round: a second stands for a GiB."""
    benchmark.group = "peak memory (1 s = 1 GiB)"
    flags = [
        *setting,
        "--n-steps",
        1,
        "--warmup-steps",
        2,
        "--no-tensorboard",
        "--memory-snapshot",
    ]
    result = run_train(*flags, "--output-dir", tmp_path)
    benchmark.extra_info |= result.memory.model_dump()
    clock = [0.0]
    benchmark._timer = lambda: clock[0]

    def use() -> None:
        clock[0] += result.memory.peak_gib

    benchmark.pedantic(use, rounds=1, iterations=1)
