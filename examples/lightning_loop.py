"""Measure Lightning's Trainer by a callback: python examples/lightning_loop.py configs/gpt2-tiny.json"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from llm_train_bench import LightningMeterCallback

BSZ, SEQ_LEN, WARMUP_STEPS, N_STEPS = 4, 128, 5, 20


class LanguageModel(lightning.LightningModule):
    """A model of transformers on token ids."""

    def __init__(self, config: Any):
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=6e-4, fused=True)


def main(path: str) -> None:
    """Train a model of this config on random tokens, one step longer than what is measured."""
    config = AutoConfig.for_model(**json.loads(Path(path).read_text()))
    tokens = torch.randint(0, config.vocab_size, (BSZ * 100, SEQ_LEN))
    sizes = {"tokens_per_step": BSZ * SEQ_LEN, "seq_len": SEQ_LEN}
    meter = LightningMeterCallback(path, warmup_steps=WARMUP_STEPS, n_steps=N_STEPS, **sizes)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_steps=WARMUP_STEPS + N_STEPS + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[meter],
    )
    loader = DataLoader(tokens, BSZ, drop_last=True)  # pyright: ignore[reportArgumentType]
    trainer.fit(LanguageModel(config), loader)


if __name__ == "__main__":
    main(sys.argv[1])
