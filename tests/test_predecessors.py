"""What users of predecessors bring along: configs, flags, files of a run; and runs that must fit."""

import pytest

from llm_train_bench.errors import DoesNotFit, UsageError
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.model.config import ConfigError, load_config, parse_config
from llm_train_bench.run import launch
from llm_train_bench.settings.command_line import parse_args, translated
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import make_plan
from tests.helpers import ROOT, only_result, run_train

PROXY = ["configs/llama-70b-proxy.json", "--sac-freq", "1/4"]
FIRST = {
    "n_layers": 4, "n_heads": 64, "n_kv_heads": 8, "d_embd": 8192, "max_seq_len": 4096,
    "vocab_size": 128256, "ffn_mult": 1.3, "ffn_factor": 1024, "rope_base": 500000.0, "norm_eps": 1e-05,
    "d_hid": 28672, "arch_name": "llama",
}  # fmt: skip


def test_configs_of_the_first_llm_train_bench_are_read():
    """Its 70B proxy is ours; without d_hid the width follows from its two factors, as there."""
    ours = load_config(ROOT / "configs/llama-70b-proxy.json")
    for raw in (FIRST, {k: v for k, v in FIRST.items() if k != "d_hid"}):
        found = parse_config(raw, "old.json")
        assert count_parameters(found) == count_parameters(ours) and found.unknown_keys == ()
        assert (found.intermediate_size, found.rope_theta, found.norm_eps) == (
            28672,
            500000.0,
            1e-5,
        )
    gpt = {"n_layers": 48, "n_heads": 25, "d_embd": 1600, "max_seq_len": 1024, "vocab_size": 50304,
           "arch_name": "gpt"}  # fmt: skip
    found = parse_config(gpt, "old.json")
    assert found.model_type == "gpt2" and found.intermediate_size == 6400
    assert count_parameters(found) == count_parameters(
        load_config(ROOT / "configs/gpt2-1.5b.json")
    ) + (47 * 1600)
    assert found.attention_dropout == found.embedding_dropout == 0.0
    with pytest.raises(ConfigError, match=r'arch_name "bert": not implemented'):
        parse_config(gpt | {"arch_name": "bert"}, "old.json")
    with pytest.raises(ConfigError, match="d_embd: missing"):
        parse_config({"arch_name": "gpt", "vocab_size": 8}, "old.json")


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("small", 128_625_408), ("medium", 423_183_360), ("large", 969_411_840), ("xl", 1_998_235_200),
     ("2.7B", 3_406_809_600)],
)  # fmt: skip
def test_cs336_s_models_have_its_parameters(size, parameters):
    args = parse_args(["--model-size", size, "--device", "cpu"], "train.py")
    assert count_parameters(load_config(args.config)) == parameters


