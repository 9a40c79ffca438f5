"""Train a GPT-2 or Llama-family model with DistributedDataParallel and measure it.

Without a launcher it starts one process per GPU (two on a CPU); under torchrun, srun or mpirun it joins.
"""

import sys

import torch

from bench.apply.attention import select_attention
from bench.apply.compile import apply_compile
from bench.apply.data import batches, open_data, sample_plan
from bench.apply.fp8.choose import apply_fp8
from bench.apply.optimizer import build_optimizer
from bench.apply.precision import set_precision
from bench.apply.recompute import apply_recompute
from bench.formulas.collectives import ddp_bytes
from bench.measure.device import pick_device
from bench.parallel import ranks as dist
from bench.parallel.fsdp import apply_ddp
from bench.parallel.ranks import Ranks
from bench.run.launch import launch_ranks
from bench.run.life import Run
from bench.run.loop import evaluate, measure
from bench.run.profiling import check_capture
from bench.settings.flags import Args, total_steps
from bench.settings.plan import resolve_batch, resolve_recompute, resolve_seq_len
from model.config import load_config
from model.hf import check_pretrained, load_pretrained, save_pretrained
from model.init import materialize
from model.transformer import Transformer


def train(args: Args, ranks: Ranks) -> None:
    """One run from arguments to result.json, as one of several ranks."""
    device = pick_device(args.device, ranks.local_rank)
    config = load_config(args.config, args.pad_vocab)
    seq_len = resolve_seq_len(args.seq_len, config)
    batch = resolve_batch(args, seq_len, ranks.world)
    recompute = resolve_recompute(args, config)
    set_precision(args, device)
    check_capture(args, device)
    torch.manual_seed(args.seed + ranks.rank)  # dropout, which must differ between ranks
    flex = select_attention(args, config, seq_len, device)
    data, val_data = open_data(args, config, batch, device)
    plan = sample_plan(total_steps(args), batch, ranks.rank)
    with torch.device("meta"):
        model = Transformer(config, seq_len, flex)
    fp8 = apply_fp8(model, args, device, batch)
    weights = check_pretrained(model, args.init_from) if args.init_from else None
    dist.join(ranks, device, args.dist_timeout)

    with Run("train_ddp.py", args, config, device, batch, ranks, fp8) as run:
        apply_recompute(model, recompute, args.sac_policy, fp8.checkpoint)
        if args.pt_compile:
            apply_compile(model, args)
        materialize(model, device, args.seed)
        if weights:
            load_pretrained(model, weights)
        ddp = apply_ddp(model, device, batch.grad_acc_steps, args)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        run.set_traffic(ddp_bytes(shapes, ranks.world, args))
        optimizer = build_optimizer(model, args)

        run.result.metrics.val_loss_before = evaluate(run, model, val_data)
        measure(run, ddp, optimizer, batches(data, plan, device, args.n_workers), ddp.no_sync)
        run.result.metrics.val_loss = evaluate(run, model, val_data)
        if args.export:
            save_pretrained(model, run.directory / "export", write=ranks.main)


if __name__ == "__main__":
    sys.exit(launch_ranks(train, sys.argv[1:], __file__))
