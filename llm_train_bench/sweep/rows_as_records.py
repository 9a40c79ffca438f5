"""A sweep's rows as records, which compare.py's table shows. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from llm_train_bench.base.errors import UsageError
from llm_train_bench.compare.read_results import read_json
from llm_train_bench.compare.records import LogFacts, Record
from llm_train_bench.compare.setting import meaningful
from llm_train_bench.results.remarks import Remark
from llm_train_bench.settings.flags import present_flags
from llm_train_bench.sweep.cell_runs import CellRow


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
    why = ": ".join(filter(None, (row["status"], (row.get("error") or "")[:160])))
    if row.get("result"):
        try:
            (record,) = read_json(Path(row["result"]), LogFacts())
            if row["status"] == "timeout":
                record.remark(why, "invalid")
            return record
        except (OSError, ValueError, UsageError):
            pass  # it was deleted since: the row says what it was
    flags = present_flags(row.get("flags") or row["axes"])
    return Record(
        path=row["key"],
        suite="llm-train-bench",
        label=row["key"],
        model=row["model"],
        seq_len=row.get("seq_len"),
        arguments=meaningful(flags) | {"script": row.get("script")},
        remarks=[Remark(kind="invalid", text="its result.json is gone" if why == "ok" else why)],
    )
