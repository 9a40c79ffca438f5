"""Reading traces and breaking steps down: recorded CUDA and ROCm traces, and cases worked out by hand."""

import collections
import gzip
import itertools
import json
import shutil

import pytest

import trace_report
from llm_train_bench.trace.breakdown import break_down, matmul_flops_of, sweep, union
from llm_train_bench.trace.kernel_names import kernel_class, matmul_format, operator_class
from llm_train_bench.trace.read_trace import read_trace
from tests import fuzz
from tests.helpers import ROOT

TRACES = ROOT / "tests/traces"


def write_trace(path, events, **more):
    path.write_text(json.dumps({"traceEvents": events} | more))
    return path


def event(name, start, end, cat="kernel", tid=7, **args) -> dict:
    """One event of a trace: kernels are of device 0, the others of the host."""
    args = {"device": 0, "stream": tid} | args if cat == "kernel" else args
    event = dict(ph="X", cat=cat, name=name, pid=int(cat != "kernel"), tid=tid, args=args)
    return event | dict(ts=start, dur=end - start)


# Class and name; a matmul has its format, or - where the name does not tell it.
NAMES = (TRACES / "kernel_names.txt").read_text().splitlines()


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row[:60])
def test_kernels_are_known_by_their_names(row):
    kind, name = row.split(" ", 1)
    kind, _, number_format = kind.partition("/")
    assert kernel_class(name) == kind
    assert not number_format or (matmul_format(name) or "-") == number_format


def test_names_go_before_recorded_types_and_operators_of_a_cpu():
    # The operator of Transformer Engine's FP8 matmul takes weights in fp32; one sums in fp32.
    assert matmul_format("nvjet_sm90_qqtst_x", ["c10::BFloat16", "float"]) == "fp8"
    assert matmul_format("nvjet_sm90_tss_x", ["float", "c10::BFloat16"]) == "bf16"
    assert matmul_format("", ["float", "c10::BFloat16", "c10::BFloat16"]) == "bf16"
    assert matmul_format("triton_tem_fused_mm_3", ["c10::Half", "c10::Half"]) == "fp16"
    # A type that is no text names no format.
    assert matmul_format("nvjet_tst_x", [["c10::Half"], 7, None]) == "bf16"
    classes = {"aten::addmm": "matmul", "aten::_grouped_mm": "matmul", "aten::silu": "elementwise",
               "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
               "gloo:all_reduce": "communication", "_c10d_functional::wait_tensor": "communication",
               "aten::view": None, "aten::linear": None}  # fmt: skip
    assert {name: operator_class(name) for name in classes} == classes


def test_sweep_by_hand():
    """Computation hides communication, communication hides copies, and every moment counts once."""
    # Two compute at once: the moment is the one's that began first.
    spans = [(0, 0.0, 4.0, "matmul"), (0, 3.0, 5.0, "add"), (1, 2.0, 8.0, "communication")]
    spans += [(2, 7.0, 9.0, "copies"), (0, 10.0, 12.0, "matmul")]
    seconds = collections.defaultdict(float)
    for start, stop, first in sweep(spans, 0.0, 14.0):
        seconds[first and first[-1]] += stop - start
    assert seconds == {"matmul": 6, "add": 1, "communication": 3, "copies": 1, None: 3}
    assert union([(0.0, 4.0), (3.0, 5.0), (7.0, 8.0)]) == 6.0
    assert union([]) == 0.0


