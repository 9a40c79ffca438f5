"""FP8 by Transformer Engine or torchao."""
