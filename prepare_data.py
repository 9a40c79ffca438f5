"""Turn text files into token files for --data: train.bin and val.bin. Needs no torch.

    python prepare_data.py book.txt notes/ --output-dir data/mine
    python prepare_data.py --stdlib --output-dir data/stdlib

Without --tokenizer every UTF-8 byte is a token (vocabulary 256); with a Hugging Face tokenizer.json
the files are encoded with it, and its end-of-text token is put after each document.
"""

import dataclasses
import hashlib
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import llm_train_bench.base.start  # noqa: F401

import numpy as np

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import walk
from llm_train_bench.base.token_files import write_tokens
from llm_train_bench.base.tool_main import run_tool, tool
from llm_train_bench.model.json_files import plain_file
from llm_train_bench.settings.command_line import parse_dataclass
from llm_train_bench.settings.flags import flag

SUFFIXES = (".txt", ".md", ".rst", ".py")
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclasses.dataclass(frozen=True)
class PrepareArgs:
    """Turn text files into token files: train.bin and val.bin.

    inputs: Text files, or directories of .txt, .md, .rst and .py files.
    output_dir: Directory of train.bin and val.bin.
    stdlib: Use the sources of Python's standard library as text.
    tokenizer: A Hugging Face tokenizer.json. By default each byte is a token (vocabulary 256).
    val_fraction: Part that goes into val.bin: whole files, or the end of a single one.
    """

    inputs: tuple[str, ...] = flag((), metavar="[TEXT ...]", positional=True)
    output_dir: str = flag("data", metavar="DIR")
    stdlib: bool = flag(False)
    tokenizer: str | None = flag(None, metavar="FILE")
    val_fraction: float = flag(0.1, at_least=0, at_most=0.99)


@tool("prepare_data.py")
def main(argv: Sequence[str]) -> int:
    """Tokenise all documents and write those chosen for validation into a separate file.

    0 when done, 2 and one line on bad input, 1 where writing fails.
    """
    args = parse_dataclass(PrepareArgs, argv, "prepare_data.py")
    inputs = [Path(i) for i in args.inputs]
    if args.stdlib:
        inputs.append(Path(sysconfig.get_path("stdlib")))
    if not inputs:
        raise UsageError("no input; give text files or directories, or --stdlib")
    texts = (path for place in inputs for path in find_texts(place, args.stdlib))
    # Each once, however it was named.
    paths = list({path.resolve(): path for path in texts}.values())
    if not paths:
        raise UsageError(f"no {', '.join(SUFFIXES)} files under {', '.join(map(str, inputs))}")
    encode, vocab_size = load_encoder(args.tokenizer)
    out = Path(args.output_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {out}: cannot be made: {error.strerror}") from None
    held_out = {path for path in paths if in_validation(path, args.val_fraction)}
    size = {path: path.stat().st_size for path in paths}
    part = sum(size[path] for path in held_out) / max(1, sum(size.values()))
    if args.val_fraction and not args.val_fraction / 4 < part <= min(0.99, 2 * args.val_fraction):
        # Documents are too few or too unlike to hold out whole ones: hold out the end of the text.
        arrays = [encode(text) for text in read_texts(paths, inputs)]
        left = round(sum(map(len, arrays)) * (1 - args.val_fraction))
        parts = {"train": [], "val": []}
        for array in arrays:
            parts["train"].append(array[:left])
            parts["val"].append(array[left:])
            left = max(0, left - len(array))
    else:
        split = {"train": [p for p in paths if p not in held_out], "val": sorted(held_out)}
        parts = {name: map(encode, read_texts(files, inputs)) for name, files in split.items()}
    if not args.val_fraction:
        del parts["val"]
    # Files of an earlier call go only when all is written. One of them beside one of ours could put
    # training text into the validation.
    with tempfile.TemporaryDirectory(dir=out) as unfinished:
        for name, arrays in parts.items():
            ends: list[int] = []
            path = Path(unfinished, f"{name}.bin")
            total = write_tokens(path, counted(arrays, ends), vocab_size)
            # Some documents have no tokens.
            np.save(path.with_suffix(".ends.npy"), np.unique([end for end in ends if end]))
            if not total:
                first = ", ".join(map(str, paths[:3]))
                raise UsageError(f"no text in {first}; nothing was written")
            print(f"{out / name}.bin: {total:,} tokens, vocabulary {vocab_size}")
        for name in ("val.bin", "val.ends.npy"):
            (out / name).unlink(missing_ok=True)
        for path in Path(unfinished).iterdir():
            path.replace(out / path.name)
    return 0


def counted(arrays: Iterable[np.ndarray], ends: list[int]) -> Iterator[np.ndarray]:
    """The arrays; where each ends among all goes into `ends`."""
    for array in arrays:
        ends.append((ends[-1] if ends else 0) + len(array))
        yield array


def find_texts(place: Path, stdlib: bool) -> list[Path]:
    """A file itself, or the text files under a directory in a fixed order, through links too."""
    if not place.is_dir():
        if not place.exists():
            raise UsageError(f"{place}: no such file or directory")
        try:
            return [plain_file(place)]
        except OSError as error:
            raise UsageError(f"{place}: cannot be read: {error.strerror}") from None
    skipped = {"site-packages", "__pycache__", "test", "tests"} if stdlib else {"__pycache__"}
    paths: list[Path] = []
    for directory, _, names in walk(place):
        if not skipped.intersection(directory.relative_to(place).parts):
            paths += [directory / name for name in names]
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file())


