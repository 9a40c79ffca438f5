"""The tensors of Hugging Face files that our parameters are made of. Needs no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llm_train_bench.model.config import ModelConfig


class HfTensor(NamedTuple):
    """A tensor of a file, and the segments of our parameter's rows that it has, by their numbers.

    Rows of several segments alternate where there are several `groups`: the first group of each segment,
    then the second of each. A name with {} stands for one tensor of each expert.
    """

    name: str
    segments: tuple[int, ...] = (0,)
    groups: int = 1
    transposed: bool = False
    """Whether it is (in, out)."""

    @property
    def each_expert(self) -> bool:
        """Whether it is a tensor of one expert, and the others have such too."""
        return "{}" in self.name

    @property
    def linear(self) -> str:
        """The name of its linear layer, such as q_proj."""
        return self.name.split(".")[-2]


def recurrent_names(module: str) -> dict[str, str]:
    """The names in layers with states, whose module is called so."""
    names = dict(project="in_proj", conv="conv1d", gated_norm="norm", out="out_proj")
    names |= dict(decay="A_log", step_bias="dt_bias", skip="D")
    return {f"recurrent.{ours}": f"{module}.{theirs}" for ours, theirs in names.items()}


def gated(ours: str, theirs: str) -> dict[str, str]:
    """The names of an MLP, or of all experts: of gate, up and down."""
    up, down = f"{theirs}.gate_proj {theirs}.up_proj", f"{theirs}.down_proj"
    return {f"{ours}.gate_up": up, f"{ours}.down": down}


# fmt: off
# By module, each without the prefix of its block. A key that ends with a parameter's kind has the whole
# name; modules of recurrent layers are called `recurrent` here.
GPT2_NAMES = {
    "blocks": "transformer.h", "embed": "transformer.wte", "positions": "transformer.wpe",
    "norm": "transformer.ln_f", "attn_norm": "ln_1", "mlp_norm": "ln_2",
    "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}
LLAMA_NAMES = recurrent_names("linear_attn") | {
    "blocks": "model.layers", "embed": "model.embed_tokens", "norm": "model.norm",
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attn.out": "self_attn.o_proj",
    "attn.q": "self_attn.q_proj", "attn.q_down": "self_attn.q_a_proj",
    "attn.q_down_norm": "self_attn.q_a_layernorm", "attn.q_up": "self_attn.q_b_proj",
    "attn.kv_down": "self_attn.kv_a_proj_with_mqa", "attn.kv_down_norm": "self_attn.kv_a_layernorm",
    "attn.kv_up": "self_attn.kv_b_proj", "mlp.router": "mlp.gate",
}
LLAMA_NAMES |= gated("mlp", "mlp") | gated("mlp.experts", "mlp.experts.{}")
LLAMA_NAMES |= gated("mlp.shared", "mlp.shared_experts")
POST_NORMS = dict(
    attn_post_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm")
QWEN_HYBRID = gated("mlp.shared", "mlp.shared_expert") | {"mlp.shared_gate": "mlp.shared_expert_gate"}
QWEN35 = {"recurrent.project": " ".join(f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a"))}
BLOCK_SPARSE = {
    "mlp.router": "block_sparse_moe.gate", "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
    "mlp.experts.gate_up": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
}
# All experts in one tensor.
STACKED = {f"mlp.experts.{x}.weight": f"mlp.experts.{x}_proj" for x in ("gate_up", "down")}
# Names that differ in single families.
FAMILY_NAMES = {
    "mixtral": BLOCK_SPARSE,
    "mistral4": STACKED,
    "gpt_oss": STACKED | {"mlp.router": "mlp.router"}
    | {f"mlp.experts.{x}.bias": f"mlp.experts.{x}_proj_bias" for x in ("gate_up", "down")},
    "phi3": {"attn.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"},
    "olmo2": POST_NORMS,
    "olmo3": POST_NORMS,
    "minimax_m2": BLOCK_SPARSE
    | {"mlp.router.correction": "block_sparse_moe.e_score_correction_bias"},
    "hy_v3": gated("mlp.shared", "mlp.shared_mlp")
    | {"mlp.router": "mlp.router.gate", "mlp.router.correction": "mlp.expert_bias"},
    "gemma3_text": POST_NORMS,
    "qwen2_moe": QWEN_HYBRID,
    "qwen3_next": QWEN_HYBRID
    | {"recurrent.project": "linear_attn.in_proj_qkvz linear_attn.in_proj_ba"},
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": QWEN_HYBRID | QWEN35,
    "granitemoehybrid": recurrent_names("mamba") | {
        "mlp.gate_up": "shared_mlp.input_linear", "mlp.down": "shared_mlp.output_linear",
        "mlp.shared.gate_up": "shared_mlp.input_linear", "mlp.shared.down": "shared_mlp.output_linear",
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up": "block_sparse_moe.input_linear",
        "mlp.experts.down": "block_sparse_moe.output_linear",
    },
    "nemotron_h": recurrent_names("mixer") | {
        "blocks": "backbone.layers", "embed": "backbone.embeddings", "norm": "backbone.norm_f",
        "attn_norm": "norm", "mlp_norm": "norm",
        "attn.qkv": "mixer.q_proj mixer.k_proj mixer.v_proj", "attn.out": "mixer.o_proj",
        "mlp.up": "mixer.up_proj", "mlp.down": "mixer.down_proj", "mlp.router": "mixer.gate",
        "mlp.experts.up": "mixer.experts.{}.up_proj", "mlp.experts.down": "mixer.experts.{}.down_proj",
        "mlp.latent_down": "mixer.fc1_latent_proj", "mlp.latent_up": "mixer.fc2_latent_proj",
        "mlp.shared.up": "mixer.shared_experts.up_proj",
        "mlp.shared.down": "mixer.shared_experts.down_proj",
    },
}
# fmt: on


def hf_tensors(
    config: ModelConfig, layer: int | None, module: str, kind: str, n_segments: int
) -> tuple[HfTensor, ...]:
    """The tensors that make up a parameter of so many segments."""
    names = GPT2_NAMES
    if config.model_type != "gpt2":
        names = LLAMA_NAMES | FAMILY_NAMES.get(config.model_type, {})
    prefix, part = "", module
    if layer is not None:
        prefix = f"{names['blocks']}.{layer}."
        if config.layers[layer].mixer == "recurrent":
            part = re.sub(r"^attn\b", "recurrent", module)
    if (exact := names.get(f"{part}.{kind}")) is not None:
        found = [exact]
    else:
        kind = "e_score_correction_bias" if kind == "correction" else kind
        default = f"self_{part}" if part.startswith("attn") else part
        found = [f"{name}.{kind}" for name in names.get(part, default).split()]
    segments_and_groups = segments_of_files(config, part)
    if segments_and_groups is None:
        each = [(number,) for number in range(n_segments)]
        segments_and_groups = [
            (segment, 1) for segment in (each if len(found) > 1 else [sum(each, ())])
        ]
    transposed = kind == "weight" and (
        (config.model_type == "gpt2" and "." in module)
        or (config.model_type == "gpt_oss" and module.startswith("mlp.experts."))
    )
    return tuple(
        HfTensor(prefix + name, *segment_groups, transposed)
        for name, segment_groups in zip(found, segments_and_groups, strict=True)
    )


def segments_of_files(config: ModelConfig, part: str) -> list[tuple[tuple[int, ...], int]] | None:
    """The segments that each tensor of a part has, and their groups; None where they are in our order."""
    if part == "attn.qkv" and config.output_gate:  # a head's queries, then its gates
        return [((0, 3), config.num_attention_heads), ((1,), 1), ((2,), 1)]
    if part == "mlp.experts.gate_up" and config.model_type == "gpt_oss":  # they alternate
        assert config.experts is not None
        return [((0, 1), config.experts.size)]
    r = config.recurrent
    if r is None or part not in ("recurrent.project", "recurrent.conv"):
        return None
    if not r.delta:  # gates, values, B, C, steps
        return [((3, 2, 1, 0, 4) if part == "recurrent.project" else (2, 1, 0), 1)]
    if part == "recurrent.conv":
        return None
    if config.model_type == "qwen3_next":
        return [((0, 1, 2, 3), r.groups), ((4, 5), r.groups)]
    return [((0, 1, 2), 1), ((3,), 1), ((4,), 1), ((5,), 1)]
