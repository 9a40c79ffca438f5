"""estimate.py: memory by two ways, speed against published figures, and the command line."""

import collections
import contextlib
import dataclasses
import io
import json
import math
import re
import statistics

import pytest
import torch

import estimate
from benchmarks import estimate_vs_published as published
from benchmarks import fit_estimate
from benchmarks.estimate_vs_published import covering, grouped, held_rows, published_rows
from llm_train_bench.apply.precision import autocast
from llm_train_bench.apply.sharded import materialize
from llm_train_bench.base.errors import DoesNotFit
from llm_train_bench.base.hardware import accuracy_of, family_of, find_hardware
from llm_train_bench.estimate.predict import speed_factor
from llm_train_bench.estimate.trainers import find_trainer
from llm_train_bench.formulas import memory_model, speed_model
from llm_train_bench.formulas.collectives import collective_time, rank_weights, traffic
from llm_train_bench.formulas.flops import step_flops_per_token
from llm_train_bench.formulas.memory_model import block_activations, estimate_memory
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.formulas.speed_model import estimate_speed
from llm_train_bench.formulas.step_events import Clock, lay_out
from llm_train_bench.formulas.work import Trainer
from llm_train_bench.model.block_attention import InBlocks
from llm_train_bench.model.chunks import chunk_rows
from llm_train_bench.model.config import load_config, parse_config
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.run import launch
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Args, Script, defaults
from llm_train_bench.settings.plan import make_plan
from tests.dist_worker import Traffic
from tests.helpers import ROOT, plan_of, remark_texts, rows_of, trained, words
from tests.memory_trace import traced_memory
from tests.processes import forked

H100 = find_hardware("h100")
RECORD = ROOT / "tests/results/estimates.jsonl"
GPT2, LLAMA = "configs/gpt2-125m.json", "configs/llama-3.1-8b.json"


@pytest.fixture
def estimated(output_of):
    """What estimate.py --json says."""
    return lambda *argv, code=0: json.loads(output_of(estimate.main, *argv, "--json", code=code))


def work_of(text, script="train.py", gpus=1, **options):
    """The work of a command line of one text, whose first word is a config's name."""
    return plan_of(words(f"configs/{text}"), script, gpus, **options).work


@pytest.mark.parametrize("setting", rows_of("traced_settings.txt"))
def test_formula_and_trace_agree(setting):
    """Two independent counts of the peak, within 10 % where a setting has no other limit."""
    text, _, limit = setting.partition(" | ")
    script, world, seq_len, model, *flags = text.split()
    plan = plan_of([f"configs/{model}.json", *flags, "--seq-len", seq_len], script, int(world))
    for group in range(plan.work.parallelism.pp):
        formula = estimate_memory(plan.work, pp_rank=group).peak
        traced = traced_memory(plan.work, plan.optimizer, group)
        assert formula == pytest.approx(traced, rel=float(limit or 0.10))


@pytest.mark.parametrize(
    "flags", ["", "--sac-freq 1/1 --sac-policy op", "--pass-type forward --bsz 64"]
)
@pytest.mark.parametrize("model", ["gpt2-125m --amp off", "llama-3.2-1b"])
def test_formula_and_trace_agree_on_attention_in_blocks(model, flags):
    """Its probabilities are a large part of what is kept, also where only matmuls are, or nothing."""
    model, *more = model.split()
    argv = [f"configs/{model}.json", *more, *"--bsz 8 --seq-len 512".split(), *flags.split()]
    plan = plan_of([*argv, "--layers", "8"], platform="cpu")
    assert plan.work.attention.causal == "blocks"
    # The trace's RMS norm is a GPU's.
    formula = estimate_memory(plan.work, fused_norm=plan.work.config.rms_norm).peak
    assert formula == pytest.approx(traced_memory(plan.work, plan.optimizer), rel=0.06)


@pytest.mark.parametrize(
    ("flags", "numbers"), [("--amp off", 50257 * 768), ("--amp off --pad-vocab 8", 0), ("", 0)]
)
def test_the_aligned_copy_of_the_heads_weight_is_counted_on_a_gpu(flags, numbers):
    """Not where autocast makes a copy anyway."""
    work = work_of(f"gpt2-125m.json --bsz 1 {flags}")
    on_gpu, on_cpu = (estimate_memory(work, fused_norm=gpu).logits for gpu in (True, False))
    assert on_gpu - on_cpu == 4 * numbers


# Ranks of Mixtral 8x7B, or of Grok-1's sizes in its form; how many times the experts are gathered.
MIXTRAL = "configs/mixtral-8x7b.json"
GROK = dict(hidden_size=6144, intermediate_size=32768, num_attention_heads=48)
FEW_EXPERTS = [
    (64, "", {}, 1), (64, "--ep 8", {}, 1), (64, "--tp 2", {}, 1), (64, "--dp-replicate 4", {}, 1),
    (128, "", GROK, 1), (128, "--ep 2", GROK, 1),
    # Rows of 4,096 and 28,672 do not divide by 24, 48 or 6.
    (24, "", {}, 3), (96, "--ep 2", {}, 12), (6, "", {}, 1.5), (8, "", {}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "flags", "sizes", "times"), FEW_EXPERTS)
