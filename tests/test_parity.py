"""The same weights give the same logits, loss and gradients as in transformers, both ways."""

import contextlib
import copy
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from llm_train_bench.apply.data import SyntheticTokens
from llm_train_bench.apply.sharded import materialize
from llm_train_bench.model.config import ConfigError, keep_first_layers, parse_config
from llm_train_bench.model.families import FAMILIES as ROWS
from llm_train_bench.model.hf import check_pretrained, save_pretrained, to_hf
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.run.provenance import _notes
from tests.faults import SHAPE
from tests.helpers import FAMILIES, built, config, plan_of, trained, words, write_config

T = 24
CPU = torch.device("cpu")


def reference(values: dict, std: float = 0.1):
    """A transformers model of a config file's content, with every parameter random."""
    torch.manual_seed(0)
    # It writes into the dictionaries that it is given.
    values = copy.deepcopy(values)
    if values["model_type"] == "kimi_k2":  # transformers has it under another name
        values["model_type"] = "deepseek_v3"
    hf_config = transformers.AutoConfig.for_model(**values, dtype="float32")
    if values["model_type"] == "mistral4":  # is not in its auto class
        model = Mistral4ForCausalLM(hf_config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(hf_config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model


def copied(theirs, ours_config, directory, **options) -> Transformer:
    """Our model with the weights of theirs, through their safetensors."""
    theirs.save_pretrained(directory, **options)
    rename(directory, ours_config.model_type)
    return built(ours_config, seq_len=T, weights=check_pretrained(ours_config, directory))


def rename(directory, model_type: str) -> None:
    """Set the family of a directory's config, for the one that transformers calls differently."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))


def some_tokens(n, length):
    return torch.randint(97, (n, length), generator=torch.Generator().manual_seed(1))


def gradients_of(ours, theirs) -> tuple[dict, dict]:
    """Our gradients and theirs, as the tensors of their files."""
    theirs = revert_weight_conversion(theirs, {n: p.grad for n, p in theirs.named_parameters()})
    trained = [(weight, p.grad) for weight, p in ours.weights() if p.requires_grad]
    return dict(pair for weight, grad in trained for pair in to_hf(weight, grad)), theirs


def outcomes(ours, theirs) -> tuple[tuple, tuple, tuple]:
    """Logits, loss and gradients on the same tokens, each of our model and of theirs."""
    tokens = some_tokens(3, T + 1)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = ours(inputs), theirs(inputs).logits
    losses = ours(inputs, labels), F.cross_entropy(logits[1].flatten(0, 1), labels.flatten())
    for loss in losses:
        loss.backward()
    return logits, losses, gradients_of(ours, theirs)


@pytest.fixture(params=FAMILIES, scope="module")
def pair(request, tmp_path_factory):
    """(our config, our model, theirs) with the same weights, through their safetensors."""
    theirs, directory = reference(FAMILIES[request.param]), tmp_path_factory.mktemp("x")
    model = copied(theirs, config(request.param), directory)
    return model.config, model, theirs, directory


def test_logits_loss_and_gradients_are_those_of_transformers(pair):
    _, ours, theirs, _ = pair
    logits, losses, gradients = outcomes(ours, theirs)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(*losses, atol=1e-5, rtol=0)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    ours.zero_grad()
    theirs.zero_grad()


def test_files_of_either_side_mean_the_same_model(pair, tmp_path):
    """transformers 5 writes rope_parameters and layer_types."""
    ours_config, ours, theirs, directory = pair
    save_pretrained(ours, tmp_path)
    kind = type(theirs)
    if ours_config.model_type == "kimi_k2":
        rename(tmp_path, "deepseek_v3")
    again = kind.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(again.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    newer = json.loads((directory / "config.json").read_text())
    assert ROWS[ours_config.model_type].architecture == kind.__name__
    assert parse_config(newer, "config.json").hash == ours_config.hash
    if ours_config.model_type not in ("gpt2", "nemotron_h"):
        assert "rope_parameters" in newer and "rope_theta" not in newer


def test_hub_files_without_prefix_and_sharded_files_load(pair, tmp_path):
    ours_config, ours, theirs, _ = pair
    fresh = copied(theirs, ours_config, tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    torch.testing.assert_close([*fresh.parameters()], [*ours.parameters()], rtol=0, atol=0)
    if ours_config.model_type == "gpt2":
        bare = {n.removeprefix("transformer."): v.clone() for n, v in theirs.state_dict().items()}
        bare.pop("lm_head.weight")
        (tmp_path / "bare").mkdir()
        save_file(bare, tmp_path / "bare" / "model.safetensors")
        check_pretrained(ours_config, tmp_path / "bare")


def test_weights_of_another_shape_are_refused(pair, tmp_path):
    ours_config, _, _, directory = pair
    key = "n_layer" if ours_config.model_type == "gpt2" else "num_hidden_layers"
    raw, own = ours_config.raw, ours_config.num_hidden_layers

    def of_layers(n):
        """The config with the last layer missing, or twice."""
        lists = {k: (v + v[-1:])[:n] for k, v in raw.items() if k.startswith("layer") and v}
        return parse_config(raw | {key: n} | lists, f"{n}.json")

    deeper, fewer = of_layers(own + 1), of_layers(own - 1)

    def refuse(shape, message, weights=tmp_path):
        with pytest.raises(ConfigError, match=message):
            check_pretrained(shape, weights)

    refuse(deeper, rf"num_hidden_layers is {own}, but {own + 1}\.json says {own + 1}", directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    refuse(deeper, "has no tensor")
    refuse(fewer, rf"has no place in {own - 1}\.json")
    check_pretrained(keep_first_layers(ours_config, own - 1), directory)
    if ours_config.model_type == "deepseek_v3":  # unless the layer beyond is another kind's
        module = tensors | {f"model.layers.{own - 1}.eh_proj.weight": torch.zeros(1)}
        save_file(module, tmp_path / "model.safetensors")
        check_pretrained(fewer, tmp_path)
    name = next(n for n in tensors if n.endswith(("o_proj.weight", "c_attn.weight")))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    refuse(ours_config, "holds I8; quantised")
    save_file(tensors | {name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors")
    refuse(ours_config, "has shape")


@pytest.mark.parametrize(
    ("family", "key", "tensor"),
    [
        ("glm4_moe", "num_nextn_predict_layers", "model.layers.{last}.eh_proj.weight"),
        ("qwen3_next", "mtp_num_hidden_layers", "mtp.fc.weight"),
    ],
)
def test_modules_of_multi_token_prediction_are_left_out(family, key, tensor, tmp_path):
    """Their tensors have no place, an export has none and says so, and a remark tells."""
    shape = config(family, **{key: 1})
    save_pretrained(built(shape), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[key] == 0
    tensors = load_file(tmp_path / "model.safetensors")
    name = tensor.format(last=shape.num_hidden_layers)
    save_file(tensors | {name: torch.zeros(1)}, tmp_path / "model.safetensors")
    check_pretrained(shape, tmp_path)
    plan = plan_of(["x.json", "--device", "cpu"], platform="cpu", config=shape)
    assert "modules of multi-token prediction: 1 left out" in [*_notes(plan.work, plan.schedule)]


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe", "gpt_oss"])
def test_balance_loss_is_that_of_transformers_layer_by_layer(family, tmp_path):
    """Its function on each layer alone, divided by the experts of a token, and summed."""
    values = FAMILIES[family] | dict(output_router_logits=True, router_aux_loss_coef=0.5)
    theirs = reference(values)
    ours = copied(theirs, parse_config(values, "x.json"), tmp_path)
    tokens = some_tokens(3, T + 1)
    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    out, e = theirs(tokens[:, :-1], output_router_logits=True), ours.config.experts
    loss = F.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
    for layer in out.router_logits:
        loss += 0.5 / e.per_token * load_balancing_loss_func((layer,), e.number, e.per_token)
    loss.backward()
    torch.testing.assert_close(*gradients_of(ours, theirs), atol=1e-4, rtol=1e-4)


def test_balance_loss_of_sigmoid_scores_by_hand():
    """Scores are shares of their token's first: 1/4 and 1/2 of the expert that both tokens chose."""
    changes = dict(output_router_logits=True, router_aux_loss_coef=0.5, n_routed_experts=2)
    shape = config("moonlight", **changes, num_experts_per_tok=1)
    scores, counts = torch.tensor([[0.1, 0.3], [0.2, 0.2]]), torch.tensor([2, 0])
    loss = Transformer(shape, T).blocks["1"].mlp.balance_loss(scores, counts)
    assert loss.item() == pytest.approx(0.5 * 2 * 3 / 8)


def test_a_balance_loss_is_named_in_the_result():
    for logits in (True, False):
        shape = config("mixtral", output_router_logits=logits)
        plan = plan_of(["x.json", "--device", "cpu"], config=shape)
        notes = "".join(_notes(plan.work, plan.schedule))
        assert ("the balance loss is of each layer, summed" in notes) == logits


SLIDES, FULL = "sliding_attention", "full_attention"
SWITCHED = dict(use_sliding_window=True, sliding_window=7)
TRAINED = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("family", "changes"),
    [("smollm3", SWITCHED),
     ("smollm3", SWITCHED | dict(layer_types=[SLIDES, FULL, FULL])),
     ("smollm3", dict(use_sliding_window=True)), ("qwen3_moe", SWITCHED),
     ("qwen3", SWITCHED | dict(max_window_layers=2)),
     ("qwen3", SWITCHED | dict(layer_types=[SLIDES, FULL, FULL])),
     ("mixtral", dict(sliding_window=7)),
     ("gpt_oss", dict(layer_types=[FULL, SLIDES, FULL])),
     # Other names of keys.
     ("granitemoehybrid", dict(mamba_n_groups=4)),
     ("granitemoehybrid", dict(layers_block_type=["attention", "mamba", "attention"])),
     ("nemotron_h", dict(mamba_n_groups=4)), ("nemotron_h", dict(time_step_limit=[0.5, 0.9])),
     ("granitemoehybrid", dict(time_step_limit=[0.5, 0.9])),
     ("nemotron_h", dict(use_conv_bias=True, mamba_conv_bias=False)),
     ("nemotron_h", dict(conv_kernel=4, mamba_d_conv=3)), ("ministral3", {TRAINED: 4}),
     ("mistral4", {TRAINED: 4}),
     ("olmo3", {TRAINED: 32, "rope_scaling": dict(rope_type="yarn", factor=4.0) | {TRAINED: 16}})],
)  # fmt: skip
def test_windows_and_other_names_of_keys_count_as_in_transformers(family, changes, tmp_path):
    """Weights are large: groups of a norm, for example, do not show in small ones."""
    same_logits(FAMILIES[family] | changes, tmp_path, std=0.5)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("outer", [{}, {TRAINED: 48}])
@pytest.mark.parametrize("inner", [{}, {TRAINED: 8}, {TRAINED: 2}])
@pytest.mark.parametrize("family", ["llama", "llama-yarn", "deepseek_v3"])
def test_the_trained_length_at_the_top_level_counts(family, inner, outer, spelling, tmp_path):
    values = FAMILIES[family] | outer
    rope = {k: v for k, v in values.pop("rope_scaling").items() if k != TRAINED}
    same_logits(values | {spelling: rope | inner}, tmp_path)


def same_logits(values: dict, directory, std: float = 0.1):
    """Fail if our model of a config computes other logits than transformers' model."""
    theirs, tokens = reference(values, std), some_tokens(2, T)
    ours = copied(theirs, parse_config(values, "x.json"), directory)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-3 * std, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_a_trained_model_opens_in_transformers(family, tmp_path):
    """train.py --export, then AutoModelForCausalLM: the last loss of training is theirs too."""
    source = write_config(tmp_path, FAMILIES[family])
    common = words("--amp off --seq-len 24 --bsz 2 --device cpu", source)
    trained(tmp_path / "runs", common, "--n-steps 3 --export --run-name a --pad-vocab 64")
    export = tmp_path / "runs/a/export"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert type(theirs).__name__ == ROWS[FAMILIES[family]["model_type"]].architecture

    # Continue from the export for one forward step: the loss must be what they compute on it.
    argv = words("--pass-type forward --n-steps 1 --warmup-steps 0 --init-from", export)
    loss = trained(tmp_path / "again", common, argv)["metrics"]["final_loss"]
    (ids,) = SyntheticTokens(97, 2, 24, 0, CPU).micro_batches(range(1))
    with torch.no_grad():
        logits = theirs(ids[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert loss == pytest.approx(expected.item(), abs=1e-5)


NORM, HEAD, WTE = "transformer.ln_f.weight", "lm_head.weight", "transformer.wte.weight"
NAN = torch.tensor([float("nan")])
SPOILT = {
    "tied head": (HEAD, lambda t: t[WTE] + 0.0, None),
    "another head": (HEAD, lambda t: t[WTE] + 1.0, f"{HEAD} is not {WTE}, though"),
    "nan": (NORM, lambda t: torch.cat((NAN, t[NORM][1:])), "holds numbers that are not finite"),
    "fp8": (NORM, lambda t: t[NORM].to(torch.float8_e4m3fn), "holds F8_E4M3; quantised weights"),
}


@pytest.mark.parametrize(("name", "spoil", "message"), SPOILT.values(), ids=SPOILT)
def test_weights_that_the_config_or_the_format_cannot_mean(name, spoil, message, tmp_path):
    model = built(parse_config(SHAPE, "micro.json"))
    save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: spoil(tensors)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        materialize(model, CPU, 0, check_pretrained(model.config, tmp_path))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_names_only_files_beside_it(name, tmp_path):
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="cannot be read"):
        check_pretrained(parse_config(SHAPE, "micro.json"), tmp_path)


def test_padding_rows_change_no_other_value():
    """Where vocabulary x width is not a multiple of 16, random numbers are drawn otherwise."""
    odd = SHAPE | {"vocab_size": 31, "n_embd": 6}
    plain, padded = (built(parse_config(odd, "odd.json", rows)) for rows in (1, 64))
    assert padded.embed.weight.shape[0] == 64 and not padded.embed.weight[31:].any()
    assert torch.equal(padded.embed.weight[:31], plain.embed.weight)
