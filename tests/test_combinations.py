"""Every supported combination of toggles runs for real, every other is refused with its reason."""

import itertools
import os

import pytest

from docs.tables import AXES, Combination, refusal
from llm_train_bench.base.errors import UsageError
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import SHARDED
from llm_train_bench.settings.rules import TOGGLES
from tests.dist_worker import Job, run_jobs
from tests.faults import steps_of
from tests.helpers import INDUCTOR_LINKS, facts_of, result_of

# The flags of layouts are of sharded models alone.
EVERY = [Combination(*values) for values in itertools.product(*AXES.values())]
ALL = [c for c in EVERY if c.layout == "data" or c.entrypoint in SHARDED]
SUPPORTED = [c for c in ALL if refusal(c) is None]
REFUSED = [c for c in ALL if refusal(c) is not None]
# Transformer Engine and CUDA graphs need a GPU: tests/test_gpu.py runs their cells.
ONLY_ON_A_GPU = [c for c in SUPPORTED if c.fp8 == "te" or c.compile == "graphs"]
# tests/layouts.py shows that layouts and pipelines are equal to one device, with FP8, SAC and compiled.
IN_LAYOUTS = [c for c in SUPPORTED if c.layout != "data" or c.entrypoint == "train_pp.py"]
ON_A_CPU = [c for c in SUPPORTED if c not in [*ONLY_ON_A_GPU, *IN_LAYOUTS]]


def name(c: Combination) -> str:
    layout = "" if c.layout == "data" else f"-{c.layout}"
    script = c.entrypoint.removesuffix(".py")
    return f"{script}-{c.amp}-fp8_{c.fp8}-compile_{c.compile}-sac_{c.sac}{layout}"


def flags(c: Combination) -> list[str]:
    argv = ["--amp", c.amp]
    mode = "reduce-overhead" if c.compile == "graphs" else "default"
    argv += ["--use-fp8", "--fp8-backend", c.fp8] if c.fp8 != "off" else []
    argv += ["--fp8-emulate"] if c.fp8 == "torchao" else []
    argv += ["--pt-compile", "--compile-mode", mode] if c.compile != "off" else []
    argv += ["--sac-freq", "1/2", "--sac-policy", c.sac] if c.sac != "off" else []
    return argv + {"data": [], "tokens": ["--tp", "2"], "experts": ["--ep", "2"]}[c.layout]


TINY = [
    "tests/configs/gpt2-small.json",
    *"--seq-len 32 --device cpu --n-steps 2 --warmup-steps 3 --lr 1e-3 --lr-warmup-steps 0".split(),
    *"--no-tensorboard --no-observe".split(),
]
# Capturing a compiled cell takes seconds, and Inductor's code for it ten or more in a C++ compiler. So
# the short form compiles few cells: each script, format and recomputation occurs among them, and
# Inductor generates code for one. Of eager ones each pair occurs. `make test-cells` runs all.
ALL_CELLS = "LLM_TRAIN_BENCH_ALL_CELLS" in os.environ
COMPILED_BY_INDUCTOR = Combination("train_fsdp.py", "off", "off", "on", "op")
COMPILED = {
    COMPILED_BY_INDUCTOR,
    Combination("train.py", "bf16", "torchao", "on", "block"),
    Combination("train_ddp.py", "fp16", "off", "on", "off"),
    Combination("train_fsdp.py", "bf16", "torchao", "on", "off"),
}
NUMBERS = {c: sum([*AXES[a]].index(v) for a, v in c._asdict().items()) for c in ON_A_CPU}
EAGER = {c for c, n in NUMBERS.items() if n % 3 == 0 or c.entrypoint == "train.py"}
SHORT = COMPILED | {c for c in EAGER if c.compile == "off"}
RUN_HERE = [c for c in ON_A_CPU if ALL_CELLS or c in SHORT]


