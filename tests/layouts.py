"""Every layout against one device: losses, norms, every gradient, and the parameters at the end.

    make layouts               all cases
    DEVICE=cuda make layouts   on GPUs, which ranks share where there are fewer (docs/LAYOUTS.md)

tests/test_layouts.py runs a short form. Tolerances are of fp32 on a CPU with gloo, over 6 AdamW steps
with clipping active, and in some models inactive at the end. Under bf16 only the first gradients are
held to one device's; so under FP8, where a number of fp32 noise may be rounded to a neighbour.
"""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llm_train_bench.base.documents import index_path
from llm_train_bench.base.token_files import write_tokens
from llm_train_bench.formulas.collectives import traffic as traffic_of
from llm_train_bench.measure.device import SHARE_GPU
from tests.dist_worker import DEVICE, Job, run_jobs
from tests.faults import steps_of, whole_state
from tests.helpers import FAMILIES, ROOT, facts_of, plan_of, result_of

STEPS = 6
COMMON = (
    f"--device {DEVICE} --amp off --warmup-steps 1 --warmup-seconds 0 --lr 2e-3 --lr-warmup-steps 0 "
    "--seq-len 32 --no-tensorboard --linear plain"
).split()
HEADS = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
SIZES = HEADS | dict(intermediate_size=96, num_hidden_layers=2)
MOE = FAMILIES["qwen3_moe"] | SIZES | dict(moe_intermediate_size=32, mlp_only_layers=[])
BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.01, router_bias_update_rate=0.01)
ONE_EXPERT = dict(num_experts_per_tok=1, norm_topk_prob=False)
# What differs from tests.helpers.FAMILIES: sizes that divide, and several layers.
MODELS = {
    "gpt2": FAMILIES["gpt2"] | dict(n_embd=64, n_head=8, n_layer=2),
    "llama": FAMILIES["llama-yarn"] | SIZES,
    "qwen3": FAMILIES["qwen3"] | SIZES,
    "deep": FAMILIES["qwen3"] | SIZES | dict(num_hidden_layers=4),
    "mistral": FAMILIES["mistral"] | SIZES,
    # A layer with a window and one without; too few key/value heads for four ranks.
    "qwen2": FAMILIES["qwen2"] | SIZES | dict(num_key_value_heads=2),
    "moe": MOE,
    # No clamp is reached: rounding at its edge turns a gradient on or off, and Adam magnifies that.
    "gpt_oss": FAMILIES["gpt_oss"] | SIZES | dict(intermediate_size=32, swiglu_limit=7.0),
    "deepseek": FAMILIES["deepseek_v3"] | SIZES | dict(num_key_value_heads=8) | BALANCED,
    # Fewer experts than shards, which FSDP then shards by rows; and with biases, which it does not.
    "few": MOE | dict(num_experts=2) | ONE_EXPERT,
    "few-biases": FAMILIES["gpt_oss"] | SIZES | dict(intermediate_size=32, num_local_experts=3),
    # Two words and one expert for each token: some ranks get no row.
    "lopsided": MOE | dict(vocab_size=2, pad_token_id=None) | ONE_EXPERT,
}
DELTA = FAMILIES["qwen3_next"] | HEADS | dict(intermediate_size=96, head_dim=16, num_experts=8)
DELTA |= dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
DELTA |= dict(linear_num_key_heads=4, linear_num_value_heads=8)
MODELS |= {
    "delta": DELTA | dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    "mamba": FAMILIES["nemotron_h"] | HEADS | dict(
        n_routed_experts=8, n_groups=4, intermediate_size=96, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32),
    "granite": FAMILIES["granitemoehybrid"] | HEADS | dict(
        mamba_d_head=16, num_local_experts=4, intermediate_size=32, shared_intermediate_size=32),
    "gemma3": FAMILIES["gemma3_text"] | SIZES | dict(head_dim=16, sliding_window_pattern=2),
    "glm": FAMILIES["glm4_moe"] | SIZES | dict(moe_intermediate_size=32),
    "mistral4": FAMILIES["mistral4"] | SIZES | dict(num_key_value_heads=8, moe_intermediate_size=32),
    "hy3": FAMILIES["hy_v3"] | SIZES | dict(moe_intermediate_size=32, num_experts=8),
    "minimax": FAMILIES["minimax_m2"] | SIZES | dict(intermediate_size=32, num_local_experts=8),
    "olmo3": FAMILIES["olmo3"] | SIZES,
    "ministral3": FAMILIES["ministral3"] | SIZES,
    "seed-oss": FAMILIES["seed_oss"] | SIZES,
}  # fmt: skip
# Fewer key/value heads than ranks.
MODELS["one-head"] = MODELS["qwen2"] | dict(num_key_value_heads=1)
MODELS["olmo3-few"] = MODELS["olmo3"] | dict(num_key_value_heads=2)
MODELS["gpt_oss-few"] = MODELS["gpt_oss"] | dict(num_key_value_heads=2)
MODELS["gemma3-one-head"] = MODELS["gemma3"] | dict(num_key_value_heads=1)
# Blocks of 32 numbers.
MODELS["wide"] = MODELS["qwen3"] | dict(intermediate_size=128)
MODELS["wide-latent"] = MODELS["deepseek"] | dict(
    q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    moe_intermediate_size=32,
)  # fmt: skip
MODELS["wide-moe"] = MODELS["moe"] | dict(intermediate_size=128)
# Multi-token prediction, of two modules or of one.
MODELS["gpt2-deep"] = MODELS["gpt2"] | dict(n_layer=4)
MODELS["moe-deep"] = MODELS["moe"] | dict(num_hidden_layers=4)
MODELS["deepseek-mtp"] = MODELS["deepseek"] | dict(num_nextn_predict_layers=2)
MODELS["glm-few-mtp"] = MODELS["glm"] | dict(num_key_value_heads=1, num_nextn_predict_layers=2)
MODELS["delta-mtp"] = MODELS["delta"] | dict(mtp_num_hidden_layers=1)
# --grad-clip. Here it ends during a run, as norms fall below it; elsewhere all norms are above 0.3.
CLIPS = {"gpt2": 0.8, "gpt2-deep": 0.8, "deep": 1.15, "gpt_oss": 0.93, "gpt_oss-few": 1.08}
CLIPS["lopsided"] = 0.7


