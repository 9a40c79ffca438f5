"""--save: runs into a file of runs, whatever else writes to it. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.files import locked, write_whole
from llm_train_bench.base.strict import first_problem
from llm_train_bench.base.tables import grouped
from llm_train_bench.compare.gate import rate_of, unusable
from llm_train_bench.compare.read_results import record_of_result
from llm_train_bench.compare.records import Record
from llm_train_bench.compare.run_files import (
    MOST_BYTES,
    RunsFile,
    SavedRun,
    SavedSetting,
    file_text,
    read_runs_file,
)
from llm_train_bench.compare.setting import identity, name_by_itself
from llm_train_bench.compare.shareable import shareable


def save_runs(runs: Sequence[Record], path: Path) -> tuple[list[str], int]:
    """Save runs of ours by setting; returns lines to print, and 5 if a run was left out, otherwise 0.

    In an existing file a setting that is there is replaced, and keeps its tolerance; others stay.
    """
    if path.name in ("result.json", "steps.jsonl"):
        raise UsageError(f"--save {path}: would replace a run's own file; use another name")
    lines = [f"left out {r.label}: {why}" for r in runs if (why := unusable(r))]
    code = 5 if lines else 0
    usable = [r for r in runs if not unusable(r)]
    if not usable:
        return lines, code
    new = grouped(usable, identity)
    with locked(path):
        stored = read_runs_file(path).settings if path.exists() else []
        tolerances: dict[str, float | None] = {}
        entries = []
        for entry in stored:
            keys = [identity(record_of_result(run.result)) for run in entry.runs]
            tolerances |= dict.fromkeys(keys, entry.tolerance)
            entry.runs = [run for run, key in zip(entry.runs, keys, strict=True) if key not in new]
            entries += [entry] if entry.runs else []
        for key, members in new.items():
            saved = [_saved(r) for r in members]
            name = name_by_itself(record_of_result(saved[0].result))
            entry = SavedSetting(setting=name, runs=saved)
            if tolerances.get(key) is not None:
                entry.tolerance = tolerances[key]
            entries.append(entry)
            rate = rate_of(members).value
            n = f"{len(members)} run{'s' * (len(members) > 1)}"
            disturbed = sorted({text for r in members for text in r.texts("disturbed")})
            doubt = f"; disturbed: {', '.join(disturbed)}" if disturbed else ""
            lines.append(f"saved {entry.setting}: {n}, {rate:,.0f} tokens/s per device{doubt}")
        text = file_text(RunsFile(settings=sorted(entries, key=lambda entry: entry.setting)))
        if len(text) > MOST_BYTES:
            raise UsageError(f"--save {path}: would be larger than {MOST_BYTES // 2**20} MiB")
        write_whole(path, text)
    return lines, code


def _saved(r: Record) -> SavedRun:
    """A run as a file has it."""
    first = r.result.first_step if r.result else 0  # the figures are of the last attempt
    last = [step for step in r.steps if step["step"] >= first]
    steps = [{k: v for k, v in step.items() if k != "saved"} for step in last]
    try:
        return SavedRun.model_validate({"result": r.result and shareable(r.result), "steps": steps})
    except ValidationError as error:
        raise UsageError(f"--save: {r.path}: {first_problem(error)}") from None
