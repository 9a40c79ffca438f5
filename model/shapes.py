"""Parts of a model's shape that only some families have. Needs no torch."""

import dataclasses
import math
from typing import Literal, TypeVar

Spec = TypeVar("Spec")


def present(part: Spec | None) -> Spec:
    """A part of a model where the caller knows that the model has it."""
    assert part is not None
    return part


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What a layer has: a mixer of tokens, then an MLP; norms before them, after them, or both."""

    mixer: Literal["attention", "latent", "recurrent"] | None
    mlp: Literal["dense", "experts"] | None
    window: int | None
    """Positions that attention sees, including its own; None for all before."""
    rope: Literal["global", "local"] | None
    """Rotary tables of its attention; `local` ones have the base `local_rope_theta`."""
    pre_norm: bool
    post_norm: bool

    @property
    def norms(self) -> int:
        """Norms over the residual stream."""
        parts = (self.mixer is not None) + (self.mlp is not None)
        return parts * (self.pre_norm + self.post_norm)

    @property
    def attends(self) -> bool:
        """Whether its mixer is attention."""
        return self.mixer in ("attention", "latent")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: `linear` by factor, or `llama3` by wavelength."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class Yarn:
    """Rotary frequencies stretched by YaRN (Peng et al. 2023), which also scales the rotated numbers.

    Frequencies that turn more than `beta_fast` times in the trained context stay, those below
    `beta_slow` turns are divided by `factor`; `rounded` bounds lie at whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounded: bool = True
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts: gated MLPs of which a router chooses some for each token."""

    number: int
    per_token: int
    size: int
    """Elements of an expert's activation."""
    shared_size: int = 0
    """Those of the MLP that every token passes besides; 0 without one."""
    scores: str = "softmax"
    """Of all experts' logits: `softmax` or `sigmoid`; or `softmax_chosen`, of those chosen by logits."""
    normalised: bool = False
    """The chosen scores are divided by their sum."""
    scale: float = 1.0
    groups: int = 1
    """Experts are chosen from the best `groups_per_token` of these groups."""
    groups_per_token: int = 1
    correction: bool = False
    """A number for each expert is added to its score only for the choice (DeepSeek-V3)."""
    correction_rate: float = 0.0
    """How far that number moves after a step, towards an equal load."""
    aux_loss: float = 0.0
    """Factor of the load-balancing loss of each layer (Switch Transformer); layers are summed."""
    biases: bool = False
    limit: float | None = None
    """Gate and up are clamped to this, as gpt-oss does."""
    gain: float = 1.702
    """Of the sigmoid in gpt-oss's activation, which has the limit."""
    gated: bool = True
    """Whether an expert's activation gates a second product; the shared one's too."""
    latent: int | None = None
    """Elements that the experts see of a token, by a layer before and one after them (Nemotron 3)."""
    shared_gate: bool = False
    """Whether the shared expert's output is weighed by a sigmoid of the token."""

    @property
    def wide(self) -> int:
        """Halves of an expert's first matrix."""
        return 2 if self.gated else 1

    @property
    def exact_router(self) -> bool:
        """Whether the router computes in fp32 under every format, as DeepSeek's does."""
        return self.scores == "sigmoid"


@dataclasses.dataclass(frozen=True)
class Latent:
    """Attention whose queries, keys and values pass narrow layers (MLA, DeepSeek-V2).

    A key has `nope_dim` elements of its head, and `rope_dim` rotated ones that all heads share.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """Layers with states in place of attention: Gated DeltaNet, or Mamba2 (model/recurrent.py)."""

    delta: bool
    """Whether they follow the delta rule; Mamba2 does not."""
    groups: int
    """Groups of heads that share queries and keys (C and B of Mamba2), of `state` elements each."""
    state: int
    heads: int
    head_dim: int
    kernel: int
    """Positions that the convolution sees."""
    chunk: int
    """Positions that are computed together."""
    activation: str = "silu"
    conv_bias: bool = False
    bias: bool = False
    """Whether the linear layers have one."""
    norm_groups: int = 1
    """Parts of all values that Mamba2's norm takes apart."""
    least_step: float = 0.0
    most_step: float = math.inf

    @property
    def segments(self) -> tuple[int, ...]:
        """Rows of the first linear layer: queries, keys, values, gates of values, and of steps."""
        key, value = self.groups * self.state, self.heads * self.head_dim
        return (key, key, value, value, *[self.heads] * (1 + self.delta))
