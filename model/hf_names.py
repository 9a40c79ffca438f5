"""Names of tensors in Hugging Face files, and their rows. Needs no torch."""

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.shares import linear_shape

GPT2_NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "attn.q": "self_attn.q_proj",
    "attn.q_down": "self_attn.q_a_proj",
    "attn.q_down_norm": "self_attn.q_a_layernorm",
    "attn.q_up": "self_attn.q_b_proj",
    "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_down_norm": "self_attn.kv_a_layernorm",
    "attn.kv_up": "self_attn.kv_b_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up": "mlp.gate_proj mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate_up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
AROUND = dict(attn_after="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm")
AROUND |= dict(mlp_after="post_feedforward_layernorm")
QWEN_HYBRID = {
    "mlp.shared.gate_up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
QWEN35 = {"attn.project": " ".join(f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a"))}
# Where the parameters of layers with states are, if not in linear_attn; and their names.
MIXERS = dict(nemotron_h="mixer", granitemoehybrid="mamba")
MIXER_NAMES = {"attn.project": "in_proj", "attn.conv": "conv1d", "attn.gated_norm": "norm"}
MIXER_NAMES |= {"attn.out": "out_proj"}
MIXER_KINDS = dict(decay="A_log", step_bias="dt_bias", skip="D")
# Names that differ in single families.
FAMILY_NAMES = {
    "mixtral": {"mlp.router": "block_sparse_moe.gate"},
    "gpt_oss": {"mlp.router": "mlp.router"},
    "phi3": {"attn.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"},
    "olmo2": {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "minimax_m2": {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
    },
    "hy_v3": {
        "mlp.router": "mlp.router.gate",
        "mlp.router.correction": "mlp.expert_bias",
        "mlp.shared.gate_up": "mlp.shared_mlp.gate_proj mlp.shared_mlp.up_proj",
        "mlp.shared.down": "mlp.shared_mlp.down_proj",
    },
    "gemma3_text": AROUND,
    "qwen2_moe": QWEN_HYBRID,
    "qwen3_next": QWEN_HYBRID | {"attn.project": "linear_attn.in_proj_qkvz linear_attn.in_proj_ba"},
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": QWEN_HYBRID | QWEN35,
    "granitemoehybrid": {
        "mlp.gate_up": "shared_mlp.input_linear",
        "mlp.down": "shared_mlp.output_linear",
        "mlp.shared.gate_up": "shared_mlp.input_linear",
        "mlp.shared.down": "shared_mlp.output_linear",
        "mlp.router": "block_sparse_moe.router.layer",
    },
    "nemotron_h": {
        "embed": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "attn_norm": "norm",
        "mlp_norm": "norm",
        "attn.qkv": "mixer.q_proj mixer.k_proj mixer.v_proj",
        "attn.out": "mixer.o_proj",
        "mlp.up": "mixer.up_proj",
        "mlp.down": "mixer.down_proj",
        "mlp.router": "mixer.gate",
        "mlp.latent_down": "mixer.fc1_latent_proj",
        "mlp.latent_up": "mixer.fc2_latent_proj",
        "mlp.shared.up": "mixer.shared_experts.up_proj",
        "mlp.shared.down": "mixer.shared_experts.down_proj",
    },
}
FAMILY_NAMES["olmo3"] = FAMILY_NAMES["olmo2"]


def hf_names(config: ModelConfig, name: str) -> list[str]:
    """The Hugging Face tensors that, stacked along dimension 0, make up our parameter `name`."""
    family, gpt2 = config.model_type, config.model_type == "gpt2"
    theirs = GPT2_NAMES if gpt2 else LLAMA_NAMES | FAMILY_NAMES.get(family, {})
    module, kind = name.rsplit(".", 1)
    if not module.startswith("blocks."):
        return [f"{theirs.get(module, module)}.{kind}"]
    _, layer, part = module.split(".", 2)
    base = "backbone" if family == "nemotron_h" else "model"
    prefix = f"transformer.h.{layer}" if gpt2 else f"{base}.layers.{layer}"
    if part.startswith("mlp.experts."):
        return [f"{prefix}.{name}" for name in _expert_names(config, part.split(".")[-1], kind)]
    if (whole := theirs.get(f"{part}.{kind}")) is not None:
        return [f"{prefix}.{whole}"]
    if int(layer) in config.recurrent.layers and part.split(".")[0] == "attn":
        mixer = MIXERS.get(family, "linear_attn")
        if part == "attn":
            return [f"{prefix}.{mixer}.{MIXER_KINDS[kind]}"]
        if part not in theirs or part == "attn.out":
            return [f"{prefix}.{mixer}.{MIXER_NAMES[part]}.{kind}"]
    kind = {"correction": "e_score_correction_bias"}.get(kind, kind)
    names = theirs.get(part, f"self_{part}")  # self_attn, self_attn.q_norm and self_attn.k_norm
    return [f"{prefix}.{each}.{kind}" for each in names.split()]


def _expert_names(config: ModelConfig, part: str, kind: str) -> list[str]:
    """Names of the tensors of all experts, those of the first expert first."""
    if config.model_type == "gpt_oss":  # all experts in one tensor
        return [f"mlp.experts.{part}_proj" + ("_bias" if kind == "bias" else "")]
    if config.model_type == "mistral4":
        return [f"mlp.experts.{part}_proj"]
    if config.model_type == "granitemoehybrid":
        which = {"gate_up": "input", "down": "output"}[part]
        return [f"block_sparse_moe.{which}_linear.weight"]
    if config.model_type == "nemotron_h":
        inner, names = "mixer.experts", {"up": ("up_proj",), "down": ("down_proj",)}
    elif config.model_type in ("mixtral", "minimax_m2"):
        inner, names = "block_sparse_moe.experts", {"gate_up": ("w1", "w3"), "down": ("w2",)}
    else:
        inner, names = "mlp.experts", {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    return [f"{inner}.{e}.{p}.{kind}" for e in range(config.experts.number) for p in names[part]]


def row_sizes(config: ModelConfig, name: str, names: list[str]) -> list[int] | None:
    """Rows of each of the tensors that make up a parameter; None where they are alike."""
    module, q, kv = name.split(".")[-2], config.query_size, config.kv_size
    if module == "qkv" and len(names) == 3:
        return [q * (1 + config.output_gate), kv, kv]
    if module != "project" or len(names) == 1:
        return None
    *wide, b, a = config.recurrent.segments
    if len(names) == 2:
        return [sum(wide), b + a]
    return [sum(wide[:3]), wide[3], b, a]


def adapted_rows(config: ModelConfig, name: str, targets: frozenset[str]) -> list[tuple[int, bool]]:
    """Rows of the layers that `name` fuses, and which of them are targets; none if no one is.

    A target is the last part of a layer's name in Hugging Face's files, such as q_proj; `all` are all. In
    models with experts they are of attention alone: peft takes the names of MLPs there for experts.
    """
    if config.experts and ".mlp." in name:
        return []
    names = hf_names(config, f"{name}.weight")
    wanted = [bool(targets & {"all", hf.split(".")[-2]}) for hf in names]
    if not any(wanted):
        return []
    alike = [linear_shape(config, name)[0] // len(names)] * len(names)
    rows = row_sizes(config, f"{name}.weight", names) or alike
    return [*zip(rows, wanted, strict=True)]
