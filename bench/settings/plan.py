"""Sizes that follow from arguments, model and ranks together. Needs no torch."""

from bench.errors import UsageError
from bench.formulas.flops import chosen_blocks
from bench.results.schema import Batch
from bench.settings.flags import Args, parse_sac_freq
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


def resolve_batch(args: Args, seq_len: int, world: int = 1) -> Batch:
    """Global batch = micro batch x accumulation x ranks, exactly; UsageError if it does not divide."""
    micro = args.bsz * world
    accumulation = args.grad_acc_steps
    if args.global_bsz is not None:
        accumulation, rest = divmod(args.global_bsz, micro)
        if rest or not accumulation:
            below = args.global_bsz // micro * micro
            nearest = " or ".join(str(n) for n in (below, below + micro) if n)
            raise UsageError(
                f"--global-bsz {args.global_bsz} is not a multiple of --bsz {args.bsz} x {world} "
                f"ranks = {micro}; {nearest} would be"
            )
    return Batch(
        micro_batch=args.bsz,
        grad_acc_steps=accumulation,
        data_parallel_size=world,
        global_batch=micro * accumulation,
        seq_len=seq_len,
        tokens_per_step=micro * accumulation * seq_len,
    )


def resolve_recompute(args: Args, config: ModelConfig) -> list[int]:
    """Blocks that --sac-freq chooses of this model; UsageError where it would choose none."""
    n = config.num_hidden_layers
    blocks = chosen_blocks(n, parse_sac_freq(args.sac_freq))
    if args.sac_freq and not blocks:
        raise UsageError(
            f"--sac-freq {args.sac_freq} recomputes no block: {config.path} has only {n} of them; "
            f"1/{n} recomputes one"
        )
    return blocks


def resolve_shards(args: Args, world: int, device_type: str) -> int:
    """Ranks that share one copy of the model under FSDP; UsageError if that is impossible."""
    if args.cpu_offload and device_type == "cpu":
        raise UsageError("--cpu-offload: the parameters are in host memory already; leave it out")
    if world % args.dp_replicate:
        raise UsageError(
            f"--dp-replicate {args.dp_replicate} does not divide {world} ranks; "
            f"{', '.join(str(n) for n in range(1, world + 1) if world % n == 0)} do"
        )
    return world // args.dp_replicate
