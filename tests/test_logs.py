"""Logs of trainers whose lines are built from their sources' format strings, and --log-pattern."""

import pytest

import compare
from llm_train_bench.compare.read_logs import log_facts, read_log

HEADER_OF_LLM_C = """
| device                | NVIDIA A800-SXM4-80GB                              |
| sequence length T     | 1024                                               |
| total batch size      | 524288                                             |
| num_processes         | 8                                                  |
"""
OLMO_STEP = """2026-06-22 16:07:43\thost:0\tolmo_core:68\tINFO\t[step={0}/2000,epoch=1,eta=5h11m]
    train/CE loss={1:.3f}
    optim/LR (group 0)=4.00E-06
"""
OLMO_RATES = """    throughput/device/TPS=46,{0:03}
    throughput/device/MFU=40.00
"""
LEVANTER = 'INFO :: {{"tracker": "json_logger", "event": "log", "step": {0}, "metrics": {{{1}}}}}'


def llm_c(rate) -> str:
    line = (
        "step {0:4d}/21479 | loss {1:.6f} (+nanz)| norm 16.3 (+nanz)| lr 3e-06 | 2000.00 ms | {2}"
    )
    lines = [
        line.format(i, 11 - i / 10, f"-100.0% bf16 MFU | {rate(i)} tok/s") for i in range(1, 9)
    ]
    return HEADER_OF_LLM_C + "\n".join(lines)


def levanter(n: int) -> str:
    """Two records a step, which belong together."""
    lines = []
    for i in range(n):
        lines.append(LEVANTER.format(i, f'"train/loss": {9 - i}'))
        rates = '"throughput/tokens_per_second": 524288.0, "throughput/duration": 0.5'
        lines.append(LEVANTER.format(i, f'{rates}, "throughput/mfu": 41.0'))
    return "\n".join(lines)


LOGS = {
    # After a resume its tokens/s begin near 0; the batch over the time is right.
    "llm.c": (
        llm_c(lambda i: 262144 * i // 8), [],
        dict(suite="llm.c", n_gpus=8, tokens_per_sec=524288 / 2, mfu=None,
             hardware="NVIDIA A800-SXM4-80GB"),
    ),
    "llm.c in Python": (
        "\n".join(f"step    {i}/100 | train loss 10.98 | norm 25.1 | lr 4e-07 | ({ms} ms | {rate} tok/s)"
                  for i, (ms, rate) in enumerate([(812.4, 20166)] + [(61.5, 266363)] * 7)),
        ["gpus=1"], dict(suite="llm.c", tokens_per_sec_per_gpu=266363),
    ),
    "llm.c on a CPU": (
        "\n".join(f"step {i}: train loss 5.356189 (took {1000.0 + i} ms)" for i in range(8)),
        ["seq-len=64", "global-batch=4", "gpus=1"], dict(suite="llm.c", tokens_per_sec=256 / 1.0045),
    ),
    "OLMo-core": (
        "".join(OLMO_STEP.format(i, 9 - i / 100) + (OLMO_RATES.format(i) if i > 1 else "")
                for i in (1, 5, 10, 15, 20, 25)),
        ["gpus=8"], dict(suite="OLMo-core", tokens_per_sec_per_gpu=46017.5, mfu=0.4),
    ),
    "levanter": (levanter(8), ["gpus=4"], dict(suite="levanter", tokens_per_sec=524288, mfu=0.41)),
    # The mean of all steps is rounded to 10 us; the total time is not.
    "modded-nanogpt": (
        "\n".join(f"step:{i}/1390 train_time:{32 * i}ms step_avg:{31.79}ms" for i in range(1, 12)),
        ["seq-len=1024", "global-batch=8", "gpus=8"],
        dict(suite="modded-nanogpt", tokens_per_sec=8 * 1024 / 0.032),
    ),
    # Steps are dispatched before they run: some of the first look fast.
    "MaxText": (
        "Num_devices: 4, shape (1)\n" + "\n".join(
            f"completed step: {i}, seconds: {s}, TFLOP/s/device: {100 / s}, "
            f"Tokens/s/device: {6 * 19100 / s}, loss: 12.0"
            for i, s in enumerate([44.9, 0.31, 0.63, 0.63] + [6.0] * 8)),
        [], dict(suite="MaxText", n_gpus=4, tokens_per_sec_per_gpu=19100),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_read(name, tmp_path):
    text, facts, expected = LOGS[name]
    (tmp_path / "x.log").write_text(text)
    (r,) = read_log(tmp_path / "x.log", log_facts(facts, None))
    for field, value in expected.items():
        exact = value is None or isinstance(value, str)
        assert getattr(r, field) == (value if exact else pytest.approx(value, rel=1e-3)), field
    if name == "levanter":
        assert len(r.losses) == 8 and len(r.step_times_s) >= 6


def test_a_pattern_reads_any_log(tmp_path, capsys):
    lines = [f"[it {i}] took 1{i % 2},000.5ms loss=3.5 mem 12.5" for i in range(10)]
    (tmp_path / "own.log").write_text("\n".join(lines))
    pattern = (
        r"\[it (?P<step>\d+)\] took (?P<time_ms>.+)ms loss=(?P<loss>\S+) mem (?P<memory_gib>.+)"
    )
    argv = [str(tmp_path / "own.log"), "--log", "seq-len=1024", "own.log:gpus=2", "global-batch=8"]
    assert compare.main(argv) == 2
    assert "--log-pattern reads any" in capsys.readouterr().err
    assert (
        compare.main([*argv, "--log-pattern", pattern, "--output-dir", str(tmp_path / "out")]) == 0
    )
    (r,) = read_log(tmp_path / "own.log", log_facts(argv[2:], pattern))
    assert r.tokens_per_sec_per_gpu == pytest.approx(4 * 1024 / 10.5005, rel=1e-3)
    assert (r.suite, r.memory_gib, len(r.losses)) == ("--log-pattern", 12.5, 10)
