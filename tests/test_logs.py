"""Logs of other trainers (tests/logs): what is read from them, what they lack, and --log-pattern."""

import csv
import json
import re
import shutil
import statistics
import time
import tomllib

import pytest

import compare
from llm_train_bench.compare.log_formats import SUITES, parse
from llm_train_bench.compare.read_logs import parse_log
from llm_train_bench.compare.records import LogFacts, Record
from tests.helpers import ROOT, records_of, words

EXCERPT_DIR = ROOT / "tests/logs"
EXPECTED = tomllib.loads((EXCERPT_DIR / "expected.toml").read_text())


def facts_of_all(**facts) -> LogFacts:
    return LogFacts(**{name: {"": value} for name, value in facts.items()})


def record_of(path, text, **facts) -> Record:
    """The run of a log of this text."""
    path.write_text(text)
    (record,) = records_of(path, facts=facts_of_all(**facts))
    return record


@pytest.mark.parametrize("name", EXPECTED)
def test_files_of_other_suites(name):
    expected = dict(EXPECTED[name])
    (r,) = records_of(EXCERPT_DIR / name, facts=facts_of_all(**expected.pop("facts", {})))
    assert expected.pop("note", "") in " ".join(r.texts("information"))
    assert not any(getattr(r, field) for field in expected.pop("unknown", []))
    losses = [list(point) for point in r.losses]
    curves = {"losses": losses, "n_losses": len(losses), "first_step": (losses or [[None]])[0][0]}
    curves |= {"first_loss": losses[:1]}
    figures = vars(r) | curves | {"mean_step_s": statistics.fmean(r.step_times_s or [0.0])}
    for field, value in expected.items():
        about = isinstance(value, float) or field == "step_times_s"
        assert figures[field] == (pytest.approx(value, rel=1e-3) if about else value), field


def test_figures_of_a_log_are_of_the_same_lines(tmp_path):
    """Lines that count as warm-up have no part in TFLOP/s either; rates of equal work go harmonically."""
    line = "Step Time : {}s GPU utilization: {}MODEL_TFLOP/s/GPU"
    lines = [line.format("9.0", "100.0")] * 4 + [line.format("1.0", "1000.0")] * 8
    lines += [line.format("1.1", "900.0")] * 2
    text = "\n".join(["global_batch_size: 8", *lines])
    r = record_of(tmp_path / "x.log", text, seq_len=1024, n_gpus=8)
    assert len(r.step_times_s) == 10
    assert r.model_tflops_per_gpu == pytest.approx(10 / (8 / 1000 + 2 / 900))


@pytest.mark.parametrize(("gpus", "doubts"), [(1, "disturbed"), (7, ""), (None, "information")])
def test_a_printed_rate_is_held_against_the_logs_own_counters(gpus, doubts, tmp_path):
    """axolotl before its repair of 2026 (issue 3688) counts the last micro batch of a step alone."""
    lines = [{"loss": "1.9", "tokens/train_per_sec_per_gpu": "512.5", "tokens/trainable": 60000 * i,
              "memory/max_active (GiB)": "20.1"} for i in range(1, 9)]  # fmt: skip
    lines += [{"train_runtime": "131.0", "train_loss": "1.7"}]
    facts = {"n_gpus": gpus} if gpus else {}
    r = record_of(tmp_path / "x.log", "\n".join(map(str, lines)), **facts)
    assert r.tokens_per_sec_per_gpu == pytest.approx(512.5) and r.suite == "axolotl"
    told = [remark.kind for remark in r.remarks if "times give 3,664 in all" in remark.text]
    assert told == [doubts] * bool(doubts)


@pytest.mark.parametrize("rate", [1000, 4000])
def test_a_printed_rate_is_held_against_batch_and_step_time(rate, tmp_path):
    """8 samples of 1,024 tokens in 1.024 s are 8,000 tokens/s, 4,000 on each of two GPUs."""
    line = "iteration {}/ 9 | elapsed time per iteration (ms): 1024 | global batch size: 8 | {}"
    rates = f"tokens/sec/gpu: {rate} | lm loss: 2.0 |"
    text = "\n".join(line.format(i, rates) for i in range(9))
    r = record_of(tmp_path / "x.log", text, seq_len=1024, n_gpus=2)
    assert bool(r.texts("disturbed")) == (rate == 1000), r.texts("disturbed")