@pytest.mark.parametrize(
    ("dims", "name", "flops"),
    [([[2048, 768], [768, 3072]], "", 2 * 2048 * 768 * 3072),
     ([[3072], [2048, 768], [768, 3072], [], []], "", 2 * 2048 * 768 * 3072),  # addmm
     ([[8, 64, 32], [8, 32, 16]], "", 2 * 8 * 64 * 32 * 16),
     # oneDNN's second matrix is transposed: forward with a bias, and the weight's gradient.
     ([[8, 64, 32], [16, 32], [16]], "llm_train_bench::onednn_linear", 2 * 8 * 64 * 32 * 16),
     ([[512, 16], [512, 32]], "llm_train_bench::onednn_grad_weight", 2 * 512 * 16 * 32),
     ([[4, 4]], "", None), (None, "", None), ([["4", 4], [4, 4]], "", None),
     ([[[4, 4], [4, 4]], [4, 4]], "", None),  # a list of tensors
     ([[10**400, 4], [4, 4]], "", None)],
)  # fmt: skip
def test_flops_of_recorded_shapes(dims, name, flops):
    assert matmul_flops_of(dims, name) == flops


def breakdown_of(path, kernels, launches=(), host=(), **options):
    """The breakdown of kernels (name, start, end, stream), launches (kernel, time) and ranges."""
    events = [event(*k, tid=stream, correlation=i) for i, (*k, stream) in enumerate(kernels)]
    for i, ts in launches:
        events.append(event("cudaLaunchKernel", ts, ts + 1, "cuda_runtime", 1, correlation=i))
    events += [event(*each, cat="user_annotation", tid=1) for each in host]
    return break_down(read_trace(write_trace(path, events)), **options)


def micros(seconds):
    return {name: round(1e6 * value) for name, value in seconds.items()}


MATMUL = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT"


@pytest.mark.parametrize(
    ("kernels", "launches", "end", "classes"),
    [
        # A kernel of an earlier step still runs; the trace does not have its launch.
        ([("old", -5, 20, 7), ("new", 20, 120, 7)], [(1, 1)], 100, {"elementwise": 100}),
        # A collective from before the trace runs on beside the step: the step's own kernel counts.
        ([("nccl old", -5, 60, 9), ("gemm bf16", 10, 50, 7)], [(1, 1)], 60,
         {"matmul bf16": 40, "communication": 10}),
        # Without any kernel's launch no kernel is known to be older.
        ([("gemm bf16", 10, 50, 7)], [(77, 1)], 60, {"matmul bf16": 40, "idle": 20}),
        # An asynchronous program's matmul from before the trace runs as the first step begins.
        ([(MATMUL, 20, 120, 7), (MATMUL, -400, 20, 7)], [(0, 10)], 100, {"matmul bf16": 100}),
    ],
)  # fmt: skip
def test_work_from_before_the_first_step_is_left_out(kernels, launches, end, classes, tmp_path):
    steps = [("ProfilerStep#5", 0, end)]
    b = breakdown_of(tmp_path / "t.json", kernels, launches, steps)
    assert micros(b.classes_s) == classes
    assert b.step_time_s == pytest.approx(sum(b.classes_s.values()))
    assert b.matmul_s == pytest.approx(b.classes_s.get("matmul bf16", 0.0))


def test_gaps_are_the_hosts_only_where_it_was_late(tmp_path):
    """A gap of 10 us ends with a kernel launched in time, one of 20 us with one launched late."""
    kernels = [("a", 0, 10, 7), ("b", 20, 30, 7), ("c", 50, 60, 7)]
    launches = [(0, -5), (1, 5), (2, 35)]
    gaps = breakdown_of(tmp_path / "t.json", kernels, launches, [("forward", -10, 70)]).host_gaps
    assert gaps.count == 1 and gaps.time_s == pytest.approx(20e-6)
    assert gaps.by_part == {"forward": pytest.approx(20e-6)}


