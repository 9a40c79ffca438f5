"""Numbers of a model's parameters. Needs no torch."""

import math
from collections import Counter

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.shapes import present
from llm_train_bench.model.weights import Weight


def learnt_weights(config: ModelConfig) -> list[Weight]:
    """The rows of all parameters that have gradients."""
    return [weight for weight in config.weights.values() if weight.learns]


def active_numbers(config: ModelConfig, weight: Weight) -> int:
    """The numbers of a parameter, without padding, that a token uses: of experts those it is sent to."""
    size = math.prod(weight.shape) - weight.padding * config.hidden_size
    if weight.of_experts:
        experts = present(config.experts)
        size = size // experts.number * experts.per_token
    return size


def count_parameters(config: ModelConfig) -> int:
    """All trainable parameters of the unpadded model, a tied head counted once."""
    padding = sum(weight.padding * config.hidden_size for weight in config.weights.values())
    return sum(math.prod(weight.shape) for weight in learnt_weights(config)) - padding


def count_active_parameters(config: ModelConfig) -> int:
    """The parameters that a token uses: of each layer's experts only those that it is sent to."""
    return sum(active_numbers(config, weight) for weight in learnt_weights(config))


def linear_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters that multiply a token, by module: its own experts', and no padding rows."""
    parameters: Counter[str] = Counter()
    for weight in config.weights.values():
        if weight.is_matrix:
            parameters[weight.module] += active_numbers(config, weight)
    parameters["head"] = config.vocab_size * config.hidden_size
    return parameters