def test_flags_of_predecessors_are_understood_or_answered():
    assert translated(["c.json", "--context_length=8", "--batch-size", "2", "--measure-steps", "3",
                       "--pass-type", "forward_backward", "--nsys_start", "-1", "--nsys-end=-1"]) == [
        "c.json", "--seq-len", "8", "--bsz", "2", "--n-steps", "3", "--pass-type", "forward-backward",
    ]  # fmt: skip
    for flag, answer in (
        ("--reduce-freq", "--grad-acc-steps"), ("--ckpt-freq", "--save-every"),
        ("--no-sync", "docs/METRICS.md"), ("--local-batch-size", "use --bsz"),
        ("--micro_batch_size", "use --bsz"),
        ("--model-size", "small, medium, large"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=answer) as error:
            parse_args(["configs/gpt2-tiny.json", flag, "7"], "train.py")
        assert str(error.value).startswith(flag.replace("_", "-")) and "\n" not in str(error.value)


def test_a_run_is_one_file(tmp_path, monkeypatch):
    """YAML with a config and flags; a result.json is run again as it was; what is typed goes before."""
    monkeypatch.chdir(ROOT)
    file = tmp_path / "run.yaml"
    file.write_text(
        "script: train.py\nconfig: configs/gpt2-tiny.json\nbsz: 3\nseq-len: 16\nn_steps: 2\namp: off\n"
        "warmup_steps: 1\nno_tensorboard: true\npt_compile: false\nhparams: [bsz, lr]\n"
    )
    assert run_train("--from", file, "--output-dir", tmp_path / "a", "--lr", 0.01) == 0
    first = only_result(tmp_path / "a")
    assert (
        first["args"]["bsz"] == 3 and first["args"]["amp"] == "off" and first["args"]["lr"] == 0.01
    )
    assert first["args"]["hparams"] == ["bsz", "lr"]
    (result,) = (tmp_path / "a").glob("*/result.json")
    assert run_train(f"--from={result}", "--output-dir", tmp_path / "b", "--seed", 5) == 0
    again = only_result(tmp_path / "b")
    unlike = {k for k in first["args"] if first["args"][k] != again["args"][k]}
    assert unlike == {"output_dir", "seed", "no_tensorboard", "hparams"}
    assert again["model"]["hash"] == first["model"]["hash"] and again["args"]["lr"] == 0.01


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bsz: 2\n", "config: missing"),
        ("config: c.json\nbzs: 2\n", "bzs: no such flag; bsz?"),
        ("config: c.json\nscript: train_ddp.py\n", "is for train_ddp.py; start that"),
        ("- 1\n", "must hold names with values"),
        ("config: c.json\nbsz: 2\nbsz: 3\n", "bsz stands twice"),
        ("a: [\n", "is neither YAML nor JSON"),
        ("config: [1]\n", "config: must be a path"),
    ],
)
def test_a_wrong_file_of_a_run_is_one_line(content, message, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(content)
    assert run_train("--from", tmp_path / "run.yaml") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def proxy(bsz, gpus=4, script=Script.FSDP, **changes):
    args = parse_args([*PROXY, "--bsz", str(bsz)], script)
    return make_plan(args, script, gpus, **changes)


@pytest.mark.parametrize("gpus", [4, 8])
def test_the_central_command_leaves_a_tenth_of_80_gb(gpus):
    """As it is typed: the default batch, by the estimate."""
    plan = make_plan(parse_args(PROXY, Script.FSDP), Script.FSDP, gpus)
    assert plan.needs(plan.work) < 0.9 * 79.1 * 2**30


def test_the_estimate_warns_and_beyond_its_own_error_refuses():
    assert list(launch.check_fit(proxy(4).work, 79.1)) == []
    (note,) = launch.check_fit(proxy(7).work, 79.1)
    assert "the largest --bsz that fits is 6" in note
    with pytest.raises(DoesNotFit, match="--no-fit-check"):
        list(launch.check_fit(proxy(12).work, 79.1))


def test_a_run_that_cannot_fit_ends_with_4_before_it_starts(tmp_path, monkeypatch, capsys):
    """On a GPU, which is invented here: 0.1 GiB of it."""
    monkeypatch.setattr(launch, "platform_of", lambda device: "nvidia")
    monkeypatch.setattr(launch, "free_gib", lambda device, ranks: 0.1)
    argv = ["configs/gpt2-tiny.json", "--bsz", 2, "--seq-len", 16, "--n-steps", 1, "--warmup-steps", 0,
            "--amp", "off", "--no-tensorboard", "--output-dir", tmp_path]  # fmt: skip
    assert run_train(*argv) == 4
    error = capsys.readouterr().err
    assert "the GPU has 0.1" in error and error.count("\n") == 1 and not any(tmp_path.iterdir())
    assert run_train(*argv, "--no-fit-check") == 0


def test_bsz_auto_is_the_largest_that_leaves_a_tenth():
    plan = proxy("auto", memory_gib=79.1)
    bsz = plan.work.batch.micro_batch
    assert plan.args.bsz == bsz == 5 and "--bsz auto: 5" in plan.notes[0]
    one_more = proxy(bsz + 1)
    limit = 0.9 * 79.1 * 2**30
    assert plan.needs(plan.work) <= limit < one_more.needs(one_more.work)
    with pytest.raises(DoesNotFit, match="not even 1"):
        proxy("auto", memory_gib=10)
    args = parse_args([*PROXY, "--bsz", "auto", "--global-bsz", "24"], Script.FSDP)
    divides = make_plan(args, Script.FSDP, 4, memory_gib=79.1).work.batch
    assert divides.micro_batch == 3 and divides.global_batch == 24


def test_bsz_auto_runs_on_a_cpu_and_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "free_gib", lambda device, ranks: 0.05)
    argv = ["configs/gpt2-tiny.json", "--bsz", "auto", "--seq-len", 16, "--n-steps", 1, "--amp", "off",
            "--warmup-steps", 0, "--no-tensorboard", "--output-dir", tmp_path]  # fmt: skip
    assert run_train(*argv) == 0
    result = only_result(tmp_path)
    assert result["args"]["bsz"] == result["batch"]["micro_batch"] > 4
    assert any("--bsz auto" in note for note in result["notes"])
