"""Logs of other trainers: excerpts, lines built from format strings, what a log lacks, --log-pattern."""

import csv
import json
import re
import shutil
import statistics
import time

import pytest

import compare
from llm_train_bench.compare.log_formats import SUITES, parse
from llm_train_bench.compare.read_logs import log_facts, parse_log, read_log
from llm_train_bench.compare.records import LogFacts, Record, steady
from tests import fuzz
from tests.helpers import ROOT, words
from tests.test_compare import records_of

EXCERPT_DIR = ROOT / "tests/logs"


def given(**facts) -> LogFacts:
    return LogFacts(**{name: {"": value} for name, value in facts.items()})


def record_of(path, text=None, **facts) -> Record:
    """The run of a log, which is first written if a text is given."""
    if text is not None:
        path.write_text(text)
    (record,) = read_log(path, given(**facts))
    return record


# Excerpts of other people's logs (tests/logs/README.md), and what they say: by hand from the same lines.
EXCERPTS = {
    "megatron": ("Megatron-LM", {"seq_len": 4096, "n_gpus": 256}, dict(
        global_batch=2048, seq_len=4096, step_times_s=[15.639, 15.4485],  # the first of three is left out
        tokens_per_sec_per_gpu=2048 * 4096 * 2 / (15.639 + 15.4485) / 256,
        tflops_per_gpu=2 / (1 / 494.6 + 1 / 500.6), first_rate=[(5, 4.134e-07)],
        losses=[(5, 13.4424), (6, 13.42407), (7, 13.40574)])),
    # Colours, pairs of current and mean, a line printed twice; printed rates and times are one figure.
    "primus": ("Primus", {}, dict(
        n_gpus=8, seq_len=8192, global_batch=128, n_losses=12, memory_kind="of the whole device",
        tokens_per_sec_per_gpu=9783.7, tokens_per_sec=8 * 9783.7, time_s=128 * 8192 / 8 / 9783.7)),
    "nemo": ("NeMo", {"seq_len": 8192, "n_gpus": 64}, dict(
        global_batch=128, model="nemo", first_loss=[(17, 11.03)], n_losses=12, tokens_per_sec=82377.0)),
    # The last of several runs.
    "torchtitan": ("torchtitan", {"n_gpus": 8}, dict(
        first_loss=[(1, 12.2648)], n_losses=5, tokens_per_sec_per_gpu=7611.0, tokens_per_sec=8 * 7611.0,
        mfu=0.4457, memory_gib=30.91, flop_convention="torchtitan")),
    "automodel": ("NeMo Automodel", {"n_gpus": 8}, dict(
        tokens_per_sec=9184.8, first_loss=[(4, 1.5514)], tokens_per_sec_per_gpu=9184.8 / 8)),
    "megatron-bridge": ("Megatron-Bridge", {"seq_len": 4096, "n_gpus": 64}, dict(
        global_batch=512, step_times_s=[9.089])),
    "llm-foundry": ("llm-foundry", {}, dict(
        n_gpus=8, seq_len=2048, global_batch=96, tokens_per_sec=84987.0, mfu=0.4644, tflops_per_gpu=459.4,
        memory_gib=42.1e9 / 2**30)),
    "llm-foundry-old": ("llm-foundry", {}, dict(
        tokens_per_sec=None, n_losses=4,
        notes=["no tokens/s: the log lacks any time; --log KEY=VALUE supplies them"])),
    # The first two of ten steps are left out: 0 compiles, 1 is timed before it is done.
    "maxtext": ("MaxText", {}, dict(n_gpus=4, tokens_per_sec_per_gpu=8724.7, tflops_per_gpu=135.73)),
    "torchtune": ("torchtune", {"n_gpus": 2}, dict(tokens_per_sec_per_gpu=486.3, tokens_per_sec=972.6)),
    # 262,144 tokens in 33.69 s; 0.96 % of an A100's 312 TFLOP/s.
    "nanogpt": ("nanoGPT", {"n_gpus": 2}, dict(tokens_per_sec=7781.5, tflops_per_gpu=2.995)),
    "nanochat": ("nanochat", {}, dict(n_gpus=1, seq_len=512, tokens_per_sec=12062.0, mfu=None,
                                      hardware="NVIDIA GeForce RTX 4070 Laptop GPU")),
    # 4 samples of 512 in each micro batch; eight times from 0.300 to 0.603 s.
    "litgpt": ("litgpt", {"n_gpus": 1}, dict(tokens_per_sec=4 * 512 * 8 / 3.77676, memory_gib=12.95)),
    # Harmonic mean of the last five samples/s.
    "deepspeed": ("DeepSpeed", {"seq_len": 8192, "n_gpus": 3072},
                  dict(tokens_per_sec=2222.9 * 8192, memory_gib=39.0)),
    "axolotl": ("axolotl", {}, dict(tokens_per_sec=None, memory_gib=34.89, memory_kind="allocated")),
    # 2.87, 2.97 and 3.27 s between the means 8.77, 5.82, 4.87 and 4.47 s of 1, 2, 3 and 4 batches.
    "lightning": ("Lightning", {"seq_len": 128, "global_batch": 16, "n_gpus": 1},
                  dict(tokens_per_sec=3 * 16 * 128 / 9.11)),
    "megatron-bridge-gb200": ("Megatron-Bridge", {"seq_len": 4096, "global_batch": 512, "n_gpus": 64},
                              dict(tflops_per_gpu=1052.17, tokens_per_sec=10 * 512 * 4096 / 24.87)),
    "megatron-bridge-interval": ("Megatron-Bridge", {"seq_len": 4096, "n_gpus": 64},
                                 dict(tflops_per_gpu=58.2, tokens_per_sec=512 * 4096 / 14.2603)),
    "automodel-totals": ("NeMo Automodel", {}, dict(n_gpus=8, tokens_per_sec=8672.7)),
    "automodel-per-gpu": ("NeMo Automodel", {"n_gpus": 8},
                          dict(tokens_per_sec_per_gpu=1461.9, tokens_per_sec=8 * 1461.9)),
    # Six steps of 32 x 4,096 tokens in 11.462207 s; the first is compilation, the second left out too.
    "automodel-benchmark": ("NeMo Automodel benchmark", {},
                            dict(n_gpus=8, seq_len=4096, global_batch=32, memory_gib=61.25, mfu=0.42455,
                                 tokens_per_sec=6 * 32 * 4096 / 11.462207)),
    "gpt-neox": ("GPT-NeoX", {"seq_len": 2048, "n_gpus": 8},
                 dict(tflops_per_gpu=112.9, tokens_per_sec=7.799 * 2048)),
    "megatron-deepspeed": ("Megatron-DeepSpeed", {}, dict(n_gpus=64, seq_len=2048, global_batch=1536,
                                                          tokens_per_sec_per_gpu=144.6)),
    "megatron-deepspeed-argonne": ("Megatron-DeepSpeed", {}, dict(n_gpus=3072, seq_len=8192,
                                                                  tflops_per_gpu=47.2)),
    # 19,660,800 tokens in 299.1983 s; the printed 2,737.984 tokens/s are of one rank.
    "hf-trainer": ("Hugging Face Trainer", {}, dict(n_gpus=24, tokens_per_sec_per_gpu=2737.98)),
}  # fmt: skip


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