def test_figures_are_those_of_one_step(tmp_path):
    """Two steps of 100 us, each with a matmul of 40, an all-gather half beside it, a late kernel."""
    kernels, launches, host = [], [], []
    for i, t in enumerate((0, 100)):
        host.append((f"ProfilerStep#{i}", t, t + 100))
        kernels.append(("ampere_sgemm_128x64_nn", t, t + 40, 7))
        kernels.append(("ncclDevKernel_AllGather_RING_LL()", t + 30, t + 50, 8))
        kernels.append(("elementwise_kernel", t + 80, t + 100, 7))
        launches += [(3 * i, t - 5), (3 * i + 1, t), (3 * i + 2, t + 75)]
    b = breakdown_of(tmp_path / "t.json", kernels, launches, host, matmul_flops=8e6)
    assert (b.n_steps, b.step_time_s) == (2, pytest.approx(100e-6))
    classes = {"matmul fp32": 40, "idle": 30, "elementwise": 20, "communication": 10}
    assert micros(b.classes_s) == classes
    assert b.communication_overlapped_s == pytest.approx(10e-6)
    assert {k.calls for k in b.kernels} == {1}
    times = {"matmul fp32": 40, "communication": 20, "elementwise": 20}
    assert micros({k.kind: k.time_s for k in b.kernels}) == times
    assert b.matmul_tflops == pytest.approx(8e6 / 40e-6 / 1e12)
    assert b.host_gaps.count == 1 and b.host_gaps.time_s == pytest.approx(30e-6)


def test_ranges_name_the_loss_and_the_optimizer(tmp_path):
    """An elementwise kernel is of the range that launched it; so is a matmul, except the loss's."""
    kernels = [("gemm bf16", 0, 10, 7), ("add", 10, 20, 7), ("add", 20, 40, 7)]
    kernels += [("gemm bf16", 40, 70, 7)]
    launches = [(0, 1), (1, 2), (2, 12), (3, 13)]
    ranges = [("loss", 0, 5), ("optimizer", 10, 20)]
    b = breakdown_of(tmp_path / "t.json", kernels, launches, ranges)
    assert micros(b.classes_s) == {"matmul bf16": 10, "loss": 10, "optimizer": 50}


MM = event("aten::mm", 1.0, 3.0, "cpu_op", 1)


def test_a_trace_that_unpacks_without_end_is_refused(tmp_path, refused):
    with gzip.open(tmp_path / "x.json.gz", "wb") as f:
        for _ in range(90):
            f.write(b" " * 2**20)
    most = 100 * (tmp_path / "x.json.gz").stat().st_size / 2**20 + 64
    refused(trace_report.main, f"has over {most:.0f} MiB", tmp_path / "x.json.gz")


def two_steps(step="user_annotation", op="cpu_op", copy="gpu_memcpy", launch="cuda_runtime"):
    """Two steps of 1 ms, by category: a matmul of 0.3 ms, a copy of 0.2 ms."""
    events = []
    for i, t in enumerate((0.0, 1000.0)):
        ids = {"correlation": 10 + i, "External id": 1 + i}
        events.append(event(f"ProfilerStep#{i}", t, t + 1000, step, 1))
        shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["float", "float"]}
        events.append(event("aten::mm", t + 10, t + 110, op, 1, **{"External id": 1 + i}, **shapes))
        events.append(event("cudaLaunchKernel", t + 20, t + 25, launch, 1, **ids))
        events.append(event("volta_sgemm_128x64_nn", t + 100, t + 400, **ids))
        copied = event("Memcpy HtoD (Pageable -> Device)", t + 500, t + 700, correlation=20 + i)
        events.append(copied | {"cat": copy})
    return events


