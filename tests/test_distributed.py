"""train_ddp.py and train_fsdp.py on gloo: the losses of train.py, the promised traffic and memory."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llm_train_bench.base.token_files import write_tokens
from llm_train_bench.formulas.collectives import traffic
from llm_train_bench.model.config import load_config
from llm_train_bench.model.hf import save_pretrained
from tests.dist_worker import Job, check_shards, run_jobs
from tests.faults import steps_of
from tests.helpers import FAMILIES, ROOT, built, facts_of, plan_of, result_of, trained

STEPS, WARMUP = 4, 2
PARAMETERS = 171_456
BASE = [  # small: many CPUs have no fast bf16; and the step that --no-observe leaves out would be counted
    "tests/configs/llama-small.json",
    *f"--seq-len 32 --device cpu --amp off --n-steps {STEPS - WARMUP} --warmup-steps {WARMUP} --lr 2e-3"
    " --lr-warmup-steps 4 --grad-clip 0.5 --no-tensorboard --peak-tflops 1 --usd-per-hour 3.6"
    " --no-observe".split(),
]
SGD = "--optimizer sgd --lr 0.02"
DROPOUT = FAMILIES["gpt2"] | dict(n_layer=2, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
ROWS = (ROOT / "tests/distributed_cases.txt").read_text()
CASES = [row.split()[0] for row in ROWS.split("# Other")[0].splitlines()[1:]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All cases; the directory of their results."""
    out = tmp_path_factory.mktemp("dist")
    write_tokens(out / "val.bin", [np.random.default_rng(0).integers(0, 256, 1024)], 256)
    # Weights that no seed of a run would make.
    save_pretrained(built(load_config(ROOT / BASE[0]), seed=77), out / "weights")
    (out / "dropout.json").write_text(json.dumps(DROPOUT))
    jobs = []
    for row in (row for row in ROWS.splitlines() if row[0] != "#"):
        name, world, script, *flags = row.replace("OUT", str(out)).split()
        model = out / "dropout.json" if name == "dropout" else BASE[0]
        argv = [model, *BASE[1:], "--bsz", 16 // int(world), *flags]
        jobs.append(Job(name, script, argv, int(world)))
    run_jobs(sorted(jobs, key=lambda job: job.ranks), out, check=check_shards)
    return out


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """train.py on the same data; the losses everything is compared with."""
    return run_single(tmp_path_factory.mktemp("single"))


def run_single(out, *flags):
    trained(out, BASE, "--bsz 16 --run-name one", list(flags))
    return steps_of(out / "one")


def test_another_layout_goes_on_with_the_same_training(runs, single, tmp_path):
    """Saved by FSDP on 2; resumed at step 2 by DDP, by HSDP on 2 x 2 and by one device."""
    names = "save-fsdp2 resume-ddp2 save-zero1 resume-hsdp2x2".split()
    ways = {name: steps_of(runs / name) for name in names}
    ways["one"] = run_single(tmp_path, "--resume", runs / "save-fsdp2/checkpoints/step-00000002")
    for name, steps in ways.items():
        expected = single if name == "save-fsdp2" else single[2:]
        assert [step["step"] for step in steps] == [step["step"] for step in expected]
        losses = [step["loss"] for step in steps]
        assert losses == pytest.approx([step["loss"] for step in expected], abs=1e-5), name


def test_every_script_starts_from_given_weights(runs, tmp_path):
    flags = ["--n-steps", 1, "--warmup-steps", 1, "--init-from", runs / "weights"]
    expected = [step["loss"] for step in run_single(tmp_path, *flags)]
    assert abs(expected[0] - steps_of(runs / "ddp2")[0]["loss"]) > 1e-4
    for name in ("weights-ddp", "weights-fsdp"):
        assert [s["loss"] for s in steps_of(runs / name)] == pytest.approx(expected, abs=1e-5)


def test_dropout_draws_anew_for_every_stage_and_micro_batch(runs):
    """No two draws are the same, apart from those of the block that recomputes."""
    ranks = [Counter(r) for r in facts_of(runs / "dropout")["dropout"]]
    assert len(set().union(*ranks)) == sum(map(len, ranks))
    # Two steps of four micro batches. The first stage has the embedding's dropout and a block's two,
    # the last stage a block's two, which --sac-freq 1/2 draws again.
    counts = [(len(states), set(states.values())) for states in ranks]
    assert counts == 2 * [(2 * 4 * 3, {1})] + 2 * [(2 * 4 * 2, {2})]


def test_one_block_is_gathered_ahead(runs):
    """Before the first attention the root, the first block and the next one are gathered."""
    calls = [facts_of(runs / name)["calls"] for name in ("ddp2", "fsdp2", "fsdp2-keep")]
    assert [c.get("gathers before attention") for c in calls] == [0, 3, 3]


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_device(name, runs, single, tmp_path):
    steps = steps_of(runs / name)
    if "sgd" in name:
        single = run_single(tmp_path, *SGD.split())
    assert len(steps) == len(single) == STEPS
    limit = 5e-2 if "fp8" in name else 2e-2 if "bf16" in name else 1e-5
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(steps, single, strict=True))
    assert worst <= limit
    assert all(s["tokens"] == 512 for s in steps)
    # Clipping was active, on the norm of the whole gradient.
    norms = [(a["grad_norm"], b["grad_norm"]) for a, b in zip(steps, single, strict=True)]
    assert max(b for _, b in norms) > 0.5
    assert all(a == pytest.approx(b, rel=max(1e-4, limit * 8)) for a, b in norms)


