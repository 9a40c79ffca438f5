"""Train a GPT-2 or Llama-family model on one device and measure it. Start: train.py CONFIG."""

import sys

import torch

from bench.args import Args
from bench.attention import select_attention
from bench.data import FileTokens, SyntheticTokens, batches, sample_plan
from bench.device import pick_device
from bench.loop import evaluate, measure
from bench.optim import build_optimizer
from bench.parallel import apply_compile
from bench.precision import AMP_DTYPES, set_tf32
from bench.run import Run, launch
from bench.sizes import resolve_seq_len
from model.config import load_config
from model.hf import check_pretrained, load_pretrained, save_pretrained
from model.init import materialize
from model.transformer import Transformer


def train(args: Args) -> None:
    """One run from arguments to result.json."""
    device = pick_device(args.device)
    config = load_config(args.config, args.pad_vocab)
    seq_len = resolve_seq_len(args.seq_len, config)
    set_tf32(args.tf32)
    torch.manual_seed(args.seed)  # dropout; parameters and data have generators of their own
    gradients = args.pass_type != "forward"
    flex = select_attention(
        args.attention, config, seq_len, device, AMP_DTYPES[args.amp], gradients
    )

    # Everything that can be wrong with the input shows here, before anything is written.
    plan = sample_plan(args.warmup_steps + args.n_steps, args.grad_acc_steps, args.bsz)
    if args.data == "synthetic":
        source = SyntheticTokens(config.vocab_size, args.bsz, seq_len, args.seed, device)
    else:
        source = FileTokens(args.data, config.vocab_size, args.bsz, seq_len, args.seed)
        source.check(len(plan) * args.bsz)
    val_source = None
    if args.val_data:
        val_source = FileTokens(args.val_data, config.vocab_size, args.bsz, seq_len, 0)
        val_source.check(args.val_batches * args.bsz)
    val_plan = sample_plan(args.val_batches, 1, args.bsz)
    with torch.device("meta"):
        model = Transformer(config, seq_len, flex)
    weights = check_pretrained(model, config, args.init_from) if args.init_from else None

    with Run("train.py", args, config, device, seq_len) as run:
        if args.pt_compile:
            apply_compile(model, args.compile_mode)
        materialize(model, config, device, args.seed)
        if weights:
            load_pretrained(model, config, weights)
        optimizer = build_optimizer(model, args) if args.pass_type == "step" else None

        if val_source:
            loss = evaluate(model, batches(val_source, val_plan, device), args, device)
            run.result.metrics.val_loss_before = loss
        measure(run, args, model, optimizer, batches(source, plan, device, args.n_workers))
        if val_source:
            loss = evaluate(model, batches(val_source, val_plan, device), args, device)
            run.result.metrics.val_loss = loss
        if args.export:
            save_pretrained(model, config, run.directory / "export")


if __name__ == "__main__":
    sys.exit(launch(train, sys.argv[1:], "train.py"))
