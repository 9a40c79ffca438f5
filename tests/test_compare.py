"""compare.py: every kind of input, ratios with their intervals, what is not compared, files, the gate."""

import copy
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import compare
from llm_train_bench.base.errors import UsageError
from llm_train_bench.compare import gate, scaling
from llm_train_bench.compare.ratios import Prices
from llm_train_bench.compare.ratios import compare as compare_records
from llm_train_bench.compare.records import LogFacts
from llm_train_bench.compare.setting import identity, repeats
from llm_train_bench.results.remarks import REFERENCE_KERNELS
from llm_train_bench.run.provenance import _notes
from tests.helpers import (
    ROOT,
    cases,
    changed,
    config,
    plan_of,
    records_of,
    result_of,
    run_train,
    words,
)

LOGS = ROOT / "tests/logs"
SAME = {"args__bucket_cap_mb": 25.0}  # runs_of() gives each name its own
NONE = Prices({}, {})
PROFILE = json.dumps(
    dict(first_step=0, n_steps=1, step_time_s=1.0, classes_s={}, communication_overlapped_s=0.0,
         host_gaps=None, costliest=[], matmul_flops=None, matmul_tflops=None, matmul_roof_fraction=None)
)  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A real run's result, from which the cases below are made."""
    out = tmp_path_factory.mktemp("runs")
    flags = ("configs/gpt2-tiny.json --seq-len 32 --bsz 2 --device cpu --amp off --n-steps 12 "
             "--warmup-steps 2 --no-tensorboard --run-name base --output-dir")  # fmt: skip
    assert run_train(*words(flags, out)) == 0
    path = out / "base/result.json"
    content = json.loads(path.read_text())
    content["metrics"] |= {"other_cpu_fraction": None, "stolen_cpu_fraction": None}
    content["remarks"] = [r for r in content["remarks"] if r["kind"] != "disturbed"]
    path.write_text(json.dumps(content))
    return out / "base"


@pytest.fixture
def run_of(result, tmp_path):
    """Makes a copy of the run at a place, with other step times (mean 0.1 s / speed) and fields."""

    def make(place, speed=1.0, noise=0.01, text="", **changes) -> Path:
        run = tmp_path / place
        shutil.copytree(result, run)
        content = result_of(run)
        rng = np.random.default_rng(zlib.crc32(run.name.encode()))
        times = 0.1 / speed * (1 + noise * rng.standard_normal(40))
        times *= 0.1 / speed / times.mean()
        rate, spread = 64 / times.mean(), 1.96 * times.std() / 40**0.5
        content |= {"run_name": run.name, "step_times_s": times.tolist()}
        content["run_id"] = f"{zlib.crc32(str(place).encode()):08x}"
        content["metrics"] |= {
            "tokens_per_sec": rate, "tokens_per_sec_per_gpu": rate, "n_measured_steps": 40,
            "step_time_ci95_low_s": times.mean() - spread, "step_time_ci95_high_s": times.mean() + spread,
            "peak_rss_gib": 1.0, "energy_j": None, "average_power_w": None, "tokens_per_joule": None,
        }  # fmt: skip
        content = changed(content, text.replace("PROFILE", PROFILE), **changes)
        (run / "result.json").write_text(json.dumps(content))
        return run

    return make


@pytest.fixture
def runs_of(run_of):
    """Makes runs of one setting, named name-0, name-1, ...; their speeds are that far apart."""

    def make(place, speed=1.0, spread=0.004, n=3, **changes) -> list[Path]:
        number = float(zlib.crc32(Path(place).name.encode()) % 1000 + 1)
        changes = {"args__bucket_cap_mb": number} | changes
        speeds = [speed * (1 + spread * (i - (n - 1) / 2)) for i in range(n)]
        return [run_of(f"{place}-{i}", s, **changes) for i, s in enumerate(speeds)]

    return make


def rows_of(*paths, tokens=None, prices=NONE, **options):
    records = records_of(*paths)
    return {r.record.label: r for r in compare_records(records, prices, tokens, **options)}


