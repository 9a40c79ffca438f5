"""Train with FSDP2 (fully_shard) or HSDP; starts one process per GPU, or joins a launcher's.

python train_fsdp.py configs/llama-70b-proxy.json --sac-freq 1/4
python train_fsdp.py configs/llama-3.1-70b.json --tp 8 --sac-freq 1/1 --pt-compile
python train_fsdp.py configs/moe-tiny.json --ep 2 --nproc 2 --device cpu
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
from llm_train_bench.parallel.fsdp import apply_fsdp, no_sync
from llm_train_bench.parallel.layout import RankLayout
from llm_train_bench.parallel.ranks import Ranks, join
from llm_train_bench.run import loop
from llm_train_bench.run.launch import launch_ranks
from llm_train_bench.run.training_run import Run
from llm_train_bench.settings.plan import Plan


def train(plan: Plan, device: torch.device, ranks: Ranks) -> None:
    """One rank's run: recompute, compile, shard, then give values; each wraps what came before."""
    work, args = plan.work, plan.args
    layout = RankLayout(work.parallelism, ranks.rank)
    set_precision(work.amp, work.tf32, device)
    kernel = select_attention(work, device)
    data, val_data = open_data(args, work, plan.schedule.total, device, plan.packing)
    with torch.device("meta"):
        model = Transformer(work.config, work.batch.seq_len, work.model_options, layout)
    fp8 = apply_linear_layers(model, work, device)
    pretrained = check_pretrained(work.config, args.init_from)
    join(ranks, device, args.dist_timeout, work.cpu_offload)

    with Run(plan, device, ranks, fp8, kernel) as run:
        apply_blocks(model, work, fp8, device)
        apply_fsdp(model, layout.connect(device, args.dist_timeout), work)
        materialize(model, device, args.seed, pretrained, work.cpu_offload)
        optimizer = build_optimizer(model, plan.optimizer)
        saver = loop.build_saver(run, model, optimizer)
        samples = sample_plan(run.schedule, work.batch, layout.data_rank)
        micro_batches = batches(data, samples, device)
        passes = loop.build_passes(run, model, micro_batches, no_sync(model, work))
        step = loop.build_step(run, model, optimizer, passes, saver)
        evaluate = loop.build_evaluation(run, model, val_data)
        loop.measure(run, model, optimizer, step, evaluate, saver)
        if args.export:
            save_pretrained(model, run.directory / "export", write=ranks.main)
        loop.observe_kernels(run, step)


if __name__ == "__main__":
    sys.exit(launch_ranks(train, sys.argv[1:], __file__))
