"""Every supported combination of toggles runs for real, every other is refused with its reason."""

import itertools
import json
import os

import pytest

from llm_train_bench.base.errors import UsageError
from llm_train_bench.parallel.ranks import ALONE
from llm_train_bench.settings import rules
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import SHARDED
from llm_train_bench.settings.rules import AXES, Combination, refusal
from tests.dist_worker import start_ranks, work
from tests.helpers import INDUCTOR_LINKS, ROOT, run_train

# The flags of layouts are of sharded models alone.
EVERY = [Combination(*values) for values in itertools.product(*AXES.values())]
ALL = [c for c in EVERY if c.layout == "data" or c.entrypoint in SHARDED]
SUPPORTED = [c for c in ALL if refusal(c) is None]
REFUSED = [c for c in ALL if refusal(c) is not None]
# Transformer Engine and CUDA graphs need a GPU: tests/test_gpu.py runs their cells.
ONLY_ON_A_GPU = [c for c in SUPPORTED if c.fp8 == "te" or c.compile == "graphs"]
# tests/layouts.py shows that layouts and pipelines are equal to one device, with SAC and compiled too.
ON_A_CPU = [
    c
    for c in SUPPORTED
    if c not in ONLY_ON_A_GPU and c.layout == "data" and c.entrypoint != "train_pp.py"
]


def name(c: Combination) -> str:
    layout = "" if c.layout == "data" else f"-{c.layout}"
    script = c.entrypoint.removesuffix(".py")
    return f"{script}-{c.amp}-fp8_{c.fp8}-compile_{c.compile}-sac_{c.sac}{layout}"


def flags(c: Combination) -> list[str]:
    argv = ["--amp", c.amp]
    if c.fp8 != "off":
        argv += ["--use-fp8", "--fp8-backend", c.fp8]
        argv += ["--fp8-emulate"] if c.fp8 == "torchao" else []
    if c.compile != "off":
        mode = "reduce-overhead" if c.compile == "graphs" else "default"
        argv += ["--pt-compile", "--compile-mode", mode]
    if c.sac != "off":
        argv += ["--sac-freq", "1/2", "--sac-policy", c.sac]
    argv += {"data": [], "tokens": ["--tp", "2"], "experts": ["--ep", "2"]}[c.layout]
    return argv


TINY = ["configs/gpt2-tiny.json", "--seq-len", "32", "--device", "cpu", "--n-steps", "2",
        "--warmup-steps", "3", "--lr", "1e-3", "--lr-warmup-steps", "0",
        "--no-tensorboard", "--no-observe"]  # fmt: skip


# Capturing a compiled cell takes seconds; Inductor's code for it ten or more in a C++ compiler.
# Of compiled cells, the short form runs one recomputation for each script and number format, such
# that each pair of them occurs. Inductor generates code for one; the rest run the graphs as captured and
# differentiated. `make test-cells` runs all, by Inductor.
ALL_CELLS = "LLM_TRAIN_BENCH_ALL_CELLS" in os.environ
WITH_INDUCTOR = {("train_fsdp.py", "off", "off", "op")}


def in_short_form(c: Combination) -> bool:
    formats = sorted({(x.amp, x.fp8) for x in ON_A_CPU})
    turn = AXES["entrypoint"].index(c.entrypoint) + formats.index((c.amp, c.fp8))
    return c.compile == "off" or AXES["sac"][turn % 3] == c.sac


RUN_HERE = [c for c in ON_A_CPU if ALL_CELLS or in_short_form(c)]


