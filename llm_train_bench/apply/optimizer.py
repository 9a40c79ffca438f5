"""Optimizer, learning-rate schedule, gradient clipping and the step that joins them."""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from llm_train_bench.apply.fp8.base import Fp8
from llm_train_bench.apply.muon import Muon
from llm_train_bench.apply.precision import LossScaler
from llm_train_bench.apply.sharded import by_mesh, is_sharded
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import how_to_install
from llm_train_bench.model.layout import HasWeights
from llm_train_bench.settings.flags import OptimizerFlags


def build_optimizer(
    model: nn.Module, flags: OptimizerFlags | None, fp8: Fp8 | None = None
) -> torch.optim.Optimizer | None:
    """AdamW or SGD, fused, or Muon, with weight decay on matrices; None if the run takes no step."""
    if flags and flags.optimizer == "muon":
        return Muon(cast(HasWeights, model), flags)
    return flags and optimizer_of(dict(model.named_parameters()), flags, fp8)


def optimizer_of(
    named: dict[str, nn.Parameter], flags: OptimizerFlags, fp8: Fp8 | None = None
) -> torch.optim.Optimizer:
    """The optimizer of those named parameters that require a gradient."""
    learnt = {name: p for name, p in named.items() if p.requires_grad}
    decayed = {n for n, p in learnt.items() if p.ndim >= 2 and not n.endswith("bias")}
    matrices = [p for name, p in learnt.items() if name in decayed]
    vectors = [p for name, p in learnt.items() if name not in decayed]
    groups = [
        {"params": same, "weight_decay": decay}
        for parameters, decay in ((matrices, flags.weight_decay), (vectors, 0.0))
        for same in by_mesh(parameters)
    ]
    if flags.optimizer == "sgd":
        # PyTorch's fused SGD does not take sharded parameters.
        sharded = is_sharded(matrices[0])
        optimizer = torch.optim.SGD(groups, lr=flags.lr, momentum=0.9, fused=not sharded)
        for p in [] if sharded else learnt.values():
            # If fp16 overflows in the first step, the fused kernel leaves this buffer unfilled.
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer
    if flags.optimizer == "adamw8bit":
        return AdamW8bit(groups, lr=flags.lr)
    if flags.bf16_weights != "off":
        return Bf16AdamW(groups, lr=flags.lr, masters=flags.bf16_weights == "master")
    return (fp8 or Fp8()).adamw(groups, lr=flags.lr, betas=(0.9, 0.95))


class AdamW8bit(torch.optim.Optimizer):
    """torchao's AdamW with moments of 8 bits, of this rank's own parts (Dettmers et al. 2022).

    It compiles a kernel for each shape on a GPU; on a CPU it runs eagerly.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float):
        try:
            from torchao.optim import AdamW8bit as Inner
        except ImportError as error:
            get = how_to_install("pip install -e '.[fp8]'")
            raise UsageError(f"--optimizer adamw8bit: {error}; {get}") from None
        super().__init__(groups, {"lr": lr})
        # Plain tensors: torchao's state of sharded ones needs even shards.
        self.own = {p: nn.Parameter(_local(p).detach()) for g in groups for p in g["params"]}
        mine = [group | {"params": [self.own[p] for p in group["params"]]} for group in groups]
        self.inner = Inner([g for g in mine if g["params"]], lr=lr, betas=(0.9, 0.95))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of torchao's."""
        eager = next(iter(self.own.values())).device.type != "cuda"
        for p, own in self.own.items():
            own.data, own.grad = _local(p).detach(), None if p.grad is None else _local(p.grad)
        for group in self.inner.param_groups:
            group["lr"].fill_(self.param_groups[0]["lr"])
        with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
            self.inner.step()


# Numbers that a step in fp32 copies takes at a time: a few times 64 MiB.
AT_ONCE = 2**24


