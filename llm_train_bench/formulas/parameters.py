"""Numbers of a model's parameters. Needs no torch."""

import math
from collections import Counter

from llm_train_bench.model.config import ModelConfig
from llm_train_bench.model.weights import Weight


def learnt_weights(config: ModelConfig) -> list[Weight]:
    """The rows of all parameters that have gradients."""
    return [weight for weight in config.weights.values() if weight.learns]


def count_parameters(config: ModelConfig) -> int:
    """All trainable parameters of the unpadded model, a tied head counted once."""
    padding = sum(weight.padding * config.hidden_size for weight in config.weights.values())
    return sum(math.prod(weight.shape) for weight in learnt_weights(config)) - padding


def count_active_parameters(config: ModelConfig) -> int:
    """The parameters that a token uses: of each layer's experts only those that it is sent to."""
    experts = sum(
        math.prod(weight.shape) for weight in config.weights.values() if weight.of_experts
    )
    if config.experts is None:
        return count_parameters(config)
    unused = config.experts.number - config.experts.per_token
    return count_parameters(config) - experts // config.experts.number * unused


def expert_numbers(config: ModelConfig, layer: int) -> int:
    """Numbers in the matrices of the experts that a layer sends a token to."""
    experts = config.experts
    if experts is None:
        return 0
    stacked = (weight for weight in config.matrices(layer) if weight.of_experts)
    return sum(math.prod(weight.shape) for weight in stacked) // experts.number * experts.per_token


def linear_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters that multiply a token, by module: its own experts', and no padding rows."""
    parameters: Counter[str] = Counter()
    for weight in config.weights.values():
        if weight.is_matrix:
            number = math.prod(weight.shape)
            if weight.of_experts and config.experts is not None:
                number = number // config.experts.number * config.experts.per_token
            parameters[weight.module] += number
    parameters["head"] = config.vocab_size * config.hidden_size
    return parameters
