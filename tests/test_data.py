"""Token files and the batches made of them."""

import gzip

import numpy as np
import pytest
import torch

import prepare_data
from llm_train_bench.apply import data
from llm_train_bench.apply.data import FileTokens, SyntheticTokens, batches, hash_ids
from llm_train_bench.base.documents import index_path
from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.token_files import open_tokens, write_tokens
from llm_train_bench.formulas.work import Batch
from llm_train_bench.model.loss import MASKED
from llm_train_bench.settings.plan import Schedule
from tests.helpers import config, words
from tests.helpers import plan_of as plan_for

CPU = torch.device("cpu")


def plan_of(n_steps, accumulation, bsz, rank=0, world=1):
    batch = Batch(bsz, accumulation, world, bsz * accumulation * world, 1, 0)
    return data.sample_plan(Schedule(0, n_steps), batch, rank)


@pytest.fixture
def counting_file(tmp_path):
    """1000 tokens 0, 1, 2, ...: a token says where it stands."""
    path = tmp_path / "count.bin"
    write_tokens(path, [np.arange(600), np.arange(600, 1000)], 1000)
    return path


@pytest.mark.parametrize(
    ("vocab", "width"), [(256, "uint16"), (2**16, "uint16"), (65537, "uint32")]
)
def test_write_and_open(tmp_path, vocab, width):
    path = tmp_path / "x.bin"
    ids = np.array([0, 5, vocab - 1])
    assert write_tokens(path, [ids, ids], vocab) == 6
    for dtype in ("auto", width):
        tokens = open_tokens(path, dtype)
        assert tokens.dtype == width and tokens.tolist() == [*ids, *ids]
    other = {"uint16": "uint32", "uint32": "uint16"}[width]
    with pytest.raises(UsageError, match=f"--data-dtype {other}: the header of .* says {width}"):
        open_tokens(path, other)
    np.arange(2000, dtype=width).tofile(path)  # with no header it is read with the width given
    assert open_tokens(path, width).tolist() == list(range(2000))


def with_header(*words: int) -> bytes:
    return np.array([*words] + [0] * (256 - len(words)), "<i4").tobytes() + bytes(1998)


@pytest.mark.parametrize(
    ("content", "dtype", "message"),
    [
        # A header of an unknown version would be trained on as tokens.
        *[(with_header(magic, version, 999), dtype, f"magic {magic}, but of version {version}")
          for magic, version in ((20240520, 2), (20240801, 1), (20240801, 8))
          for dtype in ("auto", "uint16")],
        (with_header(20240520, 1, 1000), "auto", "header promises 1000 tokens, its size holds 999"),
        (with_header(20240522, 1, 500), "auto", "has no header"),
        (b"", "uint16", "complete"),
        (b"abc", "uint16", "complete"),
        *[(np.arange(2000, dtype=width).tobytes(), "auto", r"has no header .* --data-dtype uint16")
          for width in ("uint16", "uint32")],
        (b"once upon a time\n" * 200, "auto", "has no header"),
        ("Grüße".encode() * 200, "auto", "has no header"),
        (gzip.compress(bytes(5000), mtime=0), "auto", "has no header"),
        (np.arange(1000, dtype="<u1").tobytes(), "auto", "has no header"),
        (np.arange(1000, 3000, dtype="<i8").tobytes(), "auto", "has no header"),
        (b"\x93NUMPY\x01\x00" + bytes(120) + bytes(range(200)), "auto", "has no header"),
    ],
)  # fmt: skip
def test_what_holds_no_tokens_is_refused(content, dtype, message, tmp_path):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_tokens(tmp_path / "x.bin", dtype)


def test_labels_are_the_next_tokens_and_an_epoch_uses_each_label_once(counting_file):
    source = FileTokens(str(counting_file), 1000, bsz=3, seq_len=37, seed=0)
    assert source.windows.number == 27
    all_labels = []
    for inputs, labels, *_ in batches(source, range(0, 27, 3), CPU):
        assert inputs.shape == labels.shape == (3, 37)
        assert torch.equal(labels, inputs + 1)
        all_labels += labels.flatten().tolist()
    assert sorted(all_labels) == list(range(1, 27 * 37 + 1))


def test_epochs_differ_and_seeds_differ(counting_file):
    def order(seed, epoch):
        source = FileTokens(str(counting_file), 1000, 1, 37, seed)
        return [source.windows.start(epoch * 27 + i) for i in range(27)]

    assert sorted(order(0, 0)) == sorted(order(0, 1)) == sorted(order(1, 0))
    assert order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0)
    assert order(0, 1) == order(0, 1)


