"""Measure the Trainer of transformers: python examples/trainer.py configs/gpt2-tiny.json"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from llm_train_bench import HFMeterCallback

BSZ, SEQ_LEN, WARMUP_STEPS, N_STEPS = 4, 128, 5, 20


def main(path: str) -> None:
    """Train a model of this config on random tokens, one step longer than what is measured."""
    config = AutoConfig.for_model(**json.loads(Path(path).read_text()))
    tokens = torch.randint(0, config.vocab_size, (BSZ * 100, SEQ_LEN))
    samples = [{"input_ids": sample, "labels": sample} for sample in tokens]
    args = TrainingArguments(
        output_dir="runs/trainer",
        per_device_train_batch_size=BSZ,
        max_steps=WARMUP_STEPS + N_STEPS + 1,
        learning_rate=6e-4,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    )
    meter = HFMeterCallback(WARMUP_STEPS, N_STEPS, name=Path(path).stem)
    model = AutoModelForCausalLM.from_config(config)
    Trainer(model, args, train_dataset=samples, callbacks=[meter]).train()


if __name__ == "__main__":
    main(sys.argv[1])