def test_fewer_experts_than_shards_are_gathered_once(ranks, flags, sizes, times):
    """Bytes by the formula are those that FSDP2 hands to collectives, on ranks of which one exists."""
    values = json.loads((ROOT / MIXTRAL).read_text()) | dict(num_hidden_layers=1) | sizes
    config = parse_config(values, "x.json")
    argv = [MIXTRAL, "--bsz", 1, "--seq-len", 128, *flags.split()]
    plan = plan_of(argv, "train_fsdp.py", ranks, config=config)
    work, traced = plan.work, Traffic(False)
    traced.looking = False
    with traced:
        traced_memory(work, plan.optimizer)
    moved = traffic(work)
    for kind in ("all_gather", "reduce_scatter"):
        assert moved[kind] == traced.bytes[kind] / 2, kind  # it traces two steps
    parts = rank_weights(config.weights.values(), config, work.parallelism, 0)
    padded = sum(part.padded for part in parts if part.weight.of_experts)
    assert padded == times * 3 * 8 * config.hidden_size * config.experts.size // work.parallelism.ep


def estimate_of(command: str) -> dict[str, float]:
    """Every number of an estimate but its accuracy, which follows from a table of measurements."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        estimate.main([*command.split(), "--json"])
    groups = json.loads(out.getvalue())
    groups |= {f"{k}.{name}": v for k in ("memory", "parts_s") for name, v in groups[k].items()}
    return {k: float(f"{v:.7g}") for k, v in groups.items() if isinstance(v, int | float) and v}


@pytest.mark.parametrize("line", RECORD.read_text().splitlines())
def test_an_estimate_is_the_one_on_record(line):
    """Shows a change of any formula; `python -m tests.test_estimate` records the new figures."""
    row = json.loads(line)
    assert estimate_of(row.pop("command")) == pytest.approx(row, rel=1e-6)


def test_peaks_are_those_of_pytorchs_own_allocator(monkeypatch):
    """Eager, compiled, recomputed, in FP8, sharded; the file says how they were read.

    The loss had chunks of one size then, for every head.
    """
    monkeypatch.setattr(memory_model, "chunk_rows", lambda n, v, *_: chunk_rows(n, v))
    errors = {}
    for line in rows_of("allocated_peaks.txt"):
        words, peak = line.split(" | ")
        script, ranks, model, *flags = words.split()
        plan = plan_of([f"configs/{model}.json", *flags], script, int(ranks))
        formula = estimate_memory(plan.work).peak
        errors[words] = formula / 2**30 / float(peak) - 1
        assert abs(errors[words]) < 0.06, words
    assert len(errors) == 63 and abs(statistics.median(errors.values())) < 0.01


def test_what_streams_keep_apart_is_needed_too():
    """On 4 ranks the allocator of allocated_peaks.txt emptied its cache with 23.4 GiB, not with 27.3."""
    estimate = memory("--bsz 1 --layers 8", shards=4)
    # The stand-in for the driver needed 0.6 GiB outside the allocator.
    outside = memory_model.CONTEXT_GIB + memory_model.COMMUNICATION_GIB - 0.6
    assert 23.4 < estimate.on_device(4) / 2**30 - outside < 27.3
    assert memory("--bsz 1 --layers 8", shards=0).apart == 0


@pytest.mark.parametrize(
    ("model", "changed", "flags"),
    [("gpt2-tiny", {}, ""), ("gpt2-tiny", {}, "--pt-compile"), ("llama-tiny", {}, ""),
     ("llama-tiny", {}, "--amp off"), ("llama-tiny", {}, "--pt-compile"),
     ("llama-tiny", {"qk_norm": True}, "--pt-compile"),
     ("gpt2-tiny", {}, "--amp off --attention blocks"), ("llama-tiny", {}, "--attention blocks"),
     ("llama-tiny", {"qk_norm": True}, "--pt-compile --attention blocks"),
     ("moonlight-16b-a3b", {}, "--amp off --attention blocks")],
)  # fmt: skip
def test_a_block_keeps_what_the_formula_says(model, changed, flags):
    """Tensors that autograd saves in one block, or if compiled those torch's partitioner keeps."""
    T, cpu, sizes = 24, torch.device("cpu"), {}
    shape = load_config(f"configs/{model}.json", layers=1)
    config = dataclasses.replace(shape, vocab_size=256, **changed)
    blocks = "blocks" in flags
    platform = "cpu" if blocks else "nvidia"
    work = work_of(f"{model}.json --bsz 2 --seq-len {T} {flags}", config=config, platform=platform)
    with torch.device("meta"):
        whole = Transformer(config, T)
    block = whole.blocks["0"]
    if work.compiled:
        torch._dynamo.reset()
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    materialize(whole, cpu, seed=0)

    def saved(tensor):
        # No size of a weight; probabilities of blocks lie in a row.
        if {T, 2 * T} & set(tensor.shape) or tensor.numel() == probabilities:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    probabilities = 2 * config.num_attention_heads * T * T
    low = torch.bfloat16 if work.amp == "bf16" else torch.float32
    x = torch.zeros(2, T, config.hidden_size, dtype=low, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t), autocast(work.amp, cpu):
        kind = config.layers[0].rope
        rope = None if kind is None else whole.rope_for(kind, slice(T), cpu)
        output = block(x, rope, InBlocks() if blocks else None)
    formula = block_activations(work, False, 0)
    exact = blocks and not (work.compiled or config.latent)
    assert sum(sizes.values()) == pytest.approx(formula, rel=1e-3 if exact else 0.02)
    output.sum().backward()