def test_a_later_step_needs_no_earlier_one(counting_file):
    """The position is resumable: samples are a function of their number."""
    plan = plan_of(20, 2, 4)
    whole, fresh = (FileTokens(str(counting_file), 1000, 4, 37, 0) for _ in range(2))
    through = list(batches(whole, plan, CPU))
    late = list(batches(fresh, plan[30:], CPU))
    pairs = [[batch[:2] for batch in each] for each in (late, through[30:])]
    torch.testing.assert_close(*pairs, rtol=0, atol=0)


@pytest.mark.parametrize("source_kind", ["file", "synthetic"])
def test_ranks_and_accumulation_split_the_same_global_batch(counting_file, source_kind):
    """One rank with 8 = two ranks with 4 = four ranks with 1 twice: same samples per step."""

    def step_samples(bsz, accumulation, world):
        rows = []
        for rank in range(world):
            source = FileTokens(str(counting_file), 1000, bsz, 31, 5)
            if source_kind == "synthetic":
                source = SyntheticTokens(1000, bsz, 31, 5, CPU)
            plan = plan_of(6, accumulation, bsz, rank, world)
            per_step = [i for i, *_ in batches(source, plan, CPU)]
            assert len(per_step) == 6 * accumulation
            rows.append(torch.stack(per_step).view(6, accumulation * bsz, 31))
        return [sorted(map(tuple, step.tolist())) for step in torch.cat(rows, dim=1)]

    one = step_samples(8, 1, 1)
    assert one == step_samples(4, 1, 2) == step_samples(1, 2, 4) == step_samples(2, 4, 1)
    assert all(len(set(step)) == 8 for step in one)


@pytest.mark.parametrize("ahead", [1, 300, 2**17])
def test_synthetic_tokens_are_the_samples_own_however_many_are_made_at_once(ahead, monkeypatch):
    (samples,) = SyntheticTokens(1000, 64, 31, 5, CPU).micro_batches(range(1))
    monkeypatch.setattr(SyntheticTokens, "AHEAD", ahead)
    plan = range(2, 60, 8)  # the second of four ranks, two samples each
    micro_batches = list(SyntheticTokens(1000, 2, 31, 5, CPU).micro_batches(plan))
    assert len(plan) == 8
    for first, ids in zip(plan, micro_batches, strict=True):
        assert torch.equal(ids, samples[first : first + 2])


def test_synthetic_tokens_are_the_same_in_every_version_and_depend_on_the_seed():
    ids, other = (
        next(iter(SyntheticTokens(50257, 64, 1023, seed, CPU).micro_batches(range(1))))
        for seed in (0, 1)
    )
    assert ids.shape == (64, 1024) and ids.min() >= 0 and ids.max() < 50257
    assert not torch.equal(ids, other)
    pinned = hash_ids(torch.tensor([0, 1, 2**32, 2**40 + 5]), 7).tolist()
    assert pinned == [1433166748, 1663012985, 1325272519, 1917423555]


def test_ids_outside_the_vocabulary_are_found_before_the_first_step(counting_file):
    FileTokens(str(counting_file), 1000, 1, 37, 0).check(10**6)
    # Of 499 samples 300 are used, and they do not hold the largest number.
    used = FileTokens(str(counting_file), 1000, 1, 2, 0).rows(0, 300).max()
    FileTokens(str(counting_file), used + 1, 1, 2, 0).check(300)
    with pytest.raises(UsageError, match="holds token id 998"):
        FileTokens(str(counting_file), used + 1, 1, 2, 0).check(499)
    small = FileTokens(str(counting_file), 500, 1, 37, 0)
    with pytest.raises(UsageError, match=r"token id \d+, but the model's vocabulary ends at 499"):
        small.check(27)
    with pytest.raises(UsageError, match="1000 tokens are fewer than one sequence of 1000"):
        FileTokens(str(counting_file), 1000, 1, 1000, 0)
    FileTokens(str(counting_file), 1000, 1, 999, 0)


def test_prepare_with_a_tokenizer(tmp_path):
    """Documents are encoded by the given tokenizer.json, each followed by its end-of-text token."""
    import tokenizers

    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    text = "a rose is a rose is a rose\n" * 40
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.enable_truncation(5)  # as a training script may have left it
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "out"
    argv = words(tmp_path / "a.txt", "--tokenizer", tmp_path / "tokenizer.json")
    assert prepare_data.main(words(argv, "--val-fraction 0 --output-dir", out)) == 0
    tokens = open_tokens(out / "train.bin").tolist()
    end = tokenizer.token_to_id("<|endoftext|>")
    assert tokens.count(end) == 1 and tokens[-1] == end
    assert tokenizer.decode(tokens[:-1]) == text and len(tokens) < len(text) / 2


