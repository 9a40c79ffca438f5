"""A callback for Lightning's Trainer that measures its steps with a Meter."""

import contextlib
from typing import Any

import lightning

from llm_train_bench.run.meter import Meter

# Its methods have more parameters than are used here.
Callback: Any = lightning.Callback


class LightningMeterCallback(Callback):
    """Measures the optimizer steps of `trainer.fit`. `options` are those of Meter.

    `tokens_per_step` is needed. The loss is the mean of what `training_step` returned, on rank 0.
    """

    def __init__(self, config: Any = None, **options: Any):
        self._options: dict[str, Any] = {"config": config} | options
        self._step: contextlib.ExitStack | None = None
        self._saved = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._meter = Meter(**{"device": pl_module.device} | self._options).start()

    def on_train_batch_start(self, trainer: Any, *batch: Any) -> None:
        if self._step is None:
            if self._saved:
                self._pause()
            self._step, self._losses = contextlib.ExitStack(), []
            self._steps_before = trainer.global_step
            self._told = self._step.enter_context(self._meter.step())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        if outputs:  # Lightning has divided the loss
            self._losses.append(outputs["loss"] * trainer.accumulate_grad_batches)
        if self._step and trainer.global_step > self._steps_before:
            self._told.loss = sum(self._losses) / len(self._losses) if self._losses else None
            self._step.close()
            self._step = None

    def on_save_checkpoint(self, *args: Any) -> None:
        self._saved = True  # the file is written after this

    def on_validation_end(self, trainer: Any, *module: Any) -> None:
        if not trainer.sanity_checking and self._step is None:
            self._pause()

    def _pause(self) -> None:
        with self._meter.paused():
            self._saved = False

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._meter.stop(exception)

    def on_train_end(self, *args: Any) -> None:
        self._meter.stop()
