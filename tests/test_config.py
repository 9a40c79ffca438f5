"""Config files: the shipped ones, what is refused, what is ignored."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from llm_train_bench.formulas import parameters
from llm_train_bench.formulas.parameters import count_parameters, learnt_weights
from llm_train_bench.model import config_keys, families
from llm_train_bench.model.config import ConfigError, keep_first_layers, load_config, parse_config
from llm_train_bench.model.config import describe_keys_without_effect as remark_on
from llm_train_bench.model.hf import save_pretrained
from llm_train_bench.model.transformer import Transformer
from tests.helpers import FAMILIES, LLAMA, ROOT, built, rows_of

SHIPPED = sorted(
    p for p in (ROOT / "configs").glob("*.json") if "model_type" in json.loads(p.read_text())
)
COUNTS = [row.split() for row in rows_of("parameters.txt")]
EXACT = {name: int(number) for name, number, *_ in COUNTS}
ACTIVE = {name: float(active[0]) for name, _, *active in COUNTS if active}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_config_builds_counts_and_opens_in_transformers(path, tmp_path):
    config = load_config(path)
    assert config.unknown_keys == ()
    with torch.device("meta"):
        model = Transformer(config, seq_len=128)
    built = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert built == count_parameters(config) == EXACT.get(path.stem, built)
    raw = json.loads(path.read_text())
    if raw["model_type"] == "kimi_k2":  # transformers has it under the name of its architecture
        raw["model_type"] = "deepseek_v3"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    hf_config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        if raw["model_type"] == "mistral4":  # is not in its auto class
            theirs = Mistral4ForCausalLM(hf_config)
        else:
            theirs = transformers.AutoModelForCausalLM.from_config(hf_config)
    assert sum(p.numel() for p in theirs.parameters()) == built


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_published(name):
    config = load_config(ROOT / f"configs/{name}.json")
    assert parameters.count_active_parameters(config) / 1e9 == pytest.approx(ACTIVE[name], abs=0.06)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_weights_is_what_every_family_builds(family):
    plain, padded = (parse_config(FAMILIES[family], "x.json", rows) for rows in (1, 64))
    for shape in (plain, padded):
        with torch.device("meta"):
            built = dict(Transformer(shape, 8).named_parameters())
        shapes = {n: p.shape for n, p in built.items()}
        assert {n: w.shape for n, w in shape.weights.items()} == shapes
        learnt = {n for n, p in built.items() if p.requires_grad}
        assert {w.name for w in learnt_weights(shape)} == learnt
    numbers = sum(math.prod(weight.shape) for weight in learnt_weights(plain))
    assert count_parameters(plain) == count_parameters(padded) == numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_are_a_model_of_their_own(family):
    """Layer by layer as in the whole model, also when read from the text that a result keeps."""
    whole = parse_config(FAMILIES[family], "x.json")
    for n in range(1, whole.num_hidden_layers + 1):
        first = keep_first_layers(whole, n)
        assert (first.num_hidden_layers, first.layers) == (n, whole.layers[:n])
        assert first.hash == parse_config(first.raw, "y.json").hash
        beyond = tuple(f"blocks.{layer}." for layer in range(n, whole.num_hidden_layers))
        assert [*first.weights] == [name for name in whole.weights if not name.startswith(beyond)]
    assert first.hash == whole.hash


def test_metadata_is_ignored_and_strange_keys_are_reported():
    base = parse_config(LLAMA, "x.json")
    extra = dict(transformers_version="4.40.0", torch_dtype="bfloat16", _name_or_path="somewhere")
    extra |= dict(use_cache=True, pretraining_tp=2, bos_token_id=1, eos_token_id=[1, 2])
    extra |= dict.fromkeys(("rope_scaling", "attn_logit_softcapping", "quantization_config"))
    same = parse_config(LLAMA | extra, "y.json")
    assert same.hash == base.hash and same.unknown_keys == ()
    odd = parse_config(LLAMA | {"num_key_value_head": 2}, "z.json")
    assert odd.unknown_keys == ("num_key_value_head",)


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
SAID = {
    "qwen3_moe": (dict(use_qk_norm=True), None),
    "phi3": (dict(auto_map={"AutoConfig": "x.X"}), "auto_map (no code of the Hub is run)"),
    "minimax_m2": (dict(quantization_config=dict(bits=8)),
                   "quantization_config (the weights are not quantised)"),
    "llama": (dict(rope_scaling=YARN | dict(attn_factor=0.878, finetuned=True)),
              "rope_scaling.attn_factor (transformers does not read it); "
              "rope_scaling.finetuned (positions are stretched in any case)"),
}  # fmt: skip


@pytest.mark.parametrize("family", SAID)
def test_keys_that_say_what_is_computed_are_accepted(family, tmp_path):
    """The model is that of the file without them, and a remark names each that is not done."""
    changes, remark = SAID[family]
    same = {"rope_scaling": YARN} if "rope_scaling" in changes else {}
    read = parse_config(FAMILIES[family] | changes, "x.json")
    assert read.hash == parse_config(FAMILIES[family] | same, "x.json").hash
    assert remark_on(read) == (remark and f"x.json: keys without effect: {remark}")
    with pytest.raises(ConfigError, match="changes the computation"):
        parse_config(LLAMA | dict(use_qk_norm=True), "x.json")  # it has no such norm
    save_pretrained(built(read), tmp_path)  # its weights are plain, and have no code
    exported = json.loads((tmp_path / "config.json").read_text())
    assert not {"quantization_config", "auto_map"} & {*exported}


@pytest.mark.parametrize("outer", ["qwen3_5", "gemma3"])
def test_text_config_is_read(outer):
    """Of a file with images; its other parts are named, and it says whether embeddings are tied."""
    text = FAMILIES[f"{outer}_text"] | dict(tie_word_embeddings=True)
    whole = dict(model_type=outer, text_config=text, tie_word_embeddings=False)
    whole |= dict(vision_config={"hidden_size": 8}, image_token_id=5, torch_dtype="bfloat16")
    read = parse_config(whole, "x.json")
    assert read.hash == parse_config(text | dict(tie_word_embeddings=False), "x.json").hash
    left_out = "vision_config, image_token_id (only text_config is read)"
    for config in (read, keep_first_layers(read, 1)):
        assert remark_on(config) == f"x.json: keys without effect: {left_out}"
    with pytest.raises(ConfigError, match=f'model_type "{outer}": not implemented'):
        parse_config(whole | dict(text_config=text | dict(model_type="t5")), "x.json")


# Sizes for keys that every file gives.
SIZES = dict(
    vocab_size=300000, hidden_size=8192, num_attention_heads=128, num_hidden_layers=6, n_embd=48,
    intermediate_size=80, n_layer=2, n_head=4)  # fmt: skip
# Keys of rows that are read by a rule and are no field themselves.
BY_RULE = """attention_bias decoder_sparse_step expert_hidden_dim full_attention_interval layer_types
    layers_block_type mamba_expand max_window_layers n_shared_experts no_rope_layer_interval
    num_shared_experts
    output_router_logits partial_rotary_factor rope_interleave rope_local_base_freq rope_theta
    rotary_dim shared_intermediate_size sliding_window sliding_window_pattern time_step_limit
    use_sliding_window""".split()


@pytest.mark.parametrize("family", families.FAMILIES)
def test_absent_keys_take_the_defaults_of_transformers(family):
    """A file with the required keys alone is read as the one that transformers writes of it."""
    row = families.FAMILIES[family].keys
    sizes = SIZES | (dict(num_attention_heads=32) if family == "mistral4" else {})
    required = {key: sizes[key] for key, default in row.items() if default is ...}
    class_of = "deepseek_v3" if family == "kimi_k2" else family
    theirs = transformers.AutoConfig.for_model(class_of, **required).to_dict()
    theirs = json.loads(json.dumps(theirs, default=str)) | dict(model_type=family)
    ours = parse_config(required | dict(model_type=family), "x.json").shape()
    assert ours == parse_config(theirs, "x.json").shape()
    read = parse_config(required | dict(model_type=family), "x.json")
    known = {*config_keys.MODEL, *BY_RULE}
    for part in ("latent", "recurrent", "experts"):
        if getattr(read, part) is not None:
            known |= {*getattr(config_keys, part.upper())}
    assert {key for key, default in row.items() if not isinstance(default, list)} <= known


def test_hash_is_of_the_shape_not_of_the_text(tmp_path):
    spaced = tmp_path / "other-name.json"
    spaced.write_text(json.dumps(LLAMA, indent=8, sort_keys=True))
    assert load_config(spaced).hash == parse_config(LLAMA, Path("a.json")).hash
    assert parse_config(LLAMA | {"rope_theta": 501.0}, "a.json").hash != load_config(spaced).hash
    # Padding rows only change the speed: runs with and without them have one model.
    assert load_config(spaced, 128).hash == load_config(spaced).hash
    # A new version of this code does not change it either: it is part of a baseline's key.
    assert load_config(ROOT / "configs/gpt2-tiny.json").hash == "3e645ee571da3ebc"
    assert load_config(ROOT / "configs/nemotron-3-nano-30b-a3b.json").hash == "ead63706f3029d00"


FIRST = dict(arch_name="llama", d_embd=8192, n_layers=4, n_heads=64, n_kv_heads=8, d_hid=28672)
FIRST |= dict(max_seq_len=4096, vocab_size=128256, ffn_mult=1.3, ffn_factor=1024)
FIRST |= dict(rope_base=500000.0, norm_eps=1e-05)


def test_configs_of_the_first_version_are_read():
    """Its 70B proxy is ours; without d_hid the width follows from its two factors, as there."""
    ours = load_config(ROOT / "configs/llama-70b-proxy.json")
    for raw in (FIRST, {k: v for k, v in FIRST.items() if k != "d_hid"}):
        old = parse_config(raw, "old.json")
        assert count_parameters(old) == count_parameters(ours) and old.unknown_keys == ()
        assert (old.intermediate_size, old.rope_theta, old.norm_eps) == (28672, 500000.0, 1e-5)
    with pytest.raises(ConfigError, match="d_embd: missing"):
        parse_config({"arch_name": "gpt", "vocab_size": 8}, "old.json")
