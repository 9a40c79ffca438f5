"""Sizes that follow from arguments and model together. Needs no torch."""

from bench.errors import UsageError
from model.config import ModelConfig

LONGEST_DEFAULT = 4096


def resolve_seq_len(wanted: int | None, config: ModelConfig) -> int:
    """The run's sequence length; UsageError if it is beyond what the model allows."""
    longest = config.max_position_embeddings
    if wanted is None:
        return min(longest, LONGEST_DEFAULT)
    if wanted > longest:
        raise UsageError(
            f"--seq-len {wanted}: {config.path} allows at most {longest} positions"
            " (max_position_embeddings or n_positions)"
        )
    return wanted