def test_a_name_is_of_one_setting_and_an_mfu_of_one_peak(run_of, tmp_path):
    peaks = enumerate((1.0, 1.0, 2.0))
    runs = [run_of(f"{i}", metrics__mfu=0.5, device__peak_bf16_tflops=peak) for i, peak in peaks]
    for chosen, mfu in ((runs[:2], 0.5), (runs, None)):
        assert [row.record.mfu for row in rows_of(*chosen).values()] == [mfu]
    for place in "ab":
        (tmp_path / place).mkdir()
        (tmp_path / place / "other.json").write_text(json.dumps(SUITE))
    rows = compare_records(records_of(tmp_path / "a", tmp_path / "b"), NONE, None)
    assert [row.record.setting for row in rows] == ["other (other #1)", "other (other #2)"]


def test_scaling_is_relative_to_the_fewest_devices(runs_of, run_of, tmp_path, output_of):
    """Of one setting: with other flags, another model or conditions a line is of its own."""
    ddp = {"entrypoint": "train_ddp.py"} | SAME
    paths = [*runs_of("one", 1.0, **SAME)]

    def on(run, n):
        content = changed(
            result_of(run), f"metrics.tokens_per_sec_per_gpu*={1 / n} device.count={n}"
        )
        (run / "result.json").write_text(json.dumps(content))
        return run

    for n, speed in ((2, 1.8), (4, 3.2)):
        paths += [on(r, n) for r in runs_of(f"n{n}", speed, **ddp, batch__global_batch=2 * n)]
    paths += [run_of("alone", 9.0, **ddp, device__count=8, args__lr=1.0)]
    strong = {"batch__global_batch": 2, "args__bsz": 1, "args__optimizer": "sgd"}
    paths += [run_of("s1", 1.0, **SAME, **strong, args__grad_acc_steps=2)]
    paths += [on(run_of("s2", 1.4, **ddp, **strong), 2)]
    lines = scaling.scaling([*rows_of(*paths).values()])
    alike = [x for x in lines if "sgd" in x["setting"]]
    assert [(x["devices"], round(x["efficiency"], 2)) for x in alike] == [(1, 1), (2, 0.7)]
    assert "global-batch 2" in alike[0]["setting"] and alike[1]["low"] is None
    lines = [x for x in lines if x not in alike]
    found = {x["devices"]: round(x["efficiency"], 2) for x in lines}
    assert found == {1: 1, 2: 0.9, 4: 0.8} and len(lines) == 3
    assert {x["setting"] for x in lines} == {"train_ddp.py, amp off, bsz 2, seq-len 32"}
    assert lines[0]["low"] is None and lines[1]["low"] < 0.9 < lines[1]["high"] < 0.93
    out = output_of(compare.main, [*paths, "--output-dir", tmp_path / "out"])
    assert "|       4 |" in out and "0.800 [0.79" in out
    assert json.loads((tmp_path / "out/compare.json").read_text())["scaling"] == [*lines, *alike]
    assert "on 4 devices: 0.800 [" in (tmp_path / "out/report.html").read_text()
    assert "scaling" not in output_of(compare.main, paths[:3])


SUITE = json.loads((LOGS / "suite.json").read_text())


def test_pairs_of_the_other_suite_are_of_one_model(tmp_path, output_of):
    """By the file's name without its platform. Its figures are in tests/records/figures.txt."""
    content = changed(SUITE, "training_config.model=absent")
    other = changed(content, gpu_info__device_name="NVIDIA H100 80GB HBM3")
    for name, each in (("rocm_llama", content), ("cuda_llama", other), ("cuda_qwen", other)):
        (tmp_path / f"benchmark_{name}.json").write_text(json.dumps(each))
    records = records_of(tmp_path)
    assert sorted(r.model for r in records) == ["llama", "llama", "qwen"]
    rows = compare_records(records, NONE, None)
    assert sorted(r.group for r in rows) == ["llama T2048", "llama T2048", "qwen T2048"]
    for fact in ("benchmark_cuda_qwen:model=llama", "model=llama"):
        assert "qwen T2048" not in output_of(compare.main, [tmp_path, "--log", fact])