def memory(flags="", model="llama-3.1-8b", shards=8):
    text = f"{model}.json --bsz 2 --seq-len 4096 {flags}"
    return estimate_memory(work_of(text, "train_fsdp.py" if shards else "train.py", shards or 1))


def test_flops_of_adapters_are_those_of_published_figures():
    """FLOPs by our count are theirs within 8 %: adapters, and the masked half of attention."""
    rows = published_rows("lora")
    assert len(rows) >= 11 and not any(row["split"] == "lora" for row in published_rows())
    known = [row for row in rows if "tflops" in row]
    assert len(known) >= 4
    for row in known:
        rate = row["tokens_per_sec_per_gpu"]
        flops = step_flops_per_token(published.step_of(row)[0], True) * rate / 1e12
        assert 0 < flops / row["tflops"] - 1 < 0.08


def test_adapters_and_fp8_of_another_trainer_can_be_planned(estimated):
    """In a layout where our scripts have neither, as the published figure's."""
    row = next(row for row in published_rows("lora") if row["tokens_per_sec_per_gpu"] == 2643)
    work, gpu = published.step_of(row)
    flags = "--bsz 1 --seq-len 4096 --trainer megatron --use-fp8 --lora-rank 16"
    made = estimated(row["config"], "--gpu h100 --gpus 8", row["flags"], flags)
    assert made["tokens_per_sec_per_gpu"] == pytest.approx(published.predicted(row, work, gpu))
    # A rank of a pipeline has the adapters of its own layers.
    flags = "--gpus 8 --seq-len 4096 --bsz 1 --global-bsz 32 --trainer megatron --lora-rank 256"
    made = (estimated(row["config"], "--gpu b300", flags, f"--pp {pp}") for pp in (2, 8))
    two, eight = (content["memory"]["optimizer"] for content in made)
    assert two == pytest.approx(eight, rel=1e-3)


def test_accuracy_is_that_of_the_held_rows():
    """What estimate.py prints: four of five held errors lie in the range, and of a source left out
    too."""
    for low, kind in ((None, None), (False, "bf16"), (True, "FP8")):
        rows = [r for r in held_rows() if kind in (None, published.format_of(r))]
        for (family, experts), values in grouped(rows, published.range_group).items():
            name = next(r["gpu"] for r in rows if family_of(r["gpu"]) == family)
            accuracy = accuracy_of(name, experts == "experts", low)
            if len(values) < published.VALIDATED:
                assert accuracy is None
                continue
            assert accuracy["rows"] == len(values)
            assert accuracy["covers_80"] == pytest.approx(covering(values), abs=1e-3)
            assert sum(abs(v) <= accuracy["covers_80"] + 1e-3 for v in values) >= 0.8 * len(values)
    inside, number = published.coverage(held_rows())
    assert number >= 150 and 0.76 <= inside / number <= 0.88
    assert accuracy_of("V100 SXM 32GB", False) is None


def test_published_steps_are_met():
    """The page has their tables; and without its trainer's preset a row is estimated worse."""
    page, rows = published.PAGE.read_text(encoding="utf-8"), held_rows()
    numbers = lambda text: [float(x) for x in re.findall(r"\d+\.?\d*", text)]  # noqa: E731
    assert numbers(page) == pytest.approx(numbers(published.written(page, published.tables())))
    assert statistics.median(map(abs, published.errors(rows))) < 0.12
    dense = [r for r in rows if r["trainer"] == "megatron" and "--ep" not in r["flags"]]
    plain = [r | {"trainer": "nanogpt"} for r in dense]
    presets, none = (statistics.median(map(abs, published.errors(x))) for x in (dense, plain))
    assert presets < 0.1 < none


def test_a_fit_finds_the_levels_that_rows_follow():
    """Speeds made with a slower architecture and a faster trainer are met, as near as priors let them."""
    named, every = ("fms", "vectorlm", "torchtitan"), fit_estimate.fitting_steps()
    sources = collections.Counter(x.row["source"] for x in every)
    single = {bool(x.row.get("doubt")): x.weight for x in every if sources[x.row["source"]] == 1}
    assert single == {True: fit_estimate.DOUBT, False: 1.0}
    steps = [x for x in every if x.levels[0] == "all A100"]
    steps = [x for x in steps if x.row["trainer"] in named][::3]
    starts = {name: start for name, (start, *_) in fit_estimate.RANGES.items()}
    starts |= {name: 1.0 for step in steps for name in step.levels}
    made = []
    for step in steps:
        error = fit_estimate.error_of(step, starts | {"all A100": 0.8, "--trainer fms": 1.1})
        speed = step.row["tokens_per_sec_per_gpu"] * math.exp(error)
        made.append(dataclasses.replace(step, row=step.row | {"tokens_per_sec_per_gpu": speed}))
    found = fit_estimate.fit(made, starts, rounds=2)
    assert max(abs(fit_estimate.errors_of(made, starts))) > 0.1
    assert max(abs(fit_estimate.errors_of(made, found))) < 0.05
    fms, vectorlm = (
        found[f"--trainer {name}"] * found[f"--trainer {name} on A100"] for name in named[:2]
    )
    assert found["all A100"] < 0.95 and 1.02 < fms / vectorlm < 1.12