@dataclasses.dataclass(frozen=True)
class Case:
    """Ranks, a model, and the flags of a layout; `mutant` as tests.dist_worker.Job has it."""

    ranks: int
    model: str
    flags: str
    mutant: str = ""
    resumes: str = ""  # the case from whose checkpoint this one goes on
    first: int = 0  # the step of that checkpoint
    ddp: bool = False

    @property
    def steps(self) -> int:
        """Of a mutant, and where roundings differ, only the first gradients are judged."""
        return 2 if self.mutant or self.rough else STEPS

    @property
    def rough(self) -> float:
        """Where a rounding may go the other way, the limit of the first gradients; else 0."""
        return 1e-2 if "--amp bf16" in self.flags else 3e-2 * ("--use-fp8" in self.flags)

    def size(self, flag: str, default: int = 1) -> int:
        words = self.flags.split()
        return int(words[words.index(flag) + 1]) if flag in words else default

    @property
    def script(self) -> str:
        if self.ranks == 1 or self.ddp:
            return "train_ddp.py" if self.ddp else "train.py"
        return "train_pp.py" if "--pp" in self.flags.split() else "train_fsdp.py"


PACK = "--pack --pack-lengths 9,0.8"
LORA = "--lora-rank 4 --lora-alpha 64"
MTP = "--mtp 0.5"
BALANCED_ROUTE = "--route balanced"
MUON, EIGHT = "--optimizer muon", "--optimizer adamw8bit"
BF16 = "--amp bf16 --bf16-weights master"
FP8 = {
    recipe: f"--use-fp8 --fp8-emulate --fp8-recipe {recipe} --fp8-backend torchao"
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "nvfp4")
}
CASES = {
    "ddp2": Case(2, "gpt2", "", ddp=True),
    "tp2": Case(2, "qwen3", "--tp 2"),
    "tp2-biases": Case(2, "gpt2", "--tp 2 --sac-freq 1/1"),
    "tp4": Case(4, "qwen3", "--tp 4 --sac-freq 1/2 --sac-policy op"),
    "cp2": Case(2, "llama", "--cp 2 --sac-freq 1/1"),
    "cp4": Case(4, "mistral", "--cp 4 --tp 1"),
    "cp4-gather": Case(4, "qwen2", "--cp 4"),
    "tp2-moe": Case(2, "moe", "--tp 2 --sac-freq 1/1"),
    "ep2": Case(2, "moe", "--ep 2"),
    "ep2-deepseek": Case(2, "deepseek", "--ep 2 --sac-freq 1/1"),
    "ep4": Case(4, "moe", "--ep 4 --sac-freq 1/1"),
    "tp2-ep2-balanced-deepseek": Case(
        4, "deepseek", f"--tp 2 --ep 2 --sac-freq 1/1 {BALANCED_ROUTE}"
    ),
    "ep2-idle": Case(2, "lopsided", "--ep 2"),
    "ep4-gpt-oss": Case(4, "gpt_oss", "--ep 4 --sac-freq 1/1"),
    "dp2-tp2": Case(4, "qwen3", "--tp 2 --sac-freq 1/1"),
    "dp2-cp2-window": Case(4, "mistral", "--cp 2 --sac-freq 1/1"),
    "tp2-cp2": Case(4, "qwen3", "--tp 2 --cp 2"),
    "tp2-cp2-gpt-oss": Case(4, "gpt_oss", "--tp 2 --cp 2 --ep 2"),
    "tp2-cp2-deepseek": Case(4, "deepseek", "--tp 2 --cp 2 --ep 4 --sac-freq 1/1"),
    "dp2-ep2-accumulate": Case(2, "moe", "--ep 2 --bsz 2 --grad-acc-steps 2"),
    # Room for all rows, and for too few.
    "dp2-ep2-capacity": Case(2, "moe", "--ep 2 --bsz 2 --grad-acc-steps 2 --ep-capacity 2"),
    "ep2-capacity-deepseek": Case(2, "deepseek", "--ep 2 --sac-freq 1/1 --ep-capacity 1.5"),
    "hsdp2-tp2-ep4-capacity": Case(
        8, "deepseek", "--dp-replicate 2 --tp 2 --ep 4 --sac-freq 1/1 --ep-capacity 4"
    ),
    "ep2-overflow": Case(2, "moe", "--ep 2 --sac-freq 1/1 --sac-policy op --ep-capacity 1"),
    "ep4-overflow-gpt-oss": Case(4, "gpt_oss", "--ep 4 --ep-capacity 1.2"),
    "ep2-overflow-fp8": Case(2, "moe", f"--ep 2 --ep-capacity 1 {FP8['rowwise']}"),
    "ep2-capacity-compiled": Case(2, "moe", "--ep 2 --pt-compile --ep-capacity 2"),
    "pp2-cp2-overflow": Case(
        4, "deepseek", "--pp 2 --cp 2 --ep 2 --grad-acc-steps 4 --sac-freq 1/2 --ep-capacity 1"
    ),
    "dp2-fused": Case(2, "gpt2", "--fused-backward"),
    "dp2-fused-compiled": Case(2, "gpt2", "--fused-backward --pt-compile --sac-freq 1/2"),
    "cp2-fused": Case(2, "llama", "--cp 2 --fused-backward"),
    "pp2-fused": Case(2, "gpt2", "--pp 2 --grad-acc-steps 2 --fused-backward"),
    "dp2-onednn": Case(2, "qwen3", "--linear onednn"),
    "tp2-reduce-last": Case(4, "qwen3", "--tp 2 --grad-acc-steps 2 --reduce-last"),
    "hsdp2x2-ep2-reduce-last": Case(
        4, "moe", "--dp-replicate 2 --ep 2 --grad-acc-steps 2 --reduce-last --sac-freq 1/1"
    ),
    "hsdp2x2-tp2": Case(8, "qwen3", "--dp-replicate 2 --tp 2"),
    "tp2-compiled": Case(2, "qwen3", "--tp 2 --pt-compile"),
    "cp2-compiled-op": Case(2, "llama", "--cp 2 --pt-compile --sac-freq 1/1 --sac-policy op"),
    "ep2-compiled": Case(2, "moe", "--ep 2 --pt-compile"),
    "dp2-deepseek": Case(2, "deepseek", ""),
    "dp4-few": Case(4, "few", ""),
    "dp4-few-bf16": Case(4, "few", "--amp bf16 --reduce-dtype bf16"),
    "dp4-few-biases": Case(4, "few-biases", "--sac-freq 1/1"),
    "ep2-few": Case(4, "few", "--ep 2"),
    "tp2-few": Case(4, "few", "--tp 2 --sac-freq 1/1"),
    "hsdp2x2-ep2-few": Case(8, "few", "--dp-replicate 2 --ep 2"),
    "pp2-few": Case(8, "few", "--pp 2 --bsz 1 --grad-acc-steps 2"),
    "ep2-deepseek-bf16": Case(2, "deepseek", "--ep 2 --amp bf16"),
    "pp2": Case(2, "qwen3", "--pp 2"),
    "pp2-tied": Case(2, "gpt2", "--pp 2 --grad-acc-steps 2"),
    "pp4": Case(4, "deep", "--pp 4 --sac-freq 1/1"),
    "pp2-interleaved": Case(2, "deep", "--pp 2 --pp-virtual 2"),
    "pp2-zbv": Case(2, "deep", f"--pp 2 --pp-schedule zbv {PACK}"),
    "pp2-zbv-dp2": Case(4, "gpt2-deep", "--pp 2 --pp-schedule zbv"),
    "pp2-zbv-hsdp2-fused": Case(
        4,
        "gpt2-deep",
        "--pp 2 --pp-schedule zbv --dp-replicate 2 --grad-acc-steps 2 --fused-backward",
    ),
    "pp2-zbv-ep2": Case(4, "moe-deep", "--pp 2 --pp-schedule zbv --ep 2"),
    "pp2-dp2": Case(4, "gpt2", "--pp 2 --sac-freq 1/1"),
    "pp2-hsdp2": Case(4, "gpt2", "--pp 2 --dp-replicate 2 --grad-acc-steps 2"),
    "pp2-cp2-half": Case(4, "deepseek", "--pp 2 --cp 2 --ep 2 --grad-acc-steps 4 --sac-freq 1/2"),
    "pp2-tp2-dp2-ep4": Case(8, "moe", "--pp 2 --tp 2 --ep 4 --grad-acc-steps 2"),
    "pp2-hsdp2x2": Case(8, "deep", "--pp 2 --pp-virtual 2 --dp-replicate 2 --grad-acc-steps 2"),
    "tp4-qwen2": Case(4, "qwen2", "--tp 4"),
    "tp2-op-one-head": Case(2, "one-head", "--tp 2 --sac-freq 1/1 --sac-policy op"),
    "tp2-cp2-gather-one-head": Case(4, "one-head", f"--tp 2 --cp 2 {PACK} --sac-freq 1/1"),
    "dp2-tp2-one-head": Case(4, "one-head", "--tp 2 --bsz 2 --grad-acc-steps 2 --sac-freq 1/1"),
    "hsdp2-tp2-one-head": Case(4, "one-head", "--tp 2 --dp-replicate 2"),
    "tp2-olmo3": Case(2, "olmo3", "--tp 2"),
    "tp2-cp2-olmo3": Case(4, "olmo3", "--tp 2 --cp 2 --sac-freq 1/1"),
    "tp4-olmo3-few": Case(4, "olmo3-few", "--tp 4 --sac-freq 1/1"),
    "dp2-op-deepseek": Case(2, "deepseek", "--sac-freq 1/1 --sac-policy op"),
    "ep2-op": Case(2, "moe", "--ep 2 --sac-freq 1/1 --sac-policy op"),
    "tp2-ep4-op": Case(4, "moe", "--tp 2 --ep 4 --sac-freq 1/1 --sac-policy op"),
    "tp2-op-deepseek": Case(4, "deepseek", "--tp 2 --ep 2 --sac-freq 1/1 --sac-policy op"),
    "pp3-layers": Case(3, "deep", "--pp 3 --pp-layers 2 1 1 --grad-acc-steps 8 --bsz 1"),
    "pp3-tp2": Case(6, "deep", "--pp 3 --pp-layers 1 2 1 --tp 2 --grad-acc-steps 4 --bsz 2"),
    "tp2-packed": Case(2, "qwen3", f"--tp 2 {PACK}"),
    "cp2-packed": Case(2, "llama", f"--cp 2 {PACK} --sac-freq 1/1"),
    "cp4-gather-packed": Case(4, "qwen2", f"--cp 4 {PACK}"),
    "cp2-gather-packed-compiled": Case(2, "one-head", f"--cp 2 --pt-compile {PACK}"),
    "tp2-cp2-gather-packed-gpt-oss": Case(4, "gpt_oss-few", f"--tp 2 --cp 2 {PACK}"),
    "dp2-packed-accumulate": Case(2, "gpt2", f"--bsz 2 --grad-acc-steps 2 {PACK}"),
    "pp2-packed-interleaved": Case(2, "deep", f"--pp 2 --pp-virtual 2 {PACK}"),
    "pp2-cp4-packed": Case(8, "gpt2", f"--pp 2 --cp 4 --grad-acc-steps 2 {PACK}"),
    "tp2-delta": Case(2, "delta", "--tp 2"),
    "tp2-cp2-delta": Case(4, "delta", f"--tp 2 --cp 2 --ep 4 {PACK}"),
    "cp4-delta": Case(4, "delta", "--cp 4 --sac-freq 1/1"),
    "pp2-delta-compiled": Case(2, "delta", "--pp 2 --pt-compile"),
    "tp2-mamba": Case(2, "mamba", "--tp 2 --sac-freq 1/1"),
    "tp2-cp2-mamba": Case(4, "mamba", "--tp 2 --cp 2 --ep 2 --sac-freq 1/1"),
    "dp2-mamba-compiled": Case(2, "mamba", "--ep 2 --pt-compile"),
    "pp2-mamba": Case(4, "mamba", f"--pp 2 --ep 2 {PACK}"),
    "cp4-granite": Case(4, "granite", f"--cp 4 {PACK}"),
    "ep2-granite": Case(2, "granite", "--ep 2 --sac-freq 1/2"),
    "tp2-cp2-gemma3": Case(4, "gemma3", f"--tp 2 --cp 2 --sac-freq 1/1 {PACK}"),
    "cp2-gather-gemma3": Case(2, "gemma3-one-head", "--cp 2"),
    "tp2-ep4-glm": Case(4, "glm", "--tp 2 --ep 4 --sac-freq 1/1"),
    "tp2-cp2-mistral4": Case(4, "mistral4", f"--tp 2 --cp 2 --ep 4 {PACK}"),
    "tp2-ep2-hy3": Case(4, "hy3", "--tp 2 --ep 2 --sac-freq 1/1"),
    "cp2-ep2-minimax": Case(2, "minimax", "--cp 2 --ep 2"),
    "cp4-gather-olmo3": Case(4, "olmo3-few", f"--cp 4 {PACK}"),
    "tp2-ministral3": Case(2, "ministral3", "--tp 2 --sac-freq 1/1"),
    "pp2-seed-oss": Case(2, "seed-oss", "--pp 2"),
    "dp2-lora": Case(2, "qwen3", f"{LORA} --sac-freq 1/1"),
    "hsdp2x2-lora": Case(4, "qwen3", f"--dp-replicate 2 {LORA}"),
    "cp2-lora-compiled": Case(2, "qwen3", f"--cp 2 --pt-compile {LORA}"),
    "cp2-lora": Case(2, "qwen3", f"--cp 2 {LORA}"),
    "dp2-mtp": Case(2, "deepseek-mtp", f"{MTP} --bsz 2 --grad-acc-steps 2"),
    "tp2-cp2-mtp": Case(4, "deepseek-mtp", f"--tp 2 --cp 2 --ep 4 --sac-freq 1/1 {MTP}"),
    "cp2-gather-mtp-packed": Case(2, "glm-few-mtp", f"--cp 2 {MTP} {PACK}"),
    "tp2-delta-mtp": Case(2, "delta-mtp", f"--tp 2 --ep 2 {MTP}"),
    "dp2-mtp-compiled": Case(2, "glm-few-mtp", f"--pt-compile {MTP}"),
    "dp2-bf16-weights": Case(2, "qwen3", BF16),
    "hsdp2x2-bf16-weights": Case(4, "deepseek", f"--dp-replicate 2 {BF16} --grad-acc-steps 2"),
    "dp2-bf16-weights-compiled": Case(2, "qwen3", f"{BF16} --pt-compile"),
    "dp2-offload": Case(2, "qwen3", "--offload-activations"),
    "dp2-offload-compiled": Case(2, "gpt2", "--offload-activations --pt-compile"),
    "tp2-cp2-offload-sac": Case(
        4, "moe", "--tp 2 --cp 2 --ep 4 --offload-activations --sac-freq 1/1"
    ),
    "pp2-offload": Case(2, "qwen3", "--pp 2 --offload-activations"),
    "tp2-fp8": Case(2, "qwen3", f"--tp 2 {FP8['tensorwise']}"),
    "cp2-fp8": Case(2, "qwen3", f"--cp 2 --sac-freq 1/1 {FP8['tensorwise']}"),
    "tp2-cp2-fp8": Case(4, "qwen3", f"--tp 2 --cp 2 {FP8['tensorwise']}"),
    "tp2-cp2-fp8-op": Case(
        4, "qwen3", f"--tp 2 --cp 2 --sac-freq 1/1 --sac-policy op {FP8['tensorwise']}"
    ),
    "pp2-tp2-fp8": Case(4, "deep", f"--pp 2 --tp 2 {FP8['tensorwise']}"),
    "tp2-fp8-rows": Case(2, "qwen3", f"--tp 2 {FP8['rowwise']}"),
    "dp2-tp2-fp8-rows": Case(4, "qwen3", f"--tp 2 --sac-freq 1/1 {FP8['rowwise']}"),
    "hsdp2-cp2-fp8-rows": Case(4, "llama", f"--dp-replicate 2 --cp 2 {FP8['rowwise']}"),
    "tp2-cp2-fp8-gw": Case(4, "qwen3", f"--tp 2 --cp 2 {FP8['rowwise_with_gw_hp']}"),
    "pp2-fp8-gw": Case(2, "deep", f"--pp 2 {FP8['rowwise_with_gw_hp']}"),
    "ep2-fp8": Case(2, "moe", f"--ep 2 {FP8['rowwise']}"),
    "tp2-ep2-fp8": Case(2, "moe", f"--tp 2 --ep 2 --sac-freq 1/1 {FP8['tensorwise']}"),
    "tp2-cp2-fp8-latent": Case(4, "wide-latent", f"--tp 2 --cp 2 --ep 4 {FP8['rowwise']}"),
    "tp2-fp8-latent": Case(2, "wide-latent", f"--tp 2 --ep 2 {FP8['tensorwise']}"),
    "pp2-ep2-fp8": Case(4, "moe", f"--pp 2 --ep 2 --grad-acc-steps 2 {FP8['rowwise']}"),
    "tp2-fp8-compiled": Case(2, "qwen3", f"--tp 2 --pt-compile {FP8['tensorwise']}"),
    "tp2-mxfp8": Case(2, "wide", f"--tp 2 {FP8['mxfp8']}"),
    "dp2-tp2-mxfp8": Case(4, "wide", f"--tp 2 --sac-freq 1/1 {FP8['mxfp8']}"),
    "ep2-mxfp8": Case(2, "wide-moe", f"--ep 2 {FP8['mxfp8']}"),
    "dp2-adamw8bit": Case(2, "qwen3", EIGHT),
    "tp2-ep4-adamw8bit": Case(4, "moe", f"--tp 2 --ep 4 {EIGHT}"),
    "dp2-muon": Case(2, "qwen3", MUON),
    "tp2-muon": Case(2, "qwen3", f"--tp 2 {MUON}"),
    "dp2-tp2-muon": Case(4, "one-head", f"--tp 2 {MUON}"),
    "hsdp2-tp2-muon": Case(4, "gpt2", f"--dp-replicate 2 --tp 2 {MUON}"),
    "tp2-ep4-muon": Case(4, "moe", f"--tp 2 --ep 4 {MUON}"),
    "dp4-few-muon": Case(4, "few", MUON),
    "tp2-cp2-muon-deepseek": Case(4, "deepseek", f"--tp 2 --cp 2 --ep 4 {MUON}"),
    "pp2-zbv-muon-tied": Case(2, "gpt2-deep", f"--pp 2 --pp-schedule zbv {MUON}"),
    "pp2-dp2-muon": Case(4, "gpt2", f"--pp 2 {MUON}"),
    "dp2-muon-mamba": Case(2, "mamba", MUON),
    "tp2-muon-delta": Case(2, "delta", f"--tp 2 {MUON}"),
    "pp2-compiled": Case(2, "qwen3", "--pp 2 --pt-compile --sac-freq 1/1 --sac-policy op"),
}
# Cases of few ranks run a second time with all blocks recomputed, but for these, of which other tests or
# cases have both.
ALONE = (
    "--sac-freq zbv --use-fp8 --optimizer --route --pt-compile --pack --lora-rank --mtp "
    "--offload-activations --bf16-weights --fused-backward"
).split()
CASES |= {
    f"{name}-sac": dataclasses.replace(case, flags=f"{case.flags} --sac-freq 1/1")
    for name, case in CASES.items()
    if case.ranks < 4 and not any(word in case.flags for word in ALONE)
}
SAVE = "--save-every 1 --save-keep 99"
# Each saves, and goes on from what another saved: ranks, model, flags, from where, from which step.
CHECKPOINTS = {
    "tp2-save": (2, "moe", "--tp 2"),
    "cp2-resume-tp2": (2, "moe", "--cp 2", "tp2-save", 1),
    "ep2-resume-cp2": (2, "moe", "--ep 2", "cp2-resume-tp2", 2),
    "dp2-resume-ep2": (2, "moe", "", "ep2-resume-cp2", 3),
    "tp2-resume-dp2": (2, "moe", "--tp 2", "dp2-resume-ep2", 4),
    "mixed-resume-dp2": (4, "moe", "--tp 2 --cp 2 --ep 4", "dp2-resume-ep2", 4),
    "hsdp-resume-mixed": (4, "moe", "--dp-replicate 2 --tp 2", "mixed-resume-dp2", 5),
    "one-resume-mixed": (1, "moe", "", "mixed-resume-dp2", 5),
    "deepseek-save": (2, "deepseek", "--tp 2 --ep 2"),
    "deepseek-resume": (4, "deepseek", "--cp 2 --ep 4", "deepseek-save", 3),
    "pp-resume-ep2": (4, "moe", "--pp 2 --bsz 2 --grad-acc-steps 2", "ep2-resume-cp2", 3),
    "tp2-resume-pp": (2, "moe", "--tp 2", "pp-resume-ep2", 4),
    "cp2-resume-pp": (2, "moe", "--cp 2", "pp-resume-ep2", 4),
    "ep2-resume-pp": (2, "moe", "--ep 2", "pp-resume-ep2", 4),
    "one-resume-pp": (1, "moe", "", "pp-resume-ep2", 5),
    "muon-save": (4, "moe", f"--tp 2 --ep 2 {MUON}"),
    "muon-resume": (2, "moe", MUON, "muon-save", 2),
    "few-save": (4, "few", ""),
    "few-resume": (2, "few", "", "few-save", 1),
    "few-resume-ep2": (4, "few", "--ep 2", "few-resume", 2),
    "few-resume-again": (4, "few", "", "few-resume-ep2", 3),
    "few-resume-one": (1, "few", "", "few-resume-ep2", 4),
    "zbv-save-tied": (4, "gpt2-deep", "--pp 2 --pp-schedule zbv"),
    "dp2-resume-zbv": (2, "gpt2-deep", "--tp 2", "zbv-save-tied", 2),
    "zbv-resume": (4, "gpt2-deep", "--pp 2 --pp-schedule zbv", "dp2-resume-zbv", 4),
    "pp-save-tied": (2, "gpt2", "--pp 2"),
    "dp2-resume-tied": (2, "gpt2", "--tp 2", "pp-save-tied", 2),
    "pp-resume-tied": (4, "gpt2", "--pp 2", "dp2-resume-tied", 4),
}
CASES |= {
    name: Case(ranks, model, f"{flags} {SAVE}", "", *where)
    for name, (ranks, model, flags, *where) in CHECKPOINTS.items()
}
MUTANTS = {
    "mutant-divided": Case(2, "moe", "--ep 2", mutant="gradients are averaged"),
    "mutant-fused": Case(2, "qwen3", "--tp 2", mutant="fused weights are cut unordered"),
    "mutant-norms": Case(2, "qwen3", "--tp 2", mutant="norms' gradients stay partial"),
    "mutant-tied": Case(2, "gpt2", "--pp 2", mutant="a tied head's gradients stay apart"),
    "mutant-crosses": Case(2, "qwen3", f"--cp 2 {PACK}", mutant="documents see each other"),
    "mutant-scales": Case(
        2, "qwen3", f"--tp 2 {FP8['tensorwise']}", mutant="scales are of a rank's part"
    ),
    "mutant-capacity": Case(
        2, "moe", "--ep 2 --ep-capacity 1", mutant="rows that do not fit are lost"
    ),
    "mutant-tie": Case(2, "moe", "--cp 2 --sac-freq 1/1", mutant="recomputation routes otherwise"),
}
CASES |= MUTANTS
GLOBAL = 8  # samples of a step
SHORT = (
    "tp2-biases cp2 hsdp2x2-ep2-reduce-last dp2-deepseek ep2-deepseek-bf16 tp2-cp2-gpt-oss "
    "dp2-ep2-accumulate dp2-ep2-capacity pp2-cp2-overflow pp2-fused "
    "cp4-gather-packed pp2-packed-interleaved ep2-idle pp2-hsdp2 pp2-cp2-half "
    "cp2-gather-mtp-packed mutant-divided mutant-tied mutant-tie mutant-crosses mutant-capacity "
    "tp2-save cp2-resume-tp2 ep2-resume-cp2 pp-save-tied dp2-resume-tied "
    "few-save few-resume few-resume-ep2 "
    "tp2-cp2-fp8-op pp2-ep2-fp8 tp2-ep2-balanced-deepseek tp2-op-one-head tp2-olmo3 ep2-op pp3-layers "
    "pp2-zbv muon-save muon-resume mutant-scales"
).split()