def test_directories_are_searched_and_strangers_named(tmp_path, refused, capsys, run_of):
    a = run_of("a")
    (a / "steps.jsonl").write_text("[1, 2]\n")  # a broken loss curve costs no run
    run_of("b", speed=1.1)  # a repeat of a
    far = tmp_path.with_name(f"{tmp_path.name}-far")
    run_of(far / "c", args__bucket_cap_mb=1.0)
    shutil.copytree(a, far / "a")  # no second run
    (tmp_path / "link").symlink_to(far)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "itself.json").symlink_to(tmp_path / "itself.json")
    shutil.copy(LOGS / "torchtitan.log", tmp_path / "t.log")
    (tmp_path / "notes.txt").write_text("nothing of interest\n")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "image.png").write_bytes(b"x")
    assert compare.main([str(tmp_path), str(far)]) == 0
    printed = capsys.readouterr()
    lines = [list(map(str.strip, line.split("|"))) for line in printed.out.splitlines()]
    rows, at = {}, 0
    for line in (line for line in lines if len(line) > 5):
        at = line.index("runs") if "setting" in line else at
        rows[line[1]] = line[at]
    assert rows["bucket-cap-mb 25.0"] == "2" and rows["bucket-cap-mb 1.0"] == "1"
    (said,) = (line for line in printed.err.splitlines() if "are no results" in line)
    assert "3 files" in said and "image.png" not in said
    assert all(name in said for name in ("notes.txt", "other.json"))
    for name, why in (
        ("notes.txt", "not a log of a known suite; --log-pattern reads any"),
        ("other.json", "is not a result.json of ours"),
    ):
        refused(compare.main, why, tmp_path / name)


# --- comparison ------------------------------------------------------------------------------------


def test_ratio_and_its_interval(runs_of):
    """Over runs of each setting, not over steps: two runs of one setting are no contestants."""
    speeds = {"a": 1.0, "b": 1.2, "c": 1.001, "d": 0.9}
    rows = rows_of(*(p for n, s in speeds.items() for p in runs_of(n, s, n=5)))
    assert len(rows) == 4 and rows["a-0"].verdict == "reference"
    b = rows["b-0"]
    assert b.ratio == pytest.approx(1.2) and b.verdict == "faster" and len(b.record.rates) == 5
    # Five runs 0.4 % apart: a deviation of 0.63 %, of the ratio's means 0.4 %, times Student's 2.8.
    assert b.interval[1] - b.interval[0] == pytest.approx(2 * 1.2 * 0.004 * 2.8, rel=0.35)
    assert rows["c-0"].verdict == "within noise" and rows["d-0"].verdict == "slower"
    # The runs surely differ, but by less than runs of one setting do on another day.
    speeds = {"a": 1, "b": 1.009, "c": 1.02}
    rows = rows_of(*(p for n, s in speeds.items() for p in runs_of(f"sure/{n}", s, 1e-4)))
    assert rows["b-0"].interval[0] > 1.008 and rows["b-0"].verdict == "within noise"
    assert rows["c-0"].verdict == "faster"


def test_one_or_two_runs_give_no_verdict(runs_of):
    """Repeats are one row, whatever their speeds; without three runs nobody knows how runs differ."""
    paths = runs_of("a", spread=0.3, n=2) + runs_of("b", 3, n=1)
    rows = rows_of(*paths)
    assert [len(row.record.rates) for row in rows.values()] == [2, 1]
    assert rows["b-0"].verdict == "no verdict: 1 run" and rows["b-0"].ratio == pytest.approx(3)


def test_settings_are_named_by_what_differs(run_of):
    """The reference is the plainest, whatever the order; an invalid run is left out of its setting."""
    rows = rows_of(
        run_of("x", args__sac_freq="1/2", args__bsz=3),
        run_of("y", args__sac_freq="1/2", status="oom"),
        run_of("z", args__sac_freq="1/2"),
        run_of("plain"),
    )
    names = {row.record.setting: row for row in rows.values()}
    assert set(names) == {"bsz 3, sac 1/2", "bsz 2, sac 1/2", "bsz 2, no sac"}
    assert names["bsz 2, no sac"].is_reference
    pooled = names["bsz 2, sac 1/2"].record
    assert len(pooled.rates) == 1
    assert pooled.texts("disturbed") == ["1 of 2 runs left out: y (status oom)"]


