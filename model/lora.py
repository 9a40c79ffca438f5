"""Low-rank adapters of frozen linear layers (LoRA; Hu et al. 2021), as peft has them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_train_bench.model.products import replace_linear
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.model.weights import Adapter, Lora


class LoraLinear(nn.Linear):
    """A frozen linear layer, with adapters of the layers that it fuses, or of some.

    Its parameters `lora_a` and `lora_b` are an Adapter's `down` and `up`.
    """

    def __init__(self, *sizes: Any, adapter: Adapter, lora: Lora):
        super().__init__(*sizes)
        self.adapter, self.rank, self.scale = adapter, lora.rank, lora.alpha / lora.rank
        self.lora_a = nn.Parameter(torch.empty(adapter.down.shape))
        self.lora_b = nn.Parameter(torch.empty(adapter.up.shape))

    def forward(self, input: Tensor) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        low = F.linear(input, self.lora_a).split(self.rank, dim=-1)
        ups = self.lora_b.split(self.adapter.up.segments)
        frozen, changes = self.adapter.frozen, {}  # by segment
        for x, up, numbers in zip(low, ups, self.adapter.segments, strict=True):
            change = F.linear(x, up) * self.scale
            rows = change.split([frozen.segments[i] for i in numbers], dim=-1)
            changes |= zip(numbers, rows, strict=True)
        if len(frozen.segments) == 1:
            return y + changes[0]
        groups = (frozen.groups, -1)
        parts = [*y.unflatten(-1, groups).split(frozen.group_sizes, dim=-1)]
        for i, change in changes.items():
            parts[i] = parts[i] + change.unflatten(-1, groups)
        return torch.cat(parts, dim=-1).flatten(-2)


def apply_lora(model: Transformer, lora: Lora) -> None:
    """Freeze a meta-device model, and adapt linear layers of its blocks, in place."""
    model.requires_grad_(False).to(torch.bfloat16 if lora.base_bytes == 2 else torch.float32)
    model.add_adapters(lora)
    for adapter in lora.adapters:
        replace_linear(model, adapter.frozen.path, LoraLinear, adapter=adapter, lora=lora)


def adapter_settings(name: str, lora: Lora) -> dict[str, Any]:
    """The content of peft's adapter_config.json, for a model of that name."""
    layers = {hf.linear for a in lora.adapters for hf in a.frozen.hf if hf.segments in a.segments}
    settings: dict[str, Any] = dict(peft_type="LORA", task_type="CAUSAL_LM", bias="none")
    settings |= dict(lora_dropout=0.0, r=lora.rank, lora_alpha=lora.alpha)
    settings |= dict(inference_mode=False, target_modules=sorted(layers))
    return settings | dict(base_model_name_or_path=name)
