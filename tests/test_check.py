"""check.py: figures beside references, verdicts, findings with made-up causes, nodes with a slow rank."""

import dataclasses
import functools
import itertools
import json
import os
import platform
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import check
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import device_called, find_hardware
from llm_train_bench.check import (
    fabric,
    findings,
    machine_check,
    node_survey,
    references,
    workloads,
)
from llm_train_bench.check.machine_check import check_machine, reached_by_others
from llm_train_bench.check.references import Reached, Reference, judge_machine
from llm_train_bench.check.workloads import workload_of
from llm_train_bench.results.result_files import read_result
from llm_train_bench.results.schema import Result
from tests.helpers import ROOT, cases, changed, read_steps, records_of, result_of, trained, words

RUNS = ROOT / "benchmarks/results/h200-20261127"
NCCL = ROOT / "tests/nccl_lines.txt"
SHORT = "--n-steps 4 --warmup-steps 1 --no-tensorboard"


def test_workloads_are_complete_and_say_what_they_are():
    """Each has known losses, all that is learnt is in its file, and it runs as any run file."""
    found = workloads.workloads()
    assert {w.args.device for w in found.values()} == {"cuda", "cpu"}
    assert {w.number_format for w in found.values()} == {"fp32", "bf16", "fp8"}
    for w in found.values():
        names = words("config seq_len global_bsz seed optimizer lr weight_decay grad_clip amp")
        assert all(f"\n{name}: " in w.path.read_text() for name in names), w.name
        assert 4 <= len(w.losses) == len(w.grad_norms) and w.args.lr_warmup_steps > len(w.losses)
        assert (w.number_format == "fp8") == w.args.use_fp8


@pytest.mark.parametrize("name", ["gpt2-tiny-fp32", "moe-tiny-fp32", "llama-tiny-fp32"])
def test_the_first_losses_of_a_workload_are_the_known_ones(name, tmp_path):
    """To 1e-4 in fp32, on whatever CPU this is; a wrong attention scale is seen."""
    w = workloads.workload_named(name)
    trained(tmp_path, "--from", w.path, SHORT, "--run-name right")
    steps = read_steps(tmp_path)
    assert w.wrong_steps("fp32", steps) is None
    assert workload_of(read_result(tmp_path / "right/result.json")).shape == w.shape
    far = max(abs(s["loss"] / known - 1) for s, known in zip(steps, w.losses, strict=True))
    assert far < 1e-5


@pytest.mark.parametrize("wrong", [{"is_causal": False}, {"scale": 0.5}], ids=str)
def test_a_wrong_computation_is_seen_by_its_first_steps(wrong, tmp_path):
    """Attention that sees later tokens, or is scaled by four times what it should be."""
    w = workloads.workload_named("gpt2-tiny-fp32")
    right = torch.nn.functional.scaled_dot_product_attention

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        options |= {"is_causal": is_causal} | wrong
        return right(q, k, v, attn_mask, dropout_p, **options)

    with mock.patch("torch.nn.functional.scaled_dot_product_attention", attend):
        trained(tmp_path, "--from", w.path, SHORT, "--attention math")
    assert w.wrong_steps("fp32", read_steps(tmp_path)) is not None


def test_rates_of_a_gpu_stand_beside_what_is_published_of_it():
    rates = {"matmul bf16": 397.25, "memory": 4.08, "launch": 5.0, "link_gb_per_s": 63.0,
             "host to device": 31.5}  # fmt: skip
    found = {f.name: f for f in references.rate_figures(rates, device_called("H200 SXM"))}
    assert found["matmul bf16"].part == pytest.approx(0.5)
    assert found["memory"].part == pytest.approx(1.0)
    assert found["memory"].reference.kind == "estimated"
    assert found["host to device"].part == 0.5
    assert found["launch"].part is None


def figure(part, kind="measured", wide=0.0):
    reference = Reference(kind, 100.0, 100 * (1 - wide), 100 * (1 + wide), "x")
    return Reached("w", "tokens/s", 100.0 * part, reference, workload=True)


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [([figure(0.96), figure(0.95)], "as it should be"), ([figure(0.8)], "below"),
     ([figure(0.99), figure(0.7)], "below"),
     # An estimate that may be 20 % off cannot say so; far below it can.
     ([figure(0.95, "estimated", 0.2)], "not judged"), ([figure(0.6, "estimated", 0.2)], "below"),
     ([figure(1.1, "estimated", 0.2)], "as it should be"),
     ([Reached("w", "tokens/s", 1.0, None, workload=True)], "not judged"), ([], "not judged"),
     # What a kernel reaches explains, and is not judged.
     ([Reached("matmul", "TFLOP/s", 1.0, figure(1).reference)], "not judged")],
)  # fmt: skip
def test_verdicts_have_three_answers(figures, verdict):
    assert judge_machine(figures, 0.9)[0] == verdict