@pytest.mark.parametrize(("changes", "mark"), cases("not alike"))
def test_what_is_not_alike_is_marked_and_not_mixed(tmp_path, changes, mark, run_of):
    rows = rows_of(run_of("a"), run_of("b", 2, text=f"{changes} args.bucket_cap_mb=1.0"))
    assert rows["b"].not_compared == [mark] and rows["b"].verdict == "not compared"
    assert rows["b"].ratio is None
    # It is no reference either where another run can be.
    if not changes.startswith(("args", "model")):
        assert rows_of(tmp_path / "b", tmp_path / "a")["a"].verdict == "reference"


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune"])
def test_memory_that_cuda_graphs_hide_counts(mode, run_of):
    gib = {"metrics__peak_allocated_gib": 5.0, "metrics__peak_reserved_gib": 9.0}
    run = run_of("a", args__pt_compile=bool(mode), args__compile_mode=mode or "default", **gib)
    graphs = mode in ("reduce-overhead", "max-autotune")
    memory = (9.0, "reserved") if graphs else (5.0, "allocated")
    (row,) = rows_of(run).values()
    assert (row.record.memory_gib, row.record.memory_kind) == memory


def test_of_a_sweep_its_runs_are_read(tmp_path, capsys, run_of):
    """Not its probes, and not its tables."""
    run_of("s/runs/x-1-0")
    run_of("s/probes/x-1-probe")
    (tmp_path / "s" / "rows.jsonl").write_text("")
    (tmp_path / "s" / "runs.csv").write_text("key,status,model\nx-1-0,ok,gpt2-tiny\n")
    assert [r.label for r in records_of(tmp_path / "s")] == ["x-1-0"]
    with pytest.raises(UsageError, match="no steps of Lightning in it"):
        records_of(tmp_path / "s" / "runs.csv")


def test_an_impossible_figure_of_a_strangers_log_is_no_reference(tmp_path, capsys):
    """An eighth of the GPUs: eight times the MFU. It is said, and never averaged or compared."""
    wrong = changed(SUITE, step_times=[t / 60 for t in SUITE["step_times"]])
    shape = {"num_parameters": 8e9, "num_layers": 32, "hidden_size": 4096}
    wrong["training_config"] |= shape | {"num_gpus": 1}
    for name, content in (("b", wrong), ("c", changed(SUITE, label="c"))):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (record,) = records_of(tmp_path / "b.json")
    assert record.mfu > 2 and record.invalid[0].startswith("faster than its peak: an MFU of ")
    rows = rows_of(tmp_path / "b.json", tmp_path / "c.json", reference=None)
    for name, row in rows.items():
        assert row.is_reference == (name == "c") or row.group != rows["c"].group, name
    assert compare.main([str(tmp_path / "b.json")]) == 0
    why = "the number of GPUs, the hardware, the batch or the parameters"
    assert why in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to show the report in")
def test_the_report_in_a_browser(tmp_path, runs_of):
    sac = {"args__sac_freq": "1/2", "metrics__peak_rss_gib": 0.1, **SAME}
    paths, out = runs_of("a", **SAME) + runs_of("b", 1.3, **sac), tmp_path / "out"
    assert compare.main(words(paths, "--output-dir", out)) == 0
    page = (out / "report.html").read_text()
    script = (ROOT / "tests/report_driver.js").read_text()
    (out / "driven.html").write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    argv = "chromium --headless=new --no-sandbox --disable-gpu --dump-dom".split()
    argv.append(f"file://{out}/driven.html")
    dumped = subprocess.run(argv, capture_output=True, text=True, timeout=120).stdout
    title = re.search("<title>(.*?)</title>", dumped)[1]
    told = "| 2 rows | sorted by ratio: no sac, sac 1/2 | back: sac 1/2, no sac | filtered: 1 of 2"
    assert "ERROR" not in title and told in title


# --- the gate --------------------------------------------------------------------------------------


@pytest.fixture
def baselines(tmp_path, runs_of):
    path = tmp_path / "baselines.json"
    runs_of("old/old", spread=0.002, n=5, args__bucket_cap_mb=25.0)
    assert compare.main(words(tmp_path / "old", "--save", path)) == 0
    return path


