"""Run one cell of a sweep in its own process; whatever happens becomes a row. Needs no torch."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llm_train_bench.base.children import child
from llm_train_bench.base.errors import one_line, printable, printable_data
from llm_train_bench.base.files import ROOT, hold_lock, sync_to_disk, write_whole
from llm_train_bench.base.machine import cpu_name, detect_platform, installed_version
from llm_train_bench.model.config import ConfigError, load_config
from llm_train_bench.model.json_files import parse_json, plain_text
from llm_train_bench.results.result_files import read_result
from llm_train_bench.results.schema import Result
from llm_train_bench.sweep.grid import Cell

CellRow = dict[str, Any]


def cell_key(cell: Cell, repeat: int | str) -> str:
    """A setting's name, the same in every sweep with one PyTorch: model, hash, number of the repeat.

    Another CPU has other names: its speed is not this machine's.
    """
    details = [f"torch {installed_version('torch')}"]
    if "cpu" in (cell.args.device, detect_platform()):
        details.append(cpu_name())
    text = json.dumps([cell.script, *cell.argv(), *_versions(cell), *details])
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{cell.model}-{digest}-{repeat}"


def _versions(cell: Cell) -> list[str]:
    """The present versions of a setting's files: an edited file makes another setting."""
    versions, flags = [], dict(cell.flags)
    with contextlib.suppress(ConfigError):
        versions.append(load_config(cell.config).hash)
    for name in ("data", "val_data"):
        with contextlib.suppress(OSError, KeyError):  # none given, synthetic, or not there yet
            about = Path(flags[name]).stat()
            versions.append(f"{name} {about.st_size} {about.st_mtime_ns}")
    return versions


def run_cell(cell: Cell, repeat: int | str, directory: Path, timeout_s: float) -> CellRow:
    """Run a setting once below `directory`/runs, unless an earlier sweep finished it; return its row.

    The status is the run's own, `timeout`, or `failed` with the last line it printed.
    """
    row = first_of_row(cell, repeat)
    key = row["key"]
    runs = directory / ("probes" if repeat == "probe" else "runs")
    run, log = runs / key, directory / "logs" / f"{key}.log"
    command = [sys.executable, str(ROOT / cell.script), *cell.argv()]
    command += ["--output-dir", str(runs), "--run-name", key]
    if (result := _finished(run)) is None:
        shutil.rmtree(run, ignore_errors=True)  # left by a sweep that was killed in the middle
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        ended, why = _run(command, log, timeout_s)
        row["wall_s"] = round(time.monotonic() - began, 3)
        result = _finished(run)
        if ended == "timeout" or result is None:
            text = log.read_text("utf-8", errors="replace").strip() or "ended without a word"
            if (run / "result.json").exists():
                row["result"] = str(run / "result.json")
            row |= {"status": ended, "error": why or printable(one_line(text.splitlines()[-1]))}
            return row | {"command": command}
        _name_for_tensorboard(cell, repeat, directory, run / "tensorboard")
    row |= {"status": result.status, "error": result.error, "result": str(run / "result.json")}
    return row | {
        "tokens_per_sec": result.metrics.tokens_per_sec, "step_times_s": result.step_times_s,
        "hardware": result.device.hardware, "invalid": "; ".join(result.invalid)}  # fmt: skip


def _name_for_tensorboard(cell: Cell, repeat: int | str, directory: Path, events: Path) -> None:
    """Link a run's events below `directory`/tensorboard, by the setting's name in place of a hash."""
    name = re.sub(r"[/\\\0]", "_", f"{cell.label()} #{repeat}")[:200]
    link = directory / "tensorboard" / name
    with contextlib.suppress(OSError):  # without links the runs have their names still
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        if events.is_dir():
            link.symlink_to(os.path.relpath(events, link.parent), target_is_directory=True)


def first_of_row(cell: Cell, repeat: int | str) -> CellRow:
    """What is known of a run's row before it runs."""
    return {
        "key": cell_key(cell, repeat), "repeat": repeat, "script": cell.script,
        "model": cell.model, "flags": dict(cell.flags), "seq_len": cell.resolved["seq_len"],
        "axes": {name: dict(cell.flags).get(name) for name in cell.axes}}  # fmt: skip


def outcome(row: CellRow) -> str:
    """A row's status, and its rate or what went wrong."""
    if row["status"] == "ok":
        return f"ok {row['tokens_per_sec']:,.0f} tokens/s"
    return f"{row['status']}: {(row.get('error') or '')[:160]}"


def _run(command: list[str], log: Path, timeout_s: float) -> tuple[str, str | None]:
    """How the process ended, unless its result says otherwise; and why, if it cannot say so."""
    with (
        log.open("wb") as output,
        child(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "timeout", f"not done after {timeout_s:g} s"
    if process.returncode == -signal.SIGKILL:
        return "failed", "killed by SIGKILL, as the kernel does when memory is full"
    if process.returncode < 0:
        return "failed", f"killed by {signal.Signals(-process.returncode).name}"
    # 3 is out of memory. The rank that had it may leave the writing rank no time for a result.
    return ("oom" if process.returncode == 3 else "failed"), None


# Runs whose result says nothing of how they would have ended.
UNFINISHED = ("running", "killed", "unknown", "interrupted", "preempted")


def _finished(run: Path) -> Result | None:
    with contextlib.suppress(OSError, ValueError):
        result = read_result(run / "result.json")
        return None if result.status in UNFINISHED else result
    return None


def _is_whole(row: Any) -> bool:
    """Whether a stored row can be used: someone may have edited the file."""
    if not isinstance(row, dict) or not isinstance(row.get("axes"), dict):
        return False
    texts = [row.get(n) for n in ("key", "model", "status", "error", "result", "script")]
    if not all(isinstance(text, str | None) for text in texts) or None in texts[:3]:
        return False
    figures = [row.get("wall_s", 1.0)]
    figures += [row.get("tokens_per_sec")] if row["status"] == "ok" else []
    return all(isinstance(x, int | float) and 0 < x < 1e30 for x in figures)


class Rows:
    """rows.jsonl: one line per finished run, on disk before the next starts."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, CellRow] = {}
        # Until this process ends.
        self.lock = hold_lock(path.with_name("sweep.lock"), "--output-dir")
        lines = plain_text(path, 1024, errors="replace").split("\n") if path.exists() else []
        for number, line in enumerate(lines, 1):
            with contextlib.suppress(ValueError):
                row = printable_data(parse_json(line))
                json.dumps(row, allow_nan=False)
                if _is_whole(row):
                    self.rows[row["key"]] = row
                    continue
            if number < len(lines):  # the last may be cut off: the sweep was killed
                print(f"{path}:{number}: is damaged; its setting runs again")
        self._rewrite()

    def forget(self, *statuses: str) -> None:
        """Drop rows with these statuses, and what their runs wrote."""
        for key, row in list(self.rows.items()):
            if row.get("status") in statuses:
                for runs in ("runs", "probes"):
                    shutil.rmtree(self.path.parent / runs / key, ignore_errors=True)
                del self.rows[key]
        self._rewrite()

    def _rewrite(self) -> None:
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in self.rows.values()))

    def add(self, row: CellRow) -> None:
        """Append and flush to disk."""
        self.rows[row["key"]] = row
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
        sync_to_disk(self.path)
