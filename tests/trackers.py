"""What --track writes, read back by each library itself: `make test-track`, outside `make test`."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from llm_train_bench.results.result_files import Step, read_result
from llm_train_bench.results.trackers import TRACKERS, TrackedRun, final_figures

RUN = Path(__file__).parent / "sample" / "plain"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's directory and result; nobody is logged in anywhere."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = tmp_path / "runs" / "plain"
    shutil.copytree(RUN, directory)
    return directory, read_result(directory / "result.json")


def handed_on(name, run):
    directory, result = run
    steps = [json.loads(text) for text in (directory / "steps.jsonl").read_text().splitlines()]
    tracked = TrackedRun(name, result, directory)
    for step in steps:
        tracked([Step(**step)])
    line = tracked.finish(result)
    assert "not tracked" not in line, line
    return line, steps, final_figures(result)


def test_every_tracker_is_read_back_here():
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert here - set(TRACKERS) == {"every_tracker_is_read_back_here"} and set(TRACKERS) <= here


def test_openmetrics(run):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    _, _, final = handed_on("openmetrics", run)
    text = (run[0] / "metrics.prom").read_text()
    families = {f.name: f.samples for f in text_string_to_metric_families(text)}
    assert len(families) == len(final)
    kinds = {f.name: f for f in text_string_to_metric_families(text)}
    window = kinds["llm_train_bench_window_seconds"]
    assert window.unit == "seconds" and window.documentation.startswith("Sum of the times")
    assert kinds["llm_train_bench_peak_rss_bytes"].samples[0].value == final["peak_rss_gib"] * 2**30
    (sample,) = families["llm_train_bench_tokens_per_sec"]
    assert sample.value == final["tokens_per_sec"] and sample.labels["run"] == run[1].run_name


def test_mlflow(run):
    from mlflow.tracking import MlflowClient

    line, steps, final = handed_on("mlflow", run)
    client = MlflowClient(tracking_uri=(run[0].parent / "mlruns").resolve().as_uri())
    experiment = client.get_experiment_by_name("llm-train-bench")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.run_name == run[1].run_name and logged.info.run_id in line
    history = client.get_metric_history(logged.info.run_id, "train/loss")
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == [s["loss"] for s in steps]
    assert logged.data.metrics["final/tokens_per_sec"] == final["tokens_per_sec"]
    assert logged.data.params["bsz"] == str(run[1].args["bsz"])
    files = {file.path for file in client.list_artifacts(logged.info.run_id)}
    assert files == {"result.json", "steps.jsonl"}


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


def test_wandb(run):
    """Offline: the file that `wandb sync` would send, by W&B's own messages."""
    from wandb.proto import wandb_internal_pb2

    line, steps, final = handed_on("wandb", run)
    assert "offline; send it by: wandb sync" in line
    (path,) = run[0].glob("wandb/offline-run-*/*.wandb")
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
    assert json.loads(summary["tokens_per_sec"]) == final["tokens_per_sec"]