@pytest.fixture
def judged(output_of):
    """What the gate prints of runs, with baselines in a file, at a tolerance of 5 %."""
    return lambda path, *words, code=0: output_of(
        compare.main, *words, "--tolerance 5% --baseline", path, code=code
    )


SETTING = r"Invented CPU 9000 \(avx2 .*gpt2-tiny, train.py, T 32"


@pytest.mark.parametrize(("changes", "answer"), cases("gate"))
def test_gate(changes, answer, judged, baselines, run_of):
    """The verdict, with which the setting's line begins, decides the exit code."""
    speed = {name: float(number) for name, number in re.findall(r"(speed|noise)=(\S+)", changes)}
    run = run_of("new/new", text=re.sub(r"(speed|noise)=\S+", "", changes), **speed)
    verdict, _, more = answer.partition(" .*")
    worse = verdict.startswith(("SLOWER", "MORE"))
    out = judged(baselines, run, code=1 if worse else 0 if verdict == "ok" else 5)
    more = more.replace("NEW", ": new; --save FILE adds one").replace("\\n", "\n")
    assert re.match(f"{verdict} {SETTING}.*{more}", out, re.DOTALL), out


@pytest.mark.parametrize(("changes", "why"), cases("unusable"))
def test_what_is_unusable_is_left_out(changes, why, judged, output_of, baselines, run_of):
    """Of the judgement, and of what is saved."""
    run, before = run_of("new/new", text=changes), baselines.read_text()
    line = judged(baselines, run, code=5).splitlines()[0]
    assert re.match(f"UNUSABLE, left out {SETTING}.*: new: ", line) and f": new: {why}" in line
    out = output_of(compare.main, run, "--save", baselines, code=5)
    assert f"left out new: {why}" in out and baselines.read_text() == before


def test_a_headline_is_sure_where_the_fastest_beats_every_other(runs_of, output_of):
    a, b, c = (runs_of(x, speed) for x, speed in (("a", 1.0), ("b", 1.2), ("c", 1.202)))

    def headline(*runs):
        return re.search("Fastest: .*", output_of(compare.main, *runs))[0]

    assert headline(a + b).endswith(", sure.")
    assert "1.20x as fast as" in headline(a + b + c) and " may be as fast." in headline(a + b + c)
    assert headline(a + b[:2]).endswith(", not sure: this needs 3 runs of each.")


def test_nothing_passes_that_was_not_judged(judged, tmp_path, runs_of):
    """Baselines that nothing measured, results without a baseline; each can be allowed by its flag."""
    path = tmp_path / "b.json"
    first, *others = (runs_of(f"v{i}", args__bucket_cap_mb=i + 1.0) for i in range(6))
    six = sum(others, first)
    assert compare.main(words(six, "--save", path)) == 0
    judged(path, six)
    assert judged(path, first, code=5).count("NOT MEASURED") == 5
    judged(path, first, "--allow missing")
    new = runs_of("new", args__bucket_cap_mb=99.0)
    judged(path, six, new, code=5)
    judged(path, six, new, "--allow new")
    # A baseline of another machine is for that machine to measure.
    content = json.loads(path.read_text())
    entry = copy.deepcopy(content["settings"][0])
    entry["runs"][0]["result"]["device"]["hardware"] = "Other GPU"
    content["settings"].append(entry | {"runs": entry["runs"][:1]})
    path.write_text(json.dumps(content))
    judged(path, six)


def test_repeats_are_judged_together_and_entries_have_tolerances(judged, tmp_path, runs_of):
    path = tmp_path / "b.json"
    assert compare.main(words(runs_of("old/a", n=5), "--save", path)) == 0
    # Runs that differ are noise; all of them slow is not.
    assert ": a-0 and 4 more: " in judged(path, runs_of("now/a", spread=0.01, n=5))
    slow = runs_of("slow/a", speed=0.92, spread=0.002, n=5)
    judged(path, slow, code=1)
    content = json.loads(path.read_text())
    content["settings"][0]["tolerance"] = 0.1
    path.write_text(json.dumps(content))
    judged(path, slow)
    # A result.json by another name, without its steps, in a directory with other files.
    kept = tmp_path / "kept"
    kept.mkdir()
    shutil.copy(slow[0] / "result.json", kept / "a-result.json")
    (kept / "notes.json").write_text("{}")
    assert "UNCERTAIN" in judged(path, kept, code=5)