def test_batches_of_growing_length_agree_with_the_printed_rate(tmp_path):
    line = " iteration {}/ 9 | elapsed time per iteration (ms): {:.1f} | global batch size: 64 | "
    line += "actual seqlen: {} | tokens per gpu per second (tgs): 16384.0 | TFLOPs: 100.0 | "
    line += "samples per second: 1.0 |"
    lines = [line.format(i, 125.0 * 2**n, 256 * 2**n) for i, n in enumerate((0, 0, 1, 1, 2, 2))]
    r = record_of(tmp_path / "x.log", "\n".join(lines), seq_len=1024, n_gpus=8)
    assert r.suite == "Megatron-DeepSpeed" and not [
        t for t in r.texts("disturbed") if "prints" in t
    ]


def test_of_a_restarted_llama_factory_run_the_last_counts(tmp_path):
    lines = [
        dict(current_steps=10 * i, loss=1.0, throughput=rate, total_tokens=1000 * i)
        for rate, n in ((100, 6), (200, 5))
        for i in range(1, n)
    ]
    r = record_of(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)))
    assert r.tokens_per_sec == pytest.approx(200) and len(r.losses) == 4


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.json", "x.metrics"])
def test_a_pattern_reads_a_file_of_any_suffix(name, tmp_path):
    (tmp_path / name).write_text("step 1 rate 900\nstep 2 rate 1000\n")
    pattern = re.compile(r"step (?P<step>\d+) rate (?P<tokens_per_sec>\d+)")
    (r,) = records_of(tmp_path / name, facts=LogFacts(pattern))
    assert r.tokens_per_sec == 1000


def test_facts_are_of_one_log_and_never_against_it(tmp_path, output_of, refused):
    """What a log tells is not overruled; a GPU said of all is not taken by two logs."""
    shutil.copy(EXCERPT_DIR / "megatron.log", tmp_path / "a.log")
    shutil.copy(EXCERPT_DIR / "megatron.log", tmp_path / "b.log")
    shutil.copy(EXCERPT_DIR / "primus.log", tmp_path / "p.log")
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    argv = words(paths, "--log seq-len=4096 a.log:gpus=256 b:gpus=1")
    hardware = ["a:hardware=H200 SXM", "b:hardware=MI300X"]
    output_of(compare.main, argv, hardware, "--output-dir", tmp_path / "out")
    with (tmp_path / "out/runs.csv").open() as f:
        rows = [(row["hardware"], row["n_gpus"]) for row in csv.DictReader(f)]
    assert rows == [("H200 SXM", "256"), ("MI300X", "1")]
    refused(compare.main, "says 8192", tmp_path / "p.log", "--log seq-len=4096")


@pytest.mark.parametrize("escape", ["\x1b", ""], ids=["terminal", "web log"])
def test_colours_are_no_part_of_the_figures(escape):
    """As torchtitan prints them, and as copied from a web page, without the escape characters."""
    lines = [
        f"[titan] root - INFO - {escape}[31mstep: {i:2}  {escape}[32mloss: {escape}[1m{8 - i:7.4f}  "
        f"{escape}[38;2;54;234;195mmemory: {escape}[0m66.91GiB(37.51%)  {escape}[34mtps: {escape}[1m"
        f"10,0{i}0  {escape}[36mtflops: 314.71  {escape}[35mmfu: 13.99%{escape}[39m"
        for i in range(1, 5)
    ]
    log = parse_log("\n".join(lines))
    assert log.suite == "torchtitan" and [s.step for s in log.steps] == [1, 2, 3, 4]
    assert [s.tokens_per_sec_per_gpu for s in log.steps] == [10010, 10020, 10030, 10040]
    assert [s.loss for s in log.steps] == [7, 6, 5, 4] and log.steps[0].memory_gib == 66.91


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
    assert len(record.losses) == 12 and "59 lines of earlier ones" in record.remarks[0].text
    # Resumed from a checkpoint, without a header.
    for before, after in (
        ([10, 20, 30], [10, 20]), ([1, 2, 3, 4, 5], [1, 10, 20, 30]), ([1, 2], [1, 2, 3]),
        ([*range(1, 7)], [3, 4, 5]), ([1, 2, 3, 4], [1, 5, 6]), ([*range(1, 9)], [4, 6, 7, 8, 9]),
    ):  # fmt: skip
        log = parse_log("\n".join(megatron_lines(before + after, 100.0)))
        assert log.earlier_steps == len(before) and [s.step for s in log.steps] == after
    resumed = first + megatron_lines(range(31, 41), 250.0)
    record = record_of(path, "\n".join(resumed), seq_len=4096)
    assert (record.n_gpus, len(record.losses), record.step_times_s[0]) == (8, 10, 0.25)