def traced_only(c: Combination) -> bool:
    by_inductor = INDUCTOR_LINKS and (ALL_CELLS or c == COMPILED_BY_INDUCTOR)
    return c.compile != "off" and not by_inductor


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The cells that a CPU runs: train.py's on one rank, the others on two."""
    out = tmp_path_factory.mktemp("cells")
    worlds = [(c, 1 if c.entrypoint == "train.py" else 2) for c in RUN_HERE]
    cells = ((c, [*TINY, "--bsz", 4 // n, *flags(c)], n) for c, n in worlds)
    run_jobs((Job(name(c), c.entrypoint, argv, n, traced_only(c)) for c, argv, n in cells), out)
    return out


@pytest.mark.parametrize("c", RUN_HERE, ids=name)
def test_a_supported_combination_trains_as_its_number_format_does(c, finished):
    """The same losses as eager, unrecomputed train.py in that format, and the toggles were on.

    Attention tells: it gets the format that the matmul before it made. It is called again if its
    block (one of two) recomputes. If its output was kept (`op`), no kernel runs for that.
    """
    result = result_of(finished / name(c))
    plain = Combination("train.py", c.amp, c.fp8, "off", "off")
    m = result["metrics"]
    assert result["status"] == "ok" and m["n_measured_steps"] == 2
    for key, tolerance in (("loss", 2e-3), ("grad_norm", 2e-2)):
        values, expected = (steps(finished, cell, key) for cell in (c, plain))
        if c.entrypoint == "train.py" and c.compile == "off":
            assert values == expected, key
        assert values == pytest.approx(expected, rel=1e-5 if c.amp == "off" else tolerance), key
    if c.compile == "off":
        calls = facts_of(finished / name(c))["attention"]
        dtype = {"off": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[c.amp]
        kernels = 5 * (3 if c.sac == "block" else 2)
        assert calls == {dtype: 5 * (2 if c.sac == "off" else 3), "kernels": kernels}
    assert (m["n_compiled_graphs"] or 0) > 0 or c.compile == "off"
    assert m["n_graph_breaks"] in (None, 0) and not m["window_compile_s"]
    if c.fp8 == "torchao":
        assert result["fp8"]["emulated"] and result["fp8"]["n_linear_layers"] == 8
    else:
        assert result["fp8"] is None


def test_number_formats_differ(finished):
    """Losses agree within a format, but not between formats."""
    formats = ("off", "off"), ("bf16", "off"), ("fp16", "off"), ("bf16", "torchao")
    plain = (Combination("train.py", *names, "off", "off") for names in formats)
    assert len({tuple(steps(finished, c)) for c in plain}) == 4


def steps(out, c: Combination, key="loss") -> list[float]:
    return [step[key] for step in steps_of(out / name(c))]


@pytest.mark.parametrize("c", REFUSED, ids=name)
def test_every_other_combination_is_refused_with_reason_and_alternative(c):
    argv = [f for f in flags(c) if f != "--fp8-emulate"]
    with pytest.raises(UsageError) as refused:
        parse_args([*TINY, *argv], c.entrypoint)
    assert str(refused.value) == refusal(c) and "; use " in refusal(c)


@pytest.mark.parametrize("c", SUPPORTED, ids=name)
def test_every_supported_combination_is_accepted(c):
    args = parse_args([*TINY, *flags(c)], c.entrypoint)
    assert (args.amp, args.use_fp8, args.pt_compile) == (c.amp, c.fp8 != "off", c.compile != "off")


def test_the_short_form_has_every_pair_of_settings():
    for a, b in itertools.combinations(AXES, 2):
        here, everywhere = (
            {(getattr(c, a), getattr(c, b)) for c in cells} for cells in (RUN_HERE, ON_A_CPU)
        )
        assert here == everywhere, (a, b)
    assert set(RUN_HERE) >= COMPILED


def test_the_table_is_whole():
    assert len(ALL) == 648 and len(SUPPORTED) == 192
    refused = {refusal(c) for c in EVERY}
    assert refused == {message for message, _ in TOGGLES} | {None}