def test_a_ratio_of_fp8_by_transformer_engine_says_what_else_it_contains(run_of):
    te = dict(args__use_fp8=True, args__fp8_backend="te", args__amp="bf16")
    rows = rows_of(
        run_of("plain", args__amp="bf16"),
        run_of("fp8", 1.5, **te),
        run_of("torchao", 1.4, **te | dict(args__fp8_backend="torchao")),
    )
    assert rows["plain"].is_reference and rows["fp8"].ratio == pytest.approx(1.5)
    assert "Transformer Engine's fused norms too" in "; ".join(rows["fp8"].remarks)
    assert not any("Engine" in text for text in (*rows["plain"].remarks, *rows["torchao"].remarks))


@pytest.mark.parametrize(("device", "compared"), [("cuda", False), ("cpu", True)])
def test_reference_kernels_say_nothing_of_other_trainers(device, compared, tmp_path, run_of):
    """Hybrids on a GPU run PyTorch's operators, and others do not; two runs of ours are alike."""
    work = plan_of(["configs/nemotron-tiny.json"], config=config("nemotron_h")).work
    schedule = plan_of(["x.json"], config=config("llama")).schedule
    (told,) = (note for note in _notes(work, schedule) if note.startswith(REFERENCE_KERNELS))
    remarks = [{"kind": "information", "text": told}]
    same = dict(device__type=device, remarks=remarks, model__name="m", batch__seq_len=1024)
    ours, again = run_of("a", **same), run_of("b", 1.2, **same)
    (tmp_path / "x.log").write_text("\n".join(
        f"iteration {i}/ 9 | elapsed time per iteration (ms): 100 | global batch size: 8 |"
        for i in range(9)))  # fmt: skip
    facts = LogFacts(seq_len={"": 1024}, n_gpus={"": 1}, model={"": "m"})
    records = [*records_of(ours, again), *records_of(tmp_path / "x.log", facts=facts)]
    reasons = [text for row in compare_records(records, NONE, None) for text in row.not_compared]
    assert [text for text in reasons if text.startswith(REFERENCE_KERNELS)] == (
        [] if compared else ["reference kernels: they say nothing of other trainers' speed"]
    )
    assert all(r.not_compared == [] for r in compare_records(records[:2], NONE, None))


def test_runs_for_which_auto_chose_another_library_are_rows_of_their_own(run_of):
    """What --linear auto took is a condition, like software: shown, and no part of the identity.

    Where there was no choice, PyTorch's own library ran.
    """
    ways = "plain", None, "onednn", "onednn"
    runs = [run_of(f"a-{i}", linear=way) for i, way in enumerate(ways)]
    rows = rows_of(*runs).values()
    assert sorted(row.record.setting for row in rows) == ["linear onednn", "linear plain"]
    assert len({identity(r) for r in records_of(*runs)}) == 1


def test_the_gate_in_other_peoples_tests(baselines, run_of):
    """A regression fails, a run as before passes."""
    same = run_of("same/same")
    slow = run_of("slow/slow", speed=0.92)
    assert [v.status for v in gate.assert_no_regression(same, baseline=baselines)] == ["ok"]
    with pytest.raises(gate.Regression, match=r"SLOWER .*: slow: 589 tokens/s"):
        gate.assert_no_regression(slow, baseline=baselines)


def test_another_power_limit_is_not_judged(judged, runs_of, tmp_path):
    path = tmp_path / "b.json"
    limits = (700.0, 699.0, 690.0)
    a, b, c = (runs_of(f"{x}/x", devices=[{"rank": 0, "power_limit_w": x}]) for x in limits)
    assert compare.main(words(a, "--save", path)) == 0
    judged(path, b)
    assert "power limit 690 W, the baseline's was 700 W" in judged(path, c, code=5)
    both, low = compare_records(records_of(*a, *b, *c), NONE, None)
    assert both.not_compared == [] and len(both.record.rates) == 6
    assert low.not_compared == ["power limit 700 / 690 W"]