def prepared(out) -> list[list[bytes]]:
    """The documents of train.bin and of val.bin, in bytes."""
    files = (open_tokens(out / f"{name}.bin") for name in ("train", "val"))
    return [bytes(tokens.tolist()).split(b"\0") for tokens in files]


@pytest.mark.parametrize("sizes", [[1] * 60, [60], [1, 1, 1, 500, 1]], ids=["many", "one", "odd"])
def test_what_is_held_out_is_not_trained_on(sizes, tmp_path):
    """Every byte is in one of the two files: val.bin has whole documents or the end of the text.

    Beside each file is its index: where its documents end, and the text where it is cut in one.
    """
    (tmp_path / "in").mkdir()
    texts = [f"document {i}: {'x' * 40}\n" * n for i, n in enumerate(sizes)]
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"{i:02}.txt").write_text(text)
    out = tmp_path / "out"
    # Named a second time, and through a link, it is still the same document.
    (tmp_path / "link").symlink_to(tmp_path / "in")
    sources = [tmp_path / "in", tmp_path / "in/00.txt", tmp_path / "link"]
    assert prepare_data.main(words(*sources, "--val-fraction 0.25 --output-dir", out)) == 0
    train, val = prepared(out)
    if len(sizes) == 60:
        assert train[-1] == val[-1] == b""
        assert sorted(train[:-1] + val[:-1]) == sorted(text.encode() for text in texts)
    else:
        assert b"\0".join(train) + b"\0".join(val) == "".join(t + "\0" for t in texts).encode()
    lengths = [sum(len(part) + 1 for part in parts) for parts in (train, val)]
    assert lengths[1] / sum(lengths) == pytest.approx(0.25, abs=0.12)
    for path in (out / "train.bin", out / "val.bin"):
        tokens = open_tokens(path)
        ends = {*(np.flatnonzero(np.array(tokens) == 0) + 1).tolist(), len(tokens)}
        assert np.load(index_path(path)).tolist() == sorted(ends)


def test_a_call_that_fails_leaves_the_files_of_the_last_one(tmp_path, refused):
    """Both stay: an old train.bin beside a new val.bin might hold the validation text."""
    (tmp_path / "in").mkdir()
    for i in range(40):
        (tmp_path / "in" / f"{i:02}.txt").write_text(f"document {i}")
    out = tmp_path / "out"
    argv = [str(tmp_path / "in"), "--output-dir", str(out)]
    assert prepare_data.main([*argv, "--val-fraction", "0.5"]) == 0
    before = prepared(out)
    for i in range(40):  # one of them is in val.bin
        (tmp_path / "in" / f"{i:02}.txt").write_bytes(b"\xff" if i % 2 else b"new")
    refused(prepare_data.main, "not UTF-8 text", argv, "--val-fraction 0.1")
    assert prepared(out) == before and len(list(out.iterdir())) == 4


@pytest.mark.parametrize("bsz", [1, 3, 8, 100])
@pytest.mark.parametrize(("windows", "samples"), [(40, 40), (5000, 4096), (3, 3)])
def test_a_validation_loss_is_of_the_same_labels_whatever_the_batch(
    windows, samples, bsz, tmp_path
):
    """16,384 tokens, or all windows if there are fewer, each once."""
    path = tmp_path / "val.bin"
    write_tokens(path, [np.arange(4 * windows + 1) % 50], 50)
    flags = words("x --seq-len 4 --n-steps 10 --bsz", bsz, "--val-data", path)
    plan = plan_for(flags, config=config("llama", vocab_size=50, pad_token_id=None))
    _, (source, firsts) = data.open_data(plan.args, plan.work, 10, CPU)
    counted, mean = np.zeros(windows, int), 0.0
    for first, batch in zip(firsts, batches(source, firsts, CPU), strict=True):
        assert batch.inputs.shape == (bsz, 4)
        filling = batch.inputs[samples - first :]  # it repeats the last
        assert not len(filling) or (filling == batch.inputs[samples - first - 1]).all()
        for sample, labels in enumerate(batch.labels, first):
            if (labels >= 0).all():
                counted[source.windows.start(sample) // 4] += 1
            else:
                assert (labels == MASKED).all() and sample >= samples
        kept = batch.labels.float().where(batch.labels >= 0, 0.0)
        mean += kept.mean().item() * batch.weight / len(firsts)
    assert counted.sum() == samples and counted.max() == 1
    every = np.stack([source.rows(i, 1)[0, 1:] for i in range(samples)])
    assert mean == pytest.approx(every.mean(), rel=1e-5)