# For three minutes of one GPU: each kind of layout, a checkpoint for another layout, two mutants.
ON_GPU = (
    "ddp2 dp2-deepseek tp2 cp2 ep2 pp2 dp2-tp2 tp2-cp2 pp2-dp2 hsdp2x2-ep2-reduce-last ep4 "
    "tp2-save cp2-resume-tp2 mutant-divided mutant-tied"
).split()


def flags_of(case: Case, out: Path) -> list[str]:
    """The command line of a case; its batch makes the same global batch as one device's."""
    path, words = out / f"{case.model}.json", case.flags.split()
    path.write_text(json.dumps(MODELS[case.model]))
    words += ["--grad-clip", str(CLIPS.get(case.model, 0.3)), "--no-observe"]  # it would be counted
    if not (case.mutant or case.rough or case.resumes or "--save-every" in words):
        val, size = out / f"{case.model}.bin", MODELS[case.model]["vocab_size"]
        write_tokens(val, [np.random.default_rng(0).integers(0, size, GLOBAL * 32 + 1)], size)
        np.save(index_path(val), [*range(11, GLOBAL * 32, 11), GLOBAL * 32 + 1])
        words += ["--val-data", str(val)]
    if "--bsz" not in words:
        pp = case.size("--pp")
        micro = case.size("--grad-acc-steps", 2 * pp if pp > 1 else 1)
        data = case.ranks // (case.size("--tp") * case.size("--cp") * pp)
        words += ["--bsz", str(GLOBAL // data // micro)]
    if case.resumes:
        words += ["--resume", str(checkpoint(case, out))]
    return [str(path), *COMMON, "--n-steps", str(case.steps - 1), *words]


def checkpoint(case: Case, out: Path) -> Path:
    return out / case.resumes / f"checkpoints/step-{case.first:08}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """One device's run of a model, with which cases are compared."""

    model: str
    accumulation: int
    more: str = ""

    @property
    def name(self) -> str:
        """Of its directory, which has the tensors beside the steps."""
        return f"{self.model}-{self.accumulation}{self.more.replace(' ', '')}"

    def job(self, out: Path) -> Job:
        flags = (
            f"--bsz {GLOBAL // self.accumulation} --grad-acc-steps {self.accumulation}{self.more}"
        )
        alone = Case(1, self.model, flags)
        return Job(self.name, alone.script, flags_of(alone, out))


def reference_of(case: Case) -> Reference:
    """The run that a case is compared with."""
    pp = case.size("--pp")
    micro = case.size("--grad-acc-steps", 2 * pp if pp > 1 else 1)
    low = "--use-fp8" in case.flags  # scales are of one micro batch, and so is a balance loss
    micro = micro if low or MODELS[case.model].get("output_router_logits") else 1
    kinds = (BF16 if BF16 in case.flags else "--amp bf16", PACK, LORA, MTP, MUON, EIGHT)
    kinds += BALANCED_ROUTE, *FP8.values()
    more = "".join(f" {flags}" for flags in kinds if flags in case.flags)
    return Reference(case.model, micro, more)


def turn(name: str) -> tuple[int, int]:
    """When a case runs: after those from whose checkpoint it goes on, and by its number of ranks."""
    case = CASES[name]
    if not case.resumes:
        return 0, case.ranks
    wave, ranks = turn(case.resumes)
    return wave + (ranks > case.ranks), case.ranks


def run_cases(names: list[str], out: Path) -> None:
    """All cases, by few forks of ranks; their directories lie in `out`."""
    jobs = []
    for name in sorted((name for name in CASES if name in names), key=turn):
        case, flags = CASES[name], flags_of(CASES[name], out)
        traced = "--pt-compile" in case.flags
        jobs.append(Job(name, case.script, flags, case.ranks, traced, case.mutant))
    for i in range(0, len(jobs), 12):  # ranks slow down from job to job
        run_jobs(jobs[i : i + 12], out, gradients=True)
    alone = dict.fromkeys(reference_of(CASES[name]) for name in names)
    run_jobs([each.job(out) for each in alone], out, gradients=True)


# The largest differences from one device; norms and gradients are relative. Of a mutant, and under bf16
# (where roundings differ), only gradients of the first step are held to one device's.
LIMITS = dict(loss=1e-5, valid=1e-5, norm=5e-6, later=3e-5, gradient=1e-5, at_end=2e-4)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a case is from one device, by the columns of LIMITS, and in which gradient most."""

    numbers: dict[str, float]
    worst: str
    traffic: dict[str, tuple[int, float]]
    """Bytes a step by the formula and as handed to collectives, by kind, where they differ."""
    limits: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether all are within the tolerances promised."""
        return not self.traffic and all(self.numbers[k] < most for k, most in self.limits.items())

    def __str__(self) -> str:
        numbers = " ".join(f"{n:8.1e}" for n in self.numbers.values())
        return f"{numbers}  {self.worst}" + f"  traffic {self.traffic}" * bool(self.traffic)


def compare(name: str, out: Path) -> Difference:
    """A finished case against one device."""
    case = CASES[name]
    alone, here = out / reference_of(case).name, out / name
    steps = [steps_of(directory) for directory in (alone, here)]
    first = case.first
    clipped = [step["grad_norm"] > CLIPS.get(case.model, 0.3) for step in steps[0]]
    loose = case.rough or MUON in case.flags  # two steps, and another course
    ends = case.model in CLIPS
    assert clipped[0] and (loose or all(clipped) != ends), "clipping is not as meant"
    steps[0] = steps[0][first : case.steps]
    assert len(steps[0]) == len(steps[1]) == case.steps - first
    loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(*steps, strict=True))
    norms = [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(*steps, strict=True)]
    kinds = ("gradients", "parameters")
    gradients, parameters = (
        [load_file(where / f"{kind}.safetensors") for where in (alone, here)] for kind in kinds
    )
    for tensors in (gradients, parameters)[case.first > 0 :]:
        assert tensors[0].keys() == tensors[1].keys()
    if first:  # what was loaded is bit for bit what was saved, and there is no first step
        saved, begin = whole_state(checkpoint(case, out)), gradients[1]
        assert begin.keys() == {key for key in saved if not key.startswith("step/")}
        assert all(torch.equal(value, saved[key]) for key, value in begin.items()), name
        gradients = [parameters[0]] * 2
    worst = {
        key: ((gradients[1][key] - value).norm() / value.norm().clamp(min=1e-12)).item()
        for key, value in gradients[0].items()
    }
    most = max(worst, key=worst.get)
    last = max((parameters[1][k] - v).abs().max().item() for k, v in parameters[0].items())
    results = [result_of(where) for where in (alone, here)]
    expected, metrics = (result["metrics"] for result in results)
    in_fp8 = [(result["fp8"] or {}).get("n_parameters") for result in results]
    assert in_fp8[0] == in_fp8[1] and bool(in_fp8[0]) == ("--use-fp8" in case.flags)
    both = ["val_loss_before", "val_loss"] if "--val-data" in flags_of(case, out) else []
    validation = max((abs(metrics[key] - expected[key]) for key in both), default=0.0)
    facts = facts_of(here)
    if "moe" in case.model and BALANCED_ROUTE not in case.flags:
        assert 1 < metrics["expert_rows_max_over_mean"] < 8
    # Otherwise a rounding may choose another expert.
    exact = not (first or case.mutant or case.rough or "--optimizer" in case.flags)
    if expected["expert_rows_max_over_mean"] and exact:
        fullest = expected["expert_rows_max_over_mean"]
        assert metrics["expert_rows_max_over_mean"] == pytest.approx(fullest)
    if case.model == "lopsided":
        assert any(facts["idle"]), "every rank got rows"
    traffic = {}
    if "capacity" in case.flags:
        assert bool(metrics["repeated_steps"]) == ("overflow" in name)
    # Nothing is seen of compiled steps, and what ran twice moved more.
    if case.ranks > 1 and "--pt-compile" not in case.flags and not metrics["repeated_steps"]:
        platform = "cpu" if DEVICE == "cpu" else "nvidia"
        work = plan_of(flags_of(case, out), case.script, case.ranks, platform).work
        assert work.fsdp.ulysses == ("gather" not in name)
        kinds = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
        kinds += ["send"] if work.fsdp.pp > 1 else []
        assert all(metrics[f"{k}_bytes"] == traffic_of(work, 0).get(k, 0) for k in kinds)
        for group, moved in enumerate(facts["traffic"]):
            for kind in kinds:
                pair = traffic_of(work, group).get(kind, 0), moved.get(kind, 0) / len(norms)
                # Learned routing sends as many tokens as it will.
                known = work.fsdp.ep == 1 or work.balanced or work.fsdp.ep_capacity
                free = kind == "all_to_all" and not known
                same = pair[1] < 1.6 * pair[0] + 1e4 if free else pair[0] == pair[1]
                traffic |= {} if same else {f"{kind} of {group}": pair}
    numbers = loss, validation, max(norms[:3]), max(norms[3:], default=0.0), worst[most], last
    limits = {"gradient": case.rough or 1e-5} if case.steps == 2 else LIMITS
    if MUON in case.flags:  # momenta are rounded to bf16
        limits = limits | dict(loss=1e-4, valid=1e-4, norm=5e-5, later=3e-4, at_end=2e-3)
    elif EIGHT in case.flags:  # moments to 8 bits
        limits = limits | dict(loss=1e-4, valid=1e-4, norm=5e-4, later=2e-3, at_end=2e-2)
    if DEVICE == "cuda":  # kernels are chosen by size; not measured yet
        limits = {key: 10 * limit for key, limit in limits.items()}
    return Difference(dict(zip(LIMITS, numbers, strict=True)), most, traffic, limits)


def main() -> int:
    names, failed = sys.argv[1:] or list(CASES), []
    names = ON_GPU if names == ["on-gpu"] else names
    if DEVICE == "cuda":
        os.environ.setdefault(SHARE_GPU, "1")
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(ROOT)
        run_cases(names, out := Path(directory))
        print(f"{'layout':20} " + " ".join(f"{name:>8}" for name in LIMITS))
        for name in names:
            difference = compare(name, out)
            wrong = difference.ok == (name in MUTANTS)
            print(f"{name:20} {difference}", "  WRONG" if wrong else "", flush=True)
            failed += [name] if wrong else []
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
