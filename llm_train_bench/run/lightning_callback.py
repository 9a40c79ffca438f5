"""A callback for Lightning's Trainer that measures its steps with a Meter."""

import contextlib
from typing import Any

import lightning

from llm_train_bench.run.meter import Meter

# Its methods have more parameters than are used here.
Callback: Any = lightning.Callback


class LightningMeterCallback(Callback):
    """Measures the optimizer steps of `trainer.fit`. `options` are those of Meter.

    `tokens_per_step` is needed: a step of fewer accumulated batches has fewer. The loss is the mean of
    what `training_step` returned, on rank 0.
    """

    def __init__(self, config: Any = None, *, tokens_per_step: int, **options: Any):
        self._options = {"config": config, "tokens_per_step": tokens_per_step, **options}
        self._meter: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._meter = Meter(**{"device": pl_module.device} | self._options).start()
        self._step: Any = None
        self._paused = False

    def on_train_batch_start(self, trainer: Any, *batch: Any) -> None:
        if self._paused and self._step:  # between accumulated batches
            self._meter.result.remark("paused inside a step", "invalid")
        elif self._paused:
            with self._meter.paused():
                pass
        self._paused = False
        if self._step is None:
            self._step, self._losses = contextlib.ExitStack(), []
            self._batches, self._steps_before = 0, trainer.global_step
            self._told = self._step.enter_context(self._meter.step())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        self._batches += 1
        if outputs and "loss" in outputs:  # Lightning has divided it
            self._losses.append(outputs["loss"] * trainer.accumulate_grad_batches)
        if trainer.global_step > self._steps_before:
            part = self._batches / trainer.accumulate_grad_batches
            self._told.tokens = round(self._options["tokens_per_step"] * min(part, 1.0))
            self._told.loss = sum(self._losses) / len(self._losses) if self._losses else None
            self._step.close()
            self._step = None

    def on_validation_end(self, *args: Any) -> None:
        self._paused = True  # a checkpoint is written after this

    on_save_checkpoint = on_validation_end

    def on_exception(self, trainer: Any, module: Any, exception: BaseException | None) -> None:
        if self._meter:
            self._meter.stop(exception)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.on_exception(trainer, module, None)
