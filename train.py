"""Train a GPT-2 or Llama-family model on one device and measure it."""

import sys

import torch

from bench.apply.attention import select_attention
from bench.apply.compile import apply_compile
from bench.apply.data import batches, open_data, sample_plan
from bench.apply.fp8.choose import apply_fp8
from bench.apply.optimizer import build_optimizer
from bench.apply.precision import set_precision
from bench.apply.recompute import apply_recompute
from bench.measure.device import pick_device
from bench.run.launch import launch
from bench.run.life import Run
from bench.run.loop import evaluate, measure
from bench.run.profiling import check_capture
from bench.settings.flags import Args, total_steps
from bench.settings.plan import resolve_batch, resolve_recompute, resolve_seq_len
from model.config import load_config
from model.hf import check_pretrained, load_pretrained, save_pretrained
from model.init import materialize
from model.transformer import Transformer


def train(args: Args) -> None:
    """One run from arguments to result.json."""
    # Everything that can be wrong with the input shows before anything is written.
    device = pick_device(args.device)
    config = load_config(args.config, args.pad_vocab)
    seq_len = resolve_seq_len(args.seq_len, config)
    batch = resolve_batch(args, seq_len)
    recompute = resolve_recompute(args, config)
    set_precision(args, device)
    check_capture(args, device)
    torch.manual_seed(args.seed)  # dropout; parameters and data have generators of their own
    flex = select_attention(args, config, seq_len, device)
    data, val_data = open_data(args, config, batch, device)
    plan = sample_plan(total_steps(args), batch)
    with torch.device("meta"):
        model = Transformer(config, seq_len, flex)
    fp8 = apply_fp8(model, args, device, batch)
    weights = check_pretrained(model, args.init_from) if args.init_from else None

    with Run("train.py", args, config, device, batch, fp8=fp8) as run:
        apply_recompute(model, recompute, args.sac_policy, fp8.checkpoint)
        if args.pt_compile:
            apply_compile(model, args)
        materialize(model, device, args.seed)
        if weights:
            load_pretrained(model, weights)
        optimizer = build_optimizer(model, args)

        run.result.metrics.val_loss_before = evaluate(run, model, val_data)
        measure(run, model, optimizer, batches(data, plan, device, args.n_workers))
        run.result.metrics.val_loss = evaluate(run, model, val_data)
        if args.export:
            save_pretrained(model, run.directory / "export")


if __name__ == "__main__":
    sys.exit(launch(train, sys.argv[1:], "train.py"))