def traced_only(c: Combination) -> bool:
    chosen = (c.entrypoint, c.amp, c.fp8, c.sac) in WITH_INDUCTOR
    return c.compile != "off" and not (INDUCTOR_LINKS and (ALL_CELLS or chosen))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The cells that a CPU runs: train.py's here, the others by two ranks beside it."""
    out = tmp_path_factory.mktemp("cells")

    def cases(alone: bool, bsz: str) -> list:
        cells = [c for c in RUN_HERE if (c.entrypoint == "train.py") == alone]
        return [
            (name(c), c.entrypoint, [*TINY, "--bsz", bsz, *flags(c)], traced_only(c)) for c in cells
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        ranks = start_ranks(2, cases(False, "2"), out)
        try:
            work(ALONE, cases(True, "4"), out)
            while not ranks.join():
                pass
        finally:
            for process in ranks.processes:
                process.kill()
    return out


@pytest.mark.parametrize("c", RUN_HERE, ids=name)
def test_a_supported_combination_trains_as_its_number_format_does(c, finished):
    """The same losses as eager, unrecomputed train.py in that format, and the toggles were on.

    Attention tells: it gets the format that the matmul before it made. It is called again if its
    block (one of two) recomputes. If its output was kept (`op`), no kernel runs for that.
    """
    result = json.loads((finished / name(c) / "result.json").read_text())
    plain = Combination("train.py", c.amp, c.fp8, "off", "off")
    m = result["metrics"]
    assert result["status"] == "ok" and m["n_measured_steps"] == 2
    for key, tolerance in (("loss", 2e-3), ("grad_norm", 2e-2)):
        found, expected = (steps(finished, cell, key) for cell in (c, plain))
        assert found == pytest.approx(expected, rel=1e-5 if c.amp == "off" else tolerance), key
    if c.compile == "off":
        calls = json.loads((finished / name(c) / "facts.json").read_text())["attention"]
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
    plain = {
        (amp, fp8): steps(finished, Combination("train.py", amp, fp8, "off", "off"))
        for amp, fp8 in (("off", "off"), ("bf16", "off"), ("fp16", "off"), ("bf16", "torchao"))
    }
    assert len({tuple(values) for values in plain.values()}) == 4


def steps(out, c: Combination, key="loss") -> list[float]:
    lines = (out / name(c) / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)[key] for line in lines]


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
    assert any((c.entrypoint, c.amp, c.fp8, c.sac) in WITH_INDUCTOR for c in RUN_HERE)


def test_the_table_is_whole():
    assert len(ALL) == 648 and len(SUPPORTED) == 154
    refused = {refusal(c) for c in EVERY}
    assert refused == {message for message, _ in rules.TOGGLES} | {None}


def test_readme_shows_this_table():
    text = (ROOT / "docs/COMBINATIONS.md").read_text(encoding="utf-8")
    assert rules.combinations_table() in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--use-fp8"], "Transformer Engine needs a GPU"),
        (["--use-fp8", "--pt-compile"], "a CPU has no FP8 matmuls; --fp8-emulate"),
        (["--use-fp8", "--fp8-recipe", "rowwise"], "a CPU has no FP8 matmuls"),
        (["--use-fp8", "--fp8-recipe", "rowwise", "--fp8-backend", "te"],
         "--fp8-recipe rowwise: --fp8-backend te supports current, delayed, blockwise, mxfp8"),
        (["--use-fp8", "--fp8-emulate", "--fp8-backend", "te"], "use --fp8-backend torchao"),
        (["--fp8-recipe", "rowwise"], "--fp8-recipe needs --use-fp8"),
        (["--fp8-emulate"], "--fp8-emulate needs --use-fp8"),
        (["--use-fp8", "--fp8-emulate", "--seq-len", "30", "--bsz", "3"],
         "--bsz x --seq-len = 90 tokens is not a multiple of 16"),
        (["--use-fp8", "--fp8-all-gather"], "--fp8-all-gather has no meaning for train.py"),
        (["--fp8-backend", "te"], "--fp8-backend needs --use-fp8"),
        (["--tf32"], "NVIDIA GPUs from Ampere on"),
    ],
)  # fmt: skip
def test_fp8_flags_that_cannot_be_are_one_line(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run_train(*TINY, *argv, "--output-dir", tmp_path / "runs") == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--pt-compile", "--fp8-backend te with --pt-compile"),
        ("--fp8-recipe rowwise", "--fp8-backend te supports current"),
        ("--fp8-recipe blockwise", "does not work with --fp8-recipe blockwise, --sac-freq, "),
        ("--sac-freq 1/1", "does not work with --fp8-recipe blockwise, --sac-freq, "),
        (
            "--optimizer sgd",
            "does not work with --fp8-recipe blockwise, --sac-freq, --optimizer sgd",
        ),
        ("--cpu-offload", "does not work with --cpu-offload"),
        ("--dp-replicate 2", "--dp-replicate or --export; leave one out"),
        ("--export", "--dp-replicate or --export; leave one out"),
        ("--val-data x.bin --fp8-recipe mxfp8", "mxfp8 does not work with --val-data"),
    ],
)
def test_what_weights_of_transformer_engine_in_fp8_do_not_work_with(argv, message):
    flags = [*TINY, "--use-fp8", "--fp8-backend", "te", "--fp8-all-gather", *argv.split()]
    with pytest.raises(UsageError, match=message):
        parse_args(flags, "train_fsdp.py")
