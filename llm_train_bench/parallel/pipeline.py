"""Pipeline parallelism: the stages of a rank, and the schedule that runs micro batches through all.

The schedules are PyTorch's: 1F1B; Interleaved1F1B where a rank has several stages (Narayanan et al.
2021, section 2.2). Each stage is sharded by FSDP, and stays gathered over all micro batches.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from llm_train_bench.apply.data import MicroBatch
from llm_train_bench.apply.precision import AMP_DTYPES
from llm_train_bench.formulas.work import Work
from llm_train_bench.measure.steps import StepLog
from llm_train_bench.model.layout import Documents, HasWeights
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.model.weights import Weight
from llm_train_bench.parallel.layout import RankLayout


def boundary(work: Work, device: torch.device) -> Tensor:
    """An empty residual stream (B, t, d), which one stage hands to the next."""
    tokens = work.batch.seq_len // (work.parallelism.tp * work.parallelism.cp)
    sizes = work.batch.micro_batch, tokens, work.config.hidden_size
    return torch.empty(sizes, dtype=AMP_DTYPES[work.amp], device=device)


def reduce_in_last(stage: nn.Module, last: bool) -> None:
    """Let FSDP reduce the gradients of a stage only in the last backward of a step."""
    model = cast(FSDPModule, stage)
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


class Pipeline(HasWeights):
    """The stages of one rank. Several lie pp apart: each group of ranks has some early."""

    def __init__(self, work: Work, layout: RankLayout):
        super().__init__()
        self.config, self.work, self.layout, self.ranks = work.config, work, layout, layout
        self.numbers = work.parallelism.stages_of(layout.pp_rank)
        same = work.config, work.batch.seq_len, work.model_options, layout
        self.stages = [Transformer(*same, work.stage_layers(number)) for number in self.numbers]
        self.registered = nn.ModuleList(self.stages)

    def weights(self) -> Iterator[tuple[Weight, nn.Parameter]]:
        for stage in self.stages:
            yield from stage.weights()

    def forward(self, tokens: Tensor, labels: Tensor, documents: Documents | None = None) -> Tensor:
        """(B, T) ids and labels, the same on all stages, through all of them without a backward.

        The mean loss times pp on the ranks of the last stage, zero elsewhere: its mean is the loss.
        """
        x, parallel, group = tokens, self.work.parallelism, self.ranks.groups["pp"]
        for number, stage in zip(self.numbers, self.stages, strict=True):
            if number:
                x = boundary(self.work, tokens.device)
                dist.recv(x, group=group, group_src=(number - 1) % parallel.pp)
            x = stage(x, labels, documents)
            if number < parallel.stages - 1:
                x = x.detach().contiguous()
                dist.send(x, group=group, group_dst=(number + 1) % parallel.pp)
        return x * parallel.pp if self.stages[-1].last else torch.zeros((), device=tokens.device)

    def build_schedule(self, device: torch.device, log: StepLog) -> Callable[..., Tensor]:
        """The function from a step's micro batches to its loss; it leaves the gradients.

        The loss is as `forward` gives it. Times of forward and backward passes go into the log; what lies
        between them is spent waiting.
        """
        work, parallel = self.work, self.work.parallelism
        n_micro, total = work.batch.grad_acc_steps, torch.zeros((), device=device)
        weight = 1.0

        def scaled(loss: Tensor, labels: Tensor) -> Tensor:
            loss = loss.squeeze() * weight
            total.add_(loss.detach(), alpha=parallel.pp / n_micro)
            return loss / (n_micro * parallel.ranks)

        numbered = zip(self.numbers, self.stages, strict=True)
        stages = [_Stage(self, number, stage, device, log) for number, stage in numbered]
        if parallel.virtual == 1:
            schedule = Schedule1F1B(stages[0], n_micro, loss_fn=scaled, scale_grads=False)
        else:
            schedule = ScheduleInterleaved1F1B([*stages], n_micro, scaled, scale_grads=False)

        def run(parts: Sequence[MicroBatch]) -> Tensor:
            nonlocal weight
            weight = parts[0].weight
            tokens = torch.cat([part.inputs for part in parts])
            labels = torch.cat([part.labels for part in parts])
            total.zero_()
            for stage in stages:
                stage.left = n_micro
            inputs = (tokens,) if stages[0].is_first else ()
            more: dict[str, Any] = {}
            if stages[-1].is_last:
                more = dict(target=labels, losses=[], labels=labels)
            packed = [part.documents.starts for part in parts if part.documents is not None]
            if packed:
                more["starts"] = torch.cat(packed)
            schedule.step(*inputs, **more)
            return total.clone()

        return run


class _Plain(nn.Module):
    """A module that PyTorch's schedules take for an unsharded one: `_Stage` tells FSDP what to do."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args, starts: Tensor | None = None, **kwargs) -> Tensor:
        documents = None if starts is None else Documents(starts)
        y = self.module(*args, documents=documents, **kwargs)
        return y if y.ndim else y[None]


class _Stage(PipelineStage):
    """A stage whose gradients are reduced in the last backward of a step, and whose passes are timed."""

    def __init__(
        self,
        pipeline: Pipeline,
        number: int,
        module: Transformer,
        device: torch.device,
        log: StepLog,
    ):
        work, n = pipeline.work, pipeline.work.parallelism.stages
        shape = work.batch.micro_batch, work.batch.seq_len
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        stream = boundary(work, torch.device("meta")).requires_grad_()
        loss = torch.empty(1, device="meta", requires_grad=True)
        inputs, outputs = stream if number else ids, stream if number < n - 1 else loss
        group = pipeline.ranks.groups["pp"]
        super().__init__(_Plain(module), number, n, device, (inputs,), (outputs,), group=group)
        self.module, self.log, self.left = module, log, 0

    def forward_one_chunk(self, *args, **kwargs):
        self.log.mark("idle")
        with self.log.part("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        self.log.mark("idle")
        self.left -= 1
        reduce_in_last(self.module, self.left == 0)
        with self.log.part("backward"):
            return super().backward_one_chunk(*args, **kwargs)
