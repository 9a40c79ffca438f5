"""A callback for the Trainer of transformers that measures its steps with a Meter.

trainer = Trainer(..., callbacks=[HFMeterCallback(warmup_steps=10, n_steps=50)])
"""

import atexit
import contextlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import SECRET
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.model.config import ConfigError, parse_config
from llm_train_bench.results.console import say
from llm_train_bench.run.meter import OWN_ARGS, Meter
from llm_train_bench.run.provenance import digest_of

# Training arguments that our own flags have by other names.
OUR_NAMES = {
    "gradient_accumulation_steps": "grad_acc_steps",
    "learning_rate": "lr",
    "max_grad_norm": "grad_clip",
    "optim": "optimizer",
    "per_device_train_batch_size": "bsz",
    "torch_compile": "pt_compile",
    "warmup_steps": "lr_warmup_steps",
}
# Others that change what is learnt or how fast.
SETTINGS = """
accelerator_config adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size
average_tokens_across_devices dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph debug deepspeed fsdp fsdp_config full_determinism
gradient_checkpointing_kwargs include_num_input_tokens_seen label_smoothing_factor
liger_kernel_config lr_scheduler_kwargs lr_scheduler_type neftune_noise_alpha optim_args
optim_target_modules seed skip_memory_metrics tf32 torch_compile_backend torch_compile_mode
torch_empty_cache_steps train_sampling_strategy use_cache use_liger_kernel weight_decay
""".split()


class HFMeterCallback(TrainerCallback):
    """Measures steps `warmup_steps` to `warmup_steps + n_steps` of `trainer.train()`.

    One more step is traced, if the training is longer. Tokens are those of `input_ids` (with padding),
    losses those that the model returns, on rank 0. FLOPs follow from `model.config`. They are unknown
    for other models, where parameters are frozen, as with LoRA, and where samples differ in length.
    `options` are the Meter's other arguments; `flops_per_token` among them replaces the config, and
    `tokens_per_step` the count of `input_ids`.
    """

    def __init__(self, warmup_steps: int = 10, n_steps: int = 50, **options: Any):
        self.options: dict[str, Any] = {"warmup_steps": warmup_steps, "n_steps": n_steps} | options
        self.meter: Meter | None = None

    def on_train_begin(self, args: TrainingArguments, *more: Any, **kwargs: Any) -> None:
        self._end(RuntimeError("another training began"))
        model: nn.Module = kwargs["model"]
        if why := _find_obstacle(args, model):
            say(f"HFMeterCallback: nothing is measured: {why}")
            return
        options: dict[str, Any] = {"settings": _settings(args, model), "device": args.device}
        options |= {"name": type(model).__name__} | self.options
        unknown = None
        if not {"config", "flops_per_token"} & options.keys():
            unknown = _why_flops_are_unknown(model)
            options["config"] = None if unknown else model.config
        meter = Meter(**options)
        if unknown:
            meter.result.remark(f"FLOPs are unknown: {unknown}; pass flops_per_token")
        if meter.config is None:  # models of one class are not one model
            shapes = [(n, list(p.shape), p.requires_grad) for n, p in model.named_parameters()]
            meter.result.model.n_parameters = sum(p.numel() for p in model.parameters())
            meter.result.model.hash = digest_of(json.dumps(shapes))
        self.labels_of_all_ranks = args.average_tokens_across_devices
        self.losses: list[Tensor] = []
        self.labels: list[Tensor] = []  # their numbers
        self.tokens, self.n_labels = 0, None
        self.running = contextlib.ExitStack()
        self.group: Any = None
        if meter.ranks.world > 1 and meter.tokens_per_step is None:  # NCCL would wait for the GPU
            self.group = dist.new_group(backend="gloo")
            self.running.callback(dist.destroy_process_group, self.group)
        self.meter = self.running.enter_context(meter)
        meter.give_way = self._end  # the Trainer tells nobody that a training failed
        look: Any = torch.compiler.disable(self._look)  # or it would be compiled into the model
        self.running.callback(model.register_forward_hook(look, with_kwargs=True).remove)
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
        # The Trainer then divides by the labels of all micro batches: their losses add up.
        self.n_labels = kwargs.get("num_items_in_batch")
        if isinstance(labels := kwargs.get("labels"), Tensor):
            self.labels.append((labels != -100).sum())

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.meter is None:
            return
        self.tokens = 0
        self.losses.clear()
        self.labels.clear()
        self.step = self.meter.step()
        self.told = self.step.__enter__()
        rate = kwargs["optimizer"].param_groups[0]["lr"]
        self.told.lr = rate if isinstance(rate, float) else None  # a tensor would be waited for

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.meter is None:
            return
        if self.meter.tokens_per_step is None and self.meter.n < self.meter.window_end:
            tokens = torch.tensor(self.tokens)
            if self.group is not None:  # ranks may have samples of different lengths
                dist.all_reduce(tokens, group=self.group)
            if not tokens:
                why = "the model was given no input_ids; pass tokens_per_step"
                say(f"HFMeterCallback: {why}")
                self._end(UsageError(why))
                return
            self.told.tokens = int(tokens)
        if self.losses:
            total = sum(self.losses[1:], self.losses[0])
            if self.n_labels is None:
                total /= len(self.losses)
            elif self.labels:  # this rank's own: the Trainer may have divided by those of all
                total = total * self.n_labels / torch.stack(self.labels).sum().clamp(min=1)
            elif self.labels_of_all_ranks:
                total *= self.meter.ranks.world
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


def _find_obstacle(args: TrainingArguments, model: nn.Module) -> str | None:
    """Why tokens per device would be wrong; None where each rank has a device and data of its own."""
    if args.n_gpu > 1:
        return f"one process uses {args.n_gpu} GPUs (DataParallel); start it by torchrun"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "the model's layers are on several devices (device_map)"
    sizes = getattr(args, "parallelism_config", None)
    if any(getattr(sizes, name, 1) > 1 for name in ("tp_size", "cp_size", "sp_size")):
        return "ranks share samples; use Meter with tokens_per_step"
    return None


def _why_flops_are_unknown(model: nn.Module) -> str | None:
    """Why the FLOPs of `model.config` are not those of this training; None if they are."""
    config: Any = getattr(model, "config", None)
    try:
        expected = count_parameters(parse_config(config.to_dict(), type(model).__name__))
    except (AttributeError, ConfigError) as error:
        return str(error)
    if not all(p.requires_grad for p in model.parameters()):
        return "some parameters are frozen"
    number = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    if number != expected:
        return f"the model has {number:,} parameters, and its config says {expected:,}"
    return None


def _settings(args: TrainingArguments, model: nn.Module) -> dict[str, Any]:
    """The training arguments that tell this run from others, by our flags' names where there are such.

    Arguments that a subclass adds, as in trl, count too, except names that look secret.
    """
    told = args.to_dict()
    added = told.keys() - TrainingArguments.__dataclass_fields__.keys() - set(OWN_ARGS)
    names = [*OUR_NAMES, *SETTINGS, *sorted(name for name in added if not SECRET.search(name))]
    settings: dict[str, Any] = {}
    for name in names:
        value = told.get(name)
        plain = isinstance(value, str | int | float | None)
        settings[OUR_NAMES.get(name, name)] = value if plain else json.dumps(value, default=str)
    return settings | {
        "amp": "bf16" if args.bf16 else "fp16" if args.fp16 else "off",
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."),
        "sac_freq": "1/1" if args.gradient_checkpointing else None,
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
    }
