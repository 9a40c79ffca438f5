"""Packed documents: each is computed as if it were alone, in every family, kernel, file and layout."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from llm_train_bench.apply import data
from llm_train_bench.base import documents
from llm_train_bench.base.documents import index_path, make_packing, read_lengths, starts_of
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.token_files import Windows, open_tokens, write_tokens
from llm_train_bench.formulas.flops import attended_keys, flops_per_token
from llm_train_bench.model import piece_attention
from llm_train_bench.model.layers import block_mask
from llm_train_bench.model.layout import Documents
from llm_train_bench.model.loss import MASKED
from llm_train_bench.model.piece_attention import Seen, attend_in_pieces
from llm_train_bench.parallel.layout import shared_by_work
from tests.helpers import FAMILIES, config, plan_of, read_steps, trained, words
from tests.test_parity import built, some_tokens

T, CPU = 24, torch.device("cpu")
# Beginnings in two samples: a document of one token, one of two, and long ones.
BEGINS = torch.zeros(2, T + 1, dtype=torch.bool)
BEGINS[0, [0, 1, 3, 17]] = BEGINS[1, [0, 11, 24]] = True


def packed(tokens):
    """Inputs, labels without those that cross, and the documents, of (2, T + 1) tokens."""
    starts = torch.from_numpy(starts_of(BEGINS.numpy()))
    labels = tokens[:, 1:].masked_fill(BEGINS[:, 1:], MASKED)
    return tokens[:, :-1], labels, Documents(starts)


def one_by_one(model, tokens):
    """The loss of the documents, each alone, summed over labels, over all positions."""
    total = torch.zeros(())
    for row, begin in zip(tokens, BEGINS, strict=True):
        edges = [*begin.nonzero().flatten().tolist(), T + 1]
        for first, end in itertools.pairwise(edges):
            inputs = row[first : min(end, T)][None]
            labels = row[first + 1 : min(end, T + 1)][None]
            if n := labels.shape[1]:
                total = total + n * model(inputs[:, :n], labels)
    return total / (2 * T)


@pytest.mark.parametrize(
    ("family", "changes"), [*((name, {}) for name in FAMILIES), ("mistral4", {"v_head_dim": 24})]
)
def test_packed_documents_are_the_documents_one_by_one(family, changes):
    model, tokens = built(config(family, **changes), 0, T), some_tokens(2, T + 1)
    outcomes = []
    for loss in (one_by_one(model, tokens), model(*packed(tokens))):
        model.zero_grad()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        outcomes.append({"loss": loss.detach()} | grads)
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_flex_attention_sees_the_same_documents(family):
    models = (built(config(family), 3, T, masked) for masked in ("pieces", "flex"))
    inputs, _, documents = packed(some_tokens(2, T + 1))
    with torch.no_grad():
        torch.testing.assert_close(*(model(inputs, None, documents) for model in models))


def test_the_blocks_of_flex_attention_hold_each_visible_pair_once():
    """The partial and full blocks against the pairs themselves; full blocks have no other pair."""
    length, size = 1000, 128
    begins = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) < 0.004
    begins[:, 0] = True
    position = torch.arange(length)
    starts = torch.where(begins, position, 0).cummax(1).values
    for window, where in itertools.product((None, 1, 100, 128, 300), (starts, None)):
        mask = block_mask(length, window, where, CPU)
        seen = (position <= position[:, None]) & (position > position[:, None] - (window or length))
        seen = seen[None] & (position >= (starts if where is not None else 0 * starts)[..., None])
        n = -(-length // size)
        pairs = torch.nn.functional.pad(seen.float(), (0, n * size - length) * 2)
        pairs = pairs.view(2, n, size, n, size).sum((2, 4))
        found = torch.zeros(2, n, n)
        for kinds in ("kv", "full_kv"):
            counts, indices = (getattr(mask, f"{kinds}_{x}") for x in ("num_blocks", "indices"))
            for b, row in itertools.product(range(len(counts)), range(n)):
                listed = indices[b, 0, row, : counts[b, 0, row]]
                assert len(listed.unique()) == len(listed)
                both = slice(None) if len(counts) == 1 else b
                found[both, row, listed] += 1
                if kinds == "full_kv":
                    rest = length - (n - 1) * size if row == n - 1 else size
                    assert (pairs[both, row, listed] == rest * size).all()
        assert found.max() == 1 and (found[pairs > 0] == 1).all()


def plainly(q, k, v, seen, scale, sinks):
    """Attention by a mask of all scores."""
    (B, H, t, _), S = q.shape, k.shape[2]
    position = torch.arange(S) if seen.positions is None else seen.positions
    key = torch.arange(S)
    mask = (key <= position[:, None]) & (position[:, None] - key < (seen.window or S))
    mask = mask[None, None].expand(B, 1, -1, -1)
    if seen.starts is not None:
        mask = mask & (key >= seen.starts[:, position][:, None, :, None])
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, H, 1, 1).expand(B, H, t, 1)), -1)
    return scores.softmax(-1)[..., :S] @ v


@pytest.mark.parametrize("kernel", ["_Cpu", "_Plain"])
def test_pieces_are_attention_under_a_mask(kernel, monkeypatch):
    """Windows, documents, chunks of queries, sinks, groups and narrow values; all gradients."""
    if kernel == "_Plain":  # the kernel of GPUs in fp32
        monkeypatch.setattr(piece_attention, "_kernel", lambda *_: (piece_attention._Plain, 20))
    torch.manual_seed(0)
    for S, window, packs, chunks, has_sinks in itertools.product(
        (40, 64), (None, 1, 7, 30, 200), (0, 1), (0, 1), (0, 1)
    ):
        K, E = ((4, 16), (2, 16), (1, 8))[S // 8 % 3]
        begins = torch.rand(2, S) < 0.1
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(S), 0).cummax(1).values if packs else None
        parts = torch.randperm(8)[:3].sort().values
        positions = torch.arange(S).view(8, -1)[parts].flatten() if chunks else None
        t = len(positions) if chunks else S
        inputs = [torch.randn(2, t, 4, 16).transpose(1, 2), torch.randn(2, K, S, 16)]
        inputs += [torch.randn(2, K, S, E)] + [torch.randn(4)] * has_sinks
        inputs = [x.requires_grad_() for x in inputs]
        seen, outcomes = Seen(window, starts, positions), []
        for attend in (plainly, attend_in_pieces):
            y = attend(*inputs[:3], seen, 0.3, inputs[3] if has_sinks else None)
            grads = torch.autograd.grad((y * torch.cos(y.detach() + 1)).sum(), inputs)
            outcomes.append([y, *grads])
        torch.testing.assert_close(*outcomes, rtol=2e-5, atol=2e-5)


def test_no_mask_is_larger_than_4096_squared():
    """Every tensor that a kernel makes on a rank of a million tokens, under fake tensors."""
    masks, flash = [], []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            sizes = [x.shape[-2:] for x in made if x.ndim >= 2 and x.shape[-1] > 128]
            masks.extend(map(math.prod, sizes))
            flash.extend(["flash"] * ("flash" in str(func)))
            return out

    length, chunk = 2**20, 2**20 // 32
    positions = torch.cat((torch.arange(chunk), torch.arange(length - chunk, length)))
    for window in (0, 128, 4096, 2**17):
        rows = piece_attention._kernel(torch.empty(1), window)[1]
        pieces = piece_attention._pieces(1, length, None, positions, window, rows)
        sizes = [(p.n, p.first + p.n - p.low) for p in itertools.islice(pieces, 4)]
        with FakeTensorMode(), Look():
            for n, n_keys in sizes:
                q = torch.empty(1, 8, n, 128, dtype=torch.bfloat16)
                k = torch.empty(1, 1, n_keys, 128, dtype=torch.bfloat16)
                piece_attention._hidden.cache_clear()
                y, lse = piece_attention._Cpu.forward(q, k, k, window, 0.1)
                piece_attention._Cpu.backward(y, q, k, k, y, lse, window, 0.1)
        piece_attention._hidden.cache_clear()
    assert 0 < max(masks) <= 4096**2 and len(flash) > 8
    counts = block_mask(length, None, torch.zeros(1, length, dtype=torch.int64), CPU)
    assert counts.kv_indices.numel() <= 4096**2


def test_shares_of_documents_are_balanced():
    """By the keys that each rank's queries meet; a head and a tail alone would be far off."""
    packing = documents.DrawnDocuments(read_lengths("500,1.2"), 8192, 0)
    starts = torch.from_numpy(starts_of(packing.begins(np.arange(1))))
    keys = torch.arange(1, 8193) - starts[0]
    for cp in (2, 4, 8):
        shares = shared_by_work(starts, cp)
        assert shares.flatten().sort().values.equal(torch.arange(8192))
        assert (shares.diff(dim=1) > 0).all()
        work = keys[shares].sum(1).double()
        assert work.max() / work.mean() < 1.1
    head, tail = torch.arange(8192).view(16, -1).split(8)
    plain = keys[torch.cat((head, tail.flip(0)), dim=1)].sum(1).double()
    assert plain.max() / plain.mean() > 1.5


