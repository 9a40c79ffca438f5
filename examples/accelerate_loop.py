"""Measure a loop with Accelerate: accelerate launch examples/accelerate_loop.py configs/gpt2-tiny.json"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from llm_train_bench import Meter

BSZ, SEQ_LEN, ACCUMULATION, WARMUP_STEPS, N_STEPS = 4, 128, 2, 5, 20


def main(path: str) -> None:
    """Train a model of this config on random tokens until everything is measured."""
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, cpu=not torch.cuda.is_available()
    )
    config = AutoConfig.for_model(**json.loads(Path(path).read_text()))
    tokens = torch.randint(0, config.vocab_size, (BSZ * 400, SEQ_LEN))
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    loader = DataLoader(tokens, BSZ, shuffle=True, drop_last=True)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    meter = Meter(
        path,
        tokens_per_step=BSZ * SEQ_LEN * ACCUMULATION * accelerator.num_processes,
        seq_len=SEQ_LEN,
        warmup_steps=WARMUP_STEPS,
        n_steps=N_STEPS,
        device=accelerator.device,
    )
    micro_batches = (WARMUP_STEPS + N_STEPS + 1) * ACCUMULATION  # one step is traced
    with meter:
        for _, ids in zip(range(micro_batches), loader, strict=False):
            with meter.step(every=ACCUMULATION) as step, accelerator.accumulate(model):
                step.loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(step.loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
