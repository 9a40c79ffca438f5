"""The decoder of all families: embedding, blocks, final norm, head and loss.

GPT-2 and Llama differ in the kind of norm and MLP, in where positions enter and in biases; the
config says which, and one block serves both.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from llm_train_bench.model.block_attention import InBlocks, block_attention
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.experts import MixtureOfExperts
from llm_train_bench.model.layers import (
    MLP,
    Attention,
    LatentAttention,
    LayerNorm,
    Mask,
    RMSNorm,
    Rope,
    autocast_dtype,
    block_mask,
    rope_tables,
)
from llm_train_bench.model.layout import ALONE, Documents, HasWeights, Layout, Positions
from llm_train_bench.model.loss import LinearCrossEntropy, VocabShard, matmul_transposed
from llm_train_bench.model.onednn import onednn_linear, product
from llm_train_bench.model.options import USUAL_OPTIONS, ModelOptions
from llm_train_bench.model.piece_attention import Seen, piece_attention
from llm_train_bench.model.recurrent import RecurrentMixer
from llm_train_bench.model.shapes import LayerSpec
from llm_train_bench.model.weights import Lora, Weight, part_of


def saved_ops(attention: bool) -> set:
    """Operators that are expensive to recompute: matmuls, attention, and collectives.

    `attention` is False where attention has dropout. If kept, it would not draw its random numbers
    again, and operators recomputed after it would draw other ones.
    """
    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    kernels = (
        "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention attention_math"
    )
    ops = {getattr(aten, f"_scaled_dot_product_{kernel}").default for kernel in kernels.split()}
    ops = ops | {torch.ops.higher_order.flex_attention} if attention else set()
    # `max` is for a tensor's one FP8 scale: a pass over the tensor.
    matmuls = "mm addmm bmm baddbmm linear _scaled_mm _grouped_mm max"
    collectives = "reduce_scatter_tensor all_gather_into_tensor all_reduce all_to_all_single"
    ops |= {getattr(aten, name).default for name in matmuls.split()}
    ops |= {block_attention, piece_attention, onednn_linear}
    return ops | {getattr(c10d, name).default for name in collectives.split()}


class Block(nn.Module):
    """Residual block: a token mixer, then an MLP or experts. A layer may have only one of the two."""

    attn: Any
    mlp: Any

    def __init__(self, config: ModelConfig, spec: LayerSpec, balanced: bool, layout: Layout):
        super().__init__()
        mixers = dict(attention=Attention, latent=LatentAttention, recurrent=RecurrentMixer)
        self.attn = self.mlp = None
        if spec.mixer is not None:
            self.attn_norm, self.attn_post_norm = norms_of(config, spec)
            self.attn = mixers[spec.mixer](config, layout)
        if spec.mlp is not None:
            self.mlp_norm, self.mlp_post_norm = norms_of(config, spec)
        if spec.mlp == "dense":
            self.mlp = MLP(config, layout)
        elif spec.mlp == "experts":
            self.mlp = MixtureOfExperts(config, balanced, layout)
        p = config.residual_dropout
        self.dropout = nn.Dropout(p) if p else nn.Identity()  # of 0 it is a copy when compiled
        self.residual_scale = config.residual_scale

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask) -> Tensor:
        """(B, T, d) to (B, T, d), with the rotary tables of T positions."""
        if self.attn is not None:
            x = self.add(x, self.attn_post_norm(self.attn(self.attn_norm(x), rope, mask)))
        if self.mlp is not None:
            x = self.add(x, self.mlp_post_norm(self.mlp(self.mlp_norm(x))))
        return x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual stream and a part's output; a scale of 1 would only move it once more."""
        y = self.dropout(y)
        return x + (y if self.residual_scale == 1 else y * self.residual_scale)


def norms_of(config: ModelConfig, spec: LayerSpec) -> list[nn.Module]:
    """The norms before and after a part of a block; one that the family has not is nn.Identity."""
    places = spec.pre_norm, spec.post_norm
    return [norm_of(config) if has_norm else nn.Identity() for has_norm in places]


