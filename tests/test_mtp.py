"""Multi-token prediction: modules that learn to predict the tokens after the next one."""

import contextlib
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from llm_train_bench.compare.shareable import shareable
from llm_train_bench.formulas.parameters import count_parameters, parameter_shapes
from llm_train_bench.model.config import ConfigError, parse_config
from llm_train_bench.model.hf import check_pretrained, save_pretrained
from llm_train_bench.model.layout import Documents
from llm_train_bench.results.result_files import read_result
from tests.helpers import FAMILIES, built, plan_of, remark_texts, trained, words, write_config
from tests.test_parity import T, copied, gradients_of, reference, some_tokens

DEPTH = 2
DEEPSEEK = FAMILIES["deepseek_v3"] | dict(num_nextn_predict_layers=DEPTH)
GLM = FAMILIES["glm4_moe"] | dict(num_nextn_predict_layers=DEPTH)
QWEN = FAMILIES["qwen3_next"] | dict(mtp_num_hidden_layers=1)
QWEN35 = FAMILIES["qwen3_5_text"] | dict(mtp_num_hidden_layers=1)
ALL = {values["model_type"]: values for values in (DEEPSEEK, GLM, QWEN, QWEN35)}


def pair_of(values: dict, directory):
    """(our model with its modules, their model, their modules), all weights the same and random."""
    theirs, plain = reference(values), parse_config(values, "x.json")
    modules = MtpModel(theirs, DEPTH)
    for parameter in modules.layers.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for name, buffer in modules.layers.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    copied(theirs, plain, directory)
    tensors = load_file(directory / "model.safetensors")
    for name, value in modules.layers.state_dict().items():
        for part, whole in in_files(plain, name, value):
            tensors[part] = whole.clone()
    # Published files repeat what a module shares with the model.
    first = f"model.layers.{plain.num_hidden_layers}."
    tensors[f"{first}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{first}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = plain.with_mtp(float(DEPTH))  # so that the mean times it is the sum
    return built(config, 0, T, weights=check_pretrained(config, directory)), theirs, modules


def in_files(config, name: str, value: torch.Tensor):
    """A tensor of transformers' module by its names in published files."""
    layer, _, name = name.partition(".")
    prefix = f"model.layers.{config.num_hidden_layers + int(layer)}"
    name = name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
    if ".experts.gate_up_proj" in name:
        for i, both in enumerate(value):
            for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                yield f"{prefix}.mlp.experts.{i}.{part}_proj.weight", half
    elif ".experts.down_proj" in name:
        for i, one in enumerate(value):
            yield f"{prefix}.mlp.experts.{i}.down_proj.weight", one
    else:
        yield f"{prefix}.{name}", value


def their_losses(theirs, modules, tokens):
    """The loss of the next token, and the summed ones of the modules over as many labels."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    out = theirs.model(inputs)
    loss = F.cross_entropy(theirs.lm_head(out.last_hidden_state).flatten(0, 1), labels.flatten())
    hidden, further = out.last_hidden_state, torch.zeros(())
    for i in range(DEPTH):
        ahead = F.pad(labels[:, i:], (0, i))  # what comes after the sample takes part in no label
        positions = torch.arange(i + 1, T + i + 1)[None]
        hidden = modules.forward_layer(i, hidden, positions, None, input_ids=ahead)
        logits = modules._project_to_logits(hidden)[:, : T - 1 - i]
        wanted = labels[:, i + 1 :].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum")
        further = further + losses / labels.numel()
    return loss, further


@pytest.mark.parametrize("values", [DEEPSEEK, GLM], ids=["deepseek_v3", "glm4_moe"])
def test_losses_and_gradients_are_those_of_transformers(values, tmp_path):
    """The reported loss is the next token's; the gradient is of the unscaled sum of all."""
    ours, theirs, modules = pair_of(values, tmp_path)
    tokens = some_tokens(3, T + 1)
    loss = ours(tokens[:, :-1], tokens[:, 1:])
    expected, further = their_losses(theirs, modules, tokens)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    assert further > 3
    loss.backward()
    (expected + further).backward()
    wanted = dict(theirs.named_parameters())
    wanted = {name: p.grad for name, p in wanted.items() if ".experts." not in name}
    for name, p in modules.layers.named_parameters():
        wanted |= dict(in_files(ours.config, name, p.grad))
    grads = gradients_of(ours, theirs)[0]
    same = wanted.keys() & grads.keys()
    assert wanted.keys() == same and len(same) > 120
    torch.testing.assert_close({n: grads[n] for n in same}, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_parameters_and_files(values, tmp_path):
    """Counted by the tensors of the model, and kept by its file."""
    plain = parse_config(values, "x.json")
    config = plain.with_mtp(0.3)
    model = built(config)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if "correction" not in n}
    assert shapes == parameter_shapes(config)
    assert count_parameters(config) > count_parameters(plain)
    assert config.hash != plain.hash and plain.with_mtp(0.3).with_mtp(0.3) == config
    save_pretrained(model, tmp_path)
    again = built(config, 1, weights=check_pretrained(config, tmp_path))
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    check_pretrained(plain, tmp_path)  # the modules are left out


def test_a_file_with_other_tensors_in_a_module_is_refused(tmp_path):
    """Not with copies of what the model shares with its modules."""
    config = parse_config(DEEPSEEK, "x.json").with_mtp(0.3)
    save_pretrained(built(config), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last = config.num_hidden_layers
    head, own = f"model.layers.{last}.shared_head.head.weight", tensors["lm_head.weight"]
    for value, message in ((own, None), (own + 1, "is not lm_head"), (own[:3], "is not lm_head")):
        save_file(tensors | {head: value.clone()}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
            check_pretrained(config, tmp_path)
    fewer = parse_config(DEEPSEEK | dict(num_nextn_predict_layers=1), "x.json").with_mtp(0.3)
    with pytest.raises(ConfigError, match=r"num_nextn_predict_layers is 2, but x\.json says 1"):
        check_pretrained(fewer, tmp_path)
    save_pretrained(built(parse_config(DEEPSEEK, "x.json")), tmp_path / "without")
    with pytest.raises(ConfigError, match="its file names no modules"):
        check_pretrained(config, tmp_path / "without")
    extra = {f"model.layers.{last}.extra": torch.ones(1)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="extra has no place"):
        check_pretrained(config, tmp_path)
    tensors.pop(f"model.layers.{last}.eh_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no tensor model\.layers\.3\.eh_proj"):
        check_pretrained(config, tmp_path)


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_packed_documents_are_as_one_by_one(values):
    """A module sees and predicts nothing of another document; shorter ones than its reach count too."""
    config = parse_config(values | dict(max_position_embeddings=64), "x.json").with_mtp(2.0)
    lengths, tokens = (7, 1, 2, 6), some_tokens(1, 17)
    starts, model = torch.zeros(1, 16, dtype=torch.int64), built(config)
    labels, at = tokens[:, 1:].clone(), 0
    for n in lengths:
        starts[0, at : at + n] = at
        at += n
        labels[0, at - 1] = -100
    model(tokens[:, :-1], labels, Documents(starts)).backward()
    packed = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    at = 0
    for n in lengths:
        own = slice(at, at + n)
        (model(tokens[:, own], labels[:, own], Documents(starts[:, own] - at)) * n / 16).backward()
        at += n
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, packed[name], atol=1e-7, rtol=1e-4, msg=name)


def test_a_run_names_it_and_reports_the_next_tokens_loss(tmp_path):
    common = words("--amp off --seq-len 16 --bsz 2 --device cpu --n-steps 1 --warmup-steps 0")
    common.append(write_config(tmp_path, DEEPSEEK))
    results = []
    for i, more in enumerate(("", "--mtp 0.3")):
        results.append(trained(tmp_path / str(i), common, more))
        (path,) = (tmp_path / str(i)).glob("*/result.json")
        assert ("-mtp0.3" in path.parent.name) == bool(more)
        # What is shared is checked against the same config and flags.
        ours, theirs = results[i]["model"], shareable(read_result(path)).model.model_dump()
        for key in ("hash", "n_parameters", "n_matmul_parameters"):
            assert ours[key] == theirs[key]
    off, on = results
    assert off["metrics"]["final_loss"] == pytest.approx(on["metrics"]["final_loss"], abs=1e-6)
    assert off["model"]["hash"] != on["model"]["hash"]
    assert on["metrics"]["flops_per_token_causal"] > 1.5 * off["metrics"]["flops_per_token_causal"]
    notes = [json.dumps(remark_texts(r)) for r in results]
    assert "(--mtp): 2 left out" in notes[0] and "(--mtp): 2 trained" in notes[1]


def test_modules_that_are_not_implemented_are_refused():
    changes = dict(mtp_use_dedicated_embeddings=True), dict(mtp_num_hidden_layers=2)
    for n, more in enumerate(changes, 1):
        config = parse_config(QWEN | more, "x.json")
        with pytest.raises(ConfigError, match=f"{n} modules are not implemented"):
            plan_of(["x.json", "--device", "cpu", "--mtp", "0.1"], config=config)
