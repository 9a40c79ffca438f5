"""Low-rank adapters of frozen linear layers (LoRA; Hu et al. 2021), as peft has them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_train_bench.model.hf_names import adapted_rows, hf_names
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.model.shapes import Lora
from llm_train_bench.model.transformer import Transformer


class LoraLinear(nn.Linear):
    """A frozen linear layer, with adapters of the layers that it fuses, or of some.

    Rank r: `lora_a` (n r, in) maps down for each of n adapted layers, `lora_b` (rows, r) up to theirs.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def adapt(self, rows: list[tuple[int, bool]], rank: int, scale: float) -> None:
        """Add parameters; `rows` are those of each fused layer, and whether it is adapted."""
        self.rows, self.rank, self.lora_scale = rows, rank, scale
        chosen = [n for n, adapted in rows if adapted]
        device = self.weight.device
        self.lora_a = nn.Parameter(torch.empty(len(chosen) * rank, self.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(sum(chosen), rank, device=device))

    def forward(self, input: Tensor) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        low = F.linear(input, self.lora_a).split(self.rank, dim=-1)
        ups = self.lora_b.split([n for n, adapted in self.rows if adapted])
        added = [F.linear(x, up) for x, up in zip(low, ups, strict=True)]
        if len(self.rows) == 1:
            return y + added[0] * self.lora_scale
        parts, rest = y.split([n for n, _ in self.rows], dim=-1), iter(added)
        sums = [
            part + next(rest) * self.lora_scale if adapted else part
            for part, (_, adapted) in zip(parts, self.rows, strict=True)
        ]
        return torch.cat(sums, dim=-1)


def apply_lora(model: Transformer, lora: Lora) -> None:
    """Freeze a meta-device model, and adapt linear layers of its blocks, in place."""
    model.requires_grad_(False).to(torch.bfloat16 if lora.base_bytes == 2 else torch.float32)
    model.lora, config = lora, model.config
    for name, module in model.blocks.named_modules(prefix="blocks"):
        if type(module) is not nn.Linear or name.endswith(".router"):
            continue
        if rows := adapted_rows(config, name, lora.targets):
            module.__class__ = LoraLinear
            assert isinstance(module, LoraLinear)
            module.adapt(rows, lora.rank, lora.alpha / lora.rank)


def adapters_of(model: HasWeights) -> Iterator[tuple[str, Tensor]]:
    """The adapters by peft's names; where ranks share parameters, all of them iterate."""
    config, lora = model.config, model.lora
    assert lora is not None
    parts = ((n, p.detach()) for n, p in model.weights() if n.endswith((".lora_a", ".lora_b")))
    for name, value in model.layout.wholes(config, parts):
        module, kind = name.rsplit(".", 1)
        rows = adapted_rows(config, module, lora.targets)
        names = hf_names(config, f"{module}.weight")
        chosen = [(hf, n) for hf, (n, adapted) in zip(names, rows, strict=True) if adapted]
        sizes = [lora.rank if kind == "lora_a" else n for _, n in chosen]
        for (hf, _), part in zip(chosen, value.split(sizes), strict=True):
            layer = hf.removesuffix(".weight")
            yield f"base_model.model.{layer}.lora_{kind[-1].upper()}.weight", part.contiguous()


def adapter_settings(model: HasWeights, names: Iterable[str]) -> dict[str, Any]:
    """The content of peft's adapter_config.json, for tensors of these names."""
    lora = model.lora
    assert lora is not None
    layers = {name.split(".lora_")[0].split(".")[-1] for name in names}
    settings: dict[str, Any] = dict(peft_type="LORA", task_type="CAUSAL_LM", bias="none")
    settings |= dict(lora_dropout=0.0, r=lora.rank, lora_alpha=lora.alpha)
    settings |= dict(inference_mode=False, target_modules=sorted(layers))
    return settings | dict(base_model_name_or_path=model.config.name)
