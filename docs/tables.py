"""Write the tables of the docs that code declares: fields of a result, combinations of toggles, logs.

    python docs/tables.py     (make docs)

A table stands behind a comment that names its fields: a class, or one and the first of its fields. It
goes on to the next such comment of the class. A test holds the pages against this.
"""

import dataclasses
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from llm_train_bench.compare.log_formats import RUN, TABLE
from llm_train_bench.formulas.work import Batch
from llm_train_bench.results import schema
from llm_train_bench.results.metrics import Metrics, shown_of
from llm_train_bench.settings.combinations import combinations_table

DOCS = Path(__file__).parent
MARK = re.compile(r"<!-- fields: (\w+)(?: from (\w+))? -->\n(?:\|.*\n)*")
LOGS = re.compile(r"<!-- logs -->\n\n(?:\|.*\n)*")
COMBINATIONS = re.compile(r"<!-- combinations -->\n\n\|.*?\n\n(- .*\n)+", re.DOTALL)


def meanings(name: str) -> dict[str, tuple[str, str]]:
    """Unit and meaning of each field of a class of the result's schema."""
    if name == "Batch":
        return {f.name: ("", f.metadata["about"]) for f in dataclasses.fields(Batch)}
    kind = getattr(schema, name)
    unit = (lambda field: shown_of(field)["unit"]) if kind is Metrics else (lambda field: "")
    return {n: (unit(n), field.description) for n, field in kind.model_fields.items()}


def logs_table() -> str:
    """What compare.py reads in the logs of each suite."""
    lines = ["| suite | in its steps | in the rest of its log |", "|---|---|---|"]
    for suite, rows in TABLE.items():
        steps, whole = {}, {}
        for quantity, _, unit, of, over in rows:
            (whole if over == RUN else steps).setdefault(quantity.removesuffix("_s"), set()).add(
                ""
                if over == RUN
                else f" ({of}, {over})"
                if unit != "" or "per_sec" in quantity
                else ""
            )
        texts = [
            ", ".join(f"{name}{' and'.join(sorted(found))}" for name, found in part.items())
            for part in (steps, whole)
        ]
        lines.append(
            f"| {suite} | {texts[0] or 'dictionaries, as in `trainer_state.json`'} | {texts[1]} |"
        )
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """A page with its tables as the code declares them."""
    starts = [(m[1], m[2]) for m in MARK.finditer(page)]

    def table(match: re.Match) -> str:
        name, first = match[1], match[2]
        fields = meanings(name)
        names = list(fields)
        later = [f for n, f in starts[starts.index((name, first)) + 1 :] if n == name]
        begin = names.index(first) if first else 0
        end = names.index(later[0]) if later else len(names)
        lines = [match[0].splitlines()[0]]
        units = any(fields[n][0] for n in names[begin:end])
        lines += ["| field | unit | meaning |", "|---|---|---|"] if units else [
            "| field | meaning |", "|---|---|"]  # fmt: skip
        for n in names[begin:end]:
            unit, meaning = fields[n]
            lines.append(f"| `{n}` | {unit} | {meaning} |" if units else f"| `{n}` | {meaning} |")
        return "\n".join(lines) + "\n"

    page = MARK.sub(table, page)
    page = LOGS.sub(lambda _: f"<!-- logs -->\n\n{logs_table()}", page)
    return COMBINATIONS.sub(f"<!-- combinations -->\n\n{combinations_table()}\n", page)


def main() -> None:
    """Rewrite the pages that differ."""
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (new := with_tables(page)) != page:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
