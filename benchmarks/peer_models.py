"""Models of other trainers with our weights, for benchmarks/peers.py and on_gpu.py.

The real packages: transformers, with Liger too, litgpt, torchtitan, and nanoGPT from a checkout.
torchtitan needs torch 2.13.
"""

# pyright: reportMissingImports=false

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule
from transformers.models.llama import modeling_llama as llama

from llm_train_bench.model.config import ModelConfig, load_config

PLAIN = dict(vars(llama))  # Liger exchanges functions and classes of all models
Loss = Callable[[Callable[..., Any], Tensor, Tensor], Tensor]


class Contestant(NamedTuple):
    """A peer's model, and how its users run it."""

    module: nn.Module
    loss: Loss
    """Of the module or what `compile` made of it, inputs and labels (B, T) to the mean loss."""
    compile: Callable[[nn.Module], Callable[..., Any]] = torch.compile
    sharded: bool = False
    """It casts its parameters when it gathers them: no autocast, no DDP."""


def peers_of(family: str, nanogpt: str | None, gpu: bool) -> list[str]:
    """The peers that train a family, `gpt2` or `llama`, and are there; nanogpt with its checkout."""
    has = importlib.util.find_spec
    if family == "gpt2":
        return ["transformers"] + [f"nanogpt={nanogpt}"] * bool(nanogpt)
    names = ["transformers"] + ["liger"] * bool(gpu and has("liger_kernel"))
    names += ["litgpt"] * bool(has("litgpt"))
    return names + ["torchtitan"] * bool(has("torchtitan") and torch.__version__ >= "2.13")


def load(
    peer: str, directory: Path, T: int, device: torch.device, compiled: bool, amp: str
) -> Contestant:
    """A peer of `peers_of` with the weights of a Hugging Face checkpoint."""
    c, weights = load_config(directory / "config.json"), load_file(directory / "model.safetensors")
    kind, _, checkout = peer.partition("=")
    if kind == "nanogpt":
        model = build_nanogpt(c, checkout, device)
        layers = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # theirs are transposed
        theirs = {n: w.t() if n.endswith(layers) else w for n, w in weights.items()}
        model.load_state_dict(theirs | {"lm_head.weight": theirs["transformer.wte.weight"]})
        set_gelu(model, "tanh")
        return Contestant(model, lambda m, x, y: m(x, y)[1])
    if kind == "litgpt":
        from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

        (model, loss), theirs = build_litgpt(c, T, device), {}
        copy_weights_hf_llama(model.config, {}, theirs, weights)
        model.load_state_dict(theirs)
        return Contestant(model, loss)
    if kind == "torchtitan":
        return load_torchtitan(c, weights, T, device, compiled, amp)
    llama.__dict__.update(PLAIN)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    model = model.to(device).train()
    if kind == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    more = {"use_cache": False}
    return Contestant(model, lambda m, x, y: m(input_ids=x, labels=x, shift_labels=y, **more).loss)


def build_litgpt(c: ModelConfig, T: int, device: torch.device | str) -> tuple[Any, Loss]:
    """As litgpt/pretrain.py: the model is compiled, the loss is taken of its logits in chunks of 128."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        block_size=T, vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, n_embd=c.hidden_size,
        n_layer=c.num_hidden_layers, n_head=c.num_attention_heads,
        n_query_groups=c.num_key_value_heads, intermediate_size=c.intermediate_size,
        norm_class_name="RMSNorm", norm_eps=c.norm_eps, mlp_class_name="LLaMAMLP",
        parallel_residual=False, bias=False, rotary_percentage=1.0, rope_base=int(c.rope_theta),
    )  # fmt: skip
    with torch.device(device):
        return GPT(config), lambda m, x, y: chunked_cross_entropy(m(x), y)


def load_torchtitan(
    c: ModelConfig, weights: dict, T: int, device: torch.device, compiled: bool, amp: str
) -> Contestant:
    """As torchtitan/trainer.py: FSDP2 on one rank too, blocks compiled, head and loss in chunks."""
    if importlib.util.find_spec("triton") is None:  # kernels for experts, which are imported always
        sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    gpu, d, V = device.type == "cuda", c.hidden_size, c.vocab_size
    if not dist.is_initialized():
        store = {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if gpu else "gloo", **store)
    layers = llama3._build_llama3_layers(
        n_layers=c.num_hidden_layers, dim=d, n_heads=c.num_attention_heads,
        n_kv_heads=c.num_key_value_heads, hidden_dim=c.intermediate_size, attn_backend="flex",
        rope=ComplexRoPE.Config(dim=c.head_dim, max_seq_len=T, theta=c.rope_theta),
    )  # fmt: skip
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = c.norm_eps
        if not gpu:  # FlexAttention has no backward there
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=d, vocab_size=V, layers=layers, norm=RMSNorm.Config(normalized_shape=d, eps=c.norm_eps),
        tok_embeddings=Embedding.Config(num_embeddings=V, embedding_dim=d),
        lm_head=Linear.Config(in_features=d, out_features=V),
    )  # fmt: skip
    with device:
        model: Any = config.build()
    model.load_state_dict(llama3.Llama3StateDictAdapter(config, None).from_hf(weights))
    model._skip_lm_head = True
    world, backend = dist.get_world_size(), "partial_dtensor"
    utils.set_spmd_backend(backend)
    parallel_dims.device_type = device.type
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=world,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=world,
        spmd_backend=backend,
    )
    dims.build_mesh()
    compiling = CompileConfig(enable=compiled)
    llama3.parallelize_llama(
        model, parallel_dims=dims, parallelism=ParallelismConfig(spmd_backend=backend),
        training=TrainingConfig(mixed_precision_param="float32" if amp == "off" else "bfloat16"),
        compile_config=compiling, ac_config=None, dump_folder=".",
    )  # fmt: skip
    for module in model.modules() if not gpu else ():
        if isinstance(module, FSDPModule):  # gloo has no sum of scaled numbers
            module.set_force_sum_reduction_for_comms(True)
    loss = ChunkedLossWrapper.Config().build(compile_config=compiling)
    loss.set_lm_head(model.lm_head)

    def loss_of(module, inputs, labels):
        more = {}
        if gpu:
            positions = torch.arange(T, device=device).expand(len(inputs), T)
            more = {"positions": positions, "attention_masks": model.get_attention_masks(positions)}
        # Gradients are summed over the ranks; the chunks' are computed before this last factor.
        return loss(module(inputs, **more), labels, world * labels.numel())[0] * world

    return Contestant(model, loss_of, lambda module: module, sharded=True)


def build_nanogpt(c: ModelConfig, checkout: str, device: torch.device | str) -> Any:
    """The model of nanoGPT's model.py."""
    spec: Any = importlib.util.spec_from_file_location("nanogpt", Path(checkout) / "model.py")
    nanogpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt)
    config = nanogpt.GPTConfig(
        block_size=c.max_position_embeddings, n_layer=c.num_hidden_layers, n_embd=c.hidden_size,
        n_head=c.num_attention_heads, vocab_size=c.vocab_size, dropout=0.0, bias=True,
    )  # fmt: skip
    with torch.device(device):
        return nanogpt.GPT(config)


def set_gelu(model: nn.Module, approximate: str) -> None:
    """Let all MLPs of nanoGPT have that GELU: GPT-2's is `tanh`, nanoGPT's own `none`."""
    for module in model.modules():
        if hasattr(module, "gelu"):
            module.gelu = nn.GELU(approximate)