BUILT = {
    # After a resume its tokens/s begin near 0; the batch over the time is right.
    "llm.c": (
        llm_c(lambda i: 262144 * i // 8), {},
        dict(suite="llm.c", n_gpus=8, tokens_per_sec=524288 / 2, mfu=None,
             hardware="NVIDIA A800-SXM4-80GB"),
    ),
    "llm.c in Python": (
        "\n".join(f"step    {i}/100 | train loss 10.98 | norm 25.1 | lr 4e-07 | ({ms} ms | {rate} tok/s)"
                  for i, (ms, rate) in enumerate([(812.4, 20166)] + [(61.5, 266363)] * 7)),
        {"n_gpus": 1}, dict(suite="llm.c", tokens_per_sec_per_gpu=266363),
    ),
    "llm.c on a CPU": (
        "\n".join(f"step {i}: train loss 5.356189 (took {1000.0 + i} ms)" for i in range(8)),
        {"seq_len": 64, "global_batch": 4, "n_gpus": 1}, dict(suite="llm.c", tokens_per_sec=256 / 1.0045),
    ),
    "OLMo-core": (
        "".join(OLMO_STEP.format(i, 9 - i / 100) + (OLMO_RATES.format(i) if i > 1 else "")
                for i in (1, 5, 10, 15, 20, 25)),
        {"n_gpus": 8}, dict(suite="OLMo-core", tokens_per_sec_per_gpu=46017.5, mfu=0.4),
    ),
    "levanter": (levanter(8), {"n_gpus": 4}, dict(suite="levanter", tokens_per_sec=524288, mfu=0.41,
                                                   n_losses=8)),
    # The mean of all steps is rounded to 10 us; the total time is not.
    "modded-nanogpt": (
        "\n".join(f"step:{i}/1390 train_time:{32 * i}ms step_avg:{31.79}ms" for i in range(1, 12)),
        {"seq_len": 1024, "global_batch": 8, "n_gpus": 8},
        dict(suite="modded-nanogpt", tokens_per_sec=8 * 1024 / 0.032),
    ),
    # Steps are dispatched before they run: some of the first look fast.
    "MaxText": (
        "Num_devices: 4, shape (1)\n" + "\n".join(
            f"completed step: {i}, seconds: {s}, TFLOP/s/device: {100 / s}, "
            f"Tokens/s/device: {6 * 19100 / s}, loss: 12.0"
            for i, s in enumerate([44.9, 0.31, 0.63, 0.63] + [6.0] * 8)),
        {}, dict(suite="MaxText", n_gpus=4, tokens_per_sec_per_gpu=19100),
    ),
}  # fmt: skip


def checked(r: Record, expected: dict) -> None:
    losses, rates = r.losses, r.learning_rates
    facts = vars(r) | {"first_loss": losses[:1], "n_losses": len(losses), "first_rate": rates[:1]}
    facts["time_s"] = statistics.fmean(r.step_times_s or [0.0])
    for field, value in expected.items():
        exact = value is None or isinstance(value, str) or field in ("losses", "notes")
        exact = exact or field.startswith("first_")
        assert facts[field] == (value if exact else pytest.approx(value, rel=1e-3)), field


@pytest.mark.parametrize("name", EXCERPTS)
def test_excerpts(name):
    suite, facts, expected = EXCERPTS[name]
    checked(record_of(EXCERPT_DIR / f"{name}.log", **facts), {"suite": suite} | expected)


@pytest.mark.parametrize("name", BUILT)
def test_lines_of_format_strings(name, tmp_path):
    text, facts, expected = BUILT[name]
    checked(record_of(tmp_path / "x.log", text, **facts), expected)


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


def test_figures_of_a_log_are_of_the_same_lines(tmp_path):
    """Lines that count as warm-up have no part in TFLOP/s either; rates of equal work go harmonically."""
    line = "Step Time : {}s GPU utilization: {}MODEL_TFLOP/s/GPU"
    lines = [line.format("9.0", "100.0")] * 4 + [line.format("1.0", "1000.0")] * 8
    lines += [line.format("1.1", "900.0")] * 2
    text = "\n".join(["global_batch_size: 8", *lines])
    r = record_of(tmp_path / "x.log", text, seq_len=1024, n_gpus=8)
    assert len(r.step_times_s) == 10
    assert r.tflops_per_gpu == pytest.approx(10 / (8 / 1000 + 2 / 900))


def test_facts_are_of_one_log_and_never_against_it(tmp_path, output_of, refused):
    """What a log tells is not overruled; a GPU said of all is not taken by two logs."""
    shutil.copy(EXCERPT_DIR / "megatron.log", tmp_path / "a.log")
    shutil.copy(EXCERPT_DIR / "megatron.log", tmp_path / "b.log")
    shutil.copy(EXCERPT_DIR / "primus.log", tmp_path / "p.log")
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    argv = words(paths, "--log seq-len=4096 a.log:gpus=256 b:gpus=128")
    hardware = ["a:hardware=H200 SXM", "b:hardware=MI300X"]
    output_of(compare.main, argv, hardware, "--output-dir", tmp_path / "out")
    with (tmp_path / "out/runs.csv").open() as f:
        rows = [(row["hardware"], row["n_gpus"]) for row in csv.DictReader(f)]
    assert rows == [("H200 SXM", "256"), ("MI300X", "128")]
    assert "for each" in refused(compare.main, "a.log and ", argv, "hardware=H200")
    refused(compare.main, "says 8192", tmp_path / "p.log", "--log seq-len=4096")
    # The first would be lost.
    refused(compare.main, "--log: is given twice", argv, "--log c:gpus=1")
    refused(compare.main, "must be a whole number", paths, "--log a:gpus=many")


def test_files_of_other_suites_with_a_form_of_their_own(tmp_path, refused):
    """trainer_state.json, metrics.csv, lines of JSON, a benchmark's JSON."""

    def read(path, **facts):
        (record,) = records_of(path, facts=given(**facts))
        return record

    state = read(EXCERPT_DIR / "trainer_state.json", seq_len=1024, n_gpus=1)
    assert state.suite == "Hugging Face Trainer"
    assert state.tokens_per_sec == pytest.approx(0.511 * 1024)
    assert state.losses[0] == (500, 1.1409) and len(state.losses) == 6
    assert "an upper bound" in state.notes[0]
    table = read(EXCERPT_DIR / "lightning.csv")
    assert table.suite == "Lightning" and table.losses[0][0] == 49 and len(table.losses) == 14
    assert table.tokens_per_sec is None and "tells no times" in table.notes[0]
    # litgpt's counters: 4 x 512 tokens in 0.1 s; its items_per_sec are too high by 4.
    rows = [f"{i},0.1,{2048 * i},{0.1 * i},9.{i},81920" for i in range(1, 9)]
    head = "step,iter_time,tokens,time,loss,device/items_per_sec"
    (tmp_path / "metrics.csv").write_text("\n".join([head, *rows]))
    own = read(tmp_path / "metrics.csv", n_gpus=2)
    assert own.suite == "litgpt" and own.tokens_per_sec == pytest.approx(2 * 20480)
    step = {"loss": 2.0, "tps": 800.0, "tps_per_gpu": 100.0, "mem": 3.5}
    lines = [json.dumps({"step": i} | step) for i in range(4)]
    (tmp_path / "training.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    r = read(tmp_path / "training.jsonl")
    assert (r.suite, r.n_gpus, r.tokens_per_sec, r.memory_gib) == ("NeMo Automodel", 8, 800.0, 3.5)
    (tmp_path / "bench.json").write_text(json.dumps(fuzz.AUTOMODEL))
    bench = read(tmp_path / "bench.json")
    assert bench.tokens_per_sec_per_gpu == 4096.0 and bench.tflops_per_gpu == pytest.approx(395.6)
    (tmp_path / "odd.jsonl").write_text('{"a": 1}')
    refused(compare.main, "odd.jsonl", tmp_path / "odd.jsonl")


def test_what_a_log_does_not_say_is_said(capsys):
    assert compare.main([str(EXCERPT_DIR / "nemo.log")]) == 0
    printed = capsys.readouterr()
    assert "the log lacks seq-len" in printed.err and "unknown" in printed.out


@pytest.mark.parametrize("escape", ["\x1b", ""], ids=["terminal", "web log"])
def test_colours_are_no_part_of_the_figures(escape):
    """As torchtitan prints them, and as copied from a web page, without the escape characters."""
    lines = [
        f"[titan] root - INFO - {escape}[31mstep: {i:2}  {escape}[32mloss: {escape}[1m{8 - i:7.4f}  "
        f"{escape}[38;2;54;234;195mmemory: {escape}[0m66.91GiB(37.51%)  {escape}[34mtps: {escape}[1m"
        f"10,0{i}0  {escape}[36mtflops: 314.71  {escape}[35mmfu: 13.99%{escape}[39m"
        for i in range(1, 5)
    ]
    found = parse_log("\n".join(lines))
    assert found.suite == "torchtitan" and [s.step for s in found.steps] == [1, 2, 3, 4]
    assert [s.tokens_per_sec_per_gpu for s in found.steps] == [10010, 10020, 10030, 10040]
    assert [s.loss for s in found.steps] == [7, 6, 5, 4] and found.steps[0].memory_gib == 66.91


def megatron_lines(steps, milliseconds):
    return [
        f"iteration {i:8d}/ 1000 | elapsed time per iteration (ms): {milliseconds} | "
        "global batch size: 2048 | lm loss: 1.3E+01 |"
        for i in steps
    ]


def test_of_several_runs_the_last_is_taken_with_what_it_says_of_itself(tmp_path):
    first = ["using world size: 8, data-parallel size: 8", *megatron_lines(range(1, 60), 1000.0)]
    last = ["using world size: 16, data-parallel size: 16", *megatron_lines(range(1, 13), 500.0)]
    path = tmp_path / "x.log"
    record = record_of(path, "\n".join(first + last), seq_len=4096)
    assert (record.n_gpus, record.tokens_per_sec_per_gpu) == (16, 2048 * 4096 / 0.5 / 16)
    assert len(record.losses) == 12 and "59 lines of earlier ones" in record.notes[0]
    # Resumed from a checkpoint, without a header.
    for steps in ([10, 20, 30, 10, 20], [1, 2, 3, 4, 5, 1, 10, 20, 30]):
        log = parse_log("\n".join(megatron_lines(steps, 100.0)))
        assert log.earlier_steps == len(steps) - len(log.steps) and log.steps[0].step == steps[0]
        assert [s.step for s in log.steps] == steps[log.earlier_steps :]
    resumed = first + megatron_lines(range(31, 41), 250.0)
    record = record_of(path, "\n".join(resumed), seq_len=4096)
    assert (record.n_gpus, len(record.losses), record.step_times_s[0]) == (8, 10, 0.25)


@pytest.mark.parametrize(
    ("steps", "distinct"),
    [([*range(1, 61), 59], 60),
     ([i for pair in zip(range(3, 103), range(1, 101), strict=True) for i in pair], 102),
     ([i for i in range(1, 30) for _ in range(8)], 29)],
    ids=["late", "a rank behind", "eight ranks"],
)  # fmt: skip
def test_late_lines_of_other_ranks_are_no_new_run(steps, distinct):
    log = parse_log("\n".join(megatron_lines(steps, 100.0)))
    assert [s.step for s in log.steps] == sorted(set(steps)) and len(log.steps) == distinct
    assert log.earlier_steps == 0


def test_torchtitan_counts_no_expert_parallel_ranks_twice():
    line = "step:  1  loss: 9.9  memory: 30.99GiB(32.62%)  tps: 300  tflops: 407.35  mfu: 41.19%"
    mesh = "device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=4, etp=2"
    assert parse_log(f"{mesh}\n{line}").n_gpus == 8


def test_a_run_that_diverged_is_marked(tmp_path):
    lines = megatron_lines(range(1, 21), 100.0)
    diverged = lines[:10] + [line.replace("1.3E+01", "nan") for line in lines[10:]]
    record = record_of(tmp_path / "x.log", "\n".join(diverged), seq_len=4096)
    assert record.marks == ["loss not finite"] and len(record.losses) == 20
    record = record_of(tmp_path / "x.log", "\n".join(lines), seq_len=4096)
    assert record.marks == [] and record.losses[0] == (1, 13.0)


def test_text_that_is_no_log():
    assert parse_log("step by step\nloss of time: 5\niteration of ideas") is None


@pytest.mark.parametrize("suite", SUITES)
def test_digits_and_blank_lines_are_parsed_in_linear_time(suite):
    needs = " ".join([*SUITES[suite].line, SUITES[suite].sign or "{'loss': "])
    rows = [
        re.sub(r"\\.|[\[\](){}?*+|^]", " ", row[3].pattern.split("([-+]")[0])
        for row in SUITES[suite].rows
    ]
    line = f"{needs} iteration 1/2 Step 1 | step: 1 global_step=1 "
    text = "".join(f"{line}{row}{'1' * 100_000}x\n" for row in rows[:6]) + "\n" * 20_000
    begin = time.process_time()
    parse(text, suite)
    assert time.process_time() - begin < 2


def test_logs_that_do_not_tell_their_model_say_why_they_are_not_compared(tmp_path, capsys):
    for name in "ab":
        shutil.copy(EXCERPT_DIR / "nemo.log", tmp_path / f"{name}.log")
    argv = words(tmp_path / "a.log", tmp_path / "b.log", "--log seq-len=4096")
    assert compare.main(argv) == 0
    assert (
        "their logs lack the model: a.log, b.log; use --log LOG:model=NAME"
        in capsys.readouterr().err
    )
    assert compare.main([*argv, "model=m"]) == 0
    assert "lack the model" not in capsys.readouterr().err


def test_steady():
    assert steady([9.0, 3.0, 1.1, 1.0, 1.0, 1.0]) == [1.1, 1.0, 1.0, 1.0]
    assert steady([1.0, 1.0, 5.0, 1.0]) == [1.0, 1.0, 5.0, 1.0]  # a slow step later is real
    assert steady([2.0]) == [2.0]
