"""Train a language model on one device and measure it.

python train.py configs/llama-tiny.json --data data/mine/train.bin --n-steps 200
python train.py configs/gpt2-125m.json --bsz 32 --pt-compile
python train.py configs/llama-3.1-8b.json --layers 8 --bsz auto --pt-compile --use-fp8
"""

import sys

import llm_train_bench.settings.before_torch  # noqa: F401

import torch

from llm_train_bench.apply.blocks import apply_blocks, apply_linear_layers
from llm_train_bench.apply.data import batches, open_data, sample_plan
from llm_train_bench.apply.kernels import select_attention
from llm_train_bench.apply.optimizer import build_optimizer
from llm_train_bench.apply.precision import set_precision
from llm_train_bench.apply.sharded import materialize
from llm_train_bench.model.hf import check_pretrained, save_pretrained
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.parallel.ranks import ALONE, Ranks
from llm_train_bench.run import loop
from llm_train_bench.run.launch import launch
from llm_train_bench.run.training_run import Run
from llm_train_bench.settings.plan import Plan


def train(plan: Plan, device: torch.device, ranks: Ranks = ALONE) -> None:
    """One run; what is wrong with the input shows before anything is written."""
    work, args = plan.work, plan.args
    set_precision(work.amp, work.tf32, device)
    kernel = select_attention(work, device)
    data, val_data = open_data(args, work, plan.schedule.total, device, plan.packing)
    with torch.device("meta"):
        model = Transformer(work.config, work.batch.seq_len, work.model_options)
    fp8 = apply_linear_layers(model, work, device)
    pretrained = check_pretrained(work.config, args.init_from)

    with Run(plan, device, ranks, fp8, kernel) as run:
        apply_blocks(model, work, fp8, device)
        materialize(model, device, args.seed, pretrained)
        optimizer = build_optimizer(model, plan.optimizer)
        saver = loop.build_saver(run, model, optimizer)
        samples = sample_plan(run.schedule, work.batch)
        micro_batches = batches(data, samples, device)
        passes = loop.build_passes(run, model, micro_batches)
        step = loop.build_step(run, model, optimizer, passes, saver)
        evaluate = loop.build_evaluation(run, model, val_data)
        loop.measure(run, model, optimizer, step, evaluate, saver)
        if args.export:
            save_pretrained(model, run.directory / "export")
        loop.observe_kernels(run, step)


if __name__ == "__main__":
    sys.exit(launch(train, sys.argv[1:], __file__))
