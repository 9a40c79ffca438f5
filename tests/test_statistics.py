"""Statistics of step times and the figures made of them."""

import dataclasses
import math
import re
import types

import numpy as np
import pytest

from llm_train_bench.compare.gate import answer, what_settles
from llm_train_bench.compare.setting import ratio_interval, settle
from llm_train_bench.formulas import time_statistics as ts
from llm_train_bench.results.figures import RankTimes, fill_rank_metrics
from llm_train_bench.results.remarks import _disturbances, _not_steady, drift_remark
from llm_train_bench.results.schema import Attempt, DeviceUse, Metrics, Result


def test_against_numpy_and_by_hand():
    s = ts.describe([1.0, 2.0, 3.0, 4.0, 10.0])
    assert s["step_time_median_s"] == 3.0 and s["step_time_mean_s"] == 4.0
    assert s["step_time_std_s"] == pytest.approx(np.sqrt(50 / 4))
    assert s["step_time_cv"] == pytest.approx(np.sqrt(50 / 4) / 4)
    assert (s["step_time_min_s"], s["step_time_max_s"]) == (1.0, 10.0)
    assert s["step_time_p10_s"] == pytest.approx(1.4) and s["step_time_p90_s"] == pytest.approx(7.6)
    one = ts.describe([0.5])
    spread = ("std_s", "cv", "ci95_low_s", "ci95_high_s")
    assert {one[f"step_time_{name}"] for name in spread} == {None}
    # Drift is of the last third to the first.
    assert ts.describe([1.0] * 3 + [7.0] * 3 + [1.5] * 3)["step_time_drift"] == pytest.approx(0.5)
    assert ts.describe([1.0] * 8)["step_time_drift"] is None
    # Sure: over 2 % and over 4 standard errors. These are 3 % and 4.5, 2.6 % and 3.9, 1 % and 8.7.
    for by, wide, sure in ((0.03, 0.0082, True), (0.026, 0.0082, False), (0.01, 0.0014, False)):
        times = [1 + late + x for late in (0, by / 2, by) for x in (-wide, 0, wide)]
        assert ts.drift(times)[1] is sure


def coverage(interval, truth=1):
    """How often an interval holds the truth."""
    return np.mean([low <= truth <= high for low, high, *_ in (interval() for _ in range(300))])


@pytest.mark.parametrize("n", [3, 5, 12, 50])
def test_intervals_hold_the_truth_as_often_as_they_say(n):
    """95 % for independent values, also for three of them (a sweep's repeats)."""
    rng = np.random.default_rng(0)

    def draw():
        return 1 + 0.01 * rng.standard_normal(n)

    assert 0.92 <= coverage(lambda: ts.bootstrap_mean(draw())) <= 0.98
    assert 0.91 <= coverage(lambda: ratio_interval(draw(), 2 * draw()), 0.5) <= 0.99


def test_intervals_of_steps_that_follow_each_other():
    """Half of each step's deviation stays for the next, as clocks and temperature do."""
    rng = np.random.default_rng(0)

    def interval():
        x = rng.standard_normal(100)
        for i in range(1, 100):
            x[i] += 0.5 * x[i - 1]
        return ts.bootstrap_mean(1 + 0.01 * x)

    assert coverage(interval) >= 0.88  # taken as independent: 0.75


def test_student_s_t_is_the_tables():
    for degrees, quantile in ((1, 12.706), (2, 4.303), (4.0, 2.776), (8, 2.306), (1e9, 1.960)):
        assert ts.student_t(0.975, degrees) == pytest.approx(quantile, abs=1e-3)
        assert ts.chance_of(quantile, degrees) == pytest.approx(0.05, abs=1e-4)
    assert ts.student_t(0.99, 2) == pytest.approx(6.965, abs=1e-3)
    assert ts.student_t(0.95, 7.3) == pytest.approx(1.883, abs=1e-3)


