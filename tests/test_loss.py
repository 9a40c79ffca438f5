"""The chunked loss equals the plain one in value and gradient, and needs less memory."""

import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from llm_train_bench.model import loss as head
from llm_train_bench.model.loss import LinearCrossEntropy

N, D, V = 75, 32, 211


def tensors(dtype=torch.float32, rows=V):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(rows, D, generator=g).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=g)


@pytest.mark.parametrize("elements", [1, 16 * V, 40 * V, 10**9], ids=lambda e: f"chunk{e}")
def test_equals_plain_cross_entropy(elements):
    hidden, weight, labels = tensors()
    plain_h, plain_w = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    plain = F.cross_entropy(plain_h @ plain_w.t(), labels)
    (plain * 0.25).backward()
    loss = LinearCrossEntropy(V, elements)(hidden, weight, labels)
    (loss * 0.25).backward()
    torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(hidden.grad, plain_h.grad, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(weight.grad, plain_w.grad, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_logits_have_aligned_rows(compiled):
    """With a vocabulary like 50257 the matmuls they enter would miss tensor cores' wide loads."""
    hidden, weight, labels = (t.detach() for t in tensors())
    fn = LinearCrossEntropy(V).chunk_loss
    fn = torch.compile(fn, backend="aot_eager") if compiled else fn
    wide = head.aligned_weight(weight, torch.bfloat16)
    assert wide.shape == (216, D) and torch.equal(wide[:V], weight.bfloat16())
    assert not wide[V:].any()  # they meet gradients of 0, and NaN would stay
    losses, grad = fn(hidden @ head.aligned_weight(weight, torch.float32).t(), labels, V, False)
    plain = F.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    torch.testing.assert_close(losses, plain)
    assert grad.shape == (N, 212) and not grad[:, V:].any()
    exact = (hidden @ weight.t()).softmax(-1)
    exact[torch.arange(N), labels] -= 1
    torch.testing.assert_close(grad[:, :V], exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("converts", [False, True])
def test_few_passes_are_exact_in_every_format(converts, dtype):
    """Up to the rounding of the final format; labels have almost no or almost all probability."""
    logits = (8 * torch.randn(64, 211, generator=torch.Generator().manual_seed(0))).to(dtype)
    target = torch.cat((logits[:32].argmax(-1), logits[32:].argmin(-1)))[:, None]
    logits[0, 5], target[0] = 60.0, 5
    exact = logits.double()
    grad = exact.softmax(-1)
    grad[torch.arange(64), target[:, 0]] -= 1
    losses, low = head.in_few_passes(logits, target, target < 0, converts)
    assert low.dtype == dtype and low.data_ptr() == logits.data_ptr()
    plain = F.cross_entropy(exact, target[:, 0], reduction="none")
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), plain, rtol=1e-6, atol=1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(low.double(), grad, rtol=eps, atol=1e-6)


def test_under_bf16_autocast_it_is_no_less_exact_than_the_plain_way():
    """Errors against fp64, both with bf16 matmuls; sums and softmax are fp32."""
    hidden, weight, labels = tensors(torch.bfloat16)
    exact_h, exact_w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact = F.cross_entropy(exact_h @ exact_w.t(), labels)
    exact.backward()
    errors = {}
    for kind in ("plain", "chunked"):
        h, w = (t.detach().clone().requires_grad_() for t in (hidden, weight))
        with torch.autocast("cpu", torch.bfloat16):
            if kind == "plain":
                loss = F.cross_entropy(F.linear(h, w).float(), labels)
            else:
                loss = LinearCrossEntropy(V, 16 * V)(h, w, labels)
        loss.backward()
        assert loss.dtype == torch.float32 and w.grad.dtype == torch.float32
        errors[kind] = [abs(loss.item() - exact.item())]
        for low, high in ((w.grad, exact_w.grad), (h.grad, exact_h.grad)):
            errors[kind].append(((low - high).norm() / high.norm()).item())
    for ours, plain in zip(errors["chunked"], errors["plain"], strict=True):
        assert ours <= 1.1 * plain + 1e-4, errors


def test_fp16_gradients_of_a_frequent_label_do_not_overflow():
    """The sum over 32768 rows of one label is beyond fp16's 65504; the mean is not."""
    n = 32768
    hidden = torch.full((n, 8), 4.0, dtype=torch.float16)
    weight = torch.zeros(64, 8, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = LinearCrossEntropy(64)(hidden, weight, torch.zeros(n, dtype=torch.int64))
    loss.backward()
    expected = torch.full((8,), 4 * (1 / 64 - 1))
    torch.testing.assert_close(weight.grad[0], expected, rtol=1e-3, atol=0)


def test_no_gradient_is_computed_when_none_is_wanted():
    with torch.no_grad():
        assert not LinearCrossEntropy(V)(*tensors()).requires_grad


def test_no_two_chunks_gradients_are_there_at_once():
    loss = LinearCrossEntropy(V, 16 * V)
    chunk_loss, before, there = loss.chunk_loss, [], []

    def watched(*inputs):
        there.append([grad() is not None for grad in before])
        value, grad = chunk_loss(*inputs)
        before.append(weakref.ref(grad))
        return value, grad

    loss.compile_chunks(lambda function: watched)
    loss(*tensors()).backward()
    assert len(there) == 5 and not any(map(any, there))


def test_a_second_backward_is_an_error_not_a_wrong_gradient():
    loss = LinearCrossEntropy(V)(*tensors())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_with_parts_of_the_vocabulary_have_the_loss_of_all(missing, dtype):
    """As threads would: `missing` columns of padding lie behind a rank's own, as a GPU's matmuls want."""
    torch.manual_seed(0)
    V, parts, n = 21, ((0, 11), (11, 21)), 40
    logits, labels = torch.randn(n, V, dtype=dtype), torch.randint(V, (n,))
    labels[3] = -100
    expected, expected_grad = head.logits_loss(logits.clone(), labels, V, masks=True)
    own = [torch.cat((logits[:, a:b], logits.new_full((n, missing), 9.0)), 1) for a, b in parts]
    top = logits.amax(1, keepdim=True).float()
    sums: list[torch.Tensor] = []
    for joins in (False, True):  # first each rank's sums, then with those of all
        given = lambda x, j=joins: torch.stack(sums).sum(0) if j else (sums.append(x), x)[1]  # noqa: E731
        all_ranks = mock.Mock(sum_over_tp=given, max_over_ranks=lambda x: top)
        shards = [head.VocabShard(a, 11, all_ranks) for a, _ in parts]
        made = [
            head.logits_loss(x.clone(), labels, b - a, True, shard)
            for shard, x, (a, b) in zip(shards, own, parts, strict=True)
        ]
    for (loss, grad), (a, b) in zip(made, parts, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad[:, : b - a], expected_grad[:, a:b])
        assert not grad[:, b - a :].any()
