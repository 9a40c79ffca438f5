"""Low-rank adapters against peft: loss, every gradient, the files; counts, layouts, refusals."""

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from llm_train_bench.apply.sharded import materialize
from llm_train_bench.formulas.flops import nemo_lora_flops_per_token, step_flops_per_token
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.model.experts import Stacked
from llm_train_bench.model.hf import check_pretrained, hf_tensors_of, save_pretrained
from llm_train_bench.model.lora import apply_lora
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.model.weights import Lora, adapters
from tests.helpers import FAMILIES, config, plan_of, remark_texts, trained, words
from tests.test_parity import reference, some_tokens

T, CPU = 24, torch.device("cpu")
ADAPTED = "llama qwen2 qwen3 mistral phi3 gemma3_text olmo3 deepseek_v3 glm4_moe gpt_oss".split()


def adapted(family, targets, weights=None, rank=4, alpha=6.0):
    """Our model with adapters, whose second halves are no longer zero."""
    shape = config(family)
    lora = Lora(rank, alpha, 4, tuple(adapters(shape, frozenset(targets.split(",")), rank)))
    with torch.device("meta"):
        model = Transformer(shape, T)
    apply_lora(model, lora)
    materialize(model, CPU, 0, weights)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("targets", ["all", "q_proj,v_proj"])
@pytest.mark.parametrize("family", ADAPTED)
def test_loss_and_gradients_are_those_of_peft(family, targets, tmp_path):
    """peft opens what we write; transformers' model with it has our loss and our gradients."""
    if family in ("phi3", "deepseek_v3") and targets != "all":
        targets = {"phi3": "qkv_proj", "deepseek_v3": "q_b_proj,kv_a_proj_with_mqa"}[family]
    theirs = reference(FAMILIES[family])
    theirs.save_pretrained(tmp_path / "base")
    model = adapted(family, targets, check_pretrained(config(family), tmp_path / "base"))
    save_pretrained(model, tmp_path / "adapters")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True)
    tokens = some_tokens(3, T + 1)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    logits = theirs(tokens[:, :-1]).logits
    their_loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-5)
    loss.backward()
    their_loss.backward()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(n.endswith(("lora_a", "lora_b")) for n in trained)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(parameter.grad)
        assert parameter.requires_grad or parameter.grad is None
    named = [(name.replace(".default", ""), p) for name, p in theirs.named_parameters()]
    found = {name: p.grad for name, p in named if p.requires_grad}
    torch.testing.assert_close(dict(hf_tensors_of(model, True)), found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("targets", ["all", "o_proj"])
def test_flops_are_those_that_torch_counts(family, targets, monkeypatch):
    one = lambda self, rows, counts: F.linear(rows, self.weight[0])  # noqa: E731
    monkeypatch.setattr(Stacked, "forward", one)
    length = 6  # below every window
    flags = words("x.json --seq-len", length, "--lora-rank 4 --lora-targets", targets)
    shape = config(family)
    work = plan_of(flags, config=shape).work
    with torch.device("meta"):
        model = Transformer(shape, length)
        apply_lora(model, work.lora)
        ids = torch.zeros(2, length, dtype=torch.int64)
        model.float()
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert numbers == work.lora.numbers()
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    assert counter.get_total_flops() / ids.numel() == step_flops_per_token(work, causal=False)
    share = numbers / count_parameters(shape)
    full = plan_of(words("x.json --seq-len", length), config=shape).work
    expected = step_flops_per_token(full, True) * (2 + share) / 3
    assert nemo_lora_flops_per_token(work) == pytest.approx(expected)


RUN = "--device cpu --seq-len 24 --bsz 2 --n-steps 3 --warmup-steps 1 --lora-rank 4 --export "
RUN += "--lr 1e-2 --lr-warmup-steps 0"


@pytest.mark.parametrize("flags", ["off --sac-freq 1/1", "bf16"])
def test_a_run_trains_adapters_alone_and_exports_them(flags, tmp_path):
    run = trained(tmp_path / "runs", "tests/configs/llama.json", RUN, "--amp", flags)
    m, (note,) = run["metrics"], [n for n in remark_texts(run) if n.startswith("LoRA")]
    base = "bf16" if flags == "bf16" else "fp32"
    assert f"trained in fp32, all others frozen in {base}" in note
    assert m["final_loss"] < m["first_loss"] + 0.2 and m["flops_per_token_nemo"]
    (export,) = (tmp_path / "runs").glob("*/export")
    tensors = load_file(export / "adapter_model.safetensors")
    assert any(t.abs().max() > 0 for n, t in tensors.items() if "lora_B" in n)
    theirs = peft.PeftModel.from_pretrained(reference(FAMILIES["llama"]), export)
    assert sum("lora_A" in n for n, _ in theirs.named_parameters()) == len(tensors) // 2