def test_a_table_of_equal_settings_has_a_false_verdict_in_one_of_twenty():
    """Twelve equal settings of three runs: any difference found is false (Holm 1979)."""
    rng = np.random.default_rng(1)
    tables = 1 + 0.01 * rng.standard_normal((400, 13, 3))
    pairs = [[(ts.mean_of(x), ts.mean_of(first)) for x in others] for first, *others in tables]
    found = [any(answer != "uncertain" for answer in settle(table)) for table in pairs]
    single = [any(settle([pair]) != ["uncertain"] for pair in table) for table in pairs]
    together, alone = np.mean(found), np.mean(single)
    assert together <= 0.075 < 0.15 < alone


def test_after_one_uncertain_answer_all_others_are():
    """Holm: chances of 3 % and 4 % are both too large for two, though 4 % would do for one."""
    base, pairs = ts.Mean(1.0, 5, 0.01, 4), []
    for chance in (0.03, 0.04):
        gap = ts.student_t(1 - chance / 2, 8) * math.sqrt(2 * 0.01**2 / 5)
        pairs.append((ts.Mean(1.0 + gap, 5, 0.01, 4), base))
        assert settle([pairs[-1]]) == ["faster"]
    assert settle(pairs) == ["uncertain", "uncertain"]


def test_a_true_difference_is_found_as_often_as_welch_s_test_can():
    rng = np.random.default_rng(2)
    runs = 1 + 0.01 * rng.standard_normal((400, 2, 3))
    pairs = [(ts.mean_of(0.97 * slow), ts.mean_of(same)) for slow, same in runs]
    certain = [settle([pair]) == ["slower"] for pair in pairs]
    assert 0.58 <= np.mean(certain) <= 0.75  # the bootstrap found 42 to 45 %


@pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 1), (3, 3), (5, 5)])
def test_the_gate_s_answers_are_seldom_wrong(before, now):
    """Of runs that lost 7 % or nothing, at a tolerance of 5 %."""
    rng = np.random.default_rng(0)

    def share(wanted, noise, rate):
        runs = ((rng.normal(rate, noise, now), rng.normal(1, noise, before)) for _ in range(300))
        return np.mean([answer(*map(ts.mean_of, each), 0.05) == wanted for each in runs])

    for noise in (0.005, 0.03):
        assert share("ok", noise, 0.93) <= 0.02 and share("SLOWER", noise, 1) <= 0.02
    if now == before == 5:
        assert share("UNCERTAIN", 0.03, 0.93) > 0.5  # nobody can tell
        assert share("SLOWER", 0.01, 0.93) >= 0.9 and share("ok", 0.01, 1) >= 0.9


def test_one_run_against_one_has_no_answer_and_the_runs_that_settle_it_do():
    one, other = ts.mean_of([1.0]), ts.mean_of([0.5])
    # A run at 30 has the relative noise of those at 20, 3 of 2; their mean's own is 1.
    assert ts.difference(ts.mean_of([30.0]), ts.Mean(20.0, 4, 2.0, 3)) == (10.0, 10**0.5, 3)
    assert answer(other, one, 0.05) == "UNCERTAIN" and "3 runs" in what_settles(other, one, 0.05)
    was, now = ts.mean_of([0.99, 1.0, 1.01]), ts.mean_of([0.928, 0.948, 0.938])
    assert answer(now, was, 0.05) == "UNCERTAIN"
    (n,) = map(int, re.findall(r"(\d+) runs", what_settles(now, was, 0.05)))
    more = [ts.Mean(mean.value, n, mean.std, n - 1) for mean in (now, was)]
    assert n > 3 and answer(*more, 0.05) == "SLOWER"
    near = ts.mean_of([0.9501, 0.9401, 0.9601])
    assert "so close to the tolerance" in what_settles(near, was, 0.05)
    # A window of one step shows no noise: the baseline's counts.
    assert "17 runs of it and of" in what_settles(ts.Mean(94.0, 1), ts.Mean(100.0, 5, 2.0, 4), 0.05)


