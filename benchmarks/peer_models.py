"""Models of peers, written anew to their present code, for benchmarks/peers.py and bytes.py.

nanoGPT's GPT-2, and the Llama blocks of litgpt and torchtitan. They take the tensors of our own model,
so that all start from the same weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_train_bench.model.config import ModelConfig


class WideRMSNorm(nn.Module):
    """litgpt's norm: computed in fp32, returned in the input's format."""

    def __init__(self, d: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


NORMS = {"nanogpt": nn.LayerNorm, "litgpt": WideRMSNorm, "torchtitan": nn.RMSNorm}


class PeerBlock(nn.Module):
    """A residual block as nanoGPT (GPT-2), litgpt or torchtitan (Llama) computes it."""

    def __init__(self, c: ModelConfig, kind: str):
        super().__init__()
        self.c, self.kind = c, kind
        # GPT-2's own, by which all can be compared. nanoGPT's users run the exact one: "none".
        self.gelu = "tanh"
        d, gpt = c.hidden_size, kind == "nanogpt"
        norm = NORMS[kind]
        self.norm_1, self.norm_2 = norm(d, eps=c.norm_eps), norm(d, eps=c.norm_eps)
        self.qkv = nn.Linear(d, c.query_size + 2 * c.kv_size, bias=gpt)
        self.out = nn.Linear(c.query_size, d, bias=gpt)
        self.up = nn.Linear(d, c.intermediate_size, bias=gpt)
        self.gate = None if gpt else nn.Linear(d, c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, d, bias=gpt)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attend(self.norm_1(x), rope)
        h = self.norm_2(x)
        if self.gate is None:
            h = F.gelu(self.up(h), approximate=self.gelu)
        else:
            h = F.silu(self.gate(h)) * self.up(h)
        return x + self.down(h)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, d) to (B, T, d)."""
        B, T, _ = x.shape
        widths = (self.c.query_size, self.c.kv_size, self.c.kv_size)
        parts = self.qkv(x).split(widths, dim=2)
        q, k, v = (t.view(B, T, -1, self.c.head_dim) for t in parts)
        if rope and self.kind == "torchtitan":  # heads stay next to tokens while they are turned
            q, k = turned_pairs(q, *rope), turned_pairs(k, *rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if rope and self.kind == "litgpt":
            q, k = turned_halves(q, *rope), turned_halves(k, *rope)
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).contiguous().view(B, T, -1))


def turned_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, a head's first half against its second."""
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + other * sin).to(x.dtype)


def turned_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same of neighbours, in real numbers: torchtitan's are complex, and do not compile."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(3).type_as(x)


class Peer(nn.Module):
    """One of the three as a whole: (B, T) ids and labels to the mean loss."""

    def __init__(self, c: ModelConfig, kind: str, T: int):
        super().__init__()
        self.c, self.kind = c, kind
        d, V = c.hidden_size, c.padded_vocab_size
        self.embed = nn.Embedding(V, d)
        self.positions = nn.Embedding(T, d) if kind == "nanogpt" else None
        self.blocks = nn.ModuleList(PeerBlock(c, kind) for _ in range(c.num_hidden_layers))
        self.norm = NORMS[kind](d, eps=c.norm_eps)
        self.head = nn.Linear(d, V, bias=False)
        if c.tie_word_embeddings:
            self.embed.weight = self.head.weight
        if kind != "nanogpt":
            exponents = -torch.arange(0, c.head_dim, 2) / c.head_dim
            angles = torch.arange(T)[:, None] * c.rope_theta**exponents
            angles = angles.repeat(1, 2) if kind == "litgpt" else angles
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) ids to what the head sees."""
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        rope = None if self.positions is not None else (self.cos, self.sin)
        for block in self.blocks:
            x = block(x, rope)
        return self.norm(x)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take the parameters of our own model of the same shape."""
        renamed = {}
        for name, value in tensors.items():
            for ours, theirs in NAMES.items():
                name = name.replace(ours, theirs)
            if "qkv" in name and self.kind == "torchtitan":
                rotated, rest = value[: -self.c.kv_size], value[-self.c.kv_size :]
                value = torch.cat([neighbours(rotated, self.c.head_dim), rest])
            parts = ("gate", "up") if "gate_up" in name else ("gate_up",)
            for part, rows in zip(parts, value.chunk(len(parts)), strict=True):
                renamed[name.replace("gate_up", part)] = rows
        if self.c.tie_word_embeddings:
            renamed["head.weight"] = renamed["embed.weight"]
        self.load_state_dict(renamed)


NAMES = {"attn_norm": "norm_1", "mlp_norm": "norm_2", "attn.": "", "mlp.": "", "lm_head": "head"}


def neighbours(weight: Tensor, size: int) -> Tensor:
    """Rows of heads whose halves turn against each other, in the order in which neighbours do."""
    return weight.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)
