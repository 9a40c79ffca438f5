"""Cross-entropy of a linear head, chunk by chunk, so that the full logits never exist.

The logits of N positions over V words are the largest tensor of a training step (N = 8192 and
V = 128256 in fp32: 3.9 GiB, several times over in a plain backward). Here a chunk of rows is
projected, and its loss and its logits' gradient are taken at once. Before the next chunk that
gradient is folded into those of the hidden states and the weight. There are three matmuls, as many
as the plain way, none repeated.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from llm_train_bench.model.chunks import CHUNK_ELEMENTS, chunk_rows
from llm_train_bench.model.layers import autocast_dtype, no_autocast
from llm_train_bench.model.layout import ALONE, Layout
from llm_train_bench.model.operators import note_path

# A label that is left out.
MASKED = -100
# (M, K) and (N, K) to (M, N), perhaps into a third tensor: the first times the second transposed.
Matmul = Callable[..., Tensor]
# Logits, labels, size of the vocabulary and whether labels mask, to losses and the logits' gradient.
ChunkLoss = Callable[..., tuple[Tensor, Tensor]]


class VocabShard(NamedTuple):
    """The rows of a head that one of several ranks has; all have the same hidden states."""

    start: int
    """The first row."""
    largest: int
    """Rows of the rank with most: chunks are equal on all ranks."""
    layout: Layout


def aligned_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The head's weight (V, d) in a dtype, with rows of zeros up to a multiple of 16 bytes of logits.

    The three matmuls of the head then have no dimension that tensor cores cannot load by their wide
    instructions, such as a vocabulary of 50257:
    https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication
    """
    (V, d), missing = weight.shape, -weight.shape[0] % (16 // dtype.itemsize)
    if not missing:
        return weight.to(dtype)
    padded = weight.new_empty(V + missing, d, dtype=dtype)
    padded[:V].copy_(weight)
    padded[V:].zero_()
    return padded


def logits_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, masks: bool, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    """Losses (n,) in fp32, and softmax minus one-hot in the shape and dtype of the logits.

    With `masks` both are 0 where a label is below 0. Columns from `vocab_size` on are padding and get no
    probability. The logits may be overwritten. Those of a `shard` are some columns of all.
    """
    target, masked, here, layout = labels[:, None], None, None, ALONE
    if masks:
        masked, target = target < 0, target.clamp(min=0)
    if shard is not None:
        target, layout = target - shard.start, shard.layout
        here = (target >= 0) & (target < vocab_size)  # columns behind these may be padding
        target = target.clamp(0, logits.shape[1] - 1)
    padded = logits.shape[1] > vocab_size
    if torch.compiler.is_compiling() and shard is None:
        # One fused kernel; a scatter would split it in two.
        wide = logits.float()
        column = torch.arange(logits.shape[1], device=logits.device)
        if padded:
            wide = wide.masked_fill(column >= vocab_size, float("-inf"))
        log_z = wide.logsumexp(dim=-1, keepdim=True)
        loss = log_z - wide.gather(1, target)
        grad = (wide - log_z).exp() - (column == target).float()
        if masked is not None:
            loss, grad = loss.masked_fill(masked, 0.0), grad.masked_fill(masked, 0.0)
        return loss.squeeze(1), grad.to(logits.dtype)
    if padded:
        logits[:, vocab_size:] = float("-inf")
    return in_few_passes(logits, target, masked, logits.is_cuda, here, layout)


def in_few_passes(
    logits: Tensor,
    target: Tensor,
    masked: Tensor | None,
    converts: bool,
    here: Tensor | None = None,
    layout: Layout = ALONE,
) -> tuple[Tensor, Tensor]:
    """Losses (n,) of (n, V) logits for (n, 1) labels, and softmax minus one-hot in the logits' memory.

    Both are 0 where `masked` (n, 1), if there is one. If ranks share the columns, this one has the labels
    `here` (n, 1). At most one fp32 copy of the logits is used (logsumexp and softmax use two). With
    `converts` the kernels convert as they read and write, as a GPU's do; on a CPU a separate conversion
    is cheaper.
    """
    wide = logits if converts else logits.float()
    top = layout.max_over_ranks(wide.amax(dim=-1, keepdim=True).float())
    at_target = wide.gather(1, target).float() - top
    grad = torch.sub(wide, top, out=wide if wide.dtype == torch.float32 else None).exp_()
    z = grad.sum(dim=-1, keepdim=True)
    at_label = -z
    if here is not None:
        sums = torch.stack((z, at_target.masked_fill(~here, 0.0)))
        z, at_target = layout.sum_over_tp(sums)
        at_label = -z * here
    grad.scatter_add_(1, target, at_label)
    loss = z.log() - at_target
    if masked is not None:
        loss.masked_fill_(masked, 0.0)
        z = z.masked_fill(masked, float("inf"))
    low = torch.div(grad, z, out=logits) if converts else logits.copy_(grad.div_(z))
    return loss.squeeze(1), low


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, head, masks, dtype, grad_enabled):
        low_h = hidden.to(dtype)
        low_w = aligned_weight(weight, dtype) if weight.is_cuda else weight.to(dtype)
        want_grad = grad_enabled and (hidden.requires_grad or weight.requires_grad)
        learns = want_grad and weight.requires_grad
        n, d = hidden.shape
        largest = head.shard.largest if head.shard else len(weight)
        rows = chunk_rows(n, largest, d if learns else 0, head.chunk_elements)
        wide = n > rows or dtype == torch.float16  # several chunks are summed in fp32
        sum_dtype = torch.float32 if wide else weight.dtype
        losses = []
        grad_hidden = torch.empty_like(low_h) if want_grad else None
        grad_weight = None
        for start in range(0, n, rows):
            grad = None  # frees the last chunk's before there are new logits
            part = slice(start, start + rows)
            chunk_loss, grad = head.chunk_loss(
                head.matmul(low_h[part], low_w), labels[part], head.vocab_size, masks
            )
            losses.append(chunk_loss)
            if grad_hidden is not None:
                head.matmul(grad, low_w.t(), grad_hidden[part])
            if learns:
                grad_weight = _add_product(
                    grad_weight, grad.t(), low_h[part], sum_dtype, head.matmul
                )
        if grad_weight is not None:
            grad_weight = grad_weight[: len(weight)]
        ctx.grads = grad_hidden, grad_weight
        ctx.n = n / head.shard.layout.tp if head.shard else n
        ctx.dtypes = hidden.dtype, weight.dtype
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx, *grad_outputs):
        if ctx.grads is None:
            raise RuntimeError("the chunked loss can be differentiated only once")
        (grad_hidden, grad_weight), ctx.grads = ctx.grads, None  # freed as early as can be
        scale, none = grad_outputs[0] / ctx.n, [None] * 5
        if grad_hidden is not None:
            grad_hidden = _scaled(grad_hidden, scale, ctx.dtypes[0])
        if grad_weight is not None:
            grad_weight = _scaled(grad_weight, scale, ctx.dtypes[1])
        return grad_hidden, grad_weight, *none


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor times a scale, in one pass: in place where the format stays."""
    return torch.mul(x, scale, out=x if x.dtype == dtype else torch.empty_like(x, dtype=dtype))


def matmul_transposed(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """(M, K) times (N, K) transposed."""
    return torch.mm(a, b.t(), out=out)


def _add_product(
    total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype, matmul: Matmul
) -> Tensor:
    """`total + a @ b`, in place; without a total the product, in `dtype`.

    fp16's range is too small for a frequent label's sum, and no loss scale reaches it, so its products
    are made in fp32. Where a matmul can add to an fp32 sum of 16-bit inputs, nothing else passes over it.
    """
    if a.dtype == dtype and total is not None and matmul is matmul_transposed:
        return torch.addmm(total, a, b, out=total)
    if a.dtype == dtype:
        product = matmul(a, b.t())
        return product if total is None else total.add_(product)
    fake = detect_fake_mode() is not None  # a step that is traced, not run
    wide = dtype == torch.float32 and not fake and adds_wide(a.device, a.dtype)
    note_path("sum of the head's gradient", "in the matmul" if wide else "apart")
    if wide:
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    product = a.float() @ b.float() if a.dtype == torch.float16 else a @ b
    return product.to(dtype) if total is None else total.add_(product)


@functools.cache
def adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a matmul of 16-bit matrices can be added to an fp32 one in place here: tried once."""
    if device.type != "cuda":
        return False
    a = torch.full((16, 16), 0.5, dtype=dtype, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 5.0).all())


