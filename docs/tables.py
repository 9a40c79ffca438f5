"""Write what code declares into the docs: metrics, flags, combinations (make docs)."""

import collections
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from llm_train_bench.base.tables import markdown_table
from llm_train_bench.results.metrics import FIELDS
from llm_train_bench.settings.flags import GRAPH_MODES, Args, Script
from llm_train_bench.settings.help_text import described_flags
from llm_train_bench.settings.rules import CONTRADICTIONS, FP8_RECIPES, TOGGLES, broken_rule

DOCS = Path(__file__).parent
# A place for what code declares, between <!-- NAME --> and <!-- end -->.
PLACE = re.compile(
    r"(<!-- (fields|flags|combinations|console)(?:: (\w+))?(?: from (\w+))? -->\n).*?(<!-- end -->)",
    re.DOTALL,
)

_GRAPHS = dict(pt_compile=True, compile_mode=GRAPH_MODES[0])
_OP = dict(sac_freq="1/1", sac_policy="op")
# The toggles, and the flags of each of their values. `graphs` are the compile modes that record CUDA
# graphs; the layout is of `tokens` under --tp or --cp, of `experts` under --ep (with or without them).
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "entrypoint": {script: {} for script in Script},
    "amp": {name: dict(amp=name) for name in ("off", "bf16", "fp16")},
    "fp8": {"off": {}} | {name: dict(use_fp8=True, fp8_backend=name) for name in FP8_RECIPES},
    "compile": {"off": {}, "on": dict(pt_compile=True), "graphs": _GRAPHS},
    "sac": {"off": {}, "block": dict(sac_freq="1/1"), "op": _OP},
    "layout": {"data": {}, "tokens": dict(tp=2), "experts": dict(ep=2)},
}
# One cell of the table of toggles.
Combination = collections.namedtuple("Combination", AXES, defaults=["data"])


def refusal(cell: Combination) -> str | None:
    """The message of the rule that refuses a combination; None if it is supported."""
    flags = collections.ChainMap(*(AXES[axis][value] for axis, value in cell._asdict().items()))
    return broken_rule(Args(config="", **flags), cell.entrypoint)


def combinations_table() -> str:
    """The tables of docs/COMBINATIONS.md: the combinations that work, and all rules."""
    columns = {"off": "eager", "on": "`--pt-compile`", "graphs": "with CUDA graphs"}
    lines = [f"| | {' | '.join(columns.values())} |", "|---|---|---|---|"]
    rows = [(amp, "off") for amp in AXES["amp"]] + [("bf16", fp8) for fp8 in ("te", "torchao")]
    for amp, fp8 in rows:
        name = f"`--amp {amp}`" if fp8 == "off" else f"`--use-fp8 --fp8-backend {fp8}`"
        cells = [_cell(amp, fp8, compiled) for compiled in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rules = (f"- {message}." for message, _ in (*TOGGLES, *CONTRADICTIONS))
    return "\n".join(["", *lines, "", *rules, ""])


def _cell(amp: str, fp8: str, compiled: str) -> str:
    names = {3: "✓", 2: "✓ (not with `--sac-policy op`)", 1: "✓ (not with `--sac-freq`)", 0: "✗"}
    parts: dict[str, list[str]] = {}
    for script in Script:
        cells = [Combination(script, amp, fp8, compiled, sac) for sac in AXES["sac"]]
        works = sum(refusal(cell) is None for cell in cells)
        parts.setdefault(names[works], []).append(f"`{script}`")
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(f"{what} in {', '.join(scripts)}" for what, scripts in parts.items())


def field_list(section: str, names: list[str]) -> str:
    """What each of these fields of fields.toml is, with its unit."""
    lines = []
    for name in names:
        row = FIELDS[section][name]
        unit = f" [{row['unit']}]" if "unit" in row else ""
        lines.append(f"- `{name}`{unit}: {row if isinstance(row, str) else row['text']}\n")
    return "".join(lines)


def console_table() -> str:
    """The lines of a run's final table, and the fields in each."""
    rows = [
        (line, text.replace("{", "`").replace("}", "`")) for line, text in FIELDS["console"].items()
    ]
    return markdown_table(("line", "fields"), rows, left=("fields",))


def flag_list() -> str:
    """Every flag of the training scripts in its group."""
    lines = []
    for title, flags in described_flags(Args):
        lines.append(f"\n## {title}\n\n")
        lines += [f"- `{usage}`: {text}\n" for usage, text in flags]
    return "".join(lines) + "\n"


LISTS = {"flags": flag_list, "console": console_table, "combinations": combinations_table}


def with_tables(page: str) -> str:
    """A page with its lists and tables as the code declares them."""
    starts = [start for *_, start, _ in PLACE.findall(page) if start]

    def made(match: re.Match) -> str:
        head, kind, section, start, end = match.groups()
        if kind in LISTS:
            return head + LISTS[kind]() + end
        names = list(FIELDS[section])
        if start:
            later = starts[starts.index(start) + 1 :]
            names = names[names.index(start) : names.index(later[0]) if later else None]
        return head + field_list(section, names) + end

    return PLACE.sub(made, page)


def main() -> None:
    """Rewrite the pages that differ."""
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (new := with_tables(page)) != page:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
