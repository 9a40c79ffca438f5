"""Train with pipeline parallelism: each group of ranks has some layers, sharded by FSDP2 in it.

python train_pp.py configs/llama-70b-proxy.json --pp 4 --pt-compile
python train_pp.py configs/llama-tiny.json --pp 2 --pp-virtual 2 --device cpu
python train_pp.py configs/llama-tiny.json --pp 2 --tp 2 --nproc 4 --device cpu
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
from llm_train_bench.parallel.fsdp import apply_fsdp
from llm_train_bench.parallel.layout import RankLayout
from llm_train_bench.parallel.pipeline import Pipeline
from llm_train_bench.parallel.ranks import Ranks, join
from llm_train_bench.run import loop
from llm_train_bench.run.launch import launch_ranks
from llm_train_bench.run.training_run import Run
from llm_train_bench.settings.plan import Plan


def train(plan: Plan, device: torch.device, ranks: Ranks) -> None:
    """One rank's run: its stages are sharded one by one; a schedule runs micro batches through all."""
    work, args = plan.work, plan.args
    layout = RankLayout(work.parallelism, ranks.rank)
    set_precision(work.amp, work.tf32, device)
    kernel = select_attention(work, device)
    data, val_data = open_data(args, work, plan.schedule.total, device, plan.packing)
    with torch.device("meta"):
        model = Pipeline(work, layout)
    fp8 = apply_linear_layers(model, work, device)
    pretrained = check_pretrained(work.config, args.init_from)
    join(ranks, device, args.dist_timeout)

    with Run(plan, device, ranks, fp8, kernel) as run:
        meshes = layout.connect(device, args.dist_timeout)
        for stage in model.stages:
            apply_blocks(stage, work, fp8, device)
            apply_fsdp(stage, meshes, work)
        materialize(model, device, args.seed, pretrained)
        optimizer = build_optimizer(model, plan.optimizer)
        saver = loop.build_saver(run, model, optimizer)
        samples = sample_plan(run.schedule, work.batch, layout.data_rank)
        micro_batches = batches(data, samples, device)
        passes = loop.build_pipelined_passes(run, model, micro_batches)
        step = loop.build_step(run, model, optimizer, passes, saver)
        evaluate = loop.build_evaluation(run, model, val_data)
        loop.measure(run, model, optimizer, step, evaluate, saver)
        if args.export:
            save_pretrained(model, run.directory / "export", write=ranks.main)
        loop.observe_kernels(run, step)


if __name__ == "__main__":
    sys.exit(launch_ranks(train, sys.argv[1:], __file__))
