"""--amp auto: the fastest format that the device has instructions for, and that no rule refuses."""

import contextlib
import dataclasses
import itertools

import pytest

import estimate
from docs.tables import AXES
from llm_train_bench.base import machine
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import find_hardware
from llm_train_bench.compare.read_results import record_of_result
from llm_train_bench.compare.setting import identity
from llm_train_bench.results.schema import Result
from llm_train_bench.run.checkpoint import attempt
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import resolve_amp
from llm_train_bench.settings.rules import broken_rule
from llm_train_bench.sweep.cell_runs import cell_key
from llm_train_bench.sweep.experiment import Experiment
from llm_train_bench.sweep.grid import differences, make_cells
from tests.helpers import answers, config, plan_of, remark_texts, train_main, trained, words

TINY = words(
    "configs/gpt2-tiny.json --seq-len 16 --bsz 1 --n-steps 2 --warmup-steps 1 --no-tensorboard"
)


@pytest.fixture
def cpu_with(monkeypatch):
    """Invents the instruction sets of this machine's CPU."""

    def invent(sets: str) -> None:
        monkeypatch.setattr(machine, "_processor", lambda: ("Invented CPU", set(sets.split())))

    return invent


@pytest.mark.parametrize(("sets", "expected"), answers("cpu_formats.txt"))
def test_a_cpu_s_format_is_one_that_it_multiplies_in(sets, expected, cpu_with, tmp_path):
    cpu_with(sets)
    assert plan_of(TINY, platform="cpu").work.amp == expected
    result = trained(tmp_path, TINY)  # in the record, and in the name
    assert result["args"]["amp"] == expected
    assert ("-ampoff" in result["run_name"]) is (expected == "off")


def test_a_slow_format_runs_with_a_note_if_asked_for(cpu_with, tmp_path, capsys):
    cpu_with("avx2")
    for name in ("bf16", "fp16"):
        note = f"{name}: this CPU has no instructions for it"
        result = trained(tmp_path / name, TINY, "--amp", name)
        assert result["args"]["amp"] == name and remark_texts(result)[0].startswith(note)
        assert note in capsys.readouterr().err.partition("step ")[0]  # before the slow steps
        assert "; use --amp auto" in remark_texts(result)[0]
    forced = remark_texts(trained(tmp_path / "forced", TINY, "--use-fp8 --fp8-emulate --bsz 2"))
    assert any(n.startswith("bf16: this CPU has no") and n.endswith("in fp32") for n in forced)
    cpu_with("amx_bf16 amx_fp16")
    for name in ("bf16", "fp16"):
        assert not plan_of([*TINY, "--amp", name], platform="cpu").notes


MORE = [
    "", "--optimizer muon", "--optimizer sgd", "--lora-rank 2",
    "--bf16-weights",
    "--zero1", "--cpu-offload", "--linear te", "--linear onednn", "--use-fp8 --fp8-emulate",
]  # fmt: skip


@pytest.mark.parametrize("native", ["bf16", "fp16", "off"])
def test_auto_refuses_nothing_that_some_format_allows(native):
    """Each supported combination of toggles, and flags that are for some formats only."""
    cases = [(script, {}, more) for script in Script for more in MORE]
    cases += [(Script.FSDP, {"tp": 2}, more) for more in MORE]
    axes = [AXES[name].values() for name in ("fp8", "compile", "sac", "layout")]
    for script, *cells in itertools.product(Script, *axes):
        cases.append((script, {k: v for cell in cells for k, v in cell.items()}, ""))
    allowed_by_some = 0
    for script, flags, more in cases:
        with contextlib.suppress(UsageError):  # flags of other scripts
            args = dataclasses.replace(parse_args(words("x.json", more), script), **flags)
        formats = [dataclasses.replace(args, amp=name) for name in ("off", "bf16", "fp16")]
        allowed = [a.amp for a in formats if not broken_rule(a, script)]
        if not allowed:
            continue
        allowed_by_some += 1
        assert not broken_rule(args, script), (script, flags, more)
        chosen = resolve_amp(args, script, "nvidia", native)
        assert chosen in allowed, (script, flags, more, chosen)
        if args.use_fp8 or args.linear == "te":
            assert chosen == "bf16"
        elif args.linear == "onednn":
            assert chosen == "off"
        else:
            assert chosen == next(name for name in (native, "off", "bf16") if name in allowed)
    assert allowed_by_some > 100


