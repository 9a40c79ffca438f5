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
from llm_train_bench.settings.flags import LEARNT, Args, flag_of, of_kind, present_flags
from llm_train_bench.settings.plan import Plan

FACTS = "facts.json"
# So many of the newest checkpoints are kept.
KEPT = 2
# Flags that the learning rate's curve, or the data, depend on besides the hyperparameters.
ALSO_EQUAL = ("n_steps", "warmup_steps", "pad_vocab", "global_bsz")
# A file of data from this size [bytes] on is taken for the same if its time of change is.
LONG = 2**28


class Facts(Strict):
    """facts.json. Tensors are in the other files; model/stored.py names them."""

    schema_version: Literal[4] = 4
    run: str
    step: int
    layout: str
    """Script, ranks and accumulation: where they are the same, dropout goes on as it was."""
    args: dict[str, Any]
    """With the resolved seq_len and global_bsz."""
    model_hash: str
    config: dict[str, Any]
    data: dict[str, tuple[int, int, int]]
    """Size [bytes], CRC-32 and time of change [ns since 1970] of each file of data, by its flag."""
    linear: str | None
    """Library of linear layers, with which a resumed run goes on; None if none was chosen."""
    files: dict[str, int]
    """The CRC-32 of each."""


def commit(facts: Facts, directory: Path) -> None:
    """Write facts.json, with a checksum of its own, and give the checkpoint its final name."""
    content = storable(facts.model_dump(mode="json"))
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (directory / FACTS).write_text(json.dumps({"crc32": crc, "facts": content}), encoding="utf-8")
    sync_to_disk(directory / FACTS)
    sync_to_disk(directory)
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


def remove_older(place: Path) -> None:
    """Remove the checkpoints in a directory, except the newest ones."""
    for path in checkpoints_at(place)[:-KEPT]:
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


def check_same_training(facts: Facts, path: Path, plan: Plan) -> None:
    """UsageError, by name, for whatever would make the resumed run another training."""
    if facts.model_hash != plan.work.config.hash:
        raise UsageError(f"--resume {path}: is of another model than {plan.work.config.path}")
    saved, now = present_flags(facts.args), present_flags(resolved_flags(plan))
    # Not --init-from: what a run started from before does not matter.
    for name in (*sorted(of_kind(LEARNT) - {"init_from"}), *ALSO_EQUAL):
        if saved[name] != now[name]:
            raise UsageError(
                f"{flag_of(name)} {now[name]}: the checkpoint {path} was trained with {saved[name]}; "
                "give the same"
            )
    files = describe_data(plan.args, facts.data)
    for name in sorted(facts.data.keys() | files.keys()):
        if files.get(name, ())[:2] != facts.data.get(name, ())[:2]:
            flag, _, index = name.partition(" ")
            which = "the index of its documents" if index else "the file"
            raise UsageError(
                f"{flag_of(flag)}: {which} is not the one that {path} was trained on; give the same"
            )


def resolved_flags(plan: Plan) -> dict[str, Any]:
    """The flags of a run, with the sizes of a step as they were resolved."""
    batch = plan.work.batch
    return vars(plan.args) | {"seq_len": batch.seq_len, "global_bsz": batch.global_batch}


def describe_data(flags: Args, known: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Facts.data of the files of a run; `FLAG index` is the index of documents beside that flag's file.

    A LONG file of the size and time of change of a `known` one is not read.
    """
    files = {"data": flags.data, "val_data": flags.val_data, "pack_lengths": flags.pack_lengths}
    paths = {name: Path(path) for name, path in files.items() if path}
    if flags.pack and flags.pack_separator is None:
        paths |= {f"{name} index": index_path(path) for name, path in paths.items()}
    described = {}
    for name, path in paths.items():
        if path.is_file():
            size, changed = path.stat().st_size, path.stat().st_mtime_ns
            before = known.get(name, (0, 0, 0))
            same = size >= LONG and (size, changed) == (before[0], before[2])
            described[name] = (size, before[1] if same else checksum(path), changed)
    return described