def test_a_row_says_how_its_gpu_differs():
    row = published_rows("fit")[0] | {"nic_gb_per_s": 3, "memory_tb_per_s": 1, "power_w": 250}
    _, gpu = published.step_of(row)
    assert (gpu.nic_gb_per_s, gpu.memory_tb_per_s, gpu.tdp_w) == (3, 1, 250)


@pytest.mark.parametrize("amp, kernel, loss", [
    ("bf16", "flash", 0.68), ("bf16", "cudnn", 0.59), ("bf16", "math", 0.8), ("off", "efficient", 1.0)
])  # fmt: skip
def test_few_keys_slow_attention_down_where_tensor_cores_compute(amp, kernel, loss):
    """The rate with 1,024 tokens a sample, over that with 8,192; plain attention computes all pairs."""
    rates = []
    for seq_len in (1024, 8192):
        work = work_of(f"llama-3.1-8b.json --amp {amp} --attention {kernel} --seq-len {seq_len}")
        forward, _ = speed_model._attention(work, 0, H100)
        rates.append(seq_len**2 / forward)
    assert rates[0] / rates[1] == pytest.approx(loss, abs=0.01)


def test_two_of_eight_meshed_gpus_use_one_of_their_seven_links():
    """A pair of MI300X, or of the four of a board, has its own link; an H100 has a switch."""
    board = dataclasses.replace(H100, per_node=4, peer_gb_per_s=150)
    mi300x = find_hardware("mi300x")
    for gpu, rates in ((mi300x, (51, 305)), (board, (120, 360)), (H100, (361, 361))):
        for n, rate in zip((2, gpu.per_node), rates, strict=True):
            seconds = collective_time("all_gather", 1e10, n, gpu.per_node, gpu)
            assert 10 * (n - 1) / n / seconds == pytest.approx(rate, rel=0.01)


def test_tensor_parallelism_hides_behind_its_own_matmuls(estimated):
    """An exchange longer than the matmul beside it shows, however long other matmuls are."""
    flags = f"{LLAMA} --gpu h100 --gpus 8 --tp 8 --bsz 4 --seq-len 8192 --pt-compile --trainer"
    shown, hidden = (
        estimated(flags, f"torchtitan {more}")["parts_s"]["tokens between ranks"]
        for more in ("", "hide=tp")
    )
    # Of qkv and out, whose matmuls are 0.4 and 0.3 of an exchange, more than half; of the MLP's none.
    assert 0.3 < hidden / shown < 0.5


def test_exchanges_beside_computation_cost_it_less_where_cards_are_slow():
    work = work_of("llama-3.1-8b.json --bsz 4 --seq-len 8192 --pt-compile", "train_fsdp.py", 64)
    lost, c = [], H100.constants
    for nic in (50, 5):
        parts = estimate_speed(work, dataclasses.replace(H100, nic_gb_per_s=nic)).parts
        computed = sum(parts[x] for x in ("matmuls", "attention", "memory-bound"))
        beside = parts["beside communication"] - c.beside_communication * computed
        lost.append(beside / parts["hidden communication"])
        rate = min(361, 8 * nic * c.network) * 1e9  # bytes a second on the bus
        assert lost[-1] == pytest.approx(c.beside_bytes * rate / H100.memory_rate, rel=0.2)
    assert lost[1] < 0.2 * lost[0]


def test_what_a_trainer_cannot_overlap_adds_up(estimated):
    flags = "configs/llama-3.1-70b.json --gpu mi355x --gpus 64 --bsz 2 --seq-len 4096 --pt-compile"
    hides, waits = (estimated(flags, f"--trainer maxtext overlaps={x}") for x in ("true", "false"))
    beside, none = (made["parts_s"]["beside communication"] for made in (hides, waits))
    longer = hides["parts_s"]["hidden communication"] - beside
    assert waits["step_s"] - hides["step_s"] == pytest.approx(longer, rel=0.1) and none == 0


def test_without_sequence_parallelism_each_tp_rank_norms_all_tokens(estimated):
    flags = f"{LLAMA} --gpu a100 --gpus 8 --tp 8 --bsz 1 --seq-len 4096 --pt-compile --trainer"
    shared, whole = (
        estimated(flags, f"megatron-2021 sequence_parallel={x}") for x in ("true", "false")
    )
    stream = 7 / 8 * 4096 * 4096 * 2  # bytes more of one tensor
    rate = find_hardware("a100").memory_rate * find_trainer("megatron-2021").level_on("A100")
    passed = 32 * 2 * 4 * 3 * stream / rate
    more = whole["parts_s"]["memory-bound"] - shared["parts_s"]["memory-bound"]
    assert more == pytest.approx(passed, rel=0.01)
    kept = whole["memory"]["activations"] - shared["memory"]["activations"]
    assert kept == pytest.approx((32 * 4 + 2) * stream, rel=0.02)


