"""Storage and first values of a model's parameters.

The scheme is GPT-2's (Radford et al. 2019). Weights are normal. Their standard deviation is the
config's `initializer_range`, divided by sqrt(2 x layers) for those that write into the residual
stream (`attn.out`, `mlp.down`). Norms start at one, biases at zero. Each parameter has its own
generator, seeded by the run's seed and its name. So its values depend neither on the order of
creation nor on what else exists.
"""

import hashlib

import torch
from torch import Tensor

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.hf import Pretrained, read_pretrained
from llm_train_bench.model.transformer import Transformer


@torch.no_grad()
def materialize(
    model: Transformer, device: torch.device, seed: int, weights: Pretrained | None = None
) -> None:
    """Give a meta-device model storage on `device` and initial values, in place.

    The same seed and kind of device give the same values. With `weights` (model.hf.check_pretrained)
    they are read instead, one parameter at a time.
    """
    model.to_empty(device=device)
    for name, parameter in model.weights():
        fill(parameter, name, model.config, seed, weights)


def fill(
    parameter: Tensor, name: str, config: ModelConfig, seed: int, weights: Pretrained | None = None
) -> None:
    """Set or read one whole parameter in place; `name` is its dotted name in the model."""
    *_, module, kind = name.split(".")
    if weights:
        read_pretrained(parameter, name, config, weights)
    elif kind in ("bias", "correction", "sinks"):
        parameter.zero_()
    elif module.endswith("norm"):
        parameter.fill_(1.0)
    else:
        std = config.initializer_range
        if module in ("out", "down"):
            std /= (2 * config.num_hidden_layers) ** 0.5
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        number = int.from_bytes(digest[:7], "little")
        generator = torch.Generator(parameter.device).manual_seed(number)
        # Padding rows come last and take no random numbers: the others are what they are without.
        rows = config.vocab_size if module in ("embed", "lm_head") else len(parameter)
        parameter[:rows].normal_(0.0, std, generator=generator)
        parameter[rows:].zero_()
