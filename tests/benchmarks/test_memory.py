"""Peak memory of a step's tensors, as the only round: a second stands for a GiB."""


def test_memory(run, record, benchmark):
    result = run("--n-steps", 1, "--warmup-steps", 2, "--memory-snapshot")
    benchmark.extra_info |= result.memory.model_dump()
    record("peak memory (1 s = 1 GiB)", [result.memory.peak_gib])