def test_bytes_of_biased_experts_of_unfused_softmax_and_of_fp32():
    """By hand, of a forward: what Megatron-LM's bias moves, scores, and numbers twice as long."""
    trainer = Trainer(layers="te")
    flags = "gpt-oss-20b.json --bsz 1 --seq-len 512 --pt-compile --route balanced"
    work = dataclasses.replace(work_of(flags), trainer=trainer)
    e = dataclasses.replace(work.config.experts, biases=False)
    plain = dataclasses.replace(work, config=dataclasses.replace(work.config, experts=e))
    biased, without = (speed_model.block_bytes(x, 0, 0.6) for x in (work, plain))
    assert biased - without == pytest.approx(64 / 3 * 512 * 4 * 2880)
    flags = "gpt2-125m.json --bsz 2 --seq-len 512 --attention"
    bare, eager, compiled = (
        speed_model.block_bytes(work_of(f"{flags} {x}"), 0, 0.6)
        for x in ("flash", "math", "math --pt-compile")
    )
    assert eager - bare == 2 * 12 * 12 * 512 * 2 * 512 and compiled < eager
    wide = dataclasses.replace(work_of(f"{flags} math"), trainer=Trainer(elementwise="fp32"))
    assert speed_model.block_bytes(wide, 0, 0.6) == 2 * eager


def test_a_trainer_s_level_is_of_all_rates_but_the_host_s():
    """Up to latencies; launches take as long, and what hides behind them is no time lost."""
    trainer = Trainer(layers="te")
    slower = Trainer(layers="te", levels=(("", 0.9), ("H100, H200", 0.8)))
    for flags, factor in (("llama-3.1-8b.json --bsz 4 --seq-len 8192", 1 / 0.8),
                          ("gpt2-125m.json --bsz 1 --seq-len 512", 1.0)):  # fmt: skip
        work = work_of(f"{flags} --pt-compile", "train_fsdp.py", 16)
        one, other = (
            estimate_speed(dataclasses.replace(work, trainer=x), H100) for x in (trainer, slower)
        )
        assert other.step_s / one.step_s == pytest.approx(factor, rel=0.03)
        hidden = other.parts["hidden communication"]
        assert sum(other.parts.values()) - hidden == pytest.approx(other.step_s)


def test_the_host_launches_a_recomputed_forward_too(estimated):
    """Small layers of Transformer Engine wait for it; CUDA graphs do not."""
    flags = "configs/gpt2-125m.json --gpu h100 --bsz 1 --seq-len 512 --trainer megatron-lm"
    choices = "", "--sac-freq 1/1", "graphs=part"
    once, again, graphs = (estimated(flags, x)["step_s"] for x in choices)
    assert again == pytest.approx(4 / 3 * once, rel=0.1) and graphs < 0.3 * once


def test_a_run_that_waits_for_the_host_can_be_calibrated():
    work = work_of("gpt2-125m.json --bsz 1")
    measured = 0.8 * estimate_speed(work, H100).step_s
    assert speed_factor(work, H100, measured) == pytest.approx(1.25, rel=0.01)


def test_verdicts_on_memory_are_right_in_nineteen_of_twenty():
    """Of rows and reports that had no part in choosing the margins."""
    held = [row for row in published_rows("hold") if not row.get("no_memory")]
    reports = json.loads((ROOT / "benchmarks/memory-reports.json").read_text(encoding="utf-8"))
    chosen = [r for r in reports["reports"] if r["split"] == "hold"]
    ran = published.verdicts(map(published.step_of, held))
    ran += published.verdicts(published.step_of(r) for r in chosen if not r["oom"])
    oom = published.verdicts(published.step_of(r) for r in chosen if r["oom"])
    assert ran["does not fit"] <= 0.05 * ran.total() and ran.total() >= 400
    assert oom["fits"] <= 0.05 * oom.total() and oom.total() >= 20
    assert oom["does not fit"] > 0.45 * oom.total() and ran["fits"] > 0.35 * ran.total()


def test_a_plan_s_best_is_what_the_estimate_says_of_it(output_of, estimated):
    """It fits with a tenth to spare, and none of the ten is faster."""
    base = f"{LLAMA} --seq-len 4096 --gpus 16"
    text = output_of(estimate.main, f"{base} --gpu h100,mi300x --plan")
    first, second = text.split("16 x MI300X")
    assert "16 x H100 SXM" in first and "the others: " in first and "tokens/s/GPU" in second
    rows = [line.split("|")[1:-1] for line in first.splitlines() if line.startswith("| train")]
    rates = [int(row[1].replace(",", "")) for row in rows]
    assert len(rows) == 10 and rates == sorted(rates, reverse=True)
    # Ten layouts: one with another --cp is none; and no cost of an unknown number of tokens.
    layouts = {re.sub(r"--(?!tp|ep|pp |dp)\S+( [\d/a-z]+)?", "", row[0]).strip() for row in rows}
    assert len(layouts) == 10
    assert "days" not in text and "US$" not in text
    exact = output_of(estimate.main, f"{base} --gpu h100 --plan --amp bf16")
    assert "--use-fp8" in first and "--use-fp8" not in exact
    assert all(float(row[2]) <= 0.9 * 79.1 for row in rows)
    script, *flags = rows[0][0].split()
    kind = {"train_ddp.py": "ddp", "train_fsdp.py": "fsdp", "train_pp.py": "pp"}[script]
    e = estimated(base, f"--gpu h100 --pt-compile --parallel {kind}", flags)
    assert e["tokens_per_sec_per_gpu"] == pytest.approx(rates[0], abs=1)


def changes_of(text):
    """The changes that would fit, each with its memory [GiB] and tokens/s."""
    line = r"^(?:would|may) fit: (.*): (\S+) GiB, (\S+) tokens/s per GPU"
    return {change: figures for change, *figures in re.findall(line, text, flags=re.M)}


