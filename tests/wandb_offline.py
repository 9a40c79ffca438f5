"""What --track wandb writes offline, read back by W&B's own messages: `make test-track`."""

import json
import shutil
import struct
from pathlib import Path

from wandb.proto import wandb_internal_pb2

from llm_train_bench.results.result_files import Step, read_result
from llm_train_bench.results.wandb_run import WandbRun

RUN = Path(__file__).parent / "sample" / "plain"


def records_of(data: bytes):
    """The records of a .wandb file: LevelDB's log format in blocks of 32 KiB, behind 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a record's head is not cut by a block's end
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


def test_the_file_that_wandb_sync_would_send(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = Path(shutil.copytree(RUN, tmp_path / "runs/plain"))
    result = read_result(run / "result.json")
    steps = [json.loads(text) for text in (run / "steps.jsonl").read_text().splitlines()]
    tracked = WandbRun(result, run)
    for step in steps:
        tracked([Step(**step)])
    assert "offline; send it by: wandb sync" in tracked.finish(result)

    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    losses, summary, artifacts = [], {}, []
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("artifact"):
            artifacts.append({entry.path for entry in record.artifact.manifest.contents})
        items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        losses += [json.loads(items["train/loss"])] if "train/loss" in items else []
        summary |= {i.key or "/".join(i.nested_key): i.value_json for i in record.summary.update}
    assert losses == [s["loss"] for s in steps] and artifacts == [{"result.json", "steps.jsonl"}]
    assert json.loads(summary["tokens_per_sec"]) == result.metrics.tokens_per_sec