WHOLE = two_steps()
OLD = two_steps("Operator", "Operator", "Memcpy", "Runtime")
SECOND_GPU = [
    event("gemm", t, t + 250.0, device=1, correlation=30) | {"pid": 1} for t in (0.0, 9e2)
]
# By what is odd, the events, and what is said of it.
ODD = {
    "nothing": (WHOLE, ""),
    "PyTorch 1.8 to 1.11": ([e | {"cat": e["cat"].title()} for e in OLD], ""),
    "a category of tomorrow": ([*WHOLE, event("x", 0, 9, "quantum")], "category 'quantum' left out"),
    "a negative duration": ([*WHOLE, event("x", 9, 4, "cpu_op", 1)], "1 event without times"),
    "no time": ([*WHOLE, WHOLE[1] | {"ts": "x"}, WHOLE[1] | {"dur": None}], "2 events without times"),
    "a second GPU": (SECOND_GPU + WHOLE, "GPU 0 is shown, the busiest of 2; the others worked 50%"),
    "marks of two threads": ([*WHOLE, WHOLE[0] | {"tid": 2, "ts": 1}], ""),
    "a lost launch": ([e for e in WHOLE if e is not WHOLE[2]], ""),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_traces_have_the_same_steps(odd, tmp_path):
    """../shared/cases of the projects that wrote them: kineto, PyTorch's profiler, merging tools."""
    events, said = ODD[odd]
    trace = read_trace(write_trace(tmp_path / "t.json", events))
    b = break_down(trace)
    assert (b.n_steps, micros(b.classes_s)) == (2, {"idle": 500, "matmul fp32": 300, "copies": 200})
    assert b.step_time_s == pytest.approx(1e-3)
    assert said in " ".join(trace.notes) if said else not trace.notes


def test_several_ranks_in_a_file_are_refused(tmp_path, refused):
    path = write_trace(tmp_path / "t.json", WHOLE + [e | {"pid": e["pid"] + 100} for e in WHOLE])
    refused(trace_report.main, "mixes 2 processes; give a file of each rank", path)


def with_ids(events, more):
    """The same events with other numbers."""
    ids = ("correlation", "External id")
    changed = ({k: v + more if k in ids else v for k, v in e["args"].items()} for e in events)
    return [e | {"args": args} for e, args in zip(events, changed, strict=True)]


def test_flops_are_of_the_marked_steps_and_idle_ones_count(tmp_path):
    """Work from before the first mark is in no step; a step in which the GPU has no work is one."""
    earlier = [e | {"ts": e["ts"] - 5000} for e in with_ids(WHOLE, 70)]
    earlier = [e for e in earlier if "Profiler" not in e["name"]]
    host = [
        event(f"ProfilerStep#{i}", 1e3 * i, 1e3 * (i + 1), "user_annotation", 1) for i in (-2, -1)
    ]
    for events, n in ((WHOLE + earlier, 2), (host + WHOLE, 4)):
        b = break_down(read_trace(write_trace(tmp_path / "t.json", events)))
        assert (b.n_steps, b.matmul_flops) == (n, pytest.approx(2 * 4096**3 * 2 / n))


def test_copies_are_known_by_their_category(tmp_path):
    """roctracer calls them CopyHostToDevice and FillBuffer."""
    events = [e | {"name": "FillBuffer"} if e["cat"] == "gpu_memcpy" else e for e in WHOLE]
    b = break_down(read_trace(write_trace(tmp_path / "t.json", events)))
    assert micros(b.classes_s)["copies"] == 200


def test_a_step_whose_records_are_lost_does_not_count(tmp_path, output_of):
    kept = [e for e in WHOLE if e["name"] in ("ProfilerStep#0", "volta_sgemm_128x64_nn")]
    path = write_trace(tmp_path / "t.json", [*kept[:2], *WHOLE[4:]])
    b = break_down(read_trace(path))
    assert (b.n_steps, b.step_time_s) == (1, pytest.approx(1e-3))
    assert "1 step of 2: no GPU work of the first ones" in output_of(trace_report.main, path)


def test_a_gpu_program_without_recorded_kernels_has_no_rates(tmp_path, refused):
    """kineto#996, pytorch#99615: CUPTI was not there, or another profiler had it."""
    host = [e for e in WHOLE if e["cat"] in ("user_annotation", "cpu_op", "cuda_runtime")]
    listed = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]}
    path = write_trace(tmp_path / "t.json", host, **listed)
    refused(trace_report.main, "has 2 launches of GPU kernels, but no kernel: CUPTI", path)
    host = [e for e in host if e["cat"] != "cuda_runtime"]
    trace = read_trace(write_trace(path, host, **listed))
    assert break_down(trace).matmul_flops is None and trace.device_name is None
    assert (
        "A100-SXM4-80GB: has no work in this file; the times are those of the host"
        in trace.notes[0]
    )
    assert break_down(read_trace(write_trace(path, host))).matmul_flops == 2 * 4096**3