def test_what_got_slower_says_what_changed(judged, result, tmp_path, run_of):
    """Another image, with other variables and libraries, is no new setting."""
    libraries = result_of(result)["environment"]["libraries"]
    settings = {"CUDA_VERSION": "13.0.1", "NCCL_VERSION": "2.27", "TORCH_CUDA_ARCH_LIST": "9.0"}
    newer = settings | {"CUDA_VERSION": "13.1.0", "NVTE_FRAMEWORK": "1"}
    older = libraries | {"torch": "0.1"}
    old = {"environment__settings": settings, "environment__libraries": older}
    new = {"environment__settings": newer, "environment__image": {"name": "new:1", "digest": None}}
    before = [run_of(f"old/{i}", 1 + i / 1e3, **old) for i in range(3)]
    assert compare.main(words(before, "--save", tmp_path / "b.json")) == 0
    after = [run_of(f"new/{i}", (1 + i / 1e3) * 0.944, **new) for i in range(3)]
    for allow in ("", "--allow new"):
        out = judged(tmp_path / "b.json", after, allow, "--tolerance 2%", code=1)
        assert out.startswith("SLOWER ") and "; since then CUDA_VERSION 13.0.1 -> 13.1.0, " in out
        assert f", image none -> new:1, torch 0.1 -> {libraries['torch']}" in out


def test_baselines_are_written_though_nobody_reads_the_lines(tmp_path, run_of):
    for i in range(40):
        run_of(f"runs/n{i}", args__bucket_cap_mb=float(i + 1))
    command = f"{sys.executable} compare.py {tmp_path}/runs --save {tmp_path}/b.json"
    shell = f"{command} | head -1"
    done = subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert len(json.loads((tmp_path / "b.json").read_text())["settings"]) == 40


def test_a_report_says_where_runs_come_from_and_names_no_place(result, tmp_path, output_of, run_of):
    environment = result_of(result)["environment"]
    settings = {"NCCL_TOPO_FILE": "/home/alice/topo.xml", "SLURM_JOB_ID": "17"}
    environment |= {"settings": settings, "driver": "580.1"}
    command = ["train.py", "/home/alice/c.json", "--data", "/home/alice/x.bin"]
    for name, torch_version in (("a", "2.11.0"), ("b", "2.13.0")):
        libraries = environment["libraries"] | {"torch": torch_version}
        here = environment | {"libraries": libraries, "hostname": "secret-host"}
        data = f"/home/alice/{name}.bin"
        run_of(f"r/{name}", environment=here, command=command, args__data=data)
    out = tmp_path / "out"
    printed = output_of(compare.main, tmp_path / "r", "--output-dir", out)
    for file in out.iterdir():
        text = file.read_text()
        assert not any(x in text for x in ("alice", "secret-host", str(tmp_path))), file
        if file.name != "compare.csv":
            assert "2.11.0" in text and "580.1" in text and "train.py c.json --data x.bin" in text
    assert "alice" not in printed
    page = (out / "report.html").read_text()
    assert not re.findall(r"(?:src|href|url|import)\b *[=(]", page)
    lines = re.findall("<tr><td class=.text.>(.*?)</td><td class=.text.>(.*?)</td>", page)
    assert lines[0][0] == "torch" and lines[0][1].count("; ") and ("driver", "580.1") in lines


@pytest.mark.parametrize(("changes", "answer"), cases("identity"))
def test_what_a_baseline_and_a_row_are_of(changes, answer, run_of):
    """Else an edited copy, or more threads, would be averaged with what it should be held against."""
    clean = {"environment__git_dirty": False}
    runs = run_of("a", **clean), run_of("b", text=changes, **clean)
    a, b = map(identity, records_of(*runs))
    rows = compare_records(records_of(*runs), NONE, None)
    same = ["same" if alike else "another" for alike in (a == b, len(rows) == 1)]
    assert " | ".join(same) == answer


def test_shipped_baselines_are_readable():
    shipped = records_of(ROOT / "configs/baselines.json")
    assert {r.model for r in shipped} >= {"gpt2-tiny", "llama-tiny", "moe-tiny"}
    settings = repeats(shipped)
    assert all(len(runs) >= 2 and not any(map(gate.unusable, runs)) for runs in settings)