def test_a_part_of_several_workloads_is_their_geometric_mean():
    verdict, part, text = judge_machine([figure(0.5), figure(2.0)], 0.9)
    assert part == pytest.approx(1.0) and "100%" in text and verdict == "as it should be"
    missing = Reached("moe", "tokens/s", None, missing="out of memory", workload=True)
    assert "without moe" in judge_machine([figure(1.0), missing], 0.9)[2]


def stand_in(told_rates=None, memory_gib=139.8):
    """check_machine with a stand-in for what is measured: runs of an H200."""
    told = {"device": "NVIDIA H200", "memory_gib": memory_gib, "rates": told_rates or {}}
    told["use"] = {"rank": 0}

    def run_workload(w, ranks, directory):
        shutil.copytree(RUNS / w.name, directory / w.name)
        return read_result(directory / w.name / "result.json"), ""

    return mock.patch.multiple(
        machine_check,
        probe_device=lambda *_: told,
        run_workload=run_workload,
        findings=mock.Mock(wraps=findings, of_machine=lambda kind: iter(())),
    )


def checked(tmp_path, names=("gpt2-125m-bf16",), reached=(), at_least=0.9, **options):
    chosen = [workloads.workload_named(name) for name in names]
    others = mock.patch.object(machine_check, "reached_by_others", lambda *_: reached)
    with stand_in(**options), others:
        return check_machine("nvidia", chosen, 1, tmp_path, at_least, [])


def test_references_measured_before_published_before_estimated(tmp_path):
    names = ("gpt2-125m-bf16", "gpt2-1.5b-fp8")
    c = checked(tmp_path, names, at_least=0.97)  # within the range of an estimate
    estimated, published = (f.reference for f in c.figures)
    assert estimated.kind == "estimated" and estimated.low < estimated.value < estimated.high
    assert published.kind == "published" and published.value == 61_200
    assert c.verdict == "not judged" and "too uncertain" in c.about
    again = checked(tmp_path / "2", reached=[500_000.0, 600_000.0])
    reference = again.figures[0].reference
    assert (reference.kind, reference.value, reference.low) == ("measured", 550_000, 500_000)
    assert again.verdict == "as it should be" and again.part == pytest.approx(0.997, abs=1e-3)


def test_the_table_of_results_is_a_reference(tmp_path):
    ours = ROOT / "results/h200-sxm/llm-train-bench"
    shutil.copytree(ours, tmp_path / "h200-sxm/ann")  # others may add results of their own
    reached = functools.partial(reached_by_others, records_of(tmp_path))
    w = workloads.workload_named("gpt2-125m-bf16")
    assert reached(w, "H200 SXM", 1) == [pytest.approx(548_539.7)]
    assert reached(w, "H200 SXM", 8) == reached(w, "H100 SXM", 1) == []
    assert reached(workloads.workload_named("gpt2-tiny-fp32"), "H200 SXM", 1) == []


def test_wrong_numbers_are_below_whatever_the_speed(tmp_path):
    with mock.patch.object(workloads.Workload, "wrong_steps", lambda *_: "the loss of step 0 is 9"):
        c = checked(tmp_path, reached=[500_000.0])
    assert c.verdict == "below" and any("wrong numbers" in f.what for f in c.findings)


def of_run(changes=""):
    """Findings in a made-up run of an H200."""
    content = result_of(RUNS / "gpt2-125m-bf16")
    result = Result.model_validate(changed(content, changes))
    result.judge()
    return [f"{f.what}: {f.found} -> {f.advice}" for f in findings.of_remarks(result.remarks, "r")]


@pytest.mark.parametrize(("changes", "answer"), cases("cause"))
def test_a_cause_is_found_in_a_run(changes, answer):
    (line,) = of_run(changes)
    cause, cure = answer.split(" | ")
    assert cause in line and cure in line.partition(" -> ")[2]