def test_devices_that_are_not_listed(tmp_path):
    path = write_trace(tmp_path / "t.json", [MM], deviceProperties={"name": "H100"})
    assert read_trace(path).device_name is None


def test_kernels_may_have_any_name(tmp_path, output_of):
    names = ["x[/y]", "foo[abi:cxx11](int)", fuzz.ESCAPE]
    events = [event(name, 10 * i, 10 * i + 5) for i, name in enumerate(names)]
    out = output_of(trace_report.main, write_trace(tmp_path / "t.json", events))
    assert "x[/y]" in out and "foo[abi:cxx11](int)" in out and "\x1b" not in out


# --- all ranks of a run -----------------------------------------------------------------------------


def rank_trace(directory, rank, late, calls=3, n_steps=1):
    """A step of `calls` matmuls of 1 ms, each with an all-reduce that ends at 5 ms for all ranks."""
    ends = [calls * 5000.0 * i / n_steps for i in range(n_steps + 1)]
    steps = enumerate(itertools.pairwise(ends))
    events = [event(f"ProfilerStep#{i}", *times, "user_annotation", 1) for i, times in steps]
    for begin in range(0, calls * 5000, 5000):
        meets = begin + 1000.0 + late
        events.append(event("gemm", begin, meets, tid=4))
        events.append(event("ncclDevKernel_AllReduce_Sum", meets, begin + 5000, tid=27))
    whom = {"rank": rank, "world_size": 3}
    write_trace(directory / f"r{9 - rank}.json", events, distributedInfo=whom)


def test_two_traces_of_a_rank_are_refused(tmp_path, refused):
    rank_trace(tmp_path, 0, 0)
    shutil.copy(tmp_path / "r9.json", tmp_path / "r0.json")
    refused(trace_report.main, "rank 0 has 2 traces (r0.json, r9.json)", tmp_path)


def test_traces_of_several_runs_have_no_straggler(tmp_path, refused):
    for rank, changed in enumerate(({}, {"deviceProperties": [{"name": "H100"}]})):
        rank_trace(tmp_path, rank, 400.0 * rank)
        path = tmp_path / f"r{9 - rank}.json"
        content = (
            json.loads(path.read_text()) | {"deviceProperties": [{"name": "MI300X"}]} | changed
        )
        path.write_text(json.dumps(content))
    refused(trace_report.main, "holds traces of different GPUs (H100, MI300X)", tmp_path)
    content["deviceProperties"], content["distributedInfo"]["world_size"] = [{"name": "MI300X"}], 16
    path.write_text(json.dumps(content))
    refused(trace_report.main, "different runs, by their numbers of ranks (16, 3)", tmp_path)
    rank_trace(tmp_path, 1, 0.0, n_steps=3)
    refused(trace_report.main, "different numbers of steps (1, 3)", tmp_path)


@pytest.mark.parametrize("cut", [slice(40, 80), slice(-9, None), slice(-8, -4)], ids=str)
def test_a_damaged_trace_among_the_ranks_is_named(cut, tmp_path, refused):
    """In its data, at its end or in its checksum. Left out, another rank would be the straggler."""
    rank_trace(tmp_path, 0, 0)
    whole = bytearray(gzip.compress((tmp_path / "r9.json").read_bytes()))
    whole[cut] = b"" if cut.stop is None else b"\xff" * (cut.stop - cut.start)
    (tmp_path / "r8.json.gz").write_bytes(whole)
    refused(trace_report.main, "r8.json.gz: cannot be read", tmp_path)
