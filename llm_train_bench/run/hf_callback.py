"""A callback for the Trainer of transformers that measures its steps with a Meter."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.model.config import load_config
from llm_train_bench.results.console import say
from llm_train_bench.run.meter import OWN_ARGS, Meter

# Beginnings of the training arguments that change what is learnt or how fast.
SETTINGS = tuple(
    "adam_ auto_find average_tokens bf16 dataloader_ ddp_ deepspeed fp16 fsdp full_ "
    "gradient_ include_num label_smoothing learning_rate liger lr_ max_grad_norm neftune optim "
    "per_device_train seed tf32 torch_ train_sampling use_cache use_liger warmup_ weight_decay".split()
)


class HFMeterCallback(TrainerCallback):
    """Measures steps `warmup_steps` to `warmup_steps + n_steps` of `trainer.train()`.

    One more step is traced, if the training is longer. Tokens are those of `input_ids` (with padding) of
    all ranks, losses those that the model returns on rank 0. FLOPs follow from `model.config`. They are
    unknown for other models, for frozen parameters, and where samples differ in length. `options` are
    the Meter's other arguments; `tokens_per_step` among them replaces the count of `input_ids`.
    """

    _meter: Meter | None = None

    def __init__(self, warmup_steps: int = 10, n_steps: int = 50, **options: Any):
        self._options: dict[str, Any] = {"warmup_steps": warmup_steps, "n_steps": n_steps} | options
        self._counts = "tokens_per_step" not in options

    def on_train_begin(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        self._stop(RuntimeError("another training began"))
        model: nn.Module = kwargs["model"]
        sizes = getattr(args, "parallelism_config", None)
        shared = any(getattr(sizes, name, 1) > 1 for name in ("tp_size", "cp_size", "sp_size"))
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        if args.n_gpu > 1 or len(devices) > 1 or shared:  # tokens per device would be wrong
            say("HFMeterCallback: nothing is measured: ranks must have devices of their own")
            return
        number = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        unknown = _why_flops_are_unknown(model, number)
        # Models of one class are not one model.
        of = {"name": f"{type(model).__name__}-{number}"} if unknown else {"config": model.config}
        facts: dict[str, Any] = {"settings": _settings(args, model), "device": args.device} | of
        self._meter = Meter(**facts | self._options).start()
        if unknown and "flops_per_token" not in self._options:
            self._meter.result.remark(f"FLOPs are unknown: {unknown}; pass flops_per_token")
        # The Trainer multiplies by it after the pass, where it divided by the labels of all ranks.
        self._factor = args.world_size if args.average_tokens_across_devices else 1
        several = args.world_size > 1 and self._counts
        # NCCL would wait for the GPU.
        self._group = dist.new_group(backend="gloo") if several else None
        look: Any = torch.compiler.disable(self._look)  # or it would be compiled into the model
        self._hook = model.register_forward_hook(look, with_kwargs=True)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._meter is not None:
            self._tokens, self._losses = 0, list[Tensor]()
            self._step = contextlib.ExitStack()
            self._told = self._step.enter_context(self._meter.step())
            rate = kwargs["optimizer"].param_groups[0]["lr"]
            if isinstance(rate, float):  # a tensor would be waited for
                self._told.lr = rate

    def _look(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """After a forward pass: its tokens and its loss."""
        if not module.training:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor):
            self._tokens += ids.numel()
            self._told.seq_len = ids.shape[-1]
        if (loss := getattr(output, "loss", None)) is not None:
            # Divided by the labels of all micro batches, they add up.
            self._adds_up = kwargs.get("num_items_in_batch") is not None
            self._losses.append(loss.detach())

    def on_step_end(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        if self._meter is None:
            return
        if self._counts:
            tokens = torch.tensor(self._tokens)
            if self._group is not None:  # ranks may have samples of different lengths
                dist.all_reduce(tokens, group=self._group)
            self._told.tokens = int(tokens)
        if self._losses:
            total = torch.stack(self._losses).sum()
            self._told.loss = total * self._factor if self._adds_up else total / len(self._losses)
        try:
            self._step.close()
        except ValueError as error:  # the training goes on
            say(f"HFMeterCallback: {error}")
            self._stop(error)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._meter is not None:
            with contextlib.suppress(RuntimeError), self._meter.paused():  # it has ended
                pass  # (after an error of the training, the meter is inside a step)

    on_save = on_evaluate

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._stop(None)

    def _stop(self, error: BaseException | None) -> None:
        if self._meter is not None:  # after an error of the training, it ends with the process
            self._meter.stop(error)
            self._meter = None
            self._hook.remove()


def _why_flops_are_unknown(model: Any, number: int) -> str | None:
    """Why the FLOPs of `model.config` are not those of this training; None if they are."""
    try:
        expected = count_parameters(load_config(model.config))
    except (AttributeError, ValueError) as error:
        return str(error)
    if not all(p.requires_grad for p in model.parameters()):
        return "some parameters are frozen"
    differ = f"the model has {number:,} parameters, and its config says {expected:,}"
    return differ if number != expected else None


def _settings(args: TrainingArguments, model: nn.Module) -> dict[str, Any]:
    """The training arguments that tell this run from others: those that differ from their defaults.

    All that a subclass adds count, as in trl.
    """
    settings: dict[str, Any] = {"dtype": str(getattr(model, "dtype", None)).removeprefix("torch.")}
    settings["attention"] = getattr(getattr(model, "config", None), "_attn_implementation", None)
    values = args.to_dict()
    for name, field in args.__dataclass_fields__.items():
        counts = name.startswith(SETTINGS) or name not in TrainingArguments.__dataclass_fields__
        usual, value = getattr(field.default, "value", field.default), values.get(name)
        name = "lr_warmup_steps" if name == "warmup_steps" else name  # the Meter's own are others
        if counts and value and value != usual and name not in OWN_ARGS:
            settings[name] = value if isinstance(value, str | int | float) else str(value)
    return settings