def test_what_does_not_fit_ends_with_4(output_of):
    argv = "configs/llama-3.1-405b.json --gpu h100 --gpus 8 --plan"
    assert "nothing fits" in output_of(estimate.main, argv, code=4)
    argv = "configs/gpt2-760m.json --gpu rtx4090 --bsz 40"
    changes = changes_of(output_of(estimate.main, argv, code=4))
    assert 1 <= len(changes) <= 3 and all(float(need) <= 23.99 for need, _ in changes.values())
    # With all blocks recomputed already, --bsz 1 and --bsz 1 --sac-freq 1/1 are one change.
    argv = "configs/llama-3.2-1b.json --gpu h100 --bsz 16 --sac-freq 1/1 --limit memory=23"
    changes = changes_of(output_of(estimate.main, argv, code=4))
    assert len(changes) == len({need for need, _ in changes.values()}) >= 2


@pytest.mark.parametrize(
    ("argv", "now", "expected"),
    [("--bsz 1 --seq-len 8192", "--gpus 2", ["--gpus 16", "--gpus 8", "--sac-freq 1/1"]),
     ("--gpus 2 --trainer hf", "--bsz 4", ["--bsz 1 --sac-freq 1/1"])],
)  # fmt: skip
def test_a_change_that_would_fit_is_as_its_own_estimate(argv, now, expected, output_of, estimated):
    """By what another trainer does too."""
    argv = f"{LLAMA} --gpu h100 {argv}"
    changes = changes_of(output_of(estimate.main, argv, now, code=4))
    assert [*changes] == expected
    for change, (need, rate) in changes.items():
        replaced = now.split()[0] in change
        e = estimated(argv, "" if replaced else now, change)
        memory = e["memory"]["peak"] + e["memory_outside"]
        assert f"{memory / 2**30:,.1f} {e['tokens_per_sec_per_gpu']:,.0f}" == f"{need} {rate}"


def test_largest_that_fits_is_the_edge(estimated):
    base = ["configs/gpt2-1.5b.json", "--gpu", "A100 SXM 40GB", "--bsz"]
    edge = estimated([*base, 1])["largest_bsz"]
    assert edge > 1 and estimated([*base, edge])["verdict"] == "fits"
    assert estimated([*base, edge + 1])["verdict"] == "may not fit"
    assert not estimated([*base, 2 * edge], code=4)["fits"]


def test_measured_here_against_the_formula(tmp_path):
    """Of a run on this CPU, by the memory that its tensors held."""
    argv = words("configs/llama-tiny.json --bsz 4 --seq-len 512 --amp off")
    flags = "--device cpu --n-steps 1 --warmup-steps 2 --memory-snapshot"
    memory = trained(tmp_path, argv, flags)["memory"]
    e = estimate_memory(plan_of(argv, platform="cpu").work, fused_norm=False)
    for name in ("parameters", "gradients", "optimizer", "peak"):
        assert getattr(e, name) / 2**30 == pytest.approx(memory[f"{name}_gib"], rel=0.1), name


# What a group of like ranks does on one of its streams; seconds from the step's start.
Event = collections.namedtuple("Event", "group stream start_s end_s")


class Recorder(Clock):
    """Keeps the events."""

    def run(self, group, stream, seconds, after=0.0):
        end = super().run(group, stream, seconds, after)
        used = "compute" if stream in self.merged else stream
        vars(self).setdefault("events", []).append(Event(group, used, end - seconds, end))
        return end


def timeline(work, gpu) -> tuple[list[Event], float]:
    """All events of a step, and its seconds; an estimate lays out a few and repeats the last ones."""
    pieces = [speed_model.group_pieces(work, gpu, group)[0] for group in range(work.parallelism.pp)]
    merged = ("network", "send") if gpu.platform == "cpu" else ()
    clock, slowest = Recorder(merged), speed_model.slowest_node(work, gpu)
    seconds = lay_out(work, pieces, clock).seconds
    events = [e for e in clock.events if e.end_s > e.start_s]
    events = [e._replace(start_s=e.start_s * slowest, end_s=e.end_s * slowest) for e in events]
    return events, seconds * slowest


@pytest.mark.parametrize("setting", rows_of("step_settings.txt"))
def test_a_step_of_many_micro_batches_is_as_its_events(setting):
    """All events against a few that are repeated; no stream does two things at once. Its parts add
    up to the step."""
    script, gpus, model, flags = setting.split(maxsplit=3)
    seq_len = 4096 if model.startswith("llama") else 1024
    compiled = "" if model == "cs336-medium" else "--pt-compile"
    work = work_of(f"{model}.json --seq-len {seq_len} {compiled} {flags}", script, int(gpus))
    gpu = dataclasses.replace(H100, fitted=H100.fitted | {"beside_bytes": 0.0})  # it comes on top
    estimate = estimate_speed(work, gpu)
    parts = estimate.parts | {"hidden communication": 0.0}
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(estimate.step_s, rel=1e-6)
    assert compiled or parts["waiting for the host"] > 0.1 * estimate.step_s
    events, seconds = timeline(work, gpu)
    assert seconds == pytest.approx(estimate.step_s, rel=1e-3)
    assert max(e.end_s for e in events) == pytest.approx(seconds)
    free = collections.defaultdict(float)
    for e in events:
        assert e.start_s >= free[e.group, e.stream] - 1e-9 and e.end_s > e.start_s
        free[e.group, e.stream] = e.end_s
    # Forward and backward of each stage, or of each block and the head; and the optimizer.
    pipeline, groups = script == "train_pp.py", work.parallelism.pp
    passes = 2 * work.parallelism.stages if pipeline else 2 * work.config.num_hidden_layers + 1
    computed = sum(e.stream == "compute" for e in events)
    assert computed == passes * work.batch.grad_acc_steps + groups


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_nothing_hides_an_exchange_on_a_cpu(script):
    """Measured so with gloo (docs/LAB.md); formulas and events agree."""
    cpu = dataclasses.replace(H100, name="Some CPU, 1 thread", ring_gb_per_s=20)
    work = work_of("llama-tiny.json --bsz 4 --seq-len 128", script, 2)
    estimate = estimate_speed(work, cpu)
    assert estimate.parts["exposed communication"] > 0 == estimate.parts["hidden communication"]
    if work.fsdp:  # DDP's one bucket is full at the end
        assert estimate_speed(work, H100).parts["hidden communication"] > 0
    assert timeline(work, cpu)[1] == pytest.approx(estimate.step_s, rel=0.03)