def norm_of(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm over the residual stream."""
    if config.rms_norm:
        return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
    return LayerNorm(config.hidden_size, config.norm_eps)


class Transformer(HasWeights):
    """A language model of any family, its parameters not yet initialised.

    Build it under `torch.device("meta")` to allocate nothing; `apply.sharded.materialize` then gives
    it storage and values. `seq_len` bounds the positions of a forward pass. `layers` are those of one
    stage of a pipeline: it has the embedding with the first layer, norm and head with the last, a
    tied head's weight at both ends.
    """

    embed: nn.Embedding
    norm: RMSNorm | LayerNorm

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        options: ModelOptions = USUAL_OPTIONS,
        layout: Layout = ALONE,
        layers: range | None = None,
    ):
        super().__init__()
        self.config, self.seq_len, self.layout = config, seq_len, layout
        self.kernel = options.attention
        d, V = config.hidden_size, config.padded_vocab_size
        # Rows of embedding and head; tp ranks divide them.
        begin, end = part_of(V, layout.tp, layout.tp_rank)
        self.rows = range(begin, end)
        whole = range(config.num_hidden_layers)
        layers = whole if layers is None else layers
        self.first, self.last = whole[0] in layers, whole[-1] in layers
        tied = config.tie_word_embeddings
        embeds = self.first or (self.last and tied)
        learned = self.first and config.learned_positions
        pad = -1 if config.pad_token_id is None else config.pad_token_id
        pad = self.rows.index(pad) if pad in self.rows else None
        # From empty tables: on meta nn.Embedding would import the compiler, to draw no numbers.
        table = functools.partial(nn.Embedding.from_pretrained, freeze=False)
        embed = table(torch.empty(len(self.rows), d), padding_idx=pad) if embeds else None
        self.register_module("embed", embed)
        self.positions = table(torch.empty(config.max_position_embeddings, d)) if learned else None
        # By the number of the layer, which is part of its parameters' names.
        blocks = {str(i): Block(config, config.layers[i], options.balanced, layout) for i in layers}
        self.blocks = nn.ModuleDict(blocks)
        self.register_module("norm", norm_of(config) if self.last else None)
        # A tied head has no parameter: a second name for one tensor would become a second tensor
        # when a meta-device model is given storage.
        heads = self.last and not tied
        self.lm_head = nn.Linear(d, len(self.rows), bias=False) if heads else None
        own_words = max(0, min(config.vocab_size - begin, len(self.rows)))
        largest = part_of(V, layout.tp, 0)[1]
        shard = VocabShard(begin, largest, layout) if layout.tp > 1 else None
        matmul = product if options.onednn else matmul_transposed
        self.loss = LinearCrossEntropy(own_words, options.chunk_elements, matmul, shard)
        self.table = dict(config.weights)
        self.ropes: dict[str, Rope] = {}
        self.masks: dict[tuple[int, int | None], BlockMask] = {}

    def add_adapters(self, lora: Lora) -> None:
        """Note the rows of adapters, whose parameters are there (model/lora.py)."""
        self.lora = lora
        self.table |= {weight.name: weight for weight in lora.weights}

    def replace_rows(self, row_of: Callable[[str], Weight]) -> None:
        """Note the rows of all parameters anew, by their names, after modules were replaced."""
        self.table = {name: row_of(name) for name, _ in self.named_parameters()}

    def weights(self) -> Iterator[tuple[Weight, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            yield self.table[name], parameter

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """(B, T) int64 token ids and labels to the mean loss; without labels to logits.

        Labels below 0 are masked: their loss is 0. Positions begin anew with each of the `documents`,
        and attention does not leave them.

        In a layout of several ranks the logits are of own tokens (B, t). The loss is of all tokens of the
        tp ranks (B, T / cp), and equal on each. A stage after the first takes the residual stream
        (B, t, d); one before the last returns it.
        """
        layout, x = self.layout, tokens
        T = x.shape[1] if self.first else x.shape[1] * layout.tp * layout.cp
        held = layout.positions(T, x.device, documents)
        own, positions, starts = held.local, held.gathered, None
        if documents is not None:
            inside, starts = documents.positions(x.device), documents.starts
            own, positions = inside[:, own], inside[:, positions]
        if self.first:
            x = self.embed_tokens(x[:, held.gathered], own)
        ropes: dict[str | None, Rope | None] = {None: None}
        masks: dict[tuple[str | None, int | None], Mask] = {}
        for name, block in self.blocks.items():
            layer = self.config.layers[int(name)]
            if layer.rope is not None and layer.rope not in ropes:
                ropes[layer.rope] = self.rope_for(layer.rope, positions, x.device)
            kind = layer.mixer, layer.window
            if kind not in masks:
                masks[kind] = self.mask_for(layer, T, held, starts, x.device)
            x = block(x, ropes[layer.rope], masks[kind])
        if not self.last:
            return x
        x = self.norm(x)
        if self.config.logit_scale != 1:
            x = x * self.config.logit_scale
        head = self.embed.weight if self.lm_head is None else self.lm_head.weight
        if labels is None:
            return F.linear(x, head)[..., : self.config.vocab_size]
        # All tp ranks have the loss of all their tokens.
        hidden, labels = layout.gather(x).flatten(0, 1), labels[:, held.gathered].flatten()
        # Labels are masked between documents, and of samples that fill up a validation batch.
        some_masked = documents is not None or not self.training
        return self.loss(hidden, head, labels, masks=some_masked)

    def embed_tokens(self, tokens: Tensor, positions: Tensor | slice) -> Tensor:
        """(B, T) ids to the residual stream (B, t, d), with learned positions and dropout."""
        if self.layout.tp == 1:
            x = self.rows_of(tokens)
        else:  # of all tokens, where they are in this rank's rows
            ids = tokens - self.rows.start
            here = (ids >= 0) & (ids < len(self.rows))
            x = self.rows_of(ids.clamp(0, len(self.rows) - 1)) * here.unsqueeze(-1)
            x = self.layout.scatter(x).contiguous()
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.positions is not None:
            x = x + self.positions.weight[positions]
        if self.config.embedding_dropout:
            x = F.dropout(x, self.config.embedding_dropout, self.training)
        if (dtype := autocast_dtype(x.device)) is not None:
            # The residual stream runs in the low precision too, as it does under FSDP.
            x = x.to(dtype)
        return x

    def rows_of(self, ids: Tensor) -> Tensor:
        """The embedding's rows of that number on this rank."""
        weight = self.embed.weight
        if weight.dtype == torch.float32 or weight.device.type != "cpu":
            return self.embed(ids)
        # FSDP gathered it in low precision; a CPU would sum its gradient so, row by row.
        return F.embedding(ids, weight.float(), self.embed.padding_idx).to(weight.dtype)

    def rope_for(self, kind: str, positions: Tensor | slice, device: torch.device) -> Rope:
        """The rotary tables of these positions; those of all are made at the first call, in fp32."""
        if kind not in self.ropes or self.ropes[kind].cos.device != device:
            tables = rope_tables(self.config, self.seq_len, kind)
            self.ropes[kind] = tables.map(lambda table: table.to(device))
        return self.ropes[kind].map(lambda table: table[positions])

    def mask_for(
        self, layer: LayerSpec, T: int, held: Positions, starts: Tensor | None, device: torch.device
    ) -> Mask:
        """What a layer's mixer sees, and so in which kernel; None for PyTorch's causal attention."""
        if not layer.attends:
            return None if starts is None else Seen(starts=starts.to(device, non_blocking=True))
        window = layer.window if layer.window is None or layer.window < T else None
        sees_all_before = window is None and starts is None and held.host_queries is None
        if sees_all_before and not self.config.sinks:
            return InBlocks() if self.kernel.causal == "blocks" else None
        if self.kernel.masked == "pieces":
            return Seen(window, starts, held.host_queries, held.key_order)
        if starts is not None:
            return block_mask(T, window, starts, device)
        if (T, window) not in self.masks:
            self.masks[T, window] = block_mask(T, window, None, device)
        return self.masks[T, window]
