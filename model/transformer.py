"""The decoder of both families: embedding, blocks, final norm, head and loss.

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

from llm_train_bench.model import block_attention, onednn, piece_attention
from llm_train_bench.model.attention_kernel import USUAL_KERNEL, AttentionKernel
from llm_train_bench.model.block_attention import InBlocks
from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.experts import MixtureOfExperts
from llm_train_bench.model.layers import (
    MLP,
    Attention,
    Embedding,
    LatentAttention,
    LayerNorm,
    Mask,
    RMSNorm,
    Rope,
    autocast_dtype,
    block_mask,
    rope_tables,
)
from llm_train_bench.model.layout import ALONE, Documents, HasWeights, Layout, Places
from llm_train_bench.model.loss import LinearCrossEntropy, parted_loss
from llm_train_bench.model.piece_attention import Seen
from llm_train_bench.model.recurrent import RecurrentMixer
from llm_train_bench.model.shares import part_of


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
    ops |= {block_attention.forward, piece_attention.forward, onednn.linear}
    return ops | {getattr(c10d, name).default for name in collectives.split()}


class Block(nn.Module):
    """One residual block: attention, then the MLP, each behind its norm; a few have only one."""

    attn_norm: Any
    attn: Any
    mlp_norm: Any
    mlp: Any

    def __init__(self, config: ModelConfig, layer: int, balanced: bool, layout: Layout):
        super().__init__()
        attention = LatentAttention if config.latent else Attention
        attention = RecurrentMixer if layer in config.recurrent.layers else attention
        mixes, follows = layer not in config.mlp_alone, layer not in config.mixer_alone
        self.attn_norm = norm_of(config) if mixes else None
        self.attn = attention(config, layout) if mixes else None
        self.mlp_norm = norm_of(config) if follows else None
        if config.has_experts(layer):
            self.mlp = MixtureOfExperts(config, balanced, layout)
        else:
            self.mlp = MLP(config, layout) if follows else None
        around = config.norm_around
        self.attn_after, self.mlp_after = (norm_of(config) if around else None for _ in range(2))
        self.dropout, self.scale = config.residual_dropout, config.residual_scale
        self.norm_after, self.rotates = config.norm_after, layer not in config.no_rope_layers
        self.rotates &= not config.learned_positions

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask) -> Tensor:
        """(B, T, d) to (B, T, d), with the rotary tables of T positions."""
        rope = rope if self.rotates else None
        if self.norm_after:
            x = x + self.drop(self.attn_norm(self.attn(x, rope, mask)))
            return x + self.drop(self.mlp_norm(self.mlp(x)))
        if self.attn is not None:
            h = self.attn(self.attn_norm(x), rope, mask)
            x = x + self.drop(h if self.attn_after is None else self.attn_after(h))
        if self.mlp is None:
            return x
        h = self.mlp(self.mlp_norm(x))
        return x + self.drop(h if self.mlp_after is None else self.mlp_after(h))

    def drop(self, x: Tensor) -> Tensor:
        """What is added to the residual stream: after dropout, and times the config's factor."""
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return x if self.scale == 1 else x * self.scale


