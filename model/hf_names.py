"""The tensors of Hugging Face files that our parameters are made of. Needs no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from llm_train_bench.model.families import FAMILIES

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


def hf_tensors(
    config: ModelConfig, layer: int | None, module: str, kind: str, n_segments: int
) -> tuple[HfTensor, ...]:
    """The tensors that make up a parameter of so many segments."""
    names = FAMILIES[config.model_type].names
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
    numbers = range(n_segments)
    usual = [((i,), 1) for i in numbers] if len(found) > 1 else [((*numbers,), 1)]
    segments_and_groups = segments_of_files(config, part) or usual
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
