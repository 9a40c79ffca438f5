"""A callback for the Trainer of transformers that measures its steps with a Meter.

trainer = Trainer(..., callbacks=[HFMeterCallback(warmup_steps=10, n_steps=50)])
"""

import atexit
import contextlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import SECRET
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.model.config import ConfigError, ModelConfig, parse_config
from llm_train_bench.results.console import say
from llm_train_bench.run.meter import OWN_ARGS, Meter, MeterStep
from llm_train_bench.run.provenance import digest_of

# Beginnings of the names of training arguments that may differ between repeats.
NO_SETTING = tuple(
    "output_dir run_name project trackio_ report_to hub_ push_to_hub log_ logging_ save_ eval_ do_ "
    "resume_ max_steps num_train_epochs data_seed local_rank bf16 fp16".split()
)
# Those that our own flags have by other names.
OUR_NAMES = {
    "gradient_accumulation_steps": "grad_acc_steps",
    "learning_rate": "lr",
    "max_grad_norm": "grad_clip",
    "optim": "optimizer",
    "per_device_train_batch_size": "bsz",
    "torch_compile": "pt_compile",
    "warmup_steps": "lr_warmup_steps",
}


class HFMeterCallback(TrainerCallback):
    """Measures steps `warmup_steps` to `warmup_steps + n_steps` of `trainer.train()`.

    One more step is traced, if the training is longer. Tokens are those of `input_ids` (with padding),
    losses those that the model returns, on rank 0. FLOPs follow from `model.config`. They are unknown
    for other models, where parameters are frozen, as with LoRA, and where samples differ in length.
    `options` are the Meter's other arguments; `flops_per_token` among them replaces the config.
    """

    def __init__(self, warmup_steps: int = 10, n_steps: int = 50, **options: Any):
        self.options: dict[str, Any] = {"warmup_steps": warmup_steps, "n_steps": n_steps} | options
        self.meter: Meter | None = None

    def on_train_begin(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        self._end(RuntimeError("another training began"))
        model: nn.Module = kwargs["model"]
        if why := _cannot_be_counted(args, model):
            say(f"HFMeterCallback: nothing is measured: {why}")
            return
        notes: list[str] = []
        options: dict[str, Any] = {"settings": _settings(args, model), "device": args.device}
        options |= self.options
        config: Any = getattr(model, "config", None)
        if not {"config", "flops_per_token"} & options.keys():
            try:
                _refuse_other_work(model, parse_config(config.to_dict(), type(model).__name__))
                options["config"] = config
            except (AttributeError, ConfigError) as error:
                notes.append(f"FLOPs are unknown: {error}; pass flops_per_token")
        options.setdefault("name", type(model).__name__)
        meter = Meter(**options)
        if meter.config is None:  # models of one class are not one model
            shapes = [(n, list(p.shape), p.requires_grad) for n, p in model.named_parameters()]
            number = sum(p.numel() for p in model.parameters())
            known = {"n_parameters": number, "hash": digest_of(json.dumps(shapes))}
            meter.result.model = meter.result.model.model_copy(update=known)
        for note in notes:
            meter.result.remark(note)
        # Where num_items_in_batch counts the tokens of all ranks, the Trainer scales losses by them.
        self.ranks_share = args.world_size if args.average_tokens_across_devices else 1
        self.losses: list[Tensor] = []
        self.tokens, self.whole_batch = 0, False
        self.running = contextlib.ExitStack()
        self.meter = self.running.enter_context(meter)
        meter.give_way = self._end  # the Trainer tells nobody that a training failed
        look: Any = torch.compiler.disable(self._look)  # or it would be compiled into the model
        hook = model.register_forward_hook(look, with_kwargs=True)
        self.running.callback(hook.remove)
        atexit.register(self._left)

    def _look(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """After a forward pass: its tokens and its loss."""
        if not module.training or self.meter is None or self.meter.done:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor):
            self.tokens += ids.numel()
            if self.meter.seq_len is None:
                self.meter.lengths.add(ids.shape[-1])
        loss = getattr(output, "loss", None)
        if loss is not None:
            self.losses.append(loss.detach())
        # The Trainer then divides by the tokens of all micro batches: their losses add up.
        self.whole_batch = kwargs.get("num_items_in_batch") is not None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.meter is None:
            return
        self.tokens = 0
        self.losses.clear()
        self.step = self.meter.step()
        self.told: MeterStep = self.step.__enter__()
        rate = kwargs["optimizer"].param_groups[0]["lr"]
        self.told.lr = rate if isinstance(rate, float) else None  # a tensor would be waited for

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.meter is None:
            return
        if self.tokens:
            self.told.tokens = self.tokens * self.meter.ranks.world
        elif self.meter.tokens_per_step is None and self.meter.n < self.meter.window_end:
            say("HFMeterCallback: the model was given no input_ids; pass tokens_per_step")
            self._end(UsageError("the model was given no input_ids; pass tokens_per_step"))
            return
        if self.losses:
            total = sum(self.losses[1:], self.losses[0])
            total *= self.ranks_share if self.whole_batch else 1 / len(self.losses)
            self.told.loss = total
        self.step.__exit__(None, None, None)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.meter is not None:
            self.meter.paused("evaluation")

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        if self.meter is not None:
            self.meter.paused("save")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._end(None)

    def _left(self) -> None:
        """The process ends within a training: the Trainer tells its callbacks of no exception."""
        error = getattr(sys, "last_value", None)
        self._end(error or RuntimeError("the process ended before the training did"))

    def _end(self, error: BaseException | None) -> None:
        if self.meter is None:
            return
        self.meter = None
        atexit.unregister(self._left)
        self.running.__exit__(type(error) if error else None, error, None)


def _cannot_be_counted(args: TrainingArguments, model: nn.Module) -> str | None:
    """Why tokens per device would be wrong; None where each rank has a device and data of its own."""
    if args.n_gpu > 1:
        return f"one process uses {args.n_gpu} GPUs (DataParallel); start it by torchrun"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "the model's layers are on several devices (device_map)"
    sizes = getattr(args, "parallelism_config", None)
    if any(getattr(sizes, name, 1) > 1 for name in ("tp_size", "cp_size", "sp_size")):
        return "ranks share samples; use Meter with tokens_per_step"
    return None


def _refuse_other_work(model: nn.Module, config: ModelConfig) -> None:
    """ConfigError where a training of this model is not that of the config's causal language model."""
    parameters = list(model.parameters())
    if any(not p.requires_grad for p in parameters):
        raise ConfigError("some parameters are frozen")
    number = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    if number != (expected := count_parameters(config)):
        raise ConfigError(f"the model has {number:,} parameters, and its config says {expected:,}")


def _settings(args: TrainingArguments, model: nn.Module) -> dict[str, Any]:
    """What tells this run from others: its arguments, where it can be by the names of our own flags."""
    settings: dict[str, Any] = {}
    for name, value in args.to_dict().items():
        ours = OUR_NAMES.get(name, name)
        if not (name.startswith(NO_SETTING) or ours in OWN_ARGS or SECRET.search(name)):
            plain = isinstance(value, str | int | float | None)
            settings[ours] = value if plain else json.dumps(value, default=str)
    return settings | {
        "amp": "bf16" if args.bf16 else "fp16" if args.fp16 else "off",
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."),
        "sac_freq": "1/1" if args.gradient_checkpointing else None,
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
    }
