"""What a checkpoint says of itself, which is the newest good one, and whether a run may go on from it.

Needs no torch. A checkpoint is a directory `step-N` whose facts.json has the checksum of every file. It
gets this name last, so what has the name is complete.
"""

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from llm_train_bench.base.documents import index_path
from llm_train_bench.base.errors import UsageError, one_line
from llm_train_bench.base.files import checksum, sync_to_disk
from llm_train_bench.base.strict import Strict, first_problem
from llm_train_bench.model.json_files import parse_json, plain_file, plain_text
from llm_train_bench.results.result_files import storable
from llm_train_bench.settings.flags import LEARNT, flag_of, of_kind
from llm_train_bench.settings.plan import Plan

FACTS = "facts.json"
# So many of the newest checkpoints are kept.
KEPT = 2
# Flags that the learning rate's curve, or the data, depend on besides the hyperparameters.
ALSO_EQUAL = ("n_steps", "warmup_steps", "pad_vocab", "global_bsz")


class Facts(Strict):
    """facts.json. Tensors are in the other files."""

    schema_version: Literal[5] = 5
    run: str
    step: int
    layout: str
    """Script, ranks and accumulation: where they are the same, dropout goes on as it was."""
    args: dict[str, Any]
    """With the resolved seq_len and global_bsz."""
    training: dict[str, str]
    """What must stay the same (training_of)."""
    config: dict[str, Any]
    linear: str | None
    """Library of linear layers, with which a resumed run goes on; None if none was chosen."""
    files: dict[str, int]
    """The CRC-32 of each."""


def commit(facts: Facts, directory: Path) -> None:
    """Write facts.json, with a checksum of its own, and give the checkpoint its final name."""
    content = storable(facts.model_dump(mode="json"))
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (directory / FACTS).write_text(json.dumps({"crc32": crc, "facts": content}), encoding="utf-8")
    for path in [*directory.iterdir(), directory]:
        sync_to_disk(path)
    directory.rename(directory.with_suffix(""))
    sync_to_disk(directory.parent)


def read_facts(directory: Path) -> Facts:
    """The facts of a checkpoint whose files are as they were written; else ValueError or OSError."""
    content = parse_json(plain_text(directory / FACTS))
    if not isinstance(content, dict) or content.keys() != {"crc32", "facts"}:
        raise ValueError(f"{FACTS} is not of a checkpoint")
    if zlib.crc32(json.dumps(content["facts"], sort_keys=True).encode()) != content["crc32"]:
        raise ValueError(f"{FACTS} is not what was written")
    try:
        facts = Facts.model_validate(content["facts"])
    except ValidationError as error:
        raise ValueError(f"{FACTS} is of another version: {first_problem(error)}") from None
    if step_of(directory) not in (-1, facts.step):
        raise ValueError(f"it is of step {facts.step}")
    for name, crc in facts.files.items():
        if checksum(plain_file(directory / Path(name).name)) != crc:
            raise ValueError(f"{name} is not what was written")
    return facts


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint; -1 for another name."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint at a path, or those of the run there, oldest first."""
    if (path / FACTS).exists():
        return [path]
    found = [*path.glob("checkpoints/step-*"), *path.glob("step-*")]
    return sorted((p for p in found if step_of(p) >= 0), key=step_of)


def remove_older(checkpoints: Path) -> None:
    """Remove the checkpoints in a directory, except the newest ones."""
    for path in checkpoints_at(checkpoints)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def newest_good(checkpoints: Sequence[Path], refused: list[str]) -> tuple[Path, Facts] | None:
    """The last one that is as it was written; why others are not is added to `refused`."""
    for path in reversed(checkpoints):
        try:
            return path, read_facts(path)
        except (OSError, ValueError) as error:
            refused.append(f"{path} is left out: {reason(error)}")
    return None


def reason(error: BaseException) -> str:
    """Why work on files failed, in one line: the first cause, which PyTorch hides when a disk is full."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        name = f"{Path(error.filename).name}: " if error.filename else ""
        return name + error.strerror
    return one_line(error) or type(error).__name__


def training_of(plan: Plan) -> dict[str, str]:
    """What must stay the same where a run goes on, by its name in messages."""
    values, config = resolved_flags(plan), plan.work.config
    # Not --init-from: what a run started from before does not matter.
    names = (*sorted(of_kind(LEARNT) - {"init_from"}), *ALSO_EQUAL)
    training = {"the model": config.hash} | {flag_of(name): str(values[name]) for name in names}
    files = {flag_of(name): values[name] for name in ("data", "val_data", "pack_lengths")}
    files = {name: Path(path) for name, path in files.items() if path}
    if values["pack"] and values["pack_separator"] is None:
        files |= {f"the index of {name}": index_path(path) for name, path in files.items()}
    return training | {name: content_of(path) for name, path in files.items() if path.is_file()}


def resolved_flags(plan: Plan) -> dict[str, Any]:
    """The flags of a run, with the sizes of a step as they were resolved."""
    batch = plan.work.batch
    return vars(plan.args) | {"seq_len": batch.seq_len, "global_bsz": batch.global_batch}


def content_of(path: Path) -> str:
    """What tells a file from others: its size, and the CRC-32 of its bytes.

    Of a file longer than 256 MiB these are the bytes of 256 blocks, evenly spread.
    """
    size, block, crc = path.stat().st_size, 2**20, 0
    with path.open("rb") as f:
        for begin in range(0, size, max(block, size // 256)):
            f.seek(begin)
            crc = zlib.crc32(f.read(block), crc)
    return f"{size} bytes with CRC-32 {crc:08x}"


def check_same_training(saved: dict[str, str], path: Path, now: dict[str, str]) -> None:
    """UsageError, by name, for whatever would make the resumed run another training (training_of)."""
    for name in saved | now:
        if saved.get(name) != now.get(name):
            raise UsageError(
                f"{name} {now.get(name)}: the checkpoint {path} was trained with {saved.get(name)}; "
                "give the same"
            )