@pytest.mark.parametrize(
    ("steps", "distinct"),
    [([*range(1, 61), 59], 60), ([2, 1, 1, 3, 4], 4), ([*range(1, 11), 5, 11, 12], 12),
     ([i for pair in zip(range(3, 103), range(1, 101), strict=True) for i in pair], 102),
     ([i for i in range(1, 30) for _ in range(8)], 29)],
    ids=["late", "at the start", "within", "a rank behind", "eight ranks"],
)  # fmt: skip
def test_late_lines_of_other_ranks_are_no_new_run(steps, distinct):
    log = parse_log("\n".join(megatron_lines(steps, 100.0)))
    assert [s.step for s in log.steps] == sorted(set(steps)) and len(log.steps) == distinct
    assert log.earlier_steps == 0


def test_torchtitan_counts_no_expert_parallel_ranks_twice():
    line = "step:  1  loss: 9.9  memory: 30.99GiB(32.62%)  tps: 300  tflops: 407.35  mfu: 41.19%"
    mesh = "device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=3, etp=2"
    assert parse_log(f"{mesh}\n{line}").n_gpus == 8


def test_a_run_that_diverged_is_marked(tmp_path):
    lines = megatron_lines(range(1, 21), 100.0)
    diverged = lines[:10] + [line.replace("1.3E+01", "nan") for line in lines[10:]]
    record = record_of(tmp_path / "x.log", "\n".join(diverged), seq_len=4096)
    assert record.invalid == ["loss not finite"] and len(record.losses) == 20
    record = record_of(tmp_path / "x.log", "\n".join(lines), seq_len=4096)
    assert record.invalid == [] and record.losses[0] == (1, 13.0)


def test_lines_with_figures_may_be_few():
    step = "[step={}/5000,epoch=1]\n    optim/total grad norm=0.5\n"
    told = "    train/CE loss=3.0\n    throughput/device/TPS=46,000\n"
    log = parse_log("".join(step.format(i) + told * (i % 10 == 0) for i in range(1, 1991)))
    assert log.suite == "OLMo-core" and len(log.steps) == 199


@pytest.mark.parametrize("suite", SUITES)
def test_digits_and_blank_lines_are_parsed_in_linear_time(suite):
    needs = " ".join([*SUITES[suite].line, SUITES[suite].sign or "{'loss': "])
    rows = [
        re.sub(r"\\.|[\[\](){}?*+|^]", " ", row[2].pattern.split("([-+]")[0])
        for row in SUITES[suite].rows + SUITES[suite].facts
    ]
    line = f"{needs} iteration 1/2 Step 1 | step: 1 global_step=1 "
    text = "".join(f"{line}{row}{'1' * 100_000}x\n" for row in rows[:6]) + "\n" * 20_000
    begin = time.process_time()
    parse(text, suite)
    assert time.process_time() - begin < 2


def test_what_a_log_does_not_say_is_said(tmp_path, capsys):
    """Also why two that do not tell their model are not compared."""
    for name in "ab":
        shutil.copy(EXCERPT_DIR / "nemo.log", tmp_path / f"{name}.log")
    argv = words(tmp_path / "a.log", tmp_path / "b.log")
    without_model = "their logs lack the model: a.log, b.log; use --log LOG:model=NAME"
    for facts, message, said in (
        ("", "the log lacks seq-len", True),
        ("--log seq-len=4096", without_model, True),
        ("--log seq-len=4096 model=m", "lack the model", False),
    ):
        assert compare.main([*argv, *words(facts)]) == 0
        printed = capsys.readouterr()
        assert (message in printed.err) == said and "unknown" in printed.out
