"""Cross-entropy of a linear head, chunk by chunk, so that the full logits never exist.

The logits of N positions over V words are the largest tensor of a training step (N = 8192 and
V = 128256 in fp32: 3.9 GiB, several times over in a plain backward). Here a chunk of rows is
projected, and its loss and its logits' gradient are taken at once. Before the next chunk that
gradient is folded into those of the hidden states and the weight. There are three matmuls, as many
as the plain way, none repeated.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.chunks import CHUNK_ELEMENTS, chunk_rows
from model.layers import autocast_dtype, no_autocast


def logits_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Summed loss (fp32 scalar) and softmax minus one-hot (n, V), in the dtype of the hidden states.

    Rows of `weight` from `vocab_size` on are padding and get no probability.
    """
    n, fused = weight.shape[0], torch.compiler.is_compiling()
    # Rows begin at multiples of 16 bytes. A matmul cannot load others (a vocabulary of 50257) by
    # tensor cores' wide instructions:
    # https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication
    padding = -n % 8
    low = None if fused else hidden.new_empty(hidden.shape[0], n + padding)[:, :n]
    logits = torch.mm(hidden, weight.t(), out=low)
    if weight.shape[0] > vocab_size:
        logits[:, vocab_size:] = float("-inf")
    target = labels[:, None]
    if fused:
        # One fused kernel; a scatter would split it in two.
        logits = logits.float()
        log_z = logits.logsumexp(dim=-1, keepdim=True)
        loss = (log_z - logits.gather(1, target)).sum()
        hit = torch.arange(logits.shape[1], device=logits.device) == target
        grad = ((logits - log_z).exp() - hit.float()).to(hidden.dtype)
        return loss, F.pad(grad, (0, padding))[:, :n]
    return in_few_passes(logits, low, target, converts=logits.is_cuda)


def in_few_passes(
    logits: Tensor, low: Tensor, target: Tensor, converts: bool
) -> tuple[Tensor, Tensor]:
    """Summed loss of (n, V) logits for (n, 1) labels, and softmax minus one-hot, written to `low`.

    `low` may be the logits' own memory. At most one fp32 copy of the logits is used (logsumexp and
    softmax use two). With `converts` the kernels convert as they read and write, as a GPU's do; on
    a CPU a separate conversion is cheaper.
    """
    wide = logits if converts else logits.float()
    highest = wide.amax(dim=-1, keepdim=True).float()
    at_target = wide.gather(1, target).float() - highest
    grad = torch.sub(wide, highest, out=wide if wide.dtype == torch.float32 else None).exp_()
    z = grad.sum(dim=-1, keepdim=True)
    grad.scatter_add_(1, target, -z)
    low = torch.div(grad, z, out=low) if converts else low.copy_(grad.div_(z))
    return (z.log() - at_target).sum(), low


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, vocab_size, dtype, rows, chunk_fn, want_grad):
        low_h, low_w = hidden.to(dtype), weight.to(dtype)
        n = hidden.shape[0]
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(low_h) if want_grad else None
        grad_weight = None
        for start in range(0, n, rows):
            grad = None  # frees the last chunk's before there are new logits
            part = slice(start, start + rows)
            chunk_loss, grad = chunk_fn(low_h[part], low_w, labels[part], vocab_size)
            loss = loss + chunk_loss
            if not want_grad:
                continue
            torch.mm(grad, low_w, out=grad_hidden[part])
            # Each product is rounded to `dtype` once; the sum of several is kept in fp32.
            if dtype == torch.float16:
                # A frequent label's sum exceeds fp16's range, and no loss scale reaches it.
                if grad.is_cuda and not torch.version.hip:
                    product = torch.mm(grad.t(), low_h[part], out_dtype=torch.float32)
                else:
                    product = grad.t().float() @ low_h[part].float()
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
            elif grad_weight is None:
                sum_dtype = torch.float32 if n > rows else weight.dtype
                grad_weight = (grad.t() @ low_h[part]).to(sum_dtype)
            elif dtype == grad_weight.dtype:
                torch.addmm(grad_weight, grad.t(), low_h[part], out=grad_weight)
            else:
                grad_weight += grad.t() @ low_h[part]
        ctx.grads, ctx.n = (grad_hidden, grad_weight), n
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss / n

    @staticmethod
    def backward(ctx, grad_output):
        if ctx.grads is None:
            raise RuntimeError("the chunked loss can be differentiated only once")
        grad_hidden, grad_weight = ctx.grads
        ctx.grads = None  # they are scaled in place, and freed as early as can be
        scale = grad_output / ctx.n
        hidden_dtype, weight_dtype = ctx.dtypes
        grad_hidden = grad_hidden.mul_(scale).to(hidden_dtype)
        grad_weight = grad_weight.mul_(scale).to(weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


class LinearCrossEntropy(nn.Module):
    """Mean cross-entropy of `hidden @ weight.T` against `labels`, equal to the plain one.

    A module without parameters, so that the chunk function can be compiled in place.
    """

    def __init__(self, vocab_size: int, chunk_elements: int = CHUNK_ELEMENTS):
        super().__init__()
        self.vocab_size = vocab_size
        self.chunk_elements = chunk_elements
        self.chunk_fn = logits_loss

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """(N, d) hidden states, (V, d) weight and (N,) int64 labels to a scalar in fp32.

        Under autocast the matmuls run in its dtype; softmax and sums are always fp32.
        """
        dtype = autocast_dtype(hidden.device)
        dtype = dtype or torch.promote_types(hidden.dtype, weight.dtype)
        rows = chunk_rows(hidden.shape[0], weight.shape[0], self.chunk_elements)
        want_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        with no_autocast(hidden.device):
            return _LinearCrossEntropy.apply(
                hidden, weight, labels, self.vocab_size, dtype, rows, self.chunk_fn, want_grad
            )