def test_two_values_say_little_but_no_time_is_negative():
    low, high = ts.bootstrap_mean([0.1, 1.0])
    assert low == 0.0 and high > 2


def test_a_window_that_is_not_steady_says_so():
    rng = np.random.default_rng(0)
    slowing = np.linspace(1.0, 1.06, 60) * rng.normal(1, 0.002, 60)
    ((short, line),) = drift_remark(list(slowing))
    assert short.startswith("drift +4.") and "changed by +4." in line
    assert not list(drift_remark(list(rng.normal(1, 0.002, 60))))
    assert not list(drift_remark(list(rng.normal(1, 0.3, 60))))  # noise, however large, is no drift


def rank_times(rank, seconds, probe, **window):
    means = {"data": 0.0, "forward": seconds, "backward": 0.0, "idle": None, "optimizer": 0.0}
    memory = {"peak_allocated_gib": None, "peak_rss_gib": 1.0, "allocator_retries": rank}
    return RankTimes(rank, "host", [1.0], means, DeviceUse(rank=rank), memory, probe, **window)


def filled(ranks, compiled, **metrics):
    """A result of such ranks."""
    result = Result.model_construct(
        attempts=[Attempt()],
        metrics=Metrics(**metrics), remarks=[], args={"pt_compile": compiled},
        device=types.SimpleNamespace(type="cuda"), status="ok", profile=None, entrypoint="train.py",
        loss_known=False, fp8=None,
    )  # fmt: skip
    fill_rank_metrics(result, ranks)
    return result


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "send", None])
def test_slow_ranks_and_devices_are_named(exchange):
    ranks = [rank_times(0, 1.0, 700.0), rank_times(1, 2.0, 630.0)]
    result = filled(ranks, False, **{f"{exchange}_bytes": 100} if exchange else {})
    m = result.metrics
    assert [rank.peak_memory_gib for rank in result.ranks] == [1.0, 1.0]
    assert m.slowest_device == 1 and m.device_imbalance == pytest.approx(1 - 630 / 665)
    assert m.slowest_rank == (None if exchange else 1)
    assert exchange or m.rank_imbalance == pytest.approx(2 / 1.5 - 1)
    (note,) = result.texts("information")
    slow = [text for text, _ in _disturbances(result)]
    assert slow == ["rank 1: its GPU multiplies 5% slower than the mean"]
    assert "emptied its cache 1 times" in note and "expandable_segments" in note


def test_cpu_time_that_others_took_is_that_of_the_worst_host():
    """CPU seconds are of all cores, of them busy and stolen, and this rank's own; c's are too few."""
    hosts = [("a", (100.0, 50.0, 2.0, 20.0)), ("a", (100.0, 52.0, 2.0, 20.0)), ("d", None)]
    hosts += [("b", (1.5, 1.2, 0.3, 0.6)), ("c", (0.5, 0.5, 0.5, 0.0))]
    plain = rank_times(0, 1.0, None)
    ranks = [dataclasses.replace(plain, host=host, cpu_seconds=used) for host, used in hosts]
    m = filled(ranks, False).metrics
    assert (m.other_cpu_fraction, m.stolen_cpu_fraction) == pytest.approx((0.4, 0.2))


def test_what_any_rank_compiled_inside_the_window_is_everybodys():
    late = {"compile_s": 3.0, "graphs_recorded": 4}
    quiet = rank_times(0, 1.0, None, graphs_recorded=0)
    result = filled([quiet, rank_times(1, 1.0, None, **late)], True)
    m = result.metrics
    assert (m.window_compile_s, m.window_graphs_recorded) == (3.0, 4)
    advice = [why for _, why in _not_steady(result)]
    assert any("3.0 s inside the window" in why for why in advice)
    assert any("recorded 4 times inside the window" in why for why in advice)