def test_experts_of_odd_sizes_are_refused_in_bf16():
    shape = config("qwen3_moe", moe_intermediate_size=20)
    assert plan_of(words("x.json --seq-len 16 --amp off"), config=shape).work.amp == "off"
    assert plan_of(["x.json", "--seq-len", 16], config=config("qwen3_moe")).work.amp == "bf16"
    narrow = config("nemotron_h", moe_latent_size=12)  # what its experts see of a token
    with pytest.raises(UsageError, match="latent size 12 and expert size 24 must be multiples"):
        plan_of(words("x.json --seq-len 16"), config=narrow)


def test_the_device_that_is_meant_decides(cpu_with, output_of):
    """Not the host: an estimate or a sweep for a GPU is planned on a CPU."""
    cpu_with("avx2")
    older = dataclasses.replace(find_hardware("h100"), name="Tesla V100-SXM2-16GB")
    assert older.native_amp == dataclasses.replace(older, name="RTX 2080 Ti").native_amp == "fp16"
    for gpu, expected in (("h100", "bf16"), ("mi300x", "bf16"), ("t4", "fp16"), ("v100", "fp16")):
        assert find_hardware(gpu).native_amp == expected
        e = Experiment.model_validate(
            {"experiment": "x", "models": ["configs/gpt2-tiny.json"],
             "hardware": {"nvidia": {"gpus": 1, "gpu": find_hardware(gpu).name}}})  # fmt: skip
        (cell,) = make_cells(e, "nvidia")
        assert "--amp" not in cell.argv()
        other = e.model_copy(update={"platforms": {"cpu": {"device": "cpu"}}})
        assert f"amp: nvidia {expected}, cpu off" in "\n".join(differences(other, "x"))
    line = "configs/gpt2-125m.json --bsz 1 --gpu t4"
    explicit, auto = (output_of(estimate.main, line, more) for more in ("--amp fp16", ""))
    assert explicit == auto and "bf16" not in auto
    assert "T4 has no bf16" in output_of(estimate.main, line, "--amp bf16")
    # Of other trainers it is not known what they refuse of fp16.
    assert output_of(estimate.main, line, "--trainer megatron --tp 2 --gpus 2")


def test_the_cpu_of_an_estimate_is_known_by_its_name(own_hardware):
    for sets, expected in (("avx2 avx512f", "off"), ("avx2 avx512_bf16", "bf16")):
        name = f"Some CPU ({sets}, 2 cores), 2 threads"
        own_hardware(dict(name=name, bf16_tflops=1.0, memory_gib=8.0, memory_tb_per_s=0.1))
        assert find_hardware(name).native_amp == expected


def key_of(result: Result) -> str:
    return identity(record_of_result(result, [], ""))


def test_runs_of_before_stay_repeats(tmp_path):
    """The default was bf16: baselines and names leave it out, and --from says it."""
    result = Result.model_validate(trained(tmp_path, TINY, "--device cpu"))
    plain = Result.model_validate(result.model_dump() | {"args": {**result.args}})
    del plain.args["amp"]
    assert result.args["amp"] == "bf16" and key_of(result) == key_of(plain)
    other = Result.model_validate(result.model_dump() | {"args": {**result.args, "amp": "off"}})
    assert key_of(other) != key_of(plain)
    (path,) = tmp_path.glob("*/result.json")
    assert parse_args(["--from", str(path)], "train.py").amp == "bf16"


def test_a_sweep_s_rows_of_before_are_of_another_format(cpu_with):
    """On a CPU without bf16 only: there the same command meant another format."""
    e = Experiment.model_validate({"experiment": "x", "models": ["configs/gpt2-tiny.json"]})
    cpu_with("avx512_bf16")
    (cell,) = make_cells(e, "cpu")
    before = cell_key(cell, 0)
    cpu_with("avx2")
    assert cell_key(cell, 0) != before
    explicit = dataclasses.replace(cell, flags=(*cell.flags, ("amp", "off")))
    assert cell_key(explicit, 0).split("-")[2] not in before


def test_ranks_agree_and_a_resumed_run_keeps_it(tmp_path, monkeypatch, refused, cpu_with):
    monkeypatch.setattr(attempt, "broadcast", lambda ranks, value: "fp16")
    message = "--amp auto: rank 0 takes fp16, this rank bf16; set --amp"
    refused(train_main, message, TINY, "--output-dir", tmp_path / "x")
    monkeypatch.undo()
    saving = words("--save-every 2 --run-name a --resume auto --output-dir", tmp_path / "runs")
    assert train_main([*TINY, *saving]) == 0
    cpu_with("avx2")
    again = "--resume", tmp_path / "runs/a", "--output-dir", tmp_path / "b"
    refused(train_main, "--amp off: the checkpoint", TINY, *again)
