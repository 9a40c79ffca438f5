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
        self._options: dict[str, Any] = {"config": config} | options
        self._tokens_per_step = tokens_per_step
        self._meter: Meter | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        options = {"device": pl_module.device} | self._options
        self._meter = Meter(tokens_per_step=self._tokens_per_step, **options).start()
        self._step: contextlib.ExitStack | None = None
        self._saved = False

    def on_train_batch_start(self, trainer: Any, *batch: Any) -> None:
        if self._meter is not None and self._step is None:
            if self._saved:
                self._pause()
            self._step, self._losses = contextlib.ExitStack(), []
            self._batches, self._steps_before = 0, trainer.global_step
            self._told = self._step.enter_context(self._meter.step())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        if self._step is None:
            return
        self._batches += 1
        if outputs and "loss" in outputs:  # Lightning has divided it
            self._losses.append(outputs["loss"] * trainer.accumulate_grad_batches)
        if trainer.global_step > self._steps_before:
            part = self._batches / trainer.accumulate_grad_batches
            self._told.tokens = round(self._tokens_per_step * min(part, 1.0))
            self._told.loss = sum(self._losses) / len(self._losses) if self._losses else None
            self._step.close()
            self._step = None

    def on_save_checkpoint(self, *args: Any) -> None:
        self._saved = True  # the file is written after this

    def on_validation_end(self, trainer: Any, *module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._pause()

    def _pause(self) -> None:
        if self._meter is None:
            return
        if self._step is not None:  # between accumulated batches
            self._meter.result.remark("paused inside a step", "invalid")
            return
        with self._meter.paused():
            self._saved = False

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._stop(exception)

    def on_train_end(self, *args: Any) -> None:
        self._stop(None)

    def _stop(self, error: BaseException | None) -> None:
        if self._meter is not None:
            self._meter.stop(error)
            self._meter = self._step = None
