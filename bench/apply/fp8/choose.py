"""FP8 by the library that --fp8-backend names."""

import torch

from bench.apply.fp8.base import Fp8
from bench.apply.fp8.te import apply_te
from bench.apply.fp8.torchao import apply_torchao
from bench.results.schema import Batch
from bench.settings.flags import Args
from model.transformer import Transformer


def apply_fp8(
    model: Transformer,
    args: Args,
    device: torch.device,
    batch: Batch,
    shards: int = 1,
) -> Fp8:
    """Convert the blocks of a meta-device model as --use-fp8 asks, in place.

    UsageError where hardware, sizes or an absent library stand against it. Embeddings, norms,
    attention, head and loss stay in high precision.
    """
    if not args.use_fp8:
        return Fp8()
    if args.fp8_backend == "te":
        return apply_te(model, args, device, batch, shards)
    return apply_torchao(model, args, device, batch.micro_batch * batch.seq_len, shards)