FORWARD = ["forward-ddp", "forward-fsdp", "forward-never"]


@pytest.mark.parametrize("name", [*CASES, *FORWARD])
def test_traffic_is_what_the_collectives_were_handed(name, runs):
    moved, metrics = facts_of(runs / name)["traffic"][0], result_of(runs / name)["metrics"]
    kinds = {"all_gather", "reduce_scatter", "all_reduce"}
    if "fp8-all-gather" in name:  # the scales of weights, which are not counted
        kinds.remove("all_reduce")
    for kind in kinds:
        assert metrics[f"{kind}_bytes"] == moved.get(kind, 0) / STEPS, kind
    assert any(moved.values()) == (name != "forward-ddp")
    assert name in FORWARD or sum(moved.values()) > STEPS * PARAMETERS


def test_fp8_all_gather_moves_half_the_weights_bytes_and_learns_the_same(runs):
    plain, gathered = runs / "fsdp2-fp8", runs / "fsdp2-fp8-all-gather"
    for a, b in zip(steps_of(plain), steps_of(gathered), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)
    more, less = (result_of(run)["metrics"]["all_gather_bytes"] for run in (plain, gathered))
    fp8 = result_of(gathered)["fp8"]
    assert fp8["all_gather"] and more - less == 2 * fp8["n_parameters"]


def test_per_rank_times_and_memory(runs):
    r = result_of(runs / "fsdp4")
    m = r["metrics"]
    assert [rank["rank"] for rank in r["ranks"]] == [0, 1, 2, 3]
    assert r["device"]["count"] == r["batch"]["data_parallel_size"] == 4
    # Fast ranks wait for slow ones wherever weights are gathered: forward times say nothing.
    assert m["slowest_rank"] is m["rank_imbalance"] is None
    slowest = max(rank["step_time_mean_s"] for rank in r["ranks"])
    assert m["step_time_mean_s"] >= slowest * 0.999
    assert m["tokens_per_sec_per_gpu"] == pytest.approx(m["tokens_per_sec"] / 4)
    assert m["mfu"] == pytest.approx(m["tokens_per_sec"] / 4 * m["flops_per_token_palm"] / 1e12)
    assert m["model_tflops_per_gpu"] == pytest.approx(m["mfu"])  # of one TFLOP/s
    # The window is that of the slowest rank; 3.6 dollars an hour for each of four.
    assert m["window_s"] == pytest.approx(slowest * (STEPS - WARMUP))
    assert m["usd_per_million_tokens"] == pytest.approx(4e-3 / m["tokens_per_sec"] * 1e6)


def test_the_model_exists_whole_nowhere(runs):
    """While it is made, a rank holds its shard and no more than two parameters (an MLP's are largest)."""
    for name, shards in (("fsdp2", 2), ("fsdp4", 4), ("hsdp2x2", 2)):
        shard, largest = 4 * PARAMETERS / shards, 4 * 2 * 176 * 64
        assert shard <= facts_of(runs / name)["built"] < shard + 2.1 * largest


def test_gradients_are_reduced_by_buckets(runs):
    """Besides the loss of a step: one all-reduce for all parameters, or one a bucket."""
    calls = {
        name: facts_of(runs / name)["calls"]["all_reduce"] / STEPS
        for name in ("ddp2", "ddp2-zero1-sgd", "ddp2-small-buckets")
    }
    assert calls.pop("ddp2-small-buckets") >= 3
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("world", [2, 4])
def test_shards_are_what_they_should_be(world, runs):
    checks = result_of(runs, f"checks{world}.json")
    assert checks["skipped"] == [True] * world  # an fp16 step that overflows on one of them
    assert checks["timeouts"] == [[7.0] * (2 + 1 + 6)] * world
    assert max(checks["embedding"]) < 0.02  # gradients are summed in full precision


def test_weights_are_exported_in_full_after_a_validation_in_bf16(runs):
    """The forward without a backward leaves gathered, low-precision weights behind."""
    directory = runs / "export"
    assert 3 < result_of(directory)["metrics"]["val_loss"] < 8
    tensors = load_file(directory / "export/model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        assert not torch.equal(tensors[name], tensors[name].bfloat16().float())


def test_one_rank_of_ddp_moves_nothing_and_offloading_needs_a_gpu():
    assert traffic(plan_of([ROOT / BASE[0]], "train_ddp.py", 1).work) == {}
    argv = [ROOT / BASE[0], "--cpu-offload"]  # is refused on a CPU alone
    assert plan_of(argv, "train_fsdp.py", 2).work.parallelism.shards == 2