def test_what_other_trainers_keep(estimated):
    """Bytes a parameter by hand: 4 + 4 + 8; in bf16 2 + 2 + 4, with copies for the optimizer 2 + 2 +
    12."""

    def memory(flags=""):
        argv = "configs/gpt2-1.5b.json --gpu h200 --bsz 4 --seq-len 1024"
        m = estimated(argv, flags)["memory"]
        return m, m["parameters"] + m["gradients"] + m["optimizer"]

    n = count_parameters(load_config("configs/gpt2-1.5b.json"))
    for flags, size in {
        "": 16,
        "--trainer torchtune": 8,
        "--trainer megatron": 16,
        "--gpus 8 --trainer megatron": 2 + 2 + 12 / 8,
        "--gpus 8 --parallel ddp --trainer megatron-lm": 2 + 4 + 12 / 8,
        "--gpus 8 --trainer megatron-2021 zero=2": 2 + 16 / 8,
    }.items():
        assert memory(flags)[1] == pytest.approx(size * n, rel=0.001), flags
    offloaded, on_device = memory("--gpus 8 --cpu-offload")
    assert on_device == 0 and offloaded["host"] == pytest.approx(16 * n / 8, rel=0.001)
    whole, chunked = memory("--trainer nanogpt")[0]["logits"], memory()[0]["logits"]
    logits = 4 * 1024 * 50257
    assert whole > 10 * logits > chunked
    op, every_other = "--sac-freq 1/1 --sac-policy op", "--trainer torchtitan"
    ours, theirs = (memory(f"{op} {flags}")[0]["activations"] for flags in ("", every_other))
    assert 0.5 < theirs / ours < 0.8


def test_stages_of_megatron_count_embedding_and_loss(estimated):
    """126 blocks and these two are 128 stages; ours are of blocks alone."""
    flags = ("configs/llama-3.1-405b.json --gpu h100 --gpus 1024 --tp 8 --pp 16 --pp-virtual 8 "
             "--bsz 1 --global-bsz 256 --seq-len 8192 --sac-freq 1/1 --use-fp8")  # fmt: skip
    whole = estimated(flags, "--trainer megatron")
    uneven = estimated(flags.replace("--pp-virtual 8", "--pp-virtual 7"), "--trainer megatron")
    assert whole["step_s"] < 0.95 * uneven["step_s"]


def test_a_learned_router_waits_for_the_fullest_rank(estimated, output_of):
    """As long as `--imbalance` says: tokens of a step that are balanced take the shortest."""
    flags = (
        "configs/qwen3-30b-a3b.json --gpu h200 --gpus 8 --ep 8 --bsz 1 --seq-len 4096 --pt-compile"
    )
    step = lambda more: estimated(flags, more)["step_s"]  # noqa: E731
    balanced, one, usual, twice = map(
        step, ("--route balanced", "--imbalance 1", "", "--imbalance 2")
    )
    assert one < step("--imbalance 1.34") == usual < twice < 2 * one
    assert balanced <= one  # and a token goes to fewer ranks
    assert "1.34 (assumed; --imbalance changes it)" in output_of(estimate.main, flags)
    # One rank with all experts waits for nobody.
    alone = flags.replace("--ep 8 ", "")
    assert "fullest ep rank" not in output_of(estimate.main, alone)


def test_a_power_limit_bounds_a_step(estimated):
    """Our own run on a fourth H200, which chose no constant: 0.9132 s at 700 W."""
    flags = f"{LLAMA} --layers 16 --gpu h200 --bsz 5 --seq-len 4096 --pt-compile"
    full, less = estimated(flags), estimated(flags, "--limit power=500")
    assert full["step_s"] == pytest.approx(0.9132, rel=0.05)
    assert full["watts"] == pytest.approx(700, rel=0.05) and less["watts"] == 500
    joules = full["step_s"] * (full["watts"] - 150)  # beyond those of waiting
    assert less["step_s"] == pytest.approx(joules / 350) and less["parts_s"]["power limit"] > 0
    parts = {k: v for k, v in less["parts_s"].items() if k != "hidden communication"}
    assert sum(parts.values()) == pytest.approx(less["step_s"])
    small = estimated("configs/gpt2-125m.json --gpu h200 --bsz 1")  # it waits for the host
    assert small["watts"] < 400 and small["parts_s"]["power limit"] == 0