def norm_of(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm over the residual stream."""
    norm = (RMSNorm if config.rms_norm else LayerNorm)(config.hidden_size, config.norm_eps)
    if isinstance(norm, RMSNorm):
        norm.offset = float(config.norm_offset)
    return norm


class Transformer(HasWeights):
    """A GPT-2 or Llama-family language model, its parameters not yet initialised.

    Build it under `torch.device("meta")` to allocate nothing; `model.init.materialize` then gives
    it storage and values. `seq_len` bounds the positions of a forward pass. Attention runs in `kernel`.
    `balanced` deals experts out in turn in place of choosing them. `layers` are those of one stage of a
    pipeline: it has the embedding with the first layer, norm and head with the last, a tied head's weight
    at both ends.
    """

    embed: Embedding
    norm: RMSNorm | LayerNorm

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        kernel: AttentionKernel = USUAL_KERNEL,
        balanced: bool = False,
        layout: Layout = ALONE,
        layers: range | None = None,
    ):
        super().__init__()
        self.config, self.seq_len, self.kernel, self.layout = config, seq_len, kernel, layout
        d, V = config.hidden_size, config.padded_vocab_size
        # Rows of embedding and head; ranks that share heads divide them.
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
        self.register_module("embed", Embedding(len(self.rows), d, pad) if embeds else None)
        self.positions = Embedding(config.max_position_embeddings, d) if learned else None
        # By the number of the layer, which is part of its parameters' names.
        self.blocks = nn.ModuleDict({str(i): Block(config, i, balanced, layout) for i in layers})
        self.register_module("norm", norm_of(config) if self.last else None)
        # A tied head has no parameter: a second name for one tensor would become a second tensor
        # when a meta-device model is given storage.
        heads = self.last and not tied
        self.lm_head = nn.Linear(d, len(self.rows), bias=False) if heads else None
        self.loss = LinearCrossEntropy(max(0, min(config.vocab_size - begin, len(self.rows))))
        if layout.tp > 1:
            self.loss.ranks, self.loss.width = layout.tp, part_of(V, layout.tp, 0)[1]
            self.loss.chunk_fn = functools.partial(parted_loss, layout.added, layout.highest, begin)
        # A parameter's plain name, for blocks with exchanged modules (apply/fp8/te.py).
        self.native_name: Callable[[str], str] = lambda name: name
        self.ropes: dict[bool, Rope] = {}  # of layers with a window, if these have their own
        self.masks: dict[tuple[int, int | None], BlockMask] = {}

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            yield self.native_name(name), parameter

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """(B, T) int64 token ids and labels to the mean loss; without labels to logits.

        Labels below 0 are masked: their loss is 0. Positions begin anew with each of the `documents`,
        and attention does not leave them.

        In a layout of several ranks the loss and the logits are of this rank's own tokens (B, t). A stage
        after the first takes the residual stream (B, t, d); one before the last returns it.
        """
        layout, x = self.layout, tokens
        T = x.shape[1] if self.first else x.shape[1] * layout.tp * layout.cp
        places = layout.places(T, x.device, documents)
        inside = None if documents is None else documents.places(x.device)
        if self.first:
            x = self.embed_tokens(x, places, inside)
        where, masks = (T, x.device, places.gathered, inside), {}
        rope = local = self.rope_for(*where)
        if self.config.local_rope_theta is not None:
            local = self.rope_for(*where, local=True)
        recurrent = None
        if documents is not None and self.config.recurrent:
            recurrent = Seen(starts=documents.starts.to(x.device, non_blocking=True))
        for layer, block in self.blocks.items():
            window = self.config.windows[int(layer)]
            if int(layer) in self.config.recurrent.layers:
                x = block(x, rope, recurrent)
                continue
            if window not in masks:
                masks[window] = self.mask_for(T, window, places, documents, x.device)
            x = block(x, rope if window is None else local, masks[window])
        if not self.last:
            return x
        x = self.norm(x)
        if self.config.logit_scale != 1:
            x = x * self.config.logit_scale
        head = self.embed.weight if self.lm_head is None else self.lm_head.weight
        if labels is None:
            return F.linear(x, head)[..., : self.config.vocab_size]
        self.loss.masks = documents is not None
        # Ranks that share heads have the loss of all their tokens.
        labels = labels if places.gathered is None else labels[:, places.gathered]
        return self.loss(layout.gather(x).flatten(0, 1), head, labels.flatten())

    def embed_tokens(self, tokens: Tensor, places: Places, inside: Tensor | None) -> Tensor:
        """(B, T) ids to the residual stream (B, t, d), with learned positions and dropout."""
        own, where = places.own, places.gathered
        x = self.look_up(tokens if where is None else tokens[:, where])
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.positions is not None:
            weight = self.positions.weight
            where = inside if inside is None or own is None else inside[:, own]
            where = own if where is None else where
            x = x + (weight[: tokens.shape[1]] if where is None else weight[where])
        if self.config.embedding_dropout:
            x = F.dropout(x, self.config.embedding_dropout, self.training)
        if (dtype := autocast_dtype(x.device)) is not None:
            # The residual stream runs in the low precision too, as it does under FSDP.
            x = x.to(dtype)
        return x

    def look_up(self, tokens: Tensor) -> Tensor:
        """(B, T) ids to embeddings (B, T, d), or of ranks that share heads to those of own tokens."""
        if self.layout.tp == 1:
            return self.rows_of(tokens)
        ids = tokens - self.rows.start
        here = (ids >= 0) & (ids < len(self.rows))
        x = self.rows_of(ids.clamp(0, len(self.rows) - 1))
        return self.layout.scatter(x * here.unsqueeze(-1)).contiguous()

    def rows_of(self, ids: Tensor) -> Tensor:
        """The embedding's rows of that number on this rank."""
        weight = self.embed.weight
        if weight.dtype == torch.float32 or weight.device.type != "cpu":
            return self.embed(ids)
        # FSDP gathered it in low precision; a CPU would sum its gradient so, row by row.
        return F.embedding(ids, weight.float(), self.embed.padding_idx).to(weight.dtype)

    def rope_for(
        self,
        T: int,
        device: torch.device,
        gathered: Tensor | None = None,
        inside: Tensor | None = None,
        local: bool = False,
    ) -> Rope | None:
        """The rotary tables of a rank's positions, made at the first call and kept in fp32.

        `local` are those of layers with a window.
        """
        if self.config.learned_positions:
            return None
        if local not in self.ropes or self.ropes[local].cos.device != device:
            tables = rope_tables(self.config, self.seq_len, local)
            scale = None if tables.scale is None else tables.scale.to(device)
            self.ropes[local] = Rope(tables.cos.to(device), tables.sin.to(device), scale)
        if inside is None:
            where = slice(T) if gathered is None else gathered
        else:
            where = inside if gathered is None else inside[:, gathered]
        return self.ropes[local].at(where)

    def mask_for(
        self,
        T: int,
        window: int | None,
        places: Places,
        documents: Documents | None,
        device: torch.device,
    ) -> Mask:
        """What a layer with this window sees, and so in which kernel; None for PyTorch's, causal."""
        window = None if window is None or window >= T else window
        starts = None if documents is None else documents.starts
        if window is None and starts is None and places.queries is None and not self.config.sinks:
            return InBlocks() if self.kernel.causal == "blocks" else None
        if self.kernel.masked == "pieces":
            return Seen(window, starts, places.queries, places.order)
        if starts is not None:
            return block_mask(T, window, starts, device)
        if (T, window) not in self.masks:
            self.masks[T, window] = block_mask(T, window, None, device)
        return self.masks[T, window]