class Bf16AdamW(torch.optim.AdamW):
    """AdamW of weights in bf16, computed in fp32 by the same kernel, some numbers at a time.

    Updates below half a unit of bf16 would be lost. So fp32 copies of the weights are kept as `master`,
    or new values are rounded up or down at random, in proportion to the distance (stochastic rounding;
    Zamirai et al. 2020). The random bits are a function of step and place, the same on all replicas.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, masters: bool):
        super().__init__(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        self.masters, self.steps = masters, -1
        self.generator: torch.Generator | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; like the fused kernel it divides gradients by `grad_scale` and needs no sync."""
        learnt = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in learnt:
            if not (state := self.state[p]):
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state |= {
                    k: torch.zeros_like(p, dtype=torch.float32) for k in ("exp_avg", "exp_avg_sq")
                }
            if self.masters and "master" not in state:
                state["master"] = p.detach().float()
        if self.steps < 0 and learnt:  # a resumed run's; no sync after the first step
            self.steps = 0 if detect_fake_mode() else int(self.state[learnt[0]]["step"])
        self.steps += 1
        torch.ops.aten._foreach_add_([self.state[p]["step"] for p in learnt], 1)
        number = 0
        for group in self.param_groups:
            for piece in _pieces([p for p in group["params"] if p.grad is not None]):
                number += 1
                self._update(piece, group, number)

    def _update(self, piece: "list[tuple[Any, slice]]", group: dict[str, Any], number: int) -> None:
        """The step of some numbers of parameters of a group, as the `number`th of this rank."""

        def rows(tensors: list[Any]) -> list[Tensor]:
            return [_local(x).view(-1)[part] for x, (_, part) in zip(tensors, piece, strict=True)]

        states = [self.state[p] for p, _ in piece]
        weights, grads = (rows([*x]) for x in zip(*((p, p.grad) for p, _ in piece), strict=True))
        moments = [rows([state[key] for state in states]) for key in ("exp_avg", "exp_avg_sq")]
        sizes, flat = [len(x) for x in weights], torch.empty(0, device=weights[0].device)
        if self.masters:
            wide = rows([state["master"] for state in states])
        else:
            flat = flat.new_empty(sum(sizes))
            wide = [*flat.split(sizes)]
            torch.ops.aten._foreach_copy_(wide, weights)
        wide_grads = [*torch.empty(sum(sizes), device=flat.device).split(sizes)]
        torch.ops.aten._foreach_copy_(wide_grads, grads)
        torch.ops.aten._fused_adamw_(
            wide, wide_grads, *moments, [], [state["step"] for state in states], lr=group["lr"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False,
            grad_scale=getattr(self, "grad_scale", None), found_inf=None,
        )  # fmt: skip
        if not self.masters:
            first: Any = piece[0][0]  # of two dimensions of a mesh the first holds replicas
            shard = first.device_mesh.get_local_rank(-1) if is_sharded(first) else 0
            self._round(flat, f"{self.steps}/{number}/{shard}")
        torch.ops.aten._foreach_copy_(weights, wide)

    def _round(self, flat: Tensor, key: str) -> None:
        """Round fp32 numbers to numbers of bf16 in place, each up or down at random."""
        if self.generator is None:
            self.generator = torch.Generator(flat.device)
        self.generator.manual_seed(
            int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
        )
        bits = flat.view(torch.int32)
        options: dict[str, Any] = {"dtype": torch.int32, "device": flat.device}
        # The lower half is cut off; what was added to it carries in proportion to it.
        bits += torch.randint(2**16, bits.shape, generator=self.generator, **options)
        bits &= -(2**16)


def _local(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def _pieces(parameters: list[Any]) -> Iterator[list[tuple[Any, slice]]]:
    """Parameters of a few numbers together, and large ones in parts."""
    piece, room = [], AT_ONCE
    for p in parameters:
        start, size = 0, _local(p).numel()
        while start < size:
            end = min(size, start + room)
            piece.append((p, slice(start, end)))
            start, room = end, room - (end - start)
            if not room:
                yield piece
                piece, room = [], AT_ONCE
    if piece:
        yield piece


def learning_rate(step: int, flags: OptimizerFlags, n_steps: int) -> float:
    """Rate of step 0, 1, ...: linear rise, then a cosine down to the minimum at the last of `n_steps`."""
    if step < flags.lr_warmup_steps:
        return flags.lr * (step + 1) / (flags.lr_warmup_steps + 1)
    progress = (step - flags.lr_warmup_steps) / max(1, n_steps - 1 - flags.lr_warmup_steps)
    lowest = flags.lr * flags.min_lr_ratio
    return lowest + 0.5 * (flags.lr - lowest) * (1 + math.cos(math.pi * min(1.0, progress)))


def _divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its kernel divides gradients by `grad_scale`, as PyTorch's GradScaler uses it."""
    adamw = isinstance(optimizer, torch.optim.AdamW) and not isinstance(optimizer, Muon)
    return adamw and bool(optimizer.defaults.get("fused"))


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of all gradients, whole; those that FSDP divided are of one mesh.

    PyTorch's function makes a chain of kernels for each sharded gradient.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads or not is_sharded(first := grads[0]):
        return _total_norm(grads)
    square = _total_norm([cast(Any, g).to_local() for g in grads]).square()
    # Of two dimensions the first holds replicas, whose gradients are the same. With --cpu-offload the sum
    # stays on the CPU: the fused optimizer would not wait for a factor that comes from the GPU.
    dist.all_reduce(square, group=first.device_mesh.get_group(first.device_mesh.ndim - 1))
    return square.sqrt()


def _total_norm(grads: list[Tensor]) -> Tensor:
    """The norm of some gradients, in fp32 if they are in bf16."""
    if not grads or grads[0].dtype != torch.bfloat16:
        return nn.utils.get_total_norm(grads)
    norms = torch.ops.aten._foreach_norm(grads, 2, torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def optimizer_step(
    parameters: list[nn.Parameter],
    optimizer: Any,  # an Optimizer, whose type declares no `grad_scale`
    lr: float,
    max_norm: float,
    scaler: LossScaler | None,
    gradients: Any = None,
) -> Tensor:
    """Clip gradients to `max_norm` (0: leave them) and step; returns their norm, without a sync.

    `gradients` completes, measures and clips those of ranks that share a batch (a layout's).

    With a scaler the gradients come multiplied by its scale; the norm returned is without it, and
    not finite where fp16 overflowed.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    norm = gradient_norm(parameters) if gradients is None else gradients.norm()
    scale = 1.0 if scaler is None else scaler.scale.clone()
    if scaler is not None:
        scaler.before_step(optimizer, norm)
    if max_norm and scaler is None and _divides_gradients(optimizer):
        # The fused kernel reads the gradients anyway: no separate pass.
        optimizer.grad_scale = (norm / max_norm).clamp(min=1.0)
        optimizer.step()
        del optimizer.grad_scale
        return norm
    if max_norm and gradients is not None:
        gradients.clip(max_norm, norm)
    elif max_norm:
        # Scale and norm are on the device. Only a norm can be passed from there without a wait.
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm / scale)
    optimizer.step()
    return norm if scaler is None else norm / scale
