"""What a checkpoint holds, which is the newest good one, and whether a run may go on from it.

Needs no torch. There is no file that names the latest checkpoint: the newest directory whose manifest
and checksums agree is the latest.
"""

import contextlib
import json
import re
import zlib
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.strict import Strict, first_problem
from llm_train_bench.model.json_files import parse_json, plain_file, plain_text
from llm_train_bench.model.stored import MANIFEST_VERSION, OTHER_VERSION, StoredShard
from llm_train_bench.results.result_files import storable
from llm_train_bench.run.checkpoint.durable import Files, checksum, failure_of
from llm_train_bench.settings.flags import LEARNT, DataFlags, flag_of, of_kind, present_flags
from llm_train_bench.settings.plan import Plan

MANIFEST = "manifest.json"
COMMITTED = re.compile(r"step-\d{8,}")
# So many of the newest checkpoints are kept.
KEPT = 2
# Flags that the learning rate's curve, or the data, depend on besides the hyperparameters.
ALSO_EQUAL = ("n_steps", "warmup_steps", "pad_vocab")


class StoredTensor(Strict):
    """A tensor's format, whole shape, groups of rows (Weight.groups) and shards."""

    dtype: str
    shape: tuple[int, ...]
    groups: int = 1
    parts: list[StoredShard]


class StoredFile(Strict):
    """A file's size and CRC-32."""

    bytes: int
    crc32: int


class StoredData(StoredFile):
    """A token file's size, CRC-32 and time of change; where size and time agree nothing is read."""

    mtime_ns: int


class Manifest(Strict):
    """A committed checkpoint; tensors are named p/NAME, and KEY/NAME for the optimizer's KEY."""

    schema_version: Literal[3] = MANIFEST_VERSION
    run: str
    step: int
    layout: str
    """Script, ranks and accumulation: where they are the same, dropout goes on as it was."""
    args: dict[str, Any]
    global_batch: int
    seq_len: int
    model_hash: str
    config: dict[str, Any]
    data: dict[str, StoredData]
    scaler: dict[str, float] | None
    linear: str | None = None
    """Library of linear layers, with which a resumed run goes on; None if none was chosen."""
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]

    def text(self) -> str:
        """As it is written: with its own checksum in the first line's place of a key."""
        content = storable(self.model_dump(mode="json"))
        body = json.dumps(content, sort_keys=True)
        return json.dumps({"crc32": zlib.crc32(body.encode()), "manifest": content}, sort_keys=True)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint; ValueError or OSError if it is none, or was damaged."""
    text = plain_text(directory / MANIFEST)
    content = parse_json(text)
    if not isinstance(content, dict) or content.keys() != {"crc32", "manifest"}:
        raise ValueError("no manifest")
    body = json.dumps(content["manifest"], sort_keys=True)
    if zlib.crc32(body.encode()) != content["crc32"]:
        raise ValueError("the manifest's checksum is wrong")
    stored = content["manifest"]
    if isinstance(stored, dict) and stored.get("schema_version") != MANIFEST_VERSION:
        raise ValueError(OTHER_VERSION)
    try:
        manifest = Manifest.model_validate(stored)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    for name in manifest.files:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no name of a file beside the manifest")
    return manifest


def verify(directory: Path) -> Manifest:
    """The manifest of a checkpoint whose files are as they were written; else ValueError or OSError."""
    manifest = read_manifest(directory)
    for name, stored in manifest.files.items():
        path, written = plain_file(directory / name), (stored.bytes, stored.crc32)
        if path.stat().st_size != stored.bytes or checksum(path) != written:
            raise ValueError(f"{name} is not what was written")
    return manifest


def committed(directory: Path) -> list[Path]:
    """The committed checkpoints in a directory, oldest first."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted((p for p in directory.iterdir() if COMMITTED.fullmatch(p.name)), key=step_of)
    return []


def step_of(checkpoint: Path) -> int:
    """The step in the name of a committed checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def retain(directory: Path, files: Files) -> None:
    """Remove the committed checkpoints in a directory except the newest, which are KEPT.

    The older ones go only once the newest reads back as it was written.
    """
    checkpoints = committed(directory)
    if len(checkpoints) > KEPT:
        verify(checkpoints[-1])
    for path in checkpoints[:-KEPT]:  # what an interrupted removal leaves does not verify
        files.remove(path)


def newest(directory: Path, refused: list[str]) -> Path | None:
    """The newest checkpoint that verifies; why others did not is added to `refused`."""
    for path in reversed(committed(directory)):
        why = failure_of(verify, path)
        if why is None:
            return path
        refused.append(f"{path}: is left out: {why}")
    return None


def find_checkpoint(path: Path, notes: list[str]) -> Path:
    """The checkpoint at a path: itself, or a run's newest; UsageError where there is none.

    Why others were left out is added to `notes`.
    """
    if (path / MANIFEST).exists():
        if why := failure_of(verify, path):
            raise UsageError(f"--resume {path}: is damaged: {why}; give another")
        return path
    for directory in (path, path / "checkpoints"):
        if checkpoint := newest(directory, notes):
            return checkpoint
    why = f" ({notes[0]})" if notes else ""
    raise UsageError(f"--resume {path}: holds no checkpoint that can be read{why}")


def check_same_training(manifest: Manifest, path: Path, plan: Plan) -> None:
    """UsageError, by name, for whatever would make the resumed run another training."""
    work = plan.work
    if manifest.model_hash != work.config.hash:
        raise UsageError(f"--resume {path}: is of another model than {work.config.path}")
    # Not --init-from: what a run started from before does not matter.
    names = (*sorted(of_kind(LEARNT) - {"init_from"}), *ALSO_EQUAL)
    values = {name: getattr(plan.args, name) for name in names}
    values |= {"seq_len": work.batch.seq_len, "global_bsz": work.batch.global_batch}
    saved = present_flags(manifest.args)
    saved |= {"seq_len": manifest.seq_len, "global_bsz": manifest.global_batch}
    for name, value in values.items():
        if saved[name] != value:
            raise UsageError(
                f"{flag_of(name)} {value}: the checkpoint {path} was trained with {saved[name]}; give "
                "the same"
            )
    for name, file in describe_data(plan.args, manifest.data).items():
        stored = manifest.data.get(name, file)
        if (stored.bytes, stored.crc32) != (file.bytes, file.crc32):
            raise UsageError(
                f"{flag_of(name)}: the file is not the one that {path} was trained on; give the same"
            )


def describe_data(flags: DataFlags, known: dict[str, StoredData]) -> dict[str, StoredData]:
    """Each token file by its flag; one that has not changed since it was `known` is not read."""
    described = {}
    for name, path in (("data", flags.data), ("val_data", flags.val_data)):
        if path and path != "synthetic":
            stat, stored = Path(path).stat(), known.get(name)
            if not stored or (stored.bytes, stored.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
                size, crc = checksum(Path(path))
                stored = StoredData(bytes=size, crc32=crc, mtime_ns=stat.st_mtime_ns)
            described[name] = stored
    return described