def in_validation(path: Path, fraction: float) -> bool:
    """Whether a document is held out. Its name decides: adding others does not change that."""
    digest = hashlib.sha256("/".join(path.resolve().parts[-2:]).encode()).digest()
    return int.from_bytes(digest[:4], "little") < fraction * 2**32


def read_texts(paths: list[Path], named: list[Path]) -> Iterator[str]:
    """Contents one after the other, blank ones left out; UsageError for text that is not UTF-8.

    Sources found in a directory are skipped instead: a few declare another encoding.
    """
    for path in paths:
        try:
            if (text := plain_file(path).read_text(encoding="utf-8")).strip():
                yield text
        except UnicodeDecodeError as error:
            if path.suffix != ".py" or path in named:
                raise UsageError(f"{path}: not UTF-8 text ({error.reason})") from None


def load_encoder(tokenizer: str | None):
    """A function from text to an array of ids, and the size of its vocabulary."""
    if tokenizer is None:
        return lambda text: np.frombuffer(text.encode() + b"\0", dtype=np.uint8), 256
    from tokenizers import Tokenizer

    if not Path(tokenizer).is_file():
        raise UsageError(f"--tokenizer {tokenizer}: no such file; expected a tokenizer.json")
    try:
        loaded = Tokenizer.from_file(tokenizer)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not Exceptions
        raise UsageError(f"--tokenizer {tokenizer}: not a tokenizer.json: {error}") from None
    loaded.no_truncation()  # the file may have been saved with either
    loaded.no_padding()
    ends = [i for i in map(loaded.token_to_id, END_TOKENS) if i is not None][:1]
    if not ends:
        what = f"{tokenizer} has none of {', '.join(END_TOKENS)}"
        print(f"prepare_data.py: {what}: documents follow each other unmarked", file=sys.stderr)

    def encode(text: str) -> np.ndarray:
        try:
            return np.array(loaded.encode(text, add_special_tokens=False).ids + ends)
        except Exception as error:  # a vocabulary that lacks what its own rules need
            raise UsageError(f"--tokenizer {tokenizer}: cannot encode: {error}") from None

    return encode, loaded.get_vocab_size(with_added_tokens=True)


if __name__ == "__main__":
    run_tool(main)