def test_lengths_are_drawn_from_a_list_or_a_lognormal(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[7, 3, 3]")
    packing = make_packing("synthetic", "auto", 999, 5, str(path))
    begins = packing.begins(np.arange(300))
    counts = dict(documents.count_lengths(packing, range(300)))
    assert sum(n * count for n, count in counts.items()) == 300 * 999
    assert counts[3] / counts[7] == pytest.approx(2, rel=0.05)
    assert (begins == packing.begins(np.arange(300))).all()
    assert (packing.begins(np.arange(7, 8)) == begins[7:8]).all()
    other = make_packing("synthetic", "auto", 999, 6, str(path)).begins(np.arange(300))
    assert (other != begins).any()
    table = read_lengths("800,1.2")
    assert table.mean() == pytest.approx(800, rel=1e-3)
    assert np.log(table).std() == pytest.approx(1.2, rel=0.01)
    small = read_lengths("2,3")  # none is rounded down to 0
    assert small.min() == 1 and (np.diff(small) >= 0).all()


def test_documents_without_a_label_are_refused(tmp_path, tokens_file):
    (tmp_path / "ones.json").write_text("[1, 1]")
    np.save(index_path(tokens_file), np.arange(1, len(open_tokens(str(tokens_file), "auto")) + 1))
    for more in (["--pack-lengths", "1,0"], ["--pack-lengths", tmp_path / "ones.json"],
                 ["--data", tokens_file]):  # fmt: skip
        with pytest.raises(UsageError, match="documents of one token have no label"):
            plan_of(words("configs/llama-tiny.json", PACKED, more), platform="cpu")


@pytest.mark.parametrize("text", words("x [] [0] [1.5] {} [true] 0,1 5,-1 a,b nan,1"))
def test_lengths_that_are_none(text, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    for given in (str(path), text) if "," in text else (str(path),):
        with pytest.raises(UsageError, match="--pack-lengths"):
            read_lengths(given)


@pytest.fixture
def tokens_file(tmp_path):
    """40 documents of 1 to 40 tokens, the last of each of which is 0."""
    documents = [np.append(np.full(n, 1 + n % 50), 0) for n in range(40)]
    path = tmp_path / "x.bin"
    write_tokens(path, documents, 97)
    np.save(index_path(path), np.cumsum([len(d) for d in documents]))
    return path


def test_documents_of_a_file_end_where_its_index_or_separator_says(tokens_file):
    by_index, by_token = (make_packing(str(tokens_file), "auto", 37, 0, None, s) for s in (None, 0))
    samples = np.arange(30)
    tokens, begins = open_tokens(tokens_file), by_index.begins(samples)
    assert (begins == by_token.begins(samples)).all()
    for sample, row in zip(samples.tolist(), begins, strict=True):
        start = by_index.windows.start(sample)
        right = [0, *(i for i in range(1, 38) if tokens[start + i - 1] == 0)]
        assert row.nonzero()[0].tolist() == right


def test_indices_that_belong_to_another_file_are_refused(tokens_file):
    index = index_path(tokens_file)
    good = np.load(index)
    last, unsorted = len(good) - 1, good.astype(np.uint32)
    unsorted[[0, 1]] = unsorted[[1, 0]]  # differences of unsigned numbers wrap
    large = np.insert(good.astype(np.uint64), last, 2**63 + 1)
    wrong_ones = [good[:-1], good[::-1], good + 1, good.astype(float), good[None], good[:0]]
    for wrong in (*wrong_ones, unsorted, large):
        np.save(index, wrong)
        with pytest.raises(UsageError, match=r"is not an index of the documents"):
            make_packing(str(tokens_file), "auto", 37, 0)
    np.save(index, good)
    whole = index.read_bytes()
    damaged = [b"no array", whole[:-8], whole[:100], whole.replace(b"}", b"{", 1)]
    damaged += [whole.replace(b"'<i8'", b"'<i9'"), whole.replace(b"(", b"(9" * 9, 1)]
    shape = f"({len(good)},)".encode()
    damaged += [whole.replace(shape, b"(" + b"9" * n + b",)") for n in (12, 30)]
    for content in damaged:
        index.write_bytes(content)
        with pytest.raises(UsageError, match="cannot be read as an index"):
            make_packing(str(tokens_file), "auto", 37, 0)
    index.unlink()
    with pytest.raises(UsageError, match=r"has no index x\.ends\.npy"):
        make_packing(str(tokens_file), "auto", 37, 0)
    with pytest.raises(UsageError, match="does not hold that token"):
        make_packing(str(tokens_file), "auto", 37, 0, None, 96)


def test_a_step_counts_its_own_labels_alone():
    """However its samples are dealt out, the mean over micro batches is the mean over labels."""
    packing = documents.DrawnDocuments(np.array([2, 3, 50]), 31, 0)
    source = data.SyntheticTokens(97, 2, 31, 0, CPU)
    source.packing, source.global_batch = packing, 8
    for first_sample in (0, 8):
        samples = range(first_sample, first_sample + 24, 2)
        got = list(data.batches(source, samples, CPU))
        for step in range(3):
            parts = got[4 * step : 4 * step + 4]
            labels = torch.cat([part.labels for part in parts])
            kept = (labels != MASKED).sum().item()
            assert {part.weight for part in parts} == {labels.numel() / kept}
    starts = got[0].documents.starts
    crossing = torch.cat((starts[:, 1:] != starts[:, :-1], torch.zeros(2, 1, dtype=torch.bool)), 1)
    assert (got[0].labels[:, :-1] == MASKED).equal(crossing[:, :-1])


def test_flops_count_the_documents():
    lengths = ((10, 3), (70, 1))
    assert attended_keys(lengths, None, False) == (3 * 100 + 4900) / 100
    assert attended_keys(lengths, None, True) == (3 * 100 + 4900) / 200
    assert attended_keys(lengths, 20, False) == (3 * 100 + 70 * 20) / 100
    begins = np.zeros((2, 9), dtype=bool)
    begins[0, [0, 3]] = begins[1, 0] = begins[1, 8] = True
    assert documents.lengths_in(begins) == {3: 1, 5: 1, 8: 1}


PACKED = "--device cpu --amp off --seq-len 48 --n-steps 2 --warmup-steps 1 --bsz 2 --pack".split()


def test_a_packed_run_names_both_counts(tmp_path, tokens_file):
    shape = config("llama")
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(shape.raw))
    run = trained(tmp_path / "runs", path, PACKED, "--data", tokens_file, "--val-data", tokens_file)
    m = run["metrics"]
    assert m["val_loss"] < m["val_loss_before"]
    # Both losses are means over labels, each document computed by itself.
    model, tokens = (
        built(shape, 0, 48),
        torch.from_numpy(np.array(open_tokens(tokens_file), np.int64)),
    )
    packing = make_packing(str(tokens_file), "auto", 48, 0)
    first, every = read_steps(tmp_path / "runs")[0]["loss"], range(packing.windows.number)
    for loss, samples in ((first, range(2)), (m["val_loss_before"], every)):
        total, count = 0.0, 0
        for sample, row in zip(samples, packing.begins(np.array(samples)), strict=True):
            start = packing.windows.start(sample)
            edges = [*np.flatnonzero(row[:-1]).tolist(), 48]
            for begin, end in itertools.pairwise(edges):
                last = end if end == 48 and not row[48] else end - 1
                if n := last - begin:
                    part = tokens[start + begin : start + last + 1][None]
                    total += n * model(part[:, :-1], part[:, 1:]).item()
                    count += n
        assert loss == pytest.approx(total / count, rel=1e-5)
    assert run["attention_kernel"] == "flash" and run["observed"]["paths"]["attention"] == "pieces"
    plan = plan_of(words(path, PACKED, "--data", tokens_file), platform="cpu")
    assert isinstance(plan.packing, documents.FileDocuments)
    assert isinstance(plan.packing.windows, Windows)
    used = plan.packing.begins(np.arange(2, 6))
    assert dict(plan.work.batch.documents) == documents.lengths_in(used)
    assert m["flops_per_token_palm"] == flops_per_token(shape, plan.work.batch.lengths, False)
    unpacked = flops_per_token(shape, 48, False)
    assert m["flops_per_token_unpacked"] == unpacked > m["flops_per_token_palm"]
    assert m["document_length_mean"] == 4 * 48 / sum(documents.lengths_in(used).values())