def test_nothing_is_found_where_nothing_is_wrong():
    """A full power cap is normal; so is a device as slow as its neighbours."""
    assert of_run() == []
    assert list(findings.of_rates({})) == []


def test_slow_copies_are_found():
    rates = {"host to device": 12.0, "device to host": 50.0, "link_gb_per_s": 63.0}
    (slow,) = findings.of_rates(rates)
    assert slow.what == "copies host to device" and "63.0" in slow.found


def test_numa_nodes_and_a_quota_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 8}, raising=False)
    for core in ("node0/cpu0", "node0/cpu1", "node1/cpu8", "node1/cpu9", "node2/cpu12"):
        (tmp_path / core).mkdir(parents=True)
    monkeypatch.setattr(findings, "n_cores", lambda: 3)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    across, quota = findings.placement(tmp_path, tmp_path / "cpu.max")
    assert "may run on 2" in across.found and "--numa-binding" in across.advice
    assert quota.found == "1.5 cores' time for 3 cores"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert list(findings.placement(tmp_path, tmp_path / "cpu.max")) == []


def test_little_shared_memory_is_found(monkeypatch):
    usage = shutil._ntuple_diskusage(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = {f.what: f for f in findings.machine()}
    if Path("/dev/shm").exists():
        memory = found["shared memory"]
        assert memory.state == "warn" and "--shm-size" in memory.advice


SMI = """#!/bin/sh
case "$*" in
*query-gpu=index,uuid*) echo "0, GPU-a, NVIDIA H200, 535.1, 4, 143771";;
*query-gpu=index,power*) echo "0, {power}, 700.00, {width}, 16, {ecc}, {clock}, 1980";;
*query-gpu=driver*) echo "535.104.05";;
*query-gpu=pcie*) echo "5, {width}";;
*remapped*) echo "{pending}, {failure}";;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi in front of all others that tells of a sound GPU, but for these values."""

    def write(**changes) -> None:
        values = dict(power="700.00", width=16, ecc=0, clock=1980, pending="No", failure="No")
        (tmp_path / "nvidia-smi").write_text(SMI.format(**values | changes))
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return write


@pytest.mark.parametrize(
    ("changes", "what", "found"),
    [({}, "", ""), ({"power": "400.00"}, "GPU 0: power limit", "400 W, and the default is 700 W"),
     ({"width": 4}, "GPU 0: PCIe", "4 of 16 lanes"),
     ({"ecc": 7}, "GPU 0: memory errors", "7 uncorrected"),
     ({"clock": 1200}, "GPU 0: clocks", "1200 of 1980 MHz"),
     ({"pending": "Yes"}, "GPU 0: remapped memory rows", "pending"),
     ({"failure": "Yes"}, "GPU 0: remapped memory rows", "failure"),
     ({"power": "[N/A]", "ecc": "[N/A]", "pending": "[N/A]", "failure": "[N/A]"}, "", "")],
)  # fmt: skip
def test_the_state_of_a_gpu(changes, what, found, smi):
    smi(**changes)
    seen = [f for f in findings.drivers("nvidia") if f.state != "ok"]
    assert [f.what for f in seen] == ([what] if what else [])
    assert all(found in f.found and f.advice for f in seen)
    assert findings.pcie_gb_per_s(0) == pytest.approx(3.938 * changes.get("width", 16))


@pytest.mark.parametrize(("cuda", "old"), [("13.0", True), ("12.8", False)])
def test_an_old_driver_is_found(cuda, old, smi, monkeypatch):
    smi()
    output, seen = findings.output_of, json.dumps(["2.13.0", cuda, None, 1, True])
    answer = lambda *command: seen if command[1] == "-c" else output(*command)  # noqa: E731
    monkeypatch.setattr(findings, "output_of", answer)
    assert any(f.what == "old driver" for f in findings.torch_sees("nvidia")) == old


def test_the_whole_check_on_this_cpu(tmp_path, capsys, monkeypatch):
    """Rates and one workload for real; without a reference it is not judged."""
    monkeypatch.setattr(machine_check, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(check, "detect_platform", lambda: "cpu")
    argv = words("--only gpt2-tiny-fp32 --json")
    assert check.main([*argv, "--output-dir", str(tmp_path / "out")]) == 5
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "not judged" and told["count"] == 1
    figures = {f["name"]: f for f in told["figures"]}
    rates = "matmul fp32", "matmul bf16", "memory", "launch", "attention forward"
    assert all(0 < figures[name]["value"] < 1e6 for name in (*rates, "gpt2-tiny-fp32"))
    assert figures.keys() - {"gpt2-tiny-fp32"} <= references.RATES.keys()
    assert figures["memory"]["reference"] is None
    assert figures["gpt2-tiny-fp32"]["reference"]["kind"] == "estimated"
    assert not [f for f in told["findings"] if f["state"] == "fail"]
    # The same, held against itself: measured, and as it should be.
    run = tmp_path / "out/gpt2-tiny-fp32/result.json"
    rate = read_result(run).metrics.tokens_per_sec_per_gpu
    w = workloads.workload_named("gpt2-tiny-fp32")
    again = references.workload_figure(w, read_result(run), None, [rate])
    assert judge_machine([again], 0.9)[0] == "as it should be"


def test_a_workload_that_fails_is_said_and_the_others_go_on(tmp_path, monkeypatch):
    w = workloads.workload_named("gpt2-125m-bf16")
    run, why = machine_check.run_workload(w, 1, tmp_path)  # no GPU here, or it runs
    if not torch.cuda.is_available():
        assert run is None and why.startswith("train.py: --device cuda")
    with stand_in():
        machine_check.run_workload = lambda *_: (None, "train.py: no room")
        c = check_machine("nvidia", [w], 1, tmp_path, 0.9, [])
    assert c.figures[-1].missing == "train.py: no room" and c.verdict == "not judged"
    assert json.loads(json.dumps(c.as_json()))["figures"][-1]["value"] is None


# --nodes


def test_every_pair_meets_once():
    for n in (2, 3, 4, 7, 8):
        pairs = [pair for pairs in node_survey.rounds_of(n) for pair in pairs]
        assert sorted(pairs) == list(itertools.combinations(range(n), 2))
    for pairs in node_survey.rounds_of(20):
        assert len({i for pair in pairs for i in pair}) == 2 * len(pairs) == 20


TCP = """x:1:2 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
x:1:2 [0] NCCL INFO NET/IB : No device found.
x:1:2 [0] NCCL INFO Channel 00/1 : {rank}[0] -> {peer}[1] [send] via NET/Socket/0
"""


def _survey_with_a_fault(rank, n, private, fault, victims, per_node):
    """A rank of a survey in which some compute or send slower; all exchange what they would."""
    if per_node:
        os.environ["NODE_RANK"] = str(rank // per_node)
    exchange = node_survey.exchange_rate
    nominal = dataclasses.replace(
        find_hardware("h100"), nic_gb_per_s=50.0 if fault == "all" else 11.0
    )

    def compute(device):
        return 5.0 if fault == "computes" and rank in victims else 10.0

    def send(peer, device):
        exchange(peer, device)
        if fault == "TCP":
            with Path(os.environ["NCCL_DEBUG_FILE"]).open("a") as log:
                log.write(TCP.format(rank=rank, peer=peer))
        return 2.0 if fault == "sends" and {*victims} <= {rank, peer} else 10.0

    called = {"device_called": lambda name: nominal if fault else None}
    with mock.patch.multiple(node_survey, device_tflops=compute, exchange_rate=send, **called):
        node_survey._rank_of_survey(rank, n, private)


@pytest.mark.parametrize(
    ("n", "fault", "victims", "per_node", "failed"),
    [(4, "computes", (2,), 0, ["rank 2: computes at 50%"]),
     (4, "sends", (1,), 0, ["rank 1: sends at 20%"]),
     (4, "sends", (0, 3), 0, ["the link between rank 0 and rank 3"]), (4, "", (), 0, []),
     (4, "fine", (), 0, []),
     (4, "all", (), 0, ["every link is too slow: gloo: 10 of 50 GB/s (20%): look at its cards"]),
     (4, "TCP", (), 2, ["every link is too slow: TCP sockets: 20 of 22 GB/s: no InfiniBand or EFA "
                        "plugin was found"]),
     (8, "computes", (5,), 2, ["node 2"])],
)  # fmt: skip
def test_the_slow_node_or_link_is_named(n, fault, victims, per_node, failed, tmp_path, monkeypatch):
    monkeypatch.setattr(node_survey, "SIZES_MIB", (0.1,))
    monkeypatch.setattr(node_survey, "EXCHANGED_MIB", {"cpu": 1})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    args = n, str(tmp_path), fault, victims, per_node
    torch.multiprocessing.start_processes(_survey_with_a_fault, args, n, start_method="fork")
    told = json.loads((tmp_path / "survey.json").read_text())
    lines = fabric.failures_of(told)
    expected = "fail" if failed else "pass" if fault else "not judged"  # without a nominal rate
    assert len(lines) == len(failed) and told["verdict"] == expected, lines
    assert told["exclude"] == (platform.node() if (fault, per_node) == ("computes", 2) else "")
    assert all(map(str.startswith, lines, failed)), lines
    units = n // per_node if per_node else n
    assert len(told["units"]) == units and len(told["links"]) == units * (units - 1) // 2


def test_a_survey_that_fails_is_one_line(monkeypatch):
    ended = node_survey.ProcessExitedException("process 1", error_index=1, error_pid=2, exit_code=3)
    monkeypatch.setattr(node_survey, "spawn", mock.Mock(side_effect=ended))
    with pytest.raises(UsageError, match="a rank of the survey failed: process 1"):
        node_survey.survey_here(2)


def test_a_survey_prints_a_verdict_for_each_node(capsys):
    rates = {"node 0 (a)": ([0, 1], 5.0), "node 1 (b)": ([2, 3], 2.0)}
    units = [node_survey.Unit(name, *rate, host=name[-2]) for name, rate in rates.items()]
    rows = [{"kind": "all_reduce", "mib": 1, "seconds": 0.1, "bus_gb_per_s": 2.0}]
    s = node_survey.Survey("x", units, [node_survey.Link((0, 1), 1.0)], rows)
    node_survey.judge_survey(s)
    node_survey.show_survey(s.as_json())
    out = capsys.readouterr().out
    assert "| node 0 (a) |   0-1 |" in out and "FAIL: node 1 (b): computes at 40%" in out
    assert "all_reduce" in out and "sbatch --exclude=b\n" in out


# Lines of public logs: NVIDIA/nccl issues 166, 229, 527, 707, 892, 952, 1189, 1357 and 1814, nccl-tests
# 166, aws-ofi-nccl 715, awsome-distributed-ai 386, ROCm/rccl 1026, google/dranet.
@pytest.mark.parametrize("case", NCCL.read_text().splitlines())
def test_transports_by_lines_of_public_logs(case):
    rank, peer, kind, lines = case.split(" | ")
    found = fabric.transports_of(lines.replace(" ;; ", "\n"), int(rank))
    assert found == ({int(peer): kind} if kind != "none" else {})


@pytest.mark.parametrize(
    ("text", "cause"),
    [("NET/IB : No device found.", "no InfiniBand device"),
     ("NET/Plugin : No plugin found (libnccl-net.so).\nNET/IB : No device found.", "or EFA plugin"),
     ("[0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]", "no InfiniBand device"),
     ("NCCL INFO NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE=1 is set"),
     ("x NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm", "took the provider tcp;ofi_rxm"),
     ("", "says nothing")],
)  # fmt: skip
def test_why_nccl_took_tcp(text, cause):
    assert cause in fabric.cause_of_tcp(text)


def test_a_link_by_its_nominal_rate():
    h100, mi300x = find_hardware("h100"), find_hardware("mi300x")
    assert fabric.nominal_of("RDMA", h100) == 50 and fabric.nominal_of("peer access", h100) == 361
    assert (
        fabric.nominal_of("peer access", mi300x) == 64 and fabric.nominal_of("RDMA", None) is None
    )
    for transport, rate, verdict in (
        ("RDMA", 47, "pass"), ("RDMA", 29, "not judged"), ("RDMA", 13.1, "fail"),
        ("TCP sockets", 48, "fail"), ("TCP sockets, RDMA", 40, "fail"), ("EFA", 30, "pass"),
        ("host memory", 40, "not judged"),
    ):  # fmt: skip
        assert fabric.judged_link(transport, rate, 50)[0] == verdict, (transport, rate)
    assert fabric.judged_link("RDMA", 47, None) == ("not judged", "no nominal rate is known")


def test_a_part_of_a_gpu_has_no_reference_of_the_whole(tmp_path):
    whole = checked(tmp_path / "1", told_rates={"matmul bf16": 90.0})
    part = checked(tmp_path / "2", told_rates={"matmul bf16": 90.0}, memory_gib=17.0)
    assert whole.figures[0].reference.value == 794.5 and part.figures[0].reference is None