class LinearCrossEntropy(nn.Module):
    """Mean cross-entropy of `hidden @ weight.T` against `labels`, equal to the plain one.

    It has no parameters. Ranks with a `shard` each return the same loss. Its backward multiplies by their
    number, since each later divides the loss by all ranks (run/loop.py, `loss_divisor`).
    """

    def __init__(
        self,
        vocab_size: int,
        chunk_elements: int = CHUNK_ELEMENTS,
        matmul: Matmul = matmul_transposed,
        shard: VocabShard | None = None,
    ):
        super().__init__()
        self.vocab_size, self.chunk_elements = vocab_size, chunk_elements
        self.matmul, self.shard = matmul, shard
        partial = functools.partial(logits_loss, shard=shard)
        self.chunk_loss: ChunkLoss = logits_loss if shard is None else partial

    def compile_chunks(self, compiler: Callable[[ChunkLoss], ChunkLoss]) -> None:
        """Compile what is computed of a chunk's logits."""
        self.chunk_loss = compiler(self.chunk_loss)

    def forward(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, masks: bool = False
    ) -> Tensor:
        """(N, d) hidden states, (V, d) weight and (N,) int64 labels to a scalar in fp32.

        It is the mean over all N. With `masks`, those with a label below 0 count 0.

        Under autocast the matmuls run in its dtype; softmax and sums are always fp32.
        """
        dtype = autocast_dtype(hidden.device)
        dtype = dtype or torch.promote_types(hidden.dtype, weight.dtype)
        how = self, masks, dtype, torch.is_grad_enabled()
        with no_autocast(hidden.device):
            return _LinearCrossEntropy.apply(hidden, weight, labels, *how)
