"""What a checkpoint holds, which is the newest good one, and whether a run may go on from it.

Needs no torch. There is no file that names the latest checkpoint: the newest directory whose manifest
and checksums agree is the latest.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.strict import Strict, first_problem
from llm_train_bench.formulas.work import Work
from llm_train_bench.model.json_keys import parse_json, plain_file
from llm_train_bench.model.stored import Part
from llm_train_bench.results.result_files import storable
from llm_train_bench.results.schema import Lineage
from llm_train_bench.run.checkpoint.durable import Files, checksum
from llm_train_bench.settings.flags import LEARNT, DataFlags, flag_of, of_kind

MANIFEST = "manifest.json"
COMMITTED = re.compile(r"step-(\d{8,})")
# Flags that the learning rate's curve, or the data, depend on besides the hyperparameters.
ALSO_EQUAL = ("n_steps", "warmup_steps", "pad_vocab")


class StoredTensor(Strict):
    """A tensor's format, whole shape and parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part]


class StoredFile(Strict):
    """A file's size and CRC-32."""

    bytes: int
    crc32: int


class StoredData(StoredFile):
    """A token file's size, CRC-32 and time of change; where size and time agree nothing is read."""

    mtime_ns: int


class Manifest(Strict):
    """A committed checkpoint; tensors are named p/NAME, and KEY/NAME for the optimizer's KEY."""

    schema_version: Literal[2] = 2
    run: str
    lineage: Lineage
    step: int
    samples: int
    world: int
    layout: str
    """Script, ranks and accumulation: where they are the same, dropout goes on as it was."""
    args: dict[str, Any]
    global_batch: int
    seq_len: int
    model_hash: str
    config: dict[str, Any]
    data: dict[str, StoredData]
    loss: float | None
    scaler: dict[str, float] | None
    versions: dict[str, str]
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]

    def text(self) -> str:
        """As it is written: with its own checksum in the first line's place of a key."""
        content = storable(self.model_dump(mode="json"))
        body = json.dumps(content, sort_keys=True)
        return json.dumps({"crc32": zlib.crc32(body.encode()), "manifest": content}, sort_keys=True)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint; ValueError or OSError if it is none, or was damaged."""
    text = plain_file(directory / MANIFEST).read_text(encoding="utf-8")
    content = parse_json(text)
    if not isinstance(content, dict) or content.keys() != {"crc32", "manifest"}:
        raise ValueError("no manifest")
    body = json.dumps(content["manifest"], sort_keys=True)
    if zlib.crc32(body.encode()) != content["crc32"]:
        raise ValueError("the manifest's checksum is wrong")
    try:
        manifest = Manifest.model_validate(content["manifest"])
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
    """The committed checkpoints below a directory of checkpoints, oldest first."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = [p for p in directory.iterdir() if COMMITTED.fullmatch(p.name)]
        return sorted(found, key=step_of)
    return []


def step_of(checkpoint: Path) -> int:
    """The step that a committed checkpoint's name tells."""
    return int(COMMITTED.fullmatch(checkpoint.name)[1])


def retain(places: Sequence[Path], keep: int, files: Files) -> None:
    """Remove all committed checkpoints of some directories except the newest `keep`.

    Of those, only once the newest reads back as it was written: then the others are not needed.
    """
    newest_first = list(candidates(places))
    if newest_first[keep:]:
        verify(newest_first[0])
    for path in newest_first[keep:]:  # half of one is no checkpoint: it does not verify
        files.remove(path)


def clean(directory: Path, files: Files) -> None:
    """Remove what a run that was killed left unfinished; only who owns the directory may."""
    for path in directory.glob(".*"):
        if path.is_dir() and path.name.startswith(".step-"):
            files.remove(path)


def candidates(places: Sequence[Path]) -> list[Path]:
    """All committed checkpoints of some directories, the newest step first."""
    found = [path for place in places for path in committed(place)]
    return sorted(found, key=step_of, reverse=True)


def newest(places: Sequence[Path], refused: list[str] | None = None) -> Path | None:
    """The newest checkpoint that verifies; why others did not is added to `refused`."""
    for path in candidates(places):
        try:
            verify(path)
        except (OSError, ValueError) as error:
            if refused is not None:
                refused.append(f"{path}: is left out: {getattr(error, 'strerror', None) or error}")
            continue
        return path
    return None


def find_given(given: Path, notes: list[str]) -> Path:
    """The checkpoint that a path means: itself, or a run's newest; UsageError where it has none.

    Why others were left out is added to `notes`.
    """
    if (given / MANIFEST).exists():
        try:
            verify(given)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"--resume {given}: is damaged: {why}; give another") from None
        return given
    if found := newest([given, given / "checkpoints"], notes):
        return found
    why = f" ({notes[0]})" if notes else ""
    raise UsageError(f"--resume {given}: holds no checkpoint that can be read{why}")


def check_same_training(
    manifest: Manifest,
    where: Path,
    work: Work,
    n_steps: int,
    given: dict[str, Any],
    files: DataFlags,
) -> None:
    """UsageError, by name, for whatever would make the resumed run another training.

    `given` are all flags of the run, or none if they need not be the same (--resume-anyway).
    """
    if manifest.model_hash != work.config.hash:
        raise UsageError(f"--resume {where}: is of another model than {work.config.path}")
    if manifest.step > n_steps:
        raise UsageError(
            f"--resume {where}: is at step {manifest.step}, and this run ends at {n_steps}"
        )
    if not given:
        return
    # Not --init-from: what a run started from before does not matter.
    told = {name: given[name] for name in (*sorted(of_kind(LEARNT) - {"init_from"}), *ALSO_EQUAL)}
    told |= {"seq_len": work.batch.seq_len, "global_bsz": work.batch.global_batch}
    saved = manifest.args | {"seq_len": manifest.seq_len, "global_bsz": manifest.global_batch}
    for name, value in told.items():
        if name in saved and saved[name] != value:
            raise UsageError(
                f"{flag_of(name)} {value}: the checkpoint {where} was trained with {saved[name]}; give "
                "the same, or --resume-anyway"
            )
    for name, found in describe_data(files, manifest.data).items():
        stored = manifest.data.get(name, found)
        if (stored.bytes, stored.crc32) != (found.bytes, found.crc32):
            raise UsageError(
                f"{flag_of(name)}: the file is not the one that {where} was trained on; give the same, "
                "or --resume-anyway"
            )


def describe_data(files: DataFlags, known: dict[str, StoredData]) -> dict[str, StoredData]:
    """Each token file by its flag; one that has not changed since it was `known` is not read."""
    found = {}
    for name in ("data", "val_data"):
        path = getattr(files, name)
        if path and path != "synthetic":
            stat = Path(path).stat()
            size, seen = stat.st_size, known.get(name)
            if seen and (seen.bytes, seen.mtime_ns) == (size, stat.st_mtime_ns):
                crc = seen.crc32
            else:
                size, crc = checksum(Path(path))
            found[name] = StoredData(bytes=size, crc32=crc, mtime_ns=stat.st_mtime_ns)
    return found