def test_one_gpu_is_estimated_for_the_script_that_is_asked_for(estimated):
    """DDP's buckets hold gradients at the peak: measured on an H200, docs/ESTIMATES.md."""
    argv = "configs/gpt2-1.5b.json --gpu h200 --bsz 32 --seq-len 1024 --use-fp8 --fp8-backend te"
    alone, ddp = (estimated(argv, more) for more in ("", "--parallel ddp"))
    assert (alone["script"], ddp["script"]) == ("train.py", "train_ddp.py")
    assert ddp["memory"]["peak"] == pytest.approx(97.28 * 2**30, rel=0.01)
    assert alone["memory"]["peak"] == ddp["memory"]["peak"] - ddp["memory"]["gradients"]


def test_a_run_s_file_is_estimated_in_every_form(tmp_path, output_of):
    """YAML and JSON with a script and ranks, and a result.json: as the flags themselves."""

    def table(*argv, code=0):
        return re.sub(r" +", " ", output_of(estimate.main, *argv, "--gpu h100", code=code))

    typed = table(LLAMA, "--bsz 2 --sac-freq 1/1 --gpus 16 --parallel ddp", code=4)
    given = {"config": LLAMA, "bsz": 2, "sac-freq": "1/1", "script": "train_ddp.py", "nproc": 16}
    (tmp_path / "r.json").write_text(json.dumps(given))
    (tmp_path / "r.yaml").write_text("".join(f"{k}: {v}\n" for k, v in given.items()))
    args = defaults(Args) | {"config": LLAMA, "bsz": 2, "sac_freq": "1/1"}
    result = {"schema_version": 3, "args": args, "entrypoint": "train_ddp.py"}
    result |= {"device": {"count": 16}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    for name in ("r.json", "r.yaml", "result.json"):
        assert table("--from", tmp_path / name, code=4) == typed, name
    # Flags beside it override the file's.
    shown = table("--from", tmp_path / "r.yaml", "--gpus 8 --bsz 1", code=4)
    assert "| on | 8 x H100 SXM, train_ddp.py, 8 samples a step |" in shown
    (tmp_path / "r.yaml").write_text("config: configs/gpt2-tiny.json\nnproc: null\n")
    table("--from", tmp_path / "r.yaml")


# --- what train.py asks of the estimate ---------------------------------------------------------------

PROXY = "configs/llama-70b-proxy.json --sac-freq 1/4"
RUN = "configs/gpt2-tiny.json --seq-len 16 --n-steps 1 --warmup-steps 0 --amp off --no-tensorboard"


def proxy(flags, **changes):
    return make_plan(parse_args(words(PROXY, flags), Script.FSDP), Script.FSDP, 4, **changes)


def test_the_estimate_warns_of_too_little_memory():
    assert proxy("--bsz 6", memory_gib=79.1).notes == ()
    assert proxy("--bsz 7", memory_gib=79.1, platform="cpu").notes == ()
    (note,) = proxy("--bsz 7", memory_gib=79.1).notes
    assert "memory may not suffice: this needs an estimated 8" in note


def test_a_run_that_may_not_fit_starts_with_a_warning(tmp_path, monkeypatch):
    """On a GPU, which is invented here: 0.1 GiB of it."""
    monkeypatch.setattr(launch, "platform_of", lambda device: "nvidia")
    monkeypatch.setattr(launch, "share_of_memory_gib", lambda device, ranks: 0.1)
    run = trained(tmp_path, RUN, "--bsz 2 --warmup-seconds 0")
    (note,) = (text for text in remark_texts(run) if "memory may not suffice" in text)
    assert "the GPU has 0.1; estimate.py suggests" in note


@pytest.mark.parametrize("script", ["train.py", "train_ddp.py"])
def test_a_batch_that_cannot_fit_is_refused_at_once(script, tmp_path):
    argv = words(RUN, "--bsz 2147483648 --device cpu --output-dir", tmp_path)
    error = forked(script, argv, code=4).stderr
    assert "token ids of a micro batch need" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_bsz_auto_is_the_largest_that_leaves_a_tenth():
    plan = proxy("--bsz auto", memory_gib=79.1)
    bsz = plan.work.batch.micro_batch
    assert plan.args.bsz == bsz == 5 and "--bsz auto: 5" in plan.notes[0]
    one_more = proxy(f"--bsz {bsz + 1}")
    limit = 0.9 * 79.1 * 2**30
    assert plan.needs(plan.work) <= limit < one_more.needs(one_more.work)
    for flags in ("--bsz auto", "--bsz auto --global-bsz 24"):
        with pytest.raises(DoesNotFit, match="not even 1"):
            proxy(flags, memory_gib=10)
    divides = proxy("--bsz auto --global-bsz 24", memory_gib=79.1).work.batch
    assert divides.micro_batch == 3 and divides.global_batch == 24


def test_bsz_auto_runs_on_a_cpu_and_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "share_of_memory_gib", lambda device, ranks: 0.05)
    result = trained(tmp_path, RUN, "--bsz auto")
    assert result["args"]["bsz"] == result["batch"]["micro_batch"] > 4
    assert any("--bsz auto" in note for note in remark_texts(result))


if __name__ == "__main__":
    rows = [json.loads(line)["command"] for line in RECORD.read_text().splitlines()]
    lines = (json.dumps({"command": row} | estimate_of(row)) for row in rows)
    RECORD.write_text("".join(f"{line}\n" for line in lines))
