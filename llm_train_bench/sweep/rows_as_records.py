"""A sweep's rows: as records, which compare.py's table shows, and as a CSV. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.tables import write_rows
from llm_train_bench.compare.read_results import read_json
from llm_train_bench.compare.records import LogFacts, Record
from llm_train_bench.compare.setting import meaningful
from llm_train_bench.results.metrics import CSV_COLUMNS
from llm_train_bench.results.remarks import Remark
from llm_train_bench.settings.flags import present_flags
from llm_train_bench.sweep.cell_runs import CellRow

# Grams of CO2 per kWh: the world's mean of 2024 (IEA, Electricity 2025).
GCO2_PER_KWH = 445.0


def write_csv(rows: list[CellRow], path: Path) -> None:
    """All rows, without the lists; a column for each axis.

    `kwh` is the energy of the window, `gco2` that times the grid's grams of CO2 per kWh.
    """
    rows = [{"key": row["key"]} | row["axes"] | row for row in rows]
    for row in rows:
        if joules := row.get("energy_j"):
            row |= {"kwh": joules / 3.6e6, "gco2": joules / 3.6e6 * GCO2_PER_KWH}
    names = dict.fromkeys(name for row in rows for name in row)
    last = (*CSV_COLUMNS, "kwh", "gco2", "error", "result", "command")
    names = [n for n in names if n not in (*last, "step_times_s", "axes", "flags")]
    names += [n for n in last if any(n in row for row in rows)]
    write_rows(path, rows, names)


def records_of_rows(rows: Sequence[CellRow]) -> list[Record]:
    """Each row's run; one that left no result is invalid, and has the machine of the others."""
    records = [_record_of_row(row) for row in rows]
    known = next((r for r in records if r.result), None)
    for r, row in zip(records, rows, strict=True):
        if known and not r.result:
            r.hardware, r.n_gpus, r.conditions = known.hardware, known.n_gpus, known.conditions
            own = {k: v for k, v in (r.arguments or {}).items() if k in row["axes"]}
            r.arguments = (known.arguments or {}) | own
    return records


def _record_of_row(row: CellRow) -> Record:
    if row.get("result"):
        try:
            return read_json(Path(row["result"]), LogFacts())[0]
        except (OSError, ValueError, UsageError):
            pass  # it was deleted since: the row says what it was
    flags = present_flags(row.get("flags") or row["axes"])
    error = f": {row['error'][:160]}" if row.get("error") else ""
    rate = row.get("tokens_per_sec_per_gpu")
    text = "its result.json is gone" if row["status"] == "ok" else f"{row['status']}{error}"
    return Record(
        path=row["key"],
        suite="llm-train-bench",
        label=row["key"],
        model=row["model"],
        seq_len=row.get("seq_len"),
        tokens_per_sec_per_gpu=rate,
        arguments=meaningful(flags) | {"script": row.get("script")},
        remarks=[Remark(kind="invalid", text=text)],
    )
